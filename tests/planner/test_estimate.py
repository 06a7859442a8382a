# SPDX-License-Identifier: Apache-2.0
"""Predicted epochs: formula by hand, candidates in step on all ranks, the choice."""

from __future__ import annotations

import dataclasses
import json
from itertools import pairwise

import numpy as np
import pytest
import torch

from dgl_hybrid.errors import PlanError
from dgl_hybrid.planner import (
    EpochEstimate,
    ItemCosts,
    PlannerConfig,
    PlanProblem,
    RankEstimate,
    choose_plan,
    make_plan,
    neutronstar,
    propose_plans,
    report,
    summarize_plan,
    synthetic_trace,
)
from dgl_hybrid.planner.estimate import estimate_rank
from dgl_hybrid.planner.items import build_items
from dgl_hybrid.planner.memory import CHUNK_COPIES

from .problems import make_problem, random_costs, random_problem


def estimate(comm: float, held_s: float, rest: float, fits: bool = True, held: float = 1.0) -> RankEstimate:
    return RankEstimate(
        comm_s=(comm,),
        held_s=(held_s,),
        rest_s=(rest,),
        fixed_s=0.0,
        objective_s=0.0,
        held_bytes=held,
        fits=fits,
    )


COSTS = ItemCosts(
    receive_s=((0.0, 5.0), (0.0, 11.0)),
    row_s=(0.5, 2.0),
    edge_s=(0.0, 0.25),
    receive_bytes=(4.0, 8.0),
    row_held_bytes=(4.0, 16.0),
    edge_held_bytes=(0.0, 1.0),
    pack_s=(1.0, 2.0),
    latency_s=(0.125, 0.25),
    output_row_s=3.0,
    output_edge_s=0.5,
    epoch_s=7.0,
)


def hand_problem(owned_reads: list[list[int]] | None) -> PlanProblem:
    demand = np.array([[1, 1, 0], [1, 1, 0]], dtype=bool)
    problem = make_problem(
        in_neighbours=[[2], [2], []], demand=demand, owner=[1] * 3, world_size=2, in_degree=[4, 4, 0]
    )
    return dataclasses.replace(
        problem,
        owned_rows=torch.tensor([30, 20, 10]),
        owned_edges=torch.tensor([100, 60]),
        owned_reads=None if owned_reads is None else torch.tensor(owned_reads, dtype=torch.int32),
    )


def test_epoch_by_hand() -> None:
    plan = make_plan(hand_problem(None), COSTS, PlannerConfig(strategy="depcomm"))
    assert plan.estimate is not None
    rank = plan.estimate.ranks[0]
    assert rank.comm_s == (2 * 4 + 0.125, 2 * 9 + 0.25)
    assert rank.held_s == (0, 0)
    # Layer 1: level-0 rows, edges into level 1, packing; layer 2 likewise.
    assert rank.rest_s == (30 * 0.5 + 100 * 0.25 + 2 * 1, 20 * 2.0 + 60 * 0.5 + 2 * 2)
    assert rank.fixed_s == 10 * 3.0 + 7.0
    assert rank.epoch_s == pytest.approx(rank.fixed_s + 8.125 + 42 + 18.25 + 74)
    assert rank.held_bytes == 2 * 4 + 2 * 8
    assert rank.compute_s == pytest.approx(rank.fixed_s + 42 + 74)


def test_edges_from_held_rows_hide_the_wire() -> None:
    problem = hand_problem([[30, 20, 0], [35, 5, 0]])
    costs = dataclasses.replace(COSTS, overlaps=(True, True))
    plan = make_plan(problem, costs, PlannerConfig(strategy="depcomm"))
    assert plan.estimate is not None
    rank = plan.estimate.ranks[0]
    # Layer 1: 50 of 100 in-edges begin at received rows; layer 2: 40 of 60.
    assert rank.held_s == (50 * 0.25, 20 * 0.5)
    assert rank.rest_s == (30 * 0.5 + 50 * 0.25 + 2 * 1, 20 * 2.0 + 40 * 0.5 + 2 * 2)
    assert rank.epoch_s == pytest.approx(rank.fixed_s + max(8.125, 12.5) + 29.5 + max(18.25, 10) + 64)
    # The second layer cannot be split: all of it waits.
    half = dataclasses.replace(costs, overlaps=(True, False))
    plan = make_plan(problem, half, PlannerConfig(strategy="depcomm"))
    assert plan.estimate is not None
    assert plan.estimate.ranks[0].held_s == (12.5, 0)
    # Nothing travels: there is nothing to hide.
    cached = make_plan(problem, costs, PlannerConfig(strategy="depcache"))
    assert cached.estimate is not None
    assert cached.estimate.ranks[0].comm_s == cached.estimate.ranks[0].held_s == (0, 0)


def test_products_beside_an_exchange_hide_the_wire() -> None:
    """They are part of what the rows cost that a layer makes, and run beside its exchange, if there is one."""
    problem = hand_problem([[30, 20, 0], [35, 5, 0]])
    costs = dataclasses.replace(COSTS, overlaps=(True, True))
    beside = dataclasses.replace(costs, beside_s=(0.5, 1.0))
    plain, rank = (
        estimate_rank(problem, build_items(problem), chosen, np.zeros((2, 3), dtype=bool)) for chosen in (costs, beside)
    )
    # The first layer makes 20 rows, the second 10: beside 8.125 s and 18.25 on the wire.
    assert plain.held_s == (12.5, 10)
    assert rank.held_s == (12.5 + 20 * 0.5, 10 + 10 * 1.0)
    assert rank.rest_s == (plain.rest_s[0], plain.rest_s[1] - 20 * 0.5)
    assert rank.fixed_s == plain.fixed_s - 10 * 1.0
    assert rank.compute_s == plain.compute_s
    assert rank.epoch_s == pytest.approx(rank.fixed_s + 22.5 + rank.rest_s[0] + 20 + rank.rest_s[1])
    # A cached row is made, too; where nothing is received or nothing overlaps, all of it is done by itself.
    one = np.array([[0, 0, 0], [1, 0, 0]], dtype=bool)
    assert estimate_rank(problem, build_items(problem), beside, one).held_s[0] == pytest.approx(
        estimate_rank(problem, build_items(problem), costs, one).held_s[0] + 21 * 0.5
    )
    for chosen, computed in ((beside, True), (dataclasses.replace(beside, overlaps=(False, False)), False)):
        found = estimate_rank(problem, build_items(problem), chosen, np.full((2, 3), computed))
        assert found.held_s == (0, 0)
        assert found.fixed_s == plain.fixed_s


def test_edges_of_cached_rows_wait_for_what_they_read() -> None:
    """One row is computed here; of its 4 in-edges one begins at a vertex whose row is received."""
    problem = hand_problem([[30, 20, 0], [35, 5, 0]])
    items = build_items(problem)
    computed = np.array([[1, 0, 0], [1, 0, 0]], dtype=bool)
    costs = dataclasses.replace(COSTS, overlaps=(True, True))
    rank = estimate_rank(problem, items, costs, computed)
    # Received: at level 0 vertex 1 (20 reads) and vertex 2 (read by the cached one alone); at level 1 vertex 1 (5).
    assert rank.held_s == ((100 + 4 - 20 - 1) * 0.25, (60 - 5) * 0.5)


def test_rows_are_copied_together_where_a_layer_cannot_be_split() -> None:
    problem = hand_problem(None)
    costs = dataclasses.replace(COSTS, copy_s=(0.5, 0.0))
    plain, copied = (make_plan(problem, c, PlannerConfig(strategy="depcomm")).estimate for c in (COSTS, costs))
    assert plain is not None
    assert copied is not None
    assert copied.ranks[0].rest_s == (plain.ranks[0].rest_s[0] + 30 * 0.5, plain.ranks[0].rest_s[1])
    cached = make_plan(problem, costs, PlannerConfig(strategy="depcache")).estimate
    assert cached is not None
    assert cached.ranks[0].rest_s == ((30 + 3) * 0.5 + (100 + 8) * 0.25, (20 + 2) * 2.0 + 60 * 0.5)


def test_who_owns_what_all_read_sends_for_longer_than_it_receives() -> None:
    """Rank 0 sends 4 s to each of two ranks and receives 1 s from one; gradients take twice as long."""
    by_owner = np.array([[0, 1, 0], [4, 0, 0], [4, 0, 0]])
    links_s = by_owner[:, :, None, None] * np.array([[1.0, 2.0]])  # of each rank
    plain = [estimate(float(seconds.sum()), 0, 1) for seconds in links_s]
    assert [one.epoch_s for one in plain] == [4, 13, 13]
    ranks = tuple(one.with_sending(links_s[rank], links_s[:, rank]) for rank, one in enumerate(plain))
    assert [one.epoch_s for one in ranks] == [8 + 16 + 1, 13, 13]
    whole = EpochEstimate(ranks=ranks)
    assert (whole.epoch_s, whole.slowest_rank) == (8 + 16 + 1, 0)
    assert EpochEstimate(ranks=tuple(one.with_wire(0.5) for one in ranks)).epoch_s == 12 + 1
    assert EpochEstimate.from_json(json.loads(json.dumps(whole.to_json()))) == whole
    assert EpochEstimate(ranks=tuple(plain[:1])).epoch_s == 4, "the others were not asked"


def test_the_wire_is_counted_by_owner() -> None:
    problem = hand_problem([[30, 20, 0], [35, 5, 0]])
    costs = dataclasses.replace(COSTS, wire_s=(((0, 0), (1, 3)), ((0, 0), (4, 5))))
    config = PlannerConfig(strategy="depcomm")
    (candidate,) = propose_plans(problem, costs, config)
    assert candidate.links_s.tolist() == [[[0, 0], [0, 0]], [[2, 6], [8, 10]]]
    (candidate,) = propose_plans(problem, COSTS, config)
    assert candidate.links_s.tolist() == [[[0, 0], [0, 0]], [[0, 0], [0, 0]]], "there are no links"
    with pytest.raises(ValueError, match="wire_s must be"):
        dataclasses.replace(COSTS, wire_s=(((0, 0), (1, 3)),))


def test_what_ranks_tell_each_other_does_not_grow_with_their_number() -> None:
    """Every rank gathers what each says of every candidate, and keeps it in the plan's file."""
    sizes = []
    for world_size in (2, 200):
        problem = random_problem(1, num_layers=2, num_halo=20, world_size=world_size)
        costs = random_costs(1, num_layers=2, world_size=world_size)
        costs = dataclasses.replace(costs, wire_s=(((1.0, 2.0),) * world_size,) * 2)
        plan = make_plan(problem, costs, PlannerConfig(strategy="depcomm"))
        assert plan.estimate is not None
        sizes.append(json.dumps(plan.estimate.to_json()).count(","))
    assert sizes[0] == sizes[1]


def test_choice_is_the_fastest_slowest_rank() -> None:
    balanced, lopsided = [estimate(5, 0, 1), estimate(5, 0, 1)], [estimate(0, 0, 1), estimate(9, 0, 1)]
    assert choose_plan([[lopsided[0], balanced[0]], [lopsided[1], balanced[1]]]) == 1
    assert choose_plan([[balanced[0], balanced[0]]]) == 0
    hidden, shown = estimate(5, 5, 1), estimate(4, 0, 3)
    assert choose_plan([[shown, hidden]]) == 1
    assert choose_plan([[estimate(1, 0, 0, fits=False), shown], [estimate(1, 0, 0), shown]]) == 1
    epoch = EpochEstimate(ranks=(shown, hidden))
    assert (epoch.epoch_s, epoch.slowest_rank) == (7, 0)
    with pytest.raises(ValueError, match=r"same number of candidates, at least one \(got \[2, 1\]\)"):
        choose_plan([[shown, shown], [shown]])
    with pytest.raises(PlanError, match=r"no plan fits .* rank 1 of 2 needs at least 9 bytes .* solutions: 1\)"):
        choose_plan([[shown], [estimate(1, 1, 1, fits=False, held=9.0)]])
    with pytest.raises(PlanError, match=r"rank 0 of 2 needs at least 3 bytes"):
        choose_plan([[estimate(1, 1, 1, fits=False, held=3.0)], [estimate(1, 1, 1, held=9.0)]])
    too_much = [[shown], [estimate(1, 1, 1, fits=False, held=9e6)]]
    with pytest.raises(PlanError, match=r"rank 1 of 2 needs at least 4097 bytes for its halo rows\. Poss"):
        choose_plan(too_much, chunked_bytes=4096.5)
    with pytest.raises(PlanError, match=r"at least 9000000 bytes for its halo rows \(layers \[2\] need all of theirs"):
        choose_plan(too_much, unsplit=[2])


def test_ranks_wait_at_every_exchange() -> None:
    def of(comm: tuple[float, ...], rest: tuple[float, ...], fixed_s: float) -> RankEstimate:
        return RankEstimate(
            comm_s=comm, held_s=(0.0,) * len(comm), rest_s=rest, fixed_s=fixed_s, objective_s=0.0, held_bytes=0.0
        )

    # Only the second layer exchanges; the third and what follows come after it, the first before.
    ranks = (of((0, 1, 0), (5, 1, 2), 1), of((0, 2, 0), (1, 3, 1), 2))
    epoch = EpochEstimate(ranks=ranks)
    assert epoch.epoch_s == max(1 + 2 + 2, 2 + 1 + 5) + max(5, 1)
    assert epoch.epoch_s > max(rank.epoch_s for rank in ranks)
    silent = EpochEstimate(ranks=(of((0, 0), (5, 1), 1), of((0, 0), (1, 6), 1)))
    assert silent.epoch_s == max(7, 8)
    assert silent.slowest_rank == 1


def test_candidates_are_in_step_on_every_rank() -> None:
    names = []
    for seed in range(4):
        problem = random_problem(seed, num_layers=3, num_halo=10 * seed, world_size=3)
        costs = random_costs(seed, num_layers=3, world_size=3)
        candidates = propose_plans(problem, costs, PlannerConfig())
        names.append([candidate.plan.strategy for candidate in candidates])
        by_name = dict(zip(names[-1], candidates, strict=True))
        best = make_plan(problem, costs, PlannerConfig()).objective_s
        assert by_name["hybrid@1"].plan.objective_s == best
        assert all(candidate.plan.objective_s >= best * (1 - 1e-12) for candidate in candidates)
        # Dearer communication, less of it.
        sweep = [by_name[f"hybrid@{price:g}"].plan for price in PlannerConfig().prices]
        spent = [report(problem, costs, [plan]) for plan in sweep]
        comm = [sum(row.comm_ms for row in rows) for rows in spent]
        assert all(a >= b - 1e-9 for a, b in pairwise(comm))
    assert all(n == names[0] for n in names)
    assert names[0][-4:] == ["greedy", "neutronstar", "depcache", "depcomm"]
    one = propose_plans(problem, costs, PlannerConfig(strategy="neutronstar"))
    assert [candidate.plan.strategy for candidate in one] == ["neutronstar"]
    budgeted = propose_plans(problem, costs, PlannerConfig(memory_budget_bytes=1e9))
    assert [c.plan.strategy for c in budgeted] == ["hybrid", *names[0]]


def test_neutronstars_plan_is_a_candidate_where_it_is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = random_problem(1, num_layers=2, num_halo=20, world_size=3)
    costs = random_costs(1, num_layers=2, world_size=3)
    candidates = propose_plans(problem, costs, PlannerConfig())
    assert [c.plan.strategy for c in candidates][-4:] == ["greedy", "neutronstar", "depcache", "depcomm"]
    published = make_plan(problem, costs, PlannerConfig(strategy="neutronstar"))
    assert candidates[-3].plan.objective_s == published.objective_s
    monkeypatch.setattr(neutronstar, "QUICK_VERTICES", 19)  # elsewhere the greedy stands in its place
    candidates = propose_plans(problem, costs, PlannerConfig())
    assert [c.plan.strategy for c in candidates][-4:] == ["greedy", "greedy", "depcache", "depcomm"]


def test_report_rows_add_up() -> None:
    problem = hand_problem(None)
    plan = make_plan(problem, COSTS, PlannerConfig())
    rows = report(problem, COSTS, [plan])
    assert sum(row.compute_ms + row.comm_ms for row in rows) == pytest.approx(1e3 * plan.objective_s)
    assert plan.estimate is not None
    assert sum(row.held_bytes for row in rows) == pytest.approx(plan.estimate.ranks[0].held_bytes)
    assert [(row.layer, row.cached, row.communicated) for row in rows] == [
        (entry["layer"], entry["cached"], entry["communicated"]) for entry in summarize_plan(plan)
    ]
    # Bytes received are those that travel forward: a kept first layer's do not, sums stand for several rows.
    travels = dataclasses.replace(COSTS, wire_bytes=((0.0, 0.0), (0.0, 12.0)))
    nothing = make_plan(problem, travels, PlannerConfig(strategy="depcomm"))
    rows = report(problem, travels, [nothing])
    assert [row.received_bytes for row in rows] == [0.0, 12.0 * nothing.communicated[1]]
    assert min(nothing.communicated) > 0


def test_rows_received_in_chunks_hold_some_copies_of_one() -> None:
    """Of a plan that only chunks fit, all rows were reported as held at once: many times the budget."""
    problem = hand_problem(None)
    plan = make_plan(problem, COSTS, PlannerConfig(strategy="depcomm"))
    assert min(plan.communicated) > 0
    at_once = [row.held_bytes for row in report(problem, COSTS, [plan])]
    assert at_once == [count * row for count, row in zip(plan.communicated, COSTS.receive_bytes, strict=True)]
    trace = synthetic_trace([1, 2, 1])
    fwd = [layer.operand_bytes_fwd for layer in trace.layers]
    many = dataclasses.replace(COSTS, receive_bytes=(1e6, 1e6))
    chunked = dataclasses.replace(plan, chunk_rows=3, trace=trace)
    assert [row.held_bytes for row in report(problem, many, [chunked])] == [CHUNK_COPIES * 3 * row for row in fwd]
    whole = dataclasses.replace(plan, chunk_rows=10**6, trace=trace)
    assert [row.held_bytes for row in report(problem, COSTS, [whole])] == at_once, "no more than all of them"
