# SPDX-License-Identifier: Apache-2.0
"""What ranks can be told to do, by name. Each task is collective; its result is the same on every rank, or rank 0's."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm

from dgl_hybrid.errors import PlanError
from dgl_hybrid.launch.workspace import DataConfig
from dgl_hybrid.planner.explain import explain_vertex
from dgl_hybrid.planner.report import report
from dgl_hybrid.training.config import TrainJob
from dgl_hybrid.training.memory import give_back_memory
from dgl_hybrid.training.partitioned_graph import PartitionedGraph
from dgl_hybrid.training.reference import train_reference
from dgl_hybrid.training.report import Accuracy, EpochReport
from dgl_hybrid.training.resident_memory import current_rss_bytes, forget_peak_rss
from dgl_hybrid.training.trainer import (
    build,
    count_dependencies,
    make_loader,
    open_graph,
    rows_as_run,
    save_plan_of,
    train,
)
from dgl_hybrid.training.turns import time_in_turns


def train_task(payload: Mapping[str, Any], *, show_progress: bool = False) -> list[dict[str, Any]]:
    """Trains each of `payload["jobs"]`, one after another, and returns their reports.

    `payload["save_plans_in"]`, if there is one, has a folder or None for each: where ranks save their plans.
    """
    reports = []
    folders = payload.get("save_plans_in", [None] * len(payload["jobs"]))
    for record, folder in zip(payload["jobs"], folders, strict=True):
        job = TrainJob.from_json(record)
        with progress_bar(job, show_progress) as advance:
            reports.append(train(job, on_epoch=advance, save_plan_in=folder).to_json())
    return reports


def turns_task(payload: Mapping[str, Any], *, show_progress: bool = False) -> dict[str, list[float]]:
    """Times `payload["jobs"]`, by their names, and plain DGL in turns in these processes."""
    jobs = {name: TrainJob.from_json(record) for name, record in payload["jobs"].items()}
    dataset = DataConfig(**payload["data"]).load() if dist.get_rank() == 0 else None
    return time_in_turns(jobs, dataset, threads=payload["threads"])


def reference_task(payload: Mapping[str, Any], *, show_progress: bool = False) -> list[dict[str, Any]]:
    """The same with plain DGL on one process and the whole graph."""
    base = current_rss_bytes()  # the graph and its features are part of what training takes, as they are on our ranks
    dataset = DataConfig(**payload["data"]).load()
    give_back_memory()
    forget_peak_rss()  # what generating or reading it took is not: our ranks open what was partitioned elsewhere
    jobs = [TrainJob.from_json(record) for record in payload["jobs"]]
    return [train_reference(job, dataset, base_rss_bytes=base).to_json() for job in jobs]


def plan_task(payload: Mapping[str, Any], *, show_progress: bool = False) -> dict[str, Any]:
    """Plans without training, saves every rank's plan in `payload["out"]` and explains `payload["explain"]`.

    Raises:
        PlanError: On every rank: nothing fits, a vertex to explain is out of range, or a plan cannot be written.
    """
    job = TrainJob.from_json(payload["job"])
    g = open_graph(job)
    communicator = g.communicator
    loader, plan = make_loader(job, g, build(job, g))
    outcome = loader.outcome
    assert outcome is not None
    assert outcome.basis is not None
    problem, costs = outcome.basis.problem, outcome.basis.costs
    if payload["out"] is not None:
        save_plan_of(job, g, plan, payload["out"])
    run = rows_as_run(loader)
    rows = [asdict(row) for row in report(problem, costs, [plan], [run])]
    counts = count_dependencies(loader)
    explanations: list[str] = []
    if payload["explain"] is not None:
        vertex = find_vertex(g, int(payload["explain"]), is_global=payload["explain_is_global"])
        text = None
        if bool((problem.halo_global == vertex).any()):
            with communicator.agreed():
                text = explain_vertex(problem, costs, plan, vertex, run)
        else:
            with communicator.agreed():
                pass
        explanations = [line for line in communicator.gather_json(text) if line is not None]
        owner = int(g.nodes.owner_of(torch.tensor([vertex]))[0])
        original = payload["explain"] if not payload["explain_is_global"] else None
        head = f"vertex {vertex} (global id), owned by rank {owner}"
        if original is not None:
            head = f"original id {original} is global id {vertex}, owned by rank {owner}"
        if not explanations:
            head += ": no other rank reads it, so there is nothing to decide"
        explanations = [head, *explanations]
    return {
        "strategy": job.strategy.strategy,
        "chosen_plan": plan.strategy,
        "chunk_rows": plan.chunk_rows,
        "ranks": communicator.world_size,
        "model": job.model.model,
        "dataset": job.dataset,
        "predicted_epoch_s": plan.estimate.epoch_s if plan.estimate is not None else None,
        "plan": [
            {"layer": layer + 1, "cached": cached, "communicated": communicated}
            for layer, (cached, communicated) in enumerate(counts)
        ],
        "by_rank": [row for rank_rows in communicator.gather_json(rows) for row in rank_rows],
        "topology": plan.topology.to_json() if plan.topology is not None else None,
        "explanations": explanations,
    }


def find_vertex(g: PartitionedGraph, vertex: int, *, is_global: bool) -> int:
    """Returns the global id of a vertex given by its global or its original id. Collective.

    Raises:
        PlanError: On every rank: no such vertex, or the folder does not know original ids.
    """
    position = -1
    with g.communicator.agreed():
        if not 0 <= vertex < g.num_nodes():
            raise PlanError(f"the vertex to explain must lie in 0..{g.num_nodes() - 1} (got {vertex})")
        if not is_global:
            ids = g.partition.orig_node_ids
            if ids is None:
                raise PlanError("this partition does not know original ids; give a global id with --explain-global")
            at = torch.nonzero(ids == vertex).flatten()
            position = g.nodes.start + int(at[0]) if len(at) else -1
    if is_global:
        return vertex
    return max(row[0] for row in g.communicator.gather_ints([position]))


@contextlib.contextmanager
def progress_bar(job: TrainJob, show: bool) -> Iterator[Callable[[int, EpochReport, Accuracy | None], None]]:
    """A bar on stderr, where that is a terminal and this is the rank that shows it; yields what advances it."""
    with tqdm(
        total=job.training.epochs,
        desc=f"{job.strategy.strategy if job.strategy.plan is None else 'saved plan'} {job.model.model}",
        unit="epoch",
        file=sys.stderr,
        disable=not (show and sys.stderr.isatty()),
        leave=False,
    ) as bar:

        def advance(epoch: int, report: EpochReport, accuracy: Accuracy | None) -> None:
            shown = {"loss": f"{report.loss:.4f}"}
            if accuracy is not None:
                shown["val"] = f"{accuracy.val:.3f}"
            bar.set_postfix(shown, refresh=False)
            bar.update(epoch - bar.n)  # a resumed run begins further on

        yield advance


TASKS: dict[str, Callable[..., Any]] = {
    "train": train_task,
    "plan": plan_task,
    "reference": reference_task,
    "turns": turns_task,
}
