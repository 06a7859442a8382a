# SPDX-License-Identifier: Apache-2.0
"""How much memory this process holds, and held at most."""

from __future__ import annotations

import resource
import sys

import psutil


def current_rss_bytes() -> int:
    """Returns the resident memory now."""
    return int(psutil.Process().memory_info().rss)


def peak_rss_bytes() -> int:
    """Returns the most resident memory since the start of the process."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak) if sys.platform == "darwin" else int(peak) * 1024
