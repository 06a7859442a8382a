# SPDX-License-Identifier: Apache-2.0
"""Gradients that `DistributedDataParallel` sums go through the memory of the host, where all ranks are on one.

By itself DDP sums them over its process group. On CPUs that is gloo, over sockets: two busy ranks on two cores wait 2.9
ms for 150 KB (`benchmarks/exchange`), of steps that may take twenty. What comes out is the same: each rank's gradients
divided by the number of ranks, then summed; with two ranks bit by bit, with more but for the order of the summands.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dgl_hybrid.exchange.communicator import Communicator
from dgl_hybrid.exchange.connect import connect_again

_DDP = nn.parallel.DistributedDataParallel


class DdpSums:
    """Has the DDP models that it is shown sum their gradients through memory.

    Args:
        communicator: Of the ranks that train them.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._known: weakref.WeakSet[_DDP] = weakref.WeakSet()
        self._own: Communicator | None = None

    def note(self, module: nn.Module) -> None:
        """Takes a module whose call ends, before its backward. Collective the first time that it is a DDP model.

        A model that has a hook already keeps it, and one on GPUs, or of other ranks, is left as it is. One that gets
        ours takes no other one afterwards: PyTorch wants those before the first forward, too.
        """
        if not isinstance(module, _DDP) or not torch.is_grad_enabled() or module in self._known:
            return
        self._known.add(module)
        communicator = self._communicator
        if communicator.world_size == 1 or communicator.backend != "shared_memory":
            return
        told = communicator.gather_ints([int(_may_have_hook(module, communicator))], what="a model in DDP")
        if not all(row[0] for row in told):
            return
        # Its calls come between those of others: where a layer's exchange is under way gradients may be ready.
        self._own = self._own or connect_again(communicator)
        if self._own is not None:
            module.register_comm_hook(_Sums(self._own, module.process_group), _sum_bucket)


def _may_have_hook(module: _DDP, communicator: Communicator) -> bool:
    return (
        getattr(module, "_comm_hooks", None) == []  # PyTorch takes one
        and not getattr(module, "_use_python_reducer", True)
        and getattr(module, "mixed_precision", True) is None
        and module.device_type == "cpu"
        and all(hasattr(torch._C, name) for name in ("_current_autograd_node", "_current_graph_task_id"))
        and dist.get_process_group_ranks(module.process_group) == list(range(communicator.world_size))
    )


class _Sums:
    """What a DDP model hands to `_sum_bucket`: buckets that are ready, until the backward pass is over.

    [Note: when buckets are summed]
    Ranks wait for each other in a sum, as they do in an exchange of a layer, and what comes first in a backward pass
    may differ by rank: each would wait for the other. So sums are made when the pass is over, where DDP waits for them
    anyway. It does so in a callback of the pass that it asks for once the last bucket is ready, after we have asked for
    ours. Where no node of a pass is running, all of them are over: in the first step with a static graph, which waits
    for the results as soon as it has called for all, and in `join`.
    """

    def __init__(self, communicator: Communicator, group: dist.ProcessGroup) -> None:
        self.communicator, self.group = communicator, group
        self._ready: dict[int, list[tuple[Tensor, torch.futures.Future[Tensor]]]] = {}
        """By the pass: there may be one inside of another (reentrant checkpoints)."""

    def __getstate__(self) -> dict[str, Any]:
        """A model that is saved whole, or copied, has these in it, and has no use for them: it gets no hook back."""
        return {}

    def sum(self, buffer: Tensor) -> torch.futures.Future[Tensor]:
        """Returns what will be the buffer, then its sum over ranks. Collective, when the pass is over."""
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        if torch._C._current_autograd_node() is None:
            self._finish([(buffer, future)])
            return future
        number = torch._C._current_graph_task_id()
        ready = self._ready.setdefault(number, [])
        if not ready:
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(lambda: self._finish(self._ready.pop(number)))
        ready.append((buffer, future))
        return future

    def _finish(self, ready: Sequence[tuple[Tensor, torch.futures.Future[Tensor]]]) -> None:
        for buffer, future in ready:
            future.set_result(self.communicator.sum_(buffer, what="DDP's sum of gradients"))


def _sum_bucket(sums, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations, and refuses strings
    """DDP's hook: see `DistributedDataParallel.register_comm_hook`."""
    buffer: Tensor = bucket.buffer()
    if buffer.is_sparse:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks  # some PyTorch has none

        return default_hooks.allreduce_hook(sums.group, bucket)
    # Divided first, as DDP does: sums of scaled gradients may be more than fits where their mean is not.
    return sums.sum(buffer.div_(sums.communicator.world_size))
