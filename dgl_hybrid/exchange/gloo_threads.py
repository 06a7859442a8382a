# SPDX-License-Identifier: Apache-2.0
"""Threads of gloo that let others finish what they wait for.

A group of gloo has a thread that waits for its sockets and some that run its operations. Both take a lock of the
connection. Where the first finds it taken it does not sleep: it asks its sockets again, which are still ready, until
its time slice is over, 3 to 4 ms. That the other one cannot go on meanwhile is the rule where ranks have no cores to
spare: Linux lets a thread that has slept, and is woken by what arrives, run at once, in the place of the very thread on
that core that is in the middle of sending, with the lock.

Threads of `SCHED_BATCH` are woken without that: they begin on a core that is free, or at the next tick. Two busy
ranks on two cores took 2.9 ms for a sum of 150 KB, and 0.5 so (`benchmarks/exchange`); epochs over an emulated network
were 0.92 to 0.96 times as long (everything cached, of 45 to 70 ms).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

_NAMES = ("gloo_tcp", "pt_gloo")
"""What names of threads begin with: those of gloo's sockets, and those of PyTorch that run its operations."""


@contextlib.contextmanager
def new_threads_let_others_finish() -> Iterator[None]:
    """Has all threads that the caller starts meanwhile, as by making a group, wait for their turn from the beginning.

    They inherit it. Looking for them by their names could miss some: a thread names itself as soon as it runs, which on
    a busy machine may be later than the first operation of its group, of which one thread alone is needed.
    """
    batch, changed = getattr(os, "SCHED_BATCH", None), False
    if batch is not None:
        with contextlib.suppress(OSError):  # this is not allowed
            if os.sched_getscheduler(0) == os.SCHED_OTHER:
                os.sched_setscheduler(0, batch, os.sched_param(0))
                changed = True
    try:
        yield
    finally:
        if changed:
            with contextlib.suppress(OSError):
                os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def let_others_finish() -> int:
    """Has all threads of gloo in this process wait for their turn; returns how many have not done so before.

    Those of groups that are made later are not among them (`new_threads_let_others_finish`), nor are threads that have
    not run yet. On systems other than Linux, or where this is not allowed, they stay as they are.
    """
    batch, num_changed = getattr(os, "SCHED_BATCH", None), 0
    if batch is None:
        return 0
    with contextlib.suppress(OSError):  # no /proc here
        for task in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):  # it has ended, or this is not allowed
                thread = int(task.name)
                if (task / "comm").read_text().startswith(_NAMES) and os.sched_getscheduler(thread) == os.SCHED_OTHER:
                    os.sched_setscheduler(thread, batch, os.sched_param(0))
                    num_changed += 1
    return num_changed
