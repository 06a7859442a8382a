# SPDX-License-Identifier: Apache-2.0
"""Which plan is fastest is measured, not only predicted: candidates take turns in real epochs, and the fastest stays.

Pure: the loader tells the time of the slowest rank after each epoch, which is the same number on every rank.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Collection

WARM_UP_EPOCHS = 2
"""Of each candidate, not counted: the first fetches features and makes what is kept, the second faults in the memory
that is used from then on."""
TIMED_EPOCHS = 2
"""Of each candidate; the fastest counts, since whatever disturbs an epoch makes it slower."""
CLOSE = 1.15
"""A candidate within this factor of the fastest so far runs on, as two epochs do not tell such times apart."""
CLOSE_EPOCHS = 5
"""Timed epochs of such a candidate, and of the first one."""
TIE = 1.03
"""Times that differ by no more than this factor are the same: epochs of one plan differ as much."""
DRIFT_WINDOW = 16
"""Epochs whose median is watched once the choice is made."""
DRIFT_FACTOR = 1.5
"""A median this many times the measured epoch starts the trials anew."""


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
        self.measured_s: list[float | None] = [None] * num_candidates
        self.current = 0
        self._favourites = frozenset(favourites)
        self._epochs_of_current = 0
        self._recent: deque[float] = deque(maxlen=DRIFT_WINDOW)
        self._chosen_s = 0.0
        self.is_settled = num_candidates == 1

    def record(self, epoch_s: float) -> None:
        """Takes the time of an epoch under the current candidate and decides which one the next epoch runs."""
        if self.is_settled:
            self._watch(epoch_s)
            return
        self._epochs_of_current += 1
        if self._epochs_of_current > WARM_UP_EPOCHS:
            best = self.measured_s[self.current]
            self.measured_s[self.current] = epoch_s if best is None else min(best, epoch_s)
        if self._epochs_of_current >= WARM_UP_EPOCHS + self._epochs_to_time():
            self._next()

    def _epochs_to_time(self) -> int:
        mine = self.measured_s[self.current]
        others = [time_s for time_s in self.measured_s[: self.current] if time_s is not None]
        return CLOSE_EPOCHS if mine is None or not others or mine <= CLOSE * min(others) else TIMED_EPOCHS

    def _next(self) -> None:
        self._epochs_of_current = 0
        if self.current + 1 < len(self.measured_s):
            self.current += 1
            return
        times = [float("inf") if t is None else t for t in self.measured_s]
        as_fast = [index for index, time_s in enumerate(times) if time_s <= TIE * min(times)]
        favourites = [index for index in as_fast if index in self._favourites]
        # Among favourites the fastest, since each is a plan of its own; among the rest what was predicted.
        self.current = min(favourites, key=times.__getitem__) if favourites else as_fast[0]
        self._chosen_s = times[self.current]
        self.is_settled = True

    def _watch(self, epoch_s: float) -> None:
        """Compares what epochs cost by now with what the choice was made on."""
        self._recent.append(epoch_s)
        if len(self.measured_s) == 1 or len(self._recent) < DRIFT_WINDOW:
            return
        if statistics.median(self._recent) > DRIFT_FACTOR * self._chosen_s:
            self._recent.clear()
            self.measured_s = [None] * len(self.measured_s)
            self.current, self.is_settled = 0, False
