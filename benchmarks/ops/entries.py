# SPDX-License-Identifier: Apache-2.0
"""From how many zeros on are rows multiplied faster by their other entries?

    python -m benchmarks.ops.entries [--processes 2] [--rounds 7] [--json] [--write]

A first layer of constant rows: product, bias and ReLU, and backward the gradients of weight and bias, by all entries of
the rows (`row_products`) and by those that are not zero (`SparseRows`) in turns, in as many processes at once as a host
would have ranks, with the allocator settings of `benchmarks/systems`. The gain is what the slowest process sees.
Results are compared before anything is timed. `DGL_HYBRID_MATRIX_UNIT=0` leaves the matrix unit out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import dgl_hybrid  # noqa: F401  before dgl, which it makes importable

# isort: split
import torch
from torch import Tensor

from benchmarks.ops.at_once import Result, measure_at_once, print_table, summarise_rule, write_table
from dgl_hybrid.graph.row_products import product
from dgl_hybrid.ops import SparseRows
from dgl_hybrid.ops.cpu.products import most_entries

ROWS, SHAPES, SHARES = 46_000, ((64, 128), (128, 128), (128, 256), (512, 128), (512, 256)), (0.02, 0.05, 0.1, 0.2, 0.3)
"""Of the grid: rows, columns of the rows and of the result, entries that are not zero."""
HEAD = ("columns", "not zero", "by all, ms", "by entries, ms", "gain", "by entries by rule")
README = Path(__file__).parent / "README.md"
MARK = "<!-- entries: written by benchmarks.ops.entries, do not edit below -->"
END = "<!-- entries: end -->"

Shape = tuple[int, int, int, float]
"""Rows, columns of the rows, columns of the result, share of entries that are not zero."""


def measure_here(cell: Shape, rounds: int) -> Result:
    """Times one cell in this process."""
    num_rows, num_inputs, num_outputs, share = cell
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_rows, num_inputs, generator=generator)
    x[torch.rand(x.shape, generator=generator) >= share] = 0.0
    weight = torch.randn(num_inputs, num_outputs, generator=generator).requires_grad_()
    bias = torch.randn(num_outputs, generator=generator).requires_grad_()
    grad = torch.randn(num_rows, num_outputs, generator=generator)
    sparse = SparseRows.from_dense(x)
    assert sparse is not None

    def train(rows: Tensor | SparseRows, relu: bool = True) -> tuple[Tensor, ...]:
        out = product(rows, weight, bias, relu=relu)
        return out.detach(), *torch.autograd.grad(out, (weight, bias), grad)

    # Without the ReLU: numbers that are 0 but for rounding pass gradients on or not.
    for mine, theirs in zip(train(x, relu=False), train(sparse, relu=False), strict=True):
        size = float(theirs.abs().max())
        torch.testing.assert_close(mine / size, theirs / size, rtol=0, atol=1e-4)
    ways: dict[str, Callable[[], tuple[Tensor, ...]]] = {
        "all_s": lambda: train(x),
        "entries_s": lambda: train(sparse),
    }
    for train_it in ways.values():  # compiles kernels and faults in the memory
        train_it()
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, train_it in ways.items():
            begin = time.perf_counter()
            train_it()
            seconds[way].append(time.perf_counter() - begin)
    by_rule = share <= most_entries(num_inputs, x.dtype)
    return {**{way: statistics.median(times) for way, times in seconds.items()}, "by_rule": by_rule}


def measure(cells: list[Shape], *, processes: int, rounds: int) -> list[Result]:
    """Measures cells, each in all processes at once; the slowest process counts."""
    results = []
    together = measure_at_once(measure_here, cells, processes=processes, rounds=rounds)
    for (num_rows, num_inputs, num_outputs, share), found in zip(cells, together, strict=True):
        result: Result = {"rows": num_rows, "inputs": num_inputs, "outputs": num_outputs, "share": share}
        result |= {way: max(one[way] for one in found) for way in ("all_s", "entries_s")}
        results.append(result | {"gain": result["all_s"] / result["entries_s"], "by_rule": found[0]["by_rule"]})
    return results


def table_rows(results: list[Result]) -> list[tuple[str, ...]]:
    return [
        (
            f"{one['inputs']} to {one['outputs']}",
            f"{one['share']:.0%}",
            f"{1e3 * one['all_s']:.1f}",
            f"{1e3 * one['entries_s']:.1f}",
            f"{one['gain']:.2f}",
            "yes" if one["by_rule"] else "no",
        )
        for one in results
    ]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ops.entries", description=__doc__.split("\n")[0])
    parser.add_argument("--processes", type=int, default=2, help="at once, each with one thread (2)")
    parser.add_argument("--rounds", type=int, default=7, help="timed calls of each way (7)")
    parser.add_argument("--rows", type=int, default=ROWS, help=f"rows ({ROWS})")
    parser.add_argument("--json", action="store_true", help="only the result: one JSON object on the last line")
    parser.add_argument("--write", action="store_true", help="put the table into the README beside this file")
    options = parser.parse_args(arguments)
    if min(options.processes, options.rounds, options.rows) < 1:
        parser.error("--processes, --rounds and --rows must be positive")
    cells = [(options.rows, *shape, share) for shape in SHAPES for share in SHARES]
    results = measure(cells, processes=options.processes, rounds=options.rounds)
    if options.write:
        write_table(HEAD, table_rows(results), options.processes, README, begin=MARK, end=END)
    if not options.json:
        print_table(HEAD, table_rows(results))
    print(json.dumps(summarise_rule(results, "entries")))


if __name__ == "__main__":
    main()
