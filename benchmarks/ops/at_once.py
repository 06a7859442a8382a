# SPDX-License-Identifier: Apache-2.0
"""Measures cells in as many processes at once as a host would have ranks, each with one thread, and tables of them."""

from __future__ import annotations

import multiprocessing
import os
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from rich.table import Table

from benchmarks.console import make_console
from benchmarks.systems.team import ALLOCATORS

Result = dict[str, Any]
MeasureHere = Callable[[Any, int], Result]
"""Takes a cell and the rounds to time; a function of a module, which processes find by name."""

_together: Any = None
"""Of the processes of a pool: a barrier, which only an initializer can hand them."""


def measure_at_once(
    measure_here: MeasureHere, cells: Sequence[Any], *, processes: int, rounds: int
) -> list[list[Result]]:
    """Returns for each cell what each process measured, with the allocator settings of `benchmarks/systems`."""
    context = multiprocessing.get_context("spawn")
    with (
        mock.patch.dict(os.environ, ALLOCATORS["keep"] | {"OMP_NUM_THREADS": "1"}),
        context.Pool(processes, _start, (context.Barrier(processes),)) as pool,
    ):
        return [pool.starmap(_measure, [(measure_here, cell, rounds)] * processes, chunksize=1) for cell in cells]


def _start(barrier: Any) -> None:
    global _together
    torch.set_num_threads(1)
    _together = barrier


def _measure(measure_here: MeasureHere, cell: Any, rounds: int) -> Result:
    _together.wait()
    return measure_here(cell, rounds)


def write_table(
    head: Sequence[str], rows: Sequence[Sequence[str]], processes: int, file: Path, *, begin: str, end: str
) -> None:
    """Replaces what stands between two marks of a README."""
    lines = [" | ".join(row) for row in [head, ["---"] * len(head), *rows]]
    table = "\n".join(f"| {line} |" for line in lines)
    conditions = f"{processes} processes of one thread at once, float32, medians of the slower one."
    text = file.read_text("utf-8")
    above, below = text.split(begin)[0].rstrip(), text.split(end)[1]
    file.write_text(f"{above}\n\n{begin}\n\n{conditions}\n\n{table}\n\n{end}{below}", "utf-8")


def summarise_rule(results: Sequence[Result], name: str) -> Result:
    """Returns what a rule gains where it takes the way of that name, and what it leaves where it does not."""
    gains = {rule: [one["gain"] for one in results if one["by_rule"] == rule] for rule in (True, False)}
    return {
        f"{name}_gain_median": statistics.median(gains[True]) if gains[True] else None,
        f"{name}_gain_min": min(gains[True], default=None),
        f"{name}_gain_max": max(gains[True], default=None),
        "left_gain_max": max(gains[False], default=None),
        "cells": results,
    }


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints it for who looks on; results for programs go to stdout."""
    table = Table(*head)
    for row in rows:
        table.add_row(*row)
    make_console(to_stderr=True).print(table)
