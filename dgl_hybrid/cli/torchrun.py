# SPDX-License-Identifier: Apache-2.0
"""`torchrun --nproc_per_node N -m dgl_hybrid.cli train …`: the ranks exist already."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dgl_hybrid.cli.common import make_results_folder
from dgl_hybrid.exchange.connect import create_communicator
from dgl_hybrid.launch.local import LOOPBACK, threads_per_rank
from dgl_hybrid.launch.tasks import progress_bar
from dgl_hybrid.launch.workspace import PreparedGraph, prepare_partition
from dgl_hybrid.training.config import TrainJob
from dgl_hybrid.training.report import TrainReport
from dgl_hybrid.training.trainer import train

PREPARE_TIMEOUT_S = 6 * 3600.0
"""How long the other ranks wait for rank 0 to partition the graph."""


def train_under_torchrun(configs: Sequence[Any]) -> TrainReport | None:
    """Trains on torchrun's ranks. Rank 0 partitions where needed: the workspace must be seen by all.

    Returns:
        The report on rank 0, None on the others.
    Raises:
        ValueError, HybridError: On every rank.
    """
    data, partition, model, strategy, training, options = configs
    world_size = int(os.environ["WORLD_SIZE"])
    if partition.ranks is not None and partition.ranks != world_size:
        raise ValueError(
            f"--ranks is {partition.ranks}, but torchrun started {world_size} ranks. Leave out --ranks under torchrun."
        )
    if os.environ.get("MASTER_ADDR") in ("127.0.0.1", "localhost"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    torch.set_num_threads(options.threads or threads_per_rank(local_ranks))
    dist.init_process_group("gloo")
    try:
        communicator = create_communicator(timeout_s=PREPARE_TIMEOUT_S)
        prepared: PreparedGraph | None = None
        with communicator.agreed():
            if communicator.rank == 0:
                make_results_folder(options.out)  # who writes them
                prepared = prepare_partition(data.for_model(model.model), replace(partition, ranks=world_size))
        shared = communicator.broadcast_json(
            None
            if prepared is None
            else {
                "part_config": str(Path(prepared.part_config).absolute()),
                "dataset": prepared.dataset,
                "num_classes": prepared.num_classes,
            }
        )
        is_first = communicator.rank == 0
        del communicator  # with its connections to all other ranks: training makes its own
        job = TrainJob(**shared, model=model, strategy=strategy, training=training)
        with progress_bar(job, is_first) as advance:
            report = train(job, on_epoch=advance)
        return report if is_first else None
    finally:
        dist.destroy_process_group()
