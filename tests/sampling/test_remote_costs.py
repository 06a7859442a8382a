# SPDX-License-Identifier: Apache-2.0
"""What is measured of remote rows and seeds, on a clock that the test turns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import dgl_hybrid  # noqa: F401  before dgl, which it makes importable

# isort: split
import pytest
import torch
from dgl.distributed import rpc
from torch import Tensor

from dgl_hybrid.sampling import remote_costs
from dgl_hybrid.sampling.choose import RemoteCosts

NUM_IDS = 100
MESSAGE_S = 1e-3


class Owner:
    """Another machine, whose messages take a millisecond, more or less, and what their items do."""

    def __init__(self, seed_s: float, row_s: float, jitter_s: Iterator[float]) -> None:
        self.now_s, self.seed_s, self.row_s, self.jitter_s = 0.0, seed_s, row_s, jitter_s
        self.asked: list[int] = []
        self.pulled: list[int] = []

    def sample(self, requests: list[tuple[int, Any]]) -> None:
        ((_, request),) = requests
        self.asked.append(len(request.seed_nodes))
        self.now_s += MESSAGE_S + self.seed_s * self.asked[-1] + next(self.jitter_s)

    def pull(self, ids: Tensor) -> Tensor:
        assert 0 <= int(ids.min()) <= int(ids.max()) < NUM_IDS
        self.pulled.append(len(ids))
        self.now_s += MESSAGE_S + self.row_s * len(ids) + next(self.jitter_s)
        return ids


def measure(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> RemoteCosts:
    monkeypatch.setattr(rpc, "remote_call_to_machine", owner.sample)
    monkeypatch.setattr(remote_costs.time, "perf_counter", lambda: owner.now_s)
    ids = torch.arange(NUM_IDS)
    return remote_costs.measure_remote_costs(owner.pull, ids + 1000, 1, fanout=3, row_ids=ids)


def constant(value: float) -> Iterator[float]:
    while True:
        yield value


def alternating(*values: float) -> Iterator[float]:
    while True:
        yield from values


def test_what_an_item_takes_of_few_vertices(monkeypatch: pytest.MonkeyPatch) -> None:
    owner = Owner(4e-6, 2e-6, constant(0.0))
    costs = measure(owner, monkeypatch)
    assert (costs.seed_s, costs.row_s) == pytest.approx((4e-6, 2e-6))
    assert costs.latency_s == pytest.approx(MESSAGE_S, rel=0.01)
    assert owner.asked == owner.pulled == [1, 2048] * 5, "as many as of many vertices, and not for longer than needed"


def test_items_that_take_less_than_messages_differ_are_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of both came out as a thousandth of the other, by chance, and the whole budget went to that one."""
    owner = Owner(1e-8, 1e-8, alternating(5e-4, 0.0))  # the larger message is always the faster one
    costs = measure(owner, monkeypatch)
    assert 0.1 < costs.row_s / costs.seed_s < 10.0
    assert owner.asked == owner.pulled == [1, 2048] * 20
