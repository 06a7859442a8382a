# SPDX-License-Identifier: Apache-2.0
"""What sums on CPU gain where rows are packed some columns at a time?

    python -m benchmarks.ops.packing [--processes 2] [--rounds 7] [--json] [--write]

Uniform random graphs, so that nothing but the cache helps; each sum in place and packed by turns, in as many processes
at once as a host would have ranks, with the allocator settings of `benchmarks/systems`. The gain is what the slowest
process sees. Results are compared before anything is timed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import dgl_hybrid  # noqa: F401  before dgl, which it makes importable

# isort: split
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.systems.team import ALLOCATORS
from dgl_hybrid.ops import SparseGraph, spmm
from dgl_hybrid.ops.cpu.reductions import Operand

Result = dict[str, Any]
ROWS, READS, WIDTHS = (20_000, 40_000, 100_000, 200_000), (4, 8, 16, 32), (128, 256)
"""Of the grid: source rows, entries that read each of them on average, columns of float32."""
HEAD = ("rows", "columns", "MB", "reads of a row", "in place, ms", "packed, ms", "gain", "packed by rule")
README = Path(__file__).parent / "README.md"
MARK = "<!-- packing: written by benchmarks.ops.packing, do not edit below -->"


def measure_here(cell: tuple[int, int, int], rounds: int) -> Result:
    """Times one cell in this process."""
    num_rows, reads, width = cell
    generator = torch.Generator().manual_seed(0)
    src, dst = (torch.randint(0, num_rows, (num_rows * reads,), generator=generator) for _ in range(2))
    graph = SparseGraph.from_coo(src, dst, num_rows, num_rows)
    x = torch.randn(num_rows, width, generator=generator)
    by_rule = Operand(x.unsqueeze(1)).is_packed(graph.num_edges)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    sums = {}
    for number in range(rounds + 1):
        for is_packed in (False, True):
            with mock.patch.object(Operand, "is_packed", lambda *_, answer=is_packed: answer):
                begin = time.perf_counter()
                sums[is_packed] = spmm(graph, x)
                if number:  # the first compiles the kernel and faults in the memory
                    seconds[is_packed].append(time.perf_counter() - begin)
        if not number:
            torch.testing.assert_close(sums[True], sums[False], rtol=1e-4, atol=1e-4)
    in_place_s, packed_s = (statistics.median(seconds[is_packed]) for is_packed in (False, True))
    return {"in_place_s": in_place_s, "packed_s": packed_s, "by_rule": by_rule}


_together: Any = None
"""Of the processes of a pool: a barrier, which only an initializer can hand them."""


def _start(barrier: Any) -> None:
    global _together
    torch.set_num_threads(1)
    _together = barrier


def _measure(cell: tuple[int, int, int], rounds: int) -> Result:
    _together.wait()
    return measure_here(cell, rounds)


def measure(cells: list[tuple[int, int, int]], *, processes: int, rounds: int) -> list[Result]:
    """Measures cells, each in all processes at once; the slowest process counts."""
    context = multiprocessing.get_context("spawn")
    results = []
    with (
        mock.patch.dict(os.environ, ALLOCATORS["keep"] | {"OMP_NUM_THREADS": "1"}),
        context.Pool(processes, _start, (context.Barrier(processes),)) as pool,
    ):
        for cell in cells:
            found = pool.starmap(_measure, [(cell, rounds)] * processes, chunksize=1)
            num_rows, reads, width = cell
            result: Result = {"rows": num_rows, "columns": width, "reads": reads, "bytes": 4 * num_rows * width}
            result |= {way: max(one[way] for one in found) for way in ("in_place_s", "packed_s")}
            results.append(result | {"gain": result["in_place_s"] / result["packed_s"], "by_rule": found[0]["by_rule"]})
    return results


def table_rows(results: list[Result]) -> list[tuple[str, ...]]:
    return [
        (
            f"{one['rows']:,}",
            str(one["columns"]),
            f"{one['bytes'] / 1e6:.0f}",
            str(one["reads"]),
            f"{1e3 * one['in_place_s']:.1f}",
            f"{1e3 * one['packed_s']:.1f}",
            f"{one['gain']:.2f}",
            "yes" if one["by_rule"] else "no",
        )
        for one in results
    ]


def summarise(results: list[Result]) -> Result:
    """Returns what the rule gains where it packs, and what it leaves where it does not."""
    gains = {rule: [one["gain"] for one in results if one["by_rule"] == rule] for rule in (True, False)}
    return {
        "packed_gain_median": statistics.median(gains[True]) if gains[True] else None,
        "packed_gain_min": min(gains[True], default=None),
        "packed_gain_max": max(gains[True], default=None),
        "left_gain_max": max(gains[False], default=None),
        "cells": results,
    }


def write(results: list[Result], processes: int, file: Path) -> None:
    """Replaces what is below the mark in the README."""
    lines = [" | ".join(row) for row in [HEAD, ["---"] * len(HEAD), *table_rows(results)]]
    table = "\n".join(f"| {line} |" for line in lines)
    conditions = f"{processes} processes of one thread at once, float32, medians of the slower one."
    above = file.read_text("utf-8").split(MARK)[0].rstrip()
    file.write_text(f"{above}\n\n{MARK}\n\n{conditions}\n\n{table}\n", "utf-8")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ops.packing", description=__doc__.split("\n")[0])
    parser.add_argument("--processes", type=int, default=2, help="at once, each with one thread (2)")
    parser.add_argument("--rounds", type=int, default=7, help="timed sums of each way (7)")
    parser.add_argument("--rows", type=int, action="append", help="source rows; may be given several times")
    parser.add_argument("--json", action="store_true", help="only the result: one JSON object on the last line")
    parser.add_argument("--write", action="store_true", help="put the table into the README beside this file")
    options = parser.parse_args(arguments)
    if min(options.processes, options.rounds, *(options.rows or (1,))) < 1:
        parser.error("--processes, --rounds and --rows must be positive")
    cells = [(rows, reads, width) for width in WIDTHS for rows in options.rows or ROWS for reads in READS]
    results = measure(cells, processes=options.processes, rounds=options.rounds)
    if options.write:
        write(results, options.processes, README)
    if not options.json:
        table = Table(*HEAD)
        for row in table_rows(results):
            table.add_row(*row)
        Console(file=sys.stderr).print(table)
    print(json.dumps(summarise(results)))


if __name__ == "__main__":
    main()
