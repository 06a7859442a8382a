# SPDX-License-Identifier: Apache-2.0
"""Turns of our strategies in the same processes: how far two of them are apart, and when that is known.

Turns of one round follow each other within seconds, so that whatever slows the machine for longer slows both: ratios
are formed within rounds. One turn differs from the next by some per cent, also of the very same plan; five of them
leave two or three per cent of that in a ratio. So those strategies take as many turns more as are needed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from benchmarks.systems.grid import PURE

CLOSE = 1.1
"""Ratios beyond it need not be known better: who is ahead is known."""


def ratio_of_turns(other: Sequence[Sequence[float]], own: Sequence[Sequence[float]]) -> float:
    """Returns the median over all rounds of the other's time over one's own.

    Args:
        other: By start, then by round, the median epoch of a turn; at least one.
        own: Likewise. Rounds and starts that only one of both has had do not count.
    """
    pairs = [pair for starts in zip(other, own) for pair in zip(*starts)]
    return statistics.median(theirs / ours for theirs, ours in pairs)


def error_of_turns(other: Sequence[float], own: Sequence[float]) -> float:
    """Returns the standard error, relative, of that median over the rounds of one start; infinite for one round."""
    logs = [math.log(theirs / ours) for theirs, ours in zip(other, own)]
    if len(logs) < 2:
        return math.inf
    return math.sqrt(math.pi / 2 / len(logs)) * statistics.stdev(logs)  # the median's, of a normal distribution


def are_known(turns: Mapping[str, Sequence[float]], precision: float) -> bool:
    """Tells whether the ratios of one start that decide who is ahead are known to so much, relative.

    They are those of hybrid to the better pure plan and to NeutronStar's, where these are close to it.

    Args:
        turns: Of our strategies that take turns, by name: the median epoch of each turn.
    """
    own = turns.get("hybrid")
    if own is None:
        return True
    middle = {name: statistics.median(of_turns) for name, of_turns in turns.items()}
    pure = min((name for name in PURE if name in turns), key=lambda name: middle[name], default=None)
    return all(
        error_of_turns(turns[name], own) <= precision
        for name in (pure, "neutronstar")
        if name in turns and 1 / CLOSE < middle[name] / middle["hybrid"] < CLOSE
    )
