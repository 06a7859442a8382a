# SPDX-License-Identifier: Apache-2.0
"""Joins the ranks of a process group: which transport their rows take."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import socket
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist

from dgl_hybrid.errors import ExchangeError
from dgl_hybrid.exchange.communicator import Communicator
from dgl_hybrid.exchange.gloo_threads import let_others_finish, new_threads_let_others_finish
from dgl_hybrid.exchange.shared_memory_transport import SharedMemoryTransport, connect_through_memory
from dgl_hybrid.exchange.transport import CollectiveTransport, bound_gpu

DEFAULT_TIMEOUT_S = 600.0
RankTransport = Literal["auto", "collective", "shared_memory"]

_logger = logging.getLogger(__name__)


def create_communicator(
    *, timeout_s: float | None = None, backend: str | None = None, transport: RankTransport = "auto"
) -> Communicator:
    """Creates a communicator over all ranks with a process group of its own. Collective over the default group.

    Threads of gloo, the default group's among them, wait for their turn from then on (`gloo_threads.py`).

    Args:
        timeout_s: A peer that stays away longer than this ends the exchange with an error on the others. The same on
            all ranks. None takes what `init_process_group(timeout=)` was given; ten minutes if it was not, or if
            it was PyTorch's own default of 30 (NCCL: 10), which cannot be told from none.
        backend: "gloo" or "nccl"; None takes the default group's. Where that has both, NCCL if the device that every
            rank's group is bound to, or else its current one, is a GPU that no other rank has.
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
    timeout_s = default_timeout_s() if timeout_s is None else timeout_s
    check_timeout(timeout_s)
    if not (dist.is_available() and dist.is_initialized()):
        return Communicator(None)
    chosen = backend or str(dist.get_backend())
    if chosen == "undefined" or ("nccl" in chosen and "gloo" in chosen):
        chosen = _choose_backend()  # none was named, or "cpu:gloo,cuda:nccl" was: there is one for each kind of device
    if chosen not in ("gloo", "nccl"):
        raise ValueError(f"backend must be 'gloo' or 'nccl' (got {chosen!r})")
    if chosen == "nccl" and transport == "shared_memory":
        raise ValueError("transport='shared_memory' is for backend='gloo': NCCL shares memory between GPUs by itself")
    with new_threads_let_others_finish() if chosen == "gloo" else contextlib.nullcontext():
        group = dist.new_group(backend=chosen, timeout=timedelta(seconds=timeout_s))
    if not isinstance(group, dist.ProcessGroup):
        raise ExchangeError("this process is not a member of the default process group")
    name = f"exchange {group.group_name}"  # alike on all ranks, and of this group alone
    communicator = Communicator(CollectiveTransport(group), name=name, timeout_s=timeout_s)
    with communicator.naming("the meeting of all ranks"):
        if chosen == "gloo":
            # Its ranks connect one after the other: one that is done, and lets go of the group at once, would close
            # what a peer is about to look at ("Connection closed by peer"). NCCL connects with the first operation.
            dist.barrier(group)
            let_others_finish()  # of groups that were here before
        if transport == "collective" or chosen == "nccl" or (transport == "auto" and communicator.world_size == 1):
            return communicator
        assert communicator.transport is not None
        joined = connect_through_memory(
            communicator.transport, timeout_s=timeout_s, everybody=transport == "shared_memory"
        )
    if not isinstance(joined, str):
        return Communicator(joined, name=name, timeout_s=timeout_s)
    if transport == "shared_memory":
        raise ExchangeError(
            f"transport='shared_memory' needs ranks that can share memory, but {joined}. Give transport='collective'."
        )
    _logger.debug("rows are exchanged over %s: %s", chosen, joined)
    return communicator


def connect_again(communicator: Communicator) -> Communicator | None:
    """Creates another communicator of the same ranks, whose calls have an order of their own. Collective.

    Returns:
        It; None, on all ranks, where they do not share a host's memory, or could not be joined once more.
    """
    if not isinstance(communicator.transport, SharedMemoryTransport):
        return None
    with communicator.naming("another meeting of all ranks"):
        joined = communicator.transport.join_again()
    if isinstance(joined, str):
        _logger.debug("ranks of one host could not be joined once more: %s", joined)
        return None
    return Communicator(joined, name=f"{communicator.name} again", timeout_s=communicator.timeout_s)


def default_timeout_s() -> float:
    """Returns how long ranks wait for each other if nothing is said: as long as those of the default group, where the
    script has said it there. Words that are PyTorch's own defaults (30 minutes, NCCL 10) cannot be told from none.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return DEFAULT_TIMEOUT_S
    unsaid = (dist.distributed_c10d.default_pg_timeout, timedelta(minutes=10))
    group = dist.distributed_c10d._get_default_group()
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        timeout = getattr(options, "_timeout", None)
        if isinstance(timeout, timedelta) and timeout not in unsaid:
            return timeout.total_seconds()
    return DEFAULT_TIMEOUT_S


def check_timeout(timeout_s: float) -> None:
    """Checks how long ranks shall wait for each other.

    Raises:
        ValueError: Not positive and finite.
    """
    if not 0.0 < timeout_s < float("inf"):
        raise ValueError(f"timeout_s must be positive and finite (got {timeout_s})")


def _choose_backend() -> str:
    """Returns "nccl" if each rank has a GPU of its own, the same on all ranks. Collective over the default group.

    NCCL refuses two ranks on one GPU, and ranks that train on CPUs all see the same ones.
    """
    name = _current_gpu() if dist.is_nccl_available() else None
    # Of CPU tensors, so that ranks can ask each other before they know; 0: none.
    digest = b"" if name is None else hashlib.sha256(name.encode()).digest()[:7]
    mine = torch.tensor([int.from_bytes(digest)])
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, mine)
    gpus = [int(number) for number in gathered]
    if 0 in gpus:
        return "gloo"
    if len(set(gpus)) == len(gpus):
        return "nccl"
    _logger.info(
        "rows are exchanged over gloo: ranks have one GPU as current device, on which NCCL refuses more than one rank "
        "(torch.cuda.set_device gives each its own)"
    )
    return "gloo"


def _current_gpu() -> str | None:
    """Returns a name that no other GPU of any host has; None where there is none."""
    if not torch.cuda.is_available():
        return None
    bound = bound_gpu(dist.distributed_c10d._get_default_group())
    number = torch.cuda.current_device() if bound is None or bound.index is None else bound.index
    # Not by number: ranks that are shown one GPU each, another one, all call it 0.
    uuid = getattr(torch.cuda.get_device_properties(number), "uuid", None)
    return f"{socket.gethostname()} {number}" if uuid is None else str(uuid)
