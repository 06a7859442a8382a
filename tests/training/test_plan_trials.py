# SPDX-License-Identifier: Apache-2.0
"""The fastest measured plan stays: the state machine by hand."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest

from dgl_hybrid.planner import RankEstimate, find_worth_trying
from dgl_hybrid.training.plan_trials import (
    DRIFT_WINDOW,
    FINAL_EPOCHS,
    MAX_TIMED_EPOCHS,
    TIMED_EPOCHS,
    TIMED_S,
    TIMED_SHARE,
    WARM_UP_EPOCHS,
    PlanTrials,
)
from tests.training.trial_turns import FINAL, FIRST, MOST_EPOCHS


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


def test_short_epochs_are_timed_for_some_time_at_least() -> None:
    trials = PlanTrials(3)
    turns = [WARM_UP_EPOCHS + timed for timed in (4, TIMED_EPOCHS, MAX_TIMED_EPOCHS)]
    ran = run_trials(trials, [0.24 * TIMED_S, TIMED_S, 0.01 * TIMED_S])
    assert ran == [0] * turns[0] + [1] * turns[1] + [2] * turns[2]


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
    again, back = (9.0, 9.0, 1.0, 1.0, 1.0), (9.0, 9.0, 0.9, 0.9, 0.9)
    for epoch_s in (*again, *back, *back, *again):
        assert not trials.is_settled
        trials.record(epoch_s)
    assert not trials.is_settled, "a turn that was slower by a fifth: others may have been, too"
    for epoch_s in (*again, *back):
        assert not trials.is_settled
        trials.record(epoch_s)
    assert trials.is_settled, "five turns of six tell them apart"
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
        again += [1] * FINAL + [0] * FINAL  # its first turn tells that turns may differ by far more
        again += [0] * FINAL + [1] * FINAL
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


def run_turns(trials: PlanTrials, seconds: list[list[float]]) -> list[int]:
    """Runs trials where epochs of a candidate take what is given for its first, second, … turn; the last for more.

    Returns:
        How many turns each had.
    """
    num_turns = [0] * len(seconds)
    while not trials.is_settled:
        current = trials.current
        turn_s = seconds[current][min(num_turns[current], len(seconds[current]) - 1)]
        for _ in range(FINAL if num_turns[current] else FIRST):
            trials.record(turn_s)
        num_turns[current] += 1
    return num_turns


@pytest.mark.parametrize(
    ("hybrid", "pure", "expected"),
    [
        ([1.0, 1.0, 1.0], [1.03, 1.03, 1.03], 0),  # turns of a plan are alike: so much is clearly faster
        ([1.00, 1.10] * 3, [1.03, 1.13] * 3, 1),  # they differ by more, and so may what is known of them by then
        ([0.90, 1.20] * 3, [0.96, 1.28] * 3, 0),  # by far more, but so much slower is no tie
        ([0.90, 1.20] * 3, [0.94, 1.25] * 3, 1),
    ],
)
def test_ties_are_as_wide_as_turns_of_one_plan_differ(hybrid: list[float], pure: list[float], expected: int) -> None:
    trials = PlanTrials(2, favourites=(1,))
    run_turns(trials, [hybrid, pure])
    assert trials.measured_s == [hybrid[0], pure[0]]
    assert trials.current == expected


def test_what_other_plans_turns_tell_of_how_far_turns_differ() -> None:
    """Two turns of the third, which is out, say that turns differ; those of the first two happen not to, but none of
    them knows before its fifth.
    """
    trials = PlanTrials(3, favourites=(1,))
    run_turns(trials, [[1.0], [1.025], [1.39, 1.1]])
    assert trials.current == 1
    trials = PlanTrials(3, favourites=(1,))
    run_turns(trials, [[1.0], [1.025], [1.39]])
    assert trials.current == 0


@pytest.mark.parametrize(
    ("first", "second", "turns", "expected"),
    [
        ([1.0], [1.06], 3, 0),  # turns are alike
        ([1.0, 1.0, 1.03], [1.06, 1.09, 1.06], 3, 0),  # they differ by less than plans do
        ([1.0, 1.06, 1.06, 1.0, 1.0], [1.06, 1.0, 1.06, 1.06, 1.06], 5, 0),  # more turns tell what three could not
        ([1.04, 1.0, 1.06, 1.06, 1.06], [1.06, 1.01, 1.0, 1.0, 1.0], 5, 1),
        ([1.0, 1.12, 1.0], [1.16], 2, 0),  # not near the fastest, whatever turns differ by
        ([1.0], [1.004, 1.02, 1.0], 3, 0),  # the error of what is known is below a hundredth: as fast is all one asks
    ],
)
def test_plans_that_cannot_be_told_apart_get_further_turns(
    first: list[float], second: list[float], turns: int, expected: int
) -> None:
    trials = PlanTrials(2)
    assert run_turns(trials, [first, second]) == [turns] * 2
    assert trials.current == expected


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
    tried: set[int] = field(default_factory=set)
    trained_s: float = 0.0
    spent_s: float = 0.0
    """What a run by the fastest plan that was found until then would not have taken."""

    def epoch(self) -> None:
        current = self.trials.current
        is_new = not self.ran or self.ran[-1] != current
        epoch_s = self.seconds[current] + (self.warm_up_s if is_new else 0.0)
        if self.ran:
            self.spent_s += self.change_s if is_new else 0.0
            self.spent_s += epoch_s - min(self.seconds[index] for index in {*self.tried, current})
        self.trained_s += epoch_s
        self.ran.append(current)
        self.tried.add(current)
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
    run.tried.add(1)
    while trials.current != 2:
        run.epoch()
    assert 36_000 - 3600 * (where == "the change") < run.trained_s < 40_000, "what was spent, and not three times that"


def test_an_hour_amid_one_turn_and_another_in_a_change_put_off_the_next_by_what_they_took() -> None:
    """The dearest turn but one was still one of an hour."""
    trials = PlanTrials(4, share=0.1)
    run = Within(trials, [1.0, 1.1, 1.2, 1.3], change_s=1.0, warm_up_s=0.5)
    while trials.current != 1:
        run.epoch()
    run.epoch()
    run.epoch()
    for epoch_s, change_s, current in ((3600.0, 0.0, 1), (1.7, 3600.0, 2)):
        while trials.current != current:
            run.epoch()
        trials.record(epoch_s, change_s)
        run.trained_s += 3600.0
        run.ran.append(current)
        run.tried.add(current)
    while trials.current != 3:
        run.epoch()
    assert 60_000 < run.trained_s < 80_000, "what was spent, and not what two turns of an hour would take"


def test_what_only_the_first_turn_does_is_not_what_others_will_take() -> None:
    """Compiling, say: thirty seconds, where a change of plans takes one."""
    trials = PlanTrials(4, share=0.1)
    run = Within(trials, [1.0, 1.1, 1.2, 1.3], change_s=1.0, warm_up_s=0.5)
    trials.record(31.0)
    run.trained_s += 31.0
    run.ran.append(0)
    run.tried.add(0)
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
