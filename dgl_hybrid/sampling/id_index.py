# SPDX-License-Identifier: Apache-2.0
"""Finds the positions of ids in a fixed set, fast enough for every batch."""

from __future__ import annotations

import torch
from torch import Tensor

_FREE_TABLE = 2**20  # entries that a table may always have
_TABLE_PER_ID = 16  # entries per id beyond which a sorted search takes less memory for little more time


class IdIndex:
    """A set of ids, with the position of each.

    Args:
        ids_sorted: (n,) int64, ascending, without duplicates.
        bound: All ids that will ever be asked for are below it.
    """

    def __init__(self, ids_sorted: Tensor, bound: int) -> None:
        self.ids = ids_sorted
        self._table: Tensor | None = None
        if bound <= _FREE_TABLE + _TABLE_PER_ID * len(ids_sorted) and len(ids_sorted) < 2**31:
            self._table = torch.full((bound,), -1, dtype=torch.int32)
            self._table[ids_sorted] = torch.arange(len(ids_sorted), dtype=torch.int32)

    def __len__(self) -> int:
        return len(self.ids)

    def find(self, ids: Tensor) -> Tensor:
        """Returns the (m,) int64 position of every id, -1 where it is not in the set."""
        if self._table is not None:
            return self._table[ids].to(torch.int64)
        if len(self.ids) == 0:
            return torch.full_like(ids, -1)
        position = torch.searchsorted(self.ids, ids).clamp_(max=len(self.ids) - 1)
        return torch.where(self.ids[position] == ids, position, -1)
