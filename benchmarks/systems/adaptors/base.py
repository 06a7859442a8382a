# SPDX-License-Identifier: Apache-2.0
"""The interface of all systems: join, prepare, show that the numbers are right, train epochs, leave. Runs on a rank."""

from __future__ import annotations

import ctypes
import gc
import os
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.systems.graphs import ORIGINAL_IDS
from benchmarks.systems.job import Job
from dgl_hybrid.training.models import GraphStack, build_model

PATIENCE = timedelta(hours=6)
"""Ranks wait for their turn, asleep; only the starting process decides that something takes too long."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Epoch:
    """One epoch on this rank; what a system cannot tell is None."""

    elapsed_s: float
    cpu_s: float
    """What the cores worked for this rank, whoever else used them meanwhile."""
    compute_s: float | None = None
    exchange_s: float | None = None
    wait_s: float | None = None
    """Inside exchanges until the last rank had come."""
    exchanges: tuple[dict[str, Any], ...] | None = None
    """Each exchange of rows in program order: `layer`, `backward`, `blocked_s` and, of what was done meanwhile,
    `beside_s`; means over ranks."""
    sent_bytes: int | None = None
    """Rows handed to other ranks, gradients of weights not counted."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """What must be equal for all systems that start from the same weights."""

    losses: list[float]
    """Global mean over the train vertices in each of the first epochs."""
    logits: dict[int, list[float]]
    """At the initial weights, by original vertex id; on every rank those it has computed."""
    gradients: dict[str, list[float]] | None = None
    """Of the first step, as the optimizer gets them, by names of weights in `make_model`: what `sketch` makes of each.
    Adam is blind to a constant factor, and so are losses."""
    why_no_gradients: str | None = None
    """Why a system cannot tell; one of both is there."""
    is_comparable: bool = True
    """Whether the system claims to compute what plain DGL does; if not, nothing is compared."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class System(ABC):
    """One rank of a system."""

    is_settled: bool = True
    """Whether epochs are like each other from now on; False while something is still being tuned."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.rank = int(os.environ.get("RANK", "0"))

    def join(self) -> None:
        """Joins the other ranks. A server of DistDGL does not come back from here."""
        if self.job.world_size > 1:
            dist.init_process_group("gloo", timeout=PATIENCE)

    @abstractmethod
    def prepare(self) -> dict[str, Any]:
        """Everything before the first epoch; returns what is to be recorded. Collective."""

    def facts(self) -> dict[str, Any]:
        """Returns what `prepare` could not know yet, and what has changed since."""
        return {}

    def become(self, name: str) -> bool:
        """Trains by another strategy from now on, in the same processes; returns False if it is that one. Collective.

        It begins from the initial weights, with the plan that it has found when it was its turn before, if it was.
        """
        raise NotImplementedError(f"{self.job.system} is one system (asked to become {name})")

    @abstractmethod
    def check(self) -> Sample:
        """Trains the first epochs. Collective."""

    @abstractmethod
    def run_epoch(self) -> Epoch:
        """Trains one epoch: forward, backward and optimizer steps for all train vertices. Collective."""

    def give_back_memory(self) -> None:
        """Hands free memory back, so that the peak of training is measured and not what loading has freed: allocators
        are told to keep all of it. The same for every system.
        """
        gc.collect()
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:  # of glibc
            trim(0)

    def leave(self) -> None:
        """Parts from the other ranks."""
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()

    def train_curve(self, folder: Path, count: int, every: int) -> list[dict[str, Any]]:
        """Trains and keeps weights; see `curve.train`. Collective."""
        raise NotImplementedError(f"{self.job.system} takes no part in time to accuracy")

    def accuracies(self, files: list[Path]) -> list[dict[str, float]]:
        """Returns the share of right answers on each split for kept weights."""
        raise NotImplementedError(f"{self.job.system} measures no accuracy")

    def make_model(self) -> GraphStack:
        """Builds the model, with initial weights that follow from the seed alone."""
        job = self.job
        return build_model(
            job.model,
            job.feat_dim,
            job.hidden,
            job.num_classes,
            job.num_layers,
            dropout=job.dropout,
            heads=job.heads,
            seed=job.seed,
        )

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=self.job.lr)


class Stopwatch:
    """Times a block in elapsed and in processor seconds, until the device has done what it was given."""

    def __init__(self, device: torch.device | None = None) -> None:
        self._gpu = device if device is not None and device.type == "cuda" else None

    def __enter__(self) -> Stopwatch:
        self._start, self._start_cpu = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *error: object) -> None:
        if self._gpu is not None:
            torch.cuda.synchronize(self._gpu)
        self.elapsed_s = time.perf_counter() - self._start
        self.cpu_s = time.process_time() - self._start_cpu


def mean_over_ranks(total: float, count: float) -> float:
    """Returns the sum of totals over the sum of counts. Collective."""
    sums = torch.tensor([total, count], dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(sums)
    return float(sums[0] / sums[1])


def sample_ids(job: Job) -> Tensor:
    """Returns the original ids of the vertices whose logits are compared; train vertices among them count."""
    size = job.sample_size * max(1, job.num_nodes // max(1, job.num_train))
    chosen = np.random.default_rng(job.seed).choice(job.num_nodes, size=min(job.num_nodes, size), replace=False)
    return torch.from_numpy(np.sort(chosen))


def original_ids(job: Job) -> Tensor:
    """Returns (num_nodes,) original ids by global id."""
    return torch.from_numpy(np.load(Path(job.part_config).with_name(ORIGINAL_IDS), allow_pickle=False))


def pick_logits(original: Tensor, logits: Tensor, wanted: Tensor) -> dict[int, list[float]]:
    """Returns the wanted rows among `logits`, whose vertices have the ids `original`."""
    rows = torch.isin(original, wanted).nonzero().flatten()
    return dict(zip(original[rows].tolist(), logits.detach()[rows].tolist(), strict=True))


def sketch(gradients: Iterable[tuple[str, Tensor | None]]) -> dict[str, list[float]]:
    """Returns the norm of each weight's gradient, and its product with a direction drawn for the weight's name."""
    found = {}
    for name, gradient in gradients:
        flat = torch.zeros(1) if gradient is None else gradient.detach().cpu().flatten()
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        direction = torch.randn(len(flat), dtype=torch.float64, generator=generator)
        found[name] = [float(flat.double().norm()), float(flat.double() @ direction)]
    return found


def sketch_model(model: nn.Module) -> dict[str, list[float]]:
    """The same of a model whose weights have the names of those of `make_model`."""
    return sketch((name, parameter.grad) for name, parameter in model.named_parameters())


def timed(step: Callable[[], object]) -> Epoch:
    """Runs and times a step that tells nothing more of itself."""
    with Stopwatch() as watch:
        step()
    return Epoch(elapsed_s=watch.elapsed_s, cpu_s=watch.cpu_s)
