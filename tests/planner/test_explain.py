# SPDX-License-Identifier: Apache-2.0
"""The explanation names both prices, their parts and the decision, and agrees with the objective."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch

from dgl_hybrid.errors import PlanError
from dgl_hybrid.planner import PlannerConfig, RunRows, explain_vertex, make_plan, report
from dgl_hybrid.planner.items import build_items
from dgl_hybrid.planner.plan import choice_from_plan

from .problems import random_costs, random_problem
from .test_estimate import COSTS, hand_problem


def test_explanation_by_hand() -> None:
    problem = hand_problem(None)
    plan = make_plan(problem, COSTS, PlannerConfig())
    text = explain_vertex(problem, COSTS, plan, 100)
    assert text.splitlines() == [
        "vertex 100 on rank 0 of 2, plan hybrid: owned by rank 1, 4 in-edges, known here",
        "level 0 (read by layer 1): held here; vertices of this rank read it",
        "  receive: 5e+06 us = wire 4e+06 us + pack 1e+06 us",
        "  compute: 5e+05 us = row 5e+05 us",
        "  held here saves 4.5e+06 us against receiving it",
        "level 1 (read by layer 2): computed here; vertices of this rank read it",
        "  receive: 1.1e+07 us = wire 9e+06 us + pack 2e+06 us",
        "  compute: 3e+06 us = row 2e+06 us + 4 in-edges 1e+06 us",
        "  its inputs: 1 halo rows of level 0, 1 of them here anyway, 0 to be received for it alone: 0 us",
        "  computed here saves 8e+06 us against receiving it",
    ]
    assert "only rows computed here need it" in explain_vertex(problem, COSTS, plan, 106)
    depcomm = make_plan(problem, COSTS, PlannerConfig(strategy="depcomm"))
    text = explain_vertex(problem, COSTS, depcomm, 100)
    assert "level 1 (read by layer 2): received; vertices of this rank read it" in text
    assert "1 halo rows of level 0, 0 of them here anyway, 1 to be received for it alone: 5e+05 us" in text
    assert "its own row of level 0 would have to be computed too: which saves 4.5e+06 us" in text
    assert "received loses 1.2e+07 us against computing it by itself; strategy depcomm does not weigh rows so" in text
    assert "not needed here" in explain_vertex(problem, COSTS, depcomm, 106)
    with pytest.raises(PlanError, match=r"vertex 101 is no halo vertex of rank 0 of 2"):
        explain_vertex(problem, COSTS, plan, 101)


def test_what_nobody_asks_for_once_the_plan_runs_is_not_needed() -> None:
    """It was said to be computed here, for vertices of this rank that no rank computes."""
    problem = hand_problem(None)
    plan = make_plan(problem, COSTS, PlannerConfig())
    ids = [cached.clone() for cached in plan.cached]
    assert 100 in ids[0].tolist()
    assert 100 in ids[1].tolist()
    whole = RunRows(computed=tuple(ids), received=(torch.tensor([], dtype=torch.int64),) * 2)
    assert explain_vertex(problem, COSTS, plan, 100, whole) == explain_vertex(problem, COSTS, plan, 100)
    run = dataclasses.replace(whole, computed=(ids[0], ids[1][ids[1] != 100]))
    text = explain_vertex(problem, COSTS, plan, 100, run)
    assert "level 0 (read by layer 1): held here; vertices of this rank read it" in text
    assert text.endswith(
        "level 1 (read by layer 2): not needed here: only rows that no rank asks for under this plan would read it"
    )
    rows, fewer = report(problem, COSTS, [plan], [whole]), report(problem, COSTS, [plan], [run])
    assert [row.cached for row in rows] == [len(cached) for cached in ids]
    assert [row.cached for row in fewer] == [len(ids[0]), len(ids[1]) - 1]
    assert fewer[1].compute_ms < rows[1].compute_ms
    assert fewer[1].held_bytes < rows[1].held_bytes


def test_computing_instead_is_priced_with_all_that_it_brings() -> None:
    """Of three layers the rows that a vertex's own lower ones read were left out: the best of plans "lost"."""
    checked = num_ties = 0
    for seed in range(30):
        problem = random_problem(seed, num_layers=4, num_halo=20, world_size=3)
        costs = random_costs(seed, num_layers=4, world_size=3)
        plan = make_plan(problem, costs, PlannerConfig())
        items, computed = build_items(problem), choice_from_plan(problem, plan.cached)
        present = items.present(computed)
        for at, vertex in enumerate(problem.halo_global.tolist()):
            text = explain_vertex(problem, costs, plan, vertex)
            for level in range(2, 4):
                if not present[level, at] or computed[level, at] or not items.allowed[level, at]:
                    continue
                raised = computed.copy()
                raised[: level + 1, at] = True
                inputs = items.present(raised)[0] & ~present[0] & items.allowed[0]
                raised[0] |= inputs & (items.compute_prices(costs)[0] < items.receive_prices(costs)[0])
                more_s = items.objective(costs, raised) - items.objective(costs, computed)
                said = text.split(f"level {level} (read")[1].split("\nlevel ")[0]
                told = re.search(r"received (saves|loses) ([\d.e+-]+) us against computing it", said)
                if told is None:
                    assert "received costs the same as computing it" in said
                    assert more_s == pytest.approx(0.0, abs=1e-9)
                    num_ties += 1
                    continue
                assert told[1] == "saves", "the cut's is the best"
                assert float(told[2]) == pytest.approx(1e6 * more_s, rel=6e-3)
                checked += 1
    assert checked > 100
    assert num_ties > 0


def test_what_is_held_for_a_vertex_alone_is_its_price() -> None:
    """It counted as "here anyway", and the vertex's own lower row as nothing: computing saved more than it does."""
    checked = 0
    for seed in range(60):
        problem = random_problem(seed, num_layers=2, num_halo=20, world_size=3)
        costs = random_costs(seed, num_layers=2, world_size=3)
        plan = make_plan(problem, costs, PlannerConfig())
        items, computed = build_items(problem), choice_from_plan(problem, plan.cached)
        if items.lowest:
            continue
        for at in computed[1].nonzero()[0].tolist():
            others = computed.copy()
            others[1, at] = False
            read = {int(source) for reader, source in zip(items.reader, items.source, strict=True) if others[1, reader]}
            for row in range(problem.num_halo):
                others[0, row] &= bool(items.demand[0, row] or others[1, row] or row in read)
            less_s = items.objective(costs, others) - items.objective(costs, computed)
            said = explain_vertex(problem, costs, plan, int(problem.halo_global[at])).split("level 1 (read")[1]
            told = re.search(r"computed here (saves|loses) ([\d.e+-]+) us against receiving it", said)
            if told is None:
                assert "computed here costs the same as receiving it" in said
                assert less_s == pytest.approx(0.0, abs=1e-9)
                continue
            assert told[1] == ("saves" if less_s > 0 else "loses")
            assert float(told[2]) == pytest.approx(1e6 * abs(less_s), rel=6e-3)
            checked += 1
    assert checked > 50


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [("depcache", "strategy depcache does not weigh rows so"), ("hybrid@5", "made with receiving priced 5 times")],
)
def test_it_is_said_what_made_a_plan_compute_what_costs_more(strategy: str, expected: str) -> None:
    """Of such rows, too, it was said that they pay together with others."""
    problem = hand_problem(None)
    dear = dataclasses.replace(COSTS, row_s=tuple(100 * x for x in COSTS.row_s))
    plan = dataclasses.replace(make_plan(problem, dear, PlannerConfig(strategy="depcache")), strategy=strategy)
    text = explain_vertex(problem, dear, plan, 100)
    assert expected in text
    assert "pays together" not in text


def test_every_vertex_can_be_explained() -> None:
    seen = set()
    for seed in range(8):
        problem = random_problem(seed, num_layers=3, num_halo=20, world_size=3)
        costs = random_costs(seed, num_layers=3, world_size=3)
        plan = make_plan(problem, costs, PlannerConfig())
        for vertex in problem.halo_global.tolist():
            text = explain_vertex(problem, costs, plan, vertex)
            seen |= set(
                re.findall(r"not possible|nothing that this rank|not needed|received;|computed here;|held here;", text)
            )
    assert len(seen) == 6
