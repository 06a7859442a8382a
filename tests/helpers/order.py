# SPDX-License-Identifier: Apache-2.0
"""Which files of tests go first where several processes share them, file by file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, TypeVar

FOLDER = Path(__file__).resolve().parents[1]

LONG_FILES_S: Mapping[str, float] = {
    "benchmarks/test_ops_cpu.py": 35,
    "benchmarks/test_several_hosts.py": 10,
    "benchmarks/systems/test_processes.py": 30,
    "cli/test_commands.py": 65,
    "compat/test_fixes.py": 30,
    "compat/test_hook.py": 15,
    "compat/test_switching.py": 40,
    "distdgl/test_conformance.py": 160,
    "examples/test_distdgl_examples.py": 50,
    "exchange/test_lost_ranks.py": 20,
    "exchange/test_several_hosts.py": 30,
    "exchange/test_shared_sums.py": 15,
    "graph/test_modules.py": 25,
    "graph/test_row_products.py": 15,
    "graph/test_split_exchange.py": 50,
    "helpers/test_world.py": 15,
    "launch/test_cluster.py": 60,
    "launch/test_commands.py": 25,
    "launch/test_distdgl.py": 35,
    "launch/test_distdgl_jobs.py": 35,
    "launch/test_remote.py": 15,
    "ops/cpu/test_kernels.py": 10,
    "ops/cpu/test_memory.py": 20,
    "ops/cuda/test_layout.py": 5,
    "ops/test_backends.py": 70,
    "ops/test_functions.py": 15,
    "ops/test_library.py": 25,
    "pretend_gpu/test_training.py": 15,
    "sampling/test_store.py": 100,
    "test_layering.py": 5,
    "training/test_approximate.py": 25,
    "training/test_checkpoint.py": 20,
    "training/test_ddp_sums.py": 20,
    "training/test_compile.py": 30,
    "training/test_distdgl_full_graph.py": 40,
    "training/test_edge_keys.py": 15,
    "training/test_exactness.py": 155,
    "training/test_example.py": 20,
    "training/test_loader.py": 15,
    "training/test_loader_masks.py": 10,
    "training/test_loader_mistakes.py": 15,
    "training/test_loader_models.py": 25,
    "training/test_loader_plans.py": 15,
    "training/test_optimize.py": 45,
    "training/test_order_of_products.py": 20,
    "training/test_partial_sum_prices.py": 15,
    "training/test_pieces.py": 15,
    "training/test_planning.py": 15,
    "training/test_products_beside.py": 45,
    "training/test_replaced_plans.py": 25,
    "training/test_split_layers.py": 55,
    "training/test_split_volume.py": 25,
    "training/test_static_results.py": 110,
    "training/test_trainer.py": 45,
    "training/test_trials_of_loaders.py": 45,
}
"""Files that take longer, or much less long, than their number of tests tells: about how long, in a process of two on
two cores. One that is missing, or wrong by half, costs some idle time at the end of a run and nothing else."""

SECONDS_OF_A_TEST = 0.3
"""Of other files."""


class HasPath(Protocol):
    """A test: what is looked at of `pytest.Item`."""

    @property
    def path(self) -> Path: ...


T = TypeVar("T", bound=HasPath)


def longest_files_first(items: list[T]) -> list[T]:
    """Returns the tests with those of long files first, so that no long file is begun when all others have ended.

    Files stay together, and the order within each.
    """
    seconds = {path: seconds_of(path, num_tests) for path, num_tests in Counter(item.path for item in items).items()}
    return sorted(items, key=lambda item: (-seconds[item.path], item.path))


def seconds_of(path: Path, num_tests: int) -> float:
    name = path.relative_to(FOLDER).as_posix() if path.is_relative_to(FOLDER) else ""
    return LONG_FILES_S.get(name, num_tests * SECONDS_OF_A_TEST)
