# SPDX-License-Identifier: Apache-2.0
"""Measurements as rows of words, for the terminal and for Markdown. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.distdgl_reads.cells import Line, cell_key, count_payback_epochs

COUNT_HEAD = ("graph/parts/fanouts", "plugin", "remote rows", "requests", "remote seeds", "held MB", "filled MB")
TIME_HEAD = (
    *("graph/parts/fanouts", "links", "plugin", "epoch (p20 to p80)", "sample", "read", "compute", "CPU"),
    *("off/on", "fill", "paid after"),
)


def count_rows(lines: Sequence[Line]) -> list[tuple[str, ...]]:
    """Returns what all trainers together read per epoch, once the store is filled."""
    return [
        (
            *(cell_key(line), line["variant"]),
            *(f"{line[name]:,.0f}" for name in ("remote_rows", "remote_sampling_requests", "remote_seeds")),
            *(f"{line[name] / 1e6:.1f}" for name in ("held_bytes", "fill_bytes")),
        )
        for line in lines
        if line["metric"] == "reads_per_epoch"
    ]


def time_rows(lines: Sequence[Line]) -> list[tuple[str, ...]]:
    """Returns epoch times, and those of the plugin off over those of the plugin on."""
    timed = [line for line in lines if line["metric"] == "epoch_time"]
    off = {(cell_key(line), line["rate_bits_per_s"]): line for line in timed if line["variant"] == "off"}
    rows = []
    for line in timed:
        key, rate = cell_key(line), line["rate_bits_per_s"]
        words = [key, f"{rate / 1e6:g} Mb/s", line["variant"]]
        words.append(f"{line['p50']:.2f} s ({line['p20']:.2f} to {line['p80']:.2f})")
        words += [f"{line[part]:.2f} s" for part in ("sample_s", "read_s", "compute_s", "cpu_s")]
        baseline = off.get((key, rate))
        if baseline is None or line["variant"] not in ("unlimited", "10%"):
            words += ["", "", ""]
        else:
            paid = count_payback_epochs(baseline, line)
            words += [f"{baseline['p50'] / line['p50']:.2f}", f"{line['fill_s']:.2f} s"]
            words.append("never" if paid is None else f"{paid} epochs")
        rows.append(tuple(words))
    return rows


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a Markdown table."""
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])
