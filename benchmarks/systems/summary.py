# SPDX-License-Identifier: Apache-2.0
"""From measurements to ratios, and from those to the final object. Pure.

A ratio above 1 means that hybrid is faster. Both its times are medians of the same run of the same cell; between our
own strategies it is the median of ratios within rounds, where their turns are known.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.systems.grid import OURS, PURE, SAR
from benchmarks.systems.results import FAILED, OK, PEAK_MEMORY, UNAVAILABLE, Line, newest
from benchmarks.systems.turns import ratio_of_turns

Systems = Mapping[str, Line]
"""Lines of one cell by system."""


def seconds(systems: Systems, *names: str) -> float | None:
    """Returns the least median of some systems' epochs, None if none of them was measured."""
    found = [systems[name]["p50"] for name in names if name in systems and systems[name]["status"] == OK]
    return min(found) if found else None


def ratio(systems: Systems, *names: str) -> float | None:
    """Returns the time of the best of some systems over that of hybrid."""
    other, own = seconds(systems, *names), seconds(systems, "hybrid")
    return None if other is None or own is None else other / own


def ratio_of_ours(systems: Systems, name: str) -> float | None:
    """Returns the time of another of our strategies over that of hybrid, formed within rounds if turns are known."""
    plain = ratio(systems, name)
    other, own = (_turns(systems[of]) for of in (name, "hybrid")) if plain is not None else ([], [])
    return ratio_of_turns(other, own) if other and own else plain


def better_pure(systems: Systems) -> str | None:
    """Returns which pure plan is the better; None unless both were measured: one alone is not known to be."""
    ratios = {name: ratio_of_ours(systems, name) for name in PURE}
    found = {name: value for name, value in ratios.items() if value is not None}
    return min(found, key=lambda name: found[name]) if len(found) == len(PURE) else None


def _turns(line: Line) -> list[list[float]]:
    """Returns the median epoch of each turn of each start; none, if any is not known: of older lines."""
    starts = line.get("starts", ())
    return [start["turns"] for start in starts] if all(start.get("turns") for start in starts) else []


def ratio_error(systems: Systems) -> float | None:
    """Returns the standard error of a ratio of two of our systems, relative; None if they were not started repeatedly.

    Starts of a system differ by what the machine was like, which systems of one start share, and by what cannot be told
    from chance: the latter is what a system's time deviates from both means.
    """
    times = [
        [statistics.median(start.get("turns") or [start["p50"]]) for start in systems[name].get("starts", ())]
        for name in OURS
        if name in systems and systems[name]["status"] == OK
    ]
    num_starts = min(map(len, times), default=0)
    if len(times) < 2 or num_starts < 2:
        return None
    logs = np.log([of_system[:num_starts] for of_system in times])
    rest = logs - logs.mean(axis=1, keepdims=True) - logs.mean(axis=0) + logs.mean()
    variance = float((rest**2).sum()) / ((len(times) - 1) * (num_starts - 1))
    return math.sqrt(2.0 * variance / num_starts)


def best_of(systems: Systems, *names: str) -> Line | None:
    """Returns the line of the fastest of some systems."""
    found = [systems[name] for name in names if name in systems and systems[name]["status"] == OK]
    return min(found, key=lambda line: float(line["p50"])) if found else None


def cell_summary(systems: Systems) -> dict[str, Any]:
    """Returns what one cell says: every system's time, hybrid's ratios to them, and the error of its prediction."""
    first = next(iter(systems.values()))
    config = first["config"]
    own = best_of(systems, "hybrid")
    is_distributed = config["ranks"] > 1
    pure = better_pure(systems)
    errors = predicted_errors(own)
    return {
        "cell": first["cell"],
        **{name: config[name] for name in ("graph", "model", "num_layers", "hidden", "ranks", "network")},
        "seconds": {name: line["p50"] for name, line in systems.items()},
        "failed": {name: line["error"] for name, line in systems.items() if line["status"] == FAILED},
        "unavailable": [name for name, line in systems.items() if line["status"] == UNAVAILABLE],
        "vs_distdgl_full": ratio(systems, "distdgl_full"),
        "vs_best_pure": ratio_of_ours(systems, pure) if pure is not None and is_distributed else None,
        "vs_neutronstar": ratio_of_ours(systems, "neutronstar") if is_distributed else None,
        "ratio_error": ratio_error(systems),
        "plans": plans(own),
        "same_plan": {
            "best_pure": same_plan(own, best_of(systems, *PURE if pure is None else (pure,))),
            "neutronstar": same_plan(own, best_of(systems, "neutronstar")),
        },
        "vs_sar": ratio(systems, *SAR),
        "vs_pipegcn": ratio(systems, "pipegcn"),
        "vs_dgl": ratio(systems, "dgl", "dgl_blocks", "dgl_one_thread"),
        "not_in_turns": [
            name
            for name, others in (("vs_distdgl_full", ("distdgl_full",)), ("vs_sar", SAR), ("vs_pipegcn", ("pipegcn",)))
            if in_turns(best_of(systems, *others)) is False
        ],
        "distdgl_compute": _compute_ratio(systems),
        "predicted_error": statistics.median(errors) if errors else None,
        "predicted_error_worst": max(errors, default=None),
    }


def in_turns(line: Line | None) -> bool | None:
    """Tells whether a system trained in turns with hybrid's first start; None if that is not known.

    As many systems wait at once as the memory holds; the others' turns are before or after hybrid's, and a machine that
    changes its speed meanwhile is in their ratios.
    """
    starts = line.get("starts", ()) if line is not None else ()
    return "hybrid" in starts[0]["in_turns_with"] if starts and "in_turns_with" in starts[0] else None


def memory_summaries(lines: Sequence[Line]) -> Iterable[dict[str, Any]]:
    """Returns, for each cell, the most that a rank of hybrid holds while it trains, and one of SAR in its leanest mode.

    Of the last run that measured memory alone, else of the one that measured epochs, if all systems had given back what
    loading has freed. If there are both, the second's ratio stands beside the first's: there hybrid's processes have
    run the other strategies, too, and it is the most of all starts.
    """
    alone = newest(lines, PEAK_MEMORY)
    timed = newest([line for line in lines if line.get("memory") == "trimmed"])
    for cell in timed | alone:
        found = _memory(alone.get(cell, {}), "alone"), _memory(timed.get(cell, {}), "with epochs")
        shown = found[0] or found[1]
        if shown is not None:
            yield {"cell": cell, **shown, "ratio_with_epochs": found[1]["ratio"] if found[1] is not None else None}


def _memory(systems: Systems, measured: str) -> dict[str, Any] | None:
    own = best_of(systems, "hybrid")
    modes = [systems[name] for name in SAR if name in systems and systems[name]["status"] == OK]
    if own is None or not modes:
        return None
    most, of_sar = max(own["peak_rss_bytes"]), min(max(mode["peak_rss_bytes"]) for mode in modes)
    return {
        "hybrid_bytes": most,
        "sar_bytes": of_sar,
        "ratio": most / of_sar,
        "measured": measured,
        "plan": own.get("facts", {}).get("plan"),
        "commit": own["git_sha"],
    }


def _compute_ratio(systems: Systems) -> float | None:
    """Returns how long DistDGL with full neighbourhoods computes in an epoch over the whole of hybrid's.

    Elapsed time of its slowest trainer from the forward to the optimizer's step, waits for cores and for trainers that
    read longer included: what a script that keeps its blocks and inputs in memory would save is not all of the rest.
    """
    own, other = best_of(systems, "hybrid"), best_of(systems, "distdgl_full")
    if own is None or other is None or other.get("compute_s") is None:
        return None
    return float(other["compute_s"]) / float(own["p50"])


def plans(line: Line | None) -> list[str]:
    """Returns the strategies of the plans that hybrid ended up with, one for each start."""
    starts = line.get("starts", ()) if line is not None else ()
    return [start["plan"] for start in starts if start.get("plan") is not None]


def same_plan(line: Line | None, other: Line | None) -> bool | None:
    """Returns whether all starts of both ran one and the same plan, whatever it is called; None if that is not known.

    A ratio of such starts is that of a program to itself: what it differs from 1 by is how starts differ.
    """
    starts = [start for one in (line, other) if one is not None for start in one.get("starts", ())]
    digests = {start.get("plan_digest") for start in starts}
    if line is None or other is None or None in digests or not digests:
        return None
    return len(digests) == 1


def predicted_errors(line: Line | None) -> list[float]:
    """Returns how far the prediction of each start is from what that start measured, relative to it.

    Starts plan for themselves, and by different plans, so none is held against the epochs of another.
    """
    if line is None:
        return []
    starts = [start for start in line.get("starts", ()) if start.get("predicted") is not None]
    told = starts or ([line] if line["predicted"] is not None else [])
    return [abs(float(one["predicted"]) - float(one["p50"])) / float(one["p50"]) for one in told]


def lost(cells: Iterable[Mapping[str, Any]], *, least: float = 1.0) -> list[dict[str, Any]]:
    """Returns where hybrid is not at least so many times as fast as another: cell, against what, ratio, its error, the
    plans that hybrid had, and whether the other ran that very plan.

    Ratios to the systems of others have no error: those are started once.
    """
    found = []
    for cell in cells:
        for name in ("vs_distdgl_full", "vs_best_pure", "vs_neutronstar", "vs_sar", "vs_pipegcn", "vs_dgl"):
            if cell[name] is not None and cell[name] < least:
                error = cell["ratio_error"] if name in ("vs_best_pure", "vs_neutronstar") else None
                found.append(
                    {
                        "cell": cell["cell"],
                        "against": name.removeprefix("vs_"),
                        "ratio": cell[name],
                        "ratio_error": error,
                        "plans": cell["plans"],
                        "same_plan": cell["same_plan"].get(name.removeprefix("vs_")),
                    }
                )
    return sorted(found, key=lambda one: float(one["ratio"]))


def summarise(lines: Sequence[Line], skipped: Mapping[str, str]) -> dict[str, Any]:
    """Returns the object that `--json` ends with.

    Args:
        lines: All measurements; of each cell the last run counts.
        skipped: What was not measured -> why.
    """
    cells = [cell_summary(systems) for systems in newest(lines).values()]
    one_rank = [cell for cell in cells if cell["ranks"] == 1]
    checked = [cell for cell in cells if cell["model"] != "gcn"]
    memory = sorted(memory_summaries(lines), key=lambda one: -float(one["ratio"]))

    def over(name: str, choose: Callable[[Iterable[float]], float], among: Iterable[Mapping[str, Any]] = cells) -> Any:
        values = [cell[name] for cell in among if cell[name] is not None]
        return choose(values) if values else None

    median = statistics.median
    return {
        "vs_distdgl_full_median": over("vs_distdgl_full", median),
        "vs_distdgl_full_min": over("vs_distdgl_full", min),
        "vs_best_pure_min": over("vs_best_pure", min),
        "vs_best_pure_max": over("vs_best_pure", max),
        "vs_neutronstar_min": over("vs_neutronstar", min),
        "vs_neutronstar_max": over("vs_neutronstar", max),
        "vs_sar_median": over("vs_sar", median),
        "vs_sar_min": over("vs_sar", min),
        "vs_dgl_one_rank_gcn_sage_median": over("vs_dgl", median, [c for c in one_rank if c["model"] != "gat"]),
        "vs_dgl_one_rank_gat_median": over("vs_dgl", median, [c for c in one_rank if c["model"] == "gat"]),
        "predicted_error_median": over("predicted_error", median),
        "predicted_error_max": over("predicted_error_worst", max),
        "cells": cells,
        "more": {
            "vs_pure_and_neutronstar_error_median": over("ratio_error", median),
            "vs_distdgl_full_max": over("vs_distdgl_full", max),
            # Without GCN, which is another model on sampled blocks and is not checked.
            **{
                f"vs_distdgl_full_checked_{choose.__name__}": over("vs_distdgl_full", choose, checked)
                for choose in (median, min, max)
            },
            # Where both are known to run one plan in all starts, a ratio is that of a program to itself.
            **{
                f"vs_{name}_other_plan_min": over(
                    f"vs_{name}", min, [cell for cell in cells if not cell["same_plan"][name]]
                )
                for name in ("best_pure", "neutronstar")
            },
            "distdgl_compute_over_hybrid_median": over("distdgl_compute", median),
            "distdgl_compute_over_hybrid_min": over("distdgl_compute", min),
            "vs_pipegcn_median": over("vs_pipegcn", median),
            "vs_pipegcn_min": over("vs_pipegcn", min),
            **{
                f"vs_sar_{network}_median": over("vs_sar", median, [c for c in cells if c["network"] == network])
                for network in ("loopback", "1gbit", "200mbit")
            },
            **{
                f"memory_vs_sar_{choose.__name__}": choose(one["ratio"] for one in memory) if memory else None
                for choose in (median, max)
            },
            "memory_vs_sar_with_epochs_max": max(
                (one["ratio_with_epochs"] for one in memory if one["ratio_with_epochs"] is not None), default=None
            ),
            "lost": lost(cells),
            "failed": [{"cell": c["cell"], "system": s, "error": e} for c in cells for s, e in c["failed"].items()],
            "skipped": dict(skipped),
            "memory": memory,
            "accuracy": list(accuracy_summaries(lines)),
            "allocator_variables": lines[-1]["allocator_variables"] if lines else None,
            "machine": lines[-1]["machine"] if lines else None,
        },
    }


def accuracy_summaries(lines: Iterable[Line]) -> Iterable[dict[str, Any]]:
    """Returns, for each cell of time to accuracy, what both systems took to the accuracy that both reach."""
    for cell, systems in newest(lines, "time_to_accuracy").items():
        yield {
            "cell": cell,
            "target": next(iter(systems.values())).get("target"),
            "seconds": {name: line["p50"] for name, line in systems.items()},
            "ready_s": {name: line.get("ready_s") for name, line in systems.items()},
            "best": {name: line.get("best_accuracy") for name, line in systems.items()},
            "failed": {name: line["error"] for name, line in systems.items() if line["status"] == FAILED},
            "vs_distdgl_sampled": ratio(systems, "distdgl_sampled"),
        }
