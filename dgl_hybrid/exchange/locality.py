# SPDX-License-Identifier: Apache-2.0
"""Orders the rows of a rank so that rows computed one after the other read the same sources: those are in cache then.

[Note: which order, and when]
METIS (`clusters.py`) cuts the graph among a rank's own vertices into clusters whose rows fit a near cache. The rows of
a cluster, and the clusters by where theirs are on average, follow reverse Cuthill-McKee order (1969; from SciPy), which
alone does for points of a grid, but finds no communities where all vertices are a few steps from each other. Eight
in-edges of each vertex are enough for both. Components smaller than a cluster are left to that order: METIS would look
through all vertices for each.

Each rank looks for an order of what it owns, once for a graph, and tells others where their replicas stand in it: rank
by rank, so replicas of a rank are by its clusters. It is taken by a count: of every 4096 sources among its own that a
rank reads in a row, how many are distinct? So the order follows from the graph and its parts alone, from no plan and no
clock (unless METIS fails or takes five minutes, of which a rank warns). Time of sums (128 floats) in the new order over
that in the given one, and of breadth-first order alone (`make bench BENCH=ops.row_order`, where attention is, too):

| graph (vertices, edges) | distinct, given | distinct, new | time | breadth first | taken |
|---|---|---|---|---|---|
| points of a grid, shuffled (100 k, 2.5 M) | 0.98 | 0.21 | 0.46 | 0.43 | yes |
| communities of 500, shuffled (100 k, 2 M) | 0.97 | 0.40 | 0.62 | 0.78 | yes |
| communities within communities (100 k, 5 M) | 0.94 | 0.48 | 0.47 | 0.67 | yes |
| coauthor-cs (18 k, 0.16 M) | 0.82 | 0.41 | 0.68 | 0.76 | yes |
| tolokers (12 k, 1.0 M) | 0.62 | 0.42 | 0.63 | 0.75 | yes |
| debian-deps (64 k, 0.6 M) | 0.52 | 0.44 | 0.90 | 0.94 | yes |
| uniform (100 k, 2 M) | 0.98 | 0.97 | 0.98 | 1.01 | no |
| moby-thesaurus (103 k, 3.6 M) | 0.48 | 0.52 | 0.92 | 0.97 | no |
| points of a grid, in order (100 k, 2.5 M) | 0.21 | 0.21 | 1.06 | 0.96 | no |
| communities of 500, in order (100 k, 2 M) | 0.26 | 0.39 | 0.98 | 1.25 | no |

It takes 0.16 to 0.7 s for these (1.4 s where there is nothing to find), 13 s for a million vertices of a rank, of whose
edges eight million are looked at, in a process that takes 1.5 GB meanwhile, and 79 s and 6 GB for four million.
Ordering by degree changed nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
import torch
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components, reverse_cuthill_mckee
from torch import Tensor

from dgl_hybrid.exchange.clusters import ClusterError, cut_into_clusters
from dgl_hybrid.exchange.communicator import Communicator
from dgl_hybrid.exchange.ids import Ownership, fetch_rows
from dgl_hybrid.exchange.segments import indptr_of
from dgl_hybrid.partition import EdgeLists
from dgl_hybrid.partition.narrow_ids import narrow_dtype

_logger = logging.getLogger(__name__)

RowOrder = Literal["auto", "id", "locality"]
"""Within a level class: the order that shares more reads, ascending global id, or always that of `LocalPlaces`."""

_KEPT_READS = 8
"""In-edges of each row that are looked at: with all of them (50, 200 a row) it takes three and ten times as long, and
sums are no faster."""

_CLUSTER_ROWS = 1500
"""On average: with 128 floats each a cluster takes 0.75 MB, which is in the near cache of one core."""

_MOST_NEIGHBORS = 8192
"""Vertices that read or are read by more are left out of the search: no order brings half a window together, and SciPy
takes time that grows with the square of a row's length (a row of 400,000: 76 s, without it 0.14 s)."""

_MAX_ROWS = 4_000_000
"""Of a rank. What has more stays by id: the search would take minutes and much memory."""

_WINDOW = 4096
"""Reads in a row that are expected to share a cache: 1 MiB for 64 floats."""

_MOST_WINDOWS = 256
"""That are counted in: sorting five million reads takes longer than finding an order for them."""

_MIN_EDGES = 50_000
"""Of the whole graph. Below this everything is in cache in any order."""

_METIS_S = 300.0
"""At most; half of what ranks wait for each other unless they were told otherwise."""
_GAIN = 0.95
"""The new order is taken if it has at most this share of the given one's distinct reads."""


class LocalPlaces:
    """Where every vertex comes if each rank puts those that it owns in a local order; found once.

    Args:
        lists: In-edges of the vertices owned here, in their order.
        num_edges: Of the whole graph.
    """

    def __init__(self, communicator: Communicator, ownership: Ownership, lists: EdgeLists, num_edges: int) -> None:
        self._communicator, self._ownership, self._lists = communicator, ownership, lists
        self._is_small = num_edges < _MIN_EDGES
        self._of_owned: Tensor | None = None
        self._shares_more = False

    @property
    def are_known(self) -> bool:
        """Whether they were looked for: alike on all ranks, if all make the same loaders."""
        return self._of_owned is not None

    def are_used(self, row_order: RowOrder) -> bool:
        """Whether rows may lie otherwise than by id: alike on all ranks."""
        return row_order == "locality" or (row_order == "auto" and not self._is_small)

    def is_local(self, row_order: RowOrder) -> bool:
        """Whether this rank's own rows are in the order that it found."""
        return self.are_used(row_order) and (row_order == "locality" or self._shares_more)

    def find(self, row_order: RowOrder) -> None:
        """Looks for an order of this rank's own vertices, if it may be used and is not known. Not collective."""
        if self._of_owned is not None or not self.are_used(row_order):
            return
        begin = time.perf_counter()
        start, stop = self._ownership.start, self._ownership.stop
        places = torch.arange(start, stop)
        if 2 <= stop - start <= _MAX_ROWS:
            indptr, indices = self._own_edges()
            # Ranks wait for each other before and after: who finds no clusters in half of that time does without.
            order = find_local_order(indptr, indices, min(_METIS_S, self._communicator.timeout_s / 2))
            places[order] = torch.arange(start, stop)
            by_id, by_locality = count_reads(indptr, indices), count_reads(indptr, indices, order)
            self._shares_more = takes_local_order(by_id, by_locality)
            _logger.info(
                "rows by %s: of %d sources read in a row %.0f %% are distinct by id, %.0f %% by locality (%.1f s)",
                *("locality" if self._shares_more else "id", _WINDOW, 100 * by_id, 100 * by_locality),
                time.perf_counter() - begin,
            )
        self._of_owned = places

    def of(self, ids_global: Tensor, row_order: RowOrder) -> Tensor:
        """Returns the (n,) int64 places of these vertices; those of a rank follow those of the rank before. Collective.

        Args:
            ids_global: (n,) int64 in any order.
            row_order: For which `find` was called, on all ranks.
        """
        assert self._of_owned is not None
        of_owned = self._of_owned if self.is_local(row_order) else self._ownership.owned()
        return fetch_rows(self._communicator, self._ownership, of_owned, ids_global)

    def _own_edges(self) -> tuple[Tensor, Tensor]:
        """Returns the in-edges of owned vertices from owned ones: (N + 1,) int64 and (E,) narrow local sources."""
        ownership = self._ownership
        num_owned = ownership.stop - ownership.start
        counts, src_global, _ = self._lists.gather(torch.arange(num_owned))
        is_owned = ownership.is_owned(src_global)
        indptr = indptr_of(is_owned.to(torch.int64))[indptr_of(counts)]
        return indptr, (src_global[is_owned] - ownership.start).to(narrow_dtype(num_owned))


def check_row_order(row_order: str) -> RowOrder:
    """Returns a valid `RowOrder`.

    Raises:
        ValueError: For any other string.
    """
    if row_order not in get_args(RowOrder):
        raise ValueError(f"row_order must be one of {', '.join(get_args(RowOrder))} (got {row_order!r})")
    return row_order  # type: ignore[return-value]


def order_rows(class_sizes: Sequence[int], places: Tensor) -> Tensor:
    """Returns (C,) int64: which row comes at each position, classes apart and in their order, each by places.

    Args:
        class_sizes: Rows of each class; together C.
        places: (C,) of the rows, class by class.
    """
    level_class = torch.repeat_interleave(torch.arange(len(class_sizes)), torch.tensor(class_sizes))
    order = torch.argsort(places)
    return order[torch.argsort(level_class[order], stable=True)]


def find_local_order(indptr: Tensor, indices: Tensor, timeout_s: float = _METIS_S) -> Tensor:
    """Returns the (N,) vertices, cluster after cluster, as the note has it. The same for the same edges.

    Edges of vertices with more than `_MOST_NEIGHBORS` in-edges, or read by more rows than that, count as none.

    Args:
        indptr: (N + 1,) int64 of in-edges.
        indices: (E,) integer sources in [0, N).
        timeout_s: Without clusters after so long, the order is that of breadth first.
    """
    edges = _some_edges_both_ways(indptr, indices)
    order = torch.from_numpy(reverse_cuthill_mckee(edges, symmetric_mode=True).astype(np.int64))
    if len(order) < 2 * _CLUSTER_ROWS:
        return order
    # "Strong", which is the same where every edge has its reverse, and needs no second copy of them.
    _, component = connected_components(edges, directed=True, connection="strong")
    rows = np.flatnonzero(np.bincount(component)[component] > _CLUSTER_ROWS)
    num_clusters = len(rows) // _CLUSTER_ROWS
    if num_clusters < 2:
        return order
    if len(rows) < len(order):
        edges = edges[rows][:, rows]
    try:
        found = cut_into_clusters(edges.indptr, edges.indices, num_clusters, timeout_s)
        cluster = torch.from_numpy(found.astype(np.int64))
    except ClusterError as error:
        _logger.warning("rows are put in breadth-first order, not in clusters, and epochs may take longer: %s", error)
        return order
    position = torch.empty(len(order), dtype=torch.int64)
    position[order] = torch.arange(len(order))
    clustered = torch.from_numpy(rows)
    sizes = torch.bincount(cluster, minlength=num_clusters).clamp_(min=1)
    middle = torch.zeros(num_clusters, dtype=torch.int64).index_add_(0, cluster, position[clustered]) // sizes
    # Where two clusters have one middle, or a row stands there that is in none, each cluster comes as a whole, too.
    key = (num_clusters + 1) * position
    key[clustered] = (num_clusters + 1) * middle[cluster] + 1 + cluster
    return order[torch.argsort(key[order], stable=True)]


def _some_edges_both_ways(indptr: Tensor, indices: Tensor) -> csr_array:
    """Returns at most `_KEPT_READS` in-edges of each row, evenly taken, and their reverses, none to the row itself."""
    num_rows = len(indptr) - 1
    counts, num_readers = indptr.diff(), torch.bincount(indices, minlength=num_rows)
    if max(_largest(counts), _largest(num_readers)) > _MOST_NEIGHBORS:
        is_kept = torch.repeat_interleave(counts <= _MOST_NEIGHBORS, counts) & (num_readers <= _MOST_NEIGHBORS)[indices]
        indptr, indices = indptr_of(is_kept.to(torch.int64))[indptr], indices[is_kept]
        counts = indptr.diff()
    num_kept = counts.clamp(max=_KEPT_READS)
    row = torch.repeat_interleave(torch.arange(num_rows), num_kept)
    turn = torch.arange(len(row)) - indptr_of(num_kept)[row]
    source = indices[indptr[row] + turn * counts[row] // num_kept[row]]
    is_other = source != row  # METIS takes no self-loops
    row, source = row[is_other].to(torch.int32), source[is_other].to(torch.int32)
    edges = csr_array((np.ones(len(row), dtype=np.bool_), (row.numpy(), source.numpy())), shape=(num_rows, num_rows))
    return (edges + edges.T).tocsr()


def _largest(counts: Tensor) -> int:
    return int(counts.max()) if len(counts) else 0


def takes_local_order(reads_by_id: float, reads_by_locality: float) -> bool:
    """Whether "auto" does, by what `count_reads` finds in either order."""
    return reads_by_locality <= _GAIN * reads_by_id


def count_reads(indptr: Tensor, indices: Tensor, order: Tensor | None = None) -> float:
    """Returns the share of distinct sources in windows of consecutive reads, a stand-in for the misses of a cache.

    Of many windows some, at even distances.

    Args:
        indptr: (N + 1,) int64.
        indices: (E,) integer sources.
        order: (N,) int64 in which rows are read; None: as they are.
    """
    if len(indices) == 0:
        return 0.0
    window = min(_WINDOW, len(indices))
    num_windows = len(indices) // window
    begins = window * torch.arange(0, num_windows, -(-num_windows // _MOST_WINDOWS))
    places = begins.unsqueeze(1) + torch.arange(window)
    if order is not None:
        begins = indptr_of(indptr.diff()[order])
        row = torch.searchsorted(begins, places, right=True) - 1
        places = places - begins[row] + indptr[order[row]]
    windows = indices[places].sort(dim=1).values
    num_distinct = int((windows.diff(dim=1) != 0).sum()) + len(windows)
    return num_distinct / windows.numel()
