# SPDX-License-Identifier: Apache-2.0
"""Ends right after a collective, while gloo's thread has yet to let go of its tensors: see `test_end_of_process`.

The thread is kept from the processor until this one has returned from the collective; then it waits for the
interpreter's lock, which this one holds until it ends.
"""

from __future__ import annotations

import os
import sys
import time
import weakref
from pathlib import Path

import dgl_hybrid  # noqa: F401  mends DGL before anything imports it

# isort: split
import torch
import torch.distributed as dist

from dgl_hybrid.exchange.transport import CollectiveTransport


def threads_of_gloo() -> list[int]:
    """Returns those that carry out operations, once all threads have given themselves their names."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        names = {int(task.name): (task / "comm").read_text() for task in Path("/proc/self/task").iterdir()}
        if list(names.values()).count(names[os.getpid()]) == 1:
            return [task for task, name in names.items() if name.startswith("pt_gloo")]
        time.sleep(0.01)
    return []


def main(ends_groups: bool, ends_all: bool) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = CollectiveTransport(dist.new_group())
    if not ends_groups:
        for finalizer in [f for f in weakref.finalize._registry if f.peek()[0] is group]:  # type: ignore[attr-defined]
            finalizer.detach()
    cores, threads = os.sched_getaffinity(0), threads_of_gloo()
    assert threads, "gloo's threads have other names in this PyTorch"
    one = {min(cores)}
    os.sched_setaffinity(0, one)
    for thread in threads:
        os.sched_setaffinity(thread, one)
        os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
    sys.setswitchinterval(1000)
    group.all_gather(torch.zeros(3))
    for thread in threads:
        os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))
        os.sched_setaffinity(thread, cores)
    os.sched_setaffinity(0, cores)
    if ends_all:
        dist.destroy_process_group()
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        pass


if __name__ == "__main__":
    main("keep" not in sys.argv, "end-all" in sys.argv)
