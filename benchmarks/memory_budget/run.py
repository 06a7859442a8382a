# SPDX-License-Identifier: Apache-2.0
"""Does training stay within a memory budget that all received rows together would exceed, and what does it cost?

    python -m benchmarks.memory_budget [--scale 1] [--json] [--write]

Everything is communicated, three times on the same cell, in turns: with all received rows of a layer resident, in
messages that fit a budget of 32 MiB, and in messages of 256 rows. The last holds next to nothing of other ranks, so
what the others' resident memory has more than it is what their received rows take.
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

from benchmarks.systems.floors import measure_rates
from benchmarks.systems.graphs import prepare
from benchmarks.systems.grid import Cell
from benchmarks.systems.measure import Bench, Settings
from benchmarks.systems.results import OK, Line, describe_run

RESIDENT, BUDGET, FEW = SYSTEMS = ("depcomm_apart", "depcomm_32_mib", "depcomm_few_rows")
BUDGET_MIB = 32.0
MODELS = (("sage", 3), ("gcn", 2), ("gat", 2))
README = Path(__file__).parent / "README.md"
MARK = "<!-- results: written by --write -->"
HEAD = (
    *("cell", "resident: MiB more", "in the budget: MiB more", "over the budget's"),
    *("peak resident", "peak budget", "epoch resident", "epoch budget", "epoch few rows"),
)


def cells_of(graph: str, scale: float, hidden: int) -> list[Cell]:
    """Returns what is measured: two ranks of one host, wide rows."""
    return [Cell(graph=graph, scale=scale, model=model, num_layers=layers, hidden=hidden) for model, layers in MODELS]


def compare(lines: Sequence[Line]) -> dict[str, Any]:
    """Puts one cell's three lines together; memory in MiB, of the rank that has most."""
    found: dict[str, Any] = {"cell": lines[0]["cell"], "failed": {}}
    for line in lines:
        if line["status"] != OK:
            found["failed"][line["variant"]] = line["error"]
        else:
            found[line["variant"]] = {"epoch_s": line["p50"], "peak_mib": max(line["peak_rss_bytes"]) / 2**20}
    if not found["failed"]:
        resident, budget, few = (found[name]["peak_mib"] for name in SYSTEMS)
        found["resident_mib"], found["budget_mib"] = resident - few, budget - few
        found["share_of_budget"] = found["budget_mib"] / BUDGET_MIB
    return found


def rows_of(results: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Returns the table's rows, times in milliseconds, memory in MiB."""
    rows = []
    for result in results:
        if result["failed"]:
            rows.append((result["cell"], f"failed: {result['failed']}", *[""] * (len(HEAD) - 2)))
            continue
        resident, budget, few = (result[name] for name in SYSTEMS)
        rows.append(
            (
                result["cell"],
                f"{result['resident_mib']:.0f}",
                f"{result['budget_mib']:.0f}",
                f"{result['share_of_budget']:.2f}",
                f"{resident['peak_mib']:.0f}",
                f"{budget['peak_mib']:.0f}",
                *(f"{1e3 * variant['epoch_s']:.0f}" for variant in (resident, budget, few)),
            )
        )
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory_budget")
    parser.add_argument("--graph", default="powerlaw")
    parser.add_argument("--scale", type=float, default=1.0, help="of the vertices of the generated graph")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "dgl_hybrid" / "systems")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    parser.add_argument("--write", action="store_true", help="write the table into README.md")
    args = parser.parse_args(arguments)
    results = []
    with tqdm(cells_of(args.graph, args.scale, args.hidden), unit="cell", file=sys.stderr) as bar:
        bench = Bench(
            # Memory that is free goes back to the system, so that what is resident is what is used.
            settings=Settings(rounds=5, timeout_s=600.0, allocator="default"),
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
        print(json.dumps({"budget_mib": BUDGET_MIB, "cells": results}))


def show(results: Sequence[dict[str, Any]], *, to_stderr: bool) -> None:
    stream = sys.stderr if to_stderr else sys.stdout
    table = Table(title=f"Budget of {BUDGET_MIB:.0f} MiB for rows of other ranks; MiB, ms per epoch")
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
