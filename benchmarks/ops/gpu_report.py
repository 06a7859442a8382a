# SPDX-License-Identifier: Apache-2.0
"""Tables and plots of `gpu.jsonl`; runs nothing.

    python -m benchmarks.ops.gpu_report [FOLDER]

Of a measurement that was repeated the newest line counts.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

FOLDER = Path(__file__).parent
# Okabe and Ito's palette.
COLOURS = {"power-law": "#D55E00", "uniform": "#0072B2", "local": "#009E73"}
STYLES = {"float32": "-", "float16": "--", "bfloat16": ":"}
HEAD = ("op", "graph", "width", "dtype", "ms (p20 to p80)", "% gather", "% compulsory", "× torch.sparse", "× PyG")

Line = dict[str, Any]


def newest(lines: Sequence[Line]) -> list[Line]:
    """Returns the last line of each measurement, in the order of the first ones."""
    names = ("variant", "dataset", "num_nodes", "feat_dim", "dtype")
    found = {(line["machine"]["device"], *(line[name] for name in names)): line for line in lines}
    return list(found.values())


def rows_of(lines: Sequence[Line]) -> list[tuple[str, ...]]:
    """Returns measurements as rows of words, as `HEAD` says."""
    return [
        (
            *(line["variant"], line["dataset"], str(line["feat_dim"]), line["dtype"]),
            f"{line['p50']:.3f} ({line['p20']:.3f} to {line['p80']:.3f})",
            *(_number(line[name], "{:.0f}") for name in ("gather_floor_percent", "compulsory_floor_percent")),
            *(_number(line[name], "{:.2f}") for name in ("vs_torch_sparse", "vs_pyg")),
        )
        for line in lines
    ]


def _number(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def tables(lines: Sequence[Line]) -> str:
    """Returns Markdown: a table per machine, with what it was and ran."""
    parts = []
    for device in dict.fromkeys(line["machine"]["device"] for line in lines):
        shown = [line for line in lines if line["machine"]["device"] == device]
        first = shown[0]
        versions = ", ".join(f"{name} {version}" for name, version in first["versions"].items() if version is not None)
        sizes = " and ".join(f"{count:,}" for count in sorted({line["num_nodes"] for line in shown}))
        commits = ", ".join(sorted({f"{line['git_sha']}{'+' * line['dirty']}" for line in shown}))
        parts += [
            f"## {device}",
            f"Copy bandwidth {first['copy_bytes_per_s'] / 1e9:,.0f} GB/s (read and written); "
            f"L2 {first['machine'].get('l2_bytes', 0) / 2**20:.0f} MiB; graphs of {sizes} vertices; {versions}; "
            f"commit {commits}; {first['time']}.",
            "\n".join("| " + " | ".join(row) + " |" for row in [HEAD, ["---"] * len(HEAD), *rows_of(shown)]),
        ]
    return "\n\n".join(["# Results of benchmarks.ops.gpu (generated)", *parts]) + "\n"


def draw(lines: Sequence[Line], variant: str, key: str, title: str, unit: str, file: Path) -> bool:
    """Draws one figure over the width, as PNG and SVG, a line per graph and dtype; False if nothing is to be drawn."""
    shown = [line for line in lines if line["variant"] == variant and line[key] is not None]
    if not shown:
        return False
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for graph, colour in COLOURS.items():
        for dtype, style in STYLES.items():
            cells = sorted(
                (line for line in shown if (line["dataset"], line["dtype"]) == (graph, dtype)),
                key=lambda line: line["feat_dim"],
            )
            if not cells:
                continue
            middle = [cell[key] for cell in cells]
            # A slower round gives a smaller figure.
            below = [value * (1 - cell["p50"] / cell["p80"]) for value, cell in zip(middle, cells)]
            above = [value * (cell["p50"] / cell["p20"] - 1) for value, cell in zip(middle, cells)]
            spread: Any = [[max(0.0, part) for part in side] for side in (below, above)]
            widths = [cell["feat_dim"] for cell in cells]
            axes.errorbar(widths, middle, spread, color=colour, linestyle=style, marker=".", capsize=2)
            axes.plot([], [], color=colour, linestyle=style, marker=".", label=f"{graph}, {dtype}")
    axes.axhline(100 if unit == "%" else 1, color="0.5", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted({line["feat_dim"] for line in shown}), sorted({line["feat_dim"] for line in shown}))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("width (columns)")
    axes.set_ylabel(unit)
    axes.set_title(
        f"{title}\n{shown[0]['machine']['device']}, {shown[0]['num_nodes']:,} vertices, p20 to p80", fontsize=10
    )
    axes.legend(fontsize=7, ncols=3)
    for ending in (".png", ".svg"):
        figure.savefig(file.with_suffix(ending), dpi=150, metadata={"Date": None} if ending == ".svg" else None)
    plt.close(figure)
    return True


def write_report(folder: Path) -> None:
    """Writes `gpu_tables.md` and the plots beside `gpu.jsonl`; plots show the machine of the newest line."""
    text = (folder / "gpu.jsonl").read_text("utf-8")
    lines = newest([json.loads(line) for line in text.splitlines()])
    (folder / "gpu_tables.md").write_text(tables(lines), "utf-8")
    device = json.loads(text.splitlines()[-1])["machine"]["device"]
    shown = [line for line in lines if line["machine"]["device"] == device]
    floor, ratio = "gather_floor_percent", "vs_torch_sparse"
    draw(shown, "copy_u sum", floor, "copy_u sum: how near the gather floor", "%", folder / "gpu_copy_u_floor")
    draw(shown, "gat + backward", floor, "fused GAT, both ways: gather floor", "%", folder / "gpu_gat_floor")
    draw(shown, "copy_u sum", ratio, "copy_u sum against cuSPARSE", "times as fast", folder / "gpu_copy_u_vs_sparse")
    draw(
        *(shown, "GAT layer + backward", "vs_pyg", "GAT layer, both ways, against PyG", "times as fast"),
        folder / "gpu_gat_vs_pyg",
    )


if __name__ == "__main__":
    write_report(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
