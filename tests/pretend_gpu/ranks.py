# SPDX-License-Identifier: Apache-2.0
"""Ranks that train on the pretended GPU: each sees one of its own, and rows travel over gloo, through host memory.

On a machine with a GPU, ranks share that one, and nothing is pretended.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dgl_hybrid.graph import model_timing, op_rates
from dgl_hybrid.ops import backend
from dgl_hybrid.planner import probe
from tests.conftest import why_no_cuda
from tests.helpers.world import run_ranks, shutdown_pool
from tests.pretend_gpu.device import pretend_gpu

T = TypeVar("T")

IS_REAL = why_no_cuda() is None
"""There is a GPU here."""


@dataclass(frozen=True)
class PretendedGpus:
    """Calls functions on ranks that have a GPU, as `run_ranks` does on ranks that have none."""

    library: Path | None
    """Made by `build_library`. None: GPUs are real."""

    def run(self, world_size: int, fn: Callable[..., T], /, *args: Any, kernels: Path | None = None) -> list[T]:
        """Calls `fn(rank, world_size, *args)` on every rank; results must be off the GPU.

        Args:
            kernels: The driver that `build_fake_driver` made: float32 then runs on the kernels of the package's CUDA
                source, compiled for this CPU. None: reference ops stand in for them, as they do on a machine whose
                kernels cannot be compiled. Of no account where the GPU is real.
        """
        return run_ranks(world_size, _on_gpu, self.library, kernels, fn, args)


@contextlib.contextmanager
def workers_of_their_own() -> Iterator[None]:
    """Ends the workers before and after: a process that has had the GPU is no good for other tests."""
    shutdown_pool()
    try:
        yield
    finally:
        shutdown_pool()


def _on_gpu(
    rank: int,
    world_size: int,
    library: Path | None,
    kernels: Path | None,
    fn: Callable[..., T],
    args: tuple[Any, ...],
) -> T:
    with contextlib.ExitStack() as stack:
        for module, name, value in _SMALL_MEASUREMENTS:
            stack.enter_context(mock.patch.object(module, name, value))
        if library is None:
            return fn(rank, world_size, *args)
        stack.enter_context(pretend_gpu(library))
        stack.enter_context(mock.patch.object(nn.parallel, "DistributedDataParallel", AveragedGradients))
        if kernels is not None:
            stack.enter_context(_kernels_on_cpu(kernels))
        return fn(rank, world_size, *args)


_SMALL_MEASUREMENTS = (
    (op_rates, "_NUM_NODES", 1 << 6),
    (op_rates, "_GPU_NODES", 1 << 6),
    (op_rates, "_ROUNDS", 1),
    (probe, "ROW_ELEMENTS", 1 << 12),
    (probe, "GATHERED_ELEMENTS", 1 << 12),
    (probe, "GEMM_ROWS", 1 << 6),
    (probe, "REPEATS", 1),
    (model_timing, "BUDGET_S", 0.02),
    (model_timing, "FIRST_EDGES", 1 << 10),
    (model_timing, "MOST_ROUNDS", 3),
    (model_timing, "MOST_UNSURE_ROUNDS", 3),
)
"""What a GPU does in a moment takes a CPU minutes."""


@contextlib.contextmanager
def _kernels_on_cpu(driver: Path) -> Iterator[None]:
    from tests.ops.cuda.fake_driver import FakeDriver
    from tests.ops.cuda.host_gpu import make_backend

    fake = FakeDriver(driver)
    fake.set()
    on_cpu, launcher = make_backend(fake, task_entries=8)
    real = backend.load_backend
    backend._load_or_reference.cache_clear()
    try:
        with mock.patch.object(backend, "load_backend", lambda name: on_cpu if name == "cuda" else real(name)):
            yield
        assert launcher.launched, "nothing has run on the kernels"
    finally:
        backend._load_or_reference.cache_clear()


class AveragedGradients(nn.parallel.DistributedDataParallel):
    """Stands for DDP, whose C++ code looks into the memory of tensors: averages gradients at the end of a backward."""

    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)
        self.module = module
        self._is_awaited = False
        for parameter in module.parameters():
            parameter.register_hook(self._await_end)

    def _await_end(self, grad: Tensor) -> None:
        if not self._is_awaited:
            self._is_awaited = True
            torch.autograd.Variable._execution_engine.queue_callback(self._average)

    @torch.no_grad()
    def _average(self) -> None:
        self._is_awaited = False
        for parameter in self.module.parameters():
            assert parameter.grad is not None
            total = parameter.grad.cpu()
            dist.all_reduce(total)
            parameter.grad.copy_(total / dist.get_world_size())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)
