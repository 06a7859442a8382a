# SPDX-License-Identifier: Apache-2.0
"""Learns from remote reads, as they happen, which ids come back: for scripts whose loaders say nothing."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_FIRST_REVIEW = 1024
LEAST_COUNTED = 2**20
"""Ids that are counted whatever there is room for: 16 MiB."""
_ROOM_PER_ID = 256
"""Bytes; a count takes 16."""


def most_counted(room_bytes: float) -> int:
    """Returns how many ids are worth counting for what may be held: counts take a sixteenth of that.

    Without a limit all that was read once is held, and need not be counted any longer.
    """
    return LEAST_COUNTED if math.isinf(room_bytes) else max(LEAST_COUNTED, int(room_bytes) // _ROOM_PER_ID)


class ObservedReads:
    """Counts ids; says when it is time to look at the counts: after 1024 ids, then each time their number doubled, and
    when there are more than are to be counted.

    Of more than half of those the ids read least are then forgotten, so that counts may be too low, never too high (as
    in Manku and Motwani, "Approximate frequency counts over data streams", VLDB 2002). A script that looks at all
    vertices or edges once, for a split or for labels, would else have all of them counted for good.

    Args:
        most: Ids to be counted.
    """

    def __init__(self, most: int = LEAST_COUNTED) -> None:
        self._most = most
        self._ids = torch.empty(0, dtype=torch.int64)
        self._counts = torch.empty(0, dtype=torch.int64)
        self._pending: list[Tensor] = []
        self._num_pending = 0
        self._num_seen = 0
        self._next_review = _FIRST_REVIEW

    @property
    def num_counted(self) -> int:
        """Ids that are held here, those of single reads several times."""
        return len(self._ids) + self._num_pending

    def add(self, ids: Tensor) -> bool:
        """Notes one read of each id; returns whether a review is due."""
        self._pending.append(ids.to(torch.int64))
        self._num_pending += len(ids)
        self._num_seen += len(ids)
        return self._num_seen >= self._next_review or self.num_counted > self._most

    def review(self, min_count: int) -> Tensor:
        """Returns the ids read at least `min_count` times, the most read first; the next review comes later."""
        self._merge()
        self._next_review = 2 * self._num_seen
        order = torch.argsort(self._counts, descending=True, stable=True)
        often = self._ids[order[self._counts[order] >= min_count]]
        if len(self._ids) > self._most // 2:
            kept = torch.sort(order[: self._most // 2]).values
            self._ids, self._counts = self._ids[kept], self._counts[kept]
        return often

    def forget(self, ids: Tensor) -> None:
        """Drops ids that need no longer be counted."""
        self._merge()
        keep = ~torch.isin(self._ids, ids)
        self._ids, self._counts = self._ids[keep], self._counts[keep]

    def _merge(self) -> None:
        if not self._pending:
            return
        new_ids, new_counts = torch.unique(torch.cat(self._pending), return_counts=True)
        ids = torch.unique(torch.cat([self._ids, new_ids]))
        counts = torch.zeros(len(ids), dtype=torch.int64)
        counts[torch.searchsorted(ids, self._ids)] += self._counts
        counts[torch.searchsorted(ids, new_ids)] += new_counts
        self._ids, self._counts = ids, counts
        self._pending, self._num_pending = [], 0
