# SPDX-License-Identifier: Apache-2.0
"""How much memory this process holds, and held at most; and giving back what it holds for nothing."""

from __future__ import annotations

import ctypes
import gc
import resource
import sys
from pathlib import Path

import psutil

from dgl_hybrid.ops.cpu.memory import ask_for_huge_heap, unmap_code_in

_PLANNING_LIBRARIES = ("ortools",)
"""Whose code epochs do not run."""


def current_rss_bytes() -> int:
    """Returns the resident memory now."""
    return int(psutil.Process().memory_info().rss)


def peak_rss_bytes() -> int:
    """Returns the most resident memory since the start of the process."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak) if sys.platform == "darwin" else int(peak) * 1024


def give_back_memory(*, thoroughly: bool = True) -> None:
    """Hands free memory back to the system.

    Planning and building take several times what stays of them. A C library that is told to keep freed memory (which
    saves the page faults of every epoch, see `exchange/buffers.py`) would hold all of that for good, and scatter what
    epochs need over it. Costs a few tenths of a second, and the next epoch the faults of what it really uses.

    Args:
        thoroughly: End what only cycles of references keep alive, and take the code of libraries that only planning
            runs out of memory, too: most of that time.
    """
    if thoroughly:
        gc.collect()  # blocks and steps refer to each other
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:  # of glibc
        trim(0)
    ask_for_huge_heap()
    for name in _PLANNING_LIBRARIES if thoroughly else ():
        if (path := getattr(sys.modules.get(name), "__file__", None)) is not None:
            unmap_code_in(Path(path).parent)
