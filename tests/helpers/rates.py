# SPDX-License-Identifier: Apache-2.0
"""Rates to plan by that nobody measures: a second of computing on each rank, for every loader that probes and times."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from unittest import mock

from dgl_hybrid.graph.model_timing import time_model
from dgl_hybrid.planner import uniform_topology
from dgl_hybrid.training import planning

BUDGET_S = 0.02
"""Of timing a model, which is done all the same, as all ranks take part in it."""


@contextlib.contextmanager
def assumed_rates(world_size: int) -> Iterator[None]:
    """Ranks are not probed and models hardly timed: for tests whose results do not depend on which plan is faster."""
    with (
        mock.patch.object(planning, "probe", return_value=uniform_topology(world_size)),
        mock.patch.object(planning, "time_model", functools.partial(time_model, budget_s=BUDGET_S)),
    ):
        yield
