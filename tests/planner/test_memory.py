# SPDX-License-Identifier: Apache-2.0
"""Memory budgets are kept, used, and refused with remedies when nothing fits."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from dgl_hybrid.errors import PlanError
from dgl_hybrid.planner import PlannerConfig, check_plan, make, make_plan, propose_plans
from dgl_hybrid.planner.greedy import Prices
from dgl_hybrid.planner.items import build_items
from dgl_hybrid.planner.memory import (
    CHUNK_COPIES,
    FEWEST_SOLVES,
    LEAST_CHUNK_ROWS,
    MOST_SOLVES,
    chunk_rows_within,
    least_bytes_in_chunks,
    unsplit_layers,
)
from dgl_hybrid.planner.model_trace import synthetic_trace
from dgl_hybrid.planner.plan import choice_from_plan

from .problems import brute_force, random_costs, random_problem


@pytest.mark.parametrize("num_layers", [2, 3])
@pytest.mark.parametrize("strategy", ["hybrid", "greedy"])
def test_budget_is_kept_and_used(num_layers: int, strategy: str) -> None:
    """Against brute force: never over the budget, refused only where nothing fits, and near the best on the whole."""
    ratios = []
    for seed in range(12):
        problem = random_problem(seed, num_layers=num_layers, num_halo=6, world_size=3)
        costs = random_costs(seed, num_layers=num_layers, world_size=3, whole=False)
        _, seconds, held = brute_force(problem, costs)
        free = held[seconds.argmin()]
        for share in (0.0, 0.2, 0.6, 1.0):
            budget = held.min() + share * (free - held.min()) + 1e-6
            plan = make_plan(problem, costs, PlannerConfig(strategy=strategy, memory_budget_bytes=budget))
            check_plan(problem, plan)
            assert plan.estimate is not None
            assert plan.estimate.ranks[0].held_bytes <= budget
            assert build_items(problem).held_bytes(costs, choice_from_plan(problem, plan.cached)) <= budget
            best = seconds[held <= budget].min()
            ratios.append(plan.objective_s / best if best else 1.0)
    assert min(ratios) > 1 - 1e-9
    assert sum(ratios) / len(ratios) < 1.05


@pytest.mark.parametrize(
    "options",
    [{}, {"max_cut_arcs": 0}, {"max_sweep_edges": 0}, {"max_sweep_edges": 2e3}, {"max_sweep_edges": math.inf}],
)
@pytest.mark.parametrize("share", [0.0, 0.4, 0.8, 2.0])
def test_the_sweep_solves_nothing_that_the_search_has_solved(
    share: float, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The measured prices were solved twice, and each solve by the greedy warned for itself."""
    problem = random_problem(5, num_layers=3, num_halo=40, world_size=3)
    costs = random_costs(5, num_layers=3, world_size=3)
    items = build_items(problem)
    free = items.held_bytes(costs, make.choose_items(items, costs, PlannerConfig()))
    config = PlannerConfig(memory_budget_bytes=share * free, **options)
    solved: list[Prices] = []
    inner = make._Solver._solve

    def solve(solver: Any, prices: Prices) -> Any:
        solved.append(prices)
        return inner(solver, prices)

    with monkeypatch.context() as patch:
        patch.setattr(make._Solver, "_solve", solve)
        candidates = propose_plans(problem, costs, config)
    assert not any(a.equals(b) for k, a in enumerate(solved) for b in solved[:k])
    assert len(caplog.records) == ("max_cut_arcs" in options)
    monkeypatch.setattr(make._Solver, "__call__", inner)  # each solved anew
    for ours, plain in zip(candidates, propose_plans(problem, costs, config), strict=True):
        assert ours.plan.strategy == plain.plan.strategy
        assert all(torch.equal(a, b) for a, b in zip(ours.plan.cached, plain.plan.cached, strict=True))


@pytest.mark.parametrize("strategy", ["hybrid", "greedy"])
def test_large_problems_are_solved_a_few_times(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The budget is kept and used all the same, nearly as well."""
    num_solves = 0
    inner = make._Solver._solve

    def solve(*args: Any) -> Any:
        nonlocal num_solves
        num_solves += 1
        return inner(*args)

    monkeypatch.setattr(make._Solver, "_solve", solve)
    ratios = []
    for seed in range(8):
        problem = random_problem(seed, num_layers=3, num_halo=60, world_size=3)
        costs = random_costs(seed, num_layers=3, world_size=3, whole=False)
        ends = [make_plan(problem, costs, PlannerConfig(strategy=name)).estimate for name in (strategy, "depcomm")]
        free, least = (one.ranks[0].held_bytes for one in ends if one is not None)
        if free <= least:
            continue
        config = PlannerConfig(strategy=strategy, memory_budget_bytes=(free + least) / 2)
        found = []
        for limit, most in ((config.max_sweep_edges, MOST_SOLVES), (0, FEWEST_SOLVES)):
            num_solves = 0
            plan = make_plan(problem, costs, replace(config, max_sweep_edges=limit))
            assert num_solves <= most
            assert plan.estimate is not None
            assert plan.estimate.ranks[0].fits
            found.append(plan.objective_s)
        ratios.append(found[1] / found[0])
    assert len(ratios) >= 3
    assert max(ratios) < 1.01


@pytest.mark.parametrize("strategy", ["hybrid", "depcache", "depcomm", "ratio"])
def test_nothing_fits(strategy: str) -> None:
    problem = random_problem(1, num_layers=2, num_halo=20, world_size=2)
    costs = random_costs(1, num_layers=2, world_size=2)
    config = PlannerConfig(strategy=strategy, memory_budget_bytes=3)
    with pytest.raises(PlanError, match=r"needs at least \d+ bytes .* is 3 .*solutions: 1\) raise .* 2\) .* 3\)"):
        make_plan(problem, costs, config)
    assert not any(candidate.estimate.fits for candidate in propose_plans(problem, costs, config))


def test_neutronstar_stops_at_its_memory() -> None:
    problem = random_problem(5, num_layers=2, num_halo=60, world_size=3)
    costs = random_costs(5, num_layers=2, world_size=3, whole=False)
    free = make_plan(problem, costs, PlannerConfig(strategy="neutronstar"))
    received = make_plan(problem, costs, PlannerConfig(strategy="depcomm"))
    assert free.estimate is not None
    assert received.estimate is not None
    low, high = received.estimate.ranks[0].held_bytes, free.estimate.ranks[0].held_bytes
    assert sum(free.num_cached) > 0
    assert low < high
    budget = (low + high) / 2
    tight = make_plan(problem, costs, PlannerConfig(strategy="neutronstar", memory_budget_bytes=budget))
    assert tight.estimate is not None
    assert tight.estimate.ranks[0].held_bytes <= budget
    assert 0 < sum(tight.num_cached) < sum(free.num_cached)


def test_a_chunk_is_as_long_as_its_copies_allow() -> None:
    trace = synthetic_trace([16, 32, 8])
    widest = max(layer.operand_bytes_fwd for layer in trace.layers)
    assert len({layer.operand_bytes_fwd for layer in trace.layers}) > 1
    for rows in (LEAST_CHUNK_ROWS, 1000):
        budget = CHUNK_COPIES * rows * widest
        assert chunk_rows_within(trace, budget) == rows
        assert chunk_rows_within(trace, budget - 1) == (rows - 1 if rows > LEAST_CHUNK_ROWS else None)
    least = least_bytes_in_chunks(trace)
    assert least is not None
    assert chunk_rows_within(trace, least) == LEAST_CHUNK_ROWS
    assert chunk_rows_within(trace, least - 1) is None
    assert unsplit_layers(trace) == ()
    first, last = trace.layers
    whole = replace(trace, layers=(first, replace(last, can_split=False)))
    assert chunk_rows_within(whole, budget) is least_bytes_in_chunks(whole) is None
    assert unsplit_layers(whole) == (2,)
