# SPDX-License-Identifier: Apache-2.0
"""A rank's planning problem by the definition, and what is left out of it where input rows cost nothing."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import pytest
import torch

from dgl_hybrid import PartitionedGraph
from dgl_hybrid.exchange.closure import settle_seeds
from dgl_hybrid.exchange.problem import _that_fit, build_plan_problem
from dgl_hybrid.planner import PlannerConfig, PlanProblem, make_plan, plan_objective
from tests.helpers.world import run_ranks
from tests.planner.problems import random_costs

NUM_LAYERS = 3


def run_problem(rank: int, world_size: int, part_config: str, dense_below: int) -> dict[str, Any]:
    problems, fetched = [], []
    for inputs_are_free in (True, False):
        g = PartitionedGraph.open(part_config)
        everything = torch.arange(g.num_nodes())
        given = torch.tensor([1, 30, 17]) if rank == 0 else everything[:0]
        seeds, _ = settle_seeds(g.communicator, g.nodes, given)
        problem = build_plan_problem(
            g.communicator,
            g.nodes,
            g.in_edges,
            g.partition.in_degrees,
            seeds,
            NUM_LAYERS,
            dense_below=dense_below,
            inputs_are_free=inputs_are_free,
        )
        problem.validate()
        problems.append(problem)
        fetched.append(len(g.in_edges.known_halo()))
    foreign = everything[~g.nodes.is_owned(everything)]
    g.in_edges.ensure(foreign)
    lists = [g.in_edges.lookup(torch.tensor([node]))[1].tolist() for node in everything.tolist()]
    return {
        "problems": problems,
        "fetched": fetched,
        "in": lists,
        "owned": set(g.nodes.owned().tolist()),
        "seeds": seeds,
    }


@pytest.mark.parametrize("dense_below", [0, 1])
def test_a_problem_says_what_owned_rows_read(dense_below: int, folder: str) -> None:
    results = run_ranks(3, run_problem, folder, dense_below)
    in_lists = results[0]["in"]
    reached = [[set(result["seeds"].tolist()) for result in results]]
    for level in range(NUM_LAYERS - 1, -1, -1):
        above = reached[0]
        read = {source for rows in above for node in rows for source in in_lists[node]}
        level_rows = [
            rows | (read & result["owned"]) | (result["owned"] if level < dense_below else set())
            for rows, result in zip(above, results, strict=True)
        ]
        reached.insert(0, level_rows)
    for rank, result in enumerate(results):
        for problem in result["problems"]:
            assert problem.owned_rows.tolist() == [len(level[rank]) for level in reached]
            for level in range(NUM_LAYERS):
                rows = reached[level + 1][rank]
                sources = [source for node in rows for source in in_lists[node]]
                assert int(problem.owned_edges[level]) == len(sources)
                halo = problem.halo_global.tolist()
                expected = [0 if v in rows - result["owned"] else sources.count(v) for v in halo]
                assert problem.owned_reads[level].tolist() == expected


def test_lists_that_only_tell_of_free_rows_are_not_fetched(folder: str) -> None:
    """Where input rows cost nothing the plans are as good without them, level by level above the lowest."""
    for result in run_ranks(3, run_problem, folder, 0):
        reduced, whole = result["problems"]
        assert result["fetched"][0] < result["fetched"][1]
        assert reduced.num_halo <= whole.num_halo
        costs = random_costs(3, num_layers=NUM_LAYERS, world_size=3)
        free = dataclasses.replace(
            costs,
            receive_s=((0.0,) * 3, *costs.receive_s[1:]),
            row_s=(0.0, *costs.row_s[1:]),
            edge_s=(0.0, 0.0, *costs.edge_s[2:]),
        )
        short, full = (make_plan(problem, free, PlannerConfig()) for problem in (reduced, whole))
        # The whole problem knows all that the plan brings here: by it, too, the plan is as cheap as can be.
        assert plan_objective(whole, free, short.cached) == pytest.approx(full.objective_s, rel=1e-12)
        assert short.objective_s == pytest.approx(full.objective_s, rel=1e-12)


LIMITS = (sys.maxsize, 25, 0)


def run_limited(rank: int, world_size: int, part_config: str, inputs_are_free: bool) -> list[tuple[PlanProblem, int]]:
    """Returns a problem for each of `LIMITS`, and how many in-edges of others it took to know."""
    results = []
    for limit in LIMITS:
        g = PartitionedGraph.open(part_config)
        problem = build_plan_problem(
            g.communicator,
            g.nodes,
            g.in_edges,
            g.partition.in_degrees,
            g.nodes.owned(),
            NUM_LAYERS,
            inputs_are_free=inputs_are_free,
            max_halo_edges=limit,
        )
        problem.validate()
        results.append((problem, g.in_edges.num_fetched_edges))
    return results


@pytest.mark.parametrize("inputs_are_free", [False, True])
def test_in_edges_past_a_limit_are_not_fetched(inputs_are_free: bool, folder: str) -> None:
    costs = random_costs(3, num_layers=NUM_LAYERS, world_size=3)
    for whole, *limited in run_ranks(3, run_limited, folder, inputs_are_free):
        assert whole[1] > LIMITS[1]
        for (problem, num_fetched), limit in zip(limited, LIMITS[1:], strict=True):
            assert num_fetched <= limit
            # What owned rows read and what it costs to receive it does not depend on what is known of the rest.
            plans = [make_plan(one, costs, PlannerConfig(strategy="depcomm")) for one in (whole[0], problem)]
            assert plans[0].communicated == plans[1].communicated
            assert plans[0].objective_s == plans[1].objective_s
            assert problem.num_halo <= whole[0].num_halo
        (some, num_fetched), _ = limited
        assert num_fetched > 0
        cached = make_plan(some, costs, PlannerConfig(strategy="depcache")).num_cached
        assert 0 < cached[2] < make_plan(whole[0], costs, PlannerConfig(strategy="depcache")).num_cached[2]


def test_what_is_read_comes_first_and_then_what_has_few_in_edges() -> None:
    num_edges = torch.tensor([1, 4, 2, 3, 0, 2])
    is_read = torch.tensor([False, True, True, False, False, True])
    for limit, expected in ((0, []), (3, [2]), (4, [2, 5]), (8, [1, 2, 4, 5]), (9, [0, 1, 2, 4, 5]), (12, range(6))):
        assert _that_fit(num_edges, is_read, limit).nonzero().flatten().tolist() == list(expected)
