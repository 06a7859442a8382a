# SPDX-License-Identifier: Apache-2.0
"""One rank of one system: joins the others, then does what the starting process orders, one order at a time.

    python -m benchmarks.systems.worker JOB

A server of DistDGL is started by the same command and never gets past `join`.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import dgl_hybrid  # noqa: F401  before dgl, which it makes importable

# isort: split
import torch
import torch.distributed as dist

from benchmarks.systems.adaptors import SYSTEMS
from benchmarks.systems.adaptors.base import System
from benchmarks.systems.job import Job, Link
from dgl_hybrid.training.resident_memory import forget_peak_rss, peak_rss_bytes

_PR_SET_PDEATHSIG = 1


class Orders:
    """What can be ordered. Collective: every rank of the system gets every order."""

    def __init__(self, system: System) -> None:
        self._system = system

    def prepare(self) -> dict[str, Any]:
        """Opens the graph, builds the model, plans; returns what is to be recorded."""
        return self._system.prepare()

    def become(self, name: str) -> bool:
        """Changes what the system is, where it is several; tells whether it was another one."""
        return self._system.become(name)

    def check(self) -> dict[str, Any]:
        """Trains the first epochs; returns losses and logits that all systems must agree on."""
        return self._system.check().to_json()

    def epochs(self, count: int) -> list[dict[str, Any]]:
        """Trains; returns what each epoch took on this rank."""
        found = []
        for _ in range(count):
            _barrier()
            before = _sent_bytes(self._system.job.interface)
            epoch = self._system.run_epoch()
            _barrier()
            found.append(epoch.to_json() | {"wire_bytes": _sent_bytes(self._system.job.interface) - before})
        return found

    def is_settled(self) -> bool:
        """Tells whether epochs are like each other from now on."""
        return self._system.is_settled

    def facts(self) -> dict[str, Any]:
        """Returns what is to be recorded of the state that epochs are in by now."""
        return self._system.facts()

    def forget_peak(self) -> None:
        """Begins to measure anew how much memory is held at most: that of long training."""
        self._system.give_back_memory()
        forget_peak_rss()  # where the system has no way to, the peak is that of the whole run

    def peak(self) -> int:
        """Returns the most resident bytes since `forget_peak`."""
        return peak_rss_bytes()

    def curve(self, folder: str, count: int, every: int) -> list[dict[str, Any]]:
        """Trains `count` epochs; keeps the weights after each `every` of them, and the seconds trained so far."""
        return self._system.train_curve(Path(folder), count, every)

    def accuracies(self, files: list[str]) -> list[dict[str, float]]:
        """Returns the accuracy of weights that `curve` has kept."""
        return self._system.accuracies([Path(file) for file in files])


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def _sent_bytes(interface: str) -> int:
    """Returns how much has left by a network interface of this rank's namespace."""
    for line in Path("/proc/self/net/dev").read_text(encoding="ascii").splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == interface:
            return int(counters.split()[8])
    return 0


def main() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    job = Job.from_json(sys.argv[1])
    torch.set_num_threads(job.threads)
    # Epoch after epoch on the same few labels makes gradients subnormal, and processors slow at them. Before any thread
    # is started: threads have the setting of the one that started them.
    torch.set_flush_denormal(True)
    system = SYSTEMS[job.system](job)
    system.join()
    link = Link(job.socket, system.rank)
    orders = Orders(system)
    while (order := link.next_order())["do"] != "stop":
        try:
            answer = getattr(orders, order["do"])(**order["arguments"])
        except BaseException as error:
            link.send({"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()})
            link.next_order()  # the others may hang in a collective: all are ended together
            os._exit(1)
        link.send({"answer": answer})
    system.leave()
    link.send({"answer": "left"})


if __name__ == "__main__":
    main()
