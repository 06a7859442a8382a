# SPDX-License-Identifier: Apache-2.0
"""The systems that are compared, by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

from benchmarks.systems.adaptors.base import System
from benchmarks.systems.job import Job


def _load(module: str, name: str, job: Job, **options: Any) -> System:
    # Imported at first use: a peer's adaptor changes functions of DGL, which no other system may see.
    system: System = getattr(import_module(f"benchmarks.systems.adaptors.{module}"), name)(job, **options)
    return system


SYSTEMS: dict[str, Callable[[Job], System]] = {
    "dgl": partial(_load, "plain_dgl", "PlainDGL"),
    "dgl_blocks": partial(_load, "plain_dgl", "PlainDGLBlocks"),
    "dgl_one_thread": partial(_load, "plain_dgl", "PlainDGL"),
    "distdgl_full": partial(_load, "distdgl", "DistDGLFull"),
    "distdgl_sampled": partial(_load, "distdgl", "DistDGLSampled"),
    **{
        name: partial(_load, "ours", "Ours", strategy=name) for name in ("hybrid", "depcache", "depcomm", "neutronstar")
    },
    "ours_in_turns": partial(_load, "ours", "OursInTurns"),
    # How depcomm exchanges: after each other, while held rows are summed, and with partial sums instead of sources.
    "depcomm_apart": partial(_load, "ours", "Ours", strategy="depcomm", overlap=False),
    "depcomm_overlap": partial(_load, "ours", "Ours", strategy="depcomm", partial_sums=False),
    "depcomm_sums": partial(_load, "ours", "Ours", strategy="depcomm", partial_sums=True),
    # The least that can be received at a time, what budgets leave room for, and everything. Over the process group:
    # what ranks of one host share is resident in each of them.
    "depcache_collective": partial(_load, "ours", "Ours", strategy="depcache", transport="collective"),
    "depcomm_few_rows": partial(_load, "ours", "Ours", strategy="depcomm", transport="collective", chunk_rows=256),
    "hybrid_32_mib": partial(
        _load, "ours", "Ours", strategy="hybrid", transport="collective", memory_budget_bytes=32 * 2**20
    ),
    "hybrid_128_mib": partial(
        _load, "ours", "Ours", strategy="hybrid", transport="collective", memory_budget_bytes=128 * 2**20
    ),
    # On one GPU, which ranks share if there are several.
    "hybrid_gpu": partial(_load, "ours", "Ours", strategy="hybrid", device="cuda"),
    "depcomm_apart_gpu": partial(_load, "ours", "Ours", strategy="depcomm", device="cuda", overlap=False),
    "depcomm_overlap_gpu": partial(_load, "ours", "Ours", strategy="depcomm", device="cuda", partial_sums=False),
    "depcomm_sums_gpu": partial(_load, "ours", "Ours", strategy="depcomm", device="cuda", partial_sums=True),
    "pyg_gpu": partial(_load, "pyg", "PyG"),
    "pyg_sparse_gpu": partial(_load, "pyg", "PyG", edges="sparse"),
    "sar": partial(_load, "sar", "SAR"),
    "sar_mfg": partial(_load, "sar", "SAR", blocks="mfg"),
    "sar_mfg_no_sr": partial(_load, "sar", "SAR", blocks="mfg", rematerialise="no"),
    "pipegcn": partial(_load, "pipegcn", "PipeGCN"),
}
LOADER_SYSTEMS = frozenset(
    name for name, load in SYSTEMS.items() if isinstance(load, partial) and load.args[0] == "ours"
)
"""Those that run a `FullGraphLoader`, with whatever options."""
CLUSTER_SYSTEMS = frozenset({"distdgl_full", "distdgl_sampled"})
"""Those that need DistDGL's servers."""
SINGLE_SYSTEMS = frozenset({"dgl", "dgl_blocks", "dgl_one_thread"})
"""Those of one process with all threads, or one."""
