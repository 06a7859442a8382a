# SPDX-License-Identifier: Apache-2.0
"""A loader whose epochs change plans on the way to the fastest measured one, and what becomes of its results."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dgl_hybrid import FullGraphLoader, PartitionedGraph, average_gradients
from dgl_hybrid.planner import Topology, neutronstar, uniform_topology
from dgl_hybrid.training import loader as loader_module
from dgl_hybrid.training import planning
from dgl_hybrid.training.plan_trials import (
    CLOSE,
    DRIFT_WINDOW,
    PlanTrials,
)
from tests.helpers.exactness import Case
from tests.helpers.graphs import power_law
from tests.helpers.partitions import PartitionStore
from tests.helpers.rates import BUDGET_S
from tests.helpers.world import run_ranks
from tests.training.trial_turns import AT_ONCE, FINAL, FIRST, MOST_EPOCHS, turns_of


@dataclass
class Tuned:
    losses: list[float]
    strategies: list[str]
    settled: list[bool]
    trying: list[bool]
    cached: list[int]
    candidates: list[str]
    fetched: list[int]
    has_basis: list[bool]
    predicted_s: list[float] = field(default_factory=list)
    candidates_s: list[float] = field(default_factory=list)
    """Predicted, of each candidate."""
    favourites: set[str] = field(default_factory=set)
    """Plans that stay unless another one is clearly faster."""
    probed: list[int] = field(default_factory=list)
    """How often rates had been measured until each epoch."""
    begun: list[list[float]] = field(default_factory=list)
    """What trials that began anew were told of each candidate."""


def train_tuned(
    rank: int,
    world_size: int,
    part_config: str,
    epochs: int,
    fast: str,
    autotune: bool | float,
    slows_at: int | None = None,
    build_ns: int = 0,
    bandwidths: tuple[float, ...] = (),
    nearly: str = "",
    settles: int | None = None,
    evaluates_apart: bool = False,
) -> Tuned:
    """Every epoch ends at a time made up for the plan that it ran, so that the outcome is known.

    It is evaluated after each, by the same loader or by one of a plan of its own.

    Up to so many epochs; fewer, where plans have been chosen `settles` times, by as long as epochs are then watched.

    The plan `nearly` takes a hundredth longer than the fast one. From the epoch `slows_at` on the fast plan is the slow
    one. Building a plan's blocks takes `build_ns` on rank 0.
    With `bandwidths` rates are not given but measured, and these are found, one after the other.
    """
    g = PartitionedGraph.open(part_config)
    model = Case(kind="sage_mean", num_layers=3).build(g.ndata["feat"].shape[1])
    ddp = nn.parallel.DistributedDataParallel(model) if world_size > 1 else model
    topology = None if bandwidths else uniform_topology(world_size, bandwidth_bytes_per_s=4e8)
    seeds = g.owned_nodes("train_mask")
    made_up_ns = num_probes = 0
    real_clock, real_build = loader_module.time.perf_counter_ns, FullGraphLoader._build
    real_probe, real_timing, real_begin = planning.probe, planning.time_model, PlanTrials.begin_anew
    begun: list[list[float]] = []

    def begin_anew(self: PlanTrials, *args: Any, predicted_s: Sequence[float] = (), **options: Any) -> None:
        begun.append(list(predicted_s))
        real_begin(self, *args, predicted_s=predicted_s, **options)

    def probe(*args: Any, **options: Any) -> Topology:
        nonlocal num_probes
        num_probes += 1
        return uniform_topology(world_size, bandwidth_bytes_per_s=bandwidths[num_probes - 1])

    def build(self: FullGraphLoader, *args: Any, **options: Any) -> None:
        nonlocal made_up_ns
        made_up_ns += build_ns if rank == 0 else 0
        real_build(self, *args, **options)

    loader_module.time.perf_counter_ns = lambda: made_up_ns
    FullGraphLoader._build = build
    planning.probe = probe
    planning.time_model = functools.partial(real_timing, budget_s=BUDGET_S)
    PlanTrials.begin_anew = begin_anew
    try:
        loader = FullGraphLoader(g, seeds, 3, model=model, topology=topology, seed=5, autotune=autotune)
        nothing = torch.empty(0, dtype=torch.int64)
        evaluated = FullGraphLoader(g, seeds, 3, plan=[nothing] * 3, seed=5) if evaluates_apart else loader
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        tuned = Tuned([], [], [], [], [], [plan.strategy for plan in loader.outcome.candidates], [], [])
        tuned.candidates_s = loader.outcome.predicted_s
        tuned.favourites = {tuned.candidates[index] for index in loader._choice.favourites(loader.outcome)}
        for epoch in range(epochs):
            if is_watched_long_enough(tuned.settled, settles):
                break
            for input_nodes, ids, blocks in loader:
                strategy = loader.outcome.plan.strategy
                tuned.strategies.append(strategy)
                tuned.settled.append(loader.is_settled)
                tuned.trying.append(loader.is_trying)
                tuned.cached.append(loader.sets.num_recomputed(1))
                tuned.fetched.append(g.in_edges.num_fetched_edges)
                tuned.has_basis.append(loader.outcome.basis is not None)
                tuned.predicted_s.append(loader.outcome.predicted_epoch_s)
                tuned.probed.append(num_probes)
                loss = F.cross_entropy(ddp(blocks, g.ndata["feat"][input_nodes]), g.ndata["label"][ids])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                # Ranks see different times, rank 0 the same of every plan; the slowest decides.
                is_fast = (strategy == fast) == (slows_at is None or epoch < slows_at)
                share = 100 if is_fast or rank == 0 else 101 if strategy == nearly else 10_000
                made_up_ns += share * 10_000_000 * (1 + rank)  # a second for one of the fast
            with torch.no_grad():
                for input_nodes, _, blocks in evaluated:  # an evaluation with the same loader takes no turn
                    model(blocks, g.ndata["feat"][input_nodes])
            tuned.losses.append(loss.item() * loader.loss_weight / world_size)
    finally:
        loader_module.time.perf_counter_ns = real_clock
        FullGraphLoader._build = real_build
        planning.probe, planning.time_model = real_probe, real_timing
        PlanTrials.begin_anew = real_begin
    tuned.begun = begun
    return tuned


def is_watched_long_enough(settled: list[bool], settles: int | None) -> bool:
    """Whether plans have been chosen so many times, and an epoch more than are watched has run since."""
    begins = [epoch for epoch, (before, now) in enumerate(zip([False, *settled], settled)) if now and not before]
    return len(begins) == settles and all(settled[begins[-1] :]) and len(settled) - begins[-1] > DRIFT_WINDOW


def reference_curve(epochs: int) -> list[float]:
    graph = power_law()
    model = Case(kind="sage_mean", num_layers=3).build(graph.ndata["feat"].shape[1])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train = graph.ndata["train_mask"].bool()
    losses = []
    for _ in range(epochs):
        loss = F.cross_entropy(model([graph] * 3, graph.ndata["feat"])[train], graph.ndata["label"][train])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def favourites_where_a_rank_is_slow(rank: int, world_size: int, part_config: str) -> tuple[list[str], list[int]]:
    """Rank 1 has a halo that is too large for NeutronStar's greedy."""
    g = PartitionedGraph.open(part_config)
    model = Case(kind="sage_mean", num_layers=3).build(g.ndata["feat"].shape[1])
    before = neutronstar.QUICK_VERTICES
    neutronstar.QUICK_VERTICES = -1 if rank == 1 else before
    try:
        loader = FullGraphLoader(
            g,
            g.owned_nodes("train_mask"),
            3,
            model=model,
            topology=uniform_topology(world_size, bandwidth_bytes_per_s=4e8),
        )
    finally:
        neutronstar.QUICK_VERTICES = before
    return [plan.strategy for plan in loader.outcome.candidates], loader._choice.favourites(loader.outcome)


def test_all_ranks_favour_the_same_plans_though_some_are_other_ones(partitions: PartitionStore) -> None:
    """Ties between NeutronStar's plan and the predicted best ended with different plans on different ranks, and those
    waited for each other.
    """
    (names, favourites), *others = run_ranks(
        3, favourites_where_a_rank_is_slow, partitions.get("power_law", power_law(), 3)
    )
    assert "neutronstar" in names
    assert names.index("neutronstar") in favourites
    assert "neutronstar" not in others[0][0], "the case that is meant"
    assert [found for _, found in others] == [favourites] * 2


def train_and_evaluate_in_inference_mode(rank: int, world_size: int, part_config: str) -> tuple[list[float], int]:
    """No model is given, so the plan is made as the evaluation begins; then plans take turns."""
    g = PartitionedGraph.open(part_config)
    model = Case(kind="sage_mean", num_layers=2, dropout=0.5).build(g.ndata["feat"].shape[1])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = FullGraphLoader(
        g, g.owned_nodes("train_mask"), 2, topology=uniform_topology(world_size), seed=5, autotune=AT_ONCE
    )
    losses = []
    for _ in range(FIRST + 3):
        model.train()
        for input_nodes, ids, blocks in loader:
            loss = F.cross_entropy(model(blocks, g.ndata["feat"][input_nodes]), g.ndata["label"][ids])
            optimizer.zero_grad()
            loss.backward()
            average_gradients(model, loader)
            optimizer.step()
            losses.append(loss.item() * loader.loss_weight / world_size)
        model.eval()
        with torch.inference_mode():
            for input_nodes, _, blocks in loader:
                model(blocks, g.ndata["feat"][input_nodes])
    return losses, len(loader.outcome.candidates)


def test_plans_may_change_as_an_evaluation_in_inference_mode_begins(partitions: PartitionStore) -> None:
    """What they are built of was tensors of that mode, which no later step could save for its backward."""
    curves = []
    for world_size in (1, 3):
        runs = run_ranks(
            world_size, train_and_evaluate_in_inference_mode, partitions.get("power_law", power_law(), world_size)
        )
        assert world_size == 1 or runs[0][1] > 1, "plans take turns"
        curves.append([math.fsum(losses) for losses in zip(*(losses for losses, _ in runs), strict=True)])
    assert curves[1] == pytest.approx(curves[0], rel=1e-9)


@pytest.mark.parametrize("fast", ["depcomm", "depcache"])
def test_the_loader_tries_all_and_stays_with_the_fastest(fast: str, partitions: PartitionStore) -> None:
    epochs = 5 * (FIRST + FINAL) + 2
    runs = run_ranks(3, train_tuned, partitions.get("power_law", power_law(), 3), epochs, fast, AT_ONCE)
    candidates = runs[0].candidates
    assert {"depcache", "depcomm"} < set(candidates)
    assert 3 <= len(candidates) <= 5, "up to three hybrids and the pure plans"
    assert runs[0].favourites == {"depcache", "depcomm", "neutronstar"} & set(candidates)
    turns = turns_of([1.0 if name == fast else 100.0 for name in candidates], runs[0].candidates_s)
    num_trials = len(turns)
    expected = [candidates[index] for index in turns] + [fast] * (epochs - num_trials)
    for run in runs:
        assert run.candidates == candidates
        assert run.candidates_s == runs[0].candidates_s, "what turns go by is the same on all ranks, to the last bit"
        assert run.strategies == expected
        assert run.settled == [epoch >= num_trials for epoch in range(epochs)]
        for strategy, cached in zip(run.strategies, run.cached, strict=True):
            assert strategy != "depcomm" or cached == 0
            assert strategy != "depcache" or cached > 0
    total = [sum(losses) for losses in zip(*(run.losses for run in runs), strict=True)]
    assert total == pytest.approx(reference_curve(epochs), rel=1e-9), "plans change, the training does not"


def test_the_loader_stays_with_what_neutronstar_would_choose_if_a_hybrid_is_hardly_faster(
    partitions: PartitionStore,
) -> None:
    part_config, epochs = partitions.get("power_law", power_law(), 3), 6 * (FIRST + FINAL) + 2
    (seen, *_) = run_ranks(3, train_tuned, part_config, 1, "", AT_ONCE)
    (hybrid, *_) = [name for name in seen.candidates if name.startswith("hybrid")]
    assert "neutronstar" in seen.candidates
    for nearly in ("neutronstar", ""):
        runs = run_ranks(3, train_tuned, part_config, epochs, hybrid, AT_ONCE, nearly=nearly, settles=1)
        assert {run.strategies[-1] for run in runs} == {nearly or hybrid}
        assert all(run.settled[-1] for run in runs)


@pytest.mark.parametrize("evaluates_apart", [False, True])
def test_lists_are_given_up_when_a_plan_stays_and_fetched_again_when_it_slows_down(
    evaluates_apart: bool, partitions: PartitionStore
) -> None:
    """A loader that only evaluates gave up those of one whose plans took turns: each change fetched them again."""
    num_turns = 5 * (FIRST + FINAL)
    epochs = num_turns + DRIFT_WINDOW + 6 * (FIRST + len(CLOSE) * FINAL)
    part_config = partitions.get("power_law", power_law(), 3)
    runs = run_ranks(
        *(3, train_tuned, part_config, epochs, "depcache", AT_ONCE, num_turns),
        settles=2,
        evaluates_apart=evaluates_apart,
    )
    epochs = len(runs[0].settled)
    for run in runs:
        changes = [epoch for epoch in range(1, epochs) if run.settled[epoch] != run.settled[epoch - 1]]
        assert len(changes) == 3, "settled, tried anew, settled"
        assert run.strategies[changes[0] : changes[1]] == ["depcache"] * (changes[1] - changes[0])
        assert "depcache" not in run.strategies[changes[2] :]
        assert not any(count for count, is_settled in zip(run.fetched, run.settled, strict=True) if is_settled)
        assert all(run.fetched[: changes[0]])
        assert run.has_basis == [epoch < changes[0] for epoch in range(epochs)]
        assert any(run.fetched[changes[1] : changes[2]]), "plans that are tried anew ask for them again"
    total = [sum(losses) for losses in zip(*(run.losses for run in runs), strict=True)]
    assert total == pytest.approx(reference_curve(epochs), rel=1e-9)


def test_plans_are_made_anew_from_the_rates_of_the_day(partitions: PartitionStore) -> None:
    num_turns = 6 * (FIRST + FINAL)
    epochs = num_turns + DRIFT_WINDOW + 6 * (FIRST + len(CLOSE) * FINAL)
    part_config = partitions.get("power_law", power_law(), 3)
    rates = (4e8, 10.0)
    runs = run_ranks(3, train_tuned, part_config, epochs, "depcomm", AT_ONCE, num_turns, 0, rates, settles=2)
    epochs = len(runs[0].settled)
    for run in runs:
        changes = [epoch for epoch in range(1, epochs) if run.settled[epoch] != run.settled[epoch - 1]]
        assert len(changes) == 3, "settled, planned anew, settled"
        assert run.probed == [1 if epoch < changes[1] else 2 for epoch in range(epochs)]
        assert run.has_basis == [epoch < changes[0] or changes[1] <= epoch < changes[2] for epoch in range(epochs)]
        assert run.strategies == runs[0].strategies
        assert run.strategies[changes[1]] == "depcache", "what links of ten bytes a second make best comes first"
        assert "depcomm" not in run.strategies[changes[2] :]
        of_depcomm = [s for s, name in zip(run.predicted_s, run.strategies, strict=True) if name == "depcomm"]
        assert max(of_depcomm) > 10 * of_depcomm[0]
        assert len(run.begun) == 1
        assert max(of_depcomm) in run.begun[0], "turns go by what is predicted now"
        assert run.begun == runs[0].begun
    total = [sum(losses) for losses in zip(*(run.losses for run in runs), strict=True)]
    assert total == pytest.approx(reference_curve(epochs), rel=1e-9)


def test_it_can_be_switched_off_and_one_rank_has_nothing_to_try(partitions: PartitionStore) -> None:
    (run, *_) = run_ranks(3, train_tuned, partitions.get("power_law", power_law(), 3), 4, "depcomm", False)
    assert run.strategies == [run.candidates[0]] * 4
    assert all(run.settled)
    (alone,) = run_ranks(1, train_tuned, partitions.get("power_law", power_law(), 1), 3, "depcomm", AT_ONCE)
    assert len(alone.candidates) == 1
    assert all(alone.settled)


def test_the_first_plan_stays_until_changing_it_is_earned(partitions: PartitionStore) -> None:
    epochs, build_ns, share = 40, 10**12, 0.25
    part_config = partitions.get("power_law", power_law(), 3)
    runs = run_ranks(3, train_tuned, part_config, epochs, "no plan is fast", share, None, build_ns)
    first = runs[0].candidates[0]
    begun = runs[0].strategies.index(next(name for name in runs[0].strategies if name != first))
    epoch_ns = 3 * 10**11  # of the slowest rank
    assert begun == math.ceil(2 * build_ns / (share * epoch_ns)), "the way there and back"
    assert begun > FIRST
    for run in runs:
        assert run.strategies == runs[0].strategies
        assert run.trying == runs[0].trying
        assert run.trying[:FIRST] == [True] * FIRST
        assert run.trying[FIRST:begun] == [False] * (begun - FIRST)
        assert run.trying[begun]
        assert not any(run.settled[: begun + 1])
    total = [sum(losses) for losses in zip(*(run.losses for run in runs), strict=True)]
    assert total == pytest.approx(reference_curve(epochs), rel=1e-9)


@pytest.mark.parametrize("share", [-0.1, math.nan])
def test_a_share_that_is_none(share: float, partitions: PartitionStore) -> None:
    g = PartitionedGraph.open(partitions.get("power_law", power_law(), 1))
    with pytest.raises(ValueError, match="autotune must be a bool or a share of at least 0"):
        FullGraphLoader(g, g.owned_nodes("train_mask"), 2, autotune=share)


@dataclass(kw_only=True)
class Left:
    """What became of trials in a script that does not run its loops to their end."""

    is_settled: bool
    measured_s: list[float | None]
    warnings: list[str]


def train_and_leave(rank: int, world_size: int, part_config: str, way: str, epochs: int) -> Left:
    g = PartitionedGraph.open(part_config)
    model = Case(kind="sage_mean", num_layers=2).build(g.ndata["feat"].shape[1])
    topology = uniform_topology(world_size, bandwidth_bytes_per_s=4e8)
    loader = FullGraphLoader(
        g, g.owned_nodes("train_mask"), 2, model=model, topology=topology, seed=5, autotune=AT_ONCE
    )
    assert not loader.is_settled, "there is nothing to try"
    warnings = _Records()
    logging.getLogger("dgl_hybrid").addHandler(warnings)

    def step(input_nodes: torch.Tensor, ids: torch.Tensor, blocks: list[Any]) -> None:
        F.cross_entropy(model(blocks, g.ndata["feat"][input_nodes]), g.ndata["label"][ids]).backward()

    try:
        for _ in range(epochs):
            if way == "break":
                for batch in loader:
                    step(*batch)
                    break
            else:
                step(*next(iter(loader)))
            if loader.is_settled:
                break
    finally:
        logging.getLogger("dgl_hybrid").removeHandler(warnings)
    assert loader._choice.trials is not None
    return Left(is_settled=loader.is_settled, measured_s=loader._choice.trials.measured_s, warnings=warnings.messages)


class _Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def test_a_loop_left_after_the_step_is_an_epoch(partitions: PartitionStore) -> None:
    """Such a script never got past the first candidate: only what follows the loop's body was timed."""
    for left in run_ranks(2, train_and_leave, partitions.get("power_law", power_law(), 2), "break", MOST_EPOCHS):
        assert left.is_settled
        assert all(epoch_s is not None and epoch_s > 0 for epoch_s in left.measured_s)
        assert left.warnings == []


def test_who_takes_the_batch_by_next_is_told_once_that_epochs_cannot_be_timed(partitions: PartitionStore) -> None:
    """The generator is gone before the step begins, so there is no telling when that ends."""
    folder = partitions.get("power_law", power_law(), 2)
    first, second = run_ranks(2, train_and_leave, folder, "next", 5 * FIRST)
    for left in (first, second):
        assert not left.is_settled
        assert set(left.measured_s) == {None}
    assert len(first.warnings) == 1
    assert "next(iter(loader))" in first.warnings[0]
    assert "autotune=False" in first.warnings[0]
    assert second.warnings == []


WAYS_BACK = ("not at all", "backward", "grad", "inside", "after the epoch", "without gradients")


class Backing(nn.Module):
    """Backs its loss itself."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, blocks: Any, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(blocks, x).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()


def go_back(rank: int, world_size: int, part_config: str) -> dict[str, int]:
    """Returns what an epoch is said to have taken, by how its gradients are taken."""
    g = PartitionedGraph.open(part_config)
    loader = FullGraphLoader(g, g.owned_nodes("train_mask"), 2, plan=[torch.arange(0)] * 2)
    model = Case(kind="sage_mean", num_layers=2).build(g.ndata["feat"].shape[1])
    took = {}
    for way in WAYS_BACK:
        with torch.set_grad_enabled(way != "without gradients"):
            for input_nodes, _, blocks in loader:
                out = (Backing(model) if way == "inside" else model)(blocks, g.ndata["feat"][input_nodes])
                if way == "backward":
                    out.square().mean().backward()
                elif way == "grad":
                    torch.autograd.grad(out.square().mean(), list(model.parameters()))
        took[way] = loader._epoch_ns
        if way == "after the epoch":
            out.square().mean().backward()
    return took


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_epoch_without_a_backward_is_not_timed(world_size: int, partitions: PartitionStore) -> None:
    """An evaluation that leaves gradients on was taken for a fast epoch of the plan that it ran by."""
    for took in run_ranks(world_size, go_back, partitions.get("power_law", power_law(), world_size)):
        assert [way for way in WAYS_BACK if took[way]] == ["backward", "grad", "inside"]
