# SPDX-License-Identifier: Apache-2.0
"""Finds the positions of ids in a fixed list, fast enough for every batch."""

from __future__ import annotations

import torch
from torch import Tensor

_FREE_TABLE = 2**20  # entries that a table may always have
_TABLE_PER_ID = 16  # entries per id beyond which a sorted search takes less memory for little more time


class IdIndex:
    """A list of ids and the position of each.

    Args:
        ids: (n,) int64 in any order, without duplicates.
        bound: All ids that will ever be asked for are below it.
    """

    def __init__(self, ids: Tensor, bound: int) -> None:
        self.ids = ids
        self._table: Tensor | None = None
        self._sorted = self._position = ids[:0]
        if bound <= _FREE_TABLE + _TABLE_PER_ID * len(ids) and len(ids) < 2**31:
            self._table = torch.full((bound,), -1, dtype=torch.int32)
            self._table[ids] = torch.arange(len(ids), dtype=torch.int32)
        else:
            self._sorted, self._position = torch.sort(ids)

    def __len__(self) -> int:
        return len(self.ids)

    def find(self, ids: Tensor) -> Tensor:
        """Returns the (m,) int64 position of every id, -1 where it is not in the list."""
        if self._table is not None:
            return self._table[ids].to(torch.int64)
        if len(self.ids) == 0:
            return torch.full_like(ids, -1)
        position = torch.searchsorted(self._sorted, ids).clamp_(max=len(self.ids) - 1)
        return torch.where(self._sorted[position] == ids, self._position[position], -1)
