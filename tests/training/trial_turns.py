# SPDX-License-Identifier: Apache-2.0
"""In which turns candidates run, as their times are known."""

from __future__ import annotations

import math

from dgl_hybrid.training.plan_trials import (
    CLOSE,
    FINAL_EPOCHS,
    FURTHER_ROUNDS,
    MAX_TIMED_EPOCHS,
    TIMED_EPOCHS,
    WARM_UP_EPOCHS,
)

AT_ONCE = math.inf
FIRST, FINAL = WARM_UP_EPOCHS + TIMED_EPOCHS, WARM_UP_EPOCHS + FINAL_EPOCHS
MOST_EPOCHS = 6 * (1 + len(CLOSE) + FURTHER_ROUNDS) * (WARM_UP_EPOCHS + MAX_TIMED_EPOCHS) + 1
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
