# SPDX-License-Identifier: Apache-2.0
"""Turns of our strategies in the same processes: in which order, how far two are apart, and when that is known.

Turns of one round follow each other within seconds, so that whatever slows the machine for longer slows both: ratios
are formed within rounds. One turn differs from the next by some per cent, also of the very same plan; five of them
leave two or three per cent of that in a ratio. So those strategies take as many turns more as are needed.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence

from benchmarks.systems.grid import PURE

CLOSE = 1.1
"""Ratios beyond it need not be known better: who is ahead is known."""


@functools.cache
def balanced_orders(count: int, num_rounds: int) -> tuple[tuple[int, ...], ...]:
    """Returns in which order some few take turns, round by round: each comes after each other one as often as any.

    What trained before may leave its mark on processes: in some of them epochs were a sixth longer, turn after turn,
    where the plan before had cached everything. Designs of experiments call that carry-over, and balance it
    (E. J. Williams, Australian Journal of Scientific Research A2, 1949); here, also from one round to the next, and
    nobody follows itself.

    Args:
        count: How many there are, at least one; all their orders are looked at, for each round.
        num_rounds: At least 1. The first rounds of more are those of fewer.
    """
    orders: list[tuple[int, ...]] = []
    followed: Counter[tuple[int, int]] = Counter()
    begun: Counter[int] = Counter()
    for _ in range(num_rounds):
        before = orders[-1][-1:] if orders else ()

        def unevenness(order: tuple[int, ...], before: tuple[int, ...] = before) -> tuple[int, int]:
            return sum(followed[pair] for pair in itertools.pairwise(before + order)), begun[order[0]]

        candidates = list(itertools.permutations(range(count)))
        if count > 1:
            candidates = [order for order in candidates if order[:1] != before]
        orders.append(min(candidates, key=unevenness))
        followed.update(itertools.pairwise(before + orders[-1]))
        begun[orders[-1][0]] += 1
    return tuple(orders)


def ratio_of_turns(other: Sequence[Sequence[float]], own: Sequence[Sequence[float]]) -> float:
    """Returns the other's time over one's own: the middle of the ratios of all rounds.

    By the medians of pairs (J. L. Hodges and E. L. Lehmann, Annals of Mathematical Statistics 34, 1963): disturbed
    rounds count as little as in a median, which would take one and a half times as many rounds to know as much.

    Args:
        other: By start, then by round, the median epoch of a turn; at least one.
        own: Likewise. Rounds and starts that only one of both has had do not count.
    """
    logs = [math.log(theirs / ours) for starts in zip(other, own) for theirs, ours in zip(*starts)]
    return math.exp(statistics.median(map(statistics.fmean, itertools.combinations_with_replacement(logs, 2))))


def error_of_turns(other: Sequence[float], own: Sequence[float]) -> float:
    """Returns the standard error, relative, of that ratio over the rounds of one start; infinite for one round."""
    logs = [math.log(theirs / ours) for theirs, ours in zip(other, own)]
    if len(logs) < 2:
        return math.inf
    return math.sqrt(math.pi / 3 / len(logs)) * statistics.stdev(logs)  # of a normal distribution


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
