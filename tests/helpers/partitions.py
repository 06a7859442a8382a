# SPDX-License-Identifier: Apache-2.0
"""Partition folders of the named graphs, written once a session."""

from __future__ import annotations

from pathlib import Path

import dgl
import torch
from torch import Tensor

import dgl_hybrid


def relabelled(graph: dgl.DGLGraph, order: Tensor) -> dgl.DGLGraph:
    """Returns the graph with node k being what `order[k]` was; edges keep their ids."""
    new_id = torch.empty_like(order)
    new_id[order] = torch.arange(len(order))
    src, dst = graph.edges(order="eid")
    out = dgl.graph((new_id[src], new_id[dst]), num_nodes=graph.num_nodes())
    for name, value in graph.ndata.items():
        out.ndata[name] = value[order]
    for name, value in graph.edata.items():
        out.edata[name] = value
    return out


class PartitionStore:
    """Writes a folder at its first use."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._written: dict[tuple[str, int, str, int], str] = {}

    def get(self, name: str, graph: dgl.DGLGraph, num_parts: int, method: str = "random", num_hops: int = 1) -> str:
        key = (name, num_parts, method, num_hops)
        if key not in self._written:
            folder = self._root / f"{name}-{num_parts}-{method}-{num_hops}"
            dgl_hybrid.partition_graph(graph, name, num_parts, str(folder), num_hops=num_hops, part_method=method)
            self._written[key] = str(folder / f"{name}.json")
        return self._written[key]
