# SPDX-License-Identifier: Apache-2.0
"""A graph of any size whose in-edges are a function of the vertex, so that one rank's part is made without the rest.

Vertices are numbered part by part. In-degrees follow a power law (Pareto 1.5); four of five sources lie in the reader's
own part, as after a good partition, the fifth anywhere, with hubs.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from dgl_hybrid.planner import PlanProblem

Ints = npt.NDArray[np.int64]

LOCAL_SHARE = 0.8
_CHUNK = 1 << 22


class GeneratedGraph:
    """`num_edges` in expectation, over `num_parts` parts of equal size."""

    def __init__(self, num_vertices: int, num_edges: int, num_parts: int, seed: int = 0) -> None:
        self.num_vertices, self.num_parts = num_vertices, num_parts
        weights = np.random.default_rng(seed).pareto(1.5, num_vertices) + 1.0
        self.in_degrees = np.maximum(1, np.round(weights * (num_edges / weights.sum()))).astype(np.int32)
        self.offsets = np.linspace(0, num_vertices, num_parts + 1).astype(np.int64)

    def owner(self, vertices: Ints) -> Ints:
        return np.searchsorted(self.offsets, vertices, side="right") - 1

    def in_edges(self, vertices: Ints) -> tuple[Ints, npt.NDArray[np.int32]]:
        """Returns (n,) counts and the sources of all in-edges, one vertex after the other."""
        counts = self.in_degrees[vertices].astype(np.int64)
        sources = np.empty(int(counts.sum()), dtype=np.int32)
        ends = np.cumsum(counts)
        begin = 0
        while begin < len(vertices):
            first = ends[begin] - counts[begin]
            end = max(begin + 1, int(np.searchsorted(ends, first + _CHUNK, side="right")))
            sources[first : ends[end - 1]] = self._draw(vertices[begin:end], counts[begin:end])
            begin = end
        return counts, sources

    def _draw(self, vertices: Ints, counts: Ints) -> Ints:
        reader = np.repeat(vertices, counts)
        rank_in_list = np.arange(len(reader)) - np.repeat(np.cumsum(counts) - counts, counts)
        words = _mix((reader * 1_000_003 + rank_in_list).astype(np.uint64))
        which = (words >> np.uint64(40)).astype(np.float64) / 2**24
        where = (words & np.uint64(0xFFFFFFFF)).astype(np.float64) / 2**32
        part = self.owner(reader)
        start, stop = self.offsets[part], self.offsets[part + 1]
        near = start + (where * (stop - start)).astype(np.int64)
        # The cube makes hubs, the product with a prime spreads them over the parts.
        far = (where**3 * self.num_vertices).astype(np.int64) * 7919 % self.num_vertices
        return np.where(which < LOCAL_SHARE, near, far)


def _mix(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of SplitMix64."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def build_problem(graph: GeneratedGraph, rank: int, num_layers: int) -> PlanProblem:
    """Makes one rank's problem, every vertex being a seed: what `build_plan_problem` would find by asking all ranks."""
    first, stop = int(graph.offsets[rank]), int(graph.offsets[rank + 1])

    def foreign_of(sources: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        return sources[(sources < first) | (sources >= stop)]

    def halo_of(sources: npt.NDArray[np.int32]) -> Ints:
        return np.unique(foreign_of(sources)).astype(np.int64)

    counts, sources = graph.in_edges(np.arange(first, stop))
    num_owned_edges = int(counts.sum())
    demanded, num_reads = np.unique(foreign_of(sources), return_counts=True)
    demanded = demanded.astype(np.int64)
    needed = [demanded] * num_layers
    for level in range(num_layers - 2, -1, -1):
        further = halo_of(graph.in_edges(needed[level + 1])[1])
        needed[level] = np.union1d(np.union1d(demanded, needed[level + 1]), further)
    halo = needed[0]
    computable = needed[1] if num_layers > 1 else halo[:0]
    counts, sources = graph.in_edges(computable)
    foreign = (sources < first) | (sources >= stop)
    reader = np.repeat(np.searchsorted(halo, computable).astype(np.int32), counts)[foreign]
    position = np.searchsorted(halo, sources[foreign])
    del sources, foreign
    expandable = np.zeros(len(halo), dtype=np.bool_)
    expandable[np.searchsorted(halo, computable)] = True
    owned_reads = np.zeros((num_layers, len(halo)), dtype=np.int32)
    reach = np.zeros((num_layers, len(halo)), dtype=np.bool_)
    for level in range(num_layers):
        owned_reads[level, np.searchsorted(halo, demanded)] = num_reads
        reach[level, np.searchsorted(halo, needed[level])] = True
    indptr = np.zeros(len(halo) + 1, dtype=np.int64)
    np.cumsum(np.bincount(reader, minlength=len(halo)), out=indptr[1:])
    return PlanProblem(
        rank=rank,
        world_size=graph.num_parts,
        num_layers=num_layers,
        halo_global=torch.from_numpy(halo),
        owner=torch.from_numpy(graph.owner(halo)),
        in_degree=torch.from_numpy(graph.in_degrees[halo].astype(np.int64)),
        expandable=torch.from_numpy(expandable),
        in_indptr=torch.from_numpy(indptr),
        in_halo=torch.from_numpy(position.astype(np.int32)),
        demand=torch.from_numpy(owned_reads > 0),
        reach=torch.from_numpy(reach),
        owned_rows=torch.full((num_layers + 1,), stop - first),
        owned_edges=torch.full((num_layers,), num_owned_edges),
        owned_reads=torch.from_numpy(owned_reads),
    )
