# SPDX-License-Identifier: Apache-2.0
"""Rows by locality: found where there is some to find, refused where there is none, level classes kept apart."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

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


def test_neighbours_on_a_shuffled_ring_come_near_each_other() -> None:
    indptr, indices, _ = ring(3000, torch.Generator().manual_seed(0))
    order = find_local_order(3000, indptr, indices)
    assert torch.equal(order.sort().values, torch.arange(3000))
    position = torch.argsort(order)
    src_position, dst_position = position[indices], torch.repeat_interleave(position, indptr.diff())
    # Three levels of breadth-first search, each with four vertices from either side of the ring.
    assert int((src_position - dst_position).abs().max()) <= 24


@pytest.mark.parametrize("reads", [True, False])
def test_hubs_are_left_out(reads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All others are a step from one, so nobody was near anybody; and to sort its neighbours took minutes."""
    monkeypatch.setattr(locality, "_MOST_NEIGHBORS", 100)
    indptr, indices, _ = ring(3000, torch.Generator().manual_seed(0))
    src, dst = indices, torch.repeat_interleave(torch.arange(3000), indptr.diff())
    others, hub = torch.arange(1, 3000), torch.zeros(2999, dtype=torch.int64)
    ends = (others, hub) if reads else (hub, others)
    order = find_local_order(3000, *in_edges(3000, torch.cat([src, ends[0]]), torch.cat([dst, ends[1]])))
    assert torch.equal(order.sort().values, torch.arange(3000))
    position = torch.argsort(order)
    is_other = (src != 0) & (dst != 0)
    # Without the hub the ring is a path: each has all its neighbours within two levels of the search.
    assert int((position[src] - position[dst])[is_other].abs().max()) <= 24


def test_sources_that_are_received_do_not_count() -> None:
    # Row 0 reads row 2 and two received rows (3 and 4), row 2 reads row 0; row 1 is alone.
    order = find_local_order(3, torch.tensor([0, 3, 3, 4]), torch.tensor([3, 2, 4, 0]))
    assert sorted(order.tolist()) == [0, 1, 2]
    assert abs(order.tolist().index(0) - order.tolist().index(2)) == 1


@pytest.mark.parametrize("row_order", ["auto", "locality"])
def test_classes_stay_apart_and_in_order(row_order: str) -> None:
    sizes = [2000, 0, 5000, 3000]
    indptr, indices, _ = ring(10_000, torch.Generator().manual_seed(1))
    num_dst = 7000
    ordered = order_rows(sizes, indptr[: num_dst + 1], indices[: indptr[num_dst]], row_order)  # type: ignore[arg-type]
    assert ordered.order is not None
    start = 0
    for size in sizes:
        assert torch.equal(ordered.order[start : start + size].sort().values, torch.arange(start, start + size))
        start += size
    assert ordered.reads_by_id is not None
    assert ordered.reads_by_locality is not None
    assert ordered.reads_by_locality < 0.5 * ordered.reads_by_id
    assert re.fullmatch(
        r"rows by locality: of 4096 sources read in a row \d\d% are distinct by id, \d\d% by locality", str(ordered)
    )


def test_an_order_that_shares_no_more_reads_is_not_taken() -> None:
    generator = torch.Generator().manual_seed(2)
    src, dst = (torch.randint(20_000, (100_000,), generator=generator) for _ in range(2))
    uniform = order_rows([20_000], *in_edges(20_000, src, dst), "auto")
    assert uniform.order is None
    assert uniform.reads_by_locality is not None
    assert uniform.reads_by_id is not None
    assert uniform.reads_by_locality > 0.9 * uniform.reads_by_id
    assert "rows by id: of 4096" in str(uniform)
    indptr, indices, place = ring(10_000, generator)
    in_order = in_edges(10_000, place[indices], torch.repeat_interleave(place, indptr.diff()))
    assert order_rows([10_000], *in_order, "auto").order is None


def test_small_graphs_stay_as_they_are() -> None:
    indptr, indices, _ = ring(1000, torch.Generator().manual_seed(3))
    assert order_rows([1000], indptr, indices, "auto").order is None
    assert order_rows([1000], indptr, indices, "id").order is None
    assert order_rows([1000], indptr, indices, "locality").order is not None
    assert str(order_rows([1000], indptr, indices, "auto")) == "rows by id"
    nothing = order_rows([3], torch.zeros(4, dtype=torch.int64), torch.empty(0, dtype=torch.int64), "locality")
    assert nothing.order is None


def test_the_choice_is_the_same_every_time() -> None:
    indptr, indices, _ = ring(10_000, torch.Generator().manual_seed(4))
    first, again = (order_rows([10_000], indptr, indices, "auto") for _ in range(2))
    assert first.order is not None
    assert again.order is not None
    assert torch.equal(first.order, again.order)


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
