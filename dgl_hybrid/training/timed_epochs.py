# SPDX-License-Identifier: Apache-2.0
"""Epochs that are timed on all ranks at once, and how much longer one is where its slowest rank changes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from dgl_hybrid.exchange.communicator import Communicator


class TimedEpochs:
    """Timed epochs that ranks begin together, as in training, until no rank wants another.

    Left to themselves ranks end at different times, and who is alone on a host sees nothing of the cores that it will
    have to share: three ranks on two cores measured epochs of 18 ms, where those of training took 40.

    Args:
        communicator: Of all ranks, each of which has one of these.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._are_over = False
        self._took_ns: list[list[int]] = []
        """Of each epoch and rank; 0: it sat out. The first is of none."""

    def any_wants_more(self, wants_more: bool, last_s: float) -> bool:
        """Tells whether any rank wants another epoch. Collective.

        Args:
            wants_more: Whether this rank does.
            last_s: What this rank's last one took; 0 before the first.
        """
        told = self._communicator.gather_ints([int(wants_more), int(1e9 * last_s)])
        self._took_ns.append([took for _, took in told])
        self._are_over = not any(wants for wants, _ in told)
        return not self._are_over

    def sit_out(self) -> None:
        """Lets the others have their epochs, where this rank could not have its own to the end. Collective."""
        while not self._are_over:
            self.any_wants_more(False, 0.0)

    def waiting_factors(self, num_orders: int) -> list[float]:
        """Returns how many times as long as the slowest rank's epochs those of all ranks together take, at the median.

        An epoch is over when its slowest rank is, and where ranks share cores that is now this one, now another: each
        may take 100 ms mostly, and in nearly every epoch one of them 120. The same on every rank, at least 1.

        Args:
            num_orders: Epochs were of so many orders, by turns; there is a factor for each.
        """
        return [self._waiting_factor(self._took_ns[1 + order :: num_orders]) for order in range(num_orders)]

    def _waiting_factor(self, took_ns: Sequence[Sequence[int]]) -> float:
        epochs = [of_epoch for of_epoch in took_ns if all(of_epoch)]
        if not epochs:
            return 1.0
        slowest_rank = max(statistics.median(of_rank) for of_rank in zip(*epochs, strict=True))
        return float(statistics.median(max(of_epoch) for of_epoch in epochs) / slowest_rank)
