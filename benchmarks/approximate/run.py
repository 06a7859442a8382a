# SPDX-License-Identifier: Apache-2.0
"""What do approximate exchanges save on a slow network, and what do they cost in accuracy?

    python -m benchmarks.approximate [--quick] [--ranks P] [--mbit RATE] [--epochs N] [--seeds K] [--json] [--write]

The same model trains on the same parts with exact rows, and with every approximation, each run from the same weights.
Everything is communicated (strategy depcomm), so that all runs exchange the same rows. Each rank is a host of an
emulated network (`benchmarks/emulated_network.py`); where none can be made, ranks talk over loopback and times say
nothing of a network. Evaluations are exact and outside the times.

Before anything is reported: the first epoch of stale rows gave the exact loss, that of narrower rows one near to it,
and codecs sent as few bytes as their definition says.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

import dgl_hybrid
from benchmarks.console import make_console
from benchmarks.emulated_network import INTERFACE, EmulatedNetwork, why_unavailable
from benchmarks.systems.graphs import GraphError, PreparedGraph, prepare
from benchmarks.systems.results import spread
from dgl_hybrid.exchange.approximate import APPROXIMATIONS, describe_approximation
from dgl_hybrid.partition.signals import ending_signals_raise
from dgl_hybrid.training.config import ModelConfig, StrategyConfig, TrainConfig, TrainJob
from dgl_hybrid.training.report import TrainReport

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A graph and what is trained on it."""

    graph: str
    scale: float
    """Share of the vertices that `benchmarks/systems/graphs.py` generates."""
    model: ModelConfig
    epochs: int


CASES = (
    Case(graph="products", scale=0.02, model=ModelConfig(model="sage", num_layers=3, hidden=128), epochs=50),
    Case(graph="debian-deps", scale=1.0, model=ModelConfig(model="sage", num_layers=2, hidden=64), epochs=20),
)
QUICK = (replace(CASES[0], scale=0.01, epochs=12),)
BEGIN, END = "<!-- written by --write, do not edit below -->", "<!-- end -->"
RUN_TIMEOUT_S = 600.0


def make_jobs(case: Case, prepared: PreparedGraph, seeds: int, epochs: int) -> list[TrainJob]:
    """All runs on one graph, approximations in turns within each seed."""
    return [
        TrainJob(
            part_config=prepared.part_config,
            dataset=case.graph,
            num_classes=prepared.num_classes or None,
            model=case.model,
            strategy=StrategyConfig(strategy="depcomm"),
            training=TrainConfig(epochs=epochs, eval_every=max(1, epochs // 6), seed=seed, approximate=name),
        )
        for seed in range(seeds)
        for name in (None, *APPROXIMATIONS)
    ]


def run_jobs(jobs: Sequence[TrainJob], ranks: int, network: EmulatedNetwork | None, folder: Path) -> list[TrainReport]:
    """Trains them on `ranks` processes, one thread each, on hosts of the network or over loopback."""
    folder.mkdir(parents=True)
    (folder / "jobs.json").write_text(json.dumps([job.to_json() for job in jobs]), "utf-8")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    processes = []
    for rank in range(ranks):
        environment = os.environ | {
            "RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_RANK": "0",
            "MASTER_ADDR": "127.0.0.1" if network is None else network.hosts[0].address,
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "lo" if network is None else INTERFACE,
            "OMP_NUM_THREADS": "1",
        }
        prefix = () if network is None else network.hosts[rank].prefix
        command = [*prefix, sys.executable, "-m", "benchmarks.approximate.worker", str(folder)]
        with (folder / f"rank{rank}.log").open("wb") as log:
            processes.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log))
    deadline = time.monotonic() + RUN_TIMEOUT_S
    try:
        is_running = True
        while is_running:
            is_running = any(process.poll() is None for process in processes)
            # Also after the last has ended: they may all have died between two looks.
            failed = [rank for rank, process in enumerate(processes) if process.poll()]
            if failed or time.monotonic() > deadline:
                said = (folder / f"rank{failed[0] if failed else 0}.log").read_text("utf-8", "replace")
                raise RuntimeError(f"rank {failed or 'none'} failed, or {RUN_TIMEOUT_S:g} s are over:\n{said[-2000:]}")
            time.sleep(0.05)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [TrainReport.from_json(report) for report in json.loads((folder / "reports.json").read_text("utf-8"))]


def check(reports: Sequence[TrainReport]) -> None:
    """Raises unless the runs of one graph and seed are what they should be."""
    exact = reports[0]
    assert exact.approximate is None
    # Exact and narrower rows may be partial sums, where these are fewer; stale ones are all of the plain rows.
    (plain,) = (report.epochs[-1].bytes_sent for report in reports if report.approximate == "stale")
    for report in reports[1:]:
        name = str(report.approximate)
        first, expected = report.epochs[0].loss, exact.epochs[0].loss
        bound = 1e-5 if name == "stale" else 2e-2
        if abs(first - expected) > bound * expected:
            raise AssertionError(f"{name}: the first epoch's loss is {first}, exactly it is {expected}")
        share = report.epochs[-1].bytes_sent / (plain if "stale" in name else exact.epochs[-1].bytes_sent)
        least, most = {"bf16": (0.5, 0.5), "int8": (0.25, 0.35)}.get(name.split("+")[-1], (1.0, 1.0))
        if not least <= share <= most:
            raise AssertionError(f"{name} sent {share:.3f} of the bytes that exact numbers would take")


def record_of(
    report: TrainReport, case: Case, prepared: PreparedGraph, seed: int, network: str, rate: float | None
) -> dict[str, Any]:
    times_ms = [1e3 * epoch.time_s for epoch in report.steady_epochs()]
    return {
        "bench": "approximate",
        "variant": report.approximate,
        "exactness": report.exactness,
        "dataset": case.graph,
        "num_nodes": prepared.num_nodes,
        "num_edges": prepared.num_edges,
        "feat_dim": prepared.feat_dim,
        "world_size": report.ranks,
        "backend": "gloo",
        "network": network,
        "measured_bits_per_s": rate,
        "device": "cpu",
        "dtype": report.dtype,
        "seed": seed,
        "metric": "epoch_time",
        "unit": "ms",
        **spread(times_ms),
        "exchange_ms": 1e3 * statistics.mean(e.exchange_s + e.wait_s for e in report.steady_epochs()),
        "iters": len(times_ms),
        "bytes_per_epoch": report.epochs[-1].bytes_sent,
        "epochs": len(report.epochs),
        "final_loss": report.epochs[-1].loss,
        "test_accuracy_final": report.final.test,
        "test_accuracy_best_val": report.best.test,
        "config": asdict(case.model),
        "load": os.getloadavg()[0],
        "versions": {"dgl_hybrid": dgl_hybrid.__version__, "torch": torch.__version__},
        "time": time.strftime("%Y-%m-%dT%H:%M:%S"),
    }


HEAD = ("graph, epochs", "rows", "sent per epoch", "of exact", "epoch", "faster", "exchanging", "loss", "test accuracy")


def rows_of(records: Sequence[dict[str, Any]]) -> list[list[str]]:
    """One row for each graph and variant: medians over seeds, accuracies with their range."""
    rows = []
    for graph in dict.fromkeys(r["dataset"] for r in records):
        for name in (None, *APPROXIMATIONS):
            chosen = [r for r in records if r["dataset"] == graph and r["variant"] == name]
            exact = [r for r in records if r["dataset"] == graph and r["variant"] is None]
            faster = statistics.median(e["p50"] / r["p50"] for e, r in zip(exact, chosen, strict=True))
            accuracies = [100 * r["test_accuracy_final"] for r in chosen]
            rows.append(
                [
                    f"{graph}, {chosen[0]['epochs']}",
                    describe_approximation(name),
                    f"{chosen[0]['bytes_per_epoch'] / 1e6:.2f} MB",
                    f"{chosen[0]['bytes_per_epoch'] / exact[0]['bytes_per_epoch']:.0%}",
                    f"{statistics.median(r['p50'] for r in chosen):.0f} ms",
                    f"{faster:.2f}",
                    f"{statistics.median(r['exchange_ms'] for r in chosen):.0f} ms",
                    f"{statistics.mean(r['final_loss'] for r in chosen):.4f}",
                    f"{statistics.mean(accuracies):.2f} % ({min(accuracies):.2f} to {max(accuracies):.2f})",
                ]
            )
    return rows


def write(records: Sequence[dict[str, Any]]) -> None:
    """Appends the measurements to results.jsonl and puts their table into the README."""
    here = Path(__file__).parent
    with (here / "results.jsonl").open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
    text = (here / "README.md").read_text("utf-8")
    head, tail = text.split(BEGIN)[0], text.split(END)[1]
    first = records[0]
    lines = [
        f"{first['world_size']} ranks, one thread each, {first['network']}, "
        f"{len({r['seed'] for r in records})} seeds, PyTorch {first['versions']['torch']}, {first['time'][:10]}, load "
        f"{max(r['load'] for r in records):.0f}.",
        "",
        *("| " + " | ".join(row) + " |" for row in (HEAD, ["---"] * len(HEAD), *rows_of(records))),
    ]
    (here / "README.md").write_text(f"{head}{BEGIN}\n\n" + "\n".join(lines) + f"\n\n{END}{tail}", "utf-8")


@ending_signals_raise()  # through the finally clauses, which end what was started
def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.approximate")
    parser.add_argument("--quick", action="store_true", help="a smaller generated graph, few epochs, one seed")
    parser.add_argument("--ranks", type=int, default=2, metavar="P", help="number of ranks [2]")
    parser.add_argument("--mbit", type=float, default=200.0, metavar="RATE", help="Mb/s of every link [200]")
    parser.add_argument("--epochs", type=int, metavar="N", help="epochs of every run [50 and 20]")
    parser.add_argument("--seeds", type=int, metavar="K", help="runs of everything, from different weights [1]")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    parser.add_argument("--write", action="store_true", help="append to results.jsonl, put the table into the README")
    args = parser.parse_args()
    seeds = args.seeds or 1
    console = make_console(to_stderr=args.json)
    records: list[dict[str, Any]] = []
    reason = why_unavailable()
    with tempfile.TemporaryDirectory(prefix="approximate_") as name:
        for case in QUICK if args.quick else CASES:
            graph, epochs = case.graph, args.epochs or case.epochs
            try:
                prepared = prepare(graph, case.scale, args.ranks, Path(name))
            except GraphError as error:
                console.print(f"{graph} is left out: {error}")
                continue
            jobs = make_jobs(case, prepared, seeds, epochs)
            if reason is None:
                with EmulatedNetwork(num_hosts=args.ranks) as network:
                    network.shape(round(args.mbit * 1e6))
                    rate = network.measure_bits_per_s(expected_bits_per_s=round(args.mbit * 1e6))
                    reports = run_jobs(jobs, args.ranks, network, Path(name) / f"run_{graph}")
                label = f"{args.mbit:g} Mb/s emulated"
            else:
                console.print(f"no emulated network ({reason}): over loopback")
                rate, label = None, "loopback"
                reports = run_jobs(jobs, args.ranks, None, Path(name) / f"run_{graph}")
            per_seed = 1 + len(APPROXIMATIONS)
            for position, report in enumerate(reports):
                if position % per_seed == 0:
                    check(reports[position : position + per_seed])
                records.append(record_of(report, case, prepared, position // per_seed, label, rate))
    table = Table(*HEAD)
    for row in rows_of(records):
        table.add_row(*row)
    console.print(table)
    if args.write:
        write(records)
    if args.json:
        print(json.dumps({"cells": records}))
