# SPDX-License-Identifier: Apache-2.0
"""What does an exchange of rows cost: over loopback or through shared memory, in fresh memory or in memory used again?

    python -m benchmarks.exchange [--quick] [--ranks P ...] [--json] [--write]

Ranks are processes of this machine, one thread each. For every width the exchange of a random halo runs forward and
backward in three ways, and the bare transports move the same bytes, contiguous and ready. All take turns within every
round, so that a machine that is busy with other things is as busy for each: ratios are medians of the rounds' ratios. A
correctness gate comes first: received rows equal the owners', <Fx, y> = <x, F*y>, and all ways give the same bits.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from rich.table import Table
from torch import Tensor

import dgl_hybrid
from benchmarks.console import make_console
from benchmarks.exchange import fresh_rows
from benchmarks.exchange.ranks import Records, measure_by_ranks
from benchmarks.systems.results import spread
from dgl_hybrid.exchange.communicator import Communicator
from dgl_hybrid.exchange.connect import create_communicator
from dgl_hybrid.exchange.ids import Ownership, request_ids
from dgl_hybrid.exchange.plan import ExchangePlan
from dgl_hybrid.exchange.rows import extend_rows

ROWS_PER_RANK, HALO_SHARE, WARMUP = 50_000, 0.3, 3


def build_plan(communicator: Communicator, shares: Sequence[float] = ()) -> tuple[ExchangePlan, Ownership]:
    """A random halo: every rank reads a share of every other rank's rows, as large as of the rest if not given."""
    offsets = torch.arange(communicator.world_size + 1) * ROWS_PER_RANK
    ownership = Ownership(offsets=offsets, rank=communicator.rank)
    generator = torch.Generator().manual_seed(communicator.rank)
    foreign = torch.arange(ownership.total)[~ownership.is_owned(torch.arange(ownership.total))]
    shares = shares or [HALO_SHARE / max(1, communicator.world_size - 1)] * communicator.world_size
    share = torch.tensor(shares)[foreign // ROWS_PER_RANK]
    halo = foreign[torch.rand(len(foreign), generator=generator) < share]
    routing = request_ids(communicator, ownership, halo)
    plan = ExchangePlan(
        rank=communicator.rank,
        world_size=communicator.world_size,
        layer=1,
        num_rows=ROWS_PER_RANK,
        send_index=routing.send_local,
        send_counts=routing.send_counts,
        recv_counts=routing.recv_counts,
        recv_global=halo,
    )
    plan.validate()
    return plan, ownership


Extend = Callable[[list[Tensor], ExchangePlan, Communicator], list[Tensor]]
WAYS: dict[str, tuple[str, Extend]] = {
    "collective, fresh memory": ("collective", fresh_rows.extend_rows),
    "collective": ("collective", extend_rows),
    "shared memory": ("shared_memory", extend_rows),
}
BEFORE, NOW = "collective, fresh memory", "shared memory"


@dataclass(slots=True)
class Rounds:
    """What one way took, by round."""

    elapsed_s: list[float] = field(default_factory=list)
    """On the slowest rank."""
    cpu_s: list[float] = field(default_factory=list)
    """Of all ranks together, in their code and in the kernel's for them."""
    faults: list[float] = field(default_factory=list)
    """Pages that the kernel had to find for any rank."""

    def add(self, communicator: Communicator, run: Callable[[], object]) -> None:
        communicator.barrier()
        before = (time.perf_counter(), time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
        run()
        after = (time.perf_counter(), time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
        by_rank = communicator.gather_floats([end - start for start, end in zip(before, after, strict=True)])
        elapsed_s, cpu_s, faults = zip(*by_rank, strict=True)
        self.elapsed_s.append(max(elapsed_s))
        self.cpu_s.append(sum(cpu_s))
        self.faults.append(sum(faults))


def gradient_step(
    extend: Extend, x: Tensor, gradient: Tensor, plan: ExchangePlan, communicator: Communicator
) -> tuple[Tensor, Tensor]:
    x = x.detach().requires_grad_()
    (extended,) = extend([x], plan, communicator)
    extended.backward(gradient)
    assert x.grad is not None
    return extended.detach(), x.grad


def check(
    plan: ExchangePlan,
    ownership: Ownership,
    communicators: Mapping[str, Communicator],
    ways: Mapping[str, tuple[str, Extend]],
) -> None:
    """Raises unless received rows are the owners', backward is the adjoint of forward, and all ways agree bitwise."""
    generator = torch.Generator().manual_seed(plan.rank)
    x = torch.randn(plan.num_rows, 3, dtype=torch.float64, generator=generator)
    y = torch.randn(plan.num_rows + plan.num_received, 3, dtype=torch.float64, generator=generator)
    ids, results = ownership.owned().double()[:, None], []
    for transport, extend in ways.values():
        communicator = communicators[transport]
        (received,) = extend([ids], plan, communicator)
        assert torch.equal(received[plan.num_rows :, 0].long(), plan.recv_global)
        extended, grad = gradient_step(extend, x, y, plan, communicator)
        left, right = communicator.sum_(torch.stack([(extended * y).sum(), (grad * x).sum()])).tolist()
        assert abs(left - right) <= 1e-9 * abs(left), (left, right)
        results.append((extended, grad))
    for extended, grad in results[1:]:
        assert torch.equal(extended, results[0][0])
        assert torch.equal(grad, results[0][1])


def measure(widths: Sequence[int], rounds: int) -> Records:
    """One rank. Collective."""
    communicators = {name: create_communicator(transport=name) for name in ("collective", "shared_memory")}
    common = communicators["collective"]
    plan, ownership = build_plan(common)
    check(plan, ownership, communicators, WAYS)
    records: Records = []
    for width in widths:
        x, gradient = torch.randn(plan.num_rows, width), torch.randn(plan.num_rows + plan.num_received, width)
        packed, returned = x.index_select(0, plan.send_index), gradient[plan.num_rows :]
        runs: dict[str, Callable[[], object]] = {
            name: partial(gradient_step, extend, x, gradient, plan, communicators[transport])
            for name, (transport, extend) in WAYS.items()
        }
        for name, communicator in communicators.items():
            runs[f"bare {name}"] = partial(move_both_ways, communicator, packed, returned, plan)
        taken = {name: Rounds() for name in runs}
        for _ in range(WARMUP + rounds):
            for name, run in runs.items():
                taken[name].add(common, run)
        sent = [row[0] for row in common.gather_ints([(packed.numel() + returned.numel()) * packed.element_size()])]
        records.append(
            {
                "bench": "exchange",
                "world_size": common.world_size,
                "width": width,
                "dtype": "float32",
                "unit": "ms",
                "ways": {name: summary(rounds_of) for name, rounds_of in taken.items()},
                "faster": ratio(taken[BEFORE].elapsed_s, taken[NOW].elapsed_s),
                "faster_by_buffers": ratio(taken[BEFORE].elapsed_s, taken["collective"].elapsed_s),
                "faster_by_transport": ratio(taken["collective"].elapsed_s, taken[NOW].elapsed_s),
                "less_cpu": ratio(taken[BEFORE].cpu_s, taken[NOW].cpu_s),
                "bare_faster": ratio(taken["bare collective"].elapsed_s, taken["bare shared_memory"].elapsed_s),
                "of_bare": ratio(taken[NOW].elapsed_s, taken["bare shared_memory"].elapsed_s),
                "bytes_sent_max_rank": max(sent),
                "iters": rounds,
                "warmup": WARMUP,
                "load": os.getloadavg()[0],
                "versions": {"dgl_hybrid": dgl_hybrid.__version__, "torch": torch.__version__},
                "time": time.strftime("%Y-%m-%dT%H:%M:%S"),
            }
        )
    return records


def move_both_ways(communicator: Communicator, packed: Tensor, returned: Tensor, plan: ExchangePlan) -> None:
    communicator.exchange(packed, plan.send_counts, plan.recv_counts)
    communicator.exchange(returned, plan.recv_counts, plan.send_counts)


def ratio(ones: list[float], others: list[float]) -> float:
    """Median over rounds of one time by the other."""
    return statistics.median(one / other for one, other in zip(ones[WARMUP:], others[WARMUP:], strict=True))


def summary(rounds: Rounds) -> dict[str, float]:
    elapsed_s = rounds.elapsed_s[WARMUP:]
    return {
        **{name: value * 1e3 for name, value in spread(elapsed_s).items()},
        "cpu_p50": statistics.median(rounds.cpu_s[WARMUP:]) * 1e3,
        "faults_p50": statistics.median(rounds.faults[WARMUP:]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.exchange")
    parser.add_argument("--quick", action="store_true", help="2 and 3 ranks, fewer rounds")
    parser.add_argument("--ranks", type=int, nargs="+", metavar="P", help="other numbers of ranks")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    parser.add_argument("--write", action="store_true", help="append to results.jsonl")
    args = parser.parse_args()
    worlds, rounds = ([2, 3], 7) if args.quick else ([2, 3, 4], 25)
    worlds = args.ranks or worlds
    widths = [16, 64, 256]
    records: Records = []
    for world_size in worlds:
        records += measure_by_ranks(measure, world_size, widths, rounds)
    table = Table(
        "ranks", "width", *WAYS, "faster", "by buffers", "by transport", "CPU less", "pages faulted", "of bare"
    )
    for r in records:
        ways = [r["ways"][name] for name in WAYS]
        table.add_row(
            str(r["world_size"]),
            str(r["width"]),
            *(f"{way['p50']:.1f} ms" for way in ways),
            *(f"{r[key]:.2f}" for key in ("faster", "faster_by_buffers", "faster_by_transport", "less_cpu")),
            f"{ways[0]['faults_p50']:.0f} → {ways[-1]['faults_p50']:.0f}",
            f"{r['of_bare']:.2f}",
        )
    make_console(to_stderr=args.json).print(table)
    if args.write:
        with (Path(__file__).parent / "results.jsonl").open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)
    if args.json:
        print(json.dumps({"faster_min": min(r["faster"] for r in records), "cells": records}))
