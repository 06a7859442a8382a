# SPDX-License-Identifier: Apache-2.0
"""Where complete in-edge lists come from: this machine's partition, its halo, or the owners by full-fanout sampling.

All ids here are homogeneous ids of the whole graph, which a heterograph's partitions use inside as well.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import dgl
import torch
from dgl.distributed import graph_services, rpc
from torch import Tensor

from dgl_hybrid.errors import ExchangeError
from dgl_hybrid.exchange.segments import find_sorted, gather_segments, indptr_of
from dgl_hybrid.sampling.counts import COUNTS
from dgl_hybrid.sampling.list_sizes import fitting

IDS_PER_REQUEST = 50_000
"""Vertices whose in-degrees are asked for in one message."""
EDGES_PER_REQUEST = 2**20
"""Vertices and their in-edges that are asked for in one message; an answer has 24 bytes for each in-edge."""


@dataclass(frozen=True, kw_only=True)
class EdgeLists:
    """In-edge lists of some vertices, one after the other."""

    counts: Tensor
    """(n,) int64."""
    src_global: Tensor
    """(E,) int64."""
    eid_global: Tensor
    """(E,) int64."""


def concatenate_lists(parts: list[EdgeLists]) -> EdgeLists:
    """Puts lists one below the other."""
    empty = torch.empty(0, dtype=torch.int64)
    return EdgeLists(
        counts=torch.cat([empty, *(part.counts for part in parts)]),
        src_global=torch.cat([empty, *(part.src_global for part in parts)]),
        eid_global=torch.cat([empty, *(part.eid_global for part in parts)]),
    )


def cut_by_edges(degrees: Tensor, at_once: int) -> Iterator[slice]:
    """Cuts vertices into slices of up to `at_once` vertices and in-edges; whoever has more is alone."""
    ends = torch.cumsum(degrees + 1, 0)
    start = before = 0
    while start < len(degrees):
        stop = max(start + 1, int(torch.searchsorted(ends, before + at_once, right=True)))
        yield slice(start, stop)
        start, before = stop, int(ends[stop - 1])


class PartitionLists:
    """The lists that the partition of this machine holds, in the memory it shares with the server."""

    def __init__(self, g: Any) -> None:
        self._graph: dgl.DGLGraph = g.local_partition
        self._book = g.get_partition_book()
        self._partid = self._book.partid
        indptr, indices, eids = self._graph.adj_tensors("csc")
        self._indptr, self._indices, self._eids = indptr, indices, eids
        self._nid = self._graph.ndata[dgl.NID]
        self._eid = self._graph.edata[dgl.EID]
        self._halo_ids: Tensor | None = None
        self._halo_local = torch.empty(0, dtype=torch.int64)

    def is_inner(self, ids: Tensor) -> Tensor:
        """Which of these vertices this machine owns."""
        return torch.eq(self._book.nid2partid(ids), self._partid)

    def inner(self, ids: Tensor) -> EdgeLists:
        """Returns the lists of vertices that this machine owns."""
        return self._at(self._book.nid2localnid(ids, self._partid))

    def complete_halo(self) -> Tensor:
        """Returns the halo vertices whose whole list is in this partition, ascending.

        A partition written with several hops has many; one hop leaves those whose in-neighbours are all owned here.
        Their owners are asked for the true in-degrees once.
        """
        if self._halo_ids is None:
            local = torch.nonzero(self._graph.ndata["inner_node"] == 0).flatten()
            degrees = self._degrees_at(local)
            local, degrees = local[degrees > 0], degrees[degrees > 0]
            ids, order = torch.sort(self._nid[local])
            whole = degrees[order] == fetch_degrees(self._book, ids)
            self._halo_ids, self._halo_local = ids[whole], local[order][whole]
        return self._halo_ids

    def halo(self, ids: Tensor) -> EdgeLists:
        """Returns the lists of vertices that `complete_halo` named."""
        return self._at(self._halo_local[torch.searchsorted(self.complete_halo(), ids)])

    def inner_degrees(self, ids: Tensor) -> Tensor:
        """Returns the lengths of `inner`'s lists."""
        return self._degrees_at(self._book.nid2localnid(ids, self._partid))

    def halo_degrees(self, ids: Tensor) -> Tensor:
        """Returns the lengths of `halo`'s lists."""
        return self._degrees_at(self._halo_local[torch.searchsorted(self.complete_halo(), ids)])

    def _degrees_at(self, local: Tensor) -> Tensor:
        return torch.as_tensor(self._indptr[local + 1] - self._indptr[local]).to(torch.int64)

    def _at(self, local: Tensor) -> EdgeLists:
        counts, positions = gather_segments(self._indptr, local.to(self._indptr.dtype))
        # Where a graph has no ids of its edges, they are numbered as they lie.
        eids = self._eids[positions] if len(self._eids) else positions
        return EdgeLists(
            counts=counts.to(torch.int64),
            src_global=self._nid[self._indices[positions].to(torch.int64)],
            eid_global=self._eid[eids.to(torch.int64)],
        )


def fetch_degrees(partition_book: Any, ids: Tensor) -> Tensor:
    """Fetches the true in-degrees of vertices of other machines, (n,) int64 in any order, from the owners."""
    degrees = torch.zeros(len(ids), dtype=torch.int64)
    owner = partition_book.nid2partid(ids)
    for chunk in torch.arange(len(ids)).split(IDS_PER_REQUEST):
        wanted = [chunk[owner[chunk] == part] for part in range(partition_book.num_partitions())]
        requests = [
            (part, graph_services.InDegreeRequest(ids[which], part)) for part, which in enumerate(wanted) if len(which)
        ]
        if not requests:  # nothing of other machines is read here: DGL's call fails without any request
            continue
        for (part, _), response in zip(requests, rpc.remote_call_to_machine(requests), strict=True):
            degrees[wanted[part]] = torch.as_tensor(response.val).to(torch.int64)
    return degrees


def fetch_lists(partition_book: Any, ids: Tensor, degrees: Tensor) -> EdgeLists:
    """Fetches complete in-edge lists from the owners.

    The KVStore holds no structure, and `in_subgraph` of another machine ends a server of released DGL; sampling
    without a limit is answered by every server.

    Args:
        partition_book: Of the graph.
        ids: (n,) int64 ascending, none owned here.
        degrees: (n,) their in-degrees, as `fetch_degrees` returns them: an answer is as long as they say.

    Raises:
        ExchangeError: An owner sent edges of other vertices than it was asked for, or not all of them.
    """
    owner = partition_book.nid2partid(ids)
    ends = indptr_of(degrees)
    src_global, eid_global = torch.empty((2, int(ends[-1])), dtype=torch.int64)
    for some in cut_by_edges(degrees, EDGES_PER_REQUEST):
        asked = ids[some]
        wanted = [asked[owner[some] == part] for part in range(partition_book.num_partitions())]
        requests = [
            (part, graph_services.SamplingRequest(which, -1)) for part, which in enumerate(wanted) if len(which)
        ]
        answers = rpc.remote_call_to_machine(requests)
        COUNTS.fill_seeds += len(asked)
        src = torch.cat([answer.global_src for answer in answers])
        dst = torch.cat([answer.global_dst for answer in answers])
        eid = torch.cat([answer.global_eids for answer in answers])
        COUNTS.fill_bytes += src.nbytes + dst.nbytes + eid.nbytes
        position = torch.searchsorted(asked, dst).clamp_(max=len(asked) - 1)
        is_answered = torch.equal(asked[position], dst)
        if not is_answered or not torch.equal(torch.bincount(position, minlength=len(asked)), degrees[some]):
            raise ExchangeError(
                f"machines {[part for part, _ in requests]} were asked for the in-edges of {len(asked)} vertices and "
                f"sent {'fewer or more' if is_answered else 'edges of others'}. Do all servers serve the partition "
                f"folder of this job?"
            )
        order = torch.argsort(position, stable=True)  # an owner's order inside a list is kept
        begin, end = int(ends[some.start]), int(ends[some.stop])
        src_global[begin:end], eid_global[begin:end] = src[order], eid[order]
    return EdgeLists(counts=degrees, src_global=src_global, eid_global=eid_global)


class ListSource(Protocol):
    """Some lists, by id."""

    def holds(self, ids: Tensor) -> Tensor: ...

    def degrees_of(self, ids: Tensor) -> Tensor: ...

    def lists_of(self, ids: Tensor) -> EdgeLists: ...


@dataclass(frozen=True, kw_only=True)
class _Inner:
    """Of the vertices that this machine owns."""

    partition: PartitionLists

    def holds(self, ids: Tensor) -> Tensor:
        return self.partition.is_inner(ids)

    def degrees_of(self, ids: Tensor) -> Tensor:
        return self.partition.inner_degrees(ids)

    def lists_of(self, ids: Tensor) -> EdgeLists:
        return self.partition.inner(ids)


@dataclass(frozen=True, kw_only=True)
class _WholeInHalo:
    """Of the halo vertices whose lists are whole in this partition."""

    partition: PartitionLists

    def holds(self, ids: Tensor) -> Tensor:
        return find_sorted(self.partition.complete_halo(), ids)[0]

    def degrees_of(self, ids: Tensor) -> Tensor:
        return self.partition.halo_degrees(ids)

    def lists_of(self, ids: Tensor) -> EdgeLists:
        return self.partition.halo(ids)


class _Fetched:
    """Lists as they came, (n,) `ids` ascending."""

    ENTRY_BYTES = 16
    """Source and edge id."""
    LIST_BYTES = 24
    """Id, count and offset."""

    def __init__(self, ids: Tensor, lists: EdgeLists) -> None:
        self._ids, self._lists = ids, lists
        self._indptr = indptr_of(lists.counts)

    @property
    def num_bytes(self) -> int:
        return self.ENTRY_BYTES * len(self._lists.src_global) + self.LIST_BYTES * len(self._ids)

    def holds(self, ids: Tensor) -> Tensor:
        return find_sorted(self._ids, ids)[0]

    def degrees_of(self, ids: Tensor) -> Tensor:
        return self._lists.counts[torch.searchsorted(self._ids, ids)]

    def lists_of(self, ids: Tensor) -> EdgeLists:
        return _take(self._lists, self._indptr, torch.searchsorted(self._ids, ids))


class InEdgeLists:
    """Lists by id, whoever owns the vertex: of this partition, held, or fetched to decide by."""

    def __init__(self, g: Any) -> None:
        self._book = g.get_partition_book()
        partition = PartitionLists(g)
        self._local: list[ListSource] = [_Inner(partition=partition), _WholeInHalo(partition=partition)]
        self._held: list[ListSource] = []
        self._fetched: list[_Fetched] = []
        """One for each call of `fetch`, so that what came before is not copied with everything that comes."""

    @property
    def fetched_bytes(self) -> int:
        """What the lists take that were fetched and not yet chosen or dropped."""
        return sum(part.num_bytes for part in self._fetched)

    def is_known(self, ids: Tensor) -> Tensor:
        """Which of these lists can be looked up without asking anybody."""
        known = torch.ones(len(ids), dtype=torch.bool)
        known[self._find(ids)[1]] = False
        return known

    def fetch(self, ids: Tensor, *, room_bytes: float = math.inf) -> int:
        """Fetches lists that are not known yet, as many as there is room for, and returns how many that are.

        It is for a frontier at once: each further call is one more place in which lists are looked for.

        Args:
            ids: (n,) int64 without duplicates, the most wanted first.
            room_bytes: What `fetched_bytes` may grow by.
        """
        degrees = fetch_degrees(self._book, ids)
        num_bytes = _Fetched.ENTRY_BYTES * degrees + _Fetched.LIST_BYTES
        chosen = fitting(num_bytes, room_bytes)  # the list of a hub alone may be too long
        if len(chosen):
            ids, order = torch.sort(ids[chosen])
            self._fetched.append(_Fetched(ids, fetch_lists(self._book, ids, degrees[chosen[order]])))
        return len(chosen)

    def lookup(self, ids: Tensor) -> EdgeLists:
        """Returns the lists of known vertices, in order."""
        found, unknown = self._find(ids)
        assert len(unknown) == 0
        if len(found) == 1:
            return found[0][0].lists_of(ids)
        lists = concatenate_lists([source.lists_of(ids[rows]) for source, rows in found])
        # Row k of them together belongs to vertex order[k]; bring the rows back into the order asked for.
        order = torch.cat([unknown, *(rows for _, rows in found)])
        row = torch.empty_like(order)
        row[order] = torch.arange(len(order))
        return _take(lists, indptr_of(lists.counts), row)

    def degrees(self, ids: Tensor) -> Tensor:
        """Returns the lengths of the lists of known vertices, in order."""
        degrees = torch.zeros(len(ids), dtype=torch.int64)
        for source, rows in self._find(ids)[0]:
            degrees[rows] = source.degrees_of(ids[rows])
        return degrees

    def _find(self, ids: Tensor) -> tuple[list[tuple[ListSource, Tensor]], Tensor]:
        """Tells where lists are: positions in `ids` by source, for those that have any, and of unknown lists."""
        found, rest = [], torch.arange(len(ids))
        for source in (*self._local, *self._fetched, *self._held):
            is_here = source.holds(ids[rest])
            if bool(is_here.any()):
                found.append((source, rest[is_here]))
                rest = rest[~is_here]
        return found, rest

    def keep_held(self, held: ListSource | None) -> None:
        """Forgets the lists that were fetched to decide by; from now on those of `held` are known."""
        self._held = [] if held is None else [held]
        self._fetched = []


def _take(lists: EdgeLists, indptr: Tensor, rows: Tensor) -> EdgeLists:
    counts, positions = gather_segments(indptr, rows)
    return EdgeLists(counts=counts, src_global=lists.src_global[positions], eid_global=lists.eid_global[positions])
