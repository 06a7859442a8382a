# SPDX-License-Identifier: Apache-2.0
"""How many rows and neighbours does a DistDGL script still read from other machines with the plugin on, and is it faster?

    python -m benchmarks.distdgl_reads [--quick] [--json] [--write]

One DistDGL job per graph and number of parts; each machine is a network namespace with one server and one trainer, where
this is possible, else all share the loopback interface and nothing is timed. Each job first checks that all modes read the
same, then counts, then trains under every rate of the links. See README.md for what was found.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from benchmarks.distdgl_reads.cells import RATE_NAMES, Line, cell_key, fanout_text, measurements, summarise
from benchmarks.distdgl_reads.schedule import Schedule, read_message
from benchmarks.emulated_network import EmulatedNetwork, why_unavailable
from dgl_hybrid.launch.cluster import ClusterFailure, ClusterJob, PartLine, run_cluster
from dgl_hybrid.launch.workspace import DataConfig, PartitionConfig, PreparedGraph, prepare_partition
from dgl_hybrid.sampling.config import ENABLE_VARIABLE, HaloConfig

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).parent / "results.jsonl"
DATA_VARIABLE = "DGL_HYBRID_DATA"
GRAPHS = ("debian-deps", "moby-thesaurus")
GENERATED = "powerlaw:nodes=40000,degree=16,features=256"
FANOUTS = ((10, 25), (5, 10, 15))
RATES = (1_000_000_000, 200_000_000)
SERVER_PORT = 30050


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """What is measured."""

    data: tuple[str, ...]
    """Data set specs of `load_dataset`."""
    num_parts: tuple[int, ...] = (2, 3)
    fanouts: tuple[tuple[int, ...], ...] = FANOUTS
    rates: tuple[int, ...] = RATES
    rounds: int = 2
    epochs: int = 2


@dataclass(slots=True)
class Progress:
    """The bar, and what rank 0 of the running job has reported."""

    bar: Any
    network: EmulatedNetwork | None
    verbose: bool
    messages: list[dict[str, Any]] = field(default_factory=list)
    link_bits_per_s: float | None = None

    def on_line(self, line: PartLine) -> None:
        message = read_message(line.text)
        if message is None:
            if self.verbose:
                self.bar.write(f"[{line.part.name}] {line.text}", file=sys.stderr)
            return
        match message["kind"]:
            case "epoch":
                self.bar.update()
            case "shape":
                assert self.network is not None
                rate = message["rate_bits_per_s"]
                self.network.shape(rate)
                self.link_bits_per_s = self.network.measure_bits_per_s(expected_bits_per_s=rate)
                Path(message["answer"]).touch()
            case "times":
                self.messages.append(message | {"link_bits_per_s": self.link_bits_per_s})
            case _:
                self.messages.append(message)


def find_data() -> tuple[tuple[str, ...], str | None]:
    """Returns the data sets to measure, and why the real graphs are not among them, if so."""
    folder = Path(os.environ.get(DATA_VARIABLE) or ROOT.parent / "shared" / "data")
    files = [folder / f"{name}.npz" for name in GRAPHS]
    missing = [file.name for file in files if not file.is_file()]
    if not missing:
        return tuple(map(str, files)), None
    why = f"{', '.join(missing)} not found in {folder} (set {DATA_VARIABLE}): a generated graph instead"
    return tuple(str(file) for file in files if file.is_file()) or (GENERATED,), why


def run_job(
    prepared: PreparedGraph, grid: Grid, *, network: EmulatedNetwork | None, bar: Any, folder: Path, verbose: bool
) -> list[dict[str, Any]]:
    """Runs one job and returns what its rank 0 reported."""
    assert prepared.num_classes is not None
    schedule = Schedule(
        graph_name=prepared.part_config.stem,
        num_classes=prepared.num_classes,
        fanouts=grid.fanouts,
        rates_bits_per_s=grid.rates if network else (),
        rounds=grid.rounds,
        epochs=grid.epochs,
        answers=str(folder),
    )
    job = ClusterJob(
        part_config=prepared.part_config,
        command=("-m", "benchmarks.distdgl_reads.trainer", schedule.to_json()),
        workspace=ROOT,
        threads=1,
        environment={ENABLE_VARIABLE: HaloConfig(strategy="depcomm").to_environment()},
    )
    if network is not None:
        ip_config = folder / f"ip_config-{prepared.num_parts}.txt"
        ip_config.write_text("".join(f"{host.address} {SERVER_PORT}\n" for host in network.hosts), "utf-8")
        job = replace(job, ip_config=ip_config, machine_prefixes=tuple(host.prefix for host in network.hosts))
    progress = Progress(bar=bar, network=network, verbose=verbose)
    run_cluster(job, on_line=progress.on_line)
    return progress.messages


def measure(grid: Grid, *, has_network: bool, verbose: bool) -> list[Line]:
    """Runs all jobs of a grid."""
    about = {
        "bench": "distdgl_reads",
        "backend": "gloo",
        "device": "cpu",
        "dtype": "float32",
        "seed": 0,
    } | describe_run()
    lines: list[Line] = []
    sizes = [
        Schedule(
            graph_name="",
            num_classes=0,
            fanouts=grid.fanouts,
            rates_bits_per_s=grid.rates if has_network else (),
            rounds=grid.rounds,
            epochs=grid.epochs,
        ).num_epochs
        for _ in grid.data
        for _ in grid.num_parts
    ]
    with (
        tempfile.TemporaryDirectory(prefix="distdgl_reads_") as folder,
        tqdm(total=sum(sizes), unit="epoch", file=sys.stderr) as bar,
    ):
        for data in grid.data:
            for num_parts in grid.num_parts:
                prepared = prepare_partition(DataConfig(data=data), PartitionConfig(ranks=num_parts))
                bar.set_description(f"{prepared.dataset}, {num_parts} parts")
                with EmulatedNetwork(num_hosts=num_parts) if has_network else contextlib.nullcontext() as network:
                    messages = run_job(prepared, grid, network=network, bar=bar, folder=Path(folder), verbose=verbose)
                common = about | {
                    "dataset": prepared.dataset,
                    "num_parts": num_parts,
                    "world_size": num_parts,
                    "time": time.strftime("%Y-%m-%dT%H:%M:%S"),
                }
                lines += measurements(messages, common)
    return lines


def describe_run() -> dict[str, Any]:
    """Returns what the figures depend on besides the measured cell."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()

    settings = Schedule(graph_name="", num_classes=0, fanouts=())
    return {
        "git_sha": git("rev-parse", "--short", "HEAD"),
        "dirty": bool(git("status", "--porcelain", "--", "dgl_hybrid", "benchmarks", "patches")),
        "config": {"batch_size": settings.batch_size, "hidden": settings.hidden, "threads_per_trainer": 1},
        "machine": {"cores": os.cpu_count(), "arch": platform.machine()},
        "versions": {name: version(name) for name in ("dgl_hybrid", "dgl", "torch")}
        | {"python": platform.python_version()},
    }


def make_tables(lines: Sequence[Line], summary: dict[str, Any]) -> list[Table]:
    """Returns what a person reads."""
    counts = Table("graph/parts/fanouts", "plugin", "remote rows", "requests", "remote seeds", "held MB", "filled MB",
                   title="Read from other machines per epoch, all trainers")  # fmt: skip
    times = Table("graph/parts/fanouts", "rate", "plugin", "epoch", "sample", "read", "compute", "fill", "off/on",
                  "paid after", title="Training epochs")  # fmt: skip
    off: dict[tuple[str, int], float] = {}
    for line in lines:
        key = cell_key(line)
        if line["metric"] == "reads_per_epoch":
            counts.add_row(
                *(key, line["variant"], f"{line['remote_rows']:,.0f}", f"{line['remote_sampling_requests']:,.0f}"),
                *(f"{line['remote_seeds']:,.0f}", f"{line['held_bytes'] / 1e6:.1f}", f"{line['fill_bytes'] / 1e6:.1f}"),
            )
            continue
        rate = line["rate_bits_per_s"]
        if line["variant"] == "off":
            off[key, rate] = line["p50"]
        name = RATE_NAMES[rate]
        ending = "_budget_10pct" if line["variant"] == "10%" else ""
        paid = summary[f"epochs_until_fill_is_paid_{name}{ending}"][key] if line["variant"] != "off" else None
        times.add_row(
            *(key, name, line["variant"], f"{line['p50']:.2f} s ({line['p20']:.2f} to {line['p80']:.2f})"),
            *(f"{line[part]:.2f}" for part in ("sample_s", "read_s", "compute_s")),
            "" if line["variant"] == "off" else f"{line['fill_s']:.2f} s",
            "" if line["variant"] == "off" else f"{off[key, rate] / line['p50']:.2f}",
            "" if paid is None else f"{paid} epochs",
        )
    return [counts, times]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.distdgl_reads")
    parser.add_argument("--quick", action="store_true", help="one graph, 2 parts, one fanout")
    parser.add_argument("--counts-only", action="store_true", help="time nothing")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    parser.add_argument("--write", action="store_true", help=f"append to {RESULTS.name}")
    parser.add_argument("--verbose", action="store_true", help="show what the trainers write")
    parser.add_argument("--data", action="append", help="measure this graph (path of an .npz file, or powerlaw:…)")
    parser.add_argument("--parts", type=int, action="append", help="numbers of parts")
    args = parser.parse_args(arguments)
    console = Console(file=sys.stderr if args.json else sys.stdout)
    data, why_generated = find_data()
    skipped = {} if why_generated is None or args.data else {"real graphs": why_generated}
    grid = Grid(data=tuple(args.data or data))
    if args.quick:
        grid = replace(grid, data=grid.data[:1], num_parts=(2,), fanouts=FANOUTS[:1])
    if args.parts:
        grid = replace(grid, num_parts=tuple(args.parts))
    why_untimed = "not asked for" if args.counts_only else why_unavailable()
    if why_untimed is not None:
        skipped["epoch times"] = why_untimed
    for what, why in skipped.items():
        print(f"skipped: {what}: {why}", file=sys.stderr)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        lines = measure(grid, has_network=why_untimed is None, verbose=args.verbose)
    except ClusterFailure as failure:
        print(f"{failure}\n{failure.details}", file=sys.stderr)
        sys.exit(failure.exit_code)
    summary = summarise(lines, skipped)
    for table in make_tables(lines, summary):
        if table.row_count:
            console.print(table)
    if args.write:
        with RESULTS.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
    if args.json:
        print(json.dumps(summary))
