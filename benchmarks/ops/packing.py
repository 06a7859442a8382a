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
import statistics
import time
from pathlib import Path
from unittest import mock

import dgl_hybrid  # noqa: F401  before dgl, which it makes importable

# isort: split
import torch

from benchmarks.ops.at_once import Result, measure_at_once, print_table, summarise_rule, write_table
from dgl_hybrid.ops import SparseGraph, spmm
from dgl_hybrid.ops.cpu.reductions import Operand

ROWS, READS, WIDTHS = (20_000, 40_000, 100_000, 200_000), (4, 8, 16, 32), (128, 256)
"""Of the grid: source rows, entries that read each of them on average, columns of float32."""
HEAD = ("rows", "columns", "MB", "reads of a row", "in place, ms", "packed, ms", "gain", "packed by rule")
README = Path(__file__).parent / "README.md"
MARK = "<!-- packing: written by benchmarks.ops.packing, do not edit below -->"
END = "<!-- packing: end -->"


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


def measure(cells: list[tuple[int, int, int]], *, processes: int, rounds: int) -> list[Result]:
    """Measures cells, each in all processes at once; the slowest process counts."""
    results = []
    together = measure_at_once(measure_here, cells, processes=processes, rounds=rounds)
    for (num_rows, reads, width), found in zip(cells, together, strict=True):
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
        write_table(HEAD, table_rows(results), options.processes, README, begin=MARK, end=END)
    if not options.json:
        print_table(HEAD, table_rows(results))
    print(json.dumps(summarise_rule(results, "packed")))


if __name__ == "__main__":
    main()
