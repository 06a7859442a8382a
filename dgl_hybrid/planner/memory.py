# SPDX-License-Identifier: Apache-2.0
"""Plans within a memory budget: a price on bytes, found by bisection, then a greedy fill of what is left.

The price on a byte held is a Lagrange multiplier. A dearer byte never gives a plan that holds more, so the least price
that fits can be bisected; plans of that kind lie on the convex hull of (bytes, seconds) only, hence the fill.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..errors import PlanError
from .costs import ItemCosts
from .greedy import Prices, fill_budget
from .items import Bools, Items
from .model_trace import ModelTrace

BISECTION_STEPS = 20

Solver = Callable[[Prices], Bools]


def choose_within(items: Items, costs: ItemCosts, solver: Solver, budget_bytes: float) -> Bools:
    """As `choose_near`, but raises PlanError, naming remedies, if even the choice that holds least does not fit."""
    choice = choose_near(items, costs, solver, budget_bytes)
    held = items.held_bytes(costs, choice)
    if held > budget_bytes:
        raise too_large(items, costs, held, budget_bytes)
    return choice


def choose_near(items: Items, costs: ItemCosts, solver: Solver, budget_bytes: float) -> Bools:
    """Returns the (L, H) choice of least cost found within `budget_bytes`; if none fits, the one that holds least.

    Args:
        items: of the problem.
        costs: of this rank.
        solver: gives the choice for given prices.
        budget_bytes: for the halo rows of all levels.
    """
    prices = Prices.of(items, costs)
    best = solver(prices)
    if items.held_bytes(costs, best) <= budget_bytes:
        return best
    receive_bytes = np.array(costs.receive_bytes)[:, None] + np.zeros(items.num_halo)
    row_bytes = np.array(costs.row_held_bytes)[:, None]
    held_bytes = row_bytes + np.array(costs.edge_held_bytes)[:, None] * items.in_degree

    def at_price(byte_s: float) -> Bools:
        return solver(
            Prices(
                receive=prices.receive + byte_s * receive_bytes,
                compute=prices.compute + byte_s * held_bytes,
                tolerance=prices.tolerance * (1.0 + byte_s / unit_s),
            )
        )

    # A byte that costs as much as the dearest item's seconds per byte: the scale to start from.
    seconds = float(max(prices.receive.max(initial=0.0), prices.compute.max(initial=0.0)))
    largest = float(max(receive_bytes.max(initial=0.0), held_bytes.max(initial=0.0), 1.0))
    unit_s = max(seconds, 1e-12) / largest
    low, high = 0.0, unit_s
    fitting = at_price(high)
    for _ in range(8):
        if items.held_bytes(costs, fitting) <= budget_bytes:
            break
        low, high = high, high * 16.0
        fitting = at_price(high)
    else:
        return fitting
    for _ in range(BISECTION_STEPS):
        middle = (low + high) / 2.0
        choice = at_price(middle)
        if items.held_bytes(costs, choice) <= budget_bytes:
            high = middle
            if items.objective(costs, choice) <= items.objective(costs, fitting):
                fitting = choice
        else:
            low = middle
        if high - low <= 1e-3 * high:
            break
    return fill_budget(items, costs, prices, fitting, budget_bytes)


CHUNK_COPIES = 8
"""How often a chunk's rows are here at once, at most: two that are received and two that are sent, with their
gradients; attention has its own copies of the one it works on. Sums over a chunk are added where they belong."""
MOST_CHUNK_ROWS = 2**31 - 1
LEAST_CHUNK_ROWS = 64
"""Smaller messages would carry little but their own cost."""


def chunk_rows_within(trace: ModelTrace, budget_bytes: float) -> int | None:
    """Returns how many received rows fit a budget at a time, if every layer can use and drop them; None if not.

    A layer that keeps its result receives its rows once, and all of them unless it can split.
    """
    if not all(layer.can_split for layer in trace.layers):
        return None
    row_bytes = max(layer.operand_bytes_fwd for layer in trace.layers)
    rows = int(min(budget_bytes / (CHUNK_COPIES * max(row_bytes, 1.0)), MOST_CHUNK_ROWS))
    return rows if rows >= LEAST_CHUNK_ROWS else None


def too_large(items: Items, costs: ItemCosts, held_bytes: float, budget_bytes: float) -> PlanError:
    """Makes the error for a plan that does not fit, with the numbers of this rank and what can be done."""
    received = items.demand.sum(axis=1)
    per_level = ", ".join(f"level {k}: {int(n)} x {costs.receive_bytes[k]:.0f}" for k, n in enumerate(received))
    return PlanError(
        f"the plan needs at least {held_bytes:.0f} bytes for halo rows, memory_budget_bytes is {budget_bytes:.0f} "
        f"(rows owned vertices read: {per_level} bytes). Possible solutions: "
        f"1) raise memory_budget_bytes to {held_bytes:.0f}, 2) use more partitions or a partition with fewer halo "
        "vertices, 3) use a narrower model or fewer layers, 4) choose strategy hybrid, which trades time for bytes"
    )
