# SPDX-License-Identifier: Apache-2.0
"""How long does a rank take to plan, in how much memory, and how far from the optimum is what it finds?

    python -m benchmarks.planner [--vertices 1e7] [--edges 1e8] [--parts 8] [--layers 3] [--json] [--write]

One rank's part of a generated graph is made directly, and planned as a trainer would in a process of its own, on one
core: the candidates of `propose_plans` for slow and for fast links. Reported: seconds, peak memory of the planning
process, and the hybrid plan's cost over the lower bound and under the pure plans.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table
from safetensors.numpy import load_file, save_file

from benchmarks.console import make_console
from benchmarks.planner.parts import GeneratedGraph, build_problem
from dgl_hybrid.partition.signals import ending_signals_raise
from dgl_hybrid.planner import PlannerConfig, PlanProblem, cost_model, propose_plans, synthetic_trace, uniform_topology
from dgl_hybrid.planner.bound import lower_bound
from dgl_hybrid.planner.greedy import Prices
from dgl_hybrid.planner.items import build_items
from dgl_hybrid.training.resident_memory import peak_rss_bytes

RESULTS = Path(__file__).with_name("results.jsonl")
LINKS = {"200 Mb/s": 25e6, "1 Gb/s": 125e6, "10 Gb/s": 1.25e9}
WIDTHS = {1: [128, 47], 2: [100, 128, 47], 3: [100, 128, 128, 47]}
_SCALARS = ("rank", "world_size", "num_layers")


@ending_signals_raise()  # through the finally clauses, which end what was started
def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vertices", type=float, default=1e7)
    parser.add_argument("--edges", type=float, default=1e8)
    parser.add_argument("--parts", type=int, default=8)
    parser.add_argument("--layers", type=int, default=3, choices=sorted(WIDTHS))
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    parser.add_argument("--write", action="store_true", help=f"append the lines to {RESULTS.name}")
    parser.add_argument("--problem", type=Path, help=argparse.SUPPRESS)  # the inner process's
    parser.add_argument("--link", choices=LINKS, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    if args.problem is not None:
        print(json.dumps(plan_once(load_problem(args.problem), LINKS[args.link])))
        return
    console = make_console(to_stderr=True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "problem.safetensors")
        console.print(f"making part {args.rank} of {args.parts} …")
        graph = GeneratedGraph(int(args.vertices), int(args.edges), args.parts)
        problem = build_problem(graph, args.rank, args.layers)
        save_problem(problem, path)
        sizes = {"halo_vertices": problem.num_halo, "halo_edges": int(problem.in_halo.numel())}
        del graph, problem
        records = []
        for link in LINKS:
            console.print(f"planning for {link} …")
            command = [sys.executable, "-m", "benchmarks.planner", "--problem", str(path), "--link", link]
            result = subprocess.run(command, check=True, capture_output=True, text=True)
            record = json.loads(result.stdout.splitlines()[-1])
            records.append(describe(args) | sizes | {"link": link, "notes": result.stderr.strip()} | record)
    if args.write:
        with RESULTS.open("a") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)
    console.print(table_of(records))
    if args.json:
        print(json.dumps({"bench": "planner", "cells": records}))


def plan_once(problem: PlanProblem, bandwidth_bytes_per_s: float) -> dict[str, Any]:
    """Plans and measures; the rates besides the link's are those of one core of a current server."""
    trace = synthetic_trace(WIDTHS[problem.num_layers])
    topology = uniform_topology(problem.world_size, bandwidth_bytes_per_s=bandwidth_bytes_per_s, overlaps=True)
    costs = cost_model(trace, topology, problem.rank)
    start, start_cpu = time.perf_counter(), time.process_time()
    candidates = propose_plans(problem, costs, PlannerConfig())
    elapsed_s, cpu_s = time.perf_counter() - start, time.process_time() - start_cpu
    peak_bytes = peak_rss_bytes()
    items = build_items(problem)
    bound = lower_bound(items, Prices.of(items, costs))
    objective = {c.plan.strategy: c.plan.objective_s for c in candidates}
    pure = min(objective["depcache"], objective["depcomm"])
    return {
        "elapsed_s": elapsed_s,
        "cpu_s": cpu_s,
        "peak_bytes": peak_bytes,
        "over_lower_bound": objective["hybrid@1"] / bound,
        "best_pure_over_hybrid": pure / objective["hybrid@1"],
        "cached": next(c.plan.num_cached for c in candidates if c.plan.strategy == "hybrid@1"),
        "communicated": next(c.plan.communicated for c in candidates if c.plan.strategy == "hybrid@1"),
    }


def describe(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "bench": "planner",
        "num_nodes": int(args.vertices),
        "num_edges": int(args.edges),
        "parts": args.parts,
        "layers": args.layers,
        "rank": args.rank,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__},
    }


def save_problem(problem: PlanProblem, path: Path) -> None:
    arrays = {
        name: getattr(problem, name).numpy()
        for name in PlanProblem.__slots__
        if isinstance(getattr(problem, name), torch.Tensor)
    }
    save_file(arrays, path, metadata={name: str(getattr(problem, name)) for name in _SCALARS})


def load_problem(path: Path) -> PlanProblem:
    from safetensors import safe_open

    with safe_open(path, framework="numpy") as file:
        scalars = {name: int(file.metadata()[name]) for name in _SCALARS}
    tensors = {name: torch.from_numpy(array) for name, array in load_file(path).items()}
    return PlanProblem(**scalars, **tensors)


def table_of(records: list[dict[str, Any]]) -> Table:
    table = Table(title="planning one rank's part")
    for heading in (
        "link",
        "halo vertices",
        "their in-edges",
        "seconds",
        "CPU seconds",
        "peak GiB",
        "over lower bound",
        "pure / hybrid",
    ):
        table.add_column(heading, justify="right")
    for r in records:
        table.add_row(
            r["link"],
            f"{r['halo_vertices']:,}",
            f"{r['halo_edges']:,}",
            f"{r['elapsed_s']:.1f}",
            f"{r['cpu_s']:.1f}",
            f"{r['peak_bytes'] / 2**30:.2f}",
            f"{100 * (r['over_lower_bound'] - 1):.1f} %",
            f"{r['best_pure_over_hybrid']:.2f}",
        )
    return table
