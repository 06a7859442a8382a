# SPDX-License-Identifier: Apache-2.0
"""Measures this cluster in about a second: device rates, and links with all ranks at once, as training uses them."""

from __future__ import annotations

import datetime
import platform
import time
import warnings
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from .topology import Topology

GATHER_WIDTHS = (16, 64, 256)
SMALL_BYTES = 64
LINK_BYTES = 1 << 21
REPEATS = 3
MACHINE_CHARS = 64

Aggregate = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(indptr (N + 1,), sources (E,), rows (N, F)) -> (N, F): the sum of source rows over each row's in-edges."""


def probe(
    group: dist.ProcessGroup | None = None,
    *,
    device: str | torch.device = "cpu",
    aggregate: Aggregate | None = None,
) -> Topology:
    """Measures device and link rates. Collective over `group` (or the default group); alone without torch.distributed.

    All ranks measure at once: on one host they share memory bandwidth in training too. The slowest rank's device rates
    count for all, so that every rank plans with the same numbers.

    Args:
        group: ranks to probe; None: the default group if there is one.
        device: where the model runs; links are probed with tensors there if the backend carries them, else on the CPU.
        aggregate: sums rows over in-edges as training will; None: a plain torch product, slower than DGL's kernel.

    Returns:
        The same topology on every rank.
    """
    device = torch.device(device)
    grouped = group is not None or (dist.is_available() and dist.is_initialized())
    world_size = dist.get_world_size(group) if grouped else 1
    if grouped:
        dist.barrier(group)
    rates = [
        _gemm_rate(device),
        _row_rate(device),
        *(_gather_rate(device, width, aggregate) for width in GATHER_WIDTHS),
    ]
    if not grouped or world_size == 1:
        return _topology(rates, [[0.0]], [[1e12]], 0.0, 1e12, device, time.time(), _machine(device))
    link_device = device if "nccl" in str(dist.get_backend(group)) else torch.device("cpu")
    latency_s, bandwidth = _links(group, world_size, link_device)
    tensors = [torch.zeros(num_bytes // 4, device=link_device) for num_bytes in (SMALL_BYTES, LINK_BYTES)]
    small_s, large_s = (_best(partial(dist.all_reduce, x, group=group), link_device) for x in tensors)
    mine = [*rates, small_s, _rate(small_s, large_s), *latency_s, *bandwidth, time.time(), *_encode(_machine(device))]
    row = torch.tensor(mine, dtype=torch.float64, device=link_device)
    gathered = [torch.zeros_like(row) for _ in range(world_size)]
    dist.all_gather(gathered, row, group=group)
    table = torch.stack(gathered)
    # Every rank has the same table by now; a broadcast makes that true whatever the backend does.
    dist.broadcast(table, src=dist.get_global_rank(group, 0) if group is not None else 0, group=group)
    sizes = [len(rates), 1, 1, world_size, world_size, 1, MACHINE_CHARS]
    device_rates, reduce_s, reduce_rate, received_latency, received_rate, now, name = table.cpu().split(sizes, dim=1)
    return _topology(
        device_rates.min(dim=0).values.tolist(),
        # Row q holds what rank q measured as the receiver, so `[from][to]` is the transpose.
        received_latency.t().tolist(),
        received_rate.t().tolist(),
        float(reduce_s.max()),
        float(reduce_rate.min()),
        device,
        float(now[0]),
        bytes(int(x) for x in name[0]).rstrip(b"\0").decode(errors="replace"),
    )


def _topology(
    rates: list[float],
    latency_s: list[list[float]],
    bandwidth: list[list[float]],
    reduce_s: float,
    reduce_rate: float,
    device: torch.device,
    now: float,
    machine: str,
) -> Topology:
    return Topology(
        dense_flops_per_s=rates[0],
        row_bytes_per_s=rates[1],
        gather_bytes_per_s=tuple((4 * width, rate) for width, rate in zip(GATHER_WIDTHS, rates[2:], strict=True)),
        latency_s=tuple(tuple(row) for row in latency_s),
        bandwidth_bytes_per_s=tuple(tuple(row) for row in bandwidth),
        allreduce_latency_s=reduce_s,
        allreduce_bytes_per_s=reduce_rate,
        device=device.type,
        date=datetime.datetime.fromtimestamp(now, datetime.UTC).isoformat(timespec="seconds"),
        machine=machine,
    )


def _machine(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return platform.processor() or platform.machine()


def _encode(name: str) -> list[float]:
    """Returns a name as numbers of fixed count, so that it travels in the same tensor as the measurements."""
    return [float(x) for x in name.encode()[:MACHINE_CHARS].ljust(MACHINE_CHARS, b"\0")]


def _rate(small_s: float, large_s: float) -> float:
    """Returns bytes/s of a transfer of LINK_BYTES, less the latency, which noise must not make a larger part of it."""
    return LINK_BYTES / max(large_s - small_s, large_s / 2)


def _links(group: dist.ProcessGroup | None, world_size: int, device: torch.device) -> tuple[list[float], list[float]]:
    """Measures, as receiver, latency and rate from each rank.

    Pair by pair would need P rounds and would not be what training sees; instead in round s every rank sends to
    `rank + s` and receives from `rank - s`, so each link carries one transfer at a time while all ranks are busy.
    """
    rank = dist.get_rank(group)
    latency_s, rate = [0.0] * world_size, [1e12] * world_size
    for step in range(1, world_size):
        source, target = (rank - step) % world_size, (rank + step) % world_size
        seconds = []
        for num_bytes in (SMALL_BYTES, LINK_BYTES):
            send_counts, recv_counts = [0] * world_size, [0] * world_size
            send_counts[target] = recv_counts[source] = num_bytes // 4
            sent, received = torch.zeros(num_bytes // 4, device=device), torch.zeros(num_bytes // 4, device=device)
            exchange = partial(dist.all_to_all_single, received, sent, recv_counts, send_counts, group=group)
            seconds.append(_best(exchange, device))
        latency_s[source] = seconds[0]
        rate[source] = _rate(*seconds)
    return latency_s, rate


def _gemm_rate(device: torch.device) -> float:
    left, right, out = (torch.ones(size, device=device) for size in ((4096, 128), (128, 128), (4096, 128)))
    return 2.0 * 4096 * 128 * 128 / _best(lambda: torch.mm(left, right, out=out), device)


def _row_rate(device: torch.device) -> float:
    # Larger than caches: rows of a level are.
    rows, out = torch.ones(1 << 23, device=device), torch.ones(1 << 23, device=device)
    return 2.0 * rows.numel() * 4 / _best(lambda: torch.add(rows, 1.0, out=out), device)


def _gather_rate(device: torch.device, width: int, aggregate: Aggregate | None) -> float:
    """Bytes gathered per second by a sum over in-edges of random rows, the inner loop of every layer."""
    num_rows, degree = (1 << 23) // (4 * width), 4
    generator = torch.Generator().manual_seed(0)
    num_edges = num_rows * degree
    sources = torch.randint(0, num_rows, (num_edges,), generator=generator)
    indptr = torch.arange(0, num_edges + 1, degree)
    rows = torch.ones(num_rows, width, device=device)
    if aggregate is not None:
        run = partial(aggregate, indptr.to(device), sources.to(device), rows)
        return num_edges * width * 4 / _best(run, device)
    if device.type == "cpu":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch calls its CSR tensors beta, once
            matrix = torch.sparse_csr_tensor(indptr, sources, torch.ones(num_edges), (num_rows, num_rows))
        seconds = _best(lambda: matrix @ rows, device)
    else:
        on_device = sources.to(device)
        seconds = _best(lambda: rows[on_device].view(num_rows, degree, width).sum(dim=1), device)
    return num_edges * width * 4 / seconds


def _best(action: Callable[[], object], device: torch.device) -> float:
    """Returns the least seconds of a few runs after one to warm up: noise only ever adds."""
    best = float("inf")
    for attempt in range(REPEATS + 1):
        _finish(device)
        start = time.perf_counter()
        action()
        _finish(device)
        if attempt:
            best = min(best, time.perf_counter() - start)
    return max(best, 1e-9)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
