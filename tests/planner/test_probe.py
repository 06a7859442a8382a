# SPDX-License-Identifier: Apache-2.0
"""The probe gives every rank the same usable numbers, quickly."""

from __future__ import annotations

import time

import pytest
import torch

from dgl_hybrid.planner import Topology, cost_model, synthetic_trace
from dgl_hybrid.planner.probe import GPU_FACTORS, ROOMY_BYTES, _factors, probe
from tests.helpers.world import run_ranks


def probe_rank(rank: int, world_size: int) -> tuple[Topology, float]:
    start = time.process_time()
    return probe(), time.process_time() - start


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_probe_is_the_same_on_every_rank(world_size: int) -> None:
    results = run_ranks(world_size, probe_rank)
    first = results[0][0]
    assert all(topology == first for topology, _ in results)
    assert first.world_size == world_size
    assert 1e8 < first.dense_flops_per_s < 1e14
    assert first.date
    assert first.machine
    if world_size > 1:
        assert 0 < first.latency_s[0][1] < 1
        assert 1e5 < first.bandwidth_bytes_per_s[1][0] < 1e12
        assert first.latency_s[1][1] == 0
    # 2 s is what it may take on cores of its own; computing time, since others may have the cores.
    assert max(seconds for _, seconds in results) < 5
    assert Topology.from_json(first.to_json()) == first
    cost_model(synthetic_trace([8, 8, 8]), first, world_size - 1)


def test_probe_without_torch_distributed() -> None:
    topology = probe()
    assert topology.world_size == 1
    assert topology.allreduce_latency_s == 0


def test_probe_measures_the_aggregation_it_is_given() -> None:
    shapes = []

    def aggregate(indptr: torch.Tensor, sources: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        shapes.append(rows.shape[1])
        assert int(indptr[-1]) == sources.numel()
        time.sleep(0.001)
        return rows

    topology = probe(aggregate=aggregate)
    assert sorted(set(shapes)) == [16, 64, 256]
    assert all(rate < (1 << 25) / 0.001 for _, rate in topology.gather_bytes_per_s)


def test_a_gpu_is_probed_at_sizes_it_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    free = 2 * ROOMY_BYTES
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 4 * ROOMY_BYTES))
    gpu = torch.device("cuda", 0)
    assert _factors(gpu) == GPU_FACTORS
    free = ROOMY_BYTES - 1
    assert _factors(gpu) == _factors(torch.device("cpu")) == (1, 1, 1)
