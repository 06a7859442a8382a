# SPDX-License-Identifier: Apache-2.0
"""Where complete in-edge lists come from: this machine's partition, its halo, or the owners by full-fanout sampling.

All ids here are homogeneous ids of the whole graph, which a heterograph's partitions use inside as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import dgl
import torch
from dgl.distributed import graph_services, rpc
from torch import Tensor

from dgl_hybrid.errors import ExchangeError
from dgl_hybrid.exchange.segments import find_sorted, gather_segments, indptr_of
from dgl_hybrid.sampling.counts import COUNTS

SEEDS_PER_REQUEST = 50_000
"""Vertices asked for in one message; an answer has 24 bytes for each of their in-edges."""

LIST_ENTRY_BYTES = 10
"""What an in-edge takes in a held list: an index, an edge id, and its share of the ids of sources."""
LIST_BYTES = 24
"""What a held list takes besides its entries."""


@dataclass(frozen=True, kw_only=True)
class EdgeLists:
    """In-edge lists of some vertices, one after the other."""

    counts: Tensor
    """(n,) int64."""
    src_global: Tensor
    """(E,) int64."""
    eid_global: Tensor
    """(E,) int64."""

    @property
    def num_bytes(self) -> int:
        """What holding them takes, about."""
        return LIST_ENTRY_BYTES * len(self.src_global) + LIST_BYTES * len(self.counts)


def concatenate_lists(parts: list[EdgeLists]) -> EdgeLists:
    """Puts lists one below the other."""
    empty = torch.empty(0, dtype=torch.int64)
    return EdgeLists(
        counts=torch.cat([empty, *(part.counts for part in parts)]),
        src_global=torch.cat([empty, *(part.src_global for part in parts)]),
        eid_global=torch.cat([empty, *(part.eid_global for part in parts)]),
    )


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
            whole = degrees[order] == self._true_degrees(ids)
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
        return EdgeLists(
            counts=counts.to(torch.int64),
            src_global=self._nid[self._indices[positions].to(torch.int64)],
            eid_global=self._eid[self._eids[positions].to(torch.int64)],
        )

    def _true_degrees(self, ids: Tensor) -> Tensor:
        degrees = torch.zeros(len(ids), dtype=torch.int64)
        owner = self._book.nid2partid(ids)
        for chunk in torch.arange(len(ids)).split(SEEDS_PER_REQUEST):
            wanted = [chunk[owner[chunk] == part] for part in range(self._book.num_partitions())]
            requests = [
                (part, graph_services.InDegreeRequest(ids[which], part))
                for part, which in enumerate(wanted)
                if len(which)
            ]
            if not requests:  # nothing of other machines is read here: DGL's call fails without any request
                continue
            for (part, _), response in zip(requests, rpc.remote_call_to_machine(requests), strict=True):
                degrees[wanted[part]] = torch.as_tensor(response.val).to(torch.int64)
        return degrees


def fetch_lists(partition_book: Any, ids: Tensor) -> EdgeLists:
    """Fetches complete in-edge lists from the owners.

    The KVStore holds no structure, and `in_subgraph` of another machine ends a server of released DGL; sampling
    without a limit is answered by every server.

    Args:
        partition_book: Of the graph.
        ids: (n,) int64 ascending, none owned here.

    Raises:
        ExchangeError: An owner sent edges of other vertices than it was asked for.
    """
    owner = partition_book.nid2partid(ids)
    parts: list[EdgeLists] = []
    for chunk in torch.arange(len(ids)).split(SEEDS_PER_REQUEST):
        asked = ids[chunk]
        wanted = [asked[owner[chunk] == part] for part in range(partition_book.num_partitions())]
        requests = [
            (part, graph_services.SamplingRequest(which, -1)) for part, which in enumerate(wanted) if len(which)
        ]
        answers = rpc.remote_call_to_machine(requests) if requests else []
        COUNTS.fill_seeds += len(asked)
        empty = torch.empty(0, dtype=torch.int64)
        src = torch.cat([empty, *(answer.global_src for answer in answers)])
        dst = torch.cat([empty, *(answer.global_dst for answer in answers)])
        eid = torch.cat([empty, *(answer.global_eids for answer in answers)])
        COUNTS.fill_bytes += src.nbytes + dst.nbytes + eid.nbytes
        position = torch.searchsorted(asked, dst).clamp_(max=len(asked) - 1)
        if not torch.equal(asked[position], dst):
            raise ExchangeError(
                f"machines {[part for part, _ in requests]} were asked for the in-edges of {len(asked)} vertices and "
                f"sent edges of others. Do all servers serve the partition folder of this job?"
            )
        order = torch.argsort(position, stable=True)  # an owner's order inside a list is kept
        parts.append(
            EdgeLists(
                counts=torch.bincount(position, minlength=len(asked)), src_global=src[order], eid_global=eid[order]
            )
        )
    return concatenate_lists(parts)


class HeldLists(Protocol):
    """Lists that were chosen to be held, as `HaloGraph` has them."""

    def holds(self, ids: Tensor) -> Tensor: ...

    def degrees_of(self, ids: Tensor) -> Tensor: ...

    def lists_of(self, ids: Tensor) -> EdgeLists: ...


class InEdgeLists:
    """Lists by id, whoever owns the vertex: of this partition, held, or fetched to decide by."""

    def __init__(self, g: Any) -> None:
        self._book = g.get_partition_book()
        self._partition = PartitionLists(g)
        self._held: HeldLists | None = None
        self._fetched_ids = torch.empty(0, dtype=torch.int64)
        self._fetched = concatenate_lists([])
        self._fetched_indptr = indptr_of(self._fetched.counts)

    @property
    def fetched_bytes(self) -> int:
        """What the lists take that were fetched and not yet chosen or dropped."""
        return self._fetched.num_bytes

    def is_known(self, ids: Tensor) -> Tensor:
        """Which of these lists can be looked up without asking anybody."""
        known = self._partition.is_inner(ids)
        known |= find_sorted(self._partition.complete_halo(), ids)[0] | find_sorted(self._fetched_ids, ids)[0]
        return known if self._held is None else known | self._held.holds(ids)

    def fetch(self, ids: Tensor) -> None:
        """Fetches lists that are not known yet, (n,) int64 ascending."""
        if len(ids) == 0:
            return
        together = concatenate_lists([self._fetched, fetch_lists(self._book, ids)])
        self._fetched_ids, order = torch.sort(torch.cat([self._fetched_ids, ids]))
        self._fetched = _take(together, order)
        self._fetched_indptr = indptr_of(self._fetched.counts)

    def lookup(self, ids: Tensor) -> EdgeLists:
        """Returns the lists of known vertices, in order."""
        inner, in_halo, fetched, held = self._sources_of(ids)
        parts = [
            self._partition.inner(ids[inner]),
            self._partition.halo(ids[in_halo]),
            _take(self._fetched, torch.searchsorted(self._fetched_ids, ids[fetched]), self._fetched_indptr),
        ]
        if self._held is not None and bool(held.any()):
            parts.append(self._held.lists_of(ids[held]))
        # Row k of them together belongs to vertex order[k]; bring the rows back into the order asked for.
        order = torch.cat([torch.nonzero(mask).flatten() for mask in (inner, in_halo, fetched, held)])
        row = torch.empty_like(order)
        row[order] = torch.arange(len(order))
        return _take(concatenate_lists(parts), row)

    def degrees(self, ids: Tensor) -> Tensor:
        """Returns the lengths of the lists of known vertices, in order."""
        inner, in_halo, fetched, held = self._sources_of(ids)
        degrees = torch.zeros(len(ids), dtype=torch.int64)
        degrees[inner] = self._partition.inner_degrees(ids[inner])
        degrees[in_halo] = self._partition.halo_degrees(ids[in_halo])
        degrees[fetched] = self._fetched.counts[torch.searchsorted(self._fetched_ids, ids[fetched])]
        if self._held is not None:
            degrees[held] = self._held.degrees_of(ids[held])
        return degrees

    def _sources_of(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Whose list is where: of this machine, whole in its halo, fetched, held."""
        inner = self._partition.is_inner(ids)
        in_halo = ~inner & find_sorted(self._partition.complete_halo(), ids)[0]
        fetched = ~inner & ~in_halo & find_sorted(self._fetched_ids, ids)[0]
        return inner, in_halo, fetched, ~inner & ~in_halo & ~fetched

    def keep_held(self, held: HeldLists | None) -> None:
        """Forgets the lists that were fetched to decide by; from now on those of `held` are known."""
        self._held = held
        self._fetched_ids = torch.empty(0, dtype=torch.int64)
        self._fetched = concatenate_lists([])
        self._fetched_indptr = indptr_of(self._fetched.counts)


def _take(lists: EdgeLists, rows: Tensor, indptr: Tensor | None = None) -> EdgeLists:
    _, positions = gather_segments(indptr_of(lists.counts) if indptr is None else indptr, rows)
    return EdgeLists(
        counts=lists.counts[rows], src_global=lists.src_global[positions], eid_global=lists.eid_global[positions]
    )
