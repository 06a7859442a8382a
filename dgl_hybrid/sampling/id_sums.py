# SPDX-License-Identifier: Apache-2.0
"""Sums by id of more values than memory has room for at once."""

from __future__ import annotations

import torch
from torch import Tensor

_MERGE_AT = 2**20


class IdSums:
    """Adds up values by id as they come; keeps a few times as much as there are different ids."""

    def __init__(self) -> None:
        self._ids = torch.empty(0, dtype=torch.int64)
        self._sums = torch.empty(0, dtype=torch.float64)
        self._pending: list[tuple[Tensor, Tensor]] = []
        self._num_pending = 0

    def add(self, ids: Tensor, values: Tensor) -> None:
        """Adds (n,) float64 values to the sums of (n,) int64 ids, in any order and with duplicates."""
        unique, position = torch.unique(ids, return_inverse=True)
        self._pending.append((unique, _summed(len(unique), position, values)))
        self._num_pending += len(unique)
        if self._num_pending >= max(_MERGE_AT, len(self._ids)):  # so an id is merged a few times, not with every part
            self._merge()

    def result(self) -> tuple[Tensor, Tensor]:
        """Returns the ids, ascending, and their sums."""
        self._merge()
        return self._ids, self._sums

    def _merge(self) -> None:
        parts = [(self._ids, self._sums), *self._pending]
        self._ids, position = torch.unique(torch.cat([ids for ids, _ in parts]), return_inverse=True)
        self._sums = _summed(len(self._ids), position, torch.cat([sums for _, sums in parts]))
        self._pending, self._num_pending = [], 0


def _summed(size: int, position: Tensor, values: Tensor) -> Tensor:
    return torch.zeros(size, dtype=torch.float64).index_add_(0, position, values)
