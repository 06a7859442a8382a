# SPDX-License-Identifier: Apache-2.0
"""How far is an exchange of rows from the rate of the transport beneath it?

    python -m benchmarks.exchange [--quick] [--json]

Ranks are processes of this machine over loopback, one thread each. For every width the exchange of a random halo runs
forward and backward, and is compared with (1) the same bytes through the bare collective, contiguous and ready, and (2)
its parts: pack, collective, unpack. A correctness gate comes first: received rows equal the owners', and <Fx, y> =
<x, F*y>. One JSON line per cell is appended to `results.jsonl` beside this file with `--write`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table
from torch import Tensor

import dgl_hybrid
from dgl_hybrid.exchange.communicator import Communicator, create_communicator
from dgl_hybrid.exchange.ids import Ownership, request_ids
from dgl_hybrid.exchange.plan import ExchangePlan
from dgl_hybrid.exchange.rows import extend_rows

ROWS_PER_RANK, HALO_SHARE, WARMUP = 50_000, 0.3, 3


def build_plan(communicator: Communicator) -> tuple[ExchangePlan, Ownership]:
    """A random halo: every rank reads a share of every other rank's rows."""
    offsets = torch.arange(communicator.world_size + 1) * ROWS_PER_RANK
    ownership = Ownership(offsets=offsets, rank=communicator.rank)
    generator = torch.Generator().manual_seed(communicator.rank)
    foreign = torch.arange(ownership.total)[~ownership.is_owned(torch.arange(ownership.total))]
    share = HALO_SHARE / max(1, communicator.world_size - 1)
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


def check(communicator: Communicator, plan: ExchangePlan, ownership: Ownership) -> None:
    """Raises unless received rows are the owners' and backward is the adjoint of forward."""
    x = torch.randn(plan.num_rows, 3, dtype=torch.float64, requires_grad=True)
    ids = ownership.owned().double()[:, None]
    (received,) = extend_rows([ids], plan, communicator)
    assert torch.equal(received[plan.num_rows :, 0].long(), plan.recv_global)
    (extended,) = extend_rows([x], plan, communicator)
    y = torch.randn_like(extended)
    extended.backward(y)
    assert x.grad is not None
    left, right = communicator.sum_(torch.stack([(extended * y).sum().detach(), (x.grad * x).sum().detach()])).tolist()
    assert abs(left - right) <= 1e-9 * abs(left), (left, right)


def time_s(communicator: Communicator, run: Callable[[], object], rounds: int) -> list[float]:
    """Seconds of each round on the slowest rank."""
    times = []
    for _ in range(WARMUP + rounds):
        communicator.barrier()
        start = time.perf_counter()
        run()
        times.append(max(row[0] for row in communicator.gather_floats([time.perf_counter() - start])))
    return times[WARMUP:]


def measure(rank: int, world_size: int, rendezvous: str, widths: list[int], rounds: int, out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size)
    communicator = create_communicator()
    plan, ownership = build_plan(communicator)
    check(communicator, plan, ownership)
    records: list[dict[str, Any]] = []
    for width in widths:
        x = torch.randn(plan.num_rows, width)
        packed = x.index_select(0, plan.send_index)
        gradient = torch.randn(plan.num_rows + plan.num_received, width)

        def forward_backward(x: Tensor = x, gradient: Tensor = gradient) -> None:
            (extended,) = extend_rows([x.requires_grad_()], plan, communicator)
            extended.backward(gradient)
            x.grad = None

        whole = time_s(communicator, forward_backward, rounds)
        bare = time_s(
            communicator,
            lambda packed=packed: (
                communicator.exchange(packed, plan.send_counts, plan.recv_counts),
                communicator.exchange(packed[: plan.num_received], plan.recv_counts, plan.send_counts)
                if plan.num_received <= len(packed)
                else communicator.exchange(
                    packed.new_zeros(plan.num_received, packed.shape[1]), plan.recv_counts, plan.send_counts
                ),
            ),
            rounds,
        )
        pack = time_s(communicator, lambda x=x: x.detach().index_select(0, plan.send_index), rounds)
        sent = [row[0] for row in communicator.gather_ints([2 * packed.numel() * packed.element_size()])]
        records.append(
            {
                "bench": "exchange",
                "world_size": world_size,
                "width": width,
                "dtype": "float32",
                "unit": "ms",
                "p20": statistics.quantiles(whole, n=5)[0] * 1e3,
                "p50": statistics.median(whole) * 1e3,
                "p80": statistics.quantiles(whole, n=5)[-1] * 1e3,
                "bare_collective_p50": statistics.median(bare) * 1e3,
                "pack_p50": statistics.median(pack) * 1e3,
                "of_bare": statistics.median(whole) / statistics.median(bare),
                "bytes_sent_max_rank": max(sent),
                "iters": rounds,
                "warmup": WARMUP,
                "versions": {"dgl_hybrid": dgl_hybrid.__version__, "torch": torch.__version__},
                "time": time.strftime("%Y-%m-%dT%H:%M:%S"),
            }
        )
    if rank == 0:
        Path(out).write_text("\n".join(json.dumps(record) for record in records) + "\n", "utf-8")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.exchange")
    parser.add_argument("--quick", action="store_true", help="2 and 3 ranks, fewer rounds")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    parser.add_argument("--write", action="store_true", help="append to results.jsonl")
    args = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    worlds, rounds = ([2, 3], 7) if args.quick else ([2, 3, 4], 25)
    widths = [16, 64, 256]
    records = []
    for world_size in worlds:
        with tempfile.TemporaryDirectory() as folder:
            out = f"{folder}/records"
            mp.spawn(  # type: ignore[no-untyped-call]
                measure, (world_size, f"{folder}/rendezvous", widths, rounds, out), nprocs=world_size
            )
            records += [json.loads(line) for line in Path(out).read_text("utf-8").splitlines()]
    table = Table("ranks", "width", "forward + backward", "bare collective", "ratio", "pack", "sent by a rank")
    for r in records:
        table.add_row(
            str(r["world_size"]),
            str(r["width"]),
            f"{r['p50']:.1f} ms ({r['p20']:.1f} to {r['p80']:.1f})",
            f"{r['bare_collective_p50']:.1f} ms",
            f"{r['of_bare']:.2f}",
            f"{r['pack_p50']:.1f} ms",
            f"{r['bytes_sent_max_rank'] / 1e6:.1f} MB",
        )
    Console(file=sys.stderr if args.json else sys.stdout).print(table)
    if args.write:
        with (Path(__file__).parent / "results.jsonl").open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)
    if args.json:
        print(json.dumps({"of_bare_max": max(r["of_bare"] for r in records), "cells": records}))
