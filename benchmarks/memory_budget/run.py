# SPDX-License-Identifier: Apache-2.0
"""Does training stay within a memory budget that all received rows together would exceed, and what does it cost?

    python -m benchmarks.memory_budget [--scale 1] [--json] [--write]

Everything is communicated, three times on the same cell, in turns: with all received rows of a layer resident, in
messages that fit a budget of 32 MiB, and in messages of 256 rows. The last holds next to nothing of other ranks, so
what the others' resident memory has more than it is what their received rows take.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.systems.grid import Cell
from benchmarks.systems.measure import Settings
from benchmarks.systems.results import Line
from benchmarks.systems.variants import Comparison, Result, make_parser

RESIDENT, BUDGET, FEW = SYSTEMS = ("depcomm_apart", "depcomm_32_mib", "depcomm_few_rows")
BUDGET_MIB = 32.0
MODELS = (("sage", 3), ("gcn", 2), ("gat", 2))


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


def put_together(resident: Result, budget: Result, few: Result) -> Result:
    """Returns what the first two hold more than the last."""
    budget_mib = budget["peak_mib"] - few["peak_mib"]
    return {
        "resident_mib": resident["peak_mib"] - few["peak_mib"],
        "budget_mib": budget_mib,
        "share_of_budget": budget_mib / BUDGET_MIB,
    }


def row_of(result: Result) -> tuple[str, ...]:
    """Times in milliseconds, memory in MiB."""
    resident, budget, few = (result[name] for name in SYSTEMS)
    return (
        f"{result['resident_mib']:.0f}",
        f"{result['budget_mib']:.0f}",
        f"{result['share_of_budget']:.2f}",
        f"{resident['peak_mib']:.0f}",
        f"{budget['peak_mib']:.0f}",
        *(f"{1e3 * variant['epoch_s']:.0f}" for variant in (resident, budget, few)),
    )


COMPARISON = Comparison(
    systems=SYSTEMS,
    figures_of=figures_of,
    put_together=put_together,
    title=f"Budget of {BUDGET_MIB:.0f} MiB for rows of other ranks; MiB, ms per epoch",
    head=(
        *("cell", "resident: MiB more", "in the budget: MiB more", "over the budget's"),
        *("peak resident", "peak budget", "epoch resident", "epoch budget", "epoch few rows"),
    ),
    row_of=row_of,
    readme=Path(__file__).parent / "README.md",
)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser("python -m benchmarks.memory_budget")
    parser.add_argument("--hidden", type=int, default=256)
    args = parser.parse_args(arguments)
    # Memory that is free goes back to the system, so that what is resident is what is used.
    settings = Settings(rounds=5, timeout_s=600.0, allocator="default")
    results = COMPARISON.measure(cells_of(args.graph or ["powerlaw"], args.scale, args.hidden), settings, args.cache)
    COMPARISON.report(results, args, budget_mib=BUDGET_MIB)
