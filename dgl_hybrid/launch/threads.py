# SPDX-License-Identifier: Apache-2.0
"""How many threads a process computes with."""

from __future__ import annotations

import os

MOST_THREADS = 4096
"""More than any host has cores, and few enough to be started: OpenMP ends a process that cannot start its threads."""


def threads_per_rank(ranks: int) -> int:
    """Returns how many threads each of `ranks` local ranks gets, so that together they do not exceed the cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // ranks)


def check_threads(threads: int | None) -> None:
    """Checks what somebody asks for; None: nothing in particular.

    Raises:
        ValueError: It is no number of threads.
    """
    if threads is not None and not 1 <= threads <= MOST_THREADS:
        raise ValueError(f"threads must be at least 1 and at most {MOST_THREADS} (got {threads})")
