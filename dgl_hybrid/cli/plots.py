# SPDX-License-Identifier: Apache-2.0
"""Draws a comparison from its lines of JSON and does nothing else; PNG and SVG, in colour-blind safe colours."""

from __future__ import annotations

import io
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dgl_hybrid.planner.durable import write_durably
from dgl_hybrid.training.report import DISTDGL, PLAIN_DGL

# Okabe and Ito's palette.
BLUE, ORANGE, GREEN, SKY, GREY, RED = "#0072B2", "#E69F00", "#009E73", "#56B4E9", "#999999", "#D55E00"
STRATEGY_COLOURS = {PLAIN_DGL: GREY, DISTDGL: RED, "depcache": BLUE, "depcomm": ORANGE, "hybrid": GREEN}
LONGEST = 4.0
"""A bar that is so many times as long as the longest of the others is cut, or these could not be told apart."""


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Returns the runs of a `results.jsonl`."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def draw_results(lines: Path, folder: Path) -> list[Path]:
    """Draws epoch time, bytes sent and memory of every run that was measured; returns the files written."""
    runs = [run for run in read_lines(lines) if not run.get("error")]
    figure, axes = _figure(3, width=13.5, height=3.9)
    names = [run["strategy"] for run in runs]
    colours = [STRATEGY_COLOURS.get(name, SKY) for name in names]

    # DistDGL's are not of turns.
    times = [[1e3 * time_s for time_s in run.get("turn_times_s") or run["times_s"]] for run in runs]
    medians = [statistics.median(values) for values in times]
    low = [median - _quantile(values, 0.2) for median, values in zip(medians, times, strict=True)]
    high = [_quantile(values, 0.8) - median for median, values in zip(medians, times, strict=True)]
    _bars(axes[0], names, medians, colours, "ms", low=low, high=high)
    axes[0].set_title("How long is an epoch?")
    axes[0].set_ylabel("time per epoch (ms)\nmedian, bars 20 to 80 %")

    ours = [(run, colour) for run, colour in zip(runs, colours, strict=True) if _is_ours(run)]
    sent = [run["steady_bytes_sent"] / 1e6 for run, _ in ours]
    axes[1].bar([run["strategy"] for run, _ in ours], sent, color=[colour for _, colour in ours])
    _label(axes[1], sent, [f"{value:.3g} MB" for value in sent])
    axes[1].set_title("How much do the ranks exchange?")
    axes[1].set_ylabel("sent per epoch, all ranks (MB)")

    memory = [
        max(p - b for p, b in zip(run["peak_rss_bytes"], run["base_rss_bytes"], strict=True)) / 1e6 for run in runs
    ]
    # DistDGL's is the most of all batch sizes that it tried, the largest first: the one that it took may need less.
    is_bound = [not _is_ours(run) and run.get("batch_size") is not None for run in runs]
    _bars(axes[2], names, memory, colours, "MB", prefixes=["<= " if bound else "" for bound in is_bound])
    axes[2].set_title("How much memory does a rank need?")
    axes[2].set_ylabel("peak of the largest rank (MB)\nwithout interpreter and libraries")
    for axis in axes:
        axis.set_ylim(bottom=0, top=axis.get_ylim()[1] * 1.1)
    figure.suptitle(_subject(runs), fontsize=10, color="#444444")
    return _save(figure, folder, "demo_results")


def draw_plans(lines: Path, folder: Path) -> list[Path]:
    """Draws what each strategy caches and communicates at every layer; returns the files written."""
    runs = [run for run in read_lines(lines) if _is_ours(run)]
    figure, axes = _figure(len(runs), width=4.0 * len(runs), height=3.9, share_y=True)
    for axis, run in zip(axes, runs, strict=True):
        layers = [f"layer {layer['layer']}" for layer in run["plan"]]
        cached = [layer["cached"] for layer in run["plan"]]
        communicated = [layer["communicated"] for layer in run["plan"]]
        axis.bar(layers, cached, color=BLUE, label="cached (computed or held here)")
        axis.bar(layers, communicated, bottom=cached, color=ORANGE, hatch="//", edgecolor="white", label="communicated")
        totals = [a + b for a, b in zip(cached, communicated, strict=True)]
        _label(axis, totals, [f"{a:,} + {b:,}" for a, b in zip(cached, communicated, strict=True)])
        axis.set_title(run["strategy"])
    axes[0].set_ylabel("rows of other ranks' vertices\nread in an epoch (layer 1: once, if kept)")
    axes[0].set_ylim(top=axes[0].get_ylim()[1] * 1.1)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
    figure.suptitle("What is cached, what is communicated?  " + _subject(runs), fontsize=10, color="#444444")
    return _save(figure, folder, "demo_plan")


def _is_ours(run: dict[str, Any]) -> bool:
    return run["strategy"] not in (PLAIN_DGL, DISTDGL)


def _longest_drawn(values: Sequence[float], tops: Sequence[float]) -> float:
    """Returns how long bars may be drawn; infinite where none is so much longer than all others.

    Args:
        values: Lengths of the bars.
        tops: The same with their error bars.
    """
    at = max(range(len(values)), key=lambda position: values[position])
    longest = LONGEST * max((top for position, top in enumerate(tops) if position != at), default=math.inf)
    return longest if values[at] > longest else math.inf


def _bars(
    axis: Any,
    names: Sequence[str],
    values: Sequence[float],
    colours: Sequence[str],
    unit: str,
    low: Sequence[float] = (),
    high: Sequence[float] = (),
    prefixes: Sequence[str] = (),
) -> None:
    """Draws bars with their values above them; one that is far longer than the others is cut, with a mark.

    Args:
        axis: Where.
        names: Below the bars.
        values: Their lengths.
        colours: Of the bars.
        unit: Of the values.
        low: Lengths of error bars downwards; empty: there are none.
        high: Upwards.
        prefixes: Of the values that are written above the bars; empty: none.
    """
    tops = [value + up for value, up in zip(values, high or [0.0] * len(values), strict=True)]
    longest = _longest_drawn(values, tops)
    is_cut = [value > longest for value in values]
    axis.bar(names, [min(value, longest) for value in values], color=colours)
    if low:
        whole = [position for position, cut in enumerate(is_cut) if not cut]
        spans = [[span[position] for position in whole] for span in (low, high)]
        axis.errorbar(whole, [values[p] for p in whole], yerr=spans, fmt="none", capsize=4, ecolor="#333333")
    for position in (position for position, cut in enumerate(is_cut) if cut):
        for share in (0.84, 0.90):
            rising = (share * longest, (share + 0.03) * longest)
            ends = (position - 0.5, position + 0.5)
            axis.plot(ends, rising, color="white", linewidth=3, solid_capstyle="butt", zorder=5)
    # Above the error bar, or it would run through the figure.
    before = prefixes or [""] * len(values)
    texts = [f"{prefix}{value:,.0f} {unit}" for prefix, value in zip(before, values, strict=True)]
    _label(axis, [min(top, longest) for top in tops], texts)


def _figure(num_axes: int, *, width: float, height: float, share_y: bool = False) -> tuple[Any, Sequence[Any]]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # No pyplot: it keeps global state and may look for a display.
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, num_axes, sharey=share_y, squeeze=False)[0]
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
        axis.grid(axis="y", color="#e5e5e5")
        axis.tick_params(axis="x", labelsize=9)
        axis.set_axisbelow(True)
    return figure, list(axes)


def _label(axis: Any, heights: Sequence[float], texts: Sequence[str]) -> None:
    for position, (height, text) in enumerate(zip(heights, texts, strict=True)):
        axis.annotate(
            text, (position, height), xytext=(0, 3), textcoords="offset points", ha="center", va="bottom", fontsize=8.5
        )


def _subject(runs: Sequence[dict[str, Any]]) -> str:
    run = runs[-1]
    return f"{run['model']}, {len(run['plan'])} layers, on {run['dataset']}, {run['ranks']} ranks, {run['dtype']}"


def _quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (position - low) * (ordered[high] - ordered[low])


def _save(figure: Any, folder: Path, name: str) -> list[Path]:
    paths = [folder / f"{name}.png", folder / f"{name}.svg"]
    pictures = {}
    for path in paths:
        picture = io.BytesIO()
        figure.savefig(picture, dpi=150, format=path.suffix[1:])
        pictures[path.name] = picture.getvalue()
    write_durably(folder, pictures)
    return paths
