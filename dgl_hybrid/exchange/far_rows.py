# SPDX-License-Identifier: Apache-2.0
"""Rows of ranks on other hosts, while those of this host go through its memory.

They take the process group of all ranks, in one all-to-all to which ranks of one host add nothing between each other.
It moves rows that lie one behind the other: those of a host whose ranks are numbered in a row, the first or the last
host of all, are sent and received where they lie, others by way of a buffer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence

import torch
from torch import Tensor

from dgl_hybrid.exchange.buffers import BufferPool
from dgl_hybrid.exchange.transport import ExchangeTag, Transport, bytes_of_row


class FarRows:
    """The far part of an exchange.

    Args:
        group: Of all ranks.
        near: The ranks of this host.
    """

    def __init__(self, group: Transport, near: Collection[int]) -> None:
        self._group, self._near = group, frozenset(near)
        self._buffers = BufferPool()
        self.has_failed = False

    def start(
        self, received: Tensor, send: Tensor, recv_counts: list[int], send_counts: list[int], tag: ExchangeTag
    ) -> Callable[[], None]:
        """As `Transport.start_all_to_all`, of the far ranks' rows alone."""
        places = self._parts(received, recv_counts)
        joined = _joined(received, places)
        place = self._take(received, self._counts(recv_counts)) if joined is None else joined
        end = self._start(place, send, recv_counts, send_counts, tag)

        def finish() -> None:
            end()
            if joined is None:
                for part, rows in zip(places, place.split([len(part) for part in places]), strict=True):
                    part.copy_(rows)

        return finish

    def start_borrowing(
        self, send: Tensor, recv_counts: list[int], send_counts: list[int], tag: ExchangeTag
    ) -> Callable[[], dict[int, Tensor]]:
        """As `start`; what ends it returns each far rank's rows."""
        counts = self._counts(recv_counts)
        place = self._take(send, counts)
        end = self._start(place, send, recv_counts, send_counts, tag)

        def finish() -> dict[int, Tensor]:
            end()
            return {rank: rows for rank, rows in enumerate(place.split(counts)) if rank not in self._near}

        return finish

    def drop_free(self) -> None:
        """Gives back memory that nobody uses."""
        self._buffers.drop_free()

    def _start(
        self, place: Tensor, send: Tensor, recv_counts: list[int], send_counts: list[int], tag: ExchangeTag
    ) -> Callable[[], None]:
        pieces = self._parts(send, send_counts)
        rows = _joined(send, pieces)
        if rows is None:
            rows = torch.cat(pieces, out=self._take(send, self._counts(send_counts)))
        with self._noting_failure():
            end = self._group.start_all_to_all(place, rows, self._counts(recv_counts), self._counts(send_counts), tag)

        def finish() -> None:
            nonlocal rows
            with self._noting_failure():
                end()
            rows = None  # not to be freed, or used again, before it was sent

        return finish

    @contextlib.contextmanager
    def _noting_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.has_failed = True
            raise

    def _counts(self, counts: Sequence[int]) -> list[int]:
        return [0 if rank in self._near else count for rank, count in enumerate(counts)]

    def _parts(self, rows: Tensor, counts: list[int]) -> list[Tensor]:
        return [part for rank, part in enumerate(rows.split(counts)) if rank not in self._near and len(part)]

    def _take(self, like: Tensor, counts: list[int]) -> Tensor:
        return self._buffers.take((sum(counts), *like.shape[1:]), like.dtype)


def _joined(rows: Tensor, parts: Sequence[Tensor]) -> Tensor | None:
    """Returns consecutive parts of one tensor as one view of it; None if something lies between them."""
    if not parts:
        return rows[:0]
    first, row_bytes = parts[0], bytes_of_row(parts[0])
    address = first.data_ptr()
    for part in parts:
        if part.data_ptr() != address:
            return None
        address += len(part) * row_bytes
    return first.as_strided((sum(map(len, parts)), *first.shape[1:]), first.stride())
