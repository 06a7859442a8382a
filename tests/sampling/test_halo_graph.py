# SPDX-License-Identifier: Apache-2.0
"""In-edge lists from everywhere, and requests answered from held lists as their owners would have answered."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dgl_hybrid

# isort: split
import dgl
import pytest
import torch
from dgl.distributed import graph_services
from torch import Tensor

from dgl_hybrid.errors import ExchangeError
from dgl_hybrid.sampling import in_edge_lists
from dgl_hybrid.sampling.config import HaloConfig
from dgl_hybrid.sampling.halo_graph import HaloGraph, pack_lists
from dgl_hybrid.sampling.in_edge_lists import InEdgeLists, PartitionLists, fetch_degrees, fetch_lists
from dgl_hybrid.sampling.plugin import HaloPlugin
from tests.helpers.distdgl import heterograph, homogeneous_graph
from tests.sampling.offline import Machines, start_machines


@pytest.fixture(autouse=True)
def plugin() -> Any:
    """Requests are processed by mended code, as in a job with the plugin on."""
    dgl_hybrid.enable(strategy="depcomm")
    yield
    dgl_hybrid.disable()


def start(folder: Path, monkeypatch: pytest.MonkeyPatch, *, num_hops: int = 1, hetero: bool = False) -> Machines:
    graph = heterograph() if hetero else homogeneous_graph(200, 6)
    return start_machines(graph, folder, 3, monkeypatch, num_hops=num_hops)


def foreign(machines: Machines, machine: int, step: int = 1) -> Tensor:
    book = machines.states[machine].partition_book
    ids = torch.arange(int(book._num_nodes()))
    return ids[book.nid2partid(ids) != machine][::step]


def by_owner(machines: Machines, machine: int, make_request: Any, ids: Tensor) -> list[tuple[int, int, int]]:
    """The owners' answers together: (src, dst, edge) of every edge, sorted."""
    book = machines.states[machine].partition_book
    owner = book.nid2partid(ids)
    parts = [part for part in range(3) if bool((owner == part).any())]
    return sorted(
        edge
        for part in parts
        for edge in edges_of(make_request(ids[owner == part]).process_request(machines.states[part]))
    )


def edges_of(answer: Any) -> list[tuple[int, int, int]]:
    return list(zip(answer.global_src.tolist(), answer.global_dst.tolist(), answer.global_eids.tolist(), strict=True))


def hold(machines: Machines, machine: int, ids: Tensor) -> HaloGraph:
    view = machines.view(machine)
    lists = InEdgeLists(view)
    lists.fetch(ids[~lists.is_known(ids)])
    return HaloGraph(pack_lists(ids, lists.lookup(ids), view.get_partition_book()), machine)


def test_lists_of_other_machines_equal_the_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machines = start(tmp_path, monkeypatch)
    monkeypatch.setattr(in_edge_lists, "IDS_PER_REQUEST", 7)  # in many requests, as of a large graph
    monkeypatch.setattr(in_edge_lists, "EDGES_PER_REQUEST", 50)
    ids = foreign(machines, 1)
    book = machines.states[1].partition_book
    lists = fetch_lists(book, ids, fetch_degrees(book, ids))
    assert torch.equal(lists.counts, machines.graph.in_degrees(machines.orig_nodes[ids]))
    src = machines.orig_nodes[lists.src_global].split(lists.counts.tolist())
    for vertex, sources in zip(ids.tolist(), src, strict=True):
        true_sources, _ = machines.graph.in_edges(machines.orig_nodes[vertex])
        assert sorted(sources.tolist()) == sorted(true_sources.tolist())


def test_lookup_keeps_the_order_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Owned, fetched and held lists, mixed."""
    machines = start(tmp_path, monkeypatch)
    lists = InEdgeLists(machines.view(0))
    others = foreign(machines, 0)
    held = hold(machines, 0, others[:20])
    lists.keep_held(held)
    lists.fetch(others[30:50])
    inner = torch.arange(10)
    ids = torch.cat([inner, others[:20], others[30:50]])[torch.randperm(50, generator=torch.Generator().manual_seed(0))]
    assert bool(lists.is_known(ids).all())
    neither = others[20:30]
    whole = torch.isin(neither, PartitionLists(machines.view(0)).complete_halo())
    assert torch.equal(lists.is_known(neither), whole), "a list may be whole in this partition's halo"
    found = lists.lookup(ids)
    assert torch.equal(lists.degrees(ids), found.counts)
    for vertex, sources in zip(ids.tolist(), found.src_global.split(found.counts.tolist()), strict=True):
        true_sources, _ = machines.graph.in_edges(machines.orig_nodes[vertex])
        assert sorted(machines.orig_nodes[sources].tolist()) == sorted(true_sources.tolist())


def test_a_wider_halo_spares_the_fetching(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machines = start(tmp_path, monkeypatch, num_hops=2)
    partition = PartitionLists(machines.view(2))
    complete = partition.complete_halo()
    assert len(complete) > 20
    degrees = machines.graph.in_degrees(machines.orig_nodes[complete])
    assert torch.equal(partition.halo(complete).counts, degrees), "whole lists only"
    lists = InEdgeLists(machines.view(2))
    asked = machines.num_requests
    assert bool(lists.is_known(complete).all())
    lists.lookup(complete)
    assert machines.num_requests - asked <= 2, "in-degrees are asked for once, lists never"


def test_parts_that_read_nothing_of_others_ask_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Separate components, one each: DGL's call fails without any request."""
    ends = [(i, (i + 1) % 10) for i in range(10)]
    other = [(10 + i, 10 + (i + 1) % 10) for i in range(10)]
    src, dst = zip(*ends, *other, strict=True)
    machines = start_machines(dgl.graph((src, dst)), tmp_path, 2, monkeypatch, part_method="contiguous")
    lists = InEdgeLists(machines.view(0))
    assert lists.is_known(torch.tensor([0, 9, 10, 15])).tolist() == [True, True, False, False]
    assert machines.num_requests == 0


@pytest.mark.parametrize("hetero", [False, True])
def test_full_fanout_answers_equal_the_owners(hetero: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machines = start(tmp_path, monkeypatch, hetero=hetero)
    ids = foreign(machines, 0)
    halo = hold(machines, 0, ids)
    some = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))][:60]
    kinds: list[Any] = [
        lambda nodes: graph_services.SamplingRequest(nodes, -1),
        lambda nodes: graph_services.InSubgraphRequest(nodes),
    ]
    if hetero:
        num_types = len(machines.graph.canonical_etypes)
        kinds.append(lambda nodes: graph_services.SamplingRequestEtype(nodes, torch.full((num_types,), -1)))
        only_first = torch.tensor([-1] + [0] * (num_types - 1))
        kinds.append(lambda nodes: graph_services.SamplingRequestEtype(nodes, only_first))
    for make_request in kinds:
        request = make_request(some)
        assert HaloGraph.can_answer(request)
        answer = halo.answer(request)
        assert answer.global_eids.dtype == answer.global_src.dtype == torch.int64
        assert sorted(edges_of(answer)) == by_owner(machines, 0, make_request, some)


@pytest.mark.parametrize("hetero", [False, True])
def test_limited_draws_are_of_the_right_lists_and_sizes(
    hetero: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machines = start(tmp_path, monkeypatch, hetero=hetero)
    ids = foreign(machines, 0)
    halo = hold(machines, 0, ids)
    everything = set(by_owner(machines, 0, lambda nodes: graph_services.SamplingRequest(nodes, -1), ids))
    if hetero:
        num_types = len(machines.graph.canonical_etypes)
        fanout = torch.tensor([2, 3, 1, 0, 2])[:num_types]
        drawn = edges_of(halo.answer(graph_services.SamplingRequestEtype(ids, fanout)))
        book = machines.states[0].partition_book
        etype = torch.as_tensor(book.map_to_per_etype(torch.tensor([edge for _, _, edge in drawn]))[0])
        all_types = torch.as_tensor(book.map_to_per_etype(torch.tensor([edge for _, _, edge in everything]))[0])
        for kind in range(num_types):
            of_kind = [edge[1] for edge, t in zip(everything, all_types.tolist(), strict=True) if t == kind]
            expected = sum(min(of_kind.count(vertex), int(fanout[kind])) for vertex in set(of_kind))
            assert int((etype == kind).sum()) == expected
    else:
        drawn = edges_of(halo.answer(graph_services.SamplingRequest(ids, 3)))
        degrees = machines.graph.in_degrees(machines.orig_nodes[ids])
        assert len(drawn) == int(degrees.clamp(max=3).sum())
    assert len(set(drawn)) == len(drawn)
    assert set(drawn) <= everything


@pytest.mark.parametrize(
    "request_made",
    [
        graph_services.SamplingRequest(torch.arange(2), 3, edge_dir="out"),
        graph_services.SamplingRequest(torch.arange(2), 3, prob="edge~_N:_E:_N~w"),
        graph_services.SamplingRequest(torch.arange(2), 3, use_graphbolt=True),
        graph_services.InDegreeRequest(torch.arange(2), 0),
    ],
    ids=["out-edges", "probabilities", "graphbolt", "degrees"],
)
def test_what_lists_alone_cannot_answer_goes_to_the_owner(request_made: Any) -> None:
    assert not HaloGraph.can_answer(request_made)


def test_what_finds_the_lists_is_counted_and_may_be_too_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = hold(machines := start(tmp_path, monkeypatch), 0, foreign(machines, 0)).tensors
    assert HaloGraph(tensors, 0).num_bytes == tensors.num_bytes + 4 * 200
    halo = HaloGraph(tensors, 0, room_bytes=1000.0)
    assert halo.num_bytes == tensors.num_bytes
    assert halo.holds(torch.arange(200)).sum() == len(tensors.ids)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("room_bytes", [0.0, float("inf")], ids=["search", "table"])
def test_seeds_of_any_integer_type(
    dtype: torch.dtype, room_bytes: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DGL takes 32 bits, too, and gets what the script gave."""
    machines = start(tmp_path, monkeypatch)
    view, others = machines.view(0), foreign(machines, 0)
    halo = HaloGraph(hold(machines, 0, others[::2].contiguous()).tensors, 0, room_bytes=room_bytes)
    noted: list[Tensor] = []
    store = SimpleNamespace(halo_graph=halo, note_remote_seeds=noted.append)
    plugin = HaloPlugin(HaloConfig())
    monkeypatch.setattr(plugin, "_store_of", lambda g, share: store)

    def of_dgl(g: Any, nodes: Tensor, issue_remote_req: Any, local_access: Any) -> Any:
        assert nodes.dtype == dtype
        issue_remote_req(nodes)
        empty = torch.empty(0, dtype=torch.int64)
        local = SimpleNamespace(global_src=empty, global_dst=empty, global_eids=empty)
        return local_access(None, None, nodes), local

    answer, _ = plugin._draw_neighbours(
        of_dgl,
        view,
        others.to(dtype),
        lambda nodes: graph_services.SamplingRequest(nodes, -1),
        lambda *_: graph_services.LocalSampledGraph(*[torch.empty(0, dtype=torch.int64)] * 3),
    )
    assert len(answer.global_src) == int(machines.graph.in_degrees(machines.orig_nodes[others[::2]]).sum())
    assert [ids.dtype for ids in noted] == [torch.int64]
    assert torch.equal(noted[0], others[1::2])


def test_an_owner_that_answers_about_others_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machines = start(tmp_path, monkeypatch)
    true_answer = machines.answer

    def wrong(requests: list[tuple[int, Any]]) -> list[Any]:
        for _, request in requests:
            request.seed_nodes = request.seed_nodes + 1
        return true_answer(requests)

    monkeypatch.setattr(dgl.distributed.rpc, "remote_call_to_machine", wrong)
    book = machines.states[0].partition_book
    first = torch.tensor([int(book._max_node_ids[0])])
    hub = torch.cat([first, foreign(machines, 0, step=7)]).unique()
    with pytest.raises(ExchangeError, match=r"machines .* were asked for the in-edges of .* sent edges of others"):
        fetch_lists(book, hub[:3], torch.ones(3, dtype=torch.int64))
