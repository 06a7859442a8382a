# SPDX-License-Identifier: Apache-2.0
"""A layer's edges split by where their sources come from: rows held here, and rows that a message brings.

    y = held·x + Σ over parts: scatter(dst_rows, edges · exchange(pack · x))

What is held is summed while the message is in flight. All of it is linear; backward is the adjoint.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dgl_hybrid.ops.sparse_graph import SparseGraph


@dataclass(frozen=True, kw_only=True)
class RowsPart:
    """One message of a layer on this rank, and what is done with what arrives. C rows are held, P is the ranks."""

    send_counts: tuple[int, ...]
    """(P,) wire rows to each rank."""
    recv_counts: tuple[int, ...]
    """(P,) wire rows from each rank."""
    pack: SparseGraph
    """Wire rows sent x C held rows: each sent row is the sum of its entries (a plain row has one)."""
    dst_rows: Tensor
    """(B,) int64, ascending: rows of the layer that read this part."""
    edges: SparseGraph
    """B x wire rows received: added to the rows `dst_rows`."""
    edge_positions: Tensor | None
    """(entries of `edges`,) int64 positions among the layer's edges; None: entries are not edges of the graph (partial
    sums)."""


@dataclass(frozen=True, kw_only=True)
class SplitLayer:
    """The edges of one layer on one rank, each in exactly one place."""

    held: SparseGraph
    """num_dst x C: edges from rows held here."""
    held_edge_positions: Tensor
    """(entries of `held`,) int64 positions among the layer's edges."""
    parts: tuple[RowsPart, ...]
    """One; or several if rows are received in chunks (ring)."""
