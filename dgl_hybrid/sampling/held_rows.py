# SPDX-License-Identifier: Apache-2.0
"""The held rows of one field of the graph."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dgl_hybrid.sampling.counts import COUNTS
from dgl_hybrid.sampling.id_index import IdIndex

_BYTES_PER_MESSAGE = 64 * 2**20

Pull = Callable[[Tensor], Tensor]


class HeldRows:
    """Rows of other machines' vertices or edges, by the id within their type.

    Args:
        bound: Number of vertices (edges) of that type in the whole graph.
        share: Keep them in shared memory, for the sampler processes of this trainer.
    """

    def __init__(self, bound: int, *, share: bool = False) -> None:
        self.index = IdIndex(torch.empty(0, dtype=torch.int64), bound=0)
        self.rows: Tensor | None = None
        self.is_complete = False
        """What is wanted of the field was decided, and fetched."""
        self.read_for: Tensor | None = None
        """The seeds, ascending, as long as nothing else of the field was read; None: it is read for inputs."""
        self._bound = bound
        self._share = share

    @property
    def num_bytes(self) -> int:
        return 0 if self.rows is None else self.rows.nbytes + self.index.ids.nbytes

    def adopt(self, ids_sorted: Tensor, rows: Tensor) -> None:
        """Takes rows that another process fetched."""
        self.index, self.rows = IdIndex(ids_sorted, self._bound), rows

    def fetch(self, ids_sorted: Tensor, pull: Pull) -> None:
        """Fetches rows once and adds them to those that are held.

        Args:
            ids_sorted: (n,) ascending, none of them held.
            pull: Reads rows by id from their owners.
        """
        if len(ids_sorted) == 0:
            return
        first = pull(ids_sorted[:1])
        row_bytes = max(first[0].nbytes, 1)
        all_ids, order = torch.sort(torch.cat([self.index.ids, ids_sorted]))
        rows = torch.empty((len(all_ids), *first.shape[1:]), dtype=first.dtype)
        if self._share:
            rows.share_memory_()
            all_ids.share_memory_()
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order))
        if self.rows is not None:
            rows[place[: len(self.index)]] = self.rows
        new_place = place[len(self.index) :]
        rows_per_message = max(1, _BYTES_PER_MESSAGE // row_bytes)
        for ids, positions in zip(ids_sorted.split(rows_per_message), new_place.split(rows_per_message), strict=True):
            rows[positions] = pull(ids)
        COUNTS.fill_rows += len(ids_sorted)
        COUNTS.fill_bytes += len(ids_sorted) * row_bytes
        self.index, self.rows = IdIndex(all_ids, self._bound), rows

    def read(self, ids: Tensor, pull: Pull) -> tuple[Tensor, Tensor]:
        """Reads rows, those that are held from here and the others by `pull`.

        Returns:
            `(rows, not_held)`: rows in the order of `ids`; the ids that `pull` was asked for.
        """
        if self.rows is None:
            return pull(ids), ids
        position = self.index.find(ids)
        held = position >= 0
        if not bool(held.any()):
            return pull(ids), ids
        COUNTS.held_rows += int(held.sum())
        if bool(held.all()):
            return self.rows[position], ids[:0]
        rest = ids[~held]
        pulled = pull(rest)
        rows = torch.empty((len(ids), *pulled.shape[1:]), dtype=pulled.dtype)
        rows[held] = self.rows[position[held]]
        rows[~held] = pulled
        return rows, rest
