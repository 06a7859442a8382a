# SPDX-License-Identifier: Apache-2.0
"""Rows by locality: found where there is some to find, refused where there is none, level classes kept apart."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from dgl_hybrid import PartitionedGraph
from dgl_hybrid.exchange import locality
from dgl_hybrid.exchange.closure import LevelSets
from dgl_hybrid.exchange.locality import count_reads, find_local_order, order_rows
from dgl_hybrid.exchange.segments import indptr_of
from tests.exchange.test_closure import run_closure
from tests.helpers.world import run_ranks


def in_edges(num_rows: int, src: Tensor, dst: Tensor) -> tuple[Tensor, Tensor]:
    order = torch.argsort(dst, stable=True)
    return indptr_of(torch.bincount(dst, minlength=num_rows)), src[order]


def ring(num_rows: int, generator: torch.Generator, reach: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    """Every vertex reads its neighbours on a ring. Returns its in-edges and each vertex's place: ids are shuffled."""
    ids = torch.randperm(num_rows, generator=generator)
    place = torch.arange(num_rows).repeat(2 * reach)
    offset = torch.cat([torch.arange(-reach, 0), torch.arange(1, reach + 1)]).repeat_interleave(num_rows)
    on_ring = torch.argsort(ids)
    return *in_edges(num_rows, ids[(place + offset) % num_rows], ids[place]), on_ring


def test_distinct_reads_of_a_window_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locality, "_WINDOW", 4)
    assert count_reads(torch.tensor([7, 7, 7, 7, 1, 2, 3, 1])) == (1 + 3) / 8
    assert count_reads(torch.tensor([5, 5, 6])) == 2 / 3, "fewer reads than a window are one window"
    assert count_reads(torch.empty(0, dtype=torch.int64)) == 0.0


def distances(order: Tensor, indptr: Tensor, indices: Tensor) -> Tensor:
    """How far each source is from who reads it."""
    assert torch.equal(order.sort().values, torch.arange(len(order)))
    position = torch.argsort(order)
    return (position[indices] - torch.repeat_interleave(position, indptr.diff())).abs()


def test_neighbours_on_a_shuffled_ring_come_near_each_other() -> None:
    indptr, indices, _ = ring(2999, torch.Generator().manual_seed(0))
    # Three levels of breadth-first search, each with four vertices from either side of the ring.
    assert int(distances(find_local_order(indptr, indices), indptr, indices).max()) <= 24


def test_a_ring_of_several_clusters_is_cut_once_for_each() -> None:
    indptr, indices, _ = ring(12_000, torch.Generator().manual_seed(0))
    far = distances(find_local_order(indptr, indices), indptr, indices) > 24
    # Eight clusters, each an arc, with an end at either side, over which twenty edges go, and their reverses.
    assert 0 < int(far.sum()) <= 8 * 2 * 20


@pytest.mark.parametrize("degree", [8, 60])
def test_communities_are_found_whatever_share_of_their_edges_is_looked_at(degree: int) -> None:
    """A fifth of all edges go anywhere, so that a breadth-first search alone finds nothing."""
    generator, num_rows, size = torch.Generator().manual_seed(0), 12_000, 1500
    dst = torch.arange(num_rows).repeat_interleave(degree)
    near = dst // size * size + torch.randint(size, (len(dst),), generator=generator)
    anywhere = torch.randint(num_rows, (len(dst),), generator=generator)
    src = torch.where(torch.rand(len(dst), generator=generator) < 0.2, anywhere, near)
    ids = torch.randperm(num_rows, generator=generator)
    order = find_local_order(*in_edges(num_rows, ids[src], ids[dst]))
    windows = (torch.argsort(ids)[order] // size).view(-1, size // 10)
    is_of_most = windows == windows.mode().values.unsqueeze(1)
    assert float(is_of_most.float().mean()) > 0.95


@pytest.mark.parametrize("reads", [True, False])
def test_hubs_are_left_out(reads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All others are a step from one, so nobody was near anybody; and to sort its neighbours took minutes."""
    monkeypatch.setattr(locality, "_MOST_NEIGHBORS", 100)
    indptr, indices, _ = ring(2999, torch.Generator().manual_seed(0))
    src, dst = indices, torch.repeat_interleave(torch.arange(2999), indptr.diff())
    others, hub = torch.arange(1, 2999), torch.zeros(2998, dtype=torch.int64)
    ends = (others, hub) if reads else (hub, others)
    with_hub = in_edges(2999, torch.cat([src, ends[0]]), torch.cat([dst, ends[1]]))
    order = find_local_order(*with_hub)
    is_other = (src != 0) & (dst != 0)
    # Without the hub the ring is a path: each has all its neighbours within two levels of the search.
    assert int(distances(order, indptr, indices)[is_other].max()) <= 24


@pytest.mark.parametrize(
    ("num_rows", "src", "dst"), [(1, [], []), (4000, [], []), (4000, [7], [7]), (3, [0, 2], [2, 0])]
)
def test_any_edges_give_an_order(num_rows: int, src: list[int], dst: list[int]) -> None:
    ends = (torch.tensor(end, dtype=torch.int64) for end in (src, dst))
    order = find_local_order(*in_edges(num_rows, *ends))
    assert torch.equal(order.sort().values, torch.arange(num_rows))


def test_an_order_is_the_same_every_time() -> None:
    indptr, indices, _ = ring(10_000, torch.Generator().manual_seed(4))
    assert torch.equal(find_local_order(indptr, indices), find_local_order(indptr, indices))


@pytest.mark.parametrize("row_order", ["auto", "locality"])
def test_classes_stay_apart_and_in_order(row_order: str) -> None:
    sizes = [2000, 0, 5000, 3000]
    indptr, indices, on_ring = ring(10_000, torch.Generator().manual_seed(1))
    num_dst = 7000
    ordered = order_rows(sizes, indptr[: num_dst + 1], indices[: indptr[num_dst]], on_ring, row_order)  # type: ignore[arg-type]
    assert ordered.order is not None
    start = 0
    for size in sizes:
        of_class = ordered.order[start : start + size]
        assert torch.equal(of_class.sort().values, torch.arange(start, start + size))
        assert bool((on_ring[of_class].diff() > 0).all())
        start += size
    assert ordered.reads_by_id is not None
    assert ordered.reads_by_locality is not None
    assert ordered.reads_by_locality < 0.5 * ordered.reads_by_id
    assert re.fullmatch(
        r"rows by locality: of 4096 sources read in a row \d\d% are distinct by id, \d\d% by locality", str(ordered)
    )


def test_an_order_that_shares_no_more_reads_is_not_taken() -> None:
    generator = torch.Generator().manual_seed(2)
    src, dst = (torch.randint(20_000, (800_000,), generator=generator) for _ in range(2))
    edges = in_edges(20_000, src, dst)
    uniform = order_rows([20_000], *edges, torch.argsort(find_local_order(*edges)), "auto")
    assert uniform.order is None
    assert uniform.reads_by_locality is not None
    assert uniform.reads_by_id is not None
    assert uniform.reads_by_locality > 0.95 * uniform.reads_by_id
    assert "rows by id: of 4096" in str(uniform)
    indptr, indices, place = ring(10_000, generator)
    in_order = in_edges(10_000, place[indices], torch.repeat_interleave(place, indptr.diff()))
    assert order_rows([10_000], *in_order, torch.argsort(find_local_order(*in_order)), "auto").order is None


def test_small_graphs_stay_as_they_are() -> None:
    indptr, indices, on_ring = ring(1000, torch.Generator().manual_seed(3))
    assert order_rows([1000], indptr, indices, on_ring, "auto").order is None
    assert order_rows([1000], indptr, indices, on_ring, "id").order is None
    assert order_rows([1000], indptr, indices, on_ring, "locality").order is not None
    assert str(order_rows([1000], indptr, indices, on_ring, "auto")) == "rows by id"
    nothing = torch.empty(0, dtype=torch.int64)
    assert order_rows([3], torch.zeros(4, dtype=torch.int64), nothing, torch.arange(3), "locality").order is None


def find_places(rank: int, world_size: int, part_config: str) -> tuple[Tensor, Tensor]:
    """Places of all vertices, asked for in two parts; and the order that this rank finds for its own."""
    g = PartitionedGraph.open(part_config)
    ids = torch.randperm(g.num_nodes(), generator=torch.Generator().manual_seed(rank))
    half = len(ids) // 2 if rank else 0
    places = torch.empty_like(ids)
    for some in (ids[:half], ids[half:]):
        places[some] = g.places.of(some)
    counts, src, _ = g.partition.lists.gather(torch.arange(g.nodes.stop - g.nodes.start))
    dst = torch.arange(g.nodes.stop - g.nodes.start).repeat_interleave(counts)
    is_own = g.nodes.is_owned(src)
    order = find_local_order(*in_edges(len(counts), src[is_own] - g.nodes.start, dst[is_own]))
    return places, order + g.nodes.start


def test_ranks_agree_on_places(folder: str) -> None:
    """Whoever asks: rank after rank, and within each the order that it finds among its own vertices alone."""
    results = run_ranks(3, find_places, folder)
    order = torch.cat([of_rank for _, of_rank in results])
    for places, _ in results:
        assert torch.equal(places[order], torch.arange(len(order)))


@pytest.mark.parametrize("chance", [0.0, 0.5])
def test_level_sets_are_the_same_but_for_the_order_of_rows(chance: float, folder: str) -> None:
    by_id = run_ranks(3, run_closure, folder, chance, 0)
    by_locality = run_ranks(3, run_closure, folder, chance, 0, row_order="locality")
    is_any_moved = False
    for expected, result in zip(by_id, by_locality, strict=True):
        before: LevelSets = expected["sets"]
        after: LevelSets = result["sets"]
        assert after.sizes == before.sizes
        is_any_moved |= not torch.equal(after.rows_global, before.rows_global)
        for one, other in zip(before.layers, after.layers, strict=True):
            assert edges_of(before, one.layer) == edges_of(after, other.layer)
            assert torch.equal(one.exchange.recv_global, other.exchange.recv_global)
            # What is sent is in the order its receiver expects, wherever the rows lie.
            sent = [s.rows_global[layer.exchange.send_index] for s, layer in ((before, one), (after, other))]
            assert torch.equal(*sent)
    assert is_any_moved


def edges_of(sets: LevelSets, layer: int) -> dict[int, list[tuple[int, int]]]:
    """The (edge, source) lists of each destination, in their order."""
    structure = sets.layers[layer - 1]
    sources = torch.cat([sets.rows_global[: structure.num_held], structure.exchange.recv_global])[structure.indices]
    lists, edge_ids = {}, sets.edge_ids[layer - 1].wide()
    for row, node in enumerate(sets.rows_global[: structure.num_dst].tolist()):
        entries = slice(int(structure.indptr[row]), int(structure.indptr[row + 1]))
        lists[node] = list(zip(edge_ids[entries].tolist(), sources[entries].tolist(), strict=True))
    return lists
