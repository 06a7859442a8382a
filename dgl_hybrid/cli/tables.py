# SPDX-License-Identifier: Apache-2.0
"""Results as tables on stdout."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from dgl_hybrid.training.report import TrainReport

PLAIN_WIDTH = 140
"""Columns where stdout is no terminal, whose width is not known then."""


_NEXT_UNIT = 999.5
"""What would be 1000 in three digits, and be printed as 1e+03."""


def make_console() -> Console:
    """A console on stdout; plain text where that is not a terminal. Names of graphs and files are printed as they are,
    brackets and colons included.
    """
    width = None if sys.stdout.isatty() else PLAIN_WIDTH
    return Console(file=sys.stdout, width=width, highlight=False, markup=False, emoji=False)


def print_training(report: TrainReport, changes: str = "") -> None:
    """Prints time, bytes, dependencies and accuracy of a run, and what was done to its graph."""
    console = make_console()
    console.print(
        f"{report.model} on {report.dataset}, {report.ranks} rank{'s' if report.ranks > 1 else ''}, "
        f"strategy {report.strategy}"
        + (f" (chosen: {report.chosen_plan})" if report.chosen_plan != report.strategy else "")
        + f", {report.dtype}, {_name_epochs(report)}"
        + ("" if report.approximate is None else f"; training is {report.exactness}, evaluation exact")
        + _name_chunks(report.chunk_rows if report.approximate is None else None)  # those come all at once
    )
    if changes:
        console.print(f"graph: {changes}")
    title = "Dependencies and bytes per epoch, all ranks together (layer 1: once, where its sums are kept)"
    layers = Table("layer", title=title, title_justify="left")
    for name in ("cached rows", "communicated rows", "sent forward", "sent backward"):
        layers.add_column(name, justify="right")
    for layer in report.layers:
        layers.add_row(
            str(layer.layer),
            f"{layer.cached:,}",
            f"{layer.communicated:,}",
            format_bytes(layer.forward_bytes),
            format_bytes(layer.backward_bytes),
        )
    console.print(layers)
    steady = report.steady_epochs()
    mean = {
        "compute": _mean([epoch.compute_s for epoch in steady]),
        "exchange": _mean([epoch.exchange_s for epoch in steady]),
        "wait": _mean([epoch.wait_s for epoch in steady]),
    }
    total = sum(mean.values())
    times = Table("epoch (median)", title="Time of an epoch", title_justify="left")
    for name in (*(f"{part} (mean)" for part in mean), "predicted"):
        times.add_column(name, justify="right")
    times.add_row(
        format_seconds(report.epoch_time_s),
        *(f"{format_seconds(value)} ({value / total:.0%})" if total else "-" for value in mean.values()),
        "-" if report.predicted_epoch_s is None else format_seconds(report.predicted_epoch_s),
    )
    console.print(times)
    accuracy = Table("accuracy", title="Loss and accuracy", title_justify="left")
    for name in ("epoch", "train", "val", "test"):
        accuracy.add_column(name, justify="right")
    for name, row in (("best validation", report.best), ("last epoch", report.final)):
        accuracy.add_row(name, str(row.epoch), *(format_share(x) for x in (row.train, row.val, row.test)))
    console.print(accuracy)
    peak = ", ".join(format_bytes(rss) for rss in report.peak_rss_bytes)
    console.print(f"loss {report.epochs[0].loss:.6f} -> {report.epochs[-1].loss:.6f}; peak memory by rank: {peak}")


def _name_epochs(report: TrainReport) -> str:
    count, first = len(report.epochs), report.first_epoch
    return f"{count} epochs" if first == 1 else f"epochs {first} to {first + count - 1}, resumed"


def _name_chunks(chunk_rows: int | None) -> str:
    return "" if chunk_rows is None else f"; rows are received {chunk_rows:,} at a time, to fit the memory budget"


def print_plan(result: dict[str, Any]) -> None:
    """Prints what `plan` found, rank by rank, and explanations."""
    console = make_console()
    chosen = "" if result["chosen_plan"] == result["strategy"] else f" (chosen: {result['chosen_plan']})"
    console.print(
        f"{result['model']} on {result['dataset']}, {result['ranks']} ranks, strategy {result['strategy']}{chosen}; "
        f"predicted epoch {format_seconds(result['predicted_epoch_s'])}{_name_chunks(result['chunk_rows'])}"
    )
    title = "What each rank caches and receives, per epoch (layer 1: once, where its sums are kept)"
    table = Table("rank", title=title, title_justify="left")
    names = ("layer", "cached rows", "communicated rows", "compute", "receive", "bytes received\nforward", "bytes held")
    for name in names:
        table.add_column(name, justify="right")
    for row in result["by_rank"]:
        table.add_row(
            str(row["rank"]),
            str(row["layer"]),
            f"{row['cached']:,}",
            f"{row['communicated']:,}",
            format_seconds(row["compute_ms"] / 1e3),
            format_seconds(row["comm_ms"] / 1e3),
            format_bytes(row["received_bytes"]),
            format_bytes(row["held_bytes"]),
        )
    console.print(table)
    for text in result["explanations"]:
        console.print(text)


def format_bytes(value: float) -> str:
    """E.g. 1.25 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(value) < _NEXT_UNIT:
            return f"{value:.0f} B" if unit == "B" else f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB" if abs(value) < _NEXT_UNIT else f"{value:,.0f} TB"


def format_seconds(value: float) -> str:
    """E.g. 12.3 ms."""
    if value * 1e3 >= _NEXT_UNIT:
        return f"{value:.2f} s"
    if value * 1e6 >= _NEXT_UNIT:
        return f"{value * 1e3:.3g} ms"
    return f"{value * 1e6:.3g} us"


def format_share(value: float) -> str:
    """E.g. 81.5 %."""
    return "-" if math.isnan(value) else f"{100 * value:.1f} %"


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
