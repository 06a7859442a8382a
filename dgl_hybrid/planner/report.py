# SPDX-License-Identifier: Apache-2.0
"""Plans as rows of a table: one per plan and level."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .costs import ItemCosts
from .items import build_items
from .memory import CHUNK_COPIES
from .plan import DependencyPlan, choice_from_plan
from .problem import PlanProblem
from .run_rows import RunRows, masks_of


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportRow:
    """What one plan does at one level on one rank; milliseconds per epoch, forward and backward together."""

    strategy: str
    rank: int
    layer: int
    """The layer that reads the rows: level + 1."""
    cached: int
    communicated: int
    compute_ms: float
    """Spent on cached rows of the level."""
    comm_ms: float
    """Spent on received rows of the level, packing included."""
    received_bytes: float
    """Bytes that come here forward in every epoch; of a first layer whose sums are kept, none after the first one."""
    held_bytes: float
    """Bytes that cached and received rows of the level take here while they are needed; of those that are received
    in chunks, at most."""


def report(
    problem: PlanProblem, costs: ItemCosts, plans: Sequence[DependencyPlan], runs: Sequence[RunRows] | None = None
) -> list[ReportRow]:
    """Returns rows in the order of `plans`, then of layers. Pure.

    Args:
        runs: What there is of each plan when it runs; None: what the problem says of the plans, which may be more.

    Raises:
        PlanError: a plan does not belong to the problem.
    """
    items = build_items(problem)
    rows = []
    for at, plan in enumerate(plans):
        computed = choice_from_plan(problem, plan.cached)
        received = items.present(computed) & ~computed
        if runs is not None:
            computed, received = masks_of(problem, runs[at].computed), masks_of(problem, runs[at].received)
        receive_s, compute_s = items.receive_prices(costs), items.compute_prices(costs)
        for level in range(problem.num_layers):
            cached, count = computed[level], int(received[level].sum())
            by_owner = np.bincount(items.owner[received[level]], minlength=costs.world_size)
            held_edges = float(items.in_degree[cached].sum()) * costs.edge_held_bytes[level]
            rows.append(
                ReportRow(
                    strategy=plan.strategy,
                    rank=problem.rank,
                    layer=level + 1,
                    cached=int(cached.sum()),
                    communicated=count,
                    compute_ms=1e3 * float(compute_s[level, cached].sum()),
                    comm_ms=1e3 * float(receive_s[level, received[level]].sum()),
                    received_bytes=float(by_owner @ np.array(costs.wire_bytes[level])),
                    held_bytes=_received_rows_bytes(plan, costs, level, count)
                    + int(cached.sum()) * costs.row_held_bytes[level]
                    + held_edges,
                )
            )
    return rows


def _received_rows_bytes(plan: DependencyPlan, costs: ItemCosts, level: int, count: int) -> float:
    """Returns what `count` received rows take here at once: with their gradients, or some copies of one chunk."""
    at_once = count * costs.receive_bytes[level]
    if plan.chunk_rows is None:
        return at_once
    row_bytes = costs.receive_bytes[level] if plan.trace is None else plan.trace.layers[level].operand_bytes_fwd
    return min(at_once, CHUNK_COPIES * plan.chunk_rows * row_bytes)


def summarize_plan(plan: DependencyPlan) -> list[dict[str, int]]:
    """Returns the `plan` entry of `--json`: per layer what is cached and what is communicated."""
    counts = zip(plan.num_cached, plan.communicated, strict=True)
    return [
        {"layer": level + 1, "cached": cached, "communicated": communicated}
        for level, (cached, communicated) in enumerate(counts)
    ]
