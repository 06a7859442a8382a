# SPDX-License-Identifier: Apache-2.0
"""Which plan is fastest is measured, not only predicted: candidates take turns in real epochs, and the fastest stays.

Pure: the loader tells the time of the slowest rank after each epoch, which is the same number on every rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

WARM_UP_EPOCHS = 2
"""Of each candidate, not counted: the first fetches features and makes what is kept, the second faults in the memory
that is used from then on."""
TIMED_EPOCHS = 2
"""Of each candidate; the fastest counts, since whatever disturbs an epoch makes it slower."""
CLOSE = (1.4, 1.15)
"""Candidates within the first factor of the fastest run again, then those within the next: two epochs do not tell such
times apart, and machines are slower for seconds at a time, so that it matters when a candidate had its turn."""
FINAL_EPOCHS = 3
"""Timed epochs of each of those, each time."""
TIE = 1.02
"""Times that differ by no more than this factor are the same: epochs of one plan differ as much."""
DRIFT_WINDOW = 16
"""Epochs whose lower quartile is watched once the choice is made."""
DRIFT_FACTOR = 1.5
"""A lower quartile this many times the measured epoch starts the trials anew. That was the fastest of a few: medians
of a machine that others share are half as long again without anything having changed for good."""


class PlanTrials:
    """The state of the trials.

    Args:
        num_candidates: In the order of what is predicted, fastest first.
        favourites: Positions of those that stay unless another one is clearly faster: the pure plans, so that noise
            never makes a hybrid of theirs that is slower.

    Attributes:
        current: Position of the candidate whose turn it is, or of the one that was chosen.
        measured_s: Fastest epoch of each candidate so far; None before its first timed one.
    """

    def __init__(self, num_candidates: int, favourites: Collection[int] = ()) -> None:
        if num_candidates < 1:
            raise ValueError(f"there must be at least one candidate (got {num_candidates})")
        self._num_candidates = num_candidates
        self._favourites = frozenset(favourites)
        self._recent: deque[float] = deque(maxlen=DRIFT_WINDOW)
        self._chosen_s = 0.0
        self._begin()
        self.is_settled = num_candidates == 1

    def _begin(self) -> None:
        self.measured_s: list[float | None] = [None] * self._num_candidates
        self.current, self.is_settled = 0, False
        self._waiting = list(range(1, self._num_candidates))
        self._finals = 0
        self._epochs_of_current = 0

    def record(self, epoch_s: float) -> None:
        """Takes the time of an epoch under the current candidate and decides which one the next epoch runs."""
        if self.is_settled:
            self._watch(epoch_s)
            return
        self._epochs_of_current += 1
        if self._epochs_of_current > WARM_UP_EPOCHS:
            best = self.measured_s[self.current]
            self.measured_s[self.current] = epoch_s if best is None else min(best, epoch_s)
        if self._epochs_of_current == WARM_UP_EPOCHS + (FINAL_EPOCHS if self._finals else TIMED_EPOCHS):
            self._next()

    def _next(self) -> None:
        self._epochs_of_current = 0
        while not self._waiting and self._finals < len(CLOSE):
            close = self._within(CLOSE[self._finals])
            self._finals += 1
            if len(close) > 1:
                # There and back: the one whose turn it was may go on, and nobody always comes last.
                self._waiting = close if close[0] == self.current else close[::-1]
        if self._waiting:
            self.current = self._waiting.pop(0)
            return
        as_fast = self._within(TIE)
        favourites = [index for index in as_fast if index in self._favourites]
        # Among favourites the fastest, since each is a plan of its own; among the rest what was predicted.
        self.current = min(favourites, key=self._time_of) if favourites else as_fast[0]
        self._chosen_s = self._time_of(self.current)
        self.is_settled = True

    def _time_of(self, index: int) -> float:
        time_s = self.measured_s[index]
        return float("inf") if time_s is None else time_s

    def _within(self, factor: float) -> list[int]:
        """Returns the candidates that are slower than the fastest by no more than a factor."""
        least_s = min(self._time_of(index) for index in range(self._num_candidates))
        return [index for index in range(self._num_candidates) if self._time_of(index) <= factor * least_s]

    def _watch(self, epoch_s: float) -> None:
        """Compares what epochs cost by now with what the choice was made on."""
        self._recent.append(epoch_s)
        if self._num_candidates == 1 or len(self._recent) < DRIFT_WINDOW:
            return
        if sorted(self._recent)[DRIFT_WINDOW // 4] > DRIFT_FACTOR * self._chosen_s:
            self._recent.clear()
            self._begin()
