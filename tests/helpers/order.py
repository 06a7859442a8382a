# SPDX-License-Identifier: Apache-2.0
"""Which files of tests go first where several processes share them, file by file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, TypeVar

FOLDER = Path(__file__).resolve().parents[1]

LONG_FILES_S: Mapping[str, float] = {
    "benchmarks/test_ops_cpu.py": 40,
    "benchmarks/test_several_hosts.py": 25,
    "benchmarks/test_systems.py": 80,
    "cli/test_commands.py": 100,
    "compat/test_hook.py": 40,
    "compat/test_sampler_results.py": 20,
    "compat/test_switching.py": 50,
    "distdgl/test_conformance.py": 200,
    "examples/test_distdgl_examples.py": 100,
    "exchange/test_lost_ranks.py": 50,
    "exchange/test_several_hosts.py": 30,
    "graph/test_modules.py": 45,
    "graph/test_row_products.py": 60,
    "launch/test_cluster.py": 70,
    "launch/test_commands.py": 40,
    "launch/test_distdgl_jobs.py": 60,
    "launch/test_remote.py": 40,
    "ops/cpu/test_memory.py": 30,
    "ops/cpu/test_threads.py": 30,
    "pretend_gpu/test_mixed_devices.py": 40,
    "pretend_gpu/test_training.py": 40,
    "sampling/test_store.py": 140,
    "training/test_approximate.py": 50,
    "training/test_checkpoint.py": 40,
    "training/test_compile.py": 60,
    "training/test_distdgl_full_graph.py": 60,
    "training/test_exactness.py": 140,
    "training/test_example.py": 40,
    "training/test_loader.py": 50,
    "training/test_optimize.py": 60,
    "training/test_pieces.py": 35,
    "training/test_plan_trials.py": 100,
    "training/test_products_beside.py": 50,
    "training/test_replaced_plans.py": 30,
    "training/test_split_layers.py": 70,
    "training/test_split_volume.py": 35,
    "training/test_static_results.py": 120,
    "training/test_trainer.py": 80,
}
"""Files that take longer than their number of tests tells: about how long, in a process of four on two cores. One that
is missing, or wrong by half, costs some idle time at the end of a run and nothing else."""

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
