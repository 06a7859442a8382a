# SPDX-License-Identifier: Apache-2.0
"""Runs a kernel on as many threads as PyTorch uses.

The caller's thread takes part, so a call always makes progress, also where several Python threads call at once and the
pool is busy with another's tasks. Kernels release the interpreter's lock.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import torch

from dgl_hybrid.ops.cpu.compiler import Kernel

MIN_TASKS_FOR_THREADS = 4
"""Waking a thread takes some 50 microseconds; fewer tasks are not worth it."""

_pool: ThreadPoolExecutor | None = None
_pool_size = 0


def _forget_pool() -> None:
    """In a child made by fork: the parent's threads do not exist there."""
    global _pool, _pool_size
    _pool, _pool_size = None, 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pool)


def run_tasks(kernel: Kernel, bounds: npt.NDArray[np.int64], arguments: Sequence[int | float]) -> None:
    """Runs a kernel over tasks; returns when all are done.

    Args:
        kernel: From `compile_kernel`.
        bounds: (T + 1,) int64: bounds of the tasks' rows.
        arguments: What the kernel declares: addresses and integers as int, numbers as float.
    """
    num_tasks = len(bounds) - 1
    counter = ctypes.c_int64(0)
    words = [bounds.ctypes.data, num_tasks, ctypes.addressof(counter)]
    words += [struct.unpack("q", struct.pack("d", a))[0] if isinstance(a, float) else a for a in arguments]
    packed = (ctypes.c_int64 * len(words))(*words)
    address = ctypes.addressof(packed)
    num_threads = min(torch.get_num_threads(), num_tasks)
    if num_threads == 1 or num_tasks < MIN_TASKS_FOR_THREADS:
        kernel(address)
        return
    helpers = _start_helpers(num_threads - 1, kernel, address)
    kernel(address)
    for helper in helpers:
        if not helper.cancel():
            helper.result()


def _start_helpers(count: int, kernel: Kernel, address: int) -> list[Future[None]]:
    global _pool, _pool_size
    if _pool is None or _pool_size < count:
        # A larger pool beside the smaller one, whose threads end when its last call does.
        _pool, _pool_size = ThreadPoolExecutor(count, thread_name_prefix="dgl_hybrid_ops"), count
    try:
        return [_pool.submit(kernel, address) for _ in range(count)]
    except RuntimeError:  # the interpreter is shutting down and starts no threads any more
        return []
