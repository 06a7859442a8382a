# SPDX-License-Identifier: Apache-2.0
"""Lists read from a part in place equal lists sorted by (destination, global edge id), copied out of its edges."""

from __future__ import annotations

import dgl
import pytest
import torch

from dgl_hybrid.errors import PartitionError
from dgl_hybrid.partition import SharedLists, SharedStructure, StoredLists, edge_lists


def part(*, shuffled: bool, idtype: torch.dtype = torch.int64, num_nodes: int = 30) -> dgl.DGLGraph:
    """A part with isolated vertices and double edges whose edges stand in ascending global id, or in any order."""
    generator = torch.Generator().manual_seed(1)
    src, dst = torch.randint(0, num_nodes - 4, (2, 150), generator=generator)
    src[:5], dst[:5] = 3, 7
    graph = dgl.graph((src, dst), num_nodes=num_nodes, idtype=idtype)
    graph.ndata[dgl.NID] = torch.randperm(1000, generator=generator)[:num_nodes]
    ids = torch.randperm(5000, generator=generator)[:150]
    graph.edata[dgl.EID] = ids if shuffled else ids.sort().values
    graph = graph.formats("csc")
    graph.create_formats_()
    return graph


def stored(graph: dgl.DGLGraph, rows: torch.Tensor) -> StoredLists:
    counts, src, eid = [0], [], []
    for row in rows.tolist():
        sources, _, edges = graph.in_edges(row, form="all")
        ids = graph.edata[dgl.EID][edges.long()]
        order = torch.argsort(ids)
        counts.append(len(ids))
        src.append(graph.ndata[dgl.NID][sources.long()][order])
        eid.append(ids[order])
    return StoredLists(torch.tensor(counts).cumsum(0), torch.cat(src), torch.cat(eid))


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("idtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("chunk", [7, 1 << 20])
def test_shared_lists(monkeypatch: pytest.MonkeyPatch, shuffled: bool, idtype: torch.dtype, chunk: int) -> None:
    monkeypatch.setattr(edge_lists, "_CHUNK_EDGES", chunk)
    graph = part(shuffled=shuffled, idtype=idtype)
    structure = SharedStructure.of_graph(graph)
    assert structure.is_sorted != shuffled
    for local, nodes in (((5, 28), torch.arange(5, 28)), (torch.tensor([9, 2, 29, 7]),) * 2):
        shared, expected = SharedLists(structure, local), stored(graph, nodes)
        rows = torch.randperm(len(nodes))
        for got, wanted in zip(shared.gather(rows), expected.gather(rows), strict=True):
            assert got.dtype == torch.int64
            assert torch.equal(got, wanted)
        assert torch.equal(shared.counts, expected.counts)
        assert torch.equal(shared.all_eids(), expected.eid_global)
        weights = torch.rand(len(expected.eid_global), dtype=torch.float64)
        for values in (None, weights):
            for got, wanted in zip(shared.sum_by_source(values), expected.sum_by_source(values), strict=True):
                torch.testing.assert_close(got, wanted)


def test_structure_is_not_copied() -> None:
    graph = part(shuffled=True)
    structure = SharedStructure.of_graph(graph)
    for view, owner in zip((structure.indptr, structure.indices, structure.edge_positions), graph.adj_tensors("csc")):
        assert view.data_ptr() == owner.data_ptr()
    assert structure.node_global.data_ptr() == graph.ndata[dgl.NID].data_ptr()


def test_a_part_without_edges() -> None:
    graph = dgl.graph(([], []), num_nodes=3)
    graph.ndata[dgl.NID], graph.edata[dgl.EID] = torch.arange(3), torch.empty(0, dtype=torch.int64)
    graph = graph.formats("csc")
    graph.create_formats_()
    lists = SharedLists(SharedStructure.of_graph(graph), (0, 3))
    assert [len(x) for x in lists.gather(torch.arange(3))] == [3, 0, 0]
    assert [len(x) for x in lists.sum_by_source()] == [0, 0]
    nothing = SharedLists(SharedStructure.of_graph(graph), (1, 1))
    assert [len(x) for x in nothing.gather(torch.arange(0))] == [0, 0, 0]


def test_without_csc() -> None:
    graph = dgl.graph(([0, 1], [1, 2])).formats("coo")
    with pytest.raises(PartitionError, match=r"needs the graph format csc \(got \['coo'\]\)"):
        SharedStructure.of_graph(graph)
