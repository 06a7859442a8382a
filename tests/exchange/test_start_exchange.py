# SPDX-License-Identifier: Apache-2.0
"""Exchanges in two halves: what comes is what one whole exchange brings, and halves are not mixed up."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dgl_hybrid.errors import ExchangeError
from dgl_hybrid.exchange.communicator import Communicator
from dgl_hybrid.exchange.connect import create_communicator
from dgl_hybrid.exchange.transport import NO_TAG, ExchangeTag, Transport
from tests.helpers.world import run_ranks


def plan_of(rank: int, world_size: int) -> tuple[list[int], list[int]]:
    """Rows that ranks send each other: nothing to oneself, nothing at all to rank 0 from the last one."""
    table = [[0 if a == b else 2 + a + 3 * b for b in range(world_size)] for a in range(world_size)]
    table[world_size - 1][0] = 0
    return table[rank], [row[rank] for row in table]


def run_halves(rank: int, world_size: int, transport: Any) -> dict[str, bool]:
    communicator = create_communicator(transport=transport, timeout_s=20)
    sent, expected = plan_of(rank, world_size)
    checks = {}
    for dtype in (torch.float32, torch.float64, torch.bool):
        rows = (torch.arange(5 * sum(sent)).view(-1, 5) * (rank + 1)).to(dtype)
        whole = communicator.exchange(rows, sent, expected)
        placed = communicator.send_buffer(rows.shape, dtype, rows.device)
        placed.copy_(rows)
        pending = communicator.start_exchange(placed, sent, expected)
        checks[f"{dtype} where it arrived"] = torch.equal(torch.cat(pending.wait()), whole)
        out = torch.empty_like(whole)
        for source in (rows, placed.copy_(rows)):
            pending = communicator.start_exchange(source, sent, expected, out=out.zero_())
            parts = pending.wait()
            checks[f"{dtype} in its place"] = torch.equal(out, whole) and torch.equal(torch.cat(parts), whole)
    events = communicator.clock.drain()
    checks["each counted once"] = len(events) == 12
    return checks


@pytest.mark.parametrize("transport", ["collective", "shared_memory"])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_two_halves_are_one_exchange(world_size: int, transport: str) -> None:
    for checks in run_ranks(world_size, run_halves, transport):
        assert all(checks.values()), checks


def run_disorder(rank: int, world_size: int, transport: Any) -> list[str]:
    communicator = create_communicator(transport=transport, timeout_s=20)
    rows, counts = torch.ones(world_size, 1), [1] * world_size
    found = []
    pending = communicator.start_exchange(rows, counts, counts)
    for mistake in (
        lambda: communicator.start_exchange(rows, counts, counts),
        lambda: communicator.borrow(rows, counts, counts),
    ):
        try:
            mistake()
        except ExchangeError as error:
            found.append(str(error))
    pending.wait()
    try:
        pending.wait()
    except ExchangeError as error:
        found.append(str(error))
    communicator.exchange(rows, counts, counts)  # all is well again
    return found


def send_and_keep_what_waited(rank: int, world_size: int) -> int:
    """Returns the bytes of sent rows that are free again while the object that was waited for lives."""
    communicator = create_communicator(transport="collective", timeout_s=20)
    rows = communicator.send_buffer((world_size << 17,), torch.uint8, torch.device("cpu"))
    out = torch.empty_like(rows)
    pending = communicator.start_exchange(rows, [1 << 17] * world_size, [1 << 17] * world_size, out=out)
    del rows
    pending.wait()
    latest_s = time.monotonic() + 20.0  # a thread of gloo's may let go later
    while communicator.buffers.free_bytes == 0 and time.monotonic() < latest_s:
        time.sleep(0.01)
    assert pending.layer == 0
    return communicator.buffers.free_bytes


def test_what_has_left_is_not_kept() -> None:
    assert run_ranks(2, send_and_keep_what_waited) == [2 << 17] * 2


@pytest.mark.parametrize("transport", ["collective", "shared_memory"])
def test_halves_are_not_mixed_up(transport: str) -> None:
    for first, second, third in run_ranks(2, run_disorder, transport):
        assert "is under way" in first
        assert "is under way" in second
        assert "handed out once" in third


def test_one_rank_needs_no_transport() -> None:
    communicator = Communicator(None)
    rows = torch.arange(6.0).view(3, 2)
    assert torch.equal(communicator.start_exchange(rows, [3], [3]).wait()[0], rows)
    out = torch.empty(3, 2)
    communicator.start_exchange(rows, [3], [3], out=out).wait()
    assert torch.equal(out, rows)


class Interrupted(Transport):
    """Ctrl-C comes in the middle of its first operation."""

    rank, world_size, backend = 0, 2, "gloo"
    is_due = True

    def start_all_to_all(
        self, received: Tensor, send: Tensor, recv_counts: list[int], send_counts: list[int], tag: ExchangeTag = NO_TAG
    ) -> Callable[[], None]:
        return self.interrupt

    def interrupt(self) -> None:
        if self.is_due:
            self.is_due = False
            raise KeyboardInterrupt

    def all_reduce(self, tensor: Tensor, what: str = "") -> None:
        self.interrupt()

    def all_gather(self, tensor: Tensor, what: str = "") -> list[Tensor]:
        self.interrupt()
        return [tensor, tensor]

    def find_late_ranks(self, name: str, where: str) -> list[int]:
        return []


ROWS, COUNTS = torch.ones(2, 1), [1, 1]
OPERATIONS: dict[str, Callable[[Communicator], object]] = {
    r"exchange 1 \(layer 3, forward\)": lambda one: one.exchange(ROWS, COUNTS, COUNTS, layer=3),
    "exchange of counts": lambda one: one.exchange_counts(COUNTS),
    "sum over ranks": lambda one: one.sum_(torch.ones(1)),
    "gather": lambda one: one.gather_ints([1]),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_after_an_interrupted_operation_all_others_say_so(name: str) -> None:
    """Ranks had done different numbers of operations: the next one waited until the timeout, or took another's rows."""
    communicator = Communicator(Interrupted())
    with pytest.raises(KeyboardInterrupt):
        OPERATIONS[name](communicator)
    for operation in OPERATIONS.values():
        with pytest.raises(ExchangeError, match=f"rank 0 of 2 was interrupted in the middle of {name}, so ranks no"):
            operation(communicator)


def test_nothing_comes_between_the_halves_of_an_exchange() -> None:
    """After an exception between them, other operations met those of peers that had not come to them yet."""
    communicator = Communicator(Interrupted())
    communicator.start_exchange(ROWS, COUNTS, COUNTS, layer=2)
    for operation in OPERATIONS.values():
        with pytest.raises(
            ExchangeError, match=r"an exchange for layer 2 is under way .*end all of them and start again"
        ):
            operation(communicator)
