# SPDX-License-Identifier: Apache-2.0
"""dgl_hybrid on the full graph, by its public interface."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dgl_hybrid
from benchmarks.systems.adaptors import curve
from benchmarks.systems.adaptors.base import (
    Epoch,
    Sample,
    Stopwatch,
    System,
    mean_over_ranks,
    original_ids,
    pick_logits,
    sample_ids,
    sketch_model,
)
from benchmarks.systems.job import Job
from dgl_hybrid.exchange.communicator import Communicator
from dgl_hybrid.exchange.connect import RankTransport, create_communicator
from dgl_hybrid.planner import DependencyPlan, PlannerConfig
from dgl_hybrid.training.epoch_clock import EpochClock


class Ours(System):
    """One strategy of `FullGraphLoader`, with further options of it, a memory budget, a transport of rows, a device."""

    def __init__(self, job: Job, *, strategy: str, **options: Any) -> None:
        super().__init__(job)
        budget = options.pop("memory_budget_bytes", None)
        self._transport: RankTransport = options.pop("transport", "auto")
        self._device = torch.device(options.pop("device", "cpu"))
        self._planner = PlannerConfig(strategy=strategy, memory_budget_bytes=budget)
        self._options = options

    def prepare(self) -> dict[str, Any]:
        return self._begin(create_communicator(transport=self._transport))

    def _begin(self, communicator: Communicator, plan: DependencyPlan | None = None) -> dict[str, Any]:
        """Everything before the first epoch, as a script does it; `plan` is one that such a start has found before."""
        job = self.job
        self.g = dgl_hybrid.PartitionedGraph.open(job.part_config, communicator=communicator)
        self.model: nn.Module = self.make_model().to(self._device)
        optimize = getattr(dgl_hybrid, "optimize", None)
        if optimize is not None:
            self.model = optimize(self.model) or self.model
        with Stopwatch() as planning:
            self.loader = dgl_hybrid.FullGraphLoader(
                self.g,
                self.g.owned_nodes("train_mask"),
                job.num_layers,
                self._device,
                model=self.model,
                planner=self._planner,
                plan=plan,
                seed=job.seed,
                autotune=job.options.get("autotune", math.inf),  # epochs are timed once trials are over
                **self._options,
            )
        self.wrapped = self.model if job.world_size == 1 else nn.parallel.DistributedDataParallel(self.model)
        self.optimizer = self.make_optimizer(self.model)
        self.clock = EpochClock(communicator, job.num_layers, self._device)
        return {"is_optimized": optimize is not None, "plan_s": planning.elapsed_s, **self.facts()}

    def facts(self) -> dict[str, Any]:
        gpu = {"gpu_bytes": torch.cuda.max_memory_allocated(self._device)} if self._device.type == "cuda" else {}
        outcome = self.loader.outcome
        if outcome is None:
            return {"predicted": None, "plan": None, **gpu}
        predicted = float(outcome.predicted_epoch_s)
        return {
            **gpu,
            "predicted": predicted if math.isfinite(predicted) else None,
            "plan": outcome.plan.strategy,
            "plan_digest": _digest(outcome.plan),
        }

    @property
    def is_settled(self) -> bool:  # type: ignore[override]
        return bool(getattr(self.loader, "is_settled", True))

    def _step(self) -> tuple[Tensor, Tensor, Tensor]:
        for input_nodes, seeds, blocks in self.loader:
            logits = self.wrapped(blocks, self.g.ndata["feat"][input_nodes])
            loss = F.cross_entropy(logits, self.g.ndata["label"][seeds])
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        return loss.detach(), logits.detach(), seeds

    def check(self) -> Sample:
        losses: list[float] = []
        logits: dict[int, list[float]] = {}
        gradients: dict[str, list[float]] = {}
        for epoch in range(self.job.gate_epochs):
            loss, rows, seeds = self._step()
            # `loss_weight` is this rank's share times the number of ranks; a borrowed seed weighs nothing.
            share = self.loader.loss_weight / self.job.world_size
            losses.append(mean_over_ranks(float(loss) * share, share))
            if epoch == 0:
                gradients = sketch_model(self.model)
            if epoch == 0 and self.loader.num_seeds:
                logits = pick_logits(original_ids(self.job)[seeds.cpu()], rows.cpu(), sample_ids(self.job))
        return Sample(losses=losses, logits=logits, gradients=gradients)

    def run_epoch(self) -> Epoch:
        self.clock.start()
        with Stopwatch(self._device) as watch:
            self._step()
        times = self.clock.stop()
        sent = sum(times.forward_bytes) + sum(times.backward_bytes)
        return Epoch(
            elapsed_s=watch.elapsed_s,
            cpu_s=watch.cpu_s,
            compute_s=times.compute_s,
            exchange_s=times.exchange_s,
            wait_s=times.wait_s,
            exchanges=tuple(asdict(exchange) for exchange in times.exchanges),
            sent_bytes=sent if self.rank == 0 else 0,  # of all ranks together
        )

    def give_back_memory(self) -> None:
        self.loader.give_back_memory()
        super().give_back_memory()

    def train_curve(self, folder: Path, count: int, every: int) -> list[dict[str, Any]]:
        self.model.train()
        torch.manual_seed(self.job.seed)
        return curve.train(self.model, self._step, folder, count, every, rank=self.rank)


class OursInTurns(Ours):
    """All strategies in the same processes, one after another, each with a graph, a model and a loader of its own.

    Processes that do the same are not equally fast. Strategies that share them are, but for what they do.
    """

    def __init__(self, job: Job, **options: Any) -> None:
        super().__init__(job, strategy="hybrid", **options)
        self._strategy = ""
        self._plans: dict[str, DependencyPlan] = {}
        self._told: dict[str, dict[str, Any]] = {}
        self._facts: dict[str, dict[str, Any]] = {}
        self._sizes: dict[str, tuple[int, ...]] = {}

    def prepare(self) -> dict[str, Any]:
        self._communicator = create_communicator(transport=self._transport)
        return {}

    def become(self, name: str) -> bool:
        if name == self._strategy:
            return False
        if self._strategy:
            self._leave_strategy()
        self._strategy, self._planner = name, PlannerConfig(strategy=name)
        self._told.setdefault(name, self._begin(self._communicator, self._plans.get(name)))
        sizes = tuple(self.loader.sets.sizes)
        if name in self._plans and sizes != self._sizes[name]:
            raise RuntimeError(f"{name} held {self._sizes[name]} rows by its plan, and now {sizes}")
        return True

    def _leave_strategy(self) -> None:
        """Keeps the plan, which another stay goes on with, and drops all else: what comes next finds a fresh heap."""
        if self.loader.outcome is not None:
            self._facts[self._strategy] = super().facts()
            self._plans[self._strategy] = self.loader.outcome.plan
            self._sizes[self._strategy] = tuple(self.loader.sets.sizes)
        del self.loader, self.wrapped, self.model, self.optimizer, self.clock, self.g
        System.give_back_memory(self)

    def facts(self) -> dict[str, Any]:
        return self._told.get(self._strategy, {}) | (self._facts.get(self._strategy) or super().facts())


def _digest(plan: DependencyPlan) -> str:
    """What this rank's plan does, whichever strategy it is called by: which rows it computes, and how layers do it."""
    sums_first = plan.trace.sums_first if plan.trace is not None else ()  # by measured rates: starts may differ
    found = hashlib.sha256(json.dumps([plan.num_layers, plan.chunk_rows, plan.num_cached, sums_first]).encode())
    for ids in plan.cached:
        found.update(ids.numpy().tobytes())
    return found.hexdigest()[:16]
