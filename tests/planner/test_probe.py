# SPDX-License-Identifier: Apache-2.0
"""The probe gives every rank the same usable numbers, quickly."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dgl_hybrid.planner import Topology, cost_model, synthetic_trace
from dgl_hybrid.planner import probe as probe_module
from dgl_hybrid.planner.probe import (
    GPU_FACTORS,
    LINK_BYTES,
    ROOMY_BYTES,
    SMALL_BYTES,
    _factors,
    _measure_links,
    probe,
)
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


class SharedLinks:
    """Two hosts of `per_host` ranks, each with one link of a megabyte per second in each direction; what one rank sees.

    In no time itself: `seconds` tells what the last exchange would take.
    """

    device = torch.device("cpu")
    may_share_links = True

    def __init__(self, per_host: int, rank: int) -> None:
        self.per_host, self.rank, self.world_size = per_host, rank, 2 * per_host
        self.seconds = 0.0

    def all_to_all(self, received: object, send: object, recv_counts: list[int], send_counts: list[int]) -> None:
        sources = [peer for peer, count in enumerate(recv_counts) if count]
        host = self.rank // self.per_host
        distances = [(self.rank - source) % self.world_size for source in sources]
        # All ranks of this host receive from peers as far away.
        mates = range(host * self.per_host, (host + 1) * self.per_host)
        far = [d for mate in mates for d in distances if (mate - d) % self.world_size // self.per_host != host]
        is_far = any(source // self.per_host != host for source in sources)
        self.seconds = 1e-9 + (4e-6 * max(recv_counts) * len(far) if is_far else 0.0)


@pytest.mark.parametrize("per_host", [1, 2, 4, 8])
def test_ranks_of_a_host_share_its_link(per_host: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pair by pair, most transfers had the link to themselves: exchanges were predicted a quarter to a third too
    short.
    """
    for rank in range(2 * per_host):
        links = SharedLinks(per_host, rank)

        def best(exchange: Callable[[], object], device: object, links: SharedLinks = links) -> float:
            exchange()
            return links.seconds

        monkeypatch.setattr(probe_module, "_best", best)
        _, rates = _measure_links(links)  # type: ignore[arg-type]
        others = [rates[peer] for peer in range(2 * per_host) if peer // per_host != rank // per_host]
        # Each receives a megabyte from every rank of the other host: all of these pass one link.
        assert sum(1e6 / rate for rate in others) == pytest.approx(per_host**2, rel=0.01)
    links.may_share_links = False  # ranks of one host, or one of each: all have been at work all the time
    _, rates = _measure_links(links)  # type: ignore[arg-type]
    shares = [rates[peer] for peer in range(per_host)]
    assert sum(1e6 / rate for rate in shares) < 0.8 * per_host**2 or per_host == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_bytes_are_those_that_are_counted_whatever_the_default_dtype(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rates came out half as high in scripts that make float64 the default."""
    moved, gathered = set[int](), set[tuple[int, torch.dtype]]()

    class Moving(SharedLinks):
        def all_to_all(self, received: Any, send: Any, recv_counts: list[int], send_counts: list[int]) -> None:
            moved.update((received.nbytes, send.nbytes))

    def aggregate(indptr: torch.Tensor, sources: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        gathered.add((rows.shape[1], rows.dtype))
        return rows

    operands = set[torch.dtype]()
    mm = torch.mm
    monkeypatch.setattr(torch, "mm", lambda x, y, out: (operands.update((x.dtype, out.dtype)), mm(x, y, out=out))[1])
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        _measure_links(Moving(2, 1))
        probe(aggregate=aggregate)
    finally:
        torch.set_default_dtype(before)
    assert moved == {SMALL_BYTES, LINK_BYTES, LINK_BYTES // 4 // 3 * 3 * 4}
    assert gathered == {(width, torch.float32) for width in (16, 64, 256)}
    assert operands == {torch.float32}


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
