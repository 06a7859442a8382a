# SPDX-License-Identifier: Apache-2.0
"""Requests by global id: who owns a row, asking its owner for it, and fetching static rows once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dgl_hybrid.errors import ExchangeError
from dgl_hybrid.exchange.communicator import Communicator
from dgl_hybrid.exchange.segments import find_sorted, indptr_of, unique
from dgl_hybrid.partition import EdgeLists

NewRows = Callable[[tuple[int, ...], torch.dtype], Tensor]
"""(shape, dtype) to an uninitialised CPU tensor."""

_BLOCK_BYTES = 16 * 2**20
"""Of rows that are on their way from where they came to where they were asked for."""


@dataclass(frozen=True, kw_only=True)
class Ownership:
    """Contiguous ranges of global ids, one per rank, as DistDGL's partition book has them."""

    offsets: Tensor
    """(P + 1,) int64; rank q owns [offsets[q], offsets[q + 1])."""
    rank: int

    @property
    def world_size(self) -> int:
        return len(self.offsets) - 1

    @property
    def start(self) -> int:
        return int(self.offsets[self.rank])

    @property
    def stop(self) -> int:
        return int(self.offsets[self.rank + 1])

    @property
    def total(self) -> int:
        return int(self.offsets[-1])

    def owner_of(self, ids_global: Tensor) -> Tensor:
        """Returns the (n,) int64 owner of every id; empty partitions own nothing."""
        return torch.searchsorted(self.offsets, ids_global, right=True) - 1

    def is_owned(self, ids_global: Tensor) -> Tensor:
        return (ids_global >= self.start) & (ids_global < self.stop)

    def owned(self) -> Tensor:
        """Returns all ids of this rank, ascending."""
        return torch.arange(self.start, self.stop)

    def check_range(self, ids_global: Tensor, what: str) -> None:
        """Raises ValueError if an id lies outside the graph."""
        if len(ids_global) and (int(ids_global.min()) < 0 or int(ids_global.max()) >= self.total):
            bad = ids_global[(ids_global < 0) | (ids_global >= self.total)]
            raise ValueError(f"{what} must lie in [0, {self.total}) (got {int(bad[0])}, and {len(bad)} such in all)")


@dataclass(frozen=True, kw_only=True)
class Routing:
    """An answered request: what this rank asked for, and what its peers asked of it."""

    send_local: Tensor
    """(S,) int64 local positions (id minus the range's start) of the rows peers asked for, by peer, in their order."""
    send_counts: tuple[int, ...]
    recv_counts: tuple[int, ...]


def request_ids(communicator: Communicator, ownership: Ownership, ids_sorted_global: Tensor) -> Routing:
    """Asks the owners for rows; learns what peers ask of this rank. Collective.

    Args:
        ids_sorted_global: (R,) int64 ascending (ranges ascend with rank, so they are grouped by owner already).
    """
    counts = torch.bincount(ownership.owner_of(ids_sorted_global), minlength=ownership.world_size).tolist()
    asked = communicator.exchange_counts(counts)
    requests = communicator.exchange(ids_sorted_global, counts, asked)
    if len(requests) and not bool(ownership.is_owned(requests).all()):
        foreign = requests[~ownership.is_owned(requests)]
        raise ExchangeError(
            f"rank {ownership.rank} of {ownership.world_size} owns ids [{ownership.start}, {ownership.stop}), but was "
            f"asked for {int(foreign[0])} and {len(foreign) - 1} more outside: peers know another partition. Start all "
            f"ranks on copies of one partition folder."
        )
    return Routing(
        send_local=requests - ownership.start,
        send_counts=tuple(asked),
        recv_counts=tuple(int(count) for count in counts),
    )


def fetch_rows(
    communicator: Communicator,
    ownership: Ownership,
    rows: Tensor,
    ids_global: Tensor,
    *,
    new_rows: NewRows | None = None,
) -> Tensor:
    """Fetches static rows from their owners. Collective; not differentiable.

    Args:
        rows: (N, ...) the rows this rank owns, by local position.
        ids_global: (n,) int64 in any order, duplicates allowed; owned ids are answered locally.
        new_rows: Makes the tensor of CPU rows that is returned; None: as any other.

    Returns:
        (n, ...) rows in the order asked.
    """
    is_foreign = ~ownership.is_owned(ids_global)
    foreign = ids_global[is_foreign]
    distinct = unique(foreign, ownership.total)
    routing = request_ids(communicator, ownership, distinct)
    received = communicator.exchange(
        rows.index_select(0, routing.send_local.to(rows.device)), routing.send_counts, routing.recv_counts
    )
    out: Tensor | None = None
    if new_rows is not None and rows.device.type == "cpu" and not rows.requires_grad:
        out = new_rows((len(ids_global), *rows.shape[1:]), rows.dtype)
    if len(foreign) == 0:
        return torch.index_select(rows, 0, (ids_global - ownership.start).to(rows.device), out=out)
    if out is None and torch.equal(distinct, ids_global):
        return received
    if out is None:
        out = rows.new_empty((len(ids_global), *rows.shape[1:]))
    source = ids_global - ownership.start
    source[is_foreign] = find_sorted(distinct, foreign, ownership.total)[1]
    row_bytes = rows.element_size() * rows.shape[1:].numel()
    num_rows = max(1, _BLOCK_BYTES // max(1, row_bytes))
    for begin in range(0, len(out), num_rows):
        block = slice(begin, begin + num_rows)
        for of_these, table in ((is_foreign[block], received), (~is_foreign[block], rows)):
            there, here = of_these.nonzero().squeeze(1), source[block][of_these]
            out[block].index_copy_(0, there.to(rows.device), table.index_select(0, here.to(rows.device)))
    return out


def fetch_lists(
    communicator: Communicator, ownership: Ownership, lists: EdgeLists, ids_sorted_global: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Fetches in-edge lists from their owners. Collective.

    Args:
        lists: Of the nodes owned here.
        ids_sorted_global: (n,) ascending, none owned here.

    Returns:
        `(counts, src_global, eid_global)`: (n,) edges per node, and their values in the order asked.
    """
    routing = request_ids(communicator, ownership, ids_sorted_global)
    counts, src, eid = lists.gather(routing.send_local)
    received_counts = communicator.exchange(counts, routing.send_counts, routing.recv_counts)
    send_entries = _sum_by_peer(counts, routing.send_counts)
    recv_entries = _sum_by_peer(received_counts, routing.recv_counts)
    received = communicator.exchange(torch.stack([src, eid], dim=1), send_entries, recv_entries)
    src, eid = (column.contiguous() for column in received.unbind(dim=1))
    return received_counts, src, eid


def _sum_by_peer(counts: Tensor, rows_by_peer: tuple[int, ...]) -> list[int]:
    ends = indptr_of(counts)[indptr_of(torch.tensor(rows_by_peer, dtype=torch.int64))]
    return [int(n) for n in (ends[1:] - ends[:-1]).tolist()]
