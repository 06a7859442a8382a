# SPDX-License-Identifier: Apache-2.0
"""Gradients that `DistributedDataParallel` sums go through the memory of the host, where all ranks are on one.

By itself DDP sums them over its process group. On CPUs that is gloo, over sockets: two busy ranks on two cores wait 2.9
ms for 150 KB (`benchmarks/exchange`), of steps that may take twenty. What comes out is the same: each rank's gradients
divided by the number of ranks, then summed; with two ranks bit by bit, with more but for the order of the summands.
Sparse gradients are another matter: see `_sum_bucket`.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dgl_hybrid.exchange.communicator import Communicator
from dgl_hybrid.exchange.connect import connect_again

_DDP = nn.parallel.DistributedDataParallel
_Buckets = list[tuple[int, Tensor, torch.futures.Future[Tensor]]]


class DdpSums:
    """Has the DDP models that it is shown sum their gradients through memory.

    Args:
        communicator: Of the ranks that train them.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._known: weakref.WeakSet[_DDP] = weakref.WeakSet()
        self._sums: _Sums | None = None
        self._num_models = 0

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
        if self._sums is None:
            own = connect_again(communicator)
            self._sums = None if own is None else _Sums(own)
        if self._sums is not None:
            module.register_comm_hook(_Hook(self._sums, self._num_models, module.process_group), _sum_bucket)
            self._num_models += 1


def _hook_of(module: _DDP) -> str:
    """The name of the hook that a model has; of one that was copied or read from a file, none: its list names some
    that it has no more. Built-in ones are not in that list.
    """
    if getattr(module, "logger", None) is None or not hasattr(module, "_get_ddp_logging_data"):
        return "nobody knows"
    return str(module._get_ddp_logging_data().get("comm_hook") or "")


def _may_have_hook(module: _DDP, communicator: Communicator) -> bool:
    return (
        not _hook_of(module)  # PyTorch takes one
        and not getattr(module, "_use_python_reducer", True)
        and getattr(module, "mixed_precision", True) is None
        and module.device_type == "cpu"
        and all(hasattr(torch._C, name) for name in ("_current_autograd_node", "_current_graph_task_id"))
        and dist.get_process_group_ranks(module.process_group) == list(range(communicator.world_size))
    )


class _Sums:
    """Buckets of DDP models that are ready, until the backward pass is over.

    [Note: when buckets are summed]
    Ranks wait for each other in a sum, as they do in an exchange of a layer, and what comes first in a backward pass
    may differ by rank: each would wait for the other. So sums are made when the pass is over, of one model after the
    other. DDP waits for them there anyway, in a callback that it asks for once a model's last bucket is ready, and we
    ask for ours just before. That is the pass that counts, whichever earlier buckets belong to: a reentrant checkpoint
    has one inside of another. Where no node of a pass is running, all of them are over: in the first step with a static
    graph, which waits for the results as soon as it has called for all, and in `join`.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._begun: dict[int, _Buckets] = {}
        """By model. Of a pass that an exception ends they stay; DDP refuses another one then."""
        self._ended: dict[int, dict[int, _Buckets]] = {}
        """By pass and model."""

    def sum(self, model: int, number: int, buffer: Tensor) -> torch.futures.Future[Tensor]:
        """Returns what will be the buffer, then its sum over ranks. Collective, when the pass is over.

        Args:
            number: Of the bucket.
        """
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        if torch._C._current_autograd_node() is None:
            self._sum_now(model, number, buffer, future)
        else:
            self._begun.setdefault(model, []).append((number, buffer, future))
        return future

    def end(self, model: int) -> None:
        """Has a model's buckets summed when the pass is over that is running. After the last one."""
        buckets = self._begun.pop(model, [])
        if not buckets:
            return
        current = torch._C._current_graph_task_id()
        if not self._ended.get(current):
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._finish(current))
        self._ended.setdefault(current, {})[model] = buckets

    def _finish(self, current: int) -> None:
        for model, buckets in sorted(self._ended.pop(current, {}).items()):
            for number, buffer, future in buckets:
                self._sum_now(model, number, buffer, future)

    def _sum_now(self, model: int, number: int, buffer: Tensor, future: torch.futures.Future[Tensor]) -> None:
        what = f"DDP's gradients: model {model}, bucket {number}"
        future.set_result(self._communicator.sum_(buffer, what=what))


class _Hook:
    """What a DDP model hands to `_sum_bucket`."""

    def __init__(self, sums: _Sums, model: int, group: dist.ProcessGroup) -> None:
        self.sums, self.model, self.group = sums, model, group

    def __getstate__(self) -> dict[str, Any]:
        """A model that is saved whole, or copied, has this in it, and has no use for it: it gets another one when it is
        trained.
        """
        return {}


def _sum_bucket(hook, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations, and refuses strings
    """DDP's hook: see `DistributedDataParallel.register_comm_hook`. Buckets come in order."""
    buffer: Tensor = bucket.buffer()
    if buffer.is_sparse:
        # Not in place, as DDP does: its values may be memory of a gradient that goes on to other parameters (what an
        # embedding's rows were added to), and those would be divided once more.
        mean = buffer / hook.group.size()
        work = dist.all_reduce(mean, group=hook.group, async_op=True)
        future = work.get_future().then(lambda done: done.value()[0])
    else:
        # Divided first, as DDP does: sums of scaled gradients may be more than fits where their mean is not.
        future = hook.sums.sum(hook.model, bucket.index(), buffer.div_(hook.group.size()))
    if bucket.is_last():
        hook.sums.end(hook.model)
    return future
