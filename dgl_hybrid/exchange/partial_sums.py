# SPDX-License-Identifier: Apache-2.0
"""Sources or partial sums, whichever are fewer: the fewest rows that complete a layer's plain sums, exactly.

Rank q reads rows of rank p over edges (source at p, destination at q). Each edge can be served in two ways: its source
travels as a row, or p adds up the destination's sources itself and the sum travels. What is sent is thus a vertex cover
of the bipartite graph of p's sources and q's destinations, and the least that suffices is a minimum one. If u reads a,
b and c, while v and w read c alone:

    plain         a, b and c travel               3 rows
    cover {c, u}  c travels; so does a + b for u  2 rows

By König's theorem (1931) its size is that of a maximum matching, which SciPy finds by Hopcroft's and Karp's algorithm
(1973); the cover follows from what alternating paths reach. That partial sums may travel is known from DistGNN, which
sends nothing else, and from SuperGCN, which takes the cover per pair of ranks. An edge given twice counts twice: the
cover is that of the simple graph, sums are the multigraph's.

q finds the cover, since it knows the edges, and tells p once which rows and which sums to send, in integers.

This is right for `sum`, and for `mean`, which is a sum divided by the reader; not for max, attention or whatever else
looks at single edges. Constant edge weights would fit: with the entries of its sums q would send their weights, `pack`
would hold them (1 for a plain row) and `edges` those of the other edges (1 for a sum). `RowsPart` has no place for
weights, so layers with weights keep their plain rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.sparse
import torch
from scipy.sparse.csgraph import breadth_first_order, maximum_bipartite_matching
from torch import Tensor

from dgl_hybrid.errors import ExchangeError
from dgl_hybrid.exchange.closure import LayerStructure
from dgl_hybrid.exchange.communicator import Communicator
from dgl_hybrid.exchange.parts import RowsPart
from dgl_hybrid.exchange.plan import ExchangePlan
from dgl_hybrid.exchange.segments import indptr_of
from dgl_hybrid.ops.sparse_graph import SparseGraph

MIN_SAVING = 0.05
"""Below this share of saved rows a layer keeps its plain rows: sums delay the message, which plain rows do not."""

_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class PartialSums:
    """What the cover makes of a layer's exchange."""

    part: RowsPart | None
    """This rank's; None on every rank: the plain rows stay."""
    rows_plain: int
    """Rows that all ranks together receive without it."""
    rows_sent: int
    """Rows and sums that the cover needs, whether it is used or not; never more than `rows_plain`."""

    @property
    def saving(self) -> float:
        """Share of the plain rows that need not travel."""
        return 1.0 - self.rows_sent / self.rows_plain if self.rows_plain else 0.0


@dataclass(frozen=True, kw_only=True)
class Order:
    """What a reader orders of one owner. Rows are named by their position among those it would receive plainly."""

    rows: Tensor
    """(A,) int64, ascending: rows that travel as they are."""
    sum_counts: Tensor
    """(B,) int64 entries of each partial sum, at least one."""
    sum_rows: Tensor
    """(sum(sum_counts),) int64 rows that are added up, one sum after the other; a multiple edge repeats its row."""

    @property
    def num_wire_rows(self) -> int:
        return len(self.rows) + len(self.sum_counts)

    @property
    def sizes(self) -> list[int]:
        """Lengths of the three tensors."""
        return [len(self.rows), len(self.sum_counts), len(self.sum_rows)]

    def to_message(self) -> Tensor:
        """Puts the three tensors one after the other, (sum(sizes),) int64."""
        return torch.cat([self.rows, self.sum_counts, self.sum_rows])

    @classmethod
    def from_message(cls, message: Tensor, sizes: list[int]) -> Order:
        """The inverse of `to_message`."""
        rows, sum_counts, sum_rows = message.split(sizes)
        return cls(rows=rows, sum_counts=sum_counts, sum_rows=sum_rows)


@dataclass(frozen=True, kw_only=True)
class CoveredReads:
    """A reader's side: what it orders of every rank, and what it does with what comes."""

    orders: tuple[Order, ...]
    """(P,), nothing of itself."""
    dst_rows: Tensor
    """(B,) int64, ascending."""
    edges: SparseGraph
    """B x wire rows, these by owner, its rows before its sums."""


def build_partial_sums(
    communicator: Communicator, structure: LayerStructure, *, min_saving: float = MIN_SAVING
) -> PartialSums:
    """Finds the fewest rows that complete a layer's sums and tells the owners. Collective: a gather and an exchange.

    Args:
        structure: This rank's; on the CPU.
        min_saving: Share of all ranks' rows that must be saved for the cover to be used; the same on every rank.

    Returns:
        This rank's part, or None on every rank where it is not worth it, and what the cover saves.

    Raises:
        ExchangeError: On every rank, if what a rank was told does not fit its exchange plan.
    """
    plan = structure.exchange
    if plan.is_idle:
        return PartialSums(part=None, rows_plain=0, rows_sent=0)
    with communicator.agreed():
        reads = cover_reads(structure)
    sizes = [[count, *order.sizes] for count, order in zip(plan.recv_counts, reads.orders, strict=True)]
    by_reader = [
        [told[4 * owner : 4 * owner + 4] for owner in range(plan.world_size)]
        for told in communicator.gather_ints([size for owner in sizes for size in owner])
    ]
    rows_plain = sum(pair[0] for reader in by_reader for pair in reader)
    rows_sent = sum(pair[1] + pair[2] for reader in by_reader for pair in reader)
    with communicator.agreed():
        _check_sizes(plan, [reader[plan.rank] for reader in by_reader])
    if rows_plain - rows_sent < min_saving * rows_plain:
        return PartialSums(part=None, rows_plain=rows_plain, rows_sent=rows_sent)
    ordered_sizes = [reader[plan.rank][1:] for reader in by_reader]
    message_sizes = [sum(told) for told in ordered_sizes]
    messages = communicator.exchange(
        torch.cat([order.to_message() for order in reads.orders]),
        [sum(order.sizes) for order in reads.orders],
        message_sizes,
    ).split(message_sizes)
    with communicator.agreed():
        ordered = [Order.from_message(*told) for told in zip(messages, ordered_sizes, strict=True)]
        pack = pack_ordered(plan, ordered)
    part = RowsPart(
        send_counts=tuple(order.num_wire_rows for order in ordered),
        recv_counts=tuple(order.num_wire_rows for order in reads.orders),
        pack=pack,
        dst_rows=reads.dst_rows,
        edges=reads.edges,
        are_sums=True,
    )
    return PartialSums(part=part, rows_plain=rows_plain, rows_sent=rows_sent)


def count_least_rows(structure: LayerStructure) -> list[int]:
    """Returns how many rows and sums would do from each owner, (P,); pure. As many as `cover_reads` orders.

    Finds the maximum matching alone: by König's theorem it is as large as the cover.
    """
    counts = []
    for (dst, source), num_sources in zip(_reads_by_owner(structure), structure.exchange.recv_counts, strict=True):
        of_edge = torch.unique_consecutive(dst, return_inverse=True)[1]
        edges = _bipartite(of_edge.numpy(), source.numpy(), num_sources, int(of_edge[-1]) + 1 if len(dst) else 0)
        counts.append(int((maximum_bipartite_matching(edges, perm_type="row") >= 0).sum()) if edges.nnz else 0)
    return counts


def _reads_by_owner(structure: LayerStructure) -> list[tuple[Tensor, Tensor]]:
    """Finds the edges from received rows, by owner of these, in one pass over all.

    Returns:
        Of each rank `(dst, source)`, (e,) int64 each: destinations, ascending, and which of its rows they read.
    """
    offsets = torch.tensor(structure.exchange.recv_offsets, dtype=torch.int64)
    positions = torch.nonzero(structure.indices >= structure.num_held).squeeze(1)
    received = structure.indices[positions].to(torch.int64) - structure.num_held
    dst = torch.searchsorted(structure.indptr, positions, right=True) - 1
    owner, by_owner = torch.sort(torch.searchsorted(offsets, received, right=True) - 1, stable=True)
    counts = torch.bincount(owner, minlength=len(offsets) - 1).tolist()
    source = received[by_owner] - offsets[owner]
    return list(zip(dst[by_owner].split(counts), source.split(counts), strict=True))


def cover_reads(structure: LayerStructure) -> CoveredReads:
    """Covers, for each owner, the edges over which this rank reads its rows; pure, without communication."""
    orders, all_dst, all_wire = [], [], []
    num_wire_rows = 0
    for (dst, source), num_sources in zip(_reads_by_owner(structure), structure.exchange.recv_counts, strict=True):
        order, reader_dst, wire = _cover_pair(dst, source, num_sources)
        orders.append(order)
        all_dst.append(reader_dst)
        all_wire.append(wire + num_wire_rows)
        num_wire_rows += order.num_wire_rows
    reader_dst = torch.cat(all_dst)
    by_dst = torch.argsort(reader_dst, stable=True)
    dst_rows, counts = torch.unique_consecutive(reader_dst[by_dst], return_counts=True)
    wire = torch.cat(all_wire)[by_dst]
    return CoveredReads(
        orders=tuple(orders),
        dst_rows=dst_rows,
        edges=SparseGraph.from_csc(indptr_of(counts), wire, num_src=num_wire_rows),
    )


def _cover_pair(dst: Tensor, source: Tensor, num_sources: int) -> tuple[Order, Tensor, Tensor]:
    """Covers the edges from one owner.

    Args:
        dst, source: (E,) int64 ends of the edges, ascending in `dst`.

    Returns:
        `(order, dst, wire)`: what travels, and the edges from it, (e,) destinations and positions in the message.
    """
    readers, of_edge = torch.unique_consecutive(dst, return_inverse=True)
    is_row, is_sum = minimum_vertex_cover(of_edge.numpy(), source.numpy(), num_sources, len(readers))
    row_of_source = torch.from_numpy(np.cumsum(is_row) - 1)
    by_row = torch.from_numpy(is_row)[source]
    # All other edges end in the cover: each of them belongs to the sum of its destination.
    sum_dst, sum_counts = torch.unique_consecutive(dst[~by_row], return_counts=True)
    assert len(sum_dst) == int(is_sum.sum())
    rows = torch.from_numpy(np.flatnonzero(is_row))
    order = Order(rows=rows, sum_counts=sum_counts, sum_rows=source[~by_row])
    wire = torch.cat([row_of_source[source[by_row]], len(rows) + torch.arange(len(sum_dst))])
    return order, torch.cat([dst[by_row], sum_dst]), wire


def minimum_vertex_cover(
    dst: _Ints, source: _Ints, num_sources: int, num_dst: int
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Finds the minimum vertex cover of a bipartite multigraph that has most of its vertices among the sources.

    Vertices reached from unmatched sources, along any edge to a destination and along the matching's edge back, are
    those for which alternatives exist; the cover takes destinations that are reached and sources that are not. The
    paths begin at unmatched sources alone, so as few destinations as possible are taken: sums cost their owner work,
    rows do not. A destination that is taken has two reached sources at least, so no sum has a single source.

    Args:
        dst, source: (E,) ends of the edges, ascending in `dst`; the same edge may be given several times.

    Returns:
        `(is_row, is_sum)`: (num_sources,) and (num_dst,) bool, the cover.
    """
    is_sum = np.zeros(num_dst, dtype=np.bool_)
    if len(dst) == 0:
        return np.zeros(num_sources, dtype=np.bool_), is_sum
    edges = _bipartite(dst, source, num_sources, num_dst)
    has_edge = np.diff(edges.indptr) > 0
    matched_source = maximum_bipartite_matching(edges, perm_type="row")  # (num_dst,), -1 where there is none
    is_matched = np.zeros(num_sources, dtype=np.bool_)
    is_matched[matched_source[matched_source >= 0]] = True
    begin = np.flatnonzero(has_edge & ~is_matched)
    # From source to source over one destination and its matched edge; one more vertex leads to where the paths begin. A
    # reached destination without a match would end an augmenting path, so in a maximum matching there is none.
    onward = matched_source[edges.indices]
    step = onward >= 0
    kept = np.concatenate([[0], np.cumsum(step)])[edges.indptr]
    hops = scipy.sparse.csr_array(
        (
            np.ones(int(kept[-1]) + len(begin)),
            np.concatenate([onward[step], begin]).astype(np.int32),
            np.concatenate([kept, [kept[-1] + len(begin)]]).astype(np.int32),
        ),
        shape=(num_sources + 1, num_sources + 1),
    )
    is_reached = np.zeros(num_sources + 1, dtype=np.bool_)
    is_reached[breadth_first_order(hops, num_sources, return_predecessors=False)] = True
    is_sum[dst[is_reached[source]]] = True
    return has_edge & ~is_reached[:num_sources], is_sum


def _bipartite(dst: _Ints, source: _Ints, num_sources: int, num_dst: int) -> Any:
    """The graph of sources and destinations as a SciPy matrix, (num_sources, num_dst)."""
    ends = (source.astype(np.int32), dst.astype(np.int32))
    return scipy.sparse.csr_array((np.ones(len(dst), dtype=np.bool_), ends), shape=(num_sources, num_dst))


def pack_ordered(plan: ExchangePlan, orders: list[Order]) -> SparseGraph:
    """Builds what an owner sends: by reader, its rows before its sums; pure, without communication.

    Args:
        plan: The owner's, for plain rows.
        orders: Of each rank, as it arrived.

    Returns:
        Wire rows x C: the held rows that are added up for each.

    Raises:
        ExchangeError: If an order names rows that the plan does not send, or sums that are not there.
    """
    counts, entries = [], []
    for reader, order in enumerate(orders):
        _check_order(plan, reader, order)
        offset = plan.send_offsets[reader]
        counts += [torch.ones_like(order.rows), order.sum_counts]
        entries += [plan.send_index[offset + order.rows], plan.send_index[offset + order.sum_rows]]
    return SparseGraph.from_csc(indptr_of(torch.cat(counts)), torch.cat(entries), num_src=plan.num_rows)


def _check_sizes(plan: ExchangePlan, told: list[list[int]]) -> None:
    """Checks what the readers announced, before a message of that size is awaited."""
    for reader, (num_plain, num_rows, num_sums, num_entries) in enumerate(told):
        num_sent = plan.send_counts[reader]
        fits = min(num_rows, num_sums, num_entries) >= 0 and num_sums <= num_entries
        if num_plain != num_sent or not fits or num_rows + num_sums > num_sent:
            raise ExchangeError(
                f"partial sums do not fit the plan: rank {plan.rank} of {plan.world_size} sends {num_sent} rows to "
                f"peer {reader} for layer {plan.layer}, which expects {num_plain} and orders {num_rows} rows and "
                f"{num_sums} sums of {num_entries} rows in their place. Rebuild both plans from one partition."
            )


def _check_order(plan: ExchangePlan, reader: int, order: Order) -> None:
    num_sent = plan.send_counts[reader]
    named = torch.cat([order.rows, order.sum_rows])
    wrong = ""
    if len(named) and (int(named.min()) < 0 or int(named.max()) >= num_sent):
        wrong = f"rows must lie in [0, {num_sent}) (got {int(named.min())}..{int(named.max())})"
    elif bool((order.rows.diff() <= 0).any()):
        wrong = "rows must ascend (got one twice or out of order)"
    elif bool((order.sum_counts <= 0).any()) or int(order.sum_counts.sum()) != len(order.sum_rows):
        wrong = f"sums must have {len(order.sum_rows)} entries, each at least one (got {int(order.sum_counts.sum())})"
    if wrong:
        raise ExchangeError(
            f"the order of peer {reader} for layer {plan.layer} is damaged on rank {plan.rank} of {plan.world_size}: "
            f"{wrong}. Rebuild both plans from one partition."
        )
