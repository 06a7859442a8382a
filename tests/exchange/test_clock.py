# SPDX-License-Identifier: Apache-2.0
"""What a clock remembers of exchanges, and which time of one it counts as what."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from dgl_hybrid.exchange.clock import MOST_EVENTS, ExchangeClock, ExchangeEvent
from dgl_hybrid.exchange.connect import create_communicator
from tests.helpers.world import run_ranks

SPIN_S = 0.02


def event(number: int) -> ExchangeEvent:
    return ExchangeEvent(layer=number, backward=False, bytes_sent=0, start_s=0.0, elapsed_s=0.0, beside_s=0.0)


def test_events_are_handed_out_once_and_in_order() -> None:
    clock = ExchangeClock()
    for number in range(5):
        clock.record(event(number))
    assert [one.layer for one in clock.drain()] == [0, 1, 2, 3, 4]
    assert clock.drain() == []
    clock.record(event(7))
    assert [one.layer for one in clock.drain()] == [7]


def test_a_script_that_never_asks_keeps_the_last_events_only() -> None:
    clock, num_more = ExchangeClock(), 10
    for number in range(MOST_EVENTS + num_more):
        clock.record(event(number))
    layers = [one.layer for one in clock.drain()]
    assert len(layers) == MOST_EVENTS
    assert (layers[0], layers[-1]) == (num_more, MOST_EVENTS + num_more - 1)
    assert clock.drain() == []


def test_who_asks_for_all_gets_all() -> None:
    """Bytes and times of an epoch in small chunks lacked those of its first exchanges."""
    clock, num_events = ExchangeClock(), MOST_EVENTS + 10
    clock.drain(keep_all=True)
    for number in range(num_events):
        clock.record(event(number))
    assert [one.layer for one in clock.drain()] == list(range(num_events))
    for number in range(num_events):
        clock.record(event(number))
    assert len(clock.drain()) == MOST_EVENTS, "nobody has asked again"


def spin() -> None:
    until_s = time.perf_counter() + SPIN_S
    while time.perf_counter() < until_s:
        pass


def exchange_and_work(rank: int, world_size: int, transport: Any) -> list[tuple[float, float, float]]:
    """Returns (beside, elapsed, whole time) of an exchange with work beside it, and of one without."""
    communicator = create_communicator(transport=transport, timeout_s=20)
    rows, counts = torch.ones(world_size, 1), [1] * world_size
    times = []
    for work in (spin, lambda: None):
        communicator.barrier()
        begun_s = time.perf_counter()
        pending = communicator.start_exchange(rows, counts, counts)
        work()
        pending.wait()
        whole_s = time.perf_counter() - begun_s
        (one,) = communicator.clock.drain()
        times.append((one.beside_s, one.elapsed_s, whole_s))
    return times


@pytest.mark.parametrize("transport", ["collective", "shared_memory"])
def test_work_beside_an_exchange_is_not_time_of_the_exchange(transport: str) -> None:
    for times in run_ranks(2, exchange_and_work, transport):
        for beside_s, elapsed_s, whole_s in times:
            assert beside_s >= 0.0
            assert elapsed_s > 0.0
            # No time is counted twice: that until the exchange was under way is the exchange's.
            assert beside_s + elapsed_s <= whole_s
        (beside_s, elapsed_s, whole_s), _ = times
        assert beside_s >= SPIN_S
        assert elapsed_s <= whole_s - SPIN_S
