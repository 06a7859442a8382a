# SPDX-License-Identifier: Apache-2.0
"""Orders the rows of a rank so that rows computed one after the other read the same sources: those are in cache then.

[Note: which order, and when]
METIS (Karypis and Kumar, "A fast and high quality multilevel scheme for partitioning irregular graphs", 1998; through
PyMetis) cuts the graph among a rank's own vertices into clusters whose rows fit a near cache. The rows of a cluster,
and the clusters by where theirs are on average, follow reverse Cuthill-McKee order (1969; from SciPy), which alone does
for points of a grid, but finds no communities where all vertices are a few steps from each other. Eight in-edges of
each vertex are enough for both.

Each rank looks for an order of what it owns, once for a graph, and tells others where their replicas stand in it: rank
by rank, so replicas of a rank are by its clusters. No plan, no clock and no earlier plan decides over the order: a run
can be repeated bit for bit. It is taken by a count: of every 4096 sources read in a row, how many are distinct? Time of
sums (128 floats) in the new order over that in the given one, and of breadth-first order alone (`make bench
BENCH=ops.row_order`, where attention is, too):

| graph (vertices, edges) | distinct, given | distinct, new | time | breadth first | taken |
|---|---|---|---|---|---|
| points of a grid, shuffled (100 k, 2.5 M) | 0.98 | 0.21 | 0.46 | 0.43 | yes |
| communities of 500, shuffled (100 k, 2 M) | 0.97 | 0.40 | 0.62 | 0.79 | yes |
| communities within communities (100 k, 5 M) | 0.94 | 0.48 | 0.50 | 0.70 | yes |
| coauthor-cs (18 k, 0.16 M) | 0.82 | 0.41 | 0.55 | 0.74 | yes |
| tolokers (12 k, 1.0 M) | 0.62 | 0.42 | 0.62 | 0.71 | yes |
| debian-deps (64 k, 0.6 M) | 0.52 | 0.43 | 0.94 | 0.98 | yes |
| uniform (100 k, 2 M) | 0.98 | 0.97 | 0.98 | 0.95 | no |
| moby-thesaurus (103 k, 3.6 M) | 0.48 | 0.52 | 0.91 | 0.94 | no |
| points of a grid, in order (100 k, 2.5 M) | 0.21 | 0.21 | 1.12 | 1.03 | no |
| communities of 500, in order (100 k, 2 M) | 0.26 | 0.39 | 0.99 | 1.32 | no |

It takes 0.02 to 0.5 s for these (1.1 s where there is nothing to find), 15 s and for that long 0.9 GB for a million
vertices of a rank, 82 s and 3.6 GB for four million. Ordering by degree changed nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import pymetis
import torch
from scipy.sparse import csr_array
from scipy.sparse.csgraph import reverse_cuthill_mckee
from torch import Tensor

from dgl_hybrid.exchange.communicator import Communicator
from dgl_hybrid.exchange.ids import Ownership, fetch_rows
from dgl_hybrid.exchange.segments import gather_segments, indptr_of
from dgl_hybrid.partition import EdgeLists

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

_MAX_ROWS = 2**30 // (2 * _KEPT_READS)
"""SciPy and METIS count edges in int32, and they are taken both ways."""

_WINDOW = 4096
"""Reads in a row that are expected to share a cache: 1 MiB for 64 floats."""

_MOST_WINDOWS = 256
"""That are counted in: sorting five million reads takes longer than finding an order for them."""

_MIN_EDGES = 50_000
"""Below this everything is in cache in any order."""

_GAIN = 0.95
"""The new order is taken if it has at most this share of the given one's distinct reads."""


class LocalPlaces:
    """Where every vertex comes if each rank puts those that it owns in a local order; found at the first use.

    It follows from the partition alone, whatever is planned for it later.

    Args:
        lists: In-edges of the vertices owned here, in their order.
    """

    def __init__(self, communicator: Communicator, ownership: Ownership, lists: EdgeLists) -> None:
        self._communicator, self._ownership, self._lists = communicator, ownership, lists
        self._of_owned: Tensor | None = None

    def of(self, ids_global: Tensor) -> Tensor:
        """Returns the (n,) int64 places of these vertices, of different ones different: those of a rank follow those
        of the rank before. Collective.

        Args:
            ids_global: (n,) int64 in any order.
        """
        if self._of_owned is None:
            self._of_owned = self._find()
        return fetch_rows(self._communicator, self._ownership, self._of_owned, ids_global)

    def _find(self) -> Tensor:
        ownership = self._ownership
        num_owned = ownership.stop - ownership.start
        places = ownership.owned()
        if 2 <= num_owned <= _MAX_ROWS:
            counts, src_global, _ = self._lists.gather(torch.arange(num_owned))
            is_owned = ownership.is_owned(src_global)
            indices = src_global.sub_(ownership.start)[is_owned]
            order = find_local_order(indptr_of(is_owned.to(torch.int64))[indptr_of(counts)], indices)
            places[order] = ownership.owned()
        return places


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


def order_rows(
    class_sizes: Sequence[int], indptr: Tensor, indices: Tensor, places: Tensor, row_order: RowOrder
) -> OrderedRows:
    """Chooses an order of the rows that keeps the level classes apart and in their order. Not collective.

    Args:
        class_sizes: Rows of each class; together C.
        indptr: (N + 1,) int64 of the layer with the most edges, whose N destinations are the first rows.
        indices: (E,) int64: positions of its sources by id; those from C on are received and stay where they are.
        places: (C,) int64 of `LocalPlaces`.
        row_order: "auto" counts both orders' reads and takes the better one.
    """
    is_small = len(indices) < (_MIN_EDGES if row_order == "auto" else 1)
    if row_order == "id" or is_small:
        return OrderedRows(order=None)
    level_class = torch.repeat_interleave(torch.arange(len(class_sizes)), torch.tensor(class_sizes))
    order = torch.argsort(places)
    order = order[torch.argsort(level_class[order], stable=True)]
    _, edges = gather_segments(indptr, order[: len(indptr) - 1])
    by_id, by_locality = count_reads(indices), count_reads(indices[edges])
    is_taken = row_order == "locality" or takes_local_order(by_id, by_locality)
    return OrderedRows(order=order if is_taken else None, reads_by_id=by_id, reads_by_locality=by_locality)


def find_local_order(indptr: Tensor, indices: Tensor) -> Tensor:
    """Returns the (N,) vertices, cluster after cluster, as the note has it. The same for the same edges.

    Edges of vertices with more than `_MOST_NEIGHBORS` in-edges, or read by more rows than that, count as none.

    Args:
        indptr: (N + 1,) int64 of in-edges.
        indices: (E,) int64 sources in [0, N).
    """
    edges = _some_edges_both_ways(indptr, indices)
    num_rows = len(indptr) - 1
    order = torch.from_numpy(reverse_cuthill_mckee(edges, symmetric_mode=True).astype(np.int64))
    num_clusters = num_rows // _CLUSTER_ROWS
    if num_clusters < 2 or edges.nnz == 0:
        return order
    adjacency = pymetis.CSRAdjacency(edges.indptr, edges.indices)
    options = pymetis.Options(seed=1, niter=1)  # ten rounds of refinement, its default, gain nothing here
    found = pymetis.part_graph(num_clusters, adjacency, options=options, recursive=False)
    cluster = torch.from_numpy(np.asarray(found.vertex_part, dtype=np.int64))
    position = torch.empty(num_rows, dtype=torch.int64)
    position[order] = torch.arange(num_rows)
    sizes = torch.bincount(cluster, minlength=num_clusters).clamp_(min=1)
    middle = torch.zeros(num_clusters, dtype=torch.int64).index_add_(0, cluster, position) // sizes
    rank_of_cluster = torch.empty(num_clusters, dtype=torch.int64)
    rank_of_cluster[torch.argsort(middle, stable=True)] = torch.arange(num_clusters)
    return order[torch.argsort(rank_of_cluster[cluster[order]], stable=True)]


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
