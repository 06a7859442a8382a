# SPDX-License-Identifier: Apache-2.0
"""What an epoch clock tells of each exchange: in program order, the same on every rank."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from dgl_hybrid import FullGraphLoader, PartitionedGraph
from dgl_hybrid.training.epoch_clock import EpochClock, EpochTimes
from tests.helpers.exactness import Case
from tests.helpers.graphs import power_law
from tests.helpers.partitions import PartitionStore
from tests.helpers.world import run_ranks


def time_epochs(rank: int, world_size: int, part_config: str) -> tuple[list[EpochTimes], list[list[tuple[int, bool]]]]:
    """The times of two epochs and an empty one, and which exchanges this rank saw in each."""
    g = PartitionedGraph.open(part_config)
    model = Case(kind="gcn_both", num_layers=3).build(g.ndata["feat"].shape[1])
    loader = FullGraphLoader(g, g.owned_nodes("train_mask"), 3, plan=[torch.arange(0)] * 3, overlap=True)
    clock = EpochClock(g.communicator, 3)
    times, seen = [], []
    for epoch in range(3):
        clock.start()
        for input_nodes, seeds, blocks in loader:
            if epoch < 2:
                x = g.ndata["feat"][input_nodes]
                F.cross_entropy(model(blocks, x), g.ndata["label"][seeds]).backward()
        seen.append([(event.layer, event.backward) for event in g.communicator.clock.events if event.layer > 0])
        times.append(clock.stop())
    return times, seen


def test_each_exchange_is_told_in_program_order(partitions: PartitionStore) -> None:
    (times, seen), (times_1, seen_1) = run_ranks(2, time_epochs, partitions.get("power_law", power_law(), 2))
    assert times == times_1, "ranks were told different times"
    assert seen == seen_1
    assert seen[0][:3] == [(1, False), (2, False), (3, False)]
    assert {layer for layer, backward in seen[1] if backward} >= {2, 3}
    assert seen[2] == []
    for epoch, order in zip(times, seen, strict=True):
        assert [(exchange.layer, exchange.backward) for exchange in epoch.exchanges] == order
        assert all(exchange.blocked_s >= 0 and exchange.beside_s >= 0 for exchange in epoch.exchanges)
        blocked_s = sum(exchange.blocked_s for exchange in epoch.exchanges)
        assert blocked_s == pytest.approx(epoch.exchange_s + epoch.wait_s)
    assert any(exchange.beside_s > 0 for exchange in times[1].exchanges), "nothing was done beside an exchange"
