# SPDX-License-Identifier: Apache-2.0
"""An order of a part's vertices in which rows that read the same sources follow each other: those are in cache then.

[Note: which order, and when]
METIS (`clusters.py`) cuts the graph among a rank's own vertices into clusters whose rows fit a near cache. The rows of
a cluster, and the clusters by where theirs are on average, follow reverse Cuthill-McKee order (1969; from SciPy), which
alone does for points of a grid, but finds no communities where all vertices are a few steps from each other. Eight
in-edges of each vertex are enough for both. Components smaller than a cluster are left to that order: METIS would look
through all vertices for each.

`partition_graph` looks for an order of what each part owns and keeps it with the part; of other folders each rank looks
for it once for a graph. It is taken by a count: of every 4096 sources among its own that a rank reads in a row, how
many are distinct? So the order follows from the graph and its parts alone, from no plan and no clock (unless METIS
fails or takes five minutes). Time of sums (128 floats) in the new order over that in the given one, and of
breadth-first order alone (`make bench BENCH=ops.row_order`, where attention is, too):

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

It takes 0.16 to 0.7 s for these (1.4 s where there is nothing to find), 13 s for a million vertices of a part, of whose
edges eight million are looked at (33 s on another machine), in a process that takes 1.5 GB meanwhile, and 79 s and 6 GB
for four million.
Ordering by degree changed nothing.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
import torch
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components, reverse_cuthill_mckee
from torch import Tensor

from dgl_hybrid.partition.clusters import ClusterError, cut_into_clusters
from dgl_hybrid.partition.split import counts_to_offsets

_logger = logging.getLogger(__name__)

_KEPT_READS = 8
"""In-edges of each row that are looked at: with all of them (50, 200 a row) it takes three and ten times as long, and
sums are no faster."""

_CLUSTER_ROWS = 1500
"""On average: with 128 floats each a cluster takes 0.75 MB, which is in the near cache of one core."""

_MOST_NEIGHBORS = 8192
"""Vertices that read or are read by more are left out of the search: no order brings half a window together, and SciPy
takes time that grows with the square of a row's length (a row of 400,000: 76 s, without it 0.14 s)."""

_MAX_ROWS = 4_000_000
"""Of a part. What has more stays by id: the search would take minutes and much memory."""

_WINDOW = 4096
"""Reads in a row that are expected to share a cache: 1 MiB for 64 floats."""

_MOST_WINDOWS = 256
"""That are counted in: sorting five million reads takes longer than finding an order for them."""

MIN_EDGES = 50_000
"""Of the whole graph. Below this everything is in cache in any order."""

METIS_S = 300.0
"""At most; half of what ranks wait for each other unless they were told otherwise."""

_GAIN = 0.95
"""The new order is taken if it has at most this share of the given one's distinct reads."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LocalOrder:
    """An order of N vertices, and what it gains."""

    rows: Tensor
    """(N,) int64, every vertex once."""
    reads_by_id: float
    """See `count_reads`."""
    reads_by_locality: float

    @property
    def shares_more(self) -> bool:
        """Whether "auto" takes it."""
        return self.reads_by_locality <= _GAIN * self.reads_by_id


def is_sought(num_rows: int) -> bool:
    """Whether an order of so many vertices is looked for: there may be one, and it does not take too long."""
    return 2 <= num_rows <= _MAX_ROWS


def look_for_order(
    indptr: Tensor, indices: Tensor, timeout_s: float = METIS_S, *, needs_clusters: bool = False
) -> LocalOrder:
    """Finds an order of some vertices and counts what it gains; arguments and errors are `find_local_order`'s."""
    rows = find_local_order(indptr, indices, timeout_s, needs_clusters=needs_clusters)
    return LocalOrder(
        rows=rows,
        reads_by_id=count_reads(indptr, indices),
        reads_by_locality=count_reads(indptr, indices, rows),
    )


def find_local_order(
    indptr: Tensor, indices: Tensor, timeout_s: float = METIS_S, *, needs_clusters: bool = False
) -> Tensor:
    """Returns the (N,) vertices, cluster after cluster, as the note has it. The same for the same edges.

    Edges of vertices with more than `_MOST_NEIGHBORS` in-edges, or read by more rows than that, count as none.

    Args:
        indptr: (N + 1,) int64 of in-edges.
        indices: (E,) integer sources in [0, N).
        timeout_s: For METIS.
        needs_clusters: Without them the order is that of breadth first, and a warning says so, unless this is True.

    Raises:
        ClusterError: With `needs_clusters`, if METIS fails, or takes longer than `timeout_s`.
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
        if needs_clusters:
            raise
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
        indptr, indices = counts_to_offsets(is_kept.to(torch.int64))[indptr], indices[is_kept]
        counts = indptr.diff()
    num_kept = counts.clamp(max=_KEPT_READS)
    row = torch.repeat_interleave(torch.arange(num_rows), num_kept)
    turn = torch.arange(len(row)) - counts_to_offsets(num_kept)[row]
    source = indices[indptr[row] + turn * counts[row] // num_kept[row]]
    is_other = source != row  # METIS takes no self-loops
    row, source = row[is_other].to(torch.int32), source[is_other].to(torch.int32)
    edges = csr_array((np.ones(len(row), dtype=np.bool_), (row.numpy(), source.numpy())), shape=(num_rows, num_rows))
    return (edges + edges.T).tocsr()


def _largest(counts: Tensor) -> int:
    return int(counts.max()) if len(counts) else 0


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
        begins = counts_to_offsets(indptr.diff()[order])
        row = torch.searchsorted(begins, places, right=True) - 1
        places = places - begins[row] + indptr[order[row]]
    windows = indices[places].sort(dim=1).values
    num_distinct = int((windows.diff(dim=1) != 0).sum()) + len(windows)
    return num_distinct / windows.numel()
