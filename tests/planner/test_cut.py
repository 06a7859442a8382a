# SPDX-License-Identifier: Apache-2.0
"""The minimum cut is optimal: against brute force, and never worse than any other strategy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dgl_hybrid.errors import PlanError
from dgl_hybrid.planner import PlannerConfig, check_plan, make_plan, plan_objective
from dgl_hybrid.planner import cut as cut_module
from dgl_hybrid.planner.items import Items

from .problems import brute_force, make_problem, problem_from_graph, random_costs, random_problem

SIZES = {1: 8, 2: 8, 3: 6, 4: 5}


@pytest.mark.parametrize("num_layers", [1, 2, 3, 4])
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("warm", [True, False], ids=["greedy first", "cut alone"])
def test_cut_equals_brute_force(num_layers: int, world_size: int, warm: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """14 instances each, 336 in all; "cut alone" keeps the greedy from deciding the easy part first."""
    if not warm:
        monkeypatch.setattr(cut_module, "grow", lambda items, prices, computed, **_: computed)
    for seed in range(14):
        problem = random_problem(seed, num_layers=num_layers, num_halo=SIZES[num_layers], world_size=world_size)
        costs = random_costs(seed, num_layers=num_layers, world_size=world_size, whole=seed % 3 > 0)
        plan = make_plan(problem, costs, PlannerConfig())
        check_plan(problem, plan)
        least, _, _ = brute_force(problem, costs)
        assert plan.objective_s == pytest.approx(least, rel=1e-12), f"seed {seed}"
        assert plan_objective(problem, costs, plan.cached) == plan.objective_s


@pytest.mark.parametrize("num_layers", [1, 2, 3, 4])
def test_cut_is_never_worse(num_layers: int) -> None:
    for seed in range(25):
        problem = random_problem(seed, num_layers=num_layers, num_halo=60, world_size=3)
        costs = random_costs(seed, num_layers=num_layers, world_size=3, whole=seed % 2 > 0)
        best = make_plan(problem, costs, PlannerConfig()).objective_s
        for strategy in ("greedy", "neutronstar", "depcache", "depcomm", "ratio"):
            plan = make_plan(problem, costs, PlannerConfig(strategy=strategy))
            check_plan(problem, plan)
            assert best <= plan.objective_s * (1 + 1e-12), (seed, strategy)


def test_cut_buys_a_shared_input_that_no_single_reader_would() -> None:
    """Vertices 0 and 1 read 2, which costs 6; each gains 4 by being computed: alone neither pays, together both do."""
    demand = np.array([[1, 1, 0], [1, 1, 0]], dtype=bool)
    problem = make_problem(in_neighbours=[[2], [2], []], demand=demand, owner=[1, 1, 1], world_size=2)
    costs = random_costs(0, num_layers=2, world_size=2)
    costs = type(costs)(
        receive_s=((6.0, 6.0), (5.0, 5.0)),
        row_s=(6.0, 1.0),
        edge_s=(0.0, 0.0),
        receive_bytes=(1.0, 1.0),
        row_held_bytes=(1.0, 1.0),
        edge_held_bytes=(0.0, 0.0),
    )
    plan = make_plan(problem, costs, PlannerConfig())
    assert plan.objective_s == 6 + 6 + 6 + 1 + 1
    assert [ids.tolist() for ids in plan.cached] == [[100, 103], [100, 103]]
    assert plan.communicated == (1, 0)


def test_ties_go_to_receiving_and_plans_repeat() -> None:
    for seed in range(20):
        problem = random_problem(seed, num_layers=3, num_halo=30, world_size=3)
        costs = random_costs(seed, num_layers=3, world_size=3)
        first, second = (make_plan(problem, costs, PlannerConfig()) for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(first.cached, second.cached, strict=True))
    demand = np.ones((2, 4), dtype=bool)
    problem = make_problem(in_neighbours=[[1], [2], [3], [0]], demand=demand, owner=[1] * 4, world_size=2)
    equal = type(costs)(
        receive_s=((1.0, 1.0), (2.0, 2.0)),
        row_s=(1.0, 1.0),
        edge_s=(0.0, 1.0),
        receive_bytes=(1.0, 1.0),
        row_held_bytes=(1.0, 1.0),
        edge_held_bytes=(0.0, 0.0),
    )
    assert make_plan(problem, equal, PlannerConfig()).num_cached == (0, 0)


def test_past_max_cut_arcs_the_greedy_answers(caplog: pytest.LogCaptureFixture) -> None:
    problem = random_problem(11, num_layers=3, num_halo=60, world_size=3)
    costs = random_costs(11, num_layers=3, world_size=3)
    plan = make_plan(problem, costs, PlannerConfig(max_cut_arcs=0))
    greedy = make_plan(problem, costs, PlannerConfig(strategy="greedy"))
    assert all(torch.equal(a, b) for a, b in zip(plan.cached, greedy.cached, strict=True))


def test_unsolved_cut_names_remedies(monkeypatch: pytest.MonkeyPatch) -> None:
    from ortools.graph.python import max_flow

    class Unsolved(max_flow.SimpleMaxFlow):
        def solve(self, source: int, sink: int) -> object:
            return self.BAD_INPUT

    monkeypatch.setattr(max_flow, "SimpleMaxFlow", Unsolved)
    monkeypatch.setattr(cut_module, "grow", lambda items, prices, computed, **_: computed)
    problem = random_problem(4, num_layers=3, num_halo=60, world_size=3)
    costs = random_costs(4, num_layers=3, world_size=3)
    with pytest.raises(PlanError, match=r"minimum cut was not solved .* Possible solutions: 1\)"):
        make_plan(problem, costs, PlannerConfig())


def test_a_planted_bug_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The brute-force test can fail: forgetting one kind of input makes plans that cost more than they seem."""
    honest = Items.reads

    def forgets(self: Items, computed: np.ndarray, level: int) -> np.ndarray:
        result = honest(self, computed, level)
        result[self.num_halo // 2 :] = False
        return result

    wrong = 0
    for seed in range(40):
        problem = random_problem(seed, num_layers=3, num_halo=6, world_size=2)
        costs = random_costs(seed, num_layers=3, world_size=2)
        least, _, _ = brute_force(problem, costs)
        with monkeypatch.context() as patch:
            patch.setattr(Items, "reads", forgets)
            plan = make_plan(problem, costs, PlannerConfig())
        wrong += plan_objective(problem, costs, plan.cached) != pytest.approx(least, rel=1e-12)
    assert wrong > 3


def test_whole_graph_in_three_parts() -> None:
    """On a power-law graph the hybrid plan is between the pure ones at every rank and beats both somewhere."""
    rng = np.random.default_rng(5)
    num_nodes = 600
    src = (rng.random(6000) ** 3 * num_nodes).astype(np.int64)
    dst = rng.integers(0, num_nodes, 6000)
    part = np.arange(num_nodes) * 3 // num_nodes
    beaten = False
    for rank in range(3):
        problem = problem_from_graph(
            src, dst, part, rank=rank, num_layers=3, seeds=rng.random(num_nodes) < 0.5, num_hops=3
        )
        problem.validate()
        costs = random_costs(1, num_layers=3, world_size=3, whole=False)
        plans = {s: make_plan(problem, costs, PlannerConfig(strategy=s)) for s in ("hybrid", "depcache", "depcomm")}
        pure = min(plans["depcache"].objective_s, plans["depcomm"].objective_s)
        beaten |= plans["hybrid"].objective_s < 0.999 * pure
        assert plans["depcomm"].num_cached == (0, 0, 0)
        assert plans["depcache"].communicated == (0, 0, 0)
    assert beaten
