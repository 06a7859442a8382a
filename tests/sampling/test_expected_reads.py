# SPDX-License-Identifier: Apache-2.0
"""Expected reads against counted reads of DGL's own sampler, and against closures worked out on paper."""

from __future__ import annotations

from dataclasses import dataclass, replace

import dgl_hybrid  # noqa: F401 - before dgl, which it makes importable

# isort: split
import dgl
import pytest
import torch
from torch import Tensor

from dgl_hybrid.sampling import expected_reads, id_sums
from dgl_hybrid.sampling.expected_reads import ExpectedReads, Fanout, LoaderAccess, add_reads, expect_reads
from dgl_hybrid.sampling.id_sums import IdSums
from dgl_hybrid.sampling.in_edge_lists import EdgeLists
from tests.helpers.distdgl import heterograph, homogeneous_graph
from tests.helpers.graphs import hand_drawn


@dataclass
class WholeGraph:
    """In-edge lists of a graph in one piece; some may be unknown."""

    graph: dgl.DGLGraph
    unknown: frozenset[int] = frozenset()
    largest: int = 0
    """Most in-edges that were asked for at once."""

    def is_known(self, ids: Tensor) -> Tensor:
        return torch.tensor([int(i) not in self.unknown for i in ids], dtype=torch.bool)

    def degrees(self, ids: Tensor) -> Tensor:
        return self.graph.in_degrees(ids)

    def lookup(self, ids: Tensor) -> EdgeLists:
        src, _, eid = self.graph.in_edges(ids, form="all")
        self.largest = max(self.largest, len(src))
        return EdgeLists(counts=self.graph.in_degrees(ids), src_global=src, eid_global=eid)


def access(seeds: list[int], fanouts: tuple[Fanout, ...], num_batches: int = 1, replace: bool = False) -> LoaderAccess:
    ids, counts = torch.unique(torch.tensor(seeds), return_counts=True)
    return LoaderAccess(
        seeds=ids, occurrences=counts.double(), num_batches=num_batches, fanouts=fanouts, replace=replace
    )


def test_lists_are_of_no_use_to_who_draws_by_weights() -> None:
    """Only owners draw by weights or masks of edges, so that held lists would answer nothing; rows are read as ever."""
    by_structure = access([2], (-1, -1))
    by_weights = replace(by_structure, by_structure=False)
    reads, others = expected(hand_drawn(), by_weights), expected(hand_drawn(), by_structure)
    assert float(others.as_frontier.sum()) > 0
    assert float(reads.as_frontier.sum()) == 0
    assert torch.equal(reads.as_input, others.as_input)
    assert by_weights.key != by_structure.key


def expected(graph: dgl.DGLGraph, loader: LoaderAccess, **options: object) -> ExpectedReads:
    asked: list[int] = []
    return expect_reads(loader, WholeGraph(graph), make_known=lambda ids, reads: asked.extend(ids.tolist()), **options)  # type: ignore[arg-type]


def as_dict(ids: Tensor, values: Tensor) -> dict[int, float]:
    return {int(i): round(float(v), 6) for i, v in zip(ids, values, strict=True) if v > 0}


def test_a_closure_on_paper() -> None:
    """Seed 2 of the hand-drawn graph reads 1 and 4, which read 0 and 3."""
    reads = expected(hand_drawn(), access([2], (-1, -1)))
    assert as_dict(reads.ids, reads.as_seed) == {2: 1.0}
    assert set(as_dict(reads.ids, reads.as_frontier)) == {1, 2, 4}
    assert set(as_dict(reads.ids, reads.as_input)) == {0, 1, 2, 3, 4}
    assert as_dict(reads.ids, reads.as_frontier)[2] == 2.0, "drawn from in both layers"


def test_an_unknown_list_leads_nowhere() -> None:
    lists = WholeGraph(hand_drawn(), unknown=frozenset({4}))
    reads = expect_reads(access([2], (-1, -1)), lists, make_known=lambda ids, reads: None)
    assert set(as_dict(reads.ids, reads.as_input)) == {0, 1, 2, 4}
    assert 4 in as_dict(reads.ids, reads.as_frontier), "it would be drawn from all the same"


def test_frontiers_are_announced_before_they_are_looked_up() -> None:
    frontiers: list[list[int]] = []
    expect_reads(
        access([2], (-1, -1)), WholeGraph(hand_drawn()), make_known=lambda ids, reads: frontiers.append(ids.tolist())
    )
    assert frontiers == [[2], [1, 2, 4]]


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize(("fanouts", "batch_size"), [((3, 5), 20), ((2, 3, 4), 40), ((10,), 7), ((-1, 2), 150)])
def test_counted_reads_of_dgls_sampler(fanouts: tuple[int, ...], batch_size: int, replace: bool) -> None:
    if replace and -1 in fanouts:
        pytest.skip("all neighbours are not drawn with replacement")
    graph = homogeneous_graph(400, 6)
    seeds = torch.nonzero(graph.ndata["train_mask"]).flatten()
    num_batches = -(-len(seeds) // batch_size)
    reads = expected(graph, access(seeds.tolist(), fanouts, num_batches, replace))
    counted, drawn_from = torch.zeros(400), torch.zeros(400)
    dgl.seed(0)
    torch.manual_seed(0)
    sampler = dgl.dataloading.NeighborSampler(list(fanouts), replace=replace)
    epochs = 12
    for _ in range(epochs):
        for batch in seeds[torch.randperm(len(seeds))].split(batch_size):
            inputs, _, blocks = sampler.sample_blocks(graph, batch)
            counted[inputs] += 1.0 / epochs
            for block in blocks:
                drawn_from[block.dstdata[dgl.NID]] += 1.0 / epochs
    assert set(torch.nonzero(counted).flatten().tolist()) <= set(reads.ids.tolist()), "the support is exact"
    as_input, as_frontier = torch.zeros(400).double(), torch.zeros(400).double()
    as_input[reads.ids], as_frontier[reads.ids] = reads.as_input, reads.as_frontier
    for predicted, seen in ((as_input, counted), (as_frontier, drawn_from)):
        assert float(predicted.sum()) == pytest.approx(float(seen.sum()), rel=0.12)
        # What matters is the order: the tenth of the vertices that is held first is nearly the best tenth.
        best, chosen = torch.topk(seen, 40).values.sum(), seen[torch.topk(predicted, 40).indices].sum()
        assert float(chosen) > 0.93 * float(best)


def test_fanouts_by_edge_type() -> None:
    graph = heterograph()
    homogeneous = dgl.to_homogeneous(graph)
    etype = homogeneous.edata[dgl.ETYPE]
    papers = torch.nonzero(homogeneous.ndata[dgl.NTYPE] == graph.get_ntype_id("paper")).flatten()
    cites = graph.canonical_etypes.index(("paper", "cites", "paper"))
    only_cites: Fanout = tuple(-1 if k == cites else 0 for k in range(len(graph.canonical_etypes)))
    loader = access(papers[:10].tolist(), (only_cites,))
    reads = expected(homogeneous, loader, edge_type_of=lambda eids: etype[eids])
    src, _, eid = homogeneous.in_edges(papers[:10], form="all")
    cited = set(src[etype[eid] == cites].tolist()) | set(papers[:10].tolist())
    assert set(as_dict(reads.ids, reads.as_input)) == cited
    two_of_each = expected(homogeneous, access(papers[:10].tolist(), (2,)), edge_type_of=lambda eids: etype[eids])
    total = float(two_of_each.as_input.sum())
    assert total > float(expected(homogeneous, access(papers[:10].tolist(), (2,))).as_input.sum()), "two of each type"


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("fanouts", [(3, 5), (-1, 2), (4, -1, 3)])
def test_frontiers_are_gone_through_a_few_edges_at_a_time(
    fanouts: tuple[int, ...], replace: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = homogeneous_graph(400, 6)
    loader = access(torch.nonzero(graph.ndata["train_mask"]).flatten().tolist(), fanouts, 5, replace)
    at_once = expected(graph, loader)
    monkeypatch.setattr(expected_reads, "EDGES_AT_ONCE", 150)
    lists = WholeGraph(graph)
    reads = expect_reads(loader, lists, make_known=lambda ids, reads: None)
    assert lists.largest <= max(150, int(graph.in_degrees().max()))
    assert torch.equal(reads.ids, at_once.ids)
    for name in ("as_seed", "as_frontier", "as_input"):
        torch.testing.assert_close(getattr(reads, name), getattr(at_once, name), rtol=1e-12, atol=0.0)


def test_a_frontier_of_several_edge_types_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = heterograph()
    homogeneous = dgl.to_homogeneous(graph)
    etype = homogeneous.edata[dgl.ETYPE]
    loader = access(list(range(100)), ((1, 2, 3, -1, 0), 2), 4)
    at_once = expected(homogeneous, loader, edge_type_of=lambda eids: etype[eids])
    monkeypatch.setattr(expected_reads, "EDGES_AT_ONCE", 20)
    reads = expected(homogeneous, loader, edge_type_of=lambda eids: etype[eids])
    assert torch.equal(reads.ids, at_once.ids)
    torch.testing.assert_close(reads.as_input, at_once.as_input, rtol=1e-12, atol=0.0)


def test_no_table_of_all_vertices_and_edge_types(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 10,000 types a vertex has in-edges of few; the table took 80,000 bytes for each vertex."""
    entries: list[int] = []
    bincount = torch.bincount

    def counted(ids: Tensor, **options: int) -> Tensor:
        counts = bincount(ids, **options)
        entries.append(len(counts))
        return counts

    monkeypatch.setattr(torch, "bincount", counted)
    graph, kinds = homogeneous_graph(400, 6), 10_000
    loader = access(list(range(100)), (2, 3))
    few = expected(graph, loader, edge_type_of=lambda eids: eids % 3)
    assert entries, "a small table is faster than sorting"
    many = expected(graph, loader, edge_type_of=lambda eids: eids % 3 * (kinds // 2))
    assert max(entries) <= 4 * graph.num_edges()
    for name in ("ids", "as_seed", "as_frontier", "as_input"):
        assert torch.equal(getattr(many, name), getattr(few, name))


def test_sums_come_out_whatever_was_merged_when(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(id_sums, "_MERGE_AT", 5)
    generator = torch.Generator().manual_seed(0)
    ids, values = torch.randint(40, (300,), generator=generator), torch.rand(300, generator=generator).double()
    sums = IdSums()
    for some in torch.arange(300).split(11):
        sums.add(ids[some], values[some])
    found, total = sums.result()
    assert torch.equal(found, torch.unique(ids))
    torch.testing.assert_close(total, torch.zeros(40).double().index_add_(0, ids, values)[found])
    assert [len(part) for part in IdSums().result()] == [0, 0]


def test_reads_of_two_loaders_add_up() -> None:
    graph = hand_drawn()
    both = add_reads(expected(graph, access([2], (-1,))), expected(graph, access([5], (-1,))))
    assert as_dict(both.ids, both.as_seed) == {2: 1.0, 5: 1.0}
    assert as_dict(both.ids, both.as_input) == {1: 0.632121, 2: 1.0, 4: 1.264241, 5: 1.0}
    nothing = add_reads(ExpectedReads.none(), ExpectedReads.none())
    assert len(nothing.ids) == 0


def test_no_seeds_read_nothing() -> None:
    reads = expect_reads(
        LoaderAccess(
            seeds=torch.empty(0, dtype=torch.int64),
            occurrences=torch.empty(0, dtype=torch.float64),
            num_batches=0,
            fanouts=(2, 3),
        ),
        WholeGraph(hand_drawn()),
        make_known=lambda ids, reads: None,
    )
    assert len(reads.ids) == 0


def test_loaders_that_read_alike_have_one_key() -> None:
    assert access([2, 5], (-1, 3)).key == access([5, 2], (-1, 3)).key
    others = (access([2, 4], (-1, 3)), access([2, 5], (3, -1)), access([2, 5], (-1, 3), 2), access([2, 5, 5], (-1, 3)))
    assert len({access([2, 5], (-1, 3)).key, *(other.key for other in others)}) == 5


def test_layer_wise_inference_is_recognised() -> None:
    assert access([1], (-1,)).is_layer_wise
    assert not access([1], (-1, -1)).is_layer_wise
    assert not access([1], (3,)).is_layer_wise
    assert access([1], ((-1, -1),)).is_layer_wise, "of edges of two types"
    assert not access([1], ((-1, 3),)).is_layer_wise
