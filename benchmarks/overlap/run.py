# SPDX-License-Identifier: Apache-2.0
"""How much of the exchange is hidden behind work on held rows, and what partial sums save?

    python -m benchmarks.overlap [--scale 0.3] [--json] [--write]

Everything is communicated ("depcomm"), three times on the same cell, in turns: exchange and aggregation apart;
together, so that held rows are summed while others travel; and together with partial sums sent where they are fewer.
The systems' own benchmark runs them (`benchmarks/systems`): results are checked against plain DGL before anything is
timed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from benchmarks.emulated_network import why_unavailable
from benchmarks.systems.floors import measure_rates
from benchmarks.systems.graphs import prepare
from benchmarks.systems.grid import Cell
from benchmarks.systems.measure import Bench, Settings
from benchmarks.systems.results import OK, Line, describe_run

APART, TOGETHER, SUMS = SYSTEMS = ("depcomm_apart", "depcomm_overlap", "depcomm_sums")
MODELS = (("sage", 2), ("gcn", 3), ("gat", 2))
NETWORKS = ("loopback", "1gbit", "200mbit")
README = Path(__file__).parent / "README.md"
MARK = "<!-- results: written by --write -->"
HEAD = ("cell", "apart", "together", "gain", "blocked apart", "blocked together", "hidden", "with sums", "rows saved")


def cells_of(graph: str, scale: float) -> list[Cell]:
    """Returns what is measured: every model over every network, on two ranks of one thread each."""
    return [
        Cell(graph=graph, scale=scale, model=model, num_layers=layers, network=network)
        for network in NETWORKS
        for model, layers in MODELS
    ]


def compare(lines: Sequence[Line]) -> dict[str, Any]:
    """Puts one cell's three lines together.

    `hidden` is the share of the blocked time (exchange and wait) that is gone once exchange and aggregation go
    together; `gain` is what an epoch gains by it, which includes the copies that are not made any more.
    """
    found: dict[str, Any] = {"cell": lines[0]["cell"], "failed": {}}
    for line in lines:
        if line["status"] != OK:
            found["failed"][line["variant"]] = line["error"]
            continue
        found[line["variant"]] = {
            "epoch_s": line["p50"],
            "blocked_s": line["exchange_s"] + line["wait_s"],
            "sent_bytes": line["sent_bytes"],
        }
    if not found["failed"]:
        apart, together, sums = (found[name] for name in SYSTEMS)
        found["gain"] = apart["epoch_s"] / together["epoch_s"]
        found["hidden"] = 1.0 - together["blocked_s"] / apart["blocked_s"] if apart["blocked_s"] else None
        found["gain_of_sums"] = together["epoch_s"] / sums["epoch_s"]
        found["bytes_saved"] = 1.0 - sums["sent_bytes"] / together["sent_bytes"] if together["sent_bytes"] else None
    return found


def rows_of(results: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Returns the table's rows, times in milliseconds."""
    rows = []
    for result in results:
        if result["failed"]:
            rows.append((result["cell"], f"failed: {result['failed']}", *[""] * (len(HEAD) - 2)))
            continue
        apart, together, sums = (result[name] for name in SYSTEMS)
        rows.append(
            (
                result["cell"],
                f"{1e3 * apart['epoch_s']:.0f}",
                f"{1e3 * together['epoch_s']:.0f}",
                f"{result['gain']:.2f}",
                f"{1e3 * apart['blocked_s']:.0f}",
                f"{1e3 * together['blocked_s']:.0f}",
                "" if result["hidden"] is None else f"{result['hidden']:.0%}",
                f"{1e3 * sums['epoch_s']:.0f}",
                "" if result["bytes_saved"] is None else f"{result['bytes_saved']:.0%}",
            )
        )
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overlap")
    parser.add_argument("--graph", default="powerlaw")
    parser.add_argument("--scale", type=float, default=1.0, help="of the vertices of the generated graph")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each variant")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "dgl_hybrid" / "systems")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    parser.add_argument("--write", action="store_true", help="write the table into README.md")
    args = parser.parse_args(arguments)
    why = why_unavailable()
    if why is not None:
        print(f"no links can be limited here: {why}", file=sys.stderr)
        sys.exit(2)
    results = []
    with tqdm(cells_of(args.graph, args.scale), unit="cell", file=sys.stderr) as bar:
        bench = Bench(
            settings=Settings(rounds=args.rounds, timeout_s=600.0),
            cache=args.cache.absolute(),
            peers=None,
            rates=measure_rates(),
            about=describe_run(),
            on_phase=lambda phase: bar.set_postfix_str(phase),
        )
        for cell in bar:
            bar.set_description(cell.key)
            graph = prepare(cell.graph, cell.scale, cell.ranks, bench.cache)
            results.append(compare(bench.measure(cell, graph, SYSTEMS)))
    show(results, to_stderr=args.json)
    if args.write:
        write(results)
    if args.json:
        print(json.dumps({"cells": results}))


def show(results: Sequence[dict[str, Any]], *, to_stderr: bool) -> None:
    stream = sys.stderr if to_stderr else sys.stdout
    table = Table(title="Milliseconds per epoch (median), everything communicated")
    for name in HEAD:
        table.add_column(name)
    for row in rows_of(results):
        table.add_row(*row)
    Console(file=stream, width=None if stream.isatty() else 160).print(table)


def write(results: Sequence[dict[str, Any]]) -> None:
    """Replaces the table behind the mark in README.md."""
    lines = [f"| {' | '.join(HEAD)} |", "|" + " --- |" * len(HEAD)]
    lines += [f"| {' | '.join(row)} |" for row in rows_of(results)]
    before = README.read_text(encoding="utf-8").partition(MARK)[0]
    README.write_text(before + MARK + "\n\n" + "\n".join(lines) + "\n", encoding="utf-8")
