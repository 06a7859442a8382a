# SPDX-License-Identifier: Apache-2.0
"""How much does a DistDGL script still read from other machines with the plugin on, and how much faster is it?

    python -m benchmarks.distdgl_reads [--quick] [--json] [--write]

One DistDGL job per graph and number of parts; each machine is a network namespace with one server and one trainer,
where this is possible, else all share the loopback interface and nothing is timed. Each job first checks that all modes
read the same, then counts, then trains under every rate of the links. See README.md for what was found.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.table import Table
from tqdm import tqdm

from benchmarks.console import make_console
from benchmarks.distdgl_reads.cells import Line, measurements, summarise
from benchmarks.distdgl_reads.jobs import RATES, ROOT, JobPlan, find_data, plan_jobs, prepare, run_job
from benchmarks.distdgl_reads.schedule import Schedule
from benchmarks.distdgl_reads.tables import COUNT_HEAD, TIME_HEAD, count_rows, time_rows
from benchmarks.emulated_network import NetworkError, why_unavailable
from dgl_hybrid.launch.cluster import ClusterFailure
from dgl_hybrid.partition.signals import ending_signals_raise

RESULTS = Path(__file__).parent / "results.jsonl"


def measure(plans: Sequence[JobPlan], *, verbose: bool) -> Iterator[list[Line]]:
    """Runs the jobs and yields the measurements of each."""
    about = {"bench": "distdgl_reads", "backend": "gloo", "device": "cpu", "dtype": "float32", **describe_run()}
    with (
        tempfile.TemporaryDirectory(prefix="distdgl_reads_") as folder,
        tqdm(total=sum(plan.schedule().num_epochs for plan in plans), unit="epoch", file=sys.stderr) as bar,
    ):
        for plan in plans:
            bar.set_description(f"{Path(plan.data).stem}, {plan.num_parts} parts")
            prepared = prepare(plan, Path(folder))
            load = os.getloadavg()[0]
            messages = run_job(
                plan,
                prepared,
                Path(folder),
                on_epoch=bar.update,
                on_text=lambda text: bar.write(text, file=sys.stderr) if verbose else None,
            )
            about_job = {
                "dataset": prepared.dataset,
                "num_parts": plan.num_parts,
                "world_size": plan.num_parts,
                "load_before": round(load, 1),
                "is_full_precision": plan.is_full_precision,
                "time": time.strftime("%Y-%m-%dT%H:%M:%S"),
            }
            yield measurements(messages, about | about_job)


def describe_run() -> dict[str, Any]:
    """Returns what the figures depend on besides the measured cell."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()

    settings = Schedule(graph_name="", num_classes=0, fanouts=())
    return {
        "seed": settings.seed,
        "config": {"batch_size": settings.batch_size, "hidden": settings.hidden, "threads_per_trainer": 1},
        "git_sha": git("rev-parse", "--short", "HEAD"),
        "dirty": bool(git("status", "--porcelain", "--", "dgl_hybrid", "benchmarks", "patches")),
        "machine": {"cores": os.cpu_count(), "arch": platform.machine()},
        "versions": {
            **{name: version(name) for name in ("dgl_hybrid", "dgl", "torch")},
            "python": platform.python_version(),
        },
    }


@ending_signals_raise()  # through the finally clauses, which end what was started
def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.distdgl_reads")
    parser.add_argument("--quick", action="store_true", help="one graph, 2 parts, one fanout")
    parser.add_argument("--counts-only", action="store_true", help="time nothing")
    parser.add_argument("--main-only", action="store_true", help="no job without the plugin or with scaled features")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    parser.add_argument("--write", action="store_true", help=f"append to {RESULTS.name}")
    parser.add_argument("--verbose", action="store_true", help="show what the trainers write")
    parser.add_argument("--data", action="append", help="measure this graph (path of an .npz file, or powerlaw:…)")
    parser.add_argument("--parts", type=int, action="append", help="number of parts")
    parser.add_argument("--rate", type=int, action="append", help="bits per second of the links")
    args = parser.parse_args(arguments)
    data, why_generated = find_data()
    skipped = {} if why_generated is None or args.data else {"real graphs": why_generated}
    data = tuple(args.data or (data[:1] if args.quick else data))
    why_untimed = "not asked for" if args.counts_only else why_unavailable()
    if why_untimed is not None:
        skipped["epoch times"] = why_untimed
    rates = () if why_untimed is not None else tuple(args.rate or RATES)
    for what, why in skipped.items():
        print(f"skipped: {what}: {why}", file=sys.stderr)
    num_parts = args.parts or ((2,) if args.quick else (2, 3))
    plans = plan_jobs(data, num_parts, rates, is_quick=args.quick, is_main_only=args.quick or args.main_only)

    lines: list[Line] = []
    try:
        for of_job in measure(plans, verbose=args.verbose):
            lines += of_job
            if args.write:
                with RESULTS.open("a", encoding="utf-8") as file:
                    file.writelines(json.dumps(line) + "\n" for line in of_job)
    except ClusterFailure as failure:
        print(f"{failure}\n{failure.details}", file=sys.stderr)
        sys.exit(failure.exit_code)
    except KeyboardInterrupt:
        print("interrupted; everything has been ended", file=sys.stderr)
        sys.exit(130)
    except NetworkError as error:
        print(error, file=sys.stderr)
        sys.exit(1)
    show(lines, to_stderr=args.json)
    if args.json:
        print(json.dumps(summarise(lines, skipped)))


def show(lines: Sequence[Line], *, to_stderr: bool) -> None:
    """Prints both tables."""
    console = make_console(to_stderr=to_stderr)
    for title, head, rows in (
        ("Read from other machines per epoch, all trainers together", COUNT_HEAD, count_rows(lines)),
        ("Epochs of training", TIME_HEAD, time_rows(lines)),
    ):
        if rows:
            table = Table(*head, title=title)
            for row in rows:
                table.add_row(*row)
            console.print(table)
