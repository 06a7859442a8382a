# SPDX-License-Identifier: Apache-2.0
"""Which plan is fastest is measured, not only predicted: candidates take turns in real epochs, and the fastest stays.

Pure: the loader tells the time of the slowest rank after each epoch, which is the same number on every rank.
"""

from __future__ import annotations

import statistics
from collections import deque

WARM_UP_EPOCHS = 1
"""Of each candidate, not counted: they fetch features, fill caches and buffers."""
TIMED_EPOCHS = 2
"""Of each candidate; the faster one counts, since whatever disturbs an epoch makes it slower."""
DRIFT_WINDOW = 16
"""Epochs whose median is watched once the choice is made."""
DRIFT_FACTOR = 1.5
"""A median this many times the measured epoch starts the trials anew."""


class PlanTrials:
    """The state of the trials.

    Attributes:
        current: Position of the candidate whose turn it is, or of the one that was chosen.
        measured_s: Fastest epoch of each candidate so far; None before its first timed one.
    """

    def __init__(self, num_candidates: int) -> None:
        if num_candidates < 1:
            raise ValueError(f"there must be at least one candidate (got {num_candidates})")
        self.measured_s: list[float | None] = [None] * num_candidates
        self.current = 0
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
        if self._epochs_of_current == WARM_UP_EPOCHS + TIMED_EPOCHS:
            self._next()

    def _next(self) -> None:
        self._epochs_of_current = 0
        if self.current + 1 < len(self.measured_s):
            self.current += 1
            return
        times = [float("inf") if t is None else t for t in self.measured_s]
        self.current = times.index(min(times))
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
