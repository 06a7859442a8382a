# SPDX-License-Identifier: Apache-2.0
"""The held rows of one field of the graph, and of all of them."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from dgl_hybrid.sampling.counts import COUNTS
from dgl_hybrid.sampling.id_index import IdIndex, worthwhile_table_bytes
from dgl_hybrid.sampling.narrow import holds_exactly, narrowest_dtype

_BYTES_PER_MESSAGE = 32 * 2**20
_ID_BYTES = 8

Pull = Callable[[Tensor], Tensor]


class HeldRows:
    """Rows of other machines' vertices or edges, by the id within their type.

    They are kept in the smallest type that holds them bit for bit.

    Args:
        part: (n, ...) this machine's own rows of the field: of the same shape, and, likely, of the same kind of values.
        bound: Number of vertices (edges) of that type in the whole graph.
        share: Keep them in shared memory, for the sampler processes of this trainer.
    """

    def __init__(self, part: Tensor, bound: int, *, share: bool = False) -> None:
        self.dtype = part.dtype
        self.is_complete = False
        """What is wanted of the field was decided, and fetched."""
        self.read_for: Tensor | None = None
        """The seeds, ascending, as long as nothing else of the field was read; None: it is read for inputs."""
        self.is_read_for_inputs = False
        """Something else than seeds was read once: what is wanted is not decided by one read of seeds again."""
        self.expected = torch.empty(0, dtype=torch.int64)
        """All ids, ascending, that were weighed when it was decided what to hold."""
        self._bound = bound
        self._share = share
        self._index: IdIndex | None = None
        self._shared: tuple[Tensor, Tensor] | None = None
        """Ids and their rows, changed at once: a queue of sampler processes looks at any time."""
        self._rows = torch.empty((0, *part.shape[1:]), dtype=likely_dtype(part))

    @property
    def num_bytes(self) -> int:
        """Rows, their ids, and the table by which they are found, if there is one."""
        return self._rows.nbytes + _ID_BYTES * len(self._rows) + self._table_bytes

    @property
    def _table_bytes(self) -> int:
        return 0 if self._index is None else self._index.table_bytes

    @property
    def row_bytes(self) -> int:
        """What one more row takes, with its id and without a table."""
        return self._rows.element_size() * math.prod(self._rows.shape[1:]) + _ID_BYTES

    def holds(self, ids: Tensor) -> Tensor:
        """Which of these rows are held."""
        if self._index is None:
            return torch.zeros(len(ids), dtype=torch.bool)
        return self._index.find(ids) >= 0

    def shared(self) -> tuple[Tensor, Tensor] | None:
        """Returns ids and rows as they are kept, for `adopt` in another process."""
        return self._shared

    def adopt(self, ids: Tensor, rows: Tensor, room_bytes: float) -> None:
        """Takes rows that another process fetched."""
        self._index, self._rows, self.is_complete = IdIndex(ids, self._bound, room_bytes=room_bytes), rows, True
        self._shared = ids, rows

    def fetch(self, ids: Tensor, pull: Pull, room_bytes: float) -> None:
        """Fetches rows once and adds them to those that are held, as many as there is room for.

        Args:
            ids: (n,) without duplicates, none of them held, the most wanted first.
            pull: Reads rows by id from their owners.
            room_bytes: Besides what is held; may be infinite.
        """
        whole_room_bytes = room_bytes + self.num_bytes
        room_bytes += self._table_bytes  # made anew
        most = len(self._rows) + len(self._fitting(ids, room_bytes))
        table_bytes = worthwhile_table_bytes(most, self._bound, whole_room_bytes)
        if table_bytes > room_bytes:
            table_bytes = 0
        room_bytes -= table_bytes
        full_row_bytes = max(1, self.dtype.itemsize * math.prod(self._rows.shape[1:]))
        fetched_ids: list[Tensor] = [] if self._index is None else [self._index.ids]
        fetched = [self._rows]
        for some in ids.split(max(1, _BYTES_PER_MESSAGE // full_row_bytes)):
            fitting = self._fitting(some, room_bytes)
            if len(fitting) == 0:
                break
            rows = pull(fitting)
            COUNTS.fill_rows += len(fitting)
            COUNTS.fill_bytes += len(fitting) * full_row_bytes
            if not holds_exactly(rows, self._rows.dtype):
                # The other machines' values are not like ours: from here on everything is kept as it comes.
                held_before = sum(len(part) for part in fetched)
                room_bytes -= held_before * (full_row_bytes + _ID_BYTES - self.row_bytes)
                fetched = [part.to(self.dtype) for part in fetched]
                self._rows = self._rows.to(self.dtype)
                rows = self._fitting(rows, room_bytes)
                fitting = fitting[: len(rows)]
            fetched.append(rows.to(self._rows.dtype))
            fetched_ids.append(fitting)
            room_bytes -= len(fitting) * self.row_bytes
        if len(fetched) == 1:
            return
        all_ids = torch.cat(fetched_ids)
        if room_bytes < 0:  # what was held has become wider than there is room for
            all_ids = all_ids[: max(0, len(all_ids) - math.ceil(-room_bytes / self.row_bytes))]
            fetched = [torch.cat(fetched)[: len(all_ids)]]
        all_ids, order = torch.sort(all_ids)
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order))
        all_rows = torch.empty((len(all_ids), *self._rows.shape[1:]), dtype=self._rows.dtype)
        for part, places in zip(fetched, place.split([len(part) for part in fetched]), strict=True):
            all_rows[places] = part
        if self._share:
            all_ids.share_memory_()
            all_rows.share_memory_()
        self._rows, self._shared = all_rows, (all_ids, all_rows)
        self._index = IdIndex(all_ids, self._bound, room_bytes=whole_room_bytes if table_bytes else 0.0)

    def _fitting(self, wanted: Tensor, room_bytes: float) -> Tensor:
        """As many of these, from the front, as there is room for."""
        return wanted if math.isinf(room_bytes) else wanted[: max(0, int(room_bytes // self.row_bytes))]

    def read(self, ids: Tensor, pull: Pull) -> tuple[Tensor, Tensor]:
        """Reads rows, those that are held from here and the others by `pull`.

        Returns:
            `(rows, not_held)`: rows in the order of `ids`; the ids that `pull` was asked for.
        """
        if self._index is None:
            return pull(ids), ids
        position = self._index.find(ids)
        held = position >= 0
        if not bool(held.any()):
            return pull(ids), ids
        if bool(held.all()):
            COUNTS.held_rows += len(ids)
            return self._rows[position].to(self.dtype), ids[:0]
        rest = ids[~held]
        pulled = pull(rest)
        rows = torch.empty((len(ids), *pulled.shape[1:]), dtype=pulled.dtype)
        rows[held] = self._rows[position[held]].to(self.dtype)
        rows[~held] = pulled
        COUNTS.held_rows += len(ids) - len(rest)
        return rows, rest


class HeldFields:
    """The held rows of all fields, by name. What they take is known without asking each: reads want to know it."""

    def __init__(self) -> None:
        self.by_name: dict[str, HeldRows] = {}
        """For looking only."""
        self.num_bytes = 0
        self._counted: dict[str, int] = {}

    def put(self, name: str, held: HeldRows) -> None:
        """Takes the rows of a field, or counts them anew after they have changed."""
        num_bytes = held.num_bytes
        self.num_bytes += num_bytes - self._counted.get(name, 0)
        self.by_name[name], self._counted[name] = held, num_bytes

    def drop(self, name: str) -> None:
        """Forgets the rows of a field, if there are any."""
        self.by_name.pop(name, None)
        self.num_bytes -= self._counted.pop(name, 0)

    def clear(self) -> None:
        """Forgets all."""
        self.by_name.clear()
        self._counted.clear()
        self.num_bytes = 0


_SAMPLE_ROWS = 4096


def likely_dtype(part: Tensor) -> torch.dtype:
    """Returns the type that holds a sample of these rows exactly; whether it holds others is seen when they come."""
    if len(part) == 0:
        return part.dtype
    step = max(1, len(part) // _SAMPLE_ROWS)
    return narrowest_dtype(part[::step][:_SAMPLE_ROWS])
