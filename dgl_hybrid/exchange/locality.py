# SPDX-License-Identifier: Apache-2.0
"""Orders the rows of a rank so that rows computed one after the other read the same sources: those are in cache then.

[Note: which order, and when]
Candidate: reverse Cuthill-McKee (Cuthill and McKee, "Reducing the bandwidth of sparse symmetric matrices", 1969) of the
edges among held rows, from SciPy; 0.1 s for 2.5 million edges. It is taken by a count, not by a clock, so that a run
can be repeated bit for bit and a busy machine chooses as a quiet one does: of every 4096 sources read in a row, how
many are distinct? Sums over in-edges, one thread, F = 64, time in the new order over time in the given one:

| graph (vertices, edges) | distinct, given | distinct, new | time | taken |
|---|---|---|---|---|
| points of a grid, shuffled (100 k, 2.5 M) | 0.98 | 0.20 | 0.23 | yes |
| communities of 500, shuffled (100 k, 2 M) | 0.97 | 0.78 | 0.87 | yes |
| coauthor-cs (18 k, 0.16 M) | 0.82 | 0.57 | 0.81 | yes |
| tolokers (12 k, 1.0 M) | 0.62 | 0.46 | 0.89 | yes |
| power law (100 k, 3 M) | 0.92 | 0.91 | 0.99 | no |
| uniform (100 k, 2 M) | 0.98 | 0.96 | 0.95 | no |
| moby-thesaurus (103 k, 2.5 M) | 0.39 | 0.41 | 0.93 | no |
| debian-deps (64 k, 0.3 M) | 0.68 | 0.75 | 0.96 | no |
| points of a grid, in order (100 k, 2.5 M) | 0.21 | 0.20 | 0.97 | no |
| communities of 500, in order (100 k, 2 M) | 0.35 | 0.79 | 1.30 | no |

The times are of DGL's kernel; ours gain as much (shuffled grid: sum 0.20, fused attention 0.24). Ordering by degree
changed nothing (0.95 to 1.14), and clusters by label propagation were seldom better and took forty times as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from scipy.sparse import csr_array
from scipy.sparse.csgraph import reverse_cuthill_mckee
from torch import Tensor

from dgl_hybrid.exchange.segments import gather_segments, indptr_of

RowOrder = Literal["auto", "id", "locality"]
"""Within a level class: the order that shares more reads, ascending global id, or always that of `find_local_order`."""

_WINDOW = 4096
"""Reads in a row that are expected to share a cache: 1 MiB for 64 floats."""

_MOST_WINDOWS = 256
"""That are counted in: sorting five million reads takes longer than finding a new order for them."""

_MIN_EDGES = 50_000
"""Below this everything is in cache in any order."""

_MAX_EDGES = 2**30
"""SciPy counts in int32, and the edges are taken both ways."""

_MOST_NEIGHBORS = 8192
"""Vertices that read or are read by more are left out of the search: no order brings half a window together, and SciPy
takes time that grows with the square of a row's length (a row of 400,000: 76 s, without it 0.14 s)."""

_GAIN = 0.9
"""The new order is taken if it has at most this share of the given one's distinct reads."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OrderedRows:
    """How the rows of a rank are ordered."""

    order: Tensor | None
    """(C,) int64: which row of the order by id comes at each position; None: the order by id stays."""
    reads_by_id: float | None = None
    """Distinct sources per read in the order by id, 0 to 1; None: not looked at."""
    reads_by_locality: float | None = None

    def __str__(self) -> str:
        if self.reads_by_id is None or self.reads_by_locality is None:
            return "rows by id"
        return (
            f"rows by {'id' if self.order is None else 'locality'}: of {_WINDOW} sources read in a row "
            f"{self.reads_by_id:.0%} are distinct by id, {self.reads_by_locality:.0%} by locality"
        )


def check_row_order(row_order: str) -> RowOrder:
    """Returns a valid `RowOrder`.

    Raises:
        ValueError: For any other string.
    """
    if row_order not in get_args(RowOrder):
        raise ValueError(f"row_order must be one of {', '.join(get_args(RowOrder))} (got {row_order!r})")
    return row_order  # type: ignore[return-value]


def order_rows(class_sizes: Sequence[int], indptr: Tensor, indices: Tensor, row_order: RowOrder) -> OrderedRows:
    """Chooses an order of the rows that keeps the level classes apart and in their order. Not collective.

    Args:
        class_sizes: Rows of each class; together C.
        indptr: (N + 1,) int64 of the layer with the most edges, whose N destinations are the first rows.
        indices: (E,) int64: positions of its sources by id; those from C on are received and stay where they are.
        row_order: "auto" counts both orders' reads and takes the better one.
    """
    is_small = len(indices) < (_MIN_EDGES if row_order == "auto" else 1)
    if row_order == "id" or is_small or len(indices) >= _MAX_EDGES:
        return OrderedRows(order=None)
    num_rows = sum(class_sizes)
    position = torch.empty(num_rows, dtype=torch.int64)
    position[find_local_order(num_rows, indptr, indices)] = torch.arange(num_rows)
    level_class = torch.repeat_interleave(torch.arange(len(class_sizes)), torch.tensor(class_sizes))
    order = torch.argsort(level_class * num_rows + position)
    _, places = gather_segments(indptr, order[: len(indptr) - 1])
    by_id, by_locality = count_reads(indices), count_reads(indices[places])
    is_taken = row_order == "locality" or by_locality <= _GAIN * by_id
    return OrderedRows(order=order if is_taken else None, reads_by_id=by_id, reads_by_locality=by_locality)


def find_local_order(num_rows: int, indptr: Tensor, indices: Tensor) -> Tensor:
    """Returns the (num_rows,) rows in reverse Cuthill-McKee order of the edges among them, taken both ways.

    Edges of vertices with more than `_MOST_NEIGHBORS` in-edges, or read by more rows than that, count as none.

    Args:
        indptr: (N + 1,) int64, N <= num_rows.
        indices: (E,) int64 sources; those from num_rows on are left out.
    """
    is_held = indices < num_rows
    num_read = indptr_of(is_held.to(torch.int64))[indptr].diff()
    num_readers = torch.bincount(indices[is_held], minlength=num_rows)
    if max(_largest(num_read), _largest(num_readers)) > _MOST_NEIGHBORS:
        is_held &= torch.repeat_interleave(num_read <= _MOST_NEIGHBORS, indptr.diff())
        is_held &= (num_readers <= _MOST_NEIGHBORS)[indices.clamp(max=num_rows - 1)]
        num_read = indptr_of(is_held.to(torch.int64))[indptr].diff()
    counts = torch.zeros(num_rows, dtype=torch.int64)
    counts[: len(indptr) - 1] = num_read
    held = indices[is_held].to(torch.int32)
    edges = csr_array(
        (np.ones(len(held), dtype=np.bool_), held.numpy(), indptr_of(counts).to(torch.int32).numpy()),
        shape=(num_rows, num_rows),
    )
    both_ways = (edges + edges.T).tocsr()
    return torch.from_numpy(reverse_cuthill_mckee(both_ways, symmetric_mode=True).astype(np.int64))


def _largest(counts: Tensor) -> int:
    return int(counts.max()) if len(counts) else 0


def count_reads(sources: Tensor) -> float:
    """Returns the share of distinct ids in windows of consecutive reads, a stand-in for the misses of a cache.

    Of many windows some, at even distances.

    Args:
        sources: (E,) integers in the order they are read.
    """
    if len(sources) == 0:
        return 0.0
    window = min(_WINDOW, len(sources))
    windows = sources[: len(sources) // window * window].view(-1, window)
    windows = windows[:: -(-len(windows) // _MOST_WINDOWS)].sort(dim=1).values
    num_distinct = int((windows.diff(dim=1) != 0).sum()) + len(windows)
    return num_distinct / windows.numel()
