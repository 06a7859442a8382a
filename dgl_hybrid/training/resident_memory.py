# SPDX-License-Identifier: Apache-2.0
"""How much memory this process holds, and held at most. Imports nothing heavy: what it measures may be small."""

from __future__ import annotations

import contextlib
import resource
import sys
from pathlib import Path

import psutil

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def current_rss_bytes() -> int:
    """Returns the resident memory now."""
    return int(psutil.Process().memory_info().rss)


def peak_rss_bytes() -> int:
    """Returns the most resident memory since the start of the process, or since `forget_peak_rss`.

    From the address space of this program where the system tells it: Linux's `ru_maxrss` outlives `exec`, so that of a
    process which `subprocess` has started it is at least that of who started it, a launcher that has held the graph.
    """
    if sys.platform == "linux":
        for line in _STATUS.read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak) if sys.platform == "darwin" else int(peak) * 1024


def forget_peak_rss() -> None:
    """Has the peak begin anew, at what is resident now; without effect where the system has no way to (not Linux)."""
    with contextlib.suppress(OSError):
        _CLEAR.write_text("5", encoding="ascii")
