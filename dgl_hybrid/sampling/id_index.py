# SPDX-License-Identifier: Apache-2.0
"""Finds the positions of ids in a fixed list, fast enough for every batch."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_FREE_TABLE = 2**20  # entries that a table may always have
_TABLE_PER_ID = 16  # entries per id beyond which a sorted search takes less memory for little more time
_TABLE_SHARE = 0.125  # of the room there is: a search takes ten times as long, rows that do not fit take longer
_ENTRY_BYTES = 4


def worthwhile_table_bytes(num_ids: int, bound: int, room_bytes: float) -> int:
    """Returns what a table of `bound` entries takes; 0 where so many ids are better searched for.

    Args:
        num_ids: Ids in the list.
        bound: All ids that will ever be asked for are below it.
        room_bytes: For the table and what is indexed; may be infinite.
    """
    num_bytes = _ENTRY_BYTES * bound
    is_dense = bound <= _FREE_TABLE + _TABLE_PER_ID * num_ids and num_ids < 2**31
    return num_bytes if is_dense and num_bytes <= _TABLE_SHARE * room_bytes else 0


class IdIndex:
    """A list of ids and the position of each.

    Args:
        ids: (n,) int64, ascending, without duplicates.
        bound: All ids that will ever be asked for are below it.
        room_bytes: For a table and what is indexed; may be infinite.
    """

    def __init__(self, ids: Tensor, bound: int, *, room_bytes: float = math.inf) -> None:
        self.ids = ids
        self._table: Tensor | None = None
        if worthwhile_table_bytes(len(ids), bound, room_bytes):
            self._table = torch.full((bound,), -1, dtype=torch.int32)
            self._table[ids] = torch.arange(len(ids), dtype=torch.int32)

    @property
    def table_bytes(self) -> int:
        """What it takes besides the ids."""
        return 0 if self._table is None else self._table.nbytes

    def __len__(self) -> int:
        return len(self.ids)

    def find(self, ids: Tensor) -> Tensor:
        """Returns the (m,) int64 position of every id, -1 where it is not in the list."""
        if self._table is not None:
            return self._table[ids].to(torch.int64)
        if len(self.ids) == 0:
            return torch.full_like(ids, -1)
        position = torch.searchsorted(self.ids, ids.contiguous()).clamp_(max=len(self.ids) - 1)
        return torch.where(self.ids[position] == ids, position, -1)
