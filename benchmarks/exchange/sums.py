# SPDX-License-Identifier: Apache-2.0
"""What does it cost, amid training, that ranks of one host sum gradients and tell each other something?

    python -m benchmarks.exchange.sums [--ranks P ...] [--rounds N] [--json]

Ranks are processes of this machine, one thread each. A step is a piece of work (products of matrices, some 5 ms), then
a gather of a kilobyte or a sum of float32; what counts is how much longer than the work alone it takes, on the slowest
rank. Three ways take turns within every round: gloo as it is, gloo whose threads wait for their turn
(`exchange/gloo_threads.py`), and memory of the host (`exchange/shared_memory_transport.py`). First a check: all give
the same numbers.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from benchmarks.console import make_console
from benchmarks.exchange.ranks import Records, measure_by_ranks
from dgl_hybrid.exchange.connect import create_communicator
from dgl_hybrid.exchange.gloo_threads import let_others_finish

GLOO, WAITING, MEMORY = "gloo", "gloo, waiting", "memory"
WAYS = (GLOO, WAITING, MEMORY)
SUM_BYTES = (150_000, 1_000_000)
STEPS = 10
"""Of each way in each round; one before them is not counted."""
WARMUP = 2


def hurry() -> None:
    """Undoes what `let_others_finish` did."""
    for task in Path("/proc/self/task").iterdir():
        if os.sched_getscheduler(int(task.name)) == os.SCHED_BATCH:
            os.sched_setscheduler(int(task.name), os.SCHED_OTHER, os.sched_param(0))


def measure(rounds: int) -> Records:
    """One rank. Collective."""
    collective, memory = create_communicator(transport="collective"), create_communicator(transport="shared_memory")
    left, right = torch.randn(400, 200), torch.randn(200, 128)

    def work() -> None:
        for _ in range(20):
            torch.mm(left, right)

    records: Records = []
    for num_bytes in (0, *SUM_BYTES):
        values = torch.randint(-9, 9, (num_bytes // 4,)).float()

        def share(way: str, values: torch.Tensor = values) -> Any:
            communicator = memory if way == MEMORY else collective
            return (
                communicator.sum_(values.clone()) if len(values) else communicator.gather_ints([communicator.rank, 7])
            )

        found = [share(way) for way in WAYS]
        assert all(torch.equal(one, found[0]) if len(values) else one == found[0] for one in found)
        taken: dict[str, list[float]] = {way: [] for way in ("work alone", *WAYS)}
        for _ in range(WARMUP + rounds):
            taken["work alone"].append(time_steps(work, memory.barrier))
            for way in WAYS:
                hurry()
                if way == WAITING:
                    let_others_finish()
                taken[way].append(time_steps(lambda way=way: (work(), share(way)), memory.barrier))
        slowest = {way: [max(of) for of in zip(*memory.gather_floats(times))] for way, times in taken.items()}
        alone = slowest.pop("work alone")
        cost_ms = {
            way: [1e3 * (one - less) for one, less in zip(times, alone, strict=True)][WARMUP:]
            for way, times in slowest.items()
        }
        records.append(
            {
                "ranks": memory.world_size,
                "what": f"sum of {num_bytes // 1000} KB" if num_bytes else "gather of 1 KB",
                **{way: statistics.median(times) for way, times in cost_ms.items()},
            }
        )
    return records


def time_steps(step: Callable[[], object], barrier: Callable[[], None]) -> float:
    """Returns the mean time of a step: what is rare, and long, counts."""
    step()
    barrier()
    start_s = time.perf_counter()
    for _ in range(STEPS):
        step()
    return (time.perf_counter() - start_s) / STEPS


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.exchange.sums")
    parser.add_argument("--ranks", type=int, nargs="+", metavar="P", default=[2, 3, 4], help="numbers of ranks")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    args = parser.parse_args(arguments)
    records: Records = []
    for world_size in args.ranks:
        records += measure_by_ranks(measure, world_size, args.rounds)
    table = Table("ranks", "what", *(f"{way}, ms" for way in WAYS), title="What a step takes beside its work")
    for record in records:
        table.add_row(str(record["ranks"]), record["what"], *(f"{record[way]:.2f}" for way in WAYS))
    make_console(to_stderr=args.json).print(table)
    if args.json:
        print(json.dumps({"cells": records}))


if __name__ == "__main__":
    main()
