# SPDX-License-Identifier: Apache-2.0
"""In-edge lists of a part's vertices: plain tensors, or read from DistDGL's shared memory without a copy."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from dataclasses import dataclass

import dgl
import torch
from torch import Tensor

from dgl_hybrid.errors import PartitionError
from dgl_hybrid.partition.narrow_ids import NarrowIds
from dgl_hybrid.partition.split import counts_to_offsets, expand_ranges

_CHUNK_EDGES = 1 << 20
"""Edges looked at together where the whole structure is walked: bounds what such a walk allocates to some 30 MiB."""


class EdgeLists(ABC):
    """Complete in-edge lists of R vertices, edges of one vertex in ascending global edge id."""

    counts: Tensor
    """(R,) int64."""

    @property
    def num_rows(self) -> int:
        """R."""
        return len(self.counts)

    @abstractmethod
    def gather(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns some lists.

        Args:
            rows: (n,) int64 in [0, R), in any order.
        Returns:
            `(counts, src_global, eid_global)`: (n,), (E,), (E,) int64.
        """

    @abstractmethod
    def sum_by_source(self, values: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Sums a value over the edges of all lists that share a source.

        Args:
            values: One for each edge, row by row in list order; None counts edges.
        Returns:
            `(src_global, sums)`: the sources, ascending, and the sum of each, in the dtype of `values` or int64.
        """

    def all_eids(self) -> Tensor:
        """Returns the global edge ids of all lists, row by row."""
        return self.gather(torch.arange(self.num_rows))[2]


class StoredLists(EdgeLists):
    """Lists held as tensors, their ids in four bytes where they fit: only plans read them.

    Args:
        indptr: (R+1,) int64.
        src_global, eid_global: (E,) int64.
    """

    def __init__(self, indptr: Tensor, src_global: Tensor, eid_global: Tensor) -> None:
        self.indptr = indptr
        self._src, self._eid = NarrowIds(src_global), NarrowIds(eid_global)
        self.counts = indptr.diff()

    @property
    def num_edges(self) -> int:
        """E."""
        return len(self._src)

    @property
    def src_global(self) -> Tensor:
        """(E,) int64, made anew."""
        return self._src.peek()

    @property
    def eid_global(self) -> Tensor:
        """(E,) int64, made anew."""
        return self._eid.peek()

    @staticmethod
    def empty() -> StoredLists:
        nothing = torch.empty(0, dtype=torch.int64)
        return StoredLists(torch.zeros(1, dtype=torch.int64), nothing, nothing)

    def gather(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        positions = expand_ranges(self.indptr[rows], self.indptr[rows + 1])
        return self.counts[rows], self._src.peek(positions), self._eid.peek(positions)

    def sum_by_source(self, values: Tensor | None = None) -> tuple[Tensor, Tensor]:
        sources, position = torch.unique(self.src_global, return_inverse=True)
        if values is None:
            return sources, torch.bincount(position, minlength=len(sources))
        return sources, torch.zeros(len(sources), dtype=values.dtype).index_add_(0, position, values)


@dataclass(frozen=True, kw_only=True, eq=False)
class SharedStructure:
    """The CSC of a DistDGL part as it lies in memory that servers and trainers share, inner vertices first."""

    indptr: Tensor
    """(V+1,) by local vertex, dtype of the graph."""
    indices: Tensor
    """(E,) local sources."""
    edge_positions: Tensor
    """(E,) local edge ids, or (0,): they are 0..E-1."""
    node_global: Tensor
    """(V,) int64."""
    edge_global: Tensor
    """(E,) int64 by local edge id."""
    is_sorted: bool
    """Every list stands in ascending global edge id already."""

    @staticmethod
    def of_graph(graph: dgl.DGLGraph) -> SharedStructure:
        """Takes views of a part's structure.

        Raises:
            PartitionError: The part was given formats without CSC.
        """
        formats = graph.formats()
        if "csc" not in formats["created"] + formats["not created"]:
            raise PartitionError(
                f"full-graph training reads the servers' shared structure by destination, which needs the graph format "
                f"csc (got {formats['created']}). Start the servers with DGL_GRAPH_FORMAT=csc, or with csc among its "
                f"formats."
            )
        indptr, indices, edge_positions = graph.adj_tensors("csc")
        structure = SharedStructure(
            indptr=indptr,
            indices=indices,
            edge_positions=edge_positions,
            node_global=graph.ndata[dgl.NID],
            edge_global=graph.edata[dgl.EID],
            is_sorted=True,
        )
        if structure._check_order():
            return structure
        return SharedStructure(
            indptr=indptr,
            indices=indices,
            edge_positions=edge_positions,
            node_global=structure.node_global,
            edge_global=structure.edge_global,
            is_sorted=False,
        )

    def sources_at(self, positions: Tensor) -> Tensor:
        """Returns local sources, int64."""
        return self.indices[positions].to(torch.int64)

    def eids_at(self, positions: Tensor) -> Tensor:
        """Returns global edge ids, int64."""
        local = self.edge_positions[positions].to(torch.int64) if len(self.edge_positions) else positions
        return self.edge_global[local]

    def _check_order(self) -> bool:
        num_edges = len(self.indices)
        starts = self.indptr.to(torch.int64)
        for begin in range(0, num_edges - 1, _CHUNK_EDGES):
            end = min(begin + _CHUNK_EDGES + 1, num_edges)  # one edge of overlap with the next chunk
            eid = self.eids_at(torch.arange(begin, end))
            descends = eid[1:] <= eid[:-1]
            # A list may begin anywhere: there the order starts anew.
            first = int(torch.searchsorted(starts, begin, right=True))
            last = int(torch.searchsorted(starts, end - 1, right=True))
            descends[starts[first:last] - begin - 1] = False
            if bool(descends.any()):
                return False
        return True


class SharedLists(EdgeLists):
    """Lists of some vertices of a shared part; global ids are looked up when they are asked for.

    Args:
        structure: The whole part's.
        local_nodes: (R,) int64 local vertices, or the first and last plus one of a range.
    """

    def __init__(self, structure: SharedStructure, local_nodes: Tensor | tuple[int, int]) -> None:
        self._structure = structure
        self._local_nodes = local_nodes
        indptr = structure.indptr
        if isinstance(local_nodes, tuple):
            first, last = local_nodes
            self.counts = indptr[first : last + 1].diff().to(torch.int64)
        else:
            self.counts = (indptr[local_nodes + 1] - indptr[local_nodes]).to(torch.int64)

    def _local(self, rows: Tensor) -> Tensor:
        if isinstance(self._local_nodes, tuple):
            return rows + self._local_nodes[0]
        return self._local_nodes[rows]

    def gather(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        structure = self._structure
        counts = self.counts[rows]
        starts = structure.indptr[self._local(rows)].to(torch.int64)
        positions = expand_ranges(starts, starts + counts)
        eid = structure.eids_at(positions)
        if not structure.is_sorted:
            order = _order_in_lists(counts, eid)
            positions, eid = positions[order], eid[order]
        return counts, structure.node_global[structure.sources_at(positions)], eid

    def sum_by_source(self, values: Tensor | None = None) -> tuple[Tensor, Tensor]:
        structure = self._structure
        dtype = torch.int64 if values is None else values.dtype
        sums = torch.zeros(len(structure.node_global), dtype=dtype)
        is_source = torch.zeros(len(structure.node_global), dtype=torch.bool)
        offsets = counts_to_offsets(self.counts)
        for first, last in self._chunks(offsets):
            counts = self.counts[first:last]
            starts = structure.indptr[self._local(torch.arange(first, last))].to(torch.int64)
            positions = expand_ranges(starts, starts + counts)
            if values is not None and not structure.is_sorted:
                positions = positions[_order_in_lists(counts, structure.eids_at(positions))]
            sources = structure.sources_at(positions)
            is_source[sources] = True
            chunk = slice(int(offsets[first]), int(offsets[last]))
            sums.index_add_(0, sources, torch.ones(len(sources), dtype=dtype) if values is None else values[chunk])
        found = torch.nonzero(is_source).flatten()
        sources_global, order = torch.sort(structure.node_global[found])
        return sources_global, sums[found][order]

    def _chunks(self, offsets: Tensor) -> list[tuple[int, int]]:
        """Ranges of rows of about `_CHUNK_EDGES` edges each."""
        cuts = torch.searchsorted(offsets, torch.arange(0, int(offsets[-1]), _CHUNK_EDGES), right=True) - 1
        bounds = torch.unique(torch.cat([cuts, torch.tensor([0, self.num_rows])])).tolist()
        return list(itertools.pairwise(bounds))


def _order_in_lists(counts: Tensor, eid_global: Tensor) -> Tensor:
    """The permutation that puts the edges of each list in ascending id and leaves the lists where they are."""
    order = torch.argsort(eid_global)
    of_list = torch.repeat_interleave(torch.arange(len(counts)), counts)
    return order[torch.argsort(of_list[order], stable=True)]
