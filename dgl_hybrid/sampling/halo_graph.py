# SPDX-License-Identifier: Apache-2.0
"""Complete in-edge lists of other machines' vertices, on which their sampling requests are answered here.

A request that would have gone to the owner is processed by its own server-side code, with the held lists in place of
the owner's partition: the same function draws from the same lists, so samples have the same distribution.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import dgl
import torch
from dgl.distributed import graph_services
from torch import Tensor

from dgl_hybrid.exchange.segments import gather_segments
from dgl_hybrid.sampling.id_index import IdIndex
from dgl_hybrid.sampling.in_edge_lists import EdgeLists

ANSWERABLE = (
    graph_services.SamplingRequest,
    graph_services.SamplingRequestEtype,
    graph_services.InSubgraphRequest,
)


class _HaloBook:
    """What sampling asks of a partition book, for the held lists as if they were a partition."""

    def __init__(self, partid: int, nodes: IdIndex, etype_offset: list[int]) -> None:
        self.partid = partid
        self.local_etype_offset = etype_offset
        self._nodes = nodes

    def nid2localnid(self, nids: Tensor, partid: int) -> Tensor:
        return self._nodes.find(nids)


@dataclass(frozen=True, kw_only=True)
class _ServerState:
    """What a request's server-side code reads of its server."""

    graph: dgl.DGLGraph
    partition_book: _HaloBook
    kv_store: None = None


@dataclass(frozen=True, kw_only=True)
class HaloTensors:
    """A `HaloGraph` as plain tensors, for processes that share it."""

    ids: Tensor
    """(H,) int64, ascending: the held vertices, homogeneous ids."""
    node_ids: Tensor
    """(U,) the held vertices, then their in-neighbours that are not held; int32 where that suffices."""
    indptr: Tensor
    """(U + 1,) of the in-edge lists; int32 where that suffices."""
    indices: Tensor
    """(E,) positions in `node_ids`, dtype of `indptr`."""
    edge_order: Tensor
    """(E,) local edge id of every entry, dtype of `indptr`: ids ascend by edge type, as in a DistDGL partition. Empty
    where there is one type: entry k is edge k."""
    eid_global: Tensor
    """(E,) by local edge id: homogeneous edge ids; int32 where that suffices."""
    etype_offset: tuple[int, ...]
    """Where every edge type begins among the local edge ids, and their number."""
    bound: int
    """Number of vertices in the whole graph."""

    @property
    def num_bytes(self) -> int:
        tensors = (self.ids, self.node_ids, self.indptr, self.indices, self.edge_order, self.eid_global)
        return sum(tensor.nbytes for tensor in tensors)

    def eids_at(self, positions: Tensor) -> Tensor:
        """Returns the homogeneous edge ids of some entries."""
        local = self.edge_order[positions].to(torch.int64) if len(self.edge_order) else positions
        return self.eid_global[local].to(torch.int64)

    def share(self) -> None:
        """Moves everything to shared memory, before anybody reads it."""
        for tensor in (self.ids, self.node_ids, self.indptr, self.indices, self.edge_order, self.eid_global):
            tensor.share_memory_()


def pack_lists(ids: Tensor, lists: EdgeLists, partition_book: Any) -> HaloTensors:
    """Lays out the lists of `ids` as `HaloTensors`.

    Args:
        ids: (H,) int64, ascending homogeneous ids.
        lists: Theirs, in the same order.
        partition_book: Of the graph, for its edge types.
    """
    bound = int(partition_book._num_nodes())
    sources = torch.unique(lists.src_global)
    held = IdIndex(ids, bound)
    others = sources[held.find(sources) < 0]
    node_ids = torch.cat([ids, others])
    position = held.find(lists.src_global)
    is_other = position < 0
    position[is_other] = len(ids) + torch.searchsorted(others, lists.src_global[is_other])
    num_types = len(partition_book.canonical_etypes)
    num_edges = len(lists.eid_global)
    small = torch.int32 if max(num_edges, len(node_ids)) < 2**31 - 1 else torch.int64
    if num_types > 1:
        etype, _ = partition_book.map_to_per_etype(lists.eid_global)
        etype = torch.as_tensor(etype).to(torch.int64)
        by_type = torch.argsort(etype, stable=True)
        local_of_entry = torch.empty(num_edges, dtype=torch.int64)
        local_of_entry[by_type] = torch.arange(num_edges)
        per_type = torch.bincount(etype, minlength=num_types)
        eid_global = lists.eid_global[by_type]
        # Entries of a list in order of type, as a partition's are: sorted lists are drawn from by type.
        row = torch.repeat_interleave(torch.arange(len(ids)), lists.counts)
        within = torch.argsort(row * num_types + etype, stable=True)
        position, local_of_entry = position[within], local_of_entry[within]
    else:
        per_type = torch.tensor([num_edges])
        local_of_entry = torch.empty(0, dtype=torch.int64)
        eid_global = lists.eid_global
    indptr = torch.zeros(len(node_ids) + 1, dtype=small)
    indptr[1 : len(ids) + 1] = torch.cumsum(lists.counts, 0)
    indptr[len(ids) + 1 :] = num_edges
    return HaloTensors(
        ids=ids,
        node_ids=_in_few_bytes(node_ids),
        indptr=indptr,
        indices=position.to(small),
        edge_order=local_of_entry.to(small),
        eid_global=_in_few_bytes(eid_global),
        etype_offset=(0, *torch.cumsum(per_type, 0).tolist()),
        bound=bound,
    )


def _in_few_bytes(ids: Tensor) -> Tensor:
    return ids.to(torch.int32) if len(ids) == 0 or int(ids.max()) < 2**31 else ids


class HaloGraph:
    """Answers sampling requests for the vertices whose lists it holds.

    Args:
        tensors: The lists.
        partid: Of this machine.
        room_bytes: For a table of the held vertices; may be infinite.
    """

    def __init__(self, tensors: HaloTensors, partid: int, *, room_bytes: float = math.inf) -> None:
        self.tensors = tensors
        self.index = IdIndex(tensors.ids, tensors.bound, room_bytes=room_bytes)
        graph = dgl.graph(
            ("csc", (tensors.indptr, tensors.indices, tensors.edge_order)),
            num_nodes=len(tensors.node_ids),
            idtype=tensors.indptr.dtype,
        )
        graph.ndata[dgl.NID] = tensors.node_ids
        graph.edata[dgl.EID] = tensors.eid_global
        book = _HaloBook(partid, self.index, list(tensors.etype_offset))
        self._state = _ServerState(graph=graph, partition_book=book)

    @property
    def num_bytes(self) -> int:
        """What the lists take, with the table by which they are found."""
        return self.tensors.num_bytes + self.index.table_bytes

    @staticmethod
    def can_answer(request: Any) -> bool:
        """Whether the held lists suffice: in-edges by structure alone, of a kind of request that is known."""
        if type(request) not in ANSWERABLE:
            return False
        return (
            getattr(request, "edge_dir", "in") == "in"
            and getattr(request, "prob", None) is None
            and not getattr(request, "use_graphbolt", False)
        )

    def answer(self, request: Any) -> graph_services.LocalSampledGraph:
        """Returns what the owner of the request's vertices, all held here, would have sent."""
        response = request.process_request(self._state)
        return graph_services.LocalSampledGraph(
            response.global_src.to(torch.int64),
            response.global_dst.to(torch.int64),
            response.global_eids.to(torch.int64),
        )

    def holds(self, ids: Tensor) -> Tensor:
        """Which of these vertices' lists are held."""
        return self.index.find(ids) >= 0

    def degrees_of(self, ids: Tensor) -> Tensor:
        """Returns the lengths of the held lists of some held vertices."""
        position, indptr = self.index.find(ids), self.tensors.indptr
        return (indptr[position + 1] - indptr[position]).to(torch.int64)

    def lists_of(self, ids: Tensor) -> EdgeLists:
        """Returns the held lists of some held vertices, in order."""
        t = self.tensors
        counts, positions = gather_segments(t.indptr.to(torch.int64), self.index.find(ids))
        return EdgeLists(
            counts=counts,
            src_global=t.node_ids[t.indices[positions].to(torch.int64)].to(torch.int64),
            eid_global=t.eids_at(positions),
        )
