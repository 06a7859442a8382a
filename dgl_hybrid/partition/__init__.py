# SPDX-License-Identifier: Apache-2.0
"""Writes and reads DistDGL partition folders; ids; k-hop closure; integrity."""

from __future__ import annotations

from dgl_hybrid.partition.closure import Closure, khop_closure
from dgl_hybrid.partition.edge_lists import EdgeLists, SharedLists, SharedStructure, StoredLists
from dgl_hybrid.partition.load import LocalPartition, load_partition
from dgl_hybrid.partition.rank_part import RankPart, SharedPart
from dgl_hybrid.partition.summary import PartFiles, PartitionSummary, read_partition_summary
from dgl_hybrid.partition.verify import verify_partition
from dgl_hybrid.partition.write import partition_graph

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
