# SPDX-License-Identifier: Apache-2.0
"""Small pure helpers on sorted id sets and CSC segments."""

from __future__ import annotations

import torch
from torch import Tensor


def gather_segments(indptr: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Finds the entries of some rows of a CSC matrix.

    Args:
        indptr: (N + 1,) int64.
        rows: (n,) int64 in [0, N), any order.

    Returns:
        `(counts, positions)`: (n,) entries of each row, and their positions in row order, (sum(counts),).
    """
    starts = indptr[rows]
    counts = indptr[rows + 1] - starts
    ends = torch.cumsum(counts, 0)
    total = int(ends[-1]) if len(ends) else 0
    positions = torch.arange(total) + torch.repeat_interleave(starts - (ends - counts), counts)
    return counts, positions


def find_sorted(sorted_ids: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Looks `ids` up in a sorted set.

    Returns:
        `(found, position)`: (n,) bool, and (n,) int64 positions, meaningful where found.
    """
    if len(sorted_ids) == 0:
        return torch.zeros(len(ids), dtype=torch.bool), torch.zeros(len(ids), dtype=torch.int64)
    position = torch.searchsorted(sorted_ids, ids).clamp(max=len(sorted_ids) - 1)
    return torch.eq(sorted_ids[position], ids), position


def union(*sets: Tensor) -> Tensor:
    """Returns the sorted union of id sets."""
    merged: Tensor = torch.unique(torch.cat(sets))
    return merged


def difference(ids: Tensor, remove: Tensor) -> Tensor:
    """Returns the ids that are not in the sorted set `remove`, in their order."""
    found, _ = find_sorted(remove, ids)
    return ids[~found]


def indptr_of(counts: Tensor) -> Tensor:
    """Returns the prefix sums of `counts` with a leading zero, (n + 1,)."""
    indptr = torch.zeros(len(counts) + 1, dtype=torch.int64)
    torch.cumsum(counts, 0, out=indptr[1:])
    return indptr
