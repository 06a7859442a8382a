# SPDX-License-Identifier: Apache-2.0
"""A question that a few of the systems answer side by side: measured cell by cell, one row of a table for each cell."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from tqdm import tqdm

from benchmarks.console import make_console
from benchmarks.emulated_network import NetworkError
from benchmarks.systems.floors import measure_rates
from benchmarks.systems.graphs import GraphError, prepare
from benchmarks.systems.grid import Cell
from benchmarks.systems.measure import Bench, Settings
from benchmarks.systems.results import OK, Line, describe_run
from benchmarks.systems.team import SystemFailure
from dgl_hybrid.partition.signals import ending_signals_raise

MARK = "<!-- results: written by --write -->"
"""In the README; what follows it is replaced."""

Result = dict[str, Any]
"""What is known of a cell: its key at "cell", why variants failed at "failed", the figures of the others at their
names, and what these say together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Which systems are compared, and what becomes of their lines."""

    systems: tuple[str, ...]
    """Measured in turns, in this order."""
    figures_of: Callable[[Line], Result]
    """The figures of one variant."""
    put_together: Callable[..., Result]
    """What the figures of all variants, given in the order of `systems`, say together."""
    title: str
    head: tuple[str, ...]
    """Of the table; the first column is the cell."""
    row_of: Callable[[Result], tuple[str, ...]]
    """The other columns of a cell none of whose variants failed."""
    readme: Path

    def compare(self, lines: Sequence[Line]) -> Result:
        """Puts one cell's lines together."""
        result: Result = {"cell": lines[0]["cell"], "failed": {}}
        for line in lines:
            if line["status"] == OK:
                result[line["variant"]] = self.figures_of(line)
            else:
                result["failed"][line["variant"]] = line["error"]
        if not result["failed"]:
            result.update(self.put_together(*(result[name] for name in self.systems)))
        return result

    def rows_of(self, results: Sequence[Result]) -> list[tuple[str, ...]]:
        """Returns the table's rows."""
        rows = []
        for result in results:
            if result["failed"]:
                rows.append((result["cell"], f"failed: {result['failed']}", *[""] * (len(self.head) - 2)))
            else:
                rows.append((result["cell"], *self.row_of(result)))
        return rows

    @ending_signals_raise()  # through the finally clauses, which end what was started
    def measure(self, cells: Sequence[Cell], settings: Settings, cache: Path) -> list[Result]:
        """Measures every system on every cell. Results are checked against plain DGL before anything is timed.

        A cell whose graph or network cannot be had has failed. Who interrupts is shown the cells before, which do not
        take the place of the README's table.
        """
        results = []
        with tqdm(cells, unit="cell", file=sys.stderr) as bar:
            bench = Bench(
                settings=settings,
                cache=cache.absolute(),
                peers=None,
                rates=measure_rates(),
                about=describe_run(),
                on_phase=lambda phase: bar.set_postfix_str(phase),
            )
            for cell in bar:
                bar.set_description(cell.key)
                try:
                    graph = prepare(cell.graph, cell.scale, cell.ranks, bench.cache)
                    results.append(self.compare(bench.measure(cell, graph, self.systems)))
                except (GraphError, NetworkError, SystemFailure, OSError) as error:
                    results.append({"cell": cell.key, "failed": {"cell": str(error)}})
                except KeyboardInterrupt:
                    bar.write("interrupted: this is what had been measured", file=sys.stderr)
                    self.show(results, to_stderr=True)
                    sys.exit(130)
        return results

    def report(self, results: Sequence[Result], args: argparse.Namespace, **about: Any) -> None:
        """Prints the table, and does with it what the options of `make_parser` ask for.

        Args:
            about: Stands beside the cells in the JSON object.
        """
        self.show(results, to_stderr=args.json)
        if args.write:
            self.write(results)
        if args.json:
            print(json.dumps({**about, "cells": results}))

    def show(self, results: Sequence[Result], *, to_stderr: bool) -> None:
        table = Table(title=self.title)
        for name in self.head:
            table.add_column(name)
        for row in self.rows_of(results):
            table.add_row(*row)
        make_console(to_stderr=to_stderr).print(table)

    def write(self, results: Sequence[Result]) -> None:
        """Replaces the table behind the mark in the README."""
        lines = [f"| {' | '.join(self.head)} |", "|" + " --- |" * len(self.head)]
        lines += [f"| {' | '.join(row)} |" for row in self.rows_of(results)]
        before = self.readme.read_text(encoding="utf-8").partition(MARK)[0]
        self.readme.write_text(before + MARK + "\n\n" + "\n".join(lines) + "\n", encoding="utf-8")


def make_parser(prog: str, graph: str = "powerlaw") -> argparse.ArgumentParser:
    """Returns the options that every such benchmark has."""
    parser = argparse.ArgumentParser(prog=prog)
    parser.add_argument("--graph", action="append", help=f"may be given several times ({graph})")
    parser.add_argument("--scale", type=float, default=1.0, help="of the vertices of the generated graph")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "dgl_hybrid" / "systems")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    parser.add_argument("--write", action="store_true", help="write the table into README.md")
    return parser
