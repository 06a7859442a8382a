# SPDX-License-Identifier: Apache-2.0
"""Writes and reads DistDGL partition folders; ids; k-hop closure; integrity.

Names are loaded at first use: launchers and agents check files, and need neither PyTorch nor DGL for that.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dgl_hybrid.partition.closure import Closure, khop_closure
    from dgl_hybrid.partition.edge_lists import EdgeLists, SharedLists, SharedStructure, StoredLists
    from dgl_hybrid.partition.load import LocalPartition, load_partition
    from dgl_hybrid.partition.rank_part import RankPart, SharedPart
    from dgl_hybrid.partition.summary import PartFiles, PartitionSummary, read_partition_summary
    from dgl_hybrid.partition.verify import verify_partition
    from dgl_hybrid.partition.write import partition_graph

_MODULES = {
    "Closure": "dgl_hybrid.partition.closure",
    "EdgeLists": "dgl_hybrid.partition.edge_lists",
    "LocalPartition": "dgl_hybrid.partition.load",
    "PartFiles": "dgl_hybrid.partition.summary",
    "PartitionSummary": "dgl_hybrid.partition.summary",
    "RankPart": "dgl_hybrid.partition.rank_part",
    "SharedLists": "dgl_hybrid.partition.edge_lists",
    "SharedPart": "dgl_hybrid.partition.rank_part",
    "SharedStructure": "dgl_hybrid.partition.edge_lists",
    "StoredLists": "dgl_hybrid.partition.edge_lists",
    "khop_closure": "dgl_hybrid.partition.closure",
    "load_partition": "dgl_hybrid.partition.load",
    "partition_graph": "dgl_hybrid.partition.write",
    "read_partition_summary": "dgl_hybrid.partition.summary",
    "verify_partition": "dgl_hybrid.partition.verify",
}

__all__ = [
    "Closure",
    "EdgeLists",
    "LocalPartition",
    "PartFiles",
    "PartitionSummary",
    "RankPart",
    "SharedLists",
    "SharedPart",
    "SharedStructure",
    "StoredLists",
    "khop_closure",
    "load_partition",
    "partition_graph",
    "read_partition_summary",
    "verify_partition",
]


def __getattr__(name: str) -> object:
    """Loads a public name at its first use."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
