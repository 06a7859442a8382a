# SPDX-License-Identifier: Apache-2.0
"""Small pure helpers on sorted id sets and CSC segments.

Where ids are known to lie in [0, `num_ids`) and are many beside that range, a table over it stands in for searches and
sorts: 6 ms for 5 million ids of 200,000 vertices, where a binary search takes 460 and a sort 150.
"""

from __future__ import annotations

import torch
from torch import Tensor

_SPARSEST = 4
"""A table is made if its range is at most so many times the ids that are looked up in it."""


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


def are_many(ids: Tensor, num_ids: int) -> bool:
    """Tells whether a table over [0, `num_ids`) is cheaper than a search or sort for so many ids."""
    return _SPARSEST * len(ids) >= num_ids > 0


def unique(ids: Tensor, num_ids: int) -> Tensor:
    """Returns the (u,) distinct ids, ascending.

    Args:
        ids: (n,) int64 in [0, `num_ids`).
    """
    if not are_many(ids, num_ids):
        distinct: Tensor = torch.unique(ids)
        return distinct
    is_there = torch.zeros(num_ids, dtype=torch.bool)
    return is_there.index_fill_(0, ids, True).nonzero().squeeze(1)


def count_unique(ids: Tensor, num_ids: int) -> tuple[Tensor, Tensor]:
    """Returns `(distinct, counts)`: the (u,) distinct ids, ascending, and how often each is there, int64.

    Args:
        ids: (n,) int64 in [0, `num_ids`).
    """
    if are_many(ids, num_ids):
        counts = torch.bincount(ids, minlength=num_ids)
        distinct = counts.nonzero().squeeze(1)
        return distinct, counts[distinct]
    distinct, counts = torch.unique(ids, return_counts=True)
    return distinct, counts


def find_sorted(sorted_ids: Tensor, ids: Tensor, num_ids: int = 0) -> tuple[Tensor, Tensor]:
    """Looks `ids` up in a sorted set.

    Args:
        num_ids: Ids of both lie in [0, `num_ids`); 0: nothing is known of them.

    Returns:
        `(found, position)`: (n,) bool, and (n,) int64 positions, meaningful where found.
    """
    if len(sorted_ids) == 0:
        return torch.zeros(len(ids), dtype=torch.bool), torch.zeros(len(ids), dtype=torch.int64)
    if are_many(ids, num_ids):
        position = place_of(sorted_ids, num_ids).index_select(0, ids)
        return position >= 0, position.clamp_(min=0)
    position = torch.searchsorted(sorted_ids, ids).clamp(max=len(sorted_ids) - 1)
    return torch.eq(sorted_ids[position], ids), position


def place_of(ids: Tensor, num_ids: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """Returns a (`num_ids`,) table of the positions of distinct ids; -1 for what is not among them."""
    table = torch.full((num_ids,), -1, dtype=dtype)
    table[ids] = torch.arange(len(ids), dtype=dtype)
    return table


def union(*sets: Tensor, num_ids: int = 0) -> Tensor:
    """Returns the sorted union of id sets; `num_ids` as in `find_sorted`."""
    return unique(torch.cat(sets), num_ids)


def difference(ids: Tensor, remove: Tensor, num_ids: int = 0) -> Tensor:
    """Returns the ids that are not in the sorted set `remove`, in their order; `num_ids` as in `find_sorted`."""
    found, _ = find_sorted(remove, ids, num_ids)
    return ids[~found]


def indptr_of(counts: Tensor) -> Tensor:
    """Returns the prefix sums of `counts` with a leading zero, (n + 1,)."""
    indptr = torch.zeros(len(counts) + 1, dtype=torch.int64)
    torch.cumsum(counts, 0, out=indptr[1:])
    return indptr
