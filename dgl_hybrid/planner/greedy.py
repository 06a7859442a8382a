# SPDX-License-Identifier: Apache-2.0
"""The mixing greedy: charges a row only for inputs nobody has paid for yet, and revisits until nothing gains.

[Note: rounds instead of a heap]
With `h(u)` the highest level at which u is computed (-1: none), the objective is submodular: raising several vertices
together gains at least the sum of what each gains alone. So one vectorised round may take *every* move that gains by
itself, and a round costs one pass over the edges whatever the number of moves.

Two kinds of round follow each other until neither gains:
1. raise each vertex to the level that gains most by itself;
2. raise a coalition that pays for shared inputs together: each input's price is split among its readers in the
   coalition, members with a loss leave, the rest split again, until all gain.
Nothing taken is ever worth giving back, see the next note.

[Note: persistence]
From nothing and without a budget, every move of 1 and 2 lies in *every* optimal choice: a single move gains more than any
of its parts, and for a coalition S and an optimum O, the members outside O would gain together on top of O, since inputs
they share with members inside O are paid already. The minimum cut therefore starts from `grow`'s result.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .costs import ItemCosts
from .items import Bools, Floats, Ints, Items

MAX_COALITION_ROUNDS = 40
MAX_ROUNDS = 1000


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Prices:
    """Prices of items as (L, H) seconds, and what smaller gains than rounding can produce are."""

    receive: Floats
    compute: Floats
    tolerance: float

    @classmethod
    def of(cls, items: Items, costs: ItemCosts) -> Prices:
        """Looks the prices up."""
        receive, compute = items.receive_prices(costs), items.compute_prices(costs)
        largest = max(float(receive.max(initial=0.0)), float(compute.max(initial=0.0)))
        degree = int(np.bincount(items.reader).max(initial=1)) if items.reader.size else 1
        return cls(receive=receive, compute=compute, tolerance=1e-13 * largest * degree)


def greedy_choice(items: Items, costs: ItemCosts) -> Bools:
    """Returns the (L, H) choice of the mixing greedy."""
    return grow(items, Prices.of(items, costs), np.zeros((items.num_layers, items.num_halo), dtype=np.bool_))


def grow(items: Items, prices: Prices, computed: Bools) -> Bools:
    """Raises vertices, alone and in coalitions, until none gains; returns the new (L, H) choice."""
    computed = computed.copy()
    for _ in range(MAX_ROUNDS):
        gains = _gains(items, prices, computed, _unpaid(items, prices, computed))
        target, gain = _best_targets(items, computed, gains)
        take = gain > prices.tolerance
        if not take.any():
            take, target = _coalition(items, prices, computed)
            if not take.any():
                break
        computed |= _raised(items, computed, take, target)
    return computed


def fill_budget(items: Items, costs: ItemCosts, prices: Prices, computed: Bools, budget_bytes: float) -> Bools:
    """Raises single vertices by gain per byte while they fit into `budget_bytes`; returns the new (L, H) choice."""
    computed = computed.copy()
    receive_bytes = np.array(costs.receive_bytes)[:, None] + np.zeros(items.num_halo)
    held: Floats = np.array(costs.row_held_bytes)[:, None] + np.array(costs.edge_held_bytes)[:, None] * items.in_degree
    byte_prices = Prices(receive=receive_bytes, compute=held, tolerance=0.0)
    for _ in range(MAX_ROUNDS):
        gains = _gains(items, prices, computed, _unpaid(items, prices, computed))
        target, gain = _best_targets(items, computed, gains)
        # An input that is bought is received, so it costs the bytes of a received row; a level-0 input may be held instead.
        byte_gains = _gains(items, byte_prices, computed, _unpaid_bytes(items, prices, byte_prices, computed))
        extra = -_gain_at(byte_gains, target)
        candidates = np.flatnonzero(gain > prices.tolerance)
        if not candidates.size:
            break
        worth = gain[candidates] / np.maximum(extra[candidates], 1e-9)
        order = candidates[np.argsort(-worth, kind="stable")]
        left = budget_bytes - items.held_bytes(costs, computed)
        # Bytes of moves taken together are at most their sum, for the reason in [Note: rounds instead of a heap].
        order = order[extra[order] <= left]
        order = order[np.cumsum(np.maximum(extra[order], 0.0)) <= left]
        if not order.size:
            break
        take = np.zeros(items.num_halo, dtype=np.bool_)
        take[order] = True
        raised = computed | _raised(items, computed, take, target)
        if items.held_bytes(costs, raised) > budget_bytes:
            break
        computed = raised
    return computed


def _unpaid(items: Items, prices: Prices, computed: Bools) -> Floats:
    """Returns (L, H): what bringing each absent row here costs; at level 0 holding it may be cheaper than receiving."""
    price = prices.receive.copy()
    price[0] = np.minimum(price[0], prices.compute[0])
    price[items.present(computed)] = 0.0
    return price


def _unpaid_bytes(items: Items, prices: Prices, byte_prices: Prices, computed: Bools) -> Floats:
    price = byte_prices.receive.copy()
    price[0] = np.maximum(price[0], byte_prices.compute[0])
    price[items.present(computed)] = 0.0
    return price


def _gains(items: Items, prices: Prices, computed: Bools, unpaid: Floats, split: Ints | None = None) -> Floats:
    """Returns (L, H): what computing each item adds, its absent inputs included; -inf where it is not allowed.

    `unpaid` are prices of absent inputs, `split` (L, H) by how many readers each is shared.
    """
    present = items.present(computed)
    gains = np.where(present, prices.receive, 0.0) - prices.compute
    for level in range(1, items.num_layers):
        price = unpaid[level - 1]
        if split is not None:
            price = price / np.maximum(split[level - 1], 1)
        if price.any():
            gains[level] -= np.bincount(items.reader, weights=price[items.source], minlength=items.num_halo)
    gains[computed] = 0.0
    gains[~items.allowed] = -np.inf
    return gains


def _best_targets(items: Items, computed: Bools, gains: Floats) -> tuple[Ints, Floats]:
    """Returns per vertex the level to raise it to, and the gain: levels between are computed too, so gains add up."""
    total = np.cumsum(gains, axis=0)
    total[computed] = 0.0
    target = total.argmax(axis=0)
    return target, total[target, np.arange(items.num_halo)]


def _gain_at(gains: Floats, target: Ints) -> Floats:
    gains = np.where(np.isneginf(gains), 0.0, gains)
    result: Floats = np.cumsum(gains, axis=0)[target, np.arange(gains.shape[1])]
    return result


def _raised(items: Items, computed: Bools, take: Bools, target: Ints) -> Bools:
    levels = np.arange(items.num_layers)[:, None]
    result: Bools = take[None, :] & (levels <= target[None, :]) & ~computed
    return result


def _coalition(items: Items, prices: Prices, computed: Bools) -> tuple[Bools, Ints]:
    """Finds vertices that gain together by sharing the price of inputs; nobody if the splitting does not settle.

    Conservative: a member that serves as another's input is still charged as if it were absent.
    """
    unpaid = _unpaid(items, prices, computed)
    target, gain = _best_targets(items, computed, _gains(items, prices, computed, np.zeros_like(unpaid)))
    take = gain > prices.tolerance
    for _ in range(MAX_COALITION_ROUNDS):
        if not take.any():
            break
        raised = _raised(items, computed, take, target)
        split = np.zeros((items.num_layers, items.num_halo), dtype=np.int64)
        for level in range(1, items.num_layers):
            active = raised[level][items.reader]
            split[level - 1] = np.bincount(items.source[active], minlength=items.num_halo)
        shared = _gains(items, prices, computed, unpaid, split)
        # Levels above the coalition's may not come back: their readers were not counted in the split.
        shared[~(raised | computed)] = -np.inf
        new_target, gain = _best_targets(items, computed, shared)
        new_take = take & (gain > prices.tolerance)
        settled = bool((new_take == take).all() and (new_target[take] == target[take]).all())
        take, target = new_take, new_target
        if settled:
            return take, target
    return np.zeros(items.num_halo, dtype=np.bool_), target
