# SPDX-License-Identifier: Apache-2.0
"""Epoch times that compare: several runs take turns in the same processes, and plain DGL beside them.

Runs one after the other compare hours, not runs, on a machine whose speed changes: others share it, or it gets warm. In
turns of half a second what changes meets all of them, and processes are not equally fast for as long as they live, so
that the same ones train everything.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping

import dgl
import torch
import torch.distributed as dist

from dgl_hybrid.datasets import GraphDataset
from dgl_hybrid.training.config import TrainJob
from dgl_hybrid.training.reference import ReferenceRun
from dgl_hybrid.training.report import PLAIN_DGL
from dgl_hybrid.training.trainer import TrainingRun

NUM_TURNS = 7
TURN_S = 0.5
"""Of each run in each turn, at least two epochs; one before them is not counted."""
MAX_EPOCHS = 20
"""Of a turn."""


def time_in_turns(
    jobs: Mapping[str, TrainJob], dataset: GraphDataset | None, *, threads: int, num_turns: int = NUM_TURNS
) -> dict[str, list[float]]:
    """Trains each job and plain DGL in turns. Collective, over PyTorch's process group.

    Args:
        jobs: By name. Give them plans: trials would measure other plans in some of the turns.
        dataset: The whole graph, on rank 0, where plain DGL trains while the others sleep.
        threads: Of plain DGL; what this process had is put back.
        num_turns: Of each.
    Returns:
        Seconds of every epoch that counts, of the slowest rank, by name, "plain DGL" first; the same on every rank.
    """
    trains: dict[str, Callable[[], float]] = {}
    if jobs:
        trains[PLAIN_DGL] = _make_reference(next(iter(jobs.values())), dataset, threads)
        trains |= {name: _make_run(job) for name, job in jobs.items()}
    for train in trains.values():  # what only first epochs pay for: features, a look at the model, memory, kernels
        train()
        train()
    times_s: dict[str, list[float]] = {name: [] for name in trains}
    for turn in range(num_turns):
        # There and back, so that none always follows the same one.
        for name in list(trains) if turn % 2 == 0 else list(trains)[::-1]:
            epoch_s = trains[name]()
            count = min(max(math.ceil(TURN_S / max(epoch_s, 1e-9)), 2), MAX_EPOCHS)
            times_s[name] += [trains[name]() for _ in range(count)]
    return times_s


def _make_run(job: TrainJob) -> Callable[[], float]:
    run = TrainingRun(job)
    return lambda: run.run_epoch().time_s


def _make_reference(job: TrainJob, dataset: GraphDataset | None, threads: int) -> Callable[[], float]:
    run = None if dataset is None else ReferenceRun(job, dataset)

    def train() -> float:
        took = torch.zeros(1, dtype=torch.float64)
        if run is not None:
            with _threads(threads):
                took[0] = run.run_epoch().time_s
        dist.broadcast(took, src=0)
        return float(took)

    return train


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    """PyTorch and DGL each have a setting of their own."""
    before = torch.get_num_threads(), dgl.utils.get_num_threads()
    torch.set_num_threads(count)
    dgl.utils.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before[0])
        dgl.utils.set_num_threads(before[1])
