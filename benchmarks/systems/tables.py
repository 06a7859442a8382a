# SPDX-License-Identifier: Apache-2.0
"""Measurements as rows of words, for the terminal and for Markdown. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.systems.job import SKIPS_LARGEST
from benchmarks.systems.results import FAILED, OK, Line

LABELS = {
    "dgl": "DGL",
    "dgl_blocks": "DGL, blocks",
    "dgl_one_thread": "DGL, 1 thread",
    "distdgl_full": "DistDGL, full",
    "depcache": "depcache",
    "depcomm": "depcomm",
    "neutronstar": "neutronstar",
    "hybrid": "hybrid",
    "sar": "SAR",
    "sar_mfg": "SAR, MFGs",
    "sar_mfg_no_sr": "SAR, MFGs, no SR",
    "pipegcn": "PipeGCN",
}
"""Systems in the order of tables and pictures."""
RATIOS = ("vs_distdgl_full", "vs_best_pure", "vs_neutronstar", "vs_sar", "vs_pipegcn", "vs_dgl")
CELL_HEAD = ("cell", *LABELS.values(), *(name.removeprefix("vs_") for name in RATIOS), "±", "predicted off by")
LINE_HEAD = (
    *("system", "epoch (p20 to p80)", "starts", "CPU", "compute", "exchange", "wait", "rows sent", "on the wire"),
    *("peak memory per rank", "predicted", "floor", "prepared in"),
)
MEMORY_HEAD = (
    *("cell", "hybrid", "SAR, the leanest mode", "hybrid's of SAR's", "measured", "as epochs were timed"),
    *("plan", "commit"),
)


def memory_rows(found: Iterable[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Returns the most that a rank of either holds, in MB; in asterisks where hybrid holds more."""

    def text(ratio: float | None) -> str:
        return "" if ratio is None else f"{ratio:.2f}" if ratio <= 1 else f"*{ratio:.2f}*"

    return [
        (
            one["cell"],
            *(f"{one[name] / 1e6:.0f}" for name in ("hybrid_bytes", "sar_bytes")),
            text(one["ratio"]),
            one["measured"],
            text(one["ratio_with_epochs"]),
            one["plan"] or "",
            one["commit"],
        )
        for one in found
    ]


def cell_rows(cells: Iterable[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Returns every system's median and hybrid's ratios; a ratio under 1, where hybrid lost, is in asterisks, and one
    to a system that did not train in turns with hybrid has a dagger.
    """
    rows = []
    for cell in cells:
        words = [cell["cell"]]
        for system in LABELS:
            if system in cell["failed"]:
                words.append("failed")
            else:
                words.append(seconds_text(cell["seconds"].get(system)))
        words += [ratio_text(cell[name]) + ("†" if name in cell["not_in_turns"] else "") for name in RATIOS]
        words.append("" if cell["ratio_error"] is None else f"{cell['ratio_error']:.0%}")
        words.append(_errors_text(cell["predicted_error"], cell["predicted_error_worst"]))
        rows.append(tuple(words))
    return rows


def _errors_text(median: float | None, worst: float | None) -> str:
    """Returns the median of starts and the worst of them, if that is another figure."""
    if median is None or worst is None:
        return ""
    figures = (f"{median:.0%}", f"{worst:.0%}")
    return figures[0] if figures[0] == figures[1] else f"{figures[0]}, worst {figures[1]}"


def line_rows(lines: Iterable[Line]) -> list[tuple[str, ...]]:
    """Returns all figures of one cell's systems."""
    rows = []
    for line in sorted(lines, key=lambda line: list(LABELS).index(line["variant"])):
        name = LABELS[line["variant"]]
        if line["status"] != OK:
            why = "failed: " if line["status"] == FAILED else ""
            rows.append((name, (why + str(line["error"])).replace("|", "/")[:160], *[""] * (len(LINE_HEAD) - 2)))
            continue
        memory = ", ".join(f"{value / 1e6:.0f}" for value in line["peak_rss_bytes"])
        rows.append(
            (
                name + (", not all seeds at once" if line.get("facts", {}).get(SKIPS_LARGEST) else ""),
                f"{seconds_text(line['p50'])} ({seconds_text(line['p20'])} to {seconds_text(line['p80'])})",
                ", ".join(seconds_text(start["p50"]) for start in line.get("starts", ())),
                *(seconds_text(line[part]) for part in ("cpu_s", "compute_s", "exchange_s", "wait_s")),
                *(bytes_text(line[part]) for part in ("sent_bytes", "wire_bytes")),
                f"{memory} MB",
                *(seconds_text(line[part]) for part in ("predicted", "floor_s", "prepare_s")),
            )
        )
    return rows


def seconds_text(value: float | None) -> str:
    if value is None:
        return ""
    return f"{1000 * value:.3g} ms" if value < 1 else f"{value:.3g} s"


def bytes_text(value: float | None) -> str:
    return "" if value is None else f"{value / 1e6:.1f} MB"


def ratio_text(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.2f}" if value >= 1 else f"*{value:.2f}*"


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a Markdown table."""
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])


def drop_empty_columns(
    head: Sequence[str], rows: Sequence[Sequence[str]]
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Returns head and rows without the columns that no row has anything in."""
    kept = [column for column in range(len(head)) if any(row[column] for row in rows)]
    return tuple(head[column] for column in kept), [tuple(row[column] for column in kept) for row in rows]
