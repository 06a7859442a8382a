# SPDX-License-Identifier: Apache-2.0
"""Measures one epoch on all ranks: time of the slowest, bytes by layer, the split into compute, exchange and wait."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dgl_hybrid.exchange.clock import ExchangeEvent, split_wait
from dgl_hybrid.exchange.communicator import Communicator
from dgl_hybrid.planner.probe import wait_for_device


@dataclass(frozen=True, kw_only=True, slots=True)
class ExchangeTimes:
    """One exchange of an epoch: means over ranks."""

    layer: int
    backward: bool
    blocked_s: float
    """In which ranks did nothing else, waiting for a later one included."""
    beside_s: float
    """What they did while rows were under way."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochTimes:
    """All ranks together: times of the slowest or mean rank, bytes summed."""

    time_s: float
    compute_s: float
    exchange_s: float
    wait_s: float
    forward_bytes: tuple[int, ...]
    """(L,) by layer."""
    backward_bytes: tuple[int, ...]
    exchanges: tuple[ExchangeTimes, ...]
    """In program order."""


class EpochClock:
    """`start()` before an epoch, `stop()` after it; both collective, the time between them is not disturbed.

    Args:
        communicator: Of the ranks.
        num_layers: L.
        device: Where they train; what a GPU was given in an epoch is waited for at its end.
    """

    def __init__(self, communicator: Communicator, num_layers: int, device: torch.device | None = None) -> None:
        self._communicator, self._device = communicator, device or torch.device("cpu")
        self._num_layers = num_layers
        self._start_s = 0.0
        communicator.common_time_s(0.0)  # collective the first time: not inside an epoch

    def start(self) -> None:
        """Waits for all ranks and begins to measure. Collective."""
        self._communicator.barrier()
        self._communicator.clock.drain(keep_all=True)
        self._start_s = time.perf_counter()

    def stop(self) -> EpochTimes:
        """Returns the same on every rank. Collective."""
        wait_for_device(self._device)
        elapsed_s = time.perf_counter() - self._start_s
        communicator, num_layers = self._communicator, self._num_layers
        # Layer 0 is static data: features and labels fetched once, in the first epoch.
        events = [event for event in communicator.clock.drain() if event.layer > 0]
        entered, blocked, beside = self._gather_times(events)
        wait_s, exchange_s = split_wait(entered, [event.elapsed_s for event in events], communicator.rank)
        sent = [0] * (2 * num_layers)
        for event in events:
            sent[event.layer - 1 + num_layers * event.backward] += event.bytes_sent
        times = communicator.gather_floats([elapsed_s, exchange_s, wait_s])
        by_rank = communicator.gather_ints(sent)
        total = [sum(row[k] for row in by_rank) for k in range(2 * num_layers)]
        world_size = communicator.world_size
        mean_exchange_s = sum(row[1] for row in times) / world_size
        mean_wait_s = sum(row[2] for row in times) / world_size
        time_s = max(row[0] for row in times)
        return EpochTimes(
            time_s=time_s,
            compute_s=max(time_s - mean_exchange_s - mean_wait_s, 0.0),
            exchange_s=mean_exchange_s,
            wait_s=mean_wait_s,
            forward_bytes=tuple(total[:num_layers]),
            backward_bytes=tuple(total[num_layers:]),
            exchanges=tuple(
                ExchangeTimes(
                    layer=event.layer,
                    backward=event.backward,
                    blocked_s=sum(row[position] for row in blocked) / world_size,
                    beside_s=sum(row[position] for row in beside) / world_size,
                )
                for position, event in enumerate(events)
            ),
        )

    def _gather_times(self, events: Sequence[ExchangeEvent]) -> list[list[list[float]]]:
        """Returns `[rank][event]` when exchanges were entered, how long they blocked, and how long work beside them
        took. Collective, where there were any.
        """
        communicator = self._communicator
        if not events:
            return [[[] for _ in range(communicator.world_size)]] * 3
        told = [
            *(communicator.common_time_s(event.start_s) for event in events),
            *(event.elapsed_s for event in events),
            *(event.beside_s for event in events),
        ]
        by_rank, count = communicator.gather_floats(told), len(events)
        return [[row[begin : begin + count] for row in by_rank] for begin in (0, count, 2 * count)]
