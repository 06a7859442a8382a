# SPDX-License-Identifier: Apache-2.0
"""How fast are the ops on CPU, beside DGL's kernels, PyTorch's CSR product, and what memory allows?

    OMP_NUM_THREADS=2 python -m benchmarks.ops.cpu [--quick] [--json] [--write]

Three random graphs (power law, uniform, local), widths 16 to 256:

- copy_u_sum: sums of neighbours' rows; u_mul_e_sum: the same with a weight per edge and each of 4 heads;
- gat: DGL's unmodified `GATConv` with 4 heads, forward and backward, against the same layer after `optimize`.

Before a cell is timed, its results are compared with float64. DGL's kernel and ours then take turns, so that a machine
that is busy with other things is as busy for both; a ratio is the median over rounds of theirs by ours. All allocate
their results afresh, as in training. Floors are bytes over the bandwidth of a copy measured here: `compulsory` reads
every operand once and writes the result, `gather` reads a row per edge.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dgl_hybrid  # before dgl: mends it
from benchmarks.console import make_console

# isort: split
import dgl
import dgl.nn
import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from dgl_hybrid import ops
from dgl_hybrid.graph.optimize import optimize
from dgl_hybrid.ops.sparse_graph import Adjacency

FOLDER = Path(__file__).parent
HEADS = 4
WIDTHS = (16, 32, 64, 128, 256)
TOLERANCE = 1e-5
"""Of the gate, for results; the tests of the ops are sharper."""
GRADIENT_TOLERANCE = 1e-2
"""Of the gate, for gradients of `gat`: an edge with a sum within a rounding of 0 takes the other branch of the leaky
ReLU than in float64, which moves the gradients by 1e-3 of their norm; DGL's own float32 layer is as far off."""


@dataclass(frozen=True)
class Sizes:
    """How large and how often."""

    num_nodes: int
    num_edges: int
    widths: tuple[int, ...]
    rounds: int
    slow_rounds: int
    """Of what takes DGL seconds."""


FULL = Sizes(100_000, 3_000_000, WIDTHS, 9, 3)
QUICK = Sizes(20_000, 400_000, (16, 64, 128), 5, 3)


def make_edges(kind: str, num_nodes: int, num_edges: int) -> tuple[Tensor, Tensor]:
    """Sources and destinations of a random graph."""
    random = np.random.default_rng(0)
    if kind == "power-law":
        shares = 1 / np.arange(1, num_nodes + 1) ** 0.8
        shares /= shares.sum()
        ends = [random.permutation(num_nodes)[random.choice(num_nodes, num_edges, p=shares)] for _ in range(2)]
    elif kind == "local":
        dst = random.integers(0, num_nodes, num_edges)
        spread = random.normal(0, num_nodes / 200, num_edges).astype(np.int64)
        ends = [(dst + spread) % num_nodes, dst]
    else:
        ends = [random.integers(0, num_nodes, num_edges) for _ in range(2)]
    return torch.from_numpy(ends[0]), torch.from_numpy(ends[1])


@dataclass(frozen=True)
class Cell:
    """One measurement to make: the contenders, ours first, and the bytes that must and that do move."""

    op: str
    graph: str
    width: int
    runs: dict[str, Callable[[], list[Tensor]]]
    exact: Callable[[], list[Tensor]]
    compulsory_bytes: int
    gather_bytes: int
    rounds: int


def csr_matrix(rows: Adjacency, values: Tensor) -> Tensor:
    """A square matrix as PyTorch's CSR."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta", category=UserWarning)
        shape = (rows.num_rows, rows.num_rows)
        return torch.sparse_csr_tensor(rows.indptr, rows.indices, values, shape, check_invariants=False)


def spmm_cells(name: str, graph: dgl.DGLGraph, sizes: Sizes) -> Iterator[Cell]:
    """copy_u_sum and u_mul_e_sum."""
    num_nodes, num_edges = graph.num_nodes(), graph.num_edges()
    structure = ops.SparseGraph.from_csc(*graph.adj_tensors("csc"), num_src=num_nodes)
    rows = structure.in_edges
    ids = 4 * (num_edges + num_nodes)
    for width in sizes.widths:
        x = torch.randn(num_nodes, width)
        csr = csr_matrix(rows, torch.ones(num_edges))
        out_bytes = 4 * num_nodes * width
        yield Cell(
            "copy_u_sum",
            name,
            width,
            {
                "ours": lambda x=x: [ops.spmm(structure, x)],
                "dgl": lambda x=x: [dgl.ops.copy_u_sum(graph, x)],
                "torch_csr": lambda x=x, csr=csr: [csr @ x],
            },
            lambda x=x: [dgl.ops.copy_u_sum(graph, x.double())],
            out_bytes + 4 * min(num_nodes, num_edges) * width + ids,
            out_bytes + 4 * num_edges * width + ids,
            sizes.rounds,
        )
        heads = x.view(num_nodes, HEADS, width // HEADS)
        weights = torch.rand(num_edges, HEADS)
        by_entry = weights if rows.edge_ids is None else weights[rows.edge_ids.long()]
        per_head = [csr_matrix(rows, by_entry[:, h].contiguous()) for h in range(HEADS)]
        weight_bytes = 4 * num_edges * HEADS + (0 if rows.edge_ids is None else 4 * num_edges)
        yield Cell(
            "u_mul_e_sum",
            name,
            width,
            {
                "ours": lambda x=heads, w=weights: [ops.spmm(structure, x, w.unsqueeze(-1))],
                "dgl": lambda x=heads, w=weights: [dgl.ops.u_mul_e_sum(graph, x, w.unsqueeze(-1))],
                "torch_csr": lambda x=heads, matrices=per_head: [
                    torch.stack([m @ x[:, h].contiguous() for h, m in enumerate(matrices)], 1)
                ],
            },
            lambda x=heads, w=weights: [dgl.ops.u_mul_e_sum(graph, x.double(), w.double().unsqueeze(-1))],
            out_bytes + 4 * min(num_nodes, num_edges) * width + ids + weight_bytes,
            out_bytes + 4 * num_edges * width + ids + weight_bytes,
            sizes.slow_rounds,
        )


def gat_cells(name: str, graph: dgl.DGLGraph, sizes: Sizes) -> Iterator[Cell]:
    """A whole `GATConv`, forward and backward."""
    num_nodes, num_edges = graph.num_nodes(), graph.num_edges()
    for width in sizes.widths:
        layer = dgl.nn.GATConv(width, width // HEADS, HEADS, allow_zero_in_degree=True)
        fused = optimize(copy.deepcopy(layer))
        x, gradient = torch.randn(num_nodes, width), torch.randn(num_nodes, HEADS, width // HEADS)

        def run(layer: torch.nn.Module, x: Tensor, gradient: Tensor) -> list[Tensor]:
            x = x.detach().requires_grad_()
            layer.zero_grad()
            out = layer(graph, x)
            out.backward(gradient)
            return [out.detach(), x.grad, *(parameter.grad for parameter in layer.parameters())]

        row, ids, scores = 4 * num_nodes * width, 4 * (num_edges + num_nodes), 4 * num_nodes * HEADS
        gathered = 4 * num_edges * width
        yield Cell(
            "gat",
            name,
            width,
            {
                "ours": lambda f=fused, x=x, g=gradient: run(f, x, g),
                "dgl": lambda f=layer, x=x, g=gradient: run(f, x, g),
            },
            lambda f=layer, x=x, g=gradient: run(copy.deepcopy(f).double(), x.double(), g.double()),
            # Forward reads x and writes out; backward reads x, out and grad and writes dx; scores both ways.
            6 * row + 2 * ids + 8 * scores,
            6 * row + 2 * ids + 8 * scores + 2 * (gathered - row) + 8 * num_edges * HEADS,
            sizes.slow_rounds,
        )


def measure(cell: Cell, bandwidth: float) -> dict[str, Any]:
    """Checks the cell's results and times its contenders.

    Raises:
        AssertionError: Ours differ from float64.
    """
    differentiates = cell.op == "gat"
    with torch.set_grad_enabled(differentiates):
        errors = [
            float((got.double() - exact).norm() / exact.norm().clamp(min=1e-30))
            for got, exact in zip(cell.runs["ours"](), cell.exact(), strict=True)
        ]
        error, gradient_error = errors[0], max(errors[1:], default=0.0)
        where = f"{cell.op} on {cell.graph}, width {cell.width}"
        assert error <= TOLERANCE, f"{where}: relative error {error:.1e}"
        assert gradient_error <= GRADIENT_TOLERANCE, f"{where}: relative error of a gradient {gradient_error:.1e}"
        elapsed: dict[str, list[float]] = {name: [] for name in cell.runs}
        for run in cell.runs.values():
            run()
        for _ in range(cell.rounds):
            for name, run in cell.runs.items():
                start = time.perf_counter()
                run()
                elapsed[name].append(time.perf_counter() - start)
    ours = statistics.median(elapsed["ours"])
    return {
        "bench": "ops_cpu",
        "op": cell.op,
        "graph": cell.graph,
        "width": cell.width,
        "ms": {name: round(1e3 * statistics.median(times), 3) for name, times in elapsed.items()},
        **{f"vs_{name}": ratio(times, elapsed["ours"]) for name, times in elapsed.items() if name != "ours"},
        "compulsory_floor": round(cell.compulsory_bytes / bandwidth / ours, 4),
        "gather_floor": round(cell.gather_bytes / bandwidth / ours, 4),
        "error": error,
        "gradient_error": gradient_error,
        "rounds": cell.rounds,
        "load": os.getloadavg()[0],
    }


def ratio(theirs: list[float], ours: list[float]) -> float:
    """Median over rounds of their time by ours."""
    return round(statistics.median(a / b for a, b in zip(theirs, ours, strict=True)), 3)


def copy_bandwidth() -> float:
    """Bytes per second, read and written, of copying a tensor that no cache holds."""
    source = torch.ones(64 << 20)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        target.copy_(source)
        best = min(best, time.perf_counter() - start)
    return 2 * source.numel() * source.element_size() / best


def run_grid(sizes: Sizes, *, log: Console) -> list[dict[str, Any]]:
    """Every cell of the grid."""
    bandwidth, records = copy_bandwidth(), []
    common = {
        "num_nodes": sizes.num_nodes,
        "num_edges": sizes.num_edges,
        "dtype": "float32",
        "unit": "ms",
        "threads": torch.get_num_threads(),
        "copy_bytes_per_s": bandwidth,
        "machine": platform.processor() or platform.machine(),
        "versions": {"dgl_hybrid": dgl_hybrid.__version__, "torch": torch.__version__, "dgl": dgl.__version__},
    }
    for name in ("power-law", "uniform", "local"):
        torch.manual_seed(0)
        graph = dgl.graph(make_edges(name, sizes.num_nodes, sizes.num_edges), num_nodes=sizes.num_nodes)
        graph.create_formats_()
        for cells in (spmm_cells, gat_cells):
            for cell in cells(name, graph, sizes):
                record = common | measure(cell, bandwidth) | {"time": time.strftime("%Y-%m-%dT%H:%M:%S")}
                records.append(record)
                log.print(f"{cell.op} {cell.graph} {cell.width}: {record['ms']} × DGL {record['vs_dgl']}")
    return records


def summarise(records: list[dict[str, Any]]) -> dict[str, Any]:
    """The medians that are promised, the worst cell, and all cells."""

    def median(op: str) -> float:
        return round(statistics.median(record["vs_dgl"] for record in records if record["op"] == op), 3)

    keys = ("op", "graph", "width", "ms", "vs_dgl", "vs_torch_csr", "compulsory_floor", "gather_floor", "error")
    return {
        "copy_u_sum_vs_dgl_median": median("copy_u_sum"),
        "u_mul_e_sum_vs_dgl_median": median("u_mul_e_sum"),
        "gat_vs_dgl_median": median("gat"),
        "min_cell_vs_dgl": min(record["vs_dgl"] for record in records),
        "threads": records[0]["threads"],
        "cells": [{key: record[key] for key in keys if key in record} for record in records],
    }


HEAD = ("op", "graph", "width", "ms", "× DGL", "× torch CSR", "% compulsory floor", "% gather floor")


def table_rows(records: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """The cells as text, in the columns of HEAD."""
    return [
        (
            record["op"],
            record["graph"],
            str(record["width"]),
            f"{record['ms']['ours']:.1f}",
            f"{record['vs_dgl']:.2f}",
            f"{record['vs_torch_csr']:.2f}" if "vs_torch_csr" in record else "",
            f"{100 * record['compulsory_floor']:.0f}",
            f"{100 * record['gather_floor']:.0f}",
        )
        for record in records
    ]


def markdown(records: list[dict[str, Any]]) -> str:
    """The table of cells and the summary, for the README."""
    lines = ["| " + " | ".join(HEAD) + " |", "|" + " --- |" * len(HEAD)]
    lines += ["| " + " | ".join(row) + " |" for row in table_rows(records)]
    summary = {key: value for key, value in summarise(records).items() if key != "cells"}
    return "\n".join([*lines, "", "`" + json.dumps(summary) + "`", ""])


def plot(records: list[dict[str, Any]], path: Path) -> None:
    """Ratio to DGL over width, an axis per op and a line per graph, as PNG and SVG."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    names = list(dict.fromkeys(record["op"] for record in records))
    figure, axes = plt.subplots(1, len(names), figsize=(4 * len(names), 3.4), squeeze=False, layout="constrained")
    styles = zip(("#0072B2", "#D55E00", "#009E73"), "os^", strict=True)
    look = dict(zip(("power-law", "uniform", "local"), styles, strict=True))
    for axis, op in zip(axes[0], names, strict=True):
        for graph, (colour, marker) in look.items():
            points = [(r["width"], r["vs_dgl"]) for r in records if r["op"] == op and r["graph"] == graph]
            axis.plot(*zip(*points, strict=True), color=colour, marker=marker, label=graph)
        axis.axhline(1.0, color="grey", linewidth=0.8)
        axis.set(title=op, xlabel="width", xscale="log", ylabel="DGL's time / ours", ylim=(0, None))
        axis.set_xticks(sorted({r["width"] for r in records}), sorted({r["width"] for r in records}))
        axis.minorticks_off()
    axes[0][0].legend()
    for suffix in (".png", ".svg"):
        figure.savefig(path.with_suffix(suffix), dpi=150)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ops.cpu", description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a smaller graph and fewer widths, for a look")
    parser.add_argument("--json", action="store_true", help="only the result: one JSON object on the last line")
    parser.add_argument("--write", action="store_true", help="append to cpu.jsonl, write cpu.md and the plot")
    options = parser.parse_args(arguments)
    log = make_console(to_stderr=True, quiet=options.json)
    records = run_grid(QUICK if options.quick else FULL, log=log)
    if options.write:
        with (FOLDER / "cpu.jsonl").open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)
        (FOLDER / "cpu.md").write_text(markdown(records), "utf-8")
        plot(records, FOLDER / "cpu.png")
    if not options.json:
        table = Table(*HEAD)
        for row in table_rows(records):
            table.add_row(*row)
        log.print(table)
    print(json.dumps(summarise(records)))


if __name__ == "__main__":
    main()
