# SPDX-License-Identifier: Apache-2.0
"""Draws `results.jsonl` and prints the tables of README.md; runs nothing.

    python -m benchmarks.distdgl_reads.plot

Of a measurement that was repeated the newest line counts.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmarks.distdgl_reads.cells import Line, cell_key
from benchmarks.distdgl_reads.tables import COUNT_HEAD, TIME_HEAD, count_rows, markdown, time_rows

# Names of elements in SVG files are drawn from it: a drawing of the same lines is the same file.
matplotlib.rcParams["svg.hashsalt"] = "dgl_hybrid"

FOLDER = Path(__file__).parent
# Okabe and Ito's palette.
COLOURS = {"off": "#0072B2", "unlimited": "#009E73", "10%": "#E69F00"}
LABELS = {"off": "plugin off", "unlimited": "on, unlimited", "10%": "on, 10 % of the feature bytes"}


def newest(lines: Sequence[Line]) -> list[Line]:
    """Returns the last line of each measurement, in the order of the first ones."""
    found = {(cell_key(line), line["metric"], line.get("rate_bits_per_s", 0), line["variant"]): line for line in lines}
    return list(found.values())


def draw(lines: Sequence[Line], title: str, unit: str, file: Path) -> None:
    """Draws one bar per cell and mode, with the 20th to 80th per cent, as PNG and SVG."""
    keys = list(dict.fromkeys(cell_key(line) for line in lines))
    figure, axes = plt.subplots(figsize=(9, 0.6 + 0.55 * len(keys)), layout="constrained")
    for number, (variant, colour) in enumerate(COLOURS.items()):
        shown = [line for line in lines if line["variant"] == variant]
        places = [keys.index(cell_key(line)) + 0.27 * (number - 1) for line in shown]
        values = [line["p50"] for line in shown]
        spreads: list[list[float]] = [
            [max(0.0, line["p50"] - line["p20"]) for line in shown],
            [max(0.0, line["p80"] - line["p50"]) for line in shown],
        ]
        bars: Any = axes.barh(places, values, 0.25, xerr=spreads, color=colour, label=LABELS[variant], capsize=2)
        words = [f"{value:,.0f}" if unit == "rows" else f"{value:.2f}" for value in values]
        axes.bar_label(bars, words, padding=4, fontsize=7)
    axes.set_yticks(range(len(keys)), keys)
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.set_xlabel(unit)
    axes.set_title(title, fontsize=10)
    axes.legend(fontsize=8)
    for ending in (".png", ".svg"):
        figure.savefig(file.with_suffix(ending), dpi=150, metadata={"Date": None} if ending == ".svg" else None)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Draw results.jsonl and print the tables of README.md.")
    parser.parse_args(arguments)
    lines = newest([json.loads(line) for line in (FOLDER / "results.jsonl").read_text("utf-8").splitlines()])
    counts = [line for line in lines if line["metric"] == "reads_per_epoch"]
    draw(
        [line for line in counts if line["variant"] in COLOURS],
        "Rows read from other machines in an epoch, all trainers (graph/parts/fanouts)",
        "rows",
        FOLDER / "remote_rows",
    )
    for rate in sorted({line["rate_bits_per_s"] for line in lines if line["metric"] == "epoch_time"}):
        draw(
            [line for line in lines if line.get("rate_bits_per_s") == rate and line["variant"] in COLOURS],
            f"Epoch of sampled GraphSAGE, links of {rate / 1e6:g} Mb/s (graph/parts/fanouts)",
            "seconds",
            FOLDER / f"epoch_time_{rate // 10**6}mbit",
        )
    print(markdown(COUNT_HEAD, count_rows(counts)))
    print()
    print(markdown(TIME_HEAD, time_rows(lines)))


if __name__ == "__main__":
    main()
