# SPDX-License-Identifier: Apache-2.0
"""NeutronStar's greedy (SIGMOD 2022), kept as it was published, to compare with.

Per layer l = 1..L, a heap of remote dependencies by the cost of their subtree,

    t_r(u, l) = sum over k < l of (|V^k(u) not replicated| * T_v + |E^k(u) not replicated| * T_e) * d(k)
    t_c(u, l) = T_c * d(l - 1)

with V^k(u) the subtree's remote vertices at level k and E^k(u) their in-edges. The cheapest is popped, measured again
without what is replicated by now, and replicated with its whole subtree while t_r < t_c; the first that is not, or that
would exceed the memory S, ends the layer. Its cost form is linear in the width d, so the T are fitted to our prices.
"""

from __future__ import annotations

import heapq

import numpy as np

from .costs import ItemCosts
from .items import Bools, Floats, Ints, Items

QUICK_VERTICES, QUICK_ROWS = 200_000, 2 * 10**8
"""Halo vertices of a problem, and rows of the subtrees walked through, that take a few seconds."""
MARKS_IN_A_ROW = 16
"""Looking at so many marks takes as long as a row."""


def neutronstar_choice(items: Items, costs: ItemCosts, memory_bytes: float | None = None) -> Bools:
    """Returns the (L, H) choice of NeutronStar's greedy. One vertex at a time: minutes past a million halo vertices.

    Args:
        items: of the problem.
        costs: of this rank.
        memory_bytes: S, for the rows replicated here and those received so far.
    """
    search = _Search(items, costs, memory_bytes)
    search.run()
    return search.computed


def quick_neutronstar_choice(items: Items, costs: ItemCosts, memory_bytes: float | None = None) -> Bools | None:
    """Returns the same, or None where that would take more than a few seconds; counted in rows, not measured."""
    if items.num_halo > QUICK_VERTICES:
        return None
    search = _Search(items, costs, memory_bytes, max_rows=QUICK_ROWS)
    return search.computed if search.run() else None


class _Search:
    def __init__(self, items: Items, costs: ItemCosts, memory_bytes: float | None, max_rows: float = np.inf) -> None:
        self.items = items
        self.rows_left = max_rows
        widths = np.array(costs.widths)
        self.vertex_s = _unit(np.array(costs.row_s), widths) * widths
        edge_s = _unit(np.array(costs.edge_s[1:]), widths[1:]) * widths
        edge_s[0] = 0.0
        self.edge_s: Floats = edge_s
        # Their T_c knows no owners; the mean over peers stands in for it.
        receive_s = np.array(costs.receive_s)
        peers = np.bincount(items.owner, minlength=receive_s.shape[1])
        mean = receive_s @ peers / max(int(peers.sum()), 1)
        self.receive_s = _unit(mean, widths) * widths
        self.indptr = np.searchsorted(items.reader, np.arange(items.num_halo + 1))
        self.computed: Bools = np.zeros((items.num_layers, items.num_halo), dtype=np.bool_)
        self.costs = costs
        self.marks: Bools = np.zeros(items.num_halo, dtype=np.bool_)
        self.left = np.inf
        if memory_bytes is not None:
            self.left = memory_bytes - items.held_bytes(costs, self.computed)

    def run(self) -> bool:
        """Fills `computed`; tells whether that was done within `max_rows`."""
        for layer in range(1, self.items.num_layers + 1):
            self._run_layer(layer)
        return self.rows_left >= 0

    def _run_layer(self, layer: int) -> None:
        level = layer - 1
        items = self.items
        vertices = np.flatnonzero(items.demand[level] & items.allowed[level])
        if level == 0:
            self._run_inputs(vertices)
            return
        heap = [(least, False, vertex) for least, vertex in zip(self._least(vertices, level), vertices.tolist())]
        heapq.heapify(heap)
        at_first = self.computed.copy()
        has_taken = False
        while heap and self.rows_left >= 0:
            least, is_priced, vertex = heapq.heappop(heap)
            if not has_taken and not least < self.receive_s[level]:
                return  # so it would be with the cheapest: nothing is replicated that it could do without by now
            if not is_priced:
                subtree = self._subtree(vertex, level, at_first)
                if subtree is not None:
                    heapq.heappush(heap, (self._price(subtree), True, vertex))
                continue
            subtree = self._subtree(vertex, level, self.computed)
            if subtree is None or not self._price(subtree) < self.receive_s[level]:
                return
            extra = self._extra_bytes(subtree, vertex, level)
            if extra > self.left:
                return
            self.left -= extra
            has_taken = True
            for k, vertices in enumerate(subtree):
                self.computed[k, vertices] = True

    def _run_inputs(self, vertices: Ints) -> None:
        """Layer 1: inputs have no subtrees and cost the same, so the heap would take them in their order."""
        if not self.vertex_s[0] < self.receive_s[0]:
            return
        if self.left < np.inf:
            extra = self.costs.row_held_bytes[0] - self.costs.receive_bytes[0]
            left = np.subtract.accumulate(np.concatenate([[self.left], np.full(len(vertices), extra)]))
            too_much = np.flatnonzero(extra > left[:-1])
            vertices = vertices[: too_much[0]] if too_much.size else vertices
            self.left = float(left[len(vertices)])
        self.computed[0, vertices] = True

    def _least(self, vertices: Ints, level: int) -> list[float]:
        """Returns less than what subtrees cost: their two highest levels, and of those below what the second has.

        Most subtrees cost too much by these alone, and are never walked through.
        """
        items = self.items
        own = np.where(self.computed[level], 0.0, self.vertex_s[level] + items.in_degree * self.edge_s[level])
        below = np.zeros(items.num_halo)
        for k in range(level):
            missing = ~self.computed[level - 1] & ~self.computed[k]
            below += np.where(missing, self.vertex_s[k] + items.in_degree * self.edge_s[k], 0.0)
        least = own + np.where(self.computed[level], 0.0, below)
        if level > items.lowest:
            of_sources = np.bincount(items.reader, weights=below[items.source], minlength=items.num_halo)
            least += np.where(self.computed[level], 0.0, of_sources)
        result: list[float] = ((1.0 - 1e-9) * least[vertices]).tolist()  # sums in another order round differently
        return result

    def _subtree(self, vertex: int, level: int, computed: Bools) -> list[Ints] | None:
        """Returns per level 0..level the vertices not yet replicated, or None if some in-edges are unknown here."""
        items = self.items
        result: list[Ints] = []
        frontier = np.array([vertex], dtype=np.int64)
        for k in range(level, -1, -1):
            if not items.allowed[k, frontier].all():
                return None
            frontier = frontier[~computed[k, frontier]]
            result.append(frontier)
            if k > items.lowest and frontier.size:
                frontier = self._with_sources(frontier)
        return result[::-1]

    def _with_sources(self, vertices: Ints) -> Ints:
        """Returns vertices and their sources, ascending, each once."""
        first, past = self.indptr[vertices], self.indptr[vertices + 1]
        counts = past - first
        begins = np.cumsum(counts) - counts
        edges = np.repeat(first - begins, counts) + np.arange(int(counts.sum()))
        self.rows_left -= len(edges) + self.items.num_halo // MARKS_IN_A_ROW
        self.marks[vertices] = True
        self.marks[self.items.source[edges]] = True
        found = np.flatnonzero(self.marks)
        self.marks[found] = False
        return found

    def _price(self, subtree: list[Ints]) -> float:
        total = 0.0
        for k, vertices in enumerate(subtree):
            total += vertices.size * self.vertex_s[k] + int(self.items.in_degree[vertices].sum()) * self.edge_s[k]
        return float(total)

    def _extra_bytes(self, subtree: list[Ints], vertex: int, level: int) -> float:
        if self.left == np.inf:
            return 0.0
        total = -self.costs.receive_bytes[level]
        for k, vertices in enumerate(subtree):
            total += vertices.size * self.costs.row_held_bytes[k]
            total += int(self.items.in_degree[vertices].sum()) * self.costs.edge_held_bytes[k]
            read = self.items.demand[k, vertices] & (vertices != vertex if k == level else np.True_)
            total -= int(read.sum()) * self.costs.receive_bytes[k]
        return total


def _unit(prices: Floats, widths: Floats) -> float:
    """Least squares through the origin: the T of `prices = T * widths`."""
    return float(prices @ widths / (widths @ widths)) if widths.any() else 0.0
