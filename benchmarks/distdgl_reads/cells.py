# SPDX-License-Identifier: Apache-2.0
"""From what jobs report to measurements, one per line, and from those to the final object. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.systems.results import spread

RATE_NAMES = {200_000_000: "200mbit", 1_000_000_000: "1gbit"}
VARIANTS = {
    "off": "off",
    "absent": "absent",
    "depcomm": "depcomm",
    "unlimited": "unlimited",
    "10%": "budget_10pct",
}
"""What a measurement calls a mode -> what the final object does."""
WARMUP_EPOCHS = 1
PARTS = ("sample_s", "read_s", "compute_s", "cpu_s")
"""Of an epoch. The first three are elapsed time and include waiting for the other trainers; `cpu_s` is what the cores
worked for a trainer, whoever else used them meanwhile."""
Line = dict[str, Any]


def cell_key(line: Mapping[str, Any]) -> str:
    """Names a data set, number of parts and fanouts: `debian-deps/2/10,25`."""
    return f"{line['dataset']}/{line['num_parts']}/{fanout_text(line['fanouts'])}"


def fanout_text(fanouts: Iterable[int]) -> str:
    return ",".join(map(str, fanouts))


# -------------------------------------------------------------------- measurements


def measurements(messages: Sequence[Mapping[str, Any]], common: Mapping[str, Any]) -> list[Line]:
    """Returns the lines of one job.

    Args:
        messages: Those of `trainer.py`, in order.
        common: Fields of every line: dataset, num_parts, versions, ….
    """
    graph = next(message for message in messages if message["kind"] == "graph")
    about = {**common, **{name: graph[name] for name in ("num_nodes", "num_edges", "feat_dim", "feat_bytes")}}
    lines = [about | counts_line(message) for message in messages if message["kind"] == "counts"]
    groups: dict[tuple[str, int, str], list[Mapping[str, Any]]] = {}
    for message in messages:
        if message["kind"] == "times":
            group = (fanout_text(message["fanouts"]), message["rate_bits_per_s"], message["mode"])
            groups.setdefault(group, []).append(message)
    return lines + [about | times_line(group) for group in groups.values()]


def counts_line(message: Mapping[str, Any]) -> Line:
    """What all trainers together read in an epoch; the first one fills the store and is told apart."""
    epochs = message["epochs"]
    steady = epochs[WARMUP_EPOCHS:] or epochs
    names = ("remote_rows", "remote_sampling_requests", "remote_seeds", "remote_bytes", "held_rows", "held_seeds")
    return {
        "metric": "reads_per_epoch",
        "unit": "rows",
        "variant": message["mode"],
        "fanouts": message["fanouts"],
        **spread([epoch["remote_rows"] for epoch in steady]),
        "iters": len(steady),
        "warmup": len(epochs) - len(steady),
        **{name: statistics.median(epoch[name] for epoch in steady) for name in names},
        "first_epoch_remote_rows": epochs[0]["remote_rows"],
        # In-edge lists are fetched when the loader is made, rows at the first read.
        **{
            name: message["plan_counts"][name] + sum(epoch[name] for epoch in epochs)
            for name in ("fill_rows", "fill_bytes", "fill_seeds")
        },
        "held_bytes": epochs[-1]["held_bytes"],
        "held_bytes_max_trainer": epochs[-1]["held_bytes_max"],
        "plan_s": message["plan_s"],
        "epoch_s": statistics.median(epoch["elapsed_s"] for epoch in steady),
    }


def times_line(messages: Sequence[Mapping[str, Any]]) -> Line:
    """Epoch times of one mode over all rounds."""
    first = messages[0]
    steady = [epoch for message in messages for epoch in message["epochs"][WARMUP_EPOCHS:]]
    typical = statistics.median(epoch["elapsed_s"] for epoch in steady)
    fills = [message["plan_s"] + message["epochs"][0]["elapsed_s"] - typical for message in messages]
    parts = {name: statistics.median(epoch[name] for epoch in steady) for name in PARTS}
    return {
        "metric": "epoch_time",
        "unit": "s",
        "variant": first["mode"],
        "fanouts": first["fanouts"],
        "rate_bits_per_s": first["rate_bits_per_s"],
        **spread([epoch["elapsed_s"] for epoch in steady]),
        "iters": len(steady),
        "warmup": WARMUP_EPOCHS * len(messages),
        **parts,
        "fill_s": statistics.median(fills),
        "plan_s": statistics.median(message["plan_s"] for message in messages),
        "last_loss": statistics.median(message["epochs"][-1]["loss"] for message in messages),
        "link_bits_per_s": first.get("link_bits_per_s"),
    }


# -------------------------------------------------------------------- the final object


def summarise(lines: Sequence[Line], skipped: Mapping[str, str]) -> dict[str, Any]:
    """Returns the object that `--json` ends with.

    Args:
        lines: All measurements.
        skipped: What was not measured -> why.
    """
    scaled = [line for line in lines if line.get("is_full_precision")]
    ordinary = [line for line in lines if not line.get("is_full_precision")]
    result = {**_summarise_counts(ordinary), **_summarise_times(ordinary)}
    # Features that no narrower type holds: apart from the others, so that each figure below is of one kind of data.
    full = _summarise_counts(scaled)
    result |= {f"{name}_full_precision": full[name] for name in full if "unlimited" in name or "fraction" in name}
    for name in list(result):
        measured = [value for value in result[name].values() if value is not None]
        for ending, choose in (("min", min), ("median", statistics.median), ("max", max)):
            result[f"{name}_{ending}"] = choose(measured) if measured else None
    return result | {"skipped": dict(skipped), "cells": list(lines)}


def _summarise_counts(lines: Sequence[Line]) -> dict[str, Any]:
    counts = {(cell_key(line), line["variant"]): line for line in lines if line["metric"] == "reads_per_epoch"}
    keys = list(dict.fromkeys(cell_key(line) for line in lines))

    def of(variant: str, *names: str) -> dict[str, float | None]:
        lines = {key: counts.get((key, variant)) for key in keys}
        return {key: None if line is None else sum(line[name] for name in names) for key, line in lines.items()}

    def of_off(variant: str, *names: str) -> dict[str, float | None]:
        on, off = of(variant, *names), of("off", *names)
        return {key: _divide(on[key], off[key]) for key in keys}

    rows, requests, seeds = "remote_rows", "remote_sampling_requests", "remote_seeds"
    result: dict[str, Any] = {}
    for variant, name in VARIANTS.items():
        for metric in (rows, requests, seeds, "held_bytes", "fill_bytes"):
            result[metric + ("" if metric.endswith("_bytes") else "_per_epoch") + f"_{name}"] = of(variant, metric)
    result["remote_read_fraction_budget_10pct"] = of_off("10%", rows, seeds)
    result["remote_row_fraction_budget_10pct"] = of_off("10%", rows)
    result["remote_seed_fraction_budget_10pct"] = of_off("10%", seeds)
    result["remote_request_fraction_budget_10pct"] = of_off("10%", requests)
    return result


def _summarise_times(lines: Sequence[Line]) -> dict[str, Any]:
    times = {
        (cell_key(line), RATE_NAMES.get(line["rate_bits_per_s"]), line["variant"]): line
        for line in lines
        if line["metric"] == "epoch_time"
    }
    keys = list(dict.fromkeys(cell_key(line) for line in lines))
    result: dict[str, Any] = {}
    for rate in RATE_NAMES.values():
        off = {key: times.get((key, rate, "off")) for key in keys}
        result[f"epoch_s_{rate}_off"] = {key: _get(off[key], "p50") for key in keys}
        for variant, ending in (("unlimited", ""), ("10%", "_budget_10pct")):
            on = {key: times.get((key, rate, variant)) for key in keys}
            result[f"epoch_ratio_{rate}{ending}"] = {key: _ratio(off[key], on[key]) for key in keys}
            result[f"fill_s_{rate}{ending}"] = {key: _get(on[key], "fill_s") for key in keys}
            result[f"epochs_until_fill_is_paid_{rate}{ending}"] = {
                key: count_payback_epochs(off[key], on[key]) for key in keys
            }
    return result


def _divide(a: float | None, b: float | None) -> float | None:
    return None if a is None or not b else a / b


def _get(line: Line | None, name: str) -> float | None:
    return None if line is None else float(line[name])


def _ratio(off: Line | None, on: Line | None) -> float | None:
    return _divide(_get(off, "p50"), _get(on, "p50"))


def count_payback_epochs(off: Line | None, on: Line | None) -> float | None:
    """Epochs until the time saved is the time that the fill took; None if nothing is saved."""
    if off is None or on is None or off["p50"] <= on["p50"]:
        return None
    return max(0, math.ceil(on["fill_s"] / (off["p50"] - on["p50"])))
