# SPDX-License-Identifier: Apache-2.0
"""Rates to plan by that nobody measures: a second of computing on each rank, for every loader that probes and times."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from unittest import mock

from dgl_hybrid.graph import trace, trace_record
from dgl_hybrid.graph.model_timing import time_model
from dgl_hybrid.planner import uniform_topology
from dgl_hybrid.training import planning

BUDGET_S = 0.02
"""Of timing a model, which is done all the same, as all ranks take part in it."""


@contextlib.contextmanager
def assumed_slowdowns() -> Iterator[None]:
    """Weighted sums, attention and dropout take as much longer than plain sums as they were found to on one machine:
    timed amid other work, one of them may seem so dear that plans no longer do what a test is about.
    """

    def of_attention(op: str, num_heads: int, head_width: int, **_: object) -> float:
        return 2.5 if op == "gat" else 7.0

    with (
        mock.patch.object(trace_record, "attention_slowdown", of_attention),
        mock.patch.object(trace_record, "weighted_slowdown", return_value=8.0),
        mock.patch.object(trace, "row_slowdown", return_value=4.0),
    ):
        yield


@contextlib.contextmanager
def assumed_rates(world_size: int) -> Iterator[None]:
    """Ranks are not probed and models hardly timed: for tests whose results do not depend on which plan is faster."""
    with (
        mock.patch.object(planning, "probe", return_value=uniform_topology(world_size)),
        mock.patch.object(planning, "time_model", functools.partial(time_model, budget_s=BUDGET_S)),
    ):
        yield
