# SPDX-License-Identifier: Apache-2.0
"""Level sets by the definition: nested, closed over the plan, complete sources, no row computed that nobody needs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dgl_hybrid import PartitionedGraph
from dgl_hybrid.exchange.closure import LevelSets, close_levels, settle_seeds
from dgl_hybrid.exchange.locality import RowOrder
from dgl_hybrid.exchange.plan import check_symmetry
from tests.helpers.world import run_ranks, run_ranks_expect_errors

NUM_LAYERS = 3
Chance = float | tuple[float, ...]
"""That a foreign vertex is cached, at every level or at each."""


def run_closure(
    rank: int,
    world_size: int,
    part_config: str,
    chance: Chance,
    dense_below: int,
    row_order: RowOrder = "id",
    owners_aggregate: bool = False,
) -> dict[str, Any]:
    g = PartitionedGraph.open(part_config)
    everything = torch.arange(g.num_nodes())
    foreign = everything[~g.nodes.is_owned(everything)]
    generator = torch.Generator().manual_seed(rank)
    chances = chance if isinstance(chance, tuple) else (chance,) * NUM_LAYERS
    cached = [foreign[torch.rand(len(foreign), generator=generator) < chance] for chance in chances]
    seeds, num_borrowed = settle_seeds(g.communicator, g.nodes, torch.tensor([1, 30, 1]) if rank == 0 else foreign[:0])
    g.places.find(row_order)
    sets = close_levels(
        g.communicator,
        g.nodes,
        g.in_edges,
        seeds,
        num_borrowed,
        cached,
        dense_below=dense_below,
        row_order=row_order,
        places=g.places,
        owners_aggregate=owners_aggregate,
    )
    first = sets.layers[0]
    handed_out = first.exchange.recv_global[:0]
    if first.replicas is not None:
        plan = first.replicas.exchange
        ids = sets.rows_global[: first.num_dst]
        handed_out = g.communicator.exchange(ids[plan.send_index], plan.send_counts, plan.recv_counts)
    in_lists, edge_lists = {}, {}
    g.in_edges.ensure(foreign)
    for node in everything.tolist():
        _, sources, edges = g.in_edges.lookup(torch.tensor([node]))
        in_lists[node], edge_lists[node] = sources.tolist(), edges.tolist()
    # Asked here: tensors that come from another process share nothing.
    shares = {
        name: len({getattr(layer, name).untyped_storage().data_ptr() for layer in sets.layers}) == 1
        for name in ("indptr", "indices")
    }
    owned = g.nodes.owned()
    return {
        "sets": sets,
        "cached": cached,
        "handed_out": handed_out,
        "owned": owned,
        "seeds": seeds,
        "in": in_lists,
        "edges": edge_lists,
        "shares": shares,
    }


def by_definition(results: list[dict[str, Any]], dense_below: int) -> tuple[list[list[set[int]]], list[list[set[int]]]]:
    """`(computed, received)`, each `[rank][level]`, in plain Python."""
    ranks = range(len(results))
    in_lists = results[0]["in"]
    owned = [set(result["owned"].tolist()) for result in results]
    computed = [[set[int]() for _ in range(NUM_LAYERS)] + [set(result["seeds"].tolist())] for result in results]
    received = [[set[int]() for _ in range(NUM_LAYERS)] for _ in ranks]
    for level in range(NUM_LAYERS - 1, -1, -1):
        for rank in ranks:
            above = computed[rank][level + 1]
            needed = {source for node in above for source in in_lists[node]}
            cached = set(results[rank]["cached"][level].tolist())
            computed[rank][level] = above | (needed & owned[rank]) | (needed & cached)
            computed[rank][level] |= owned[rank] if level < dense_below else set()
            received[rank][level] = needed - owned[rank] - cached - above
        for rank in ranks:
            for peer in ranks:
                computed[rank][level] |= received[peer][level] & owned[rank]
    return computed, received


@pytest.mark.parametrize(("chance", "dense_below"), [(0.0, 0), (1.0, 0), (0.5, 0), (0.5, 2), ((0.0, 0.0, 1.0), 0)])
def test_level_sets_by_definition(chance: Chance, dense_below: int, folder: str) -> None:
    results = run_ranks(3, run_closure, folder, chance, dense_below)
    computed, received = by_definition(results, dense_below)
    for layer in range(NUM_LAYERS):
        check_symmetry([result["sets"].layers[layer].exchange for result in results])
    for rank, result in enumerate(results):
        sets: LevelSets = result["sets"]
        assert len(set(sets.rows_global.tolist())) == len(sets.rows_global)
        for level, size in enumerate(sets.sizes):
            assert set(sets.rows_global[:size].tolist()) == computed[rank][level]
        for structure in sets.layers:
            arriving = structure.exchange.recv_global
            assert set(arriving.tolist()) == received[rank][structure.layer - 1]
            sources = torch.cat([sets.rows_global[: structure.num_held], arriving])
            for row in range(structure.num_dst):
                listed = structure.indices[structure.indptr[row] : structure.indptr[row + 1]]
                assert sources[listed].tolist() == result["in"][int(sets.rows_global[row])]
                edges = sets.edge_ids[structure.layer - 1].wide()[structure.indptr[row] : structure.indptr[row + 1]]
                assert edges.tolist() == result["edges"][int(sets.rows_global[row])]


@pytest.mark.parametrize("row_order", ["id", "locality"])
@pytest.mark.parametrize(("chance", "dense_below"), [(1.0, 0), (0.5, 0), (0.5, 2), ((0.0, 0.7, 0.3), 0), (0.0, 0)])
def test_replicas_of_level_1_have_no_edges_and_their_owners_have(
    chance: Chance, dense_below: int, row_order: RowOrder, folder: str
) -> None:
    results = run_ranks(3, run_closure, folder, chance, dense_below, row_order, True)
    plain = run_ranks(3, run_closure, folder, chance, dense_below, row_order)
    levels = [[set(r["sets"].rows_global[:n].tolist()) for n in r["sets"].sizes] for r in results]
    for rank, (result, before) in enumerate(zip(results, plain, strict=True)):
        sets, owned = result["sets"], set(result["owned"].tolist())
        first, *others = sets.layers
        replicas = [node for node in sets.rows_global[: first.num_dst].tolist() if node not in owned]
        if first.replicas is None:
            assert not any(set(level[1]) - set(r["owned"].tolist()) for level, r in zip(levels, results, strict=True))
        else:
            check_symmetry([r["sets"].layers[0].replicas.exchange for r in results])
            assert first.replicas.exchange.recv_global.tolist() == sorted(replicas)
            assert sets.rows_global[first.replicas.positions].tolist() == sorted(replicas)
            assert result["handed_out"].tolist() == sorted(replicas)
        for structure in sets.layers:
            arriving = structure.exchange.recv_global
            sources = torch.cat([sets.rows_global[: structure.num_held], arriving])
            edge_ids = sets.edge_ids[structure.layer - 1].wide()
            for row in range(structure.num_dst):
                node, span = int(sets.rows_global[row]), slice(*structure.indptr[row : row + 2].tolist())
                is_reader = structure.layer > 1 or node in owned
                assert sources[structure.indices[span]].tolist() == (result["in"][node] if is_reader else [])
                assert edge_ids[span].tolist() == (result["edges"][node] if is_reader else [])
        # Above, nothing is different but what owners aggregate for others.
        for level in range(2, NUM_LAYERS + 1):
            assert levels[rank][level] == set(before["sets"].rows_global[: before["sets"].sizes[level]].tolist())
        asked = {node for other in range(3) if other != rank for node in levels[other][1]} & owned
        assert levels[rank][1] == set(before["sets"].rows_global[: before["sets"].sizes[1]].tolist()) | asked
        assert all(structure.replicas is None for structure in others)


def test_layers_share_the_memory_of_their_edges(folder: str) -> None:
    for result in run_ranks(3, run_closure, folder, 1.0, 0):
        assert not any(len(structure.exchange.recv_global) for structure in result["sets"].layers)
        assert result["shares"] == {"indptr": True, "indices": True}


def test_layers_that_receive_share_all_but_positions(folder: str) -> None:
    for result in run_ranks(3, run_closure, folder, 0.0, 0):
        assert any(len(structure.exchange.recv_global) for structure in result["sets"].layers)
        assert result["shares"] == {"indptr": True, "indices": False}


def test_a_rank_without_seeds_borrows_one(folder: str) -> None:
    results = run_ranks(3, run_closure, folder, 0.0, 0)
    for result in results:
        seeds, own = result["seeds"].tolist(), sorted({1, 30} & set(result["owned"].tolist()))
        assert seeds == own if own else seeds in ([1], [30])
        assert result["sets"].num_borrowed == (0 if own else 1)
    assert sum(result["sets"].num_borrowed for result in results) > 0, "of three ranks, two seeds leave one without"


def run_bad_seeds(rank: int, world_size: int, part_config: str, kind: str) -> None:
    g = PartitionedGraph.open(part_config)
    good = g.nodes.owned()
    seeds = {
        "out of range": torch.tensor([40]) if rank == 1 else good,
        "negative": torch.tensor([-1]) if rank == 1 else good,
        "floating": good.double() if rank == 1 else good,
        "empty": good[:0],
    }[kind]
    settle_seeds(g.communicator, g.nodes, seeds)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("out of range", "seeds must lie in [0, 40) (got 40"),
        ("negative", "seeds must lie in [0, 40) (got -1"),
        ("floating", "one-dimensional integer tensor (got torch.float64"),
        ("empty", "no rank has a seed"),
    ],
)
def test_bad_seeds_end_on_all_ranks(kind: str, words: str, folder: str) -> None:
    for error in run_ranks_expect_errors(3, run_bad_seeds, folder, kind):
        assert error.type_name == "ValueError"
        assert words in error.message
