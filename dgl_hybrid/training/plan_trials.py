# SPDX-License-Identifier: Apache-2.0
"""Which plan is fastest is measured, not only predicted: candidates take turns in real epochs, and the fastest stays.

Pure: the loader tells the time of the slowest rank after each epoch, which is the same number on every rank.

[Note: what trials may take]
A turn of another candidate costs more than its epochs: blocks are built anew, and its first epoch fetches features and
makes what is kept; often as long as ten or twenty epochs. Predictions are seldom off by more than a fifth, so a run of
a hundred epochs would lose by trials what one of ten thousand gains. How long a run will be is not known, so trials
take a share of what was trained so far, as one that rents before it buys: a turn begins once there is enough for it and
for the way back, and until then epochs run by the fastest plan found so far.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Collection, Sequence

WARM_UP_EPOCHS = 2
"""Of each candidate, not counted: the first fetches features and makes what is kept, the second faults in the memory
that is used from then on."""
TIMED_EPOCHS = 2
"""Of each candidate, at least. Their lower quartile counts: what disturbs an epoch makes it slower, most of the time;
one of many that exchange rows may be faster than all others, 76 ms among 82 to 107."""
MAX_TIMED_EPOCHS = 10
TIMED_S, TIMED_SHARE = 0.3, 0.5
"""Short epochs are timed for so many seconds, and this much of the time that the change of plans took, up to
MAX_TIMED_EPOCHS of them: of plans whose epochs took 80 and 88 ms, after changes of 600, the slower one was chosen in
two starts of eight; of 43 and 48 ms, after changes of 300, in one of five."""
CLOSE = (1.4, 1.15)
"""Candidates within the first factor of the fastest run again, then those within the next: two epochs do not tell such
times apart, and machines are slower for seconds at a time, so that it matters when a candidate had its turn. So do
those that were predicted to be within the first factor of it: a turn may be disturbed from its first epoch to its last,
127 ms where the same plan took 82 the next time, and predictions are seldom off by so much."""
FINAL_EPOCHS = 3
"""Timed epochs of each of those, each time, at least."""
FURTHER_ROUNDS = 2
"""Of those near the fastest that cannot be told apart from it by then. A plan's turn may be slower than its next one by
5 to 10 %, whatever the number of its epochs: in trials put together of turns that were recorded (two ranks on two
cores, plans 2 to 12 % apart, 500 trials each), the plan that was chosen was slower than the fastest by 0.1, 0.1 and
0.2 % on average, where without these rounds and `TIMED_S` it was by 0.3, 0.6 and 2.7."""
KNOWN = 0.01
"""Standard error of a ratio of two plans' times that suffices, however close they are."""
SURE = 2.0
"""Standard errors by which plans have to differ to be told apart."""
TIE, LOOSEST_TIE = 1.02, 1.05
"""Times that differ by no more than the first factor are the same: epochs of one plan differ as much. Where turns of
one plan differ by more (four ranks on two cores: lower quartiles of 168, 174 and 178 ms, 170 to 188), so do ties, up to
the second: the least of several times that chance decides is below what that plan takes, and a hybrid among many of
them would win by it."""
SHARE = 0.1
"""Of the time trained so far that trials may take, if nothing else is asked for."""
DRIFT_WINDOW = 16
"""Epochs whose quartiles are watched once the choice is made."""
DRIFT_FACTOR = 1.5
"""A lower quartile this many times the measured epoch means that costs have drifted, and so does an upper one as many
times below it. The measured one is a lower quartile: medians of a machine that others share are half as long again
without anything having changed for good."""


class PlanTrials:
    """The state of the trials.

    Args:
        num_candidates: In the order of what is predicted, fastest first.
        favourites: Positions of those that stay unless another one is clearly faster: the plans that one would choose
            without measuring anything, so that noise never makes a hybrid of theirs that is slower.
        share: Of the time trained so far that trials may take; infinity: they follow each other at once.
        predicted_s: Seconds of an epoch of each candidate, NaN where nobody knows; empty: of none.
        planning_s: What it took to find the candidates, and will take again.

    Raises:
        ValueError: There is no candidate, or there are predictions of another number of them.

    Attributes:
        current: Position of the candidate whose turn it is, or of the one that runs until the next turn, or of the one
            that was chosen.
        is_waiting: The next turn is not begun yet, for what it would take.
        measured_s: Lower quartile of the timed epochs of each candidate so far; None before its first.
        has_drifted: Epochs have become clearly slower or faster than what the choice was made on, and trials could
            begin anew within their share: `begin_anew` does so.
    """

    def __init__(
        self,
        num_candidates: int,
        favourites: Collection[int] = (),
        share: float = math.inf,
        *,
        predicted_s: Sequence[float] = (),
        planning_s: float = 0.0,
    ) -> None:
        self._share, self._planning_s = share, planning_s
        self._trained_s = self._spent_s = 0.0
        self._turns_s: list[float] = []
        """What each turn so far took more than its epochs by the fastest plan."""
        self._recent: deque[float] = deque(maxlen=DRIFT_WINDOW)
        self._chosen_s = 0.0
        self._begin(num_candidates, favourites, predicted_s)

    def begin_anew(
        self,
        num_candidates: int,
        favourites: Collection[int] = (),
        *,
        predicted_s: Sequence[float] = (),
        planning_s: float = 0.0,
    ) -> None:
        """Tries these candidates, whatever was measured before; what trials have taken so far still counts.

        Args:
            planning_s: What it took now to find them; 0 if they are those of before.
        """
        self._spent_s += planning_s
        self._planning_s = max(planning_s, self._planning_s)
        self._recent.clear()
        self._begin(num_candidates, favourites, predicted_s)

    def _begin(self, num_candidates: int, favourites: Collection[int], predicted_s: Sequence[float]) -> None:
        if num_candidates < 1:
            raise ValueError(f"there must be at least one candidate (got {num_candidates})")
        if len(predicted_s) not in (0, num_candidates):
            raise ValueError(
                f"there must be a prediction for each candidate, or none (got {len(predicted_s)} for {num_candidates})"
            )
        self._predicted_s = list(predicted_s)
        self._num_candidates, self._favourites = num_candidates, frozenset(favourites)
        self.measured_s: list[float | None] = [None] * num_candidates
        self._turns: list[list[list[float]]] = [[] for _ in range(num_candidates)]  # timed epochs of each
        self.current, self.is_waiting, self.has_drifted = 0, False, False
        self.is_settled = num_candidates == 1
        self._waiting = list(range(1, num_candidates))
        self._finals = 0
        self._turn: list[float] = []
        self._change_s = 0.0

    @property
    def is_trying(self) -> bool:
        """Whether the current candidate runs to be measured, not because it is the best one known."""
        return not self.is_settled and not self.is_waiting

    @property
    def fastest(self) -> int:
        """Position of the candidate that measured fastest so far; the current one, if none was measured."""
        if all(time_s is None for time_s in self.measured_s):
            return self.current
        return min(range(self._num_candidates), key=self._time_of)

    def record(self, epoch_s: float, change_s: float = 0.0) -> None:
        """Takes the time of an epoch under the current candidate and decides which one the next epoch runs.

        Args:
            change_s: What it took before that epoch to change to its plan; 0 if it was that of the epoch before.
        """
        self._trained_s += epoch_s
        self._change_s += change_s
        if not self.is_trying:
            if change_s > 0.0:  # back to the best one
                self._spent_s += self._change_s + max(epoch_s - self._time_of(self.current), 0.0)
            self._change_s = 0.0
            if self.is_settled:
                self._watch(epoch_s)
            elif self._can_afford_a_turn():
                self.is_waiting = False
                self._begin_turn()
            return
        self._turn.append(epoch_s)
        if len(self._turn) > WARM_UP_EPOCHS:
            turns = self._turns[self.current]
            if len(self._turn) == WARM_UP_EPOCHS + 1:
                turns.append([])
            turns[-1].append(epoch_s)
            self.measured_s[self.current] = _lower_quartile([time_s for turn in turns for time_s in turn])
            least = FINAL_EPOCHS if self._finals else TIMED_EPOCHS
            pays = (TIMED_S + TIMED_SHARE * self._change_s) / max(self._time_of(self.current), 1e-9)
            if len(self._turn) >= WARM_UP_EPOCHS + max(least, min(int(pays), MAX_TIMED_EPOCHS)):
                self._end_turn()

    def _end_turn(self) -> None:
        least_s = min(map(self._time_of, range(self._num_candidates)))
        first_s, *rest_s = self._turn
        cost_s = self._change_s + sum(self._turn) - len(self._turn) * least_s
        # As turns usually are: one epoch of an hour (a machine that slept, an evaluation amid the batch) is spent, and
        # is not what the next turn will take.
        usual_s = self._change_s + first_s + len(rest_s) * _lower_quartile(rest_s) - len(self._turn) * least_s
        if self._turns_s:  # the first would have been paid without any trials
            self._spent_s += cost_s
        self._turns_s.append(usual_s)
        self._turn, self._change_s = [], 0.0
        while not self._waiting and self._finals < len(CLOSE) + FURTHER_ROUNDS:
            if self._finals < len(CLOSE):
                close = self._within(CLOSE[self._finals], or_predicted=self._finals == 0)
            else:
                close = self._undecided()
            self._finals += 1
            if len(close) > 1:
                # There and back: the one whose turn it was may go on, and nobody always comes last.
                self._waiting = close if close[0] == self.current else close[::-1]
        if self._waiting:
            if self._can_afford_a_turn():
                self._begin_turn()
            else:
                self.is_waiting = True
                as_fast = self._as_fast_as_any()
                self.current = self.current if self.current in as_fast else min(as_fast, key=self._time_of)
            return
        as_fast = self._as_fast_as_any()
        favourites = [index for index in as_fast if index in self._favourites]
        # Among favourites the fastest, since each is a plan of its own; among the rest what was predicted.
        self.current = min(favourites, key=self._time_of) if favourites else as_fast[0]
        self._chosen_s = self._time_of(self.current)
        self.is_settled = True

    def _begin_turn(self) -> None:
        self.current = self._waiting.pop(0)

    def _can_afford_a_turn(self, planning_s: float = 0.0) -> bool:
        """See [Note: what trials may take]."""
        return self._spent_s + planning_s + 2 * self._dearest_turn_s <= self._share * self._trained_s

    @property
    def _dearest_turn_s(self) -> float:
        """But for one: the first of all also does what no other does, such as compiling, and in one that a machine
        slept in, the change of plans or its first epoch may have been the one of an hour.
        """
        return max(heapq.nlargest(2, self._turns_s)[-1:], default=0.0)

    def _time_of(self, index: int) -> float:
        time_s = self.measured_s[index]
        return float("inf") if time_s is None else time_s

    def _as_fast_as_any(self) -> list[int]:
        """Returns the candidates whose times tie with the fastest's: see `TIE`."""
        off, fastest = self._errors(), min(range(self._num_candidates), key=self._time_of)
        limit_s = self._time_of(fastest)
        return [
            index
            for index in range(self._num_candidates)
            if index == fastest or self._time_of(index) <= min(max(TIE, 1.0 + off[index]), LOOSEST_TIE) * limit_s
        ]

    def _undecided(self) -> list[int]:
        """Returns the fastest candidate and those that cannot be told apart from it yet: see `FURTHER_ROUNDS`."""
        off, fastest = self._errors(), min(range(self._num_candidates), key=self._time_of)
        limit_s = self._time_of(fastest)
        return [
            index
            for index in self._within(CLOSE[-1])
            if index == fastest or (off[index] > KNOWN and self._time_of(index) < (1.0 + SURE * off[index]) * limit_s)
        ]

    def _errors(self) -> list[float]:
        """Returns the standard error of the ratio of each candidate's time to the fastest's.

        How far turns of one candidate are from each other tells by what a time may be off, after one of them
        or several; all candidates that had several turns tell it together. 0 while none had.
        """
        quartiles = [[_lower_quartile(turn) for turn in turns] for turns in self._turns]
        off = [q / (math.fsum(of_one) / len(of_one)) - 1.0 for of_one in quartiles if len(of_one) > 1 for q in of_one]
        degrees = sum(len(of_one) - 1 for of_one in quartiles if len(of_one) > 1)
        deviation = math.sqrt(math.fsum(x * x for x in off) / degrees) if degrees else 0.0
        fastest = min(range(self._num_candidates), key=self._time_of)
        return [
            deviation * math.sqrt(sum(1.0 / len(of_one) for of_one in (quartiles[fastest], one) if of_one))
            for one in quartiles
        ]

    def _within(self, factor: float, *, or_predicted: bool = False) -> list[int]:
        """Returns the candidates that are slower than the fastest by no more than a factor.

        Args:
            or_predicted: Or were predicted to be.
        """
        everyone = range(self._num_candidates)
        fastest = min(everyone, key=self._time_of)
        close = [index for index in everyone if self._time_of(index) <= factor * self._time_of(fastest)]
        if or_predicted and self._predicted_s:
            limit_s = factor * self._predicted_s[fastest]
            close = sorted({*close, *(index for index in everyone if self._predicted_s[index] <= limit_s)})
        return close

    def _watch(self, epoch_s: float) -> None:
        """Compares what epochs cost by now with what the choice was made on."""
        self._recent.append(epoch_s)
        if self._num_candidates == 1 or len(self._recent) < DRIFT_WINDOW:
            return
        in_order = sorted(self._recent)
        is_slower = in_order[DRIFT_WINDOW // 4] > DRIFT_FACTOR * self._chosen_s
        is_faster = in_order[-1 - DRIFT_WINDOW // 4] < self._chosen_s / DRIFT_FACTOR
        self.has_drifted = (is_slower or is_faster) and self._can_afford_a_turn(self._planning_s)


def _lower_quartile(times_s: Sequence[float]) -> float:
    return sorted(times_s)[(len(times_s) - 1) // 4]
