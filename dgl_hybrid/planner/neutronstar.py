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


def neutronstar_choice(items: Items, costs: ItemCosts, memory_bytes: float | None = None) -> Bools:
    """Returns the (L, H) choice of NeutronStar's greedy. One vertex at a time: minutes past a million halo vertices.

    Args:
        items: of the problem.
        costs: of this rank.
        memory_bytes: S, for the rows replicated here and those received so far.
    """
    return _Search(items, costs, memory_bytes).run()


class _Search:
    def __init__(self, items: Items, costs: ItemCosts, memory_bytes: float | None) -> None:
        self.items = items
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
        self.left = np.inf
        if memory_bytes is not None:
            self.left = memory_bytes - items.held_bytes(costs, self.computed)

    def run(self) -> Bools:
        for layer in range(1, self.items.num_layers + 1):
            self._run_layer(layer)
        return self.computed

    def _run_layer(self, layer: int) -> None:
        level = layer - 1
        items = self.items
        heap: list[tuple[float, int]] = []
        for vertex in np.flatnonzero(items.demand[level] & items.allowed[level]).tolist():
            subtree = self._subtree(vertex, level)
            if subtree is not None:
                heap.append((self._price(subtree), vertex))
        heapq.heapify(heap)
        while heap:
            _, vertex = heapq.heappop(heap)
            subtree = self._subtree(vertex, level)
            if subtree is None or not self._price(subtree) < self.receive_s[level]:
                return
            extra = self._extra_bytes(subtree, vertex, level)
            if extra > self.left:
                return
            self.left -= extra
            for k, vertices in enumerate(subtree):
                self.computed[k, vertices] = True

    def _subtree(self, vertex: int, level: int) -> list[Ints] | None:
        """Returns per level 0..level the vertices not yet replicated, or None if some in-edges are unknown here."""
        items = self.items
        result: list[Ints] = []
        frontier = np.array([vertex], dtype=np.int64)
        for k in range(level, -1, -1):
            if not items.allowed[k, frontier].all():
                return None
            frontier = frontier[~self.computed[k, frontier]]
            result.append(frontier)
            if k and frontier.size:
                spans = [items.source[self.indptr[v] : self.indptr[v + 1]] for v in frontier]
                frontier = np.unique(np.concatenate([frontier, *spans]))
        return result[::-1]

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
    return float(prices @ widths / (widths @ widths)) if widths.size else 0.0
