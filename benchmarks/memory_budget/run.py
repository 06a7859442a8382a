# SPDX-License-Identifier: Apache-2.0
"""Does training stay within a memory budget that fully mirrored training exceeds, and what does it cost?

    python -m benchmarks.memory_budget [--graph products] [--scale 1] [--hidden 256] [--json] [--write]

The same cell four times, in turns: everything cached; a budget of 128 MiB, which a plan fits by caching a part; one of
32 MiB, which nothing but messages that are used and dropped fits; and messages of 256 rows. The last holds next to
nothing of other ranks, so what the others' resident memory has more than it is what rows of other ranks take. They go
over the process group: memory that ranks of one host share is resident in each of them, and would be counted twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.systems.grid import Cell
from benchmarks.systems.measure import Settings
from benchmarks.systems.results import Line
from benchmarks.systems.variants import Comparison, Result, make_parser

MIRRORED, LARGE, SMALL, FEW = SYSTEMS = ("depcache_collective", "hybrid_128_mib", "hybrid_32_mib", "depcomm_few_rows")
LARGE_MIB, SMALL_MIB = 128.0, 32.0
GRAPH = "products"
MODELS = (("sage", 3), ("gcn", 3), ("gat", 2))


def cells_of(graphs: Sequence[str], scale: float, hidden: int) -> list[Cell]:
    """Returns what is measured: two ranks of one host, wide rows."""
    return [
        Cell(graph=graph, scale=scale, model=model, num_layers=layers, hidden=hidden)
        for graph in graphs
        for model, layers in MODELS
    ]


def figures_of(line: Line) -> Result:
    """Memory is that of the rank that has most."""
    return {"epoch_s": line["p50"], "peak_mib": max(line["peak_rss_bytes"]) / 2**20}


def put_together(mirrored: Result, large: Result, small: Result, few: Result) -> Result:
    """Returns what the first three hold more than the last."""
    return {
        "mirrored_mib": mirrored["peak_mib"] - few["peak_mib"],
        "large_mib": large["peak_mib"] - few["peak_mib"],
        "small_mib": small["peak_mib"] - few["peak_mib"],
        "share_of_large": (large["peak_mib"] - few["peak_mib"]) / LARGE_MIB,
        "share_of_small": (small["peak_mib"] - few["peak_mib"]) / SMALL_MIB,
    }


def row_of(result: Result) -> tuple[str, ...]:
    """Times in milliseconds, memory in MiB."""
    return (
        f"{result['mirrored_mib']:.0f}",
        f"{result['large_mib']:.0f} ({result['share_of_large']:.2f})",
        f"{result['small_mib']:.0f} ({result['share_of_small']:.2f})",
        f"{result[FEW]['peak_mib']:.0f}",
        *(f"{1e3 * result[name]['epoch_s']:.0f}" for name in SYSTEMS),
    )


COMPARISON = Comparison(
    systems=SYSTEMS,
    figures_of=figures_of,
    put_together=put_together,
    title="MiB that rows of other ranks take (and over the budget's), ms per epoch",
    head=(
        *("cell", "mirrored: MiB", f"budget of {LARGE_MIB:.0f}: MiB", f"budget of {SMALL_MIB:.0f}: MiB"),
        *("peak with few rows", "epoch mirrored"),
        *(f"epoch at {LARGE_MIB:.0f}", f"epoch at {SMALL_MIB:.0f}", "epoch few rows"),
    ),
    row_of=row_of,
    readme=Path(__file__).parent / "README.md",
)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser("python -m benchmarks.memory_budget", graph=GRAPH)
    parser.add_argument("--hidden", type=int, default=256)
    args = parser.parse_args(arguments)
    # Memory that is free goes back to the system, so that what is resident is what is used.
    settings = Settings(rounds=5, starts=2, timeout_s=900.0, allocator="mapped")
    results = COMPARISON.measure(cells_of(args.graph or [GRAPH], args.scale, args.hidden), settings, args.cache)
    COMPARISON.report(results, args, budgets_mib=[LARGE_MIB, SMALL_MIB])
