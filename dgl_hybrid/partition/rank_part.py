# SPDX-License-Identifier: Apache-2.0
"""What one rank must know of the structure of its share of a graph, wherever that lies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from dgl_hybrid.partition.edge_lists import EdgeLists
from dgl_hybrid.partition.local_order import LocalOrder


class RankPart(Protocol):
    """N owned vertices and E owned edges, contiguous ranges of global ids; everything on the CPU.

    A `LocalPartition` read from a folder is one, and so is a `SharedPart` of a running `DistGraph`.
    """

    @property
    def node_offsets(self) -> Tensor:
        """(P+1,) int64: rank p owns the vertices `node_offsets[p]..node_offsets[p+1]-1`."""

    @property
    def edge_offsets(self) -> Tensor:
        """(P+1,) int64, likewise."""

    @property
    def lists(self) -> EdgeLists:
        """In-edges of owned vertices, in their order."""

    @property
    def halo_global(self) -> Tensor:
        """(H,) int64, sorted: vertices of other ranks whose complete in-edge lists are here."""

    @property
    def halo_lists(self) -> EdgeLists:
        """Their lists, in the order of `halo_global`."""

    @property
    def in_degrees(self) -> Tensor:
        """(N,) int64, full graph."""

    @property
    def out_degrees(self) -> Tensor | None:
        """(N,) int64, full graph; None where one part alone cannot tell."""

    @property
    def orig_node_ids(self) -> Tensor | None:
        """(N,) int64; None where nobody kept them."""

    @property
    def orig_edge_ids(self) -> Tensor | None:
        """(E,) int64 by owned edge; None where nobody kept them."""

    @property
    def local_order(self) -> LocalOrder | None:
        """Of owned vertices; None where nobody kept one."""


@dataclass(frozen=True, kw_only=True)
class SharedPart:
    """A rank's share of a DistDGL part that its machine's servers hold in shared memory; see `RankPart`."""

    node_offsets: Tensor
    edge_offsets: Tensor
    lists: EdgeLists
    halo_global: Tensor
    halo_lists: EdgeLists
    first_node_of_machine: int
    """Global id of the first node of the part, of which this rank's nodes are a range."""
    first_edge_of_machine: int
    out_degrees: Tensor | None
    orig_node_ids: Tensor | None
    orig_edge_ids: Tensor | None
    local_order: LocalOrder | None

    @property
    def in_degrees(self) -> Tensor:
        return self.lists.counts
