# SPDX-License-Identifier: Apache-2.0
"""Runs a kernel on as many threads as PyTorch uses.

Where PyTorch runs on GNU's OpenMP, kernels run on the same threads: after an operation of PyTorch or DGL these spin
for milliseconds in wait of the next, and other threads would have to wait for a core (a sum of 3 M edges of width 16
right after DGL's: 6.4 ms on threads of our own, 3.0 on theirs). Elsewhere, and in children made by fork, where OpenMP's
threads do not exist and it does not know, there are helpers of our own.

The caller's thread takes part, so a call always makes progress, also where several Python threads call at once and the
helpers are busy with another's tasks. Kernels release the interpreter's lock.

[Note: interruptions]
Ctrl-C, or any exception of a signal handler, can end a call at any point of the caller's thread, whose tensors are
then freed, while helpers still write to them. So a call ends only when none of its helpers runs any more. Whatever
waits here may be broken off and begun anew: locks of `threading.Lock`, a `SimpleQueue` and flags, which C code handles
as a whole, but no `Condition` or `Future`, whose own locks an exception at the wrong moment leaves in disorder.
"""

from __future__ import annotations

import ctypes
import os
import struct
import threading
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import numpy.typing as npt
import torch

from dgl_hybrid.ops.cpu.compiler import Kernel

# Types of arrays are kept: ctypes forgets one with its last array, and each lies in a cycle then.
_words = cache(lambda count: ctypes.c_int64 * count)

MIN_TASKS_FOR_THREADS = 4
"""Waking a thread takes some 50 microseconds; fewer tasks are not worth it."""


class _Call:
    """What one call's threads share; owned by all of them."""

    def __init__(self, kernel: Kernel, bounds: npt.NDArray[np.int64], arguments: Sequence[int | float]) -> None:
        self._kernel, self._bounds = kernel, bounds
        self._counter = ctypes.c_int64(0)
        self.num_tasks = len(bounds) - 1
        words = [bounds.ctypes.data, self.num_tasks, ctypes.addressof(self._counter)]
        words += [struct.unpack("q", struct.pack("d", a))[0] if isinstance(a, float) else a for a in arguments]
        self._packed = _words(len(words))(*words)

    def work(self) -> None:
        """Does tasks until none is left to be drawn."""
        self._kernel(ctypes.addressof(self._packed))

    def work_together(self, parallel: Callable[..., None], num_threads: int) -> None:
        """Does all tasks on a team of OpenMP's threads, this one among them."""
        code = ctypes.cast(self._kernel, ctypes.c_void_p)  # type: ignore[arg-type]
        parallel(code, ctypes.addressof(self._packed), num_threads, 0)

    def stop(self) -> None:
        """Leaves no task to be drawn; those that are being done go on."""
        self._counter.value = self.num_tasks


class _Share:
    """One helper's part in a call."""

    def __init__(self, call: _Call) -> None:
        self._call = call
        self._claim = threading.Lock()
        self._finished = threading.Lock()
        self._finished.acquire()
        self._is_finished = False

    def run(self) -> None:
        """On a helper's thread: works, unless the call ended before it came to that."""
        try:
            if self._claim.acquire(blocking=False):
                self._call.work()
        finally:
            self._is_finished = True
            self._finished.release()

    def end(self) -> None:
        """On the caller's thread: returns when the helper does not run and never will. May be called again."""
        if not self._claim.acquire(blocking=False):
            while not self._is_finished:
                self._finished.acquire(timeout=1.0)


_queue: SimpleQueue[_Share] = SimpleQueue()
_num_helpers = 0
_is_forked = False


@cache
def _openmp() -> Callable[..., None] | None:
    """`GOMP_parallel` of the OpenMP runtime that PyTorch has loaded, if that is GNU's or one that speaks like it."""
    folder = Path(torch.__file__).parent / "lib"
    for library in sorted((*folder.glob("libgomp*.so*"), *folder.glob("libiomp5.so"))):
        try:
            # Only if it is loaded: a second copy would have threads of its own.
            runtime = ctypes.CDLL(str(library), mode=os.RTLD_NOW | os.RTLD_NOLOAD)
            parallel = runtime.GOMP_parallel
        except (OSError, AttributeError):
            continue
        parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
        parallel.restype = None
        return parallel
    return None


def _forget_helpers() -> None:
    """In a child made by fork: the parent's threads do not exist there."""
    global _queue, _num_helpers, _is_forked
    _queue, _num_helpers, _is_forked = SimpleQueue(), 0, True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_helpers)


def run_tasks(kernel: Kernel, bounds: npt.NDArray[np.int64], arguments: Sequence[int | float]) -> None:
    """Runs a kernel over tasks; returns, or raises what a signal handler raised, when no thread works on them.

    Args:
        kernel: From `compile_kernel`.
        bounds: (T + 1,) int64: bounds of the tasks' rows.
        arguments: What the kernel declares: addresses and integers as int, numbers as float.
    """
    call = _Call(kernel, bounds, arguments)
    num_threads = min(torch.get_num_threads(), call.num_tasks)
    if num_threads == 1 or call.num_tasks < MIN_TASKS_FOR_THREADS:
        call.work()
        return
    parallel = None if _is_forked else _openmp()
    if parallel is not None:
        call.work_together(parallel, num_threads)
        return
    shares = [_Share(call) for _ in range(num_threads - 1)]
    try:
        _start(len(shares))
        for share in shares:
            _queue.put(share)
        call.work()
    finally:
        _end(call, shares)


def _end(call: _Call, shares: list[_Share]) -> None:
    """See [Note: interruptions]."""
    interruption: BaseException | None = None
    while True:
        try:
            call.stop()
            for share in shares:
                share.end()
            break
        except BaseException as error:
            interruption = interruption or error
    if interruption is not None:
        raise interruption


def _start(count: int) -> None:
    """Has at least so many helpers' threads, if the interpreter still starts any."""
    global _num_helpers
    while _num_helpers < count:
        thread = threading.Thread(target=_serve, args=(_queue,), name=f"dgl_hybrid_ops_{_num_helpers}", daemon=True)
        _num_helpers += 1
        try:
            thread.start()
        except RuntimeError:  # the interpreter is shutting down; the caller does all tasks
            return


def _serve(queue: SimpleQueue[_Share]) -> None:
    while True:
        queue.get().run()
