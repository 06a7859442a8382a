# SPDX-License-Identifier: Apache-2.0
"""Plans within a memory budget: a price on bytes, found by the chord, then a greedy fill of what is left.

The price on a byte held is a Lagrange multiplier. A dearer byte never gives a plan that holds more, and plans of that
kind lie on the convex hull of (bytes, seconds). So from one that fits and one that does not, the slope between the two
is the price of a plan between them, or they are neighbours: where the hull is round each step halves the bytes that are
left. Between neighbours there may be better plans, hence the fill.

    seconds
       | f           f fits, o is over the budget; the tangent with the slope of their chord touches at c
       |   `
       |     c
       |        `  .    o
       +-------------------- bytes
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..errors import PlanError
from .costs import ItemCosts
from .greedy import Prices, fill_budget
from .items import Bools, Items
from .model_trace import ModelTrace

FEWEST_SOLVES, MOST_SOLVES = 10, 22
"""Two are for the ends, a byte that costs nothing and the dearest one. With five, plans over links whose speeds
differ a hundredfold took up to a third longer; with ten as long as with any number."""
DEAREST = 2.0**32
"""Times what a byte costs if it is as dear as the seconds of its item: then nothing but bytes counts."""
SETTLED = 1e-3
"""The search ends when no plan within the budget is faster by this share, or no price between left differs by it."""

Solver = Callable[[Prices], Bools]


def choose_within(
    items: Items, costs: ItemCosts, solver: Solver, budget_bytes: float, *, max_edges: int = sys.maxsize
) -> Bools:
    """As `choose_near`, but raises PlanError, naming remedies, if even the choice that holds least does not fit."""
    choice = choose_near(items, costs, solver, budget_bytes, max_edges=max_edges)
    held = items.held_bytes(costs, choice)
    if held > budget_bytes:
        raise too_large(items, costs, held, budget_bytes)
    return choice


def choose_near(
    items: Items, costs: ItemCosts, solver: Solver, budget_bytes: float, *, max_edges: int = sys.maxsize
) -> Bools:
    """Returns the (L, H) choice of least cost found within `budget_bytes`; if none fits, the one that holds least.

    Args:
        items: of the problem.
        costs: of this rank.
        solver: gives the choice for given prices.
        budget_bytes: for the halo rows of all levels.
        max_edges: of the problem, counted once for each call of the solver: after so many there is no further call.
            `FEWEST_SOLVES` are made in any case.
    """
    num_solves = max(int(min(max_edges / max(items.reader.size, 1), MOST_SOLVES)), FEWEST_SOLVES)
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

    # What a byte costs if it is as dear as the seconds of its item: the scale of prices.
    seconds = float(max(prices.receive.max(initial=0.0), prices.compute.max(initial=0.0)))
    largest = float(max(receive_bytes.max(initial=0.0), held_bytes.max(initial=0.0), 1.0))
    unit_s = max(seconds, 1e-12) / largest
    fitting, over = _Priced.of(items, costs, at_price(DEAREST * unit_s)), _Priced.of(items, costs, best)
    if fitting.num_bytes > budget_bytes:
        return fitting.computed
    low, high = 0.0, DEAREST * unit_s
    for _ in range(num_solves - 2):
        byte_s = (fitting.seconds - over.seconds) / (over.num_bytes - fitting.num_bytes)
        if not low < byte_s < high:
            # The ends are neighbours, or the greedy found nothing between them at this price, and may at another.
            byte_s = (low + high) / 2.0
        choice = _Priced.of(items, costs, at_price(byte_s))
        if choice.num_bytes > budget_bytes:
            low = byte_s
            over = min(over, choice, key=lambda one: one.num_bytes)
        else:
            high = byte_s
            fitting = min(fitting, choice, key=lambda one: one.seconds)
        # Nothing costs less at this price, and so nothing within the budget is faster than this.
        least_s = choice.seconds + byte_s * (choice.num_bytes - budget_bytes)
        if fitting.seconds - least_s <= SETTLED * fitting.seconds or high - low <= SETTLED * high:
            break
    return fill_budget(items, costs, prices, fitting.computed, budget_bytes)


@dataclass(frozen=True, slots=True, eq=False)
class _Priced:
    """A choice with what it costs and holds."""

    computed: Bools
    seconds: float
    num_bytes: float

    @classmethod
    def of(cls, items: Items, costs: ItemCosts, computed: Bools) -> _Priced:
        present = items.present(computed)
        return cls(computed, items.objective(costs, computed, present), items.held_bytes(costs, computed, present))


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
    if unsplit_layers(trace):
        return None
    rows = int(min(budget_bytes / _bytes_of_chunks(trace, 1), MOST_CHUNK_ROWS))
    return rows if rows >= LEAST_CHUNK_ROWS else None


def least_bytes_in_chunks(trace: ModelTrace) -> float | None:
    """Returns the least budget for which `chunk_rows_within` returns a number; None if there is none."""
    return None if unsplit_layers(trace) else _bytes_of_chunks(trace, LEAST_CHUNK_ROWS)


def unsplit_layers(trace: ModelTrace) -> tuple[int, ...]:
    """Returns the layers, from 1, that need all rows that they receive at once."""
    return tuple(number for number, layer in enumerate(trace.layers, 1) if not layer.can_split)


def _bytes_of_chunks(trace: ModelTrace, chunk_rows: int) -> float:
    return CHUNK_COPIES * chunk_rows * max(1.0, *(layer.operand_bytes_fwd for layer in trace.layers))


def too_large(items: Items, costs: ItemCosts, held_bytes: float, budget_bytes: float) -> PlanError:
    """Makes the error for a plan that does not fit, with the numbers of this rank and what can be done."""
    received = items.demand.sum(axis=1)
    per_level = ", ".join(f"level {k}: {int(n)} x {costs.receive_bytes[k]:.0f}" for k, n in enumerate(received))
    return PlanError(
        f"the plan needs at least {held_bytes:.0f} bytes for halo rows, memory_budget_bytes is {budget_bytes:.0f} "
        f"(rows owned vertices read: {per_level} bytes). Possible solutions: "
        f"1) raise memory_budget_bytes (--memory-budget) to {held_bytes:.0f}, 2) use more partitions (--ranks) or a "
        "partition with fewer halo vertices, "
        "3) use a narrower model or fewer layers, 4) choose strategy hybrid, which trades time for bytes"
    )
