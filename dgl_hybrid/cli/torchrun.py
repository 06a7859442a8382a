# SPDX-License-Identifier: Apache-2.0
"""`torchrun --nproc_per_node N -m dgl_hybrid.cli train …`: the ranks exist already."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dgl_hybrid.cli.common import make_results_folder
from dgl_hybrid.exchange.connect import create_communicator
from dgl_hybrid.launch.local import LOOPBACK
from dgl_hybrid.launch.machines import find_interface
from dgl_hybrid.launch.tasks import progress_bar
from dgl_hybrid.launch.threads import threads_per_rank
from dgl_hybrid.launch.workspace import PreparedGraph, prepare_partition
from dgl_hybrid.training.config import TrainJob
from dgl_hybrid.training.report import TrainReport
from dgl_hybrid.training.trainer import train

PREPARE_TIMEOUT_S = 6 * 3600.0
"""How long the other ranks wait for rank 0 to partition the graph."""

_INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"


def train_under_torchrun(configs: Sequence[Any]) -> TrainReport | None:
    """Trains on torchrun's ranks. Rank 0 partitions where needed: the workspace must be seen by all.

    Returns:
        The report on rank 0, None on the others.
    Raises:
        ValueError, HybridError: On every rank.
    """
    data, partition, model, strategy, training, options = configs
    try:
        world_size = int(os.environ["WORLD_SIZE"])
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    except ValueError as error:
        raise ValueError(
            f"WORLD_SIZE and LOCAL_WORLD_SIZE must be numbers, as torchrun sets them ({error}). Start by torchrun, or "
            "unset RANK and WORLD_SIZE to train on ranks that this command starts."
        ) from error
    if partition.ranks is not None and partition.ranks != world_size:
        raise ValueError(
            f"--ranks is {partition.ranks}, but torchrun started {world_size} ranks. Leave out --ranks under torchrun."
        )
    interface = _find_interface(is_one_host=local_ranks == world_size)
    if interface is not None:
        os.environ.setdefault(_INTERFACE_VARIABLE, interface)
    torch.set_num_threads(options.threads or threads_per_rank(local_ranks))
    try:
        dist.init_process_group("gloo")
    except ValueError as error:
        raise ValueError(
            f"RANK and WORLD_SIZE are set, as torchrun sets them, and the ranks cannot meet ({error}). Start by "
            "torchrun, or unset RANK and WORLD_SIZE to train on ranks that this command starts."
        ) from error
    except RuntimeError as error:
        here = [name for _, name in socket.if_nameindex()]
        named = [name for name in os.environ.get(_INTERFACE_VARIABLE, "").split(",") if name]
        if set(named) <= set(here):
            raise
        raise ValueError(
            f"{_INTERFACE_VARIABLE} is {','.join(named)}, and this host has no such network interface (it has "
            f"{', '.join(here)}). Name one by which other hosts reach this one, or unset it to have it found."
        ) from error
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


def _find_interface(*, is_one_host: bool) -> str | None:
    """Returns the network interface by which this host reaches rank 0's, None if gloo is to guess.

    It guesses by the host's name, of which Debian's `/etc/hosts` says 127.0.1.1: other hosts cannot connect there.
    """
    address = os.environ.get("MASTER_ADDR")
    if not address:
        return None
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.connect((address, 9))  # nothing is sent: this only finds the way
            interface = find_interface(sock.getsockname()[0])
    except OSError:
        return None
    # On rank 0's own host the name of that host may lead to loopback, which serves no other host.
    return None if interface == LOOPBACK and not is_one_host else interface
