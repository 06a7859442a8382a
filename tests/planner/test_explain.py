# SPDX-License-Identifier: Apache-2.0
"""The explanation names both prices, their parts and the decision, and agrees with the objective."""

from __future__ import annotations

import re

import pytest

from dgl_hybrid.errors import PlanError
from dgl_hybrid.planner import PlannerConfig, explain_vertex, make_plan

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
    assert "its own row of level 0 would have to be computed too: -4.5e+06 us more" in text
    assert "received loses 1.2e+07 us against computing it" in text
    assert "not needed here" in explain_vertex(problem, COSTS, depcomm, 106)
    with pytest.raises(PlanError, match=r"vertex 101 is no halo vertex of rank 0 of 2"):
        explain_vertex(problem, COSTS, plan, 101)


def test_every_vertex_can_be_explained() -> None:
    seen = set()
    for seed in range(8):
        problem = random_problem(seed, num_layers=3, num_halo=20, world_size=3)
        costs = random_costs(seed, num_layers=3, world_size=3)
        plan = make_plan(problem, costs, PlannerConfig())
        for vertex in problem.halo_global.tolist():
            text = explain_vertex(problem, costs, plan, vertex)
            seen |= set(
                re.findall(r"not possible|does not depend|not needed|received;|computed here;|held here;", text)
            )
    assert len(seen) == 6
