# SPDX-License-Identifier: Apache-2.0
"""Time to accuracy: our full-graph training against DistDGL's sampled training, each with the best of its settings.

    python -m benchmarks.systems --accuracy

Both train the same model from the same weights and keep the weights now and then; plain DGL then measures all of them
on the whole graph. The target is the accuracy on validation vertices that both reach, less half a point; the time is
that of training alone until the first weights that reach it. Each system is tuned alike: over the same learning rates,
and over batch sizes where it has any, and the setting with the least time counts. Beside it stands what passes from the
start of the processes until they train: libraries, servers, the graph, plans.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.emulated_network import NetworkError, why_unavailable
from benchmarks.systems.adaptors import CLUSTER_SYSTEMS
from benchmarks.systems.graphs import GraphError, PreparedGraph, prepare
from benchmarks.systems.grid import Cell
from benchmarks.systems.measure import Bench, network_of
from benchmarks.systems.results import (
    FAILED,
    OK,
    Line,
    append_lines,
    describe_run,
    mark_changed,
    measured_run,
    now,
    read_lines,
)
from benchmarks.systems.team import ALLOCATORS, SystemFailure, Team

MARGIN = 0.005
DROPOUT = 0.5
LEARNING_RATES = (0.003, 0.01, 0.03)
SAMPLED_BATCH_SIZES, SAMPLED_STEPS = (1000, 4000), 300
METRIC = "time_to_accuracy"


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One setting of one system."""

    system: str
    lr: float
    epochs: int
    every: int
    """Epochs between kept weights."""
    batch_size: int = 0
    fanouts: tuple[int, ...] = ()

    @property
    def options(self) -> dict[str, Any]:
        # Ours as a user has it: trials of plans take their time like anything else.
        return {"batch_size": self.batch_size, "fanouts": list(self.fanouts)} if self.fanouts else {"autotune": True}


def trials(cell: Cell, num_train: int) -> list[Trial]:
    """Returns the settings that are tried on a cell; sampled training gets epochs for as many steps as it may need."""
    fanouts = (10, 25) if cell.num_layers == 2 else (5, 10, 15)
    sampled = []
    for batch_size in SAMPLED_BATCH_SIZES:
        epochs = math.ceil(SAMPLED_STEPS * batch_size * cell.ranks / max(1, num_train))
        epochs = min(max(epochs, 10), 100)
        sampled += [
            Trial(system="distdgl_sampled", lr=lr, epochs=epochs, every=1, batch_size=batch_size, fanouts=fanouts)
            for lr in LEARNING_RATES
        ]
    return [*(Trial(system="hybrid", lr=lr, epochs=150, every=2) for lr in LEARNING_RATES), *sampled]


def cells() -> tuple[Cell, ...]:
    """Returns the cells of time to accuracy; debian-deps and the products-like graph are the ones that count."""
    return tuple(
        Cell(graph=graph, model="sage", network=network)
        for network in ("loopback", "1gbit")
        for graph in ("debian-deps", "products", "powerlaw", "moby-thesaurus", "reddit")
    )


def time_to(points: Sequence[tuple[float, float]], target: float) -> float | None:
    """Returns the seconds after which an accuracy is first reached; `points` are (seconds, accuracy)."""
    return next((seconds for seconds, accuracy in points if accuracy >= target), None)


def judge(curves: dict[str, list[list[tuple[float, float]]]]) -> dict[str, dict[str, Any]]:
    """Returns for each system the target, its least time to it over its settings, and its best accuracy.

    Args:
        curves: For each system, one curve of (seconds, accuracy on validation vertices) for each setting.
    """
    best = {system: max(accuracy for curve in found for _, accuracy in curve) for system, found in curves.items()}
    target = min(best.values()) - MARGIN
    result = {}
    for system, found in curves.items():
        times = [
            (reached, number) for number, curve in enumerate(found) if (reached := time_to(curve, target)) is not None
        ]
        reached_s, number = min(times)
        result[system] = {"target": target, "p50": reached_s, "setting": number, "best_accuracy": best[system]}
    return result


def measure_cells(
    bench: Bench, wanted: Sequence[Cell], args: argparse.Namespace, results: Path | None, bar: Any
) -> tuple[list[Line], dict[str, str]]:
    """Measures the cells that the results file does not have; returns the lines of all that were asked for, each of the
    run that measured it on such a machine, and what was skipped.
    """
    known = read_lines(results) if results else []
    lines: list[Line] = []
    skipped: dict[str, str] = {}
    why_no_network = why_unavailable()
    deadline = time.monotonic() + 3600 * args.hours
    for cell in wanted:
        bar.set_description(cell.key)
        key = f"accuracy/{cell.key}"
        run = measured_run(
            known,
            key,
            ("hybrid", "distdgl_sampled"),
            bench.about["code"],
            bench.settings.to_json(),
            machine=bench.about["machine"],
            metric=METRIC,
            retry_failed=args.retry_failed,
        )
        if args.graph and cell.graph not in args.graph:
            skipped[key] = "not asked for"
        elif cell.rate_bits_per_s is not None and why_no_network is not None:
            skipped[key] = f"no links can be limited here: {why_no_network}"
        elif run is not None:
            lines += [line for line in known if (line["cell"], line["run"]) == (key, run)]
        elif time.monotonic() > deadline:
            skipped[key] = f"not begun within {args.hours:g} hours"
        else:
            try:
                graph = prepare(cell.graph, cell.scale, cell.ranks, bench.cache)
                bench = replace(bench, about=describe_run(bench.peers))
                found = mark_changed(measure(bench, cell, graph, trials(cell, graph.num_train)), bench.about)
            except (GraphError, NetworkError, SystemFailure, OSError) as error:
                skipped[key] = str(error)
            else:
                lines += found
                if results:
                    append_lines(results, found)
        bar.update()
    return lines, skipped


def measure(bench: Bench, cell: Cell, graph: PreparedGraph, tried: Sequence[Trial]) -> list[Line]:
    """Trains every setting and returns one line for each system."""
    curves: dict[str, list[list[tuple[float, float]]]] = {}
    ready_s: dict[str, list[float]] = {}
    settings: dict[str, list[Trial]] = {}
    failures: dict[str, str] = {}
    links: list[float] = []
    with tempfile.TemporaryDirectory(prefix="accuracy_") as name:
        folder = Path(name)
        judge_team = Team(job=bench.job(cell, graph, "dgl"), folder=folder / "judge")
        try:
            judge_team.start()
            judge_team.ask("prepare", timeout_s=bench.settings.timeout_s)
            for number, trial in enumerate(tried):
                bench.on_phase(f"{trial.system}, lr {trial.lr:g} {trial.options or ''}")
                try:
                    ready, link_bits_per_s, points = _train(bench, cell, graph, trial, folder / str(number))
                except SystemFailure as failure:
                    failures[trial.system] = str(failure)[:500]
                    continue
                files = [point["file"] for point in points]
                found = judge_team.ask("accuracies", timeout_s=bench.settings.timeout_s, files=files)[0]
                curve = [(point["elapsed_s"], one["val"]) for point, one in zip(points, found, strict=True)]
                curves.setdefault(trial.system, []).append(curve)
                ready_s.setdefault(trial.system, []).append(ready)
                links += [] if link_bits_per_s is None else [link_bits_per_s]
                settings.setdefault(trial.system, []).append(trial)
        finally:
            judge_team.end()
    run = uuid.uuid4().hex[:12]
    judged = judge(curves) if len(curves) == len({trial.system for trial in tried}) else {}
    lines = []
    for system in dict.fromkeys(trial.system for trial in tried):
        line = {
            **bench.about,
            "cell": f"accuracy/{cell.key}",
            "run": run,
            "variant": system,
            "dataset": cell.dataset,
            "num_nodes": graph.num_nodes,
            "num_edges": graph.num_edges,
            "feat_dim": graph.feat_dim,
            "world_size": cell.ranks,
            "metric": METRIC,
            "unit": "s",
            "settings": bench.settings.to_json(),
            "config": {**cell.to_json(), "dropout": DROPOUT},
            "allocator_variables": ALLOCATORS[bench.settings.allocator],
            "link_bits_per_s": statistics.median(links) if links else None,
            "time": now(),
            "p50": None,
            "predicted": None,
        }
        if system in judged:
            of_system = judged[system]
            best = settings[system][of_system["setting"]]
            line |= of_system | {
                "status": OK,
                "setting": {"lr": best.lr, **best.options},
                "ready_s": statistics.median(ready_s[system]),
                "curves": [[list(point) for point in curve] for curve in curves[system]],
            }
        else:
            line |= {"status": FAILED, "error": failures.get(system, "the other system failed")}
        lines.append(line)
    return lines


def _train(
    bench: Bench, cell: Cell, graph: PreparedGraph, trial: Trial, folder: Path
) -> tuple[float, float | None, list[dict[str, Any]]]:
    """Trains one setting.

    Returns:
        The seconds until all ranks could begin, what a link carried before (None on loopback), and where weights are
        with the slowest rank's seconds of training.
    """
    job = bench.job(cell, graph, trial.system, lr=trial.lr, dropout=DROPOUT, options=trial.options)
    timeout_s = bench.settings.timeout_s
    with network_of(cell) as (hosts, link_bits_per_s):
        team = Team(
            job=job,
            folder=folder,
            network=hosts,
            allocator=bench.settings.allocator,
            is_cluster=trial.system in CLUSTER_SYSTEMS,
        )
        start = time.monotonic()
        try:
            team.start()
            team.ask("prepare", timeout_s=timeout_s)
            ready_s = time.monotonic() - start
            by_rank = team.ask(
                "curve", timeout_s=timeout_s, folder=str(folder / "weights"), count=trial.epochs, every=trial.every
            )
        finally:
            team.end()
    return (
        ready_s,
        link_bits_per_s,
        [
            {**points[0], "elapsed_s": max(point["elapsed_s"] for point in points)}
            for points in zip(*by_rank, strict=True)
        ],
    )
