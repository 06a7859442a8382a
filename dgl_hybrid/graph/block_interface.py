# SPDX-License-Identifier: Apache-2.0
"""What of the interface of DGL's blocks a `LayerBlock` passes on, and what it refuses, with a hint."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import torch
from dgl.view import NodeSpace
from torch import Tensor

from dgl_hybrid.errors import BlockError

DELEGATED = frozenset(
    (
        *("device", "dsttypes", "srctypes", "ntypes", "etypes", "canonical_etypes", "is_homogeneous"),
        *("is_multigraph", "is_unibipartite", "num_edges", "number_of_edges", "num_dst_nodes", "number_of_dst_nodes"),
        *("is_pinned", "batch_size"),
    )
)
"""Passed straight to the real block: nothing of it reads source rows."""
HINTS = {
    "ndata": "this module treats sources and destinations as one set, which a block cannot (stock DGL rejects blocks "
    "here too). Use a layer that accepts blocks: SGConv, APPNP and TAGConv can be written as several one-hop layers "
    "such as GraphConv(weight=False), one block each",
    "edges": "source positions of received rows mean nothing to the tensors held here. Use `apply_edges` or "
    "`update_all`",
    "find_edges": "use `apply_edges` or `update_all`",
    "in_edges": "use `apply_edges` or `update_all`",
    "out_edges": "the out-edges of a source lie on several ranks. Use `out_degrees()` for full-graph degrees",
    "multi_update_all": "full-graph training on heterogeneous graphs is not there yet",
    "nodes": "use `srcdata` and `dstdata`",
    "clone": "edges are those of the full graph, on all ranks alike. Leave some out by weights: "
    "`edge_weight=F.dropout(torch.ones(block.num_edges()), p)` drops the same ones whatever the partition",
    "to_canonical_etype": "edges are those of the full graph, on all ranks alike. Add self-loops and reverse edges to "
    "the graph before it is partitioned",
    "adj": "the adjacency covers received sources. Use `update_all`",
    "adj_tensors": "the adjacency covers received sources. Use `update_all`",
    "num_nodes": "a block has source and destination nodes: use `num_src_nodes()` or `num_dst_nodes()`",
    "number_of_nodes": "a block has source and destination nodes: use `num_src_nodes()` or `num_dst_nodes()`",
}
"""What to use instead of what is refused."""


class DestinationNodes:
    """DGL's view of a block's destinations, whose ids may be narrower than the block's are said to be."""

    def __init__(self, view: Any, idtype: torch.dtype) -> None:
        self._view, self._idtype = view, idtype

    def __call__(self, ntype: str | None = None) -> Tensor:
        positions: Tensor = self._view(ntype)
        return positions.to(self._idtype)

    def __getitem__(self, key: Any) -> Any:
        return self._view[key]


class SourceNodes:
    """The same of a block's sources, of which DGL's view has the received ones, too: fields are those of the rows held
    here, as in `srcdata`.
    """

    def __init__(
        self, view: Any, fields: MutableMapping[str, Tensor], num_held: int, idtype: torch.dtype, where: str
    ) -> None:
        self._view, self._fields, self._num_held = view, fields, num_held
        self._idtype, self._where = idtype, where

    def __call__(self, ntype: str | None = None) -> Tensor:
        positions: Tensor = self._view(ntype)
        return positions[: self._num_held].to(self._idtype)

    def __getitem__(self, key: Any) -> Any:
        self._view[key]  # DGL's errors, of names of types
        if not (key is None or isinstance(key, (str, slice))):
            raise BlockError(
                f"srcnodes[{key!r}] selects some sources, which is not possible on a LayerBlock ({self._where}): take "
                f"`srcdata[name]`, or `srcnodes[ntype].data[name]`, and index the rows."
            )
        return NodeSpace(data=self._fields)
