# SPDX-License-Identifier: Apache-2.0
"""A layer's edges split by where their sources come from: rows held here, and rows that a message brings.

    y = held·x + Σ over parts: scatter(dst_rows, edges · exchange(pack · x))

What is held is summed while the message is in flight. All of it is linear; backward is the adjoint.

Received rows may come in one message, or in many that are used and dropped one after the other: then a rank holds no
more than a chunk of them at a time. The chunks go round a ring (in step s rank r sends to r + s), so that no two ranks
send to the same one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import pairwise

import torch
from torch import Tensor

from dgl_hybrid.exchange.closure import LayerStructure
from dgl_hybrid.exchange.communicator import Communicator
from dgl_hybrid.exchange.plan import ExchangePlan
from dgl_hybrid.ops import SparseGraph
from dgl_hybrid.ops.sparse_graph import Adjacency
from dgl_hybrid.partition.narrow_ids import narrow

Range = tuple[int, int]


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
    are_sums: bool = False
    """Whether rows may be (partial) sums: entries are not edges of the graph then."""

    @property
    def send_index(self) -> Tensor | None:
        """(rows sent,) positions among the held rows if every sent row is one of them; None: some are sums."""
        return None if self.are_sums else self.pack.in_edges.indices


class EdgePositions:
    """Which of a layer's edges the entries of its parts are: found when somebody asks, who has numbers of edges. Sums
    of rows alone, and attention without dropout, never do, and it takes as much memory as the edges' sources.

    Args:
        find: Returns the positions among the layer's edges, int32 or int64: of the entries of `held`, then of those of
            each part.
    """

    def __init__(self, find: Callable[[], tuple[Tensor, ...]]) -> None:
        self._find = find

    @cached_property
    def _found(self) -> tuple[Tensor, ...]:
        with torch.inference_mode(False), torch.no_grad():  # who trains later saves them
            return self._find()

    def of_held(self) -> Tensor:
        """Returns those of the edges from held rows."""
        return self._found[0]

    def of_part(self, position: int) -> Tensor:
        """Returns those of the edges from rows that a message brings."""
        return self._found[1 + position]

    def to(self, device: torch.device) -> EdgePositions:
        """Returns the same on `device`; nothing is kept where they are found."""
        return EdgePositions(lambda: tuple(positions.to(device) for positions in self._find()))


@dataclass(frozen=True, kw_only=True)
class SplitLayer:
    """The edges of one layer on one rank, each in exactly one place."""

    held: SparseGraph
    """num_dst x C: edges from rows held here."""
    parts: tuple[RowsPart, ...]
    """One; or several if rows are received in chunks (ring)."""
    edge_positions: EdgePositions
    """Of these edges; not of parts whose rows are sums."""
    _by_source: dict[tuple[int, bool], Adjacency] = field(default_factory=dict, init=False, repr=False, compare=False)

    def by_source(self, position: int, *, of_edges: bool) -> Adjacency:
        """Returns the edges of a part by received row, with the layer's rows as neighbours; edge ids are the part's
        entries. Made once.

        Args:
            of_edges: Sums have weights of edges; else these need no ids.
        """
        key = position, of_edges
        if key not in self._by_source:
            part = self.parts[position]
            edges = SparseGraph(part.edges.in_edges, num_src=part.edges.num_src)  # which keeps what it makes
            out = edges.out_edges if of_edges else edges.out_neighbours
            rows = part.dst_rows.to(out.indices.dtype)[out.indices.long()]
            self._by_source[key] = Adjacency(out.indptr, rows, out.edge_ids)
        return self._by_source[key]


@dataclass(frozen=True, slots=True)
class Message:
    """Which rows of an `ExchangePlan` one message carries, by rank: positions among those sent and those received."""

    sent: tuple[Range, ...]
    received: tuple[Range, ...]

    @property
    def send_counts(self) -> tuple[int, ...]:
        return tuple(end - begin for begin, end in self.sent)

    @property
    def recv_counts(self) -> tuple[int, ...]:
        return tuple(end - begin for begin, end in self.received)


def whole_message(plan: ExchangePlan) -> Message:
    """Returns the message that carries all rows."""
    sent, received = plan.send_offsets, plan.recv_offsets
    return Message(tuple(pairwise(sent)), tuple(pairwise(received)))


def ring_messages(plan: ExchangePlan, communicator: Communicator, chunk_rows: int) -> tuple[Message, ...]:
    """Cuts an exchange into messages of at most `chunk_rows` rows to and from one rank each. Collective.

    Args:
        chunk_rows: Positive; the same on every rank, or the smallest counts.

    Returns:
        As many messages on every rank, in the order in which they are to be exchanged.
    """
    rank, world_size = plan.rank, plan.world_size
    table = communicator.gather_ints([max(1, chunk_rows), *plan.recv_counts])
    chunk_rows = min(row[0] for row in table)
    messages = []
    for step in range(1, world_size):
        most = max(row[1 + (receiver - step) % world_size] for receiver, row in enumerate(table))
        target, source = (rank + step) % world_size, (rank - step) % world_size
        for first in range(0, most, chunk_rows):
            sent, received = [(0, 0)] * world_size, [(0, 0)] * world_size
            sent[target] = _piece(plan.send_offsets, target, first, chunk_rows)
            received[source] = _piece(plan.recv_offsets, source, first, chunk_rows)
            messages.append(Message(tuple(sent), tuple(received)))
    return tuple(messages)


def _piece(offsets: tuple[int, ...], peer: int, first: int, size: int) -> Range:
    begin, end = offsets[peer], offsets[peer + 1]
    return min(begin + first, end), min(begin + first + size, end)


def split_layer(structure: LayerStructure, messages: Sequence[Message]) -> SplitLayer:
    """Splits a layer's edges by source, received ones by the message that brings it. Not collective.

    Args:
        messages: Which together carry all received rows once.

    Returns:
        The parts in the order of the messages, on CPU. Entries of a row keep the order of its edges.
    """
    num_held = structure.num_held
    held_positions, positions = _edges_by_source(structure.indices, num_held)
    starts = torch.searchsorted(held_positions, structure.indptr)  # a count of all edges would take ten times as long
    held = SparseGraph.from_csc(starts, structure.indices[held_positions], num_src=num_held)
    rows = torch.repeat_interleave((structure.indptr - starts).diff())
    sources = structure.indices[positions].to(torch.int64) - num_held
    message_of, place = _places(structure.exchange, messages)
    parts = tuple(
        _part(structure, message, rows[chosen], place[sources[chosen]])
        for message, chosen in zip(messages, _by_message(message_of[sources], len(messages)), strict=True)
    )
    find = partial(_find_positions, structure.indices, num_held, structure.exchange, tuple(messages))
    return SplitLayer(held=held, parts=parts, edge_positions=EdgePositions(find))


def _edges_by_source(indices: Tensor, num_held: int) -> tuple[Tensor, Tensor]:
    """Returns the positions of the edges from held rows, and of the others."""
    is_held = indices < num_held
    return is_held.nonzero().flatten(), (~is_held).nonzero().flatten()


def _by_message(which: Tensor, num_messages: int) -> tuple[Tensor, ...]:
    """Returns the positions of the entries of each message; they keep their order, so those of a row stay together."""
    counts = torch.bincount(which, minlength=num_messages).tolist()
    of_messages: tuple[Tensor, ...] = which.argsort(stable=True).split(counts)
    return of_messages


def _find_positions(
    indices: Tensor, num_held: int, plan: ExchangePlan, messages: Sequence[Message]
) -> tuple[Tensor, ...]:
    """As `EdgePositions` takes it."""
    held, others = _edges_by_source(indices, num_held)
    message_of, _ = _places(plan, messages)
    which = message_of[indices[others].to(torch.int64) - num_held]
    of_parts = (others[chosen] for chosen in _by_message(which, len(messages)))
    return tuple(narrow(positions, len(indices)) for positions in (held, *of_parts))


def _places(plan: ExchangePlan, messages: Sequence[Message]) -> tuple[Tensor, Tensor]:
    """Returns, for each received row, which message brings it and at which place of that message."""
    message_of = torch.zeros(plan.num_received, dtype=torch.int64)
    place = torch.zeros(plan.num_received, dtype=torch.int64)
    for number, message in enumerate(messages):
        before = 0
        for begin, end in message.received:
            if begin == end:  # of a ring with many ranks nearly all
                continue
            message_of[begin:end] = number
            place[begin:end] = torch.arange(before, before + end - begin)
            before += end - begin
    return message_of, place


def _part(structure: LayerStructure, message: Message, rows: Tensor, sources: Tensor) -> RowsPart:
    """Args: `rows` and `sources` (among the message's) of the edges from its rows, by row."""
    dst_rows, counts = torch.unique_consecutive(rows, return_counts=True)
    indptr = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    sent = torch.cat([structure.exchange.send_index[begin:end] for begin, end in message.sent])
    return RowsPart(
        send_counts=message.send_counts,
        recv_counts=message.recv_counts,
        pack=SparseGraph.from_csc(torch.arange(len(sent) + 1), sent, num_src=structure.num_held),
        dst_rows=dst_rows,
        edges=SparseGraph.from_csc(indptr, sources, num_src=sum(message.recv_counts)),
    )
