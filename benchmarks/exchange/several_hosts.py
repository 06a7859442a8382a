# SPDX-License-Identifier: Apache-2.0
"""What does an exchange gain where several ranks share each of several hosts: memory within them, links between them?

    python -m benchmarks.exchange.several_hosts [--hosts 2] [--ranks-per-host 2] [--mbit 1000 200] [--json]

Hosts are network namespaces (`benchmarks/emulated_network.py`, needs root). Every rank holds 50,000 float32 rows and
reads 15,000 of others, as in `benchmarks.exchange`, nine in ten of its own host (`--near`): trainers that share one of
DistDGL's partitions divide it as it comes, while METIS keeps partitions apart. Two ways take turns within every round:
everything over the process group, and rows between ranks of one host through its memory (`exchange/far_rows.py`), what
loaders do by default. First a check: received rows are the owners', backward is the adjoint of forward, and both ways
give the same bits.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table

from benchmarks.console import make_console
from benchmarks.emulated_network import INTERFACE, EmulatedNetwork, why_unavailable
from benchmarks.exchange.run import HALO_SHARE, WARMUP, Rounds, build_plan, check, gradient_step, ratio
from dgl_hybrid.exchange.connect import create_communicator
from dgl_hybrid.exchange.rows import extend_rows
from dgl_hybrid.partition.signals import ending_signals_raise

WAYS = {"collective": ("collective", extend_rows), "mixed": ("mixed", extend_rows)}
TIMEOUT_S = 600.0


def work(ranks_per_host: int, near: float, widths: list[int], rounds: int, out: str) -> None:
    """One rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    communicators = {"collective": create_communicator(transport="collective"), "mixed": create_communicator()}
    assert communicators["mixed"].backend == "mixed", communicators["mixed"].backend
    common = communicators["collective"]
    mates, others = max(ranks_per_host - 1, 1), max(common.world_size - ranks_per_host, 1)
    is_near = [rank // ranks_per_host == common.rank // ranks_per_host for rank in range(common.world_size)]
    shares = [HALO_SHARE * (near / mates if one else (1.0 - near) / others) for one in is_near]
    plan, ownership = build_plan(common, shares)
    check(plan, ownership, communicators, WAYS)
    records: list[dict[str, Any]] = []
    for width in widths:
        x, gradient = torch.randn(plan.num_rows, width), torch.randn(plan.num_rows + plan.num_received, width)
        taken = {name: Rounds() for name in WAYS}
        for _ in range(WARMUP + rounds):
            for name, communicator in communicators.items():
                taken[name].add(common, partial(gradient_step, extend_rows, x, gradient, plan, communicator))
        records.append(
            {
                "width": width,
                "faster": ratio(taken["collective"].elapsed_s, taken["mixed"].elapsed_s),
                "less_cpu": ratio(taken["collective"].cpu_s, taken["mixed"].cpu_s),
                **{f"{name}_ms": 1e3 * sorted(of.elapsed_s[WARMUP:])[rounds // 2] for name, of in taken.items()},
            }
        )
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(records), encoding="utf-8")
    dist.destroy_process_group()


@ending_signals_raise()  # through the finally clauses, which end ranks and hosts
def measure(args: argparse.Namespace, rate_bits_per_s: int) -> list[Any]:
    """Runs the ranks on emulated hosts, numbered host by host."""
    ranks_per_host = args.ranks_per_host
    world_size = args.hosts * ranks_per_host
    with (
        EmulatedNetwork(num_hosts=args.hosts) as network,
        tempfile.TemporaryDirectory(prefix="several_hosts_") as folder,
    ):
        network.shape(rate_bits_per_s)
        out = Path(folder) / "records.json"
        common = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": INTERFACE}
        common |= {"MASTER_ADDR": network.hosts[0].address, "MASTER_PORT": "29500", "WORLD_SIZE": str(world_size)}
        ranks = [
            subprocess.Popen(
                [
                    *network.hosts[rank // ranks_per_host].prefix,
                    *(sys.executable, "-m", "benchmarks.exchange.several_hosts", "--rank-of", str(out)),
                    *("--widths", *map(str, args.widths), "--rounds", str(args.rounds)),
                    *("--near", str(args.near), "--ranks-per-host", str(ranks_per_host)),
                ],
                env={**common, "RANK": str(rank)},
            )
            for rank in range(world_size)
        ]
        try:
            codes = [rank.wait(TIMEOUT_S) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        if any(codes):
            raise RuntimeError(f"ranks ended with {codes}")
        records: list[Any] = json.loads(out.read_text(encoding="utf-8"))
        return records


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.exchange.several_hosts")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks-per-host", type=int, default=2)
    parser.add_argument("--near", type=float, default=0.9, help="share of what is read, of ranks of the same host")
    parser.add_argument("--mbit", type=int, nargs="+", default=[1000, 200], help="of every host's link")
    parser.add_argument("--widths", type=int, nargs="+", default=[16, 64, 256], help="of rows")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.rank_of:
        work(args.ranks_per_host, args.near, args.widths, args.rounds, args.rank_of)
        return
    why = why_unavailable()
    if why is not None:
        print(f"hosts cannot be emulated here: {why}", file=sys.stderr)
        sys.exit(1)
    found = {mbit: measure(args, mbit * 1_000_000) for mbit in args.mbit}
    title = f"{args.hosts} hosts of {args.ranks_per_host} ranks, {args.near:.0%} of what is read is near"
    table = Table(title=f"{title}; an exchange forward and backward")
    for name in ("Mb/s", "width", "collective, ms", "mixed, ms", "faster", "less CPU time"):
        table.add_column(name)
    for mbit, records in found.items():
        for one in records:
            numbers = (f"{one[name]:.3g}" for name in ("collective_ms", "mixed_ms", "faster", "less_cpu"))
            table.add_row(str(mbit), str(one["width"]), *numbers)
    make_console(to_stderr=args.json).print(table)
    if args.json:
        print(
            json.dumps(
                {"hosts": args.hosts, "ranks_per_host": args.ranks_per_host, "near": args.near, "by_mbit": found}
            )
        )


if __name__ == "__main__":
    main()
