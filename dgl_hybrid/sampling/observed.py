# SPDX-License-Identifier: Apache-2.0
"""Learns from remote reads, as they happen, which ids come back: for scripts whose loaders say nothing."""

from __future__ import annotations

import torch
from torch import Tensor

_FIRST_REVIEW = 1024
_MERGE_AT = 2**20
MOST_COUNTED = 2**20
"""Ids whose counts are kept: 16 MiB. A script that looks at all edges once is no reason for more."""


class ObservedReads:
    """Counts ids; says when it is time to look at the counts: after 1024 ids, then each time their number doubled.

    Of more ids than `MOST_COUNTED` those read least are forgotten, so that counts may be too low, never too high
    (as in Manku and Motwani, "Approximate frequency counts over data streams", VLDB 2002).
    """

    def __init__(self) -> None:
        self._ids = torch.empty(0, dtype=torch.int64)
        self._counts = torch.empty(0, dtype=torch.int64)
        self._pending: list[Tensor] = []
        self._num_pending = 0
        self._num_seen = 0
        self._next_review = _FIRST_REVIEW

    def add(self, ids: Tensor) -> bool:
        """Notes one read of each id; returns whether a review is due."""
        self._pending.append(ids.to(torch.int64))
        self._num_pending += len(ids)
        self._num_seen += len(ids)
        if self._num_pending >= _MERGE_AT:
            self._merge()
        return self._num_seen >= self._next_review

    def review(self, min_count: int) -> Tensor:
        """Returns the ids read at least `min_count` times, the most read first; the next review comes later."""
        self._merge()
        self._next_review = 2 * self._num_seen
        order = torch.argsort(self._counts, descending=True, stable=True)
        return self._ids[order[self._counts[order] >= min_count]]

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
        if len(ids) > MOST_COUNTED:  # half of them, so that this does not come with every merge
            most_read = torch.topk(counts, MOST_COUNTED // 2, sorted=False).indices.sort().values
            ids, counts = ids[most_read], counts[most_read]
        self._ids, self._counts = ids, counts
        self._pending, self._num_pending = [], 0
