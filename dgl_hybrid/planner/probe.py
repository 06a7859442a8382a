# SPDX-License-Identifier: Apache-2.0
"""Measures this cluster in about a second: device rates, and links with all ranks at once, as training uses them."""

from __future__ import annotations

import datetime
import platform
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from .topology import Topology

GATHER_WIDTHS = (16, 64, 256)
SMALL_BYTES = 64
LINK_BYTES = 1 << 21
REPEATS = 3
NOISE_OF_LINKS = 0.85
"""Transfers of all pairs at once that reach this share of the rates of pairs are taken to reach all of it."""
MACHINE_CHARS = 64
ROW_ELEMENTS, GATHERED_ELEMENTS, GEMM_ROWS = 1 << 23, 1 << 21, 1 << 12
"""Of one operand of row-local work, which is larger than caches, since rows of a level are; of the rows that a sum
gathers from; of a product."""
GPU_FACTORS = (1 << 3, 1 << 4, 1 << 5)
"""How many times as many on a GPU, whose caches are larger, and which does 4096 rows of a product in less than it takes
to launch it; where it has `ROOMY_BYTES` free, since a GPU that is nearly full is to be probed, too."""
ROOMY_BYTES = 8 << 30
"""Sixteen times what the largest of these takes: ranks that share a GPU probe it at once."""

Aggregate = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(indptr (N + 1,), sources (E,), rows (N, F)) -> (N, F): the sum of source rows over each row's in-edges."""


class Links(Protocol):
    """What ranks exchange tensors over: what `Communicator.lend` returns, or the default process group."""

    rank: int
    world_size: int

    @property
    def device(self) -> torch.device: ...

    @property
    def may_share_links(self) -> bool:
        """Whether several ranks of a host may send to other hosts by one link. Alike on all ranks."""

    def all_to_all(self, received: Tensor, send: Tensor, recv_counts: list[int], send_counts: list[int]) -> None: ...

    def all_reduce(self, tensor: Tensor) -> None: ...

    def all_gather(self, tensor: Tensor) -> list[Tensor]: ...


class Alone:
    """A world of one rank, also where the process belongs to a group of more."""

    rank, world_size, may_share_links = 0, 1, False
    device = torch.device("cpu")

    def all_to_all(self, received: Tensor, send: Tensor, recv_counts: list[int], send_counts: list[int]) -> None:
        """Keeps what it sends."""
        received.copy_(send)

    def all_reduce(self, tensor: Tensor) -> None:
        """Leaves it as it is."""

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Returns it alone."""
        return [tensor]


class _DefaultGroup:
    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.may_share_links = False  # nobody knows

    @property
    def device(self) -> torch.device:
        is_nccl = "nccl" in str(dist.get_backend())
        return torch.device("cuda", torch.cuda.current_device()) if is_nccl else torch.device("cpu")

    def all_to_all(self, received: Tensor, send: Tensor, recv_counts: list[int], send_counts: list[int]) -> None:
        dist.all_to_all_single(received, send, recv_counts, send_counts)

    def all_reduce(self, tensor: Tensor) -> None:
        dist.all_reduce(tensor)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        gathered = [torch.zeros_like(tensor) for _ in range(self.world_size)]
        dist.all_gather(gathered, tensor)
        return gathered


def probe(
    links: Links | None = None,
    *,
    device: str | torch.device = "cpu",
    aggregate: Aggregate | None = None,
) -> Topology:
    """Measures device and link rates. Collective over `links` (or the default group); alone without torch.distributed.

    All ranks measure at once: on one host they share memory bandwidth in training too. The slowest rank's device rates
    count for all, so that every rank plans with the same numbers.

    Args:
        links: between the ranks to probe, or `Alone()`; None: the default group if there is one.
        device: where the model runs; links are probed with tensors there if the backend carries them, else on the CPU.
        aggregate: sums rows over in-edges as training will; None: a plain torch product, slower than DGL's kernel.

    Returns:
        The same topology on every rank.
    """
    device = torch.device(device)
    if links is None and dist.is_available() and dist.is_initialized():
        links = _DefaultGroup()
    if links is not None:
        links.all_reduce(_zeros(1, links.device))  # all begin together
    rates = [
        _gemm_rate(device),
        _row_rate(device),
        *(_gather_rate(device, width, aggregate) for width in GATHER_WIDTHS),
    ]
    if links is None or links.world_size == 1:
        return _topology(rates, [[0.0]], [[1e12]], 0.0, 1e12, device, time.time(), _machine(device))
    world_size, link_device = links.world_size, links.device
    latency_s, bandwidth = _measure_links(links)
    tensors = [_zeros(num_bytes // 4, link_device) for num_bytes in (SMALL_BYTES, LINK_BYTES)]
    small_s, large_s = (_best(partial(links.all_reduce, x), link_device) for x in tensors)
    mine = [*rates, small_s, _rate(small_s, large_s), *latency_s, *bandwidth, time.time(), *_encode(_machine(device))]
    table = torch.stack(links.all_gather(torch.tensor(mine, dtype=torch.float64, device=link_device)))
    # Every rank has the same table by now; taking rank 0's makes that true whatever the backend does. As a sum:
    # ranks that gathered it from each other would hold it once for each of them.
    table = table if links.rank == 0 else torch.zeros_like(table)
    links.all_reduce(table)
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


def _measure_links(links: Links) -> tuple[list[float], list[float]]:
    """Measures, as receiver, latency and rate from each rank.

    Pair by pair would need P rounds and would not be what training sees; instead in round s every rank sends to
    `rank + s` and receives from `rank - s`, so each link carries one transfer at a time while all ranks are busy.

    Ranks that share a host share its link, and in most rounds only some of them use it, while in training each one
    exchanges with all at once. Where that may be, it is measured last; if it takes longer than rates of pairs say, they
    are as much lower. (Within one host it would tell of noise: a probe is a few milliseconds there.)
    """
    rank, world_size, device = links.rank, links.world_size, links.device
    latency_s, rate = [0.0] * world_size, [1e12] * world_size
    for step in range(1, world_size):
        source, target = (rank - step) % world_size, (rank + step) % world_size
        seconds = []
        for num_bytes in (SMALL_BYTES, LINK_BYTES):
            send_counts, recv_counts = [0] * world_size, [0] * world_size
            send_counts[target] = recv_counts[source] = num_bytes // 4
            sent, received = (_zeros(num_bytes // 4, device) for _ in range(2))
            exchange = partial(links.all_to_all, received, sent, recv_counts, send_counts)
            seconds.append(_best(exchange, device))
        latency_s[source] = seconds[0]
        rate[source] = _rate(*seconds)
    if world_size > 2 and links.may_share_links:
        share = _share_together(links, latency_s, rate)
        rate = [x * share if peer != rank else x for peer, x in enumerate(rate)]
    return latency_s, rate


def _share_together(links: Links, latency_s: list[float], rate: list[float]) -> float:
    """Returns what is left of the rates of pairs when all transfer at once; 1, but for what noise may explain."""
    num_rows = max(LINK_BYTES // 4 // (links.world_size - 1), 1)
    counts = [num_rows if peer != links.rank else 0 for peer in range(links.world_size)]
    sent, received = (_zeros(sum(counts), links.device) for _ in range(2))
    measured_s = _best(partial(links.all_to_all, received, sent, counts, counts), links.device)
    expected_s = max(latency_s) + sum(4 * count / x for count, x in zip(counts, rate, strict=True))
    share = expected_s / measured_s
    return share if share < NOISE_OF_LINKS else 1.0


def _zeros(num_elements: int, device: torch.device) -> Tensor:
    """As many bytes as are counted, whatever a script has made the default dtype."""
    return torch.zeros(num_elements, dtype=torch.float32, device=device)


def _ones(size: int | tuple[int, ...], device: torch.device) -> Tensor:
    """Memory that was written to: what was not may be one page of zeros."""
    return torch.ones(size, dtype=torch.float32, device=device)


def _factors(device: torch.device) -> tuple[int, int, int]:
    is_roomy = device.type == "cuda" and torch.cuda.mem_get_info(device)[0] >= ROOMY_BYTES
    return GPU_FACTORS if is_roomy else (1, 1, 1)


def _gemm_rate(device: torch.device) -> float:
    num_rows = GEMM_ROWS * _factors(device)[2]
    left, right, out = (_ones(size, device) for size in ((num_rows, 128), (128, 128), (num_rows, 128)))
    return 2.0 * num_rows * 128 * 128 / _best(lambda: torch.mm(left, right, out=out), device)


def _row_rate(device: torch.device) -> float:
    num_elements = ROW_ELEMENTS * _factors(device)[0]
    rows, out = (_ones(num_elements, device) for _ in range(2))
    return 2.0 * rows.numel() * 4 / _best(lambda: torch.add(rows, 1.0, out=out), device)


def _gather_rate(device: torch.device, width: int, aggregate: Aggregate | None) -> float:
    """Bytes gathered per second by a sum over in-edges of random rows, the inner loop of every layer."""
    num_rows, degree = GATHERED_ELEMENTS * _factors(device)[1] // width, 4
    generator = torch.Generator().manual_seed(0)
    num_edges = num_rows * degree
    sources = torch.randint(0, num_rows, (num_edges,), generator=generator)
    indptr = torch.arange(0, num_edges + 1, degree)
    rows = _ones((num_rows, width), device)
    if aggregate is not None:
        run = partial(aggregate, indptr.to(device), sources.to(device), rows)
        return num_edges * width * 4 / _best(run, device)
    if device.type == "cpu":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch calls its CSR tensors beta, once
            matrix = torch.sparse_csr_tensor(indptr, sources, _ones(num_edges, device), (num_rows, num_rows))
        seconds = _best(lambda: matrix @ rows, device)
    else:
        on_device = sources.to(device)
        seconds = _best(lambda: rows[on_device].view(num_rows, degree, width).sum(dim=1), device)
    return num_edges * width * 4 / seconds


def _best(action: Callable[[], object], device: torch.device) -> float:
    """Returns the least seconds of a few runs after one to warm up: noise only ever adds."""
    best = float("inf")
    for attempt in range(REPEATS + 1):
        wait_for_device(device)
        start = time.perf_counter()
        action()
        wait_for_device(device)
        if attempt:
            best = min(best, time.perf_counter() - start)
    return max(best, 1e-9)


def wait_for_device(device: torch.device) -> None:
    """Returns when a device has done what this process gave it: at once on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
