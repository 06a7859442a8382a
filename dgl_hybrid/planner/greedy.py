# SPDX-License-Identifier: Apache-2.0
"""The mixing greedy: charges a row only for inputs nobody has paid for yet, and revisits until nothing gains.

[Note: rounds instead of a heap]
With `h(u)` the highest level at which u is computed (-1: none), the objective is submodular: raising several vertices
together gains at least the sum of what each gains alone. So one vectorised round may take *every* move that gains by
itself, and a round costs one pass over the edges whatever the number of moves.

Two kinds of round follow each other until neither gains:
1. raise each vertex to the level that gains most by itself;
2. raise a coalition that pays for shared inputs together: each input's price is split among its readers in the
   coalition by what they gain, members with a loss leave, the rest split again, until all gain.
Nothing taken is ever worth giving back, see the next note.

[Note: persistence]
From nothing and without a budget, every move of 1 and 2 lies in *every* optimal choice: a single move gains more than
any of its parts, and for a coalition S and an optimum O, the members outside O would gain together on top of O, since
inputs they share with members inside O are paid already. The minimum cut therefore starts from `grow`'s result.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .costs import ItemCosts
from .items import Bools, Floats, Ints, Items

MAX_COALITION_ROUNDS = 40
MAX_COALITION_EDGES = 10_000_000
"""Past so many edges that still matter no coalitions are sought: up to 40 passes over them, for a per cent or so."""
MAX_ROUNDS = 1000
MAX_FILL_ROUNDS = 50
"""Each takes what is worth most a byte of what fits together: mostly two to five, then nothing does."""


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

    def equals(self, other: Prices) -> bool:
        """Whether these are the same prices, to the last bit."""
        is_same = np.array_equal(self.receive, other.receive) and np.array_equal(self.compute, other.compute)
        return is_same and self.tolerance == other.tolerance

    def objective(self, items: Items, computed: Bools) -> float:
        """Returns what an (L, H) choice costs at these prices."""
        received = items.present(computed) & ~computed
        return float(self.receive[received].sum() + self.compute[computed].sum())


def greedy_choice(items: Items, costs: ItemCosts) -> Bools:
    """Returns the (L, H) choice of the mixing greedy."""
    return grow(items, Prices.of(items, costs), np.zeros((items.num_layers, items.num_halo), dtype=np.bool_))


def grow(items: Items, prices: Prices, computed: Bools, *, max_rounds: int = MAX_ROUNDS, alone: bool = False) -> Bools:
    """Raises vertices until none gains, or for `max_rounds` rounds; returns the new (L, H) choice.

    With `alone`, without coalitions. Wherever it stops, [Note: persistence] holds.
    """
    state = _State(items, prices, computed)
    for _ in range(max_rounds):
        target, gain = state.best_targets(state.gains(state.unpaid()))
        take = gain > prices.tolerance
        if not take.any():
            if not alone and state.reader.size <= MAX_COALITION_EDGES:
                take, target = _coalition(state)
            if not take.any():
                break
        state.take(state.raised(take, target))
    return state.computed


def fill_budget(items: Items, costs: ItemCosts, prices: Prices, computed: Bools, budget_bytes: float) -> Bools:
    """Raises single vertices by gain per byte while they fit into `budget_bytes`; returns the new (L, H) choice."""
    state = _State(items, prices, computed)
    receive_bytes: Floats = np.array(costs.receive_bytes)[:, None] + np.zeros(items.num_halo)
    held_bytes: Floats = np.array(costs.row_held_bytes)[:, None] + np.zeros(items.num_halo)
    held_bytes += np.array(costs.edge_held_bytes)[:, None] * items.in_degree
    for _ in range(MAX_FILL_ROUNDS):
        # Inputs are bought received, level-0 ones received or held: then it is known what bytes a move brings in.
        target, gain = state.best_targets(state.gains(state.unpaid(received=True)))
        candidates = np.flatnonzero(gain > prices.tolerance)
        if not candidates.size:
            break
        input_bytes = receive_bytes.copy()
        input_bytes[0] = np.maximum(input_bytes[0], held_bytes[0])
        input_bytes[state.present] = 0.0
        paid = Unpaid(price=input_bytes, sums=[None] * items.num_layers)
        added = -state.gains(paid, receive=receive_bytes, compute=held_bytes)
        extra = np.cumsum(np.where(np.isinf(added), 0.0, added), axis=0)[target, np.arange(items.num_halo)]
        order = candidates[np.argsort(-gain[candidates] / np.maximum(extra[candidates], 1e-9), kind="stable")]
        left = budget_bytes - items.held_bytes(costs, state.computed)
        # Bytes of moves taken together are at most their sum, for the reason in [Note: rounds instead of a heap].
        order = order[extra[order] <= left]
        order = order[np.cumsum(np.maximum(extra[order], 0.0)) <= left]
        take = np.zeros(items.num_halo, dtype=np.bool_)
        take[order] = True
        raised = state.raised(take, target)
        if not order.size or items.held_bytes(costs, state.computed | raised) > budget_bytes:
            break
        state.take(raised)
    return state.computed


@dataclass(frozen=True, slots=True, eq=False)
class Unpaid:
    """What bringing absent rows here costs."""

    price: Floats
    """(L, H), 0 for rows that are present."""
    sums: list[Floats | None]
    """For each level, (H,) sums of the level below's price over a vertex's inputs, where they are known."""


class _State:
    """A choice under construction: what is computed, what is present, and the edges that can still matter."""

    def __init__(self, items: Items, prices: Prices, computed: Bools) -> None:
        self.items = items
        self.prices = prices
        self.computed = computed.copy()
        self.present = items.present(computed)
        self.reader = items.reader
        self.source = items.source
        self._find_starts()
        self._drop_settled_edges()

    def _find_starts(self) -> None:
        """Finds the vertices that read anything and where each one's edges begin."""
        is_start = np.ones(self.reader.size, dtype=np.bool_)
        is_start[1:] = self.reader[1:] != self.reader[:-1]
        self._starts = np.flatnonzero(is_start)
        self._readers = self.reader[self._starts]

    def take(self, raised: Bools) -> None:
        """Computes `raised` (L, H) too and marks what that brings here."""
        self.computed |= raised
        self.present |= raised
        for level in range(self.items.lowest + 1, self.items.num_layers):
            self.present[level - 1, self.source[raised[level][self.reader]]] = True
        self._drop_settled_edges()

    def _drop_settled_edges(self) -> None:
        """Drops edges from rows present at all levels, and to vertices that cannot be raised any more."""
        if self.items.num_layers < 2:
            return
        absent = ~np.asarray(self.present[self.items.lowest : -1].all(axis=0))
        raisable = np.logical_and(self.items.allowed, np.logical_not(self.computed))
        open_ = np.asarray(raisable[1:].any(axis=0))
        keep = absent[self.source] & open_[self.reader]
        if np.count_nonzero(keep) < 0.8 * keep.size:
            self.reader, self.source = self.reader[keep], self.source[keep]
            self._find_starts()

    def unpaid(self, *, received: bool = False) -> Unpaid:
        """Returns at most what bringing each absent row here costs: receiving, or computing with inputs.

        Computing counts in full what several inputs share, so it may cost less, never more. A row bought at the price
        of computing it is computed by a later round, since that then gains by itself.
        With `received`, only level-0 rows are bought other than by receiving.
        """
        items, prices = self.items, self.prices
        price = np.where(self.present, 0.0, prices.receive)
        sums: list[Floats | None] = [None] * items.num_layers
        chain = np.zeros(items.num_halo)
        for level in range(1 if received else items.num_layers):
            own = prices.compute[level] - np.where(self.present[level], prices.receive[level], 0.0)
            if level > items.lowest:
                sums[level] = self._sum_over_inputs(price[level - 1])
                own += sums[level]
            # What gains by itself is another move's gain, not a discount for this one.
            chain = np.maximum(np.where(self.computed[level], 0.0, own + chain), 0.0)
            chain[~items.allowed[level]] = np.inf
            price[level] = np.minimum(price[level], chain)
            price[level, self.present[level]] = 0.0
        return Unpaid(price=price, sums=sums)

    def gains(
        self,
        unpaid: Unpaid | None,
        *,
        power: Floats | None = None,
        total_power: Floats | None = None,
        receive: Floats | None = None,
        compute: Floats | None = None,
    ) -> Floats:
        """Returns (L, H): what computing each item saves, its absent inputs paid; -inf where it is not allowed.

        Args:
            unpaid: Prices of absent inputs; None: they cost nothing.
            power: (H,) if given, a reader pays the share `power[reader] / total_power[level, input]` of an input.
            total_power: (L, H) sums of `power` over the readers of each input.
            receive: (L, H) other prices than this state's.
            compute: (L, H) other prices than this state's.
        """
        receive = self.prices.receive if receive is None else receive
        compute = self.prices.compute if compute is None else compute
        gains = np.where(self.present, receive, 0.0)
        gains -= compute
        for level in range(self.items.lowest + 1, self.items.num_layers if unpaid is not None else 0):
            assert unpaid is not None
            if power is None or total_power is None:
                known = unpaid.sums[level]
                gains[level] -= self._sum_over_inputs(unpaid.price[level - 1]) if known is None else known
            else:
                total = total_power[level - 1]
                gains[level] -= power * self._sum_over_inputs(unpaid.price[level - 1] / np.where(total > 0, total, 1.0))
        gains[self.computed] = 0.0
        gains[~self.items.allowed] = -np.inf
        return gains

    def best_targets(self, gains: Floats) -> tuple[Ints, Floats]:
        """Returns per vertex the level to raise it to, and the gain, that of levels between included."""
        total = np.cumsum(gains, axis=0)
        total[self.computed] = 0.0
        target = total.argmax(axis=0)
        return target, total[target, np.arange(self.items.num_halo)]

    def raised(self, take: Bools, target: Ints) -> Bools:
        """Returns (L, H): the items that raising the vertices `take` to `target` adds."""
        levels = np.arange(self.items.num_layers)[:, None]
        result: Bools = take[None, :] & (levels <= target[None, :]) & ~self.computed
        return result

    def _sum_over_inputs(self, price: Floats) -> Floats:
        total = np.zeros(self.items.num_halo)
        if self._starts.size and price.any():
            total[self._readers] = np.add.reduceat(price[self.source], self._starts)
        return total


def _coalition(state: _State) -> tuple[Bools, Ints]:
    """Finds vertices that gain together by sharing the price of inputs; nobody if the splitting does not settle.

    Shares are proportional to what a member gains before inputs are paid: split evenly, the weak leave first and the
    rest cannot pay. Conservative: a member that serves as another's input is still charged as if it were absent.
    """
    num_layers, num_halo = state.items.num_layers, state.items.num_halo
    tolerance = state.prices.tolerance
    unpaid = state.unpaid()
    target, gain = state.best_targets(state.gains(None))
    take = gain > tolerance
    power = np.where(take, gain, 0.0)
    for _ in range(MAX_COALITION_ROUNDS):
        if not take.any():
            break
        raised = state.raised(take, target)
        total = np.zeros((num_layers, num_halo))
        for level in range(state.items.lowest + 1, num_layers):
            weights = np.where(raised[level], power, 0.0)
            total[level - 1] = np.bincount(state.source, weights=weights[state.reader], minlength=num_halo)
        shared = state.gains(unpaid, power=power, total_power=total)
        # Levels above the coalition's may not come back: their readers were not counted in the split.
        shared[~(raised | state.computed)] = -np.inf
        new_target, gain = state.best_targets(shared)
        new_take = take & (gain > tolerance)
        settled = bool((new_take == take).all() and (new_target[take] == target[take]).all())
        take, target = new_take, new_target
        if settled:
            return take, target
    return np.zeros(num_halo, dtype=np.bool_), target
