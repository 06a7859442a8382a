# SPDX-License-Identifier: Apache-2.0
"""The fastest measured plan stays: the state machine by hand, and a loader whose epochs change plans on the way."""

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
from dgl_hybrid.planner import RankEstimate, Topology, find_worth_trying, neutronstar, uniform_topology
from dgl_hybrid.training import loader as loader_module
from dgl_hybrid.training import planning
from dgl_hybrid.training.plan_trials import (
    CLOSE,
    DRIFT_WINDOW,
    FINAL_EPOCHS,
    MAX_TIMED_EPOCHS,
    TIMED_EPOCHS,
    TIMED_SHARE,
    WARM_UP_EPOCHS,
    PlanTrials,
)
from tests.helpers.exactness import Case
from tests.helpers.graphs import power_law
from tests.helpers.partitions import PartitionStore
from tests.helpers.rates import BUDGET_S
from tests.helpers.world import run_ranks

AT_ONCE = math.inf
FIRST, FINAL = WARM_UP_EPOCHS + TIMED_EPOCHS, WARM_UP_EPOCHS + FINAL_EPOCHS
MOST_EPOCHS = 6 * (1 + len(CLOSE)) * (WARM_UP_EPOCHS + MAX_TIMED_EPOCHS) + 1
"""Enough for trials to end, whatever they measure."""


def turns_of(seconds: list[float], predicted_s: list[float]) -> list[int]:
    """Which candidate each epoch of the trials runs: all, then those near the fastest, or predicted to be, in reverse,
    then the nearest.
    """
    fastest = seconds.index(min(seconds))
    turns = [index for index in range(len(seconds)) for _ in range(FIRST)]
    for number, factor in enumerate(CLOSE):
        close = [index for index, time_s in enumerate(seconds) if time_s <= factor * seconds[fastest]]
        if number == 0:
            near = [index for index, time_s in enumerate(predicted_s) if time_s <= factor * predicted_s[fastest]]
            close = sorted({*close, *near})
        finals = close if number % 2 else close[::-1]
        turns += [index for index in finals if len(close) > 1 for _ in range(FINAL)]
    return turns


def run_trials(trials: PlanTrials, seconds: list[float], *, warm_up_s: float = 9.0) -> list[int]:
    """Runs epochs of each candidate's time until the choice is made; returns which candidate each epoch ran."""
    ran: list[int] = []
    while not trials.is_settled:
        ran.append(trials.current)
        is_warming_up = len(ran) <= WARM_UP_EPOCHS or ran[-WARM_UP_EPOCHS - 1] != trials.current
        trials.record(warm_up_s if is_warming_up else seconds[trials.current])
    return ran


@pytest.mark.parametrize(
    ("change_s", "timed"),
    [(0.0, TIMED_EPOCHS), (1.9 / TIMED_SHARE, TIMED_EPOCHS), (5.0 / TIMED_SHARE, 5), (99.0, MAX_TIMED_EPOCHS)],
)
def test_short_epochs_are_timed_for_a_share_of_what_the_change_took(change_s: float, timed: int) -> None:
    """Those of the first candidate take a second; finals are as long, but where nothing has to be changed."""
    trials, ran, seconds = PlanTrials(3), [], [1.0, 9.0, 1.1]
    while not trials.is_settled:
        begins = not ran or ran[-1] != trials.current
        ran.append(trials.current)
        trials.record(seconds[trials.current], change_s * seconds[trials.current] if begins else 0.0)
    turn, final = WARM_UP_EPOCHS + timed, WARM_UP_EPOCHS + max(timed, FINAL_EPOCHS)
    assert ran[: 3 * turn] == [0] * turn + [1] * turn + [2] * turn
    # There and back: 2 goes on, then 0; 0 goes on, then 2.
    assert ran[3 * turn :] == [2] * FINAL + [0] * (final + FINAL) + [2] * final


def test_every_candidate_has_its_turn_and_the_fastest_stays() -> None:
    trials = PlanTrials(3)
    assert run_trials(trials, [3.0, 1.0, 2.0]) == [0] * 4 + [1] * 4 + [2] * 4
    assert trials.current == 1
    assert trials.measured_s == [3.0, 1.0, 2.0]


def test_those_near_the_fastest_run_again() -> None:
    trials = PlanTrials(4)
    first = [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4
    assert run_trials(trials, [1.1, 2.0, 1.0, 1.3]) == first + [3] * 5 + [2] * 5 + [0] * 5 + [0] * 5 + [2] * 5
    assert trials.current == 2


def test_a_candidate_that_had_a_slow_time_of_the_machine_gets_another() -> None:
    trials = PlanTrials(2)
    for epoch_s in (9.0, 9.0, 1.1, 1.1, 9.0, 9.0, 1.0, 1.0):  # the first is the faster one, but everything was slow
        trials.record(epoch_s)
    for epoch_s in (9.0, 9.0, 1.0, 1.0, 1.0, *(9.0, 9.0, 0.9, 0.9, 0.9) * 2, 9.0, 9.0, 1.0, 1.0, 1.0):
        assert not trials.is_settled
        trials.record(epoch_s)
    assert trials.is_settled
    assert trials.current == 0
    assert trials.measured_s == [0.9, 1.0]


def test_who_is_found_slower_in_a_second_look_gets_no_third() -> None:
    trials = PlanTrials(3)
    for epoch_s in (9.0, 9.0, 1.3, 1.3, 9.0, 9.0, 1.2, 1.2, 9.0, 9.0, 1.0, 1.0):
        trials.record(epoch_s)
    assert run_trials(trials, [1.3, 1.1, 1.0]) == [2] * 5 + [1] * 5 + [0] * 5 + [2] * 5 + [1] * 5
    assert trials.current == 2
    assert trials.measured_s == [1.3, 1.1, 1.0]


@pytest.mark.parametrize(
    ("predicted_s", "expected"),
    [
        ((1.0, 1.05, 3.0), 1),  # nobody thought it so slow: its turn was disturbed from the first epoch to the last
        ((2.0, 2.7, 6.0), 1),  # all are twice as fast as predicted: what counts is how they compare
        ((1.0, 1.5, 3.0), 0),  # it was known to be slower
        ((math.nan, math.nan, math.nan), 0),
        ((), 0),
    ],
)
def test_who_is_far_slower_than_predicted_gets_another_turn(predicted_s: tuple[float, ...], expected: int) -> None:
    trials = PlanTrials(3, predicted_s=predicted_s)
    for epoch_s in (9.0, 9.0, 1.0, 1.0, 9.0, 9.0, 1.5, 1.5, 9.0, 9.0, 3.0, 3.0):
        assert not trials.is_settled
        trials.record(epoch_s)
    again = [] if expected == 0 else [1] * FINAL + [0] * FINAL
    if expected:
        again += [0] * FINAL + [1] * FINAL  # found to be close
    assert run_trials(trials, [1.0, 0.9, 3.0]) == again
    assert trials.current == expected


def test_what_was_predicted_is_asked_once() -> None:
    """Who is as slow in a second turn is slow; and trials that begin anew go by what is predicted then."""
    trials = PlanTrials(2, predicted_s=(1.0, 1.0))
    assert run_trials(trials, [1.0, 2.0]) == [0] * FIRST + [1] * FIRST + [1] * FINAL + [0] * FINAL
    assert trials.current == 0
    trials.begin_anew(2, predicted_s=(1.0, 9.0))
    assert run_trials(trials, [1.0, 2.0]) == [0] * FIRST + [1] * FIRST


def test_predictions_of_other_candidates() -> None:
    with pytest.raises(ValueError, match=r"a prediction for each candidate, or none \(got 2 for 3\)"):
        PlanTrials(3, predicted_s=(1.0, 2.0))
    trials = PlanTrials(2)
    with pytest.raises(ValueError, match=r"a prediction for each candidate, or none \(got 1 for 2\)"):
        trials.begin_anew(2, predicted_s=(1.0,))


def test_the_lower_quartile_of_timed_epochs_counts() -> None:
    """One of two, since the other may have been disturbed; of five, not the one that was as fast as no other."""
    trials = PlanTrials(2)
    for epoch_s in (9.0, 9.0, 5.0, 1.0, 9.0, 9.0, 1.0, 2.0):
        trials.record(epoch_s)
    assert trials.measured_s == [1.0, 1.0]
    for epoch_s in (9.0, 9.0, 5.0, 5.0, 5.0) * 2:
        assert not trials.is_settled
        trials.record(epoch_s)
    assert trials.is_settled
    assert trials.measured_s == [5.0, 2.0]
    assert trials.current == 1


def test_the_first_of_equals_stays() -> None:
    trials = PlanTrials(2)
    run_trials(trials, [1.0, 1.0])
    assert trials.current == 0


@pytest.mark.parametrize(
    ("seconds", "favourites", "expected"),
    [
        ([1.02, 1.0, 2.0], (), 0),  # as fast: what was predicted fastest
        ([1.04, 1.0, 2.0], (), 1),
        ([1.0, 0.995, 1.01], (2,), 2),  # as fast: the pure plan
        ([1.0, 0.995, 1.02], (2,), 0),
        ([1.0, 1.02, 1.01], (1, 2), 2),  # both pure plans: the faster one
    ],
)
def test_a_lead_within_the_noise_counts_for_nothing(
    seconds: list[float], favourites: tuple[int, ...], expected: int
) -> None:
    trials = PlanTrials(3, favourites)
    run_trials(trials, seconds)
    assert trials.current == expected


def run_turns(trials: PlanTrials, seconds: list[list[float]]) -> None:
    """Runs trials where epochs of a candidate take what is given for its first, second, … turn; the last for more."""
    num_turns = [0] * len(seconds)
    while not trials.is_settled:
        current = trials.current
        turn_s = seconds[current][min(num_turns[current], len(seconds[current]) - 1)]
        for _ in range(FINAL if num_turns[current] else FIRST):
            trials.record(turn_s)
        num_turns[current] += 1


@pytest.mark.parametrize(
    ("hybrid", "pure", "expected"),
    [
        ([1.0, 1.0, 1.0], [1.03, 1.03, 1.03], 0),  # turns of a plan are alike: so much is clearly faster
        ([0.970, 1.03, 1.03], [0.992, 1.05, 1.05], 1),  # they differ by as much
        ([0.90, 1.10, 1.10], [0.96, 1.10, 1.10], 0),  # by far more, but so much slower is no tie
        ([0.90, 1.10, 1.10], [0.94, 1.10, 1.10], 1),
    ],
)
def test_ties_are_as_wide_as_turns_of_one_plan_differ(hybrid: list[float], pure: list[float], expected: int) -> None:
    trials = PlanTrials(2, favourites=(1,))
    run_turns(trials, [hybrid, pure])
    assert trials.measured_s == [hybrid[0], pure[0]]
    assert trials.current == expected


def test_who_ties_by_what_other_plans_turns_tell() -> None:
    """Two turns of the third, which is out, say that turns differ; those of the first two happen not to."""
    trials = PlanTrials(3, favourites=(1,))
    run_turns(trials, [[1.0], [1.025], [1.39, 1.25]])
    assert trials.current == 1
    trials = PlanTrials(3, favourites=(1,))
    run_turns(trials, [[1.0], [1.025], [1.39]])
    assert trials.current == 0


def test_hybrids_that_are_tried_are_best_at_different_speeds_of_rows() -> None:
    def estimate(comm_s: float, rest_s: float) -> RankEstimate:
        return RankEstimate(
            comm_s=(comm_s,), held_s=(0.0,), rest_s=(rest_s,), fixed_s=0.0, objective_s=0.0, held_bytes=comm_s
        )

    hybrids = [(1.0, 1.0), (1.6, 0.6), (0.2, 1.95), (1.0, 1.01)]  # as predicted, if faster, if slower, never
    of_rank = [estimate(*seconds) for seconds in (*hybrids, (1.0, 1.5), (0.0, 3.0), (3.0, 0.5))]
    assert find_worth_trying([of_rank, of_rank], chosen=0) == [0, 1, 2, 4, 5, 6]  # NeutronStar's, come what may
    of_rank[4] = of_rank[3]  # the greedy's in its place
    assert find_worth_trying([of_rank, of_rank], chosen=0) == [0, 1, 2, 5, 6]
    of_rank[0] = of_rank[5]  # one of them is depcache under another name: then it goes by that
    assert find_worth_trying([of_rank, of_rank], chosen=0) == [5, 3, 1, 2, 6]


def test_drift_starts_anew_but_one_slow_epoch_does_not() -> None:
    trials = PlanTrials(2)
    run_trials(trials, [1.0, 2.0])
    for epoch in range(3 * DRIFT_WINDOW):
        trials.record(50.0 if epoch % 7 == 0 else 1.2)
        assert not trials.has_drifted
    for epoch in range(3 * DRIFT_WINDOW):
        trials.record(1.1 if epoch % 3 == 0 else 1.8)
        assert not trials.has_drifted, "two epochs of three are disturbed, the others are what they were"
    for _ in range(DRIFT_WINDOW):
        if not trials.has_drifted:
            trials.record(4.0)
    assert trials.has_drifted
    assert trials.is_settled, "until it is known what there is to try"
    trials.begin_anew(3)
    assert (trials.is_settled, trials.has_drifted, trials.measured_s) == (False, False, [None] * 3)
    run_trials(trials, [4.0, 2.0, 3.0])
    assert trials.current == 1
    trials.record(4.0)
    assert not trials.has_drifted, "what was before is forgotten"


def test_epochs_that_became_faster_are_drift_too() -> None:
    trials = PlanTrials(2)
    run_trials(trials, [1.0, 2.0])
    for epoch in range(3 * DRIFT_WINDOW):
        trials.record(0.5 if epoch % 2 else 0.9)
        assert not trials.has_drifted
    for _ in range(DRIFT_WINDOW):
        trials.record(0.6)
    assert trials.has_drifted


def test_another_plan_is_paid_from_the_share() -> None:
    trials = PlanTrials(2, share=0.1, planning_s=30.0)
    while not trials.is_settled:
        trials.record(1.0)
    waited = 0
    while not trials.has_drifted:
        trials.record(2.0)
        waited += 1
    assert 2.0 * waited + 2 * MOST_EPOCHS >= 30.0 / 0.1
    assert waited >= 100
    trials.begin_anew(1, planning_s=50.0)
    assert trials.is_settled
    assert trials.current == 0, "a lone candidate needs no trials"
    with pytest.raises(ValueError, match=r"at least one candidate \(got 0\)"):
        trials.begin_anew(0)


@dataclass
class Within:
    """Epochs of made-up times where changing the plan, and its first epoch, take time, too."""

    trials: PlanTrials
    seconds: list[float]
    change_s: float
    warm_up_s: float
    ran: list[int] = field(default_factory=list)
    trained_s: float = 0.0
    spent_s: float = 0.0
    """What a run by the fastest plan that was found until then would not have taken."""

    def epoch(self) -> None:
        current = self.trials.current
        is_new = not self.ran or self.ran[-1] != current
        epoch_s = self.seconds[current] + (self.warm_up_s if is_new else 0.0)
        if self.ran:
            self.spent_s += self.change_s if is_new else 0.0
            self.spent_s += epoch_s - min(self.seconds[index] for index in {*self.ran, current})
        self.trained_s += epoch_s
        self.ran.append(current)
        self.trials.record(epoch_s, self.change_s if is_new else 0.0)


@pytest.mark.parametrize("share", [0.05, 0.2])
def test_trials_take_no_more_than_their_share(share: float) -> None:
    trials = PlanTrials(4, share=share)
    run = Within(trials, [1.3, 2.0, 1.0, 1.2], change_s=20.0, warm_up_s=5.0)
    starts: dict[int, int] = {}
    for number in range(100_000):
        if trials.is_trying:
            starts.setdefault(trials.current, number)
        run.epoch()
        slower_s = FINAL * (2.0 - 1.0)  # how slow a plan is shows in its turn
        assert run.spent_s <= share * run.trained_s + slower_s
        if trials.is_settled:
            break
    assert trials.is_settled
    assert trials.current == 2
    assert list(starts) == [0, 1, 2, 3]
    assert run.ran[: starts[1]] == [0] * starts[1]
    # Two changes and warm-ups have to be earned: no sooner, and not much later.
    assert 2 * 25.0 / share <= 1.3 * starts[1] + 25.0 <= 2 * 25.0 / share + 30.0


@pytest.mark.parametrize("where", ["the change", "first epoch", "third epoch"])
def test_an_hour_in_one_turn_puts_off_the_next_by_no_more_than_it_took(where: str) -> None:
    """A machine that slept, or an evaluation amid the batch: three times as much had to be earned, for good."""
    trials = PlanTrials(3, share=0.1)
    run = Within(trials, [1.0, 1.1, 1.2], change_s=1.0, warm_up_s=0.5)
    while trials.current != 1:
        run.epoch()
    for _ in range(2 if where == "third epoch" else 0):
        run.epoch()
    trials.record(1.6 if where == "the change" else 3600.0, 3600.0 if where == "the change" else 0.0)
    run.trained_s += 3600.0
    run.ran.append(1)
    while trials.current != 2:
        run.epoch()
    assert 36_000 - 3600 * (where == "the change") < run.trained_s < 40_000, "what was spent, and not three times that"


def test_what_only_the_first_turn_does_is_not_what_others_will_take() -> None:
    """Compiling, say: thirty seconds, where a change of plans takes one."""
    trials = PlanTrials(4, share=0.1)
    run = Within(trials, [1.0, 1.1, 1.2, 1.3], change_s=1.0, warm_up_s=0.5)
    trials.record(31.0)
    run.trained_s += 31.0
    run.ran.append(0)
    while trials.current != 2:
        run.epoch()
    second_s = run.trained_s
    while trials.current != 3:
        run.epoch()
    assert run.trained_s - second_s < 60


def test_until_the_next_turn_epochs_run_by_the_best_plan_so_far() -> None:
    trials = PlanTrials(3, share=0.1)
    run = Within(trials, [1.0, 3.0, 0.5], change_s=10.0, warm_up_s=1.0)
    waited: list[int] = []
    while not trials.is_settled:
        assert trials.is_trying != trials.is_waiting
        if trials.is_waiting:
            waited.append(trials.current)
        run.epoch()
    assert set(waited) == {0}, "back from the slow one; the last one needs no wait, as it stays"
    assert run.ran[-1] == 2
    assert not trials.is_waiting
    assert not trials.is_trying


def test_drift_waits_for_its_share_too() -> None:
    trials = PlanTrials(2, share=0.1)
    run = Within(trials, [1.0, 2.0], change_s=10.0, warm_up_s=1.0)
    while not trials.is_settled:
        run.epoch()
    ended_at = len(run.ran)
    run.seconds = [4.0, 2.0]
    while not trials.has_drifted and len(run.ran) < 10_000:
        run.epoch()
    trials.begin_anew(2)
    waited = len(run.ran) - ended_at
    assert DRIFT_WINDOW < waited < 10_000
    assert (run.spent_s + 20.0) / run.trained_s < 0.5, "spent counts the slow plan itself, which nothing was known of"
    while not trials.is_settled:
        run.epoch()
    assert trials.current == 1


def test_a_lone_candidate_is_settled_whatever_its_epochs_cost() -> None:
    trials = PlanTrials(1)
    for _ in range(2 * DRIFT_WINDOW):
        assert trials.is_settled
        trials.record(float(_ + 1))
    with pytest.raises(ValueError, match=r"at least one candidate \(got 0\)"):
        PlanTrials(0)


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
                made_up_ns += share * (1 + rank)
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
    rates = (4e8, 1e3)
    runs = run_ranks(3, train_tuned, part_config, epochs, "depcomm", AT_ONCE, num_turns, 0, rates, settles=2)
    epochs = len(runs[0].settled)
    for run in runs:
        changes = [epoch for epoch in range(1, epochs) if run.settled[epoch] != run.settled[epoch - 1]]
        assert len(changes) == 3, "settled, planned anew, settled"
        assert run.probed == [1 if epoch < changes[1] else 2 for epoch in range(epochs)]
        assert run.has_basis == [epoch < changes[0] or changes[1] <= epoch < changes[2] for epoch in range(epochs)]
        assert run.strategies == runs[0].strategies
        assert run.strategies[changes[1]] == "depcache", "what links of 1 KB/s make best comes first"
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
    epochs, build_ns, share = 40, 100_000, 0.25
    part_config = partitions.get("power_law", power_law(), 3)
    runs = run_ranks(3, train_tuned, part_config, epochs, "no plan is fast", share, None, build_ns)
    first = runs[0].candidates[0]
    begun = runs[0].strategies.index(next(name for name in runs[0].strategies if name != first))
    epoch_ns = 30_000  # of the slowest rank
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


def test_the_fastest_so_far_is_known_while_others_have_their_turns() -> None:
    trials = PlanTrials(3)
    assert trials.fastest == 0, "nobody was measured"
    for position, seconds in enumerate((2.0, 1.0, 3.0)):
        assert trials.current == position, "has its turn"
        while trials.current == position and not trials.is_settled:
            assert trials.fastest == (0 if trials.measured_s[1] is None else 1)
            trials.record(seconds)
        assert trials.measured_s[position] == seconds
    assert trials.fastest == trials.current == 1
