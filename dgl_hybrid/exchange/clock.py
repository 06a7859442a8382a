# SPDX-License-Identifier: Apache-2.0
"""Records what was exchanged, when, and how long it took, so that time can be split into compute, exchange and wait."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

MOST_EVENTS = 1 << 16
"""That are remembered unless somebody has said that all are asked for: most scripts never ask."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExchangeEvent:
    """One collective exchange of rows."""

    layer: int
    """The layer whose sources were exchanged, from 1; 0 for static data."""
    backward: bool
    bytes_sent: int
    """Bytes this rank handed to other ranks; what it keeps for itself is not counted."""
    start_s: float
    """`time.perf_counter()` of this rank when it entered the collective."""
    elapsed_s: float
    """In which this rank did nothing else."""
    beside_s: float
    """From when it was begun to when its rows were asked for: what this rank did meanwhile."""


@dataclass(slots=True)
class ExchangeClock:
    """The last exchanges since the last `drain`, in program order: equal in number and kind on every rank."""

    events: deque[ExchangeEvent] = field(default_factory=lambda: deque(maxlen=MOST_EVENTS))

    def record(self, event: ExchangeEvent) -> None:
        self.events.append(event)

    def drain(self, *, keep_all: bool = False) -> list[ExchangeEvent]:
        """Returns the events recorded since the last call and forgets them.

        Args:
            keep_all: Remember all of them until the next call, however many: rows in small chunks may take more
                exchanges an epoch than are remembered else.
        """
        events, self.events = self.events, deque(maxlen=None if keep_all else MOST_EVENTS)
        return list(events)


def split_wait(start_s_by_rank: list[list[float]], elapsed_s: list[float], rank: int) -> tuple[float, float]:
    """Splits this rank's time inside collectives into waiting for a later peer and exchanging.

    Args:
        start_s_by_rank: `[rank][event]`, entry times on one common clock.
        elapsed_s: `[event]`, this rank's time inside each collective.
        rank: This rank.

    Returns:
        `(wait_s, exchange_s)`; their sum is `sum(elapsed_s)`.
    """
    wait_s = 0.0
    for event, elapsed in enumerate(elapsed_s):
        last_start = max(starts[event] for starts in start_s_by_rank)
        wait_s += min(max(last_start - start_s_by_rank[rank][event], 0.0), elapsed)
    return wait_s, sum(elapsed_s) - wait_s
