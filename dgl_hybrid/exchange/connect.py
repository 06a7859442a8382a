# SPDX-License-Identifier: Apache-2.0
"""Joins the ranks of a process group: which transport their rows take."""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist

from dgl_hybrid.errors import ExchangeError
from dgl_hybrid.exchange.communicator import Communicator
from dgl_hybrid.exchange.shared_memory_transport import connect_through_memory
from dgl_hybrid.exchange.transport import CollectiveTransport

DEFAULT_TIMEOUT_S = 600.0
RankTransport = Literal["auto", "collective", "shared_memory"]

_logger = logging.getLogger(__name__)


def create_communicator(
    *, timeout_s: float = DEFAULT_TIMEOUT_S, backend: str | None = None, transport: RankTransport = "auto"
) -> Communicator:
    """Creates a communicator over all ranks with a process group of its own. Collective over the default group.

    Args:
        timeout_s: A peer that stays away longer than this ends the exchange with an error on the others.
        backend: "gloo" or "nccl"; None takes the default group's.
        transport: "collective" exchanges rows over the process group, "shared_memory" through the memory of the host
            that all ranks run on. "auto" does the latter between ranks of one host, wherever there are two, and the
            former between hosts; not with NCCL, which does so itself, and ranks that were put into several network
            namespaces are on several hosts.

    Returns:
        A communicator; without an initialised default group, one for a world of one rank.

    Raises:
        ExchangeError: On all ranks, if shared memory is asked for and they cannot share any.
    """
    if transport not in ("auto", "collective", "shared_memory"):
        raise ValueError(f"transport must be 'auto', 'collective' or 'shared_memory' (got {transport!r})")
    if not (dist.is_available() and dist.is_initialized()):
        return Communicator(None)
    chosen = backend or str(dist.get_backend())
    if chosen == "undefined" or ("nccl" in chosen and "gloo" in chosen):
        # No backend was named, or "cpu:gloo,cuda:nccl" was: there is one for each kind of device.
        # Of CPU tensors, so that ranks can ask each other before they know: all or none take the GPUs.
        has_gpu = torch.tensor([int(torch.cuda.is_available())])
        dist.all_reduce(has_gpu, dist.ReduceOp.MIN)
        chosen = "nccl" if int(has_gpu) else "gloo"
    if chosen not in ("gloo", "nccl"):
        raise ValueError(f"backend must be 'gloo' or 'nccl' (got {chosen!r})")
    if chosen == "nccl" and transport == "shared_memory":
        raise ValueError("transport='shared_memory' is for backend='gloo': NCCL shares memory between GPUs by itself")
    group = dist.new_group(backend=chosen, timeout=timedelta(seconds=timeout_s))
    if not isinstance(group, dist.ProcessGroup):
        raise ExchangeError("this process is not a member of the default process group")
    collective = CollectiveTransport(group)
    name = f"exchange {group.group_name}"  # alike on all ranks, and of this group alone
    if transport == "collective" or chosen == "nccl" or (transport == "auto" and collective.world_size == 1):
        return Communicator(collective, name=name)
    joined = connect_through_memory(collective, timeout_s=timeout_s, everybody=transport == "shared_memory")
    if not isinstance(joined, str):
        return Communicator(joined, name=name)
    if transport == "shared_memory":
        raise ExchangeError(
            f"transport='shared_memory' needs ranks that can share memory, but {joined}. Give transport='collective'."
        )
    _logger.debug("rows are exchanged over %s: %s", chosen, joined)
    return Communicator(collective, name=name)
