# SPDX-License-Identifier: Apache-2.0
"""Puts tables and pictures of the results file into benchmarks/README.md and benchmarks/systems/; runs nothing."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.systems import accuracy
from benchmarks.systems.grid import NETWORKS, SAR
from benchmarks.systems.results import EPOCH_TIME, OK, PEAK_MEMORY, Line, newest, without_partial_runs
from benchmarks.systems.summary import summarise
from benchmarks.systems.tables import (
    CELL_HEAD,
    LINE_HEAD,
    MEMORY_HEAD,
    cell_rows,
    drop_empty_columns,
    line_rows,
    markdown,
    memory_rows,
)

README = Path(__file__).resolve().parents[1] / "README.md"
PICTURES = Path(__file__).parent
BEGIN, END = "<!-- systems: written from results.jsonl, do not edit below -->", "<!-- systems: end -->"
# Okabe and Ito's palette; systems of one family share a colour.
COLOURS = {
    "hybrid": "#009E73",
    "best pure": "#E69F00",
    "neutronstar": "#F0E442",
    "DistDGL, full": "#0072B2",
    "SAR": "#CC79A7",
    "PipeGCN": "#D55E00",
    "DGL": "#000000",
}
SHOWN: dict[str, tuple[str, ...]] = {
    "hybrid": ("hybrid",),
    "best pure": ("depcache", "depcomm"),
    "neutronstar": ("neutronstar",),
    "DistDGL, full": ("distdgl_full",),
    "SAR": SAR,
    "PipeGCN": ("pipegcn",),
    "DGL": ("dgl",),
}
"""Bar of a picture -> the systems whose fastest it shows."""
LINEAR_UP_TO = 20.0
"""Times that are so many times apart at most are drawn from zero on: lengths of bars are as times are then."""


def write(lines: Sequence[Line], *, readme: Path = README, pictures: Path = PICTURES) -> None:
    """Replaces the part of the README between the marks, and the pictures, by the newest whole run of each cell.

    Raises:
        ValueError: The README has no marks.
    """
    text = readme.read_text("utf-8")
    if BEGIN not in text or END not in text:
        raise ValueError(f"{readme} must have the lines {BEGIN!r} and {END!r}")
    lines = without_partial_runs(lines)
    head, _, rest = text.partition(BEGIN)
    tail = rest.partition(END)[2]
    files = draw_all(lines, pictures)
    body = report(lines, [file.relative_to(readme.parent).as_posix() for file in files])
    readme.write_text(f"{head}{BEGIN}\n\n{body}\n\n{END}{tail}", encoding="utf-8")


def report(lines: Sequence[Line], pictures: Sequence[str] = ()) -> str:
    """Returns the tables in Markdown: the ratios, every cell, where we lose, what failed, and every measurement."""
    result = summarise(lines, {})
    cells, more = result["cells"], result["more"]
    if not cells and not more["memory"] and not more["accuracy"]:
        return "Nothing has been measured yet."
    metrics = (EPOCH_TIME, accuracy.METRIC) if cells else (PEAK_MEMORY, accuracy.METRIC)
    shown = [systems for metric in metrics for systems in newest(lines, metric).values()]
    parts = [_conditions([line for systems in shown for line in systems.values()])]
    headline = [name for name, value in result.items() if name not in ("cells", "more")]
    rows = [(name, "" if result[name] is None else f"{result[name]:.3g}") for name in headline]
    rows += [
        (name, "" if more[name] is None else f"{more[name]:.3g}")
        for name in more
        if name.startswith(("vs_", "memory_vs_", "distdgl_"))
    ]
    parts.append(markdown(("figure", "value"), rows))
    parts += [f"![epoch times]({picture})" for picture in pictures if picture.endswith(".png")]
    parts.append(
        "### Every cell\n\nGraph/model-layers x width/ranks/network; medians of epochs; columns right of the systems: "
        "their time over hybrid's, in asterisks where hybrid is slower (best_pure and neutronstar: within rounds, "
        "where turns are known); ±: the standard error of ratios to best_pure "
        "and neutronstar, from how starts of one system differ; †: that system had its turns before or after hybrid's."
    )
    parts.append(markdown(*drop_empty_columns(CELL_HEAD, cell_rows(cells))))
    lost = [
        (
            one["cell"],
            one["against"],
            f"{one['ratio']:.2f}",
            "" if one["ratio_error"] is None else f"{one['ratio_error']:.0%}",
            ", ".join(one["plans"]),
            {None: "", True: "yes", False: "no"}[one["same_plan"]],
        )
        for one in more["lost"]
    ]
    head = ("cell", "than", "ratio", "standard error", "plans of hybrid's starts", "all of both one plan")
    parts.append("### Where hybrid is slower\n\n" + (markdown(head, lost) if lost else "Nowhere."))
    failed = [(one["cell"], one["system"], one["error"].replace("|", "/")) for one in more["failed"]]
    parts.append("### What failed\n\n" + (markdown(("cell", "system", "error"), failed) if failed else "Nothing."))
    if more["accuracy"]:
        parts.append("### Time to accuracy\n\n" + markdown(ACCURACY_HEAD, accuracy_rows(more["accuracy"])))
    if more["memory"]:
        parts.append("### Peak memory beside SAR\n\n" + markdown(MEMORY_HEAD, memory_rows(more["memory"])))
    parts.append("### Every measurement")
    for cell, systems in newest(lines).items():
        table = markdown(*drop_empty_columns(LINE_HEAD, line_rows(systems.values())))
        any_line = next(iter(systems.values()))
        where = f"{any_line['git_sha']}, {_processor(any_line)}"
        parts.append(f"<details><summary>{cell} ({where})</summary>\n\n{table}\n\n</details>")
    return "\n\n".join(parts)


ACCURACY_HEAD = (
    "cell",
    "accuracy that both reach",
    "hybrid",
    "DistDGL, sampled",
    "ratio",
    "before training: hybrid, DistDGL",
    "best of hybrid, DistDGL",
)


def accuracy_rows(cells: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Returns what both systems took to the accuracy that both reach."""

    def text(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    return [
        (
            cell["cell"],
            text(cell["target"], ".3f"),
            *(text(cell["seconds"].get(name), ".3g") + " s" for name in ("hybrid", "distdgl_sampled")),
            text(cell["vs_distdgl_sampled"], ".2f"),
            ", ".join(text(cell["ready_s"].get(name), ".3g") + " s" for name in ("hybrid", "distdgl_sampled"))
            if all(cell["ready_s"].values())
            else "",
            ", ".join(text(cell["best"].get(name), ".3f") for name in ("hybrid", "distdgl_sampled")),
        )
        for cell in cells
    ]


def _conditions(lines: Sequence[Line]) -> str:
    """Says on what, with what and how all this was measured."""
    last = lines[-1]
    machine, versions = last["machine"], last["versions"]
    of_epochs = [line for line in lines if "machine_rates" in line]  # time to accuracy needs no floor
    loads = sorted({line["load_before"] for line in of_epochs})
    starts, rounds, warmup = (
        " or ".join(map(str, sorted({line["settings"].get(name, 1) for line in of_epochs})))
        for name in ("starts", "rounds", "warmup")
    )
    variables = " or ".join(
        dict.fromkeys(
            f"`{' '.join(f'{name}={value}' for name, value in line['allocator_variables'].items()) or 'none'}`"
            for line in lines
        )
    )
    commits = sorted({line["git_sha"] + ("+" if line["dirty"] else "") for line in lines})
    systems = sorted({line["machine"]["system"] for line in lines})
    cells_of: dict[str, set[str]] = {}
    for line in of_epochs or lines:
        cells_of.setdefault(_processor(line), set()).add(line["cell"])
    processors = " or ".join(f"{name} ({len(cells)} cells)" for name, cells in cells_of.items())
    told = (
        f"Machine: {machine['cores']} cores ({machine['arch']}), {processors}, {' or '.join(systems)}, "
        f"{machine['libc']}. Python {versions['python']}, PyTorch {versions['torch']}, "
        f"DGL {versions['dgl']}. Commits (+: with changes): {', '.join(commits)}. "
        f"Allocator variables of all systems of a cell: {variables}."
    )
    if not of_epochs:
        return told
    copied, flops = (
        _range([line["machine_rates"][name] / 1e9 for line in of_epochs]) for name in ("copy_bytes_per_s", "flops")
    )
    return told + (
        f" One thread copies {copied} GB/s and multiplies at {flops} GFLOP/s, differently from run to run. "
        f"{rounds} turns of each start of a system after {warmup} epochs of warm-up "
        f"and the check; {starts} starts of each of ours. "
        f"Load average before a cell: {loads[0]} to {loads[-1]}."
    )


def _processor(line: Line) -> str:
    return str(line["machine"].get("processor", "processor not recorded"))


def _range(values: Sequence[float]) -> str:
    least, most = f"{min(values):.0f}", f"{max(values):.0f}"
    return least if least == most else f"{least} to {most}"


def draw_all(lines: Sequence[Line], folder: Path) -> list[Path]:
    """Draws one picture for each graph and network, as PNG and SVG; returns the files."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "dgl_hybrid"  # drawing the same lines again gives the same file
    groups: dict[tuple[str, str], dict[str, dict[str, Line]]] = {}
    for cell, systems in newest(lines).items():
        first = next(iter(systems.values()))
        groups.setdefault((first["dataset"], first["config"]["network"]), {})[cell] = systems
    files = []
    for (dataset, network), cells in sorted(groups.items()):
        name = re.sub(r"[^A-Za-z0-9.-]+", "_", f"epoch_{dataset}_{network}")
        rate = NETWORKS[network]
        links = "loopback" if rate is None else f"links of {rate / 1e6:g} Mb/s"
        files += _draw(cells, f"Epoch of exact training on {dataset}, {links}", folder / name)
    return files


def _draw(cells: Mapping[str, Mapping[str, Line]], title: str, file: Path) -> list[Path]:
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator, NullFormatter

    keys = list(cells)
    shown = {
        bar: {
            key: min(measured, key=lambda line: float(line["p50"]))
            for key in keys
            if (
                measured := [
                    cells[key][name] for name in names if name in cells[key] and cells[key][name]["status"] == OK
                ]
            )
        }
        for bar, names in SHOWN.items()
    }
    shown = {bar: found for bar, found in shown.items() if found}
    height = 0.8 / max(1, len(shown))
    if not shown:
        return []
    figure, axes = plt.subplots(figsize=(9, 1.2 + len(keys) * (0.2 + 0.16 * len(shown))), layout="constrained")
    for number, (bar, found) in enumerate(shown.items()):
        places = [keys.index(key) + height * (number - (len(shown) - 1) / 2) for key in found]
        values = [line["p50"] for line in found.values()]
        errors = [
            [max(0.0, line["p50"] - line["p20"]) for line in found.values()],
            [max(0.0, line["p80"] - line["p50"]) for line in found.values()],
        ]
        axes.barh(places, values, height * 0.9, xerr=errors, color=COLOURS[bar], label=bar, error_kw={"lw": 0.8})
    axes.set_yticks(range(len(keys)), [" ".join(key.split("/")[1:3]) + " ranks" for key in keys], fontsize=8)
    axes.invert_yaxis()
    times = [line[name] for found in shown.values() for line in found.values() for name in ("p50", "p80")]
    is_wide = max(times) > LINEAR_UP_TO * min(times)
    if is_wide:
        axes.set_xscale("log")
        # As plain numbers, and no more of them than fit: by default a short axis has none or too many.
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("seconds per epoch (median, 20 to 80 per cent)" + (", logarithmic" if is_wide else ""))
    axes.set_title(title, fontsize=10)
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    files = [file.with_name(file.name + ending) for ending in (".png", ".svg")]
    for one in files:
        figure.savefig(one, dpi=120, metadata={"Date": None} if one.suffix == ".svg" else None)
    plt.close(figure)
    return files
