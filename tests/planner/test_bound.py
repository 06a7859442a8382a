# SPDX-License-Identifier: Apache-2.0
"""The lower bound is one, and is tight where inputs are not shared; large problems get one plan, not a sweep."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from dgl_hybrid.planner import PlannerConfig, make_plan, propose_plans
from dgl_hybrid.planner.bound import lower_bound
from dgl_hybrid.planner.greedy import Prices
from dgl_hybrid.planner.items import build_items

from .problems import brute_force, make_problem, random_costs, random_problem


@pytest.mark.parametrize("num_layers", [1, 2, 3])
def test_no_choice_is_below_the_bound(num_layers: int) -> None:
    gaps = []
    for seed in range(40):
        problem = random_problem(seed, num_layers=num_layers, num_halo=6, world_size=3)
        costs = random_costs(seed, num_layers=num_layers, world_size=3, whole=seed % 3 > 0)
        items = build_items(problem)
        bound = lower_bound(items, Prices.of(items, costs))
        least, _, _ = brute_force(problem, costs)
        assert bound <= least * (1 + 1e-12), seed
        gaps.append(least / bound - 1 if bound else 0.0)
    assert np.mean(gaps) < 0.3, "a bound far below says nothing"


def test_tight_where_every_input_has_one_reader() -> None:
    """0 and 1 read an input each; computing costs 1 + 2 against 5: both are computed, and the bound knows it."""
    demand = np.array([[0, 0, 0, 0], [1, 1, 0, 0]], dtype=bool)
    problem = make_problem(in_neighbours=[[2], [3], [], []], demand=demand, owner=[1] * 4, world_size=2)
    costs = type(random_costs(0, num_layers=2, world_size=2))(
        receive_s=((2.0, 2.0), (5.0, 5.0)),
        row_s=(0.0, 1.0),
        edge_s=(0.0, 0.0),
        receive_bytes=(1.0, 1.0),
        row_held_bytes=(1.0, 1.0),
        edge_held_bytes=(0.0, 0.0),
    )
    items = build_items(problem)
    assert make_plan(problem, costs, PlannerConfig()).objective_s == 2.0
    assert lower_bound(items, Prices.of(items, costs)) == 2.0


def test_the_gap_of_a_greedy_in_place_of_the_cut_is_told(caplog: pytest.LogCaptureFixture) -> None:
    problem = random_problem(3, num_layers=3, num_halo=60, world_size=3)
    costs = random_costs(3, num_layers=3, world_size=3)
    with caplog.at_level(logging.WARNING):
        greedy = make_plan(problem, costs, PlannerConfig(max_cut_arcs=0))
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith(
        "the minimum cut would have more than 0 arcs: using the greedy, whose plan costs at most "
    )
    told = float(message.split("at most ")[1].split(" %")[0]) / 100
    assert greedy.objective_s <= make_plan(problem, costs, PlannerConfig()).objective_s * (1 + told + 1e-3)


def test_a_large_problem_gets_one_plan_for_the_whole_sweep() -> None:
    """The number of candidates and their order stay, since another rank's problem may be small."""
    problem = random_problem(5, num_layers=3, num_halo=40, world_size=3)
    costs = random_costs(5, num_layers=3, world_size=3)
    swept = propose_plans(problem, costs, PlannerConfig())
    single = propose_plans(problem, costs, PlannerConfig(max_sweep_edges=0))
    assert len(single) == len(swept)
    assert [c.plan.strategy for c in single[-2:]] == ["depcache", "depcomm"]
    assert len({id(c) for c in single[:-2]}) == 1
    at_measured = next(c for c in swept if c.plan.strategy == "hybrid@1")
    assert single[0].plan.objective_s == at_measured.plan.objective_s
    with pytest.raises(ValueError, match="max_sweep_edges must not be negative"):
        PlannerConfig(max_sweep_edges=-1)
