# SPDX-License-Identifier: Apache-2.0
"""How long does an epoch of exact training take, with every system a user could pick, side by side?

    python -m benchmarks.systems --quick --json
    python -m benchmarks.systems --hours 6 --results FILE --peers FOLDER
    python -m benchmarks.systems --write --results FILE

Every measurement is a line that is appended to the results file; a cell that this code has measured with these settings
is not measured again, so that a run can be broken off and taken up. See benchmarks/README.md for what was found.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.table import Table
from tqdm import tqdm

from benchmarks.console import make_console
from benchmarks.emulated_network import NetworkError, why_unavailable
from benchmarks.systems import accuracy, write
from benchmarks.systems.floors import measure_rates
from benchmarks.systems.graphs import GraphError, prepare
from benchmarks.systems.grid import (
    GENERATED,
    MODELS,
    NETWORKS,
    REAL,
    SAR,
    Cell,
    all_systems,
    full_grid,
    quick_grid,
    quick_systems_of,
    systems_of,
)
from benchmarks.systems.measure import Bench, Settings
from benchmarks.systems.results import (
    EPOCH_TIME,
    FAILED,
    PEAK_MEMORY,
    USUAL,
    Line,
    append_lines,
    describe_run,
    mark_changed,
    measured_run,
    read_lines,
)
from benchmarks.systems.summary import summarise
from benchmarks.systems.tables import CELL_HEAD, MEMORY_HEAD, cell_rows, drop_empty_columns, memory_rows
from benchmarks.systems.team import ALLOCATORS, SystemFailure
from dgl_hybrid.partition.signals import ending_signals_raise

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results.jsonl"
PEERS_VARIABLE = "DGL_HYBRID_PEERS"
QUICK_MORE_ROUNDS = 8
"""Two minutes in all: five turns of half a second leave several per cent in ratios of the very same plan."""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.systems")
    parser.add_argument("--quick", action="store_true", help="a few small cells of every kind: 10 to 15 minutes")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    parser.add_argument("--results", type=Path, help=f"file of measurements (full grid: {RESULTS.name}; quick: none)")
    parser.add_argument("--write", action="store_true", help="measure nothing; tables and plots from the results file")
    parser.add_argument("--hours", type=float, default=float("inf"), help="begin no cell after so many hours")
    parser.add_argument("--peers", type=Path, help=f"folder with checkouts SAR and PipeGCN (else: {PEERS_VARIABLE})")
    parser.add_argument("--cache", type=Path, help="folder for graphs and partitions (~/.cache/dgl_hybrid/systems)")
    parser.add_argument("--graph", action="append", help=f"of {', '.join((*GENERATED, *REAL))}, ogb:…, dgl:…, an .npz")
    parser.add_argument("--scale", type=float, default=1.0, help="of the vertices of generated graphs")
    parser.add_argument("--sample", type=int, metavar="SEED", help="cells in an order drawn at random")
    parser.add_argument("--model", action="append", choices=MODELS)
    parser.add_argument("--layers", type=int, action="append")
    parser.add_argument("--hidden", type=int, action="append")
    parser.add_argument("--ranks", type=int, action="append")
    parser.add_argument("--network", action="append", choices=tuple(NETWORKS))
    parser.add_argument(
        "--system",
        action="append",
        choices=all_systems(),
        metavar="SYSTEM",
        help="measure these only (hybrid is needed for ratios)",
    )
    parser.add_argument("--rounds", type=int, help="turns of each start of a system (5)")
    parser.add_argument("--starts", type=int, help="starts of each of our systems (3; quick: 1)")
    parser.add_argument(
        "--more-rounds",
        type=int,
        metavar="TURNS",
        help=f"further turns of ours at most, until their ratios are known to 1.5 %% (15; quick: {QUICK_MORE_ROUNDS})",
    )
    parser.add_argument("--allocator", choices=tuple(ALLOCATORS), default="keep", help="settings of glibc's malloc")
    parser.add_argument("--timeout", type=float, help="seconds for each step of a system (1800; quick: 300)")
    parser.add_argument("--retry-failed", action="store_true", help="measure cells again in which a system failed")
    parser.add_argument("--memory", action="store_true", help="peak memory of hybrid and SAR alone: one turn of each")
    parser.add_argument("--accuracy", action="store_true", help="time to accuracy instead of epochs")
    args = parser.parse_args(arguments)
    chosen = {name for name in ("graph", "model", "layers", "hidden", "ranks", "network") if getattr(args, name)}
    chosen |= {"scale"} if args.scale != 1.0 else set()
    chosen |= {"sample"} if args.sample is not None else set()
    for mode, ignored in (("quick", chosen), ("accuracy", chosen - {"graph"})):
        if getattr(args, mode) and ignored:
            options = ", ".join(f"--{name}" for name in sorted(ignored))
            parser.error(f"--{mode} has cells of its own: leave out {options}")
    modes = [f"--{name}" for name in ("quick", "memory", "accuracy", "write") if getattr(args, name)]
    if args.accuracy and len(modes) > 1:
        # Curves take hours, are kept line by line, and each has the time of the full grid.
        parser.error(f"{' and '.join(modes)} are different measurements: ask for one")
    return args


def settings_of(args: argparse.Namespace) -> Settings:
    """Returns what was asked for; --quick is one start of each system, memory for one turn of it."""
    given = {name: value for name in USUAL if (value := getattr(args, name)) is not None}
    usual = {"starts": 1, "more_rounds": QUICK_MORE_ROUNDS} if args.quick else {}
    usual |= {"starts": 1, "rounds": 1, "more_rounds": 0} if args.memory else {}
    return Settings(
        **(usual | given),
        allocator=args.allocator,
        timeout_s=args.timeout or (300.0 if args.quick else 1800.0),
    )


def choose_cells(args: argparse.Namespace) -> tuple[Cell, ...]:
    """Returns the cells that the options ask for."""
    if args.quick:
        return quick_grid()
    choices: dict[str, Any] = {
        "models": args.model,
        "layers": args.layers,
        "hidden": args.hidden,
        "ranks": args.ranks,
        "networks": args.network,
    }
    given = {name: value for name, value in choices.items() if value}
    return full_grid(args.graph or (*GENERATED, *REAL), **given, scale=args.scale, sample=args.sample)


def measure_cells(
    bench: Bench, cells: Iterable[Cell], args: argparse.Namespace, results: Path | None, bar: Any
) -> tuple[list[Line], dict[str, str]]:
    """Measures cells; returns the lines of all that were asked for, each of the run that measured what was asked of it
    on such a machine, and what was skipped and why.
    """
    known = read_lines(results) if results else []
    skipped: dict[str, str] = {}
    lines: list[Line] = []
    why_no_network = why_unavailable()
    deadline = time.monotonic() + 3600 * args.hours
    for cell in cells:
        bar.set_description(cell.key)
        possible = quick_systems_of(cell) if args.quick else systems_of(cell)
        if args.memory:
            possible = tuple(system for system in possible if system in ("hybrid", *SAR))
        systems = [system for system in possible if not args.system or system in args.system]
        installed = [system for system in systems if bench.why_unavailable(system) is None]
        run = measured_run(
            known,
            cell.key,
            installed,
            bench.about["code"],
            bench.settings.to_json(),
            machine=bench.about["machine"],
            metric=bench.metric,
            retry_failed=args.retry_failed,
        )
        if not installed:
            why = {bench.why_unavailable(system) for system in systems} or {"no system of those asked for runs it"}
            skipped[cell.key] = "; ".join(sorted(map(str, why)))
        elif cell.rate_bits_per_s is not None and why_no_network is not None:
            skipped[cell.key] = f"no links can be limited here: {why_no_network}"
        elif run is not None:
            lines += [line for line in known if (line["cell"], line["run"]) == (cell.key, run)]
        elif time.monotonic() > deadline:
            skipped[cell.key] = f"not begun within {args.hours:g} hours"
        else:
            try:
                graph = prepare(cell.graph, cell.scale, cell.ranks, bench.cache)
                bench = replace(bench, about=describe_run(bench.peers))  # of the sources as they are now, hours later
                found = mark_changed(bench.measure(cell, graph, systems), bench.about)
            except (GraphError, NetworkError, SystemFailure, OSError) as error:
                skipped[cell.key] = str(error)
            else:
                lines += found
                if results:
                    append_lines(results, found)
                for line in found:
                    if line["status"] == FAILED:
                        bar.write(f"{cell.key}: {line['variant']} failed: {line['error']}", file=sys.stderr)
        bar.update()
    return lines, skipped


@ending_signals_raise()  # through the finally clauses, which end what was started
def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments)
    results = args.results or (None if args.quick else RESULTS)
    if args.write:
        write.write(read_lines(results or RESULTS))
        return
    peers = args.peers or (Path(os.environ[PEERS_VARIABLE]) if os.environ.get(PEERS_VARIABLE) else None)
    cache = args.cache or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dgl_hybrid" / "systems"
    cells = accuracy.cells() if args.accuracy else choose_cells(args)
    settings = settings_of(args)
    with tqdm(total=len(cells), unit="cell", file=sys.stderr) as bar:
        bench = Bench(
            settings=settings,
            cache=cache.absolute(),
            peers=peers.absolute() if peers else None,
            rates=measure_rates(),
            about=describe_run(peers),
            on_phase=lambda phase: bar.set_postfix_str(phase),
            metric=PEAK_MEMORY if args.memory else EPOCH_TIME,
        )
        try:
            measure = accuracy.measure_cells if args.accuracy else measure_cells
            lines, skipped = measure(bench, cells, args, results, bar)
        except KeyboardInterrupt:
            print("interrupted; everything has been ended", file=sys.stderr)
            sys.exit(130)
    for what, why in skipped.items():
        print(f"skipped: {what}: {why}", file=sys.stderr)
    result = summarise(lines, skipped)
    show(result, settings, to_stderr=args.json)
    if args.json:
        print(json.dumps(result))


def show(result: dict[str, Any], settings: Settings, *, to_stderr: bool) -> None:
    """Prints the table of cells, and what all systems had in common."""
    console = make_console(to_stderr=to_stderr)
    if result["cells"]:
        head, rows = drop_empty_columns(CELL_HEAD, cell_rows(result["cells"]))
        table = Table(title="Seconds per epoch (median); ratios: their time over hybrid's")
        for number, name in enumerate(head):
            table.add_column(name, no_wrap=number == 0)
        for row in rows:
            table.add_row(*row)
        console.print(table)
    if result["more"]["memory"]:
        table = Table(*MEMORY_HEAD, title="Peak memory of the rank that holds most, in MB")
        for row in memory_rows(result["more"]["memory"]):
            table.add_row(*row)
        console.print(table)
    for cell in result["more"]["accuracy"]:
        console.print(cell)
    variables = (
        " ".join(f"{name}={value}" for name, value in ALLOCATORS[settings.allocator].items()) or "glibc's defaults"
    )
    console.print(f"One thread for each rank, plain DGL as many as ranks; allocator of all systems: {variables}")
