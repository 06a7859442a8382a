# SPDX-License-Identifier: Apache-2.0
"""Rows by locality: an order is looked for once, or kept with the part; level classes are kept apart."""

from __future__ import annotations

import logging
import re
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor

from dgl_hybrid import PartitionedGraph
from dgl_hybrid.exchange import locality
from dgl_hybrid.exchange.closure import LevelSets
from dgl_hybrid.exchange.communicator import Communicator
from dgl_hybrid.exchange.ids import Ownership
from dgl_hybrid.exchange.locality import LocalPlaces, RowOrder, order_rows
from dgl_hybrid.exchange.segments import gather_segments
from dgl_hybrid.partition import EdgeLists, local_order
from dgl_hybrid.partition.clusters import ClusterError, Numbers
from dgl_hybrid.partition.local_order import LocalOrder, find_local_order
from tests.exchange.test_closure import run_closure
from tests.helpers.rings import in_edges, ring
from tests.helpers.world import run_ranks


def test_classes_stay_apart_and_in_order() -> None:
    sizes = [2000, 0, 5000, 3000]
    places = 5 + torch.randperm(20_000, generator=torch.Generator().manual_seed(1))[:10_000]
    order = order_rows(sizes, places)
    start = 0
    for size in sizes:
        of_class = order[start : start + size]
        assert torch.equal(of_class.sort().values, torch.arange(start, start + size))
        assert bool((places[of_class].diff() > 0).all())
        start += size


class Alone(EdgeLists):
    """In-edges of a graph that one rank owns."""

    def __init__(self, indptr: Tensor, indices: Tensor) -> None:
        self.counts, self._indptr, self._indices = indptr.diff(), indptr, indices

    def gather(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        counts, positions = gather_segments(self._indptr, rows)
        return counts, self._indices[positions], positions

    def sum_by_source(self, values: Tensor | None = None) -> tuple[Tensor, Tensor]:
        raise NotImplementedError


def places_of(indptr: Tensor, indices: Tensor, timeout_s: float = 600.0, kept: LocalOrder | None = None) -> LocalPlaces:
    """As the only rank has them."""
    ownership = Ownership(offsets=torch.tensor([0, len(indptr) - 1]), rank=0)
    communicator = cast(Communicator, SimpleNamespace(timeout_s=timeout_s))  # nothing is exchanged until others ask
    return LocalPlaces(communicator, ownership, Alone(indptr, indices), len(indices), kept)


@pytest.mark.parametrize(("timeout_s", "expected_s"), [(60.0, 30.0), (600.0, 300.0), (float("inf"), 300.0)])
def test_clusters_take_no_longer_than_ranks_wait(
    timeout_s: float, expected_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []

    def cut(indptr: Numbers, indices: Numbers, num_clusters: int, timeout_s: float) -> Numbers:
        asked.append(timeout_s)
        raise ClusterError("too slow")

    monkeypatch.setattr(local_order, "cut_into_clusters", cut)
    num_rows = 20_000
    row = torch.arange(num_rows)
    ends = torch.cat([(row + 1) % num_rows, (row + 7) % num_rows]), torch.cat([row, row])
    places_of(*in_edges(num_rows, *ends), timeout_s).find("locality")
    assert asked == [expected_s]


def test_an_order_that_shares_no_more_reads_is_not_taken(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    generator = torch.Generator().manual_seed(2)
    src, dst = (torch.randint(20_000, (800_000,), generator=generator) for _ in range(2))
    indptr, indices, on_ring = ring(10_000, generator)
    in_order = in_edges(10_000, on_ring[indices], torch.repeat_interleave(on_ring, indptr.diff()))
    for edges, is_local in ((in_edges(20_000, src, dst), False), (in_order, False), ((indptr, indices), True)):
        places = places_of(*edges)
        places.find("auto")
        assert places.are_known
        assert [places.is_local(row_order) for row_order in ("auto", "id", "locality")] == [is_local, False, True]
    by_id, by_locality = (re.search(rf"rows by {order}: of sources .*", caplog.text) for order in ("id", "locality"))
    assert by_id is not None
    assert by_locality is not None
    assert re.search(r"read in a row \d+ % are distinct by id, \d+ % by locality \(\d+\.\d s\)", by_locality[0])


def test_an_order_is_looked_for_once_and_only_where_it_may_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    small = places_of(*ring(1000, torch.Generator().manual_seed(3))[:2])
    assert [small.are_used(row_order) for row_order in ("auto", "id", "locality")] == [False, False, True]
    small.find("auto")
    small.find("id")
    assert not small.are_known
    assert not small.is_local("auto")

    def fail(indptr: Tensor, indices: Tensor, timeout_s: float) -> LocalOrder:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(locality, "look_for_order", fail)
        with pytest.raises(MemoryError):
            small.find("locality")
    assert not small.are_known
    small.find("locality")
    monkeypatch.setattr(locality, "look_for_order", fail)
    small.find("locality")
    assert small.are_known
    assert small.is_local("locality")
    assert not small.is_local("auto")


@pytest.mark.parametrize("reads_by_locality", [0.94, 0.96])
def test_an_order_that_is_kept_with_the_part_is_not_looked_for(
    reads_by_locality: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    indptr, indices, _ = ring(10_000, torch.Generator().manual_seed(3))
    rows = torch.randperm(10_000, generator=torch.Generator().manual_seed(4))
    monkeypatch.setattr(locality, "look_for_order", None)
    kept = LocalOrder(rows=rows, reads_by_id=1.0, reads_by_locality=reads_by_locality)
    places = places_of(indptr, indices, kept=kept)
    places.find("auto")
    assert places.is_local("auto") == (reads_by_locality < 0.95)
    assert places._of_owned is not None
    assert torch.equal(places._of_owned[rows], torch.arange(10_000))


def find_places(rank: int, world_size: int, part_config: str, row_order: RowOrder) -> tuple[Tensor, Tensor, bool]:
    """Places of all vertices, asked for in two parts; the order that this rank finds for its own, and if it is used."""
    g = PartitionedGraph.open(part_config)
    g.places.find("locality")
    g.places._is_small = False
    # By "auto" the middle one of three ranks stays by id.
    g.places._shares_more = rank != 1
    ids = torch.randperm(g.num_nodes(), generator=torch.Generator().manual_seed(rank))
    half = len(ids) // 2 if rank else 0
    places = torch.empty_like(ids)
    for some in (ids[:half], ids[half:]):
        places[some] = g.places.of(some, row_order)
    counts, src, _ = g.partition.lists.gather(torch.arange(g.nodes.stop - g.nodes.start))
    dst = torch.arange(g.nodes.stop - g.nodes.start).repeat_interleave(counts)
    is_own = g.nodes.is_owned(src)
    order = find_local_order(*in_edges(len(counts), src[is_own] - g.nodes.start, dst[is_own]))
    return places, order + g.nodes.start, g.places.is_local(row_order)


@pytest.mark.parametrize("row_order", ["locality", "auto"])
def test_ranks_agree_on_places(row_order: RowOrder, folder: str) -> None:
    """Whoever asks: rank after rank, and within each the order that it finds among its own vertices alone."""
    results = run_ranks(3, find_places, folder, row_order)
    assert [is_local for _, _, is_local in results] == [True, row_order == "locality", True]
    order = torch.cat([of_rank if is_local else of_rank.sort().values for _, of_rank, is_local in results])
    assert not torch.equal(order, torch.arange(len(order)))
    for places, _, _ in results:
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
        assert [before.by_locality, after.by_locality] == [False, True]
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
