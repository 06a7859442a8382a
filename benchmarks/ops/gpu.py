# SPDX-License-Identifier: Apache-2.0
"""How near are the CUDA ops to the GPU's memory limit, and how far ahead of cuSPARSE and PyTorch Geometric?

    python -m benchmarks.ops.gpu [--write [FOLDER]] [--json] [--quick]

Needs a GPU; takes less than ten minutes (compilation included). The graphs have 1 M vertices and 16.8 M edges.
First a correctness gate: every op, forward and every gradient, against float64, twice with the same bits. Then for
power-law, uniform and local graphs, widths 16 to 256, float32, float16 and bfloat16: milliseconds, per cent of the
gather and the compulsory floor at the measured copy bandwidth, and ratios to torch.sparse (cuSPARSE) and, where it is
installed, to PyTorch Geometric's GATConv. Each cell is checked before it is timed: its specialisation on a small graph
with a hub, and the results of 64 rows at full size. What does not fit into the time or the memory is listed as such.

With `--write`, JSON lines are appended to `gpu.jsonl`, and tables and plots of that file are written beside it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import dgl_hybrid
from benchmarks.console import make_console
from benchmarks.ops.gpu_cells import (
    CHECKED,
    DISTRIBUTIONS,
    DTYPES,
    HEADS,
    TIMED,
    Clock,
    GateError,
    Op,
    check,
    check_rows,
    copy_bandwidth,
    make_graph,
    our_gat,
    pyg_gat,
    relative_error,
    sizes_of,
)
from benchmarks.ops.gpu_report import HEAD, rows_of, write_report
from benchmarks.systems.results import spread
from dgl_hybrid.errors import KernelError
from dgl_hybrid.ops import SparseGraph
from dgl_hybrid.ops.backend import load_backend

FOLDER = Path(__file__).parent
WIDTHS = (16, 32, 64, 128, 256)
LIMIT_S = 560.0

Line = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """How much is measured."""

    num_nodes: int = 1 << 20
    degree: int = 16
    gate_nodes: int = 2000
    dtypes: Sequence[torch.dtype] = DTYPES
    distributions: Sequence[str] = DISTRIBUTIONS
    widths: Sequence[int] = WIDTHS
    gate_widths: Sequence[int] = (64, 36)
    rounds: int = 15
    copy_bytes: int = 1 << 30
    limit_s: float = LIMIT_S


QUICK = Scale(num_nodes=1 << 18, widths=(64, 256), gate_widths=(64,), rounds=7)


class Bench:
    """One run on one device.

    Args:
        device: Where it runs.
        scale: How much of it.
        console: Where progress goes.
    """

    def __init__(self, device: torch.device, scale: Scale, console: Console) -> None:
        self.device, self.scale, self.console = device, scale, console
        self.clock, self.started = Clock(device), time.monotonic()
        self.lines: list[Line] = []
        self.not_measured: list[str] = []
        self.wrong: list[str] = []
        self.worst_error = 0.0
        self.bandwidth = 0.0
        self._common = common_facts(device)

    def run(self) -> None:
        """Gate, then cells; what the gate refuses is not timed."""
        small = make_graph(
            "power-law", self.scale.gate_nodes, self.scale.degree, self.device, num_heavy=self.scale.gate_nodes // 2
        )
        for dtype, width in itertools.product(self.scale.dtypes, self.scale.gate_widths):
            before = len(self.wrong)
            for op in CHECKED:
                try:
                    self.worst_error = max(self.worst_error, check(op, small, width, dtype))
                except GateError as error:
                    self._refuse(error)
            right = len(CHECKED) - (len(self.wrong) - before)
            self.console.print(f"gate: {right} of {len(CHECKED)} ops right in {str(dtype)[6:]}, width {width}")
        self.bandwidth = copy_bandwidth(self.clock, self.device, self.scale.copy_bytes)
        self.console.print(f"copy: {self.bandwidth / 1e9:,.0f} GB/s")
        graphs: dict[str, SparseGraph] = {}
        scale = self.scale
        for dtype, distribution, width in itertools.product(scale.dtypes, scale.distributions, scale.widths):
            if distribution not in graphs:
                graphs[distribution] = make_graph(distribution, scale.num_nodes, scale.degree, self.device)
            for op in TIMED:
                self._guard(op.name, distribution, width, dtype, graphs[distribution], small, op)
            self._guard("GAT layer + backward", distribution, width, dtype, graphs[distribution], small, None)

    def _guard(
        self,
        name: str,
        distribution: str,
        width: int,
        dtype: torch.dtype,
        graph: SparseGraph,
        small: SparseGraph,
        op: Op | None,
    ) -> None:
        """Measures a cell if it is right and time and memory are left, else notes that it is missing."""
        cell = f"{name}, {distribution}, width {width}, {str(dtype)[6:]}"
        if time.monotonic() - self.started > self.scale.limit_s:
            self.not_measured.append(f"{cell}: out of time")
            return
        try:
            if op is None:
                self._layer(name, distribution, width, dtype, graph)
            else:
                self._cell(op, distribution, width, dtype, graph, small)
        except torch.cuda.OutOfMemoryError:
            self.not_measured.append(f"{cell}: out of memory")
        except GateError as error:
            self._refuse(error)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _refuse(self, error: GateError) -> None:
        self.wrong.append(str(error))
        self.console.print(f"wrong: {error}", style="red", highlight=False)

    def _cell(
        self, op: Op, distribution: str, width: int, dtype: torch.dtype, graph: SparseGraph, small: SparseGraph
    ) -> None:
        error = check(op, small, width, dtype)
        generator = torch.Generator(self.device).manual_seed(1)
        operands = op.draw(graph, width, dtype, generator)
        with torch.no_grad():
            out = op.call(graph, *operands)
            error = max(error, check_rows(op, graph, operands, out))
        self.worst_error = max(self.worst_error, error)
        sparse_ms, why = self._sparse(op, graph, operands, out)
        if op.backward:
            leaves, grad = [operand.requires_grad_() for operand in operands], torch.randn_like(out)
            del out

            def run() -> object:
                return torch.autograd.grad(op.call(graph, *leaves), leaves, grad)

        else:

            def run() -> object:
                return op.call(graph, *operands)

        times = self.clock.times_ms(run, self.scale.rounds)
        gather, compulsory = (bytes_ / self.bandwidth * 1e3 for bytes_ in op.floors(sizes_of(graph, width, dtype)))
        found = spread(times)
        self._add(
            distribution,
            width,
            dtype,
            graph,
            **found,
            variant=op.name,
            predicted=gather,
            gather_floor_ms=gather,
            compulsory_floor_ms=compulsory,
            gather_floor_percent=100 * gather / found["p50"],
            compulsory_floor_percent=100 * compulsory / found["p50"],
            torch_sparse_ms=sparse_ms,
            torch_sparse_missing=why,
            vs_torch_sparse=None if sparse_ms is None else sparse_ms / found["p50"],
            pyg_ms=None,
            vs_pyg=None,
            error=error,
        )

    def _sparse(
        self, op: Op, graph: SparseGraph, operands: list[torch.Tensor], out: torch.Tensor
    ) -> tuple[float | None, str | None]:
        """The median of torch.sparse, after a check that it computes the same; else why there is none."""
        if op.sparse is None:
            return None, "torch.sparse has no such op"
        try:
            run = op.sparse(graph, *operands)
            if run is None:
                return None, "torch.sparse has no such dtype"
            error = relative_error(run(), out.double())
            if error > 2e-2:  # cuSPARSE may add in another precision; a wrong comparison would be off by about 1
                raise GateError(f"torch.sparse does not compute {op.name}: off by {error:.2e}")
            return statistics.median(self.clock.times_ms(run, self.scale.rounds)), None
        except torch.cuda.OutOfMemoryError:
            return None, "out of memory"
        except (NotImplementedError, RuntimeError) as error_of_torch:
            return None, str(error_of_torch).splitlines()[0]

    def _layer(self, name: str, distribution: str, width: int, dtype: torch.dtype, graph: SparseGraph) -> None:
        """A whole GATConv, forward and backward with gradients of parameters and features, beside PyG's."""
        pyg = pyg_gat(width, dtype, self.device)
        if pyg is None:
            self.not_measured.append(
                f"{name}, {distribution}, width {width}, {str(dtype)[6:]}: PyTorch Geometric is not installed"
            )
            return
        ours = our_gat(pyg)
        x = torch.randn(graph.num_src, width, device=self.device).to(dtype).requires_grad_()
        grad = torch.randn(graph.num_dst, width, device=self.device).to(dtype)
        rows = graph.in_edges
        counts = rows.indptr.long().diff()
        dst = torch.repeat_interleave(torch.arange(graph.num_dst, device=self.device), counts)
        edge_index = torch.stack([rows.indices.long(), dst])

        def run(layer: torch.nn.Module, structure: object) -> object:
            out = layer(x, structure) if layer is pyg else layer(structure, x)
            return torch.autograd.grad(out, [x, *layer.parameters()], grad)

        found = spread(self.clock.times_ms(lambda: run(ours, graph), self.scale.rounds))
        pyg_ms = None
        why = None
        try:
            with torch.no_grad():
                error = relative_error(ours(graph, x), pyg(x, edge_index).double())
            if error > 2e-2:  # PyG rounds each message in half precision
                raise GateError(f"our GAT layer and PyTorch Geometric's differ by {error:.2e}")
            pyg_ms = statistics.median(self.clock.times_ms(lambda: run(pyg, edge_index), self.scale.rounds))
        except torch.cuda.OutOfMemoryError:
            why = "out of memory"
        self._add(
            distribution,
            width,
            dtype,
            graph,
            **found,
            variant=name,
            predicted=None,
            gather_floor_percent=None,
            compulsory_floor_percent=None,
            torch_sparse_ms=None,
            vs_torch_sparse=None,
            pyg_ms=pyg_ms,
            pyg_missing=why,
            vs_pyg=None if pyg_ms is None else pyg_ms / found["p50"],
        )

    def _add(self, distribution: str, width: int, dtype: torch.dtype, graph: SparseGraph, **facts: Any) -> None:
        line = {
            **self._common,
            "dataset": distribution,
            "num_nodes": graph.num_dst,
            "num_edges": graph.num_edges,
            "feat_dim": width,
            "dtype": str(dtype)[6:],
            "config": {"heads": HEADS, "max_degree": int(graph.in_edges.indptr.diff().max())},
            "feature_bytes": graph.num_src * width * dtype.itemsize,
            "copy_bytes_per_s": self.bandwidth,
            "iters": self.scale.rounds,
            "warmup": 3,
            "time": time.strftime("%Y-%m-%dT%H:%M:%S"),
            **facts,
        }
        self.lines.append(line)
        self.console.print("  ".join(rows_of([line])[0]), highlight=False)


def common_facts(device: torch.device) -> Line:
    """What every line of a run shares: machine, versions, commit."""
    facts: Line = {"bench": "ops_gpu", "backend": "cuda", "world_size": 1, "seed": 0, "metric": "time", "unit": "ms"}
    machine: Line = {"arch": platform.machine(), "device": "cpu"}
    if device.type == "cuda":
        properties: Any = torch.cuda.get_device_properties(device)
        machine |= {
            "device": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "memory_bytes": properties.total_memory,
            "l2_bytes": properties.L2_cache_size,
            "num_sms": properties.multi_processor_count,
        }
    versions = {
        "dgl_hybrid": dgl_hybrid.__version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
    }
    if device.type == "cuda":
        from dgl_hybrid.ops.cuda.runtime import describe

        status = describe()
        versions |= {"nvrtc": status.nvrtc_version, "driver": status.driver_version}
    return {
        **facts,
        "device": device.type,
        "machine": machine,
        "versions": versions,
        "git_sha": _git("rev-parse", "--short", "HEAD"),
        "dirty": bool(_git("status", "--porcelain", "--", "dgl_hybrid", "benchmarks/ops")),
    }


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", FOLDER, *arguments], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def summarise(bench: Bench) -> Line:
    """The figures that the project promises, and the cells; a figure without cells is None."""

    def of(name: str, key: str, least_width: int = 0) -> Iterator[float]:
        for line in bench.lines:
            if line["variant"] == name and line[key] is not None and line["feat_dim"] >= least_width:
                yield line[key]

    larger_than_l2 = [
        line
        for line in bench.lines
        if line["variant"] == "copy_u sum"
        and line["feat_dim"] >= 64
        and line["feature_bytes"] > line["machine"].get("l2_bytes", 0)
    ]
    return {
        "device": bench._common["machine"]["device"],
        "copy_gbytes_per_s": bench.bandwidth / 1e9,
        "copy_u_sum_vs_torch_sparse_min": min(of("copy_u sum", "vs_torch_sparse", 64), default=None),
        "copy_u_sum_gather_floor_percent_min": min(
            (line["gather_floor_percent"] for line in larger_than_l2), default=None
        ),
        "gat_layer_vs_pyg_median": _median(list(of("GAT layer + backward", "vs_pyg"))),
        "largest_error": bench.worst_error,
        "num_cells": len(bench.lines),
        "wrong": bench.wrong,
        "not_measured": bench.not_measured,
        "cells": bench.lines,
    }


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def why_not() -> str | None:
    """Says what is missing for a run; None if nothing is."""
    if torch.version.cuda is None:
        return f"this PyTorch ({torch.__version__}) is built without CUDA"
    if not torch.cuda.is_available():
        return "PyTorch sees no CUDA GPU"
    try:
        load_backend("cuda")
    except KernelError as error:
        return str(error)
    return None


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ops.gpu", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--write", nargs="?", type=Path, const=FOLDER, metavar="FOLDER", help="append to its gpu.jsonl")
    parser.add_argument("--json", action="store_true", help="end with one JSON object on the last line of stdout")
    parser.add_argument("--quick", action="store_true", help="smaller graphs, two widths, fewer rounds")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    missing = why_not()
    if missing is not None:
        print(f"benchmarks.ops.gpu needs a CUDA GPU: {missing}. Nothing was measured.", file=sys.stderr)
        return 2
    bench = Bench(torch.device("cuda", 0), QUICK if args.quick else Scale(), make_console(to_stderr=True))
    failure = None
    try:
        bench.run()
    except (KernelError, RuntimeError) as error:  # what was measured before is worth keeping
        failure = f"{type(error).__name__}: {error}"
        bench.not_measured.append(f"everything after {failure}")
    table = Table(*HEAD)
    for row in rows_of(bench.lines):
        table.add_row(*row)
    make_console(to_stderr=args.json).print(table)
    for word, cells in (("not measured", bench.not_measured), ("wrong, so not timed", bench.wrong)):
        for cell in cells:
            print(f"{word}: {cell}", file=sys.stderr)
    if args.write is not None and bench.lines:
        args.write.mkdir(parents=True, exist_ok=True)
        with (args.write / "gpu.jsonl").open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in bench.lines)
        write_report(args.write)
    if args.json:
        print(json.dumps(summarise(bench)))
    return 1 if bench.wrong or failure is not None else 0


if __name__ == "__main__":
    sys.exit(main())
