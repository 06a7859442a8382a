# SPDX-License-Identifier: Apache-2.0
"""How fast are products of rows and weights, and their gradients, beside those of PyTorch?

    python -m benchmarks.ops.products [--processes 2] [--rounds 9] [--json] [--write]

Both in turns, in as many processes at once as a host would have ranks. The gain is what the slowest process sees.
Results are compared before anything is timed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import dgl_hybrid  # noqa: F401  before dgl, which it makes importable

# isort: split
import torch
from torch import Tensor

from benchmarks.ops.at_once import Result, measure_at_once, print_table, write_table
from benchmarks.systems.floors import measure_rates
from dgl_hybrid.ops.backend import Backend, load_backend

HEAD = (
    "rows",
    "columns",
    "what",
    "forward, ms",
    "PyTorch",
    "gain",
    "floor",
    "backward, ms",
    "PyTorch",
    "gain",
    "floor",
)
README = Path(__file__).parent / "README.md"
MARK, END = (
    "<!-- products: written by benchmarks.ops.products, do not edit below -->",
    "<!-- products: end -->",
)


@dataclass(frozen=True)
class Cell:
    """A layer's products."""

    rows: int
    inputs: tuple[int, ...]
    """Columns of the operands whose products are added."""
    outputs: int
    relu: bool = True
    factors: bool = False
    needs_rows: bool = True
    """Whether the rows need a gradient; those of a first layer do not."""

    @property
    def what(self) -> str:
        parts = [f"{len(self.inputs)} products" if len(self.inputs) > 1 else "product", "bias"]
        parts += [name for name, has in (("degrees", self.factors), ("ReLU", self.relu)) if has]
        return ", ".join(parts) + ("" if self.needs_rows else "; first layer")


GRID = (
    Cell(100_000, (128,), 128, needs_rows=False),
    Cell(100_000, (128,), 128, factors=True),
    Cell(100_000, (128,), 40, relu=False, factors=True),
    Cell(100_000, (128, 128), 128),
    Cell(200_000, (100,), 128, needs_rows=False),
    Cell(200_000, (100, 100), 128, needs_rows=False),
    Cell(16_000, (128,), 47, relu=False),
    Cell(50_000, (602,), 128, needs_rows=False),
    Cell(50_000, (602, 602), 128, needs_rows=False),
    Cell(50_000, (256, 256), 256),
)


def measure_here(cell: Cell, rounds: int) -> Result:
    """Times one cell in this process."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    rows = [random(cell.rows, width) for width in cell.inputs]
    weights = [random(cell.outputs, width).t() / width**0.5 for width in cell.inputs]
    bias, grad = random(cell.outputs), random(cell.rows, cell.outputs)
    factors = torch.rand(cell.rows, 1, generator=generator) if cell.factors else None
    output = load_backend("naive").row_products(rows, weights, factors, None, bias, cell.relu)
    needs = [cell.needs_rows] * len(rows), [True] * len(rows), False

    def forward(backend: Backend) -> list[Tensor]:
        return [backend.row_products(rows, weights, factors, None, bias, cell.relu)]

    def backward(backend: Backend) -> list[Tensor]:
        passed = output if cell.relu else None
        return backend.row_products_backward(rows, weights, grad, passed, factors, *needs)

    backends = {"kernel": load_backend("cpu"), "pytorch": load_backend("naive")}
    result: Result = {"flops_per_s": measure_rates().flops}
    ways: dict[str, Callable[[Backend], list[Tensor]]] = {"forward": forward, "backward": backward}
    for way, run in ways.items():
        for mine, theirs in zip(*(run(backend) for backend in backends.values()), strict=True):
            size = float(theirs.abs().max())
            torch.testing.assert_close(mine / size, theirs / size, rtol=0, atol=1e-4)
        seconds: dict[str, list[float]] = {name: [] for name in backends}
        for _ in range(rounds):
            for name, backend in backends.items():
                begin = time.perf_counter()
                run(backend)
                seconds[name].append(time.perf_counter() - begin)
        result |= {f"{way}_{name}_s": statistics.median(times) for name, times in seconds.items()}
    return result


def measure(cells: list[Cell], *, processes: int, rounds: int) -> list[Result]:
    """Measures cells, each in all processes at once; the slowest process counts."""
    results = []
    for cell, found in zip(
        cells, measure_at_once(measure_here, cells, processes=processes, rounds=rounds), strict=True
    ):
        result: Result = {"rows": cell.rows, "inputs": cell.inputs, "outputs": cell.outputs, "what": cell.what}
        result |= {name: max(one[name] for one in found) for name in found[0]}
        flops = 2.0 * cell.rows * sum(cell.inputs) * cell.outputs
        for way, times in (("forward", 1), ("backward", 1 + cell.needs_rows)):
            kernel_s = result[f"{way}_kernel_s"]
            result[f"{way}_gain"] = result[f"{way}_pytorch_s"] / kernel_s
            result[f"{way}_floor"] = times * flops / result["flops_per_s"] / kernel_s
        results.append(result)
    return results


def table_rows(results: list[Result]) -> list[tuple[str, ...]]:
    def times(one: Result, way: str) -> tuple[str, ...]:
        milliseconds = (f"{1e3 * one[f'{way}_{name}_s']:.1f}" for name in ("kernel", "pytorch"))
        return *milliseconds, f"{one[f'{way}_gain']:.2f}", f"{one[f'{way}_floor']:.0%}"

    return [
        (
            f"{one['rows']:,}",
            f"{' + '.join(map(str, one['inputs']))} to {one['outputs']}",
            one["what"],
            *times(one, "forward"),
            *times(one, "backward"),
        )
        for one in results
    ]


def summarise(results: list[Result]) -> Result:
    """Returns what kernels gain, at the median and at least."""
    gains = {way: [one[f"{way}_gain"] for one in results] for way in ("forward", "backward")}
    return {
        **{f"{way}_gain_median": statistics.median(found) for way, found in gains.items()},
        **{f"{way}_gain_min": min(found) for way, found in gains.items()},
        "cells": results,
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ops.products", description=__doc__.split("\n")[0])
    parser.add_argument("--processes", type=int, default=2, help="at once, each with one thread (2)")
    parser.add_argument("--rounds", type=int, default=9, help="timed calls of each way (9)")
    parser.add_argument("--shrink", type=int, default=1, help="divide all numbers of rows by so many")
    parser.add_argument("--json", action="store_true", help="only the result: one JSON object on the last line")
    parser.add_argument("--write", action="store_true", help="put the table into the README beside this file")
    options = parser.parse_args(arguments)
    if min(options.processes, options.rounds, options.shrink) < 1:
        parser.error("--processes, --rounds and --shrink must be positive")
    cells = [
        Cell(cell.rows // options.shrink, cell.inputs, cell.outputs, cell.relu, cell.factors, cell.needs_rows)
        for cell in GRID
    ]
    results = measure(cells, processes=options.processes, rounds=options.rounds)
    if options.write:
        write_table(HEAD, table_rows(results), options.processes, README, begin=MARK, end=END)
    if not options.json:
        print_table(HEAD, table_rows(results))
    print(json.dumps(summarise(results)))


if __name__ == "__main__":
    main()
