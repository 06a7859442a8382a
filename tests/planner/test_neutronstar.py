# SPDX-License-Identifier: Apache-2.0
"""NeutronStar's greedy against one written from the paper's text, with sets, where every subtree is walked through."""

from __future__ import annotations

import heapq

import numpy as np
import pytest

from dgl_hybrid.planner import ItemCosts, neutronstar
from dgl_hybrid.planner.items import Items, build_items
from dgl_hybrid.planner.neutronstar import neutronstar_choice, quick_neutronstar_choice
from tests.planner.problems import random_costs, random_problem


def by_definition(items: Items, costs: ItemCosts, memory_bytes: float | None) -> np.ndarray:
    widths = np.array(costs.widths)

    def per_width(prices: np.ndarray, of: np.ndarray) -> float:
        return float(prices @ of / (of @ of))

    vertex_s = per_width(np.array(costs.row_s), widths) * widths
    edge_s = per_width(np.array(costs.edge_s[1:]), widths[1:]) * widths * (np.arange(len(widths)) > 0)
    mean_s = [np.mean(np.array(prices)[items.owner]) for prices in costs.receive_s]
    receive_s = per_width(np.array(mean_s), widths) * widths
    sources = [set(items.source[items.reader == v].tolist()) for v in range(items.num_halo)]
    replicated: list[set[int]] = [set() for _ in range(items.num_layers)]

    def subtree(vertex: int, level: int) -> list[set[int]] | None:
        levels: list[set[int]] = []
        frontier = {vertex}
        for k in range(level, -1, -1):
            if not all(items.allowed[k, v] for v in frontier):
                return None
            new = frontier - replicated[k]
            levels.insert(0, new)
            frontier = new.union(*(sources[v] for v in new if k > items.lowest))
        return levels

    def price(levels: list[set[int]]) -> float:
        total = 0.0
        for k, new in enumerate(levels):
            total += len(new) * vertex_s[k] + sum(int(items.in_degree[v]) for v in new) * edge_s[k]
        return float(total)

    def choice() -> np.ndarray:
        computed = np.zeros((items.num_layers, items.num_halo), dtype=bool)
        for k, done in enumerate(replicated):
            computed[k, list(done)] = True
        return computed

    for level in range(items.num_layers):
        heap = []
        for vertex in range(items.num_halo):
            if items.demand[level, vertex] and items.allowed[level, vertex]:
                levels = subtree(vertex, level)
                if levels is not None:
                    heap.append((price(levels), vertex))
        heapq.heapify(heap)
        while heap:
            _, vertex = heapq.heappop(heap)
            levels = subtree(vertex, level)
            if levels is None or price(levels) >= receive_s[level]:
                break
            before = [set(done) for done in replicated]
            for k, new in enumerate(levels):
                replicated[k] |= new
            if memory_bytes is not None and _held_bytes(items, costs, choice()) > memory_bytes:
                replicated[:] = before
                break
    return choice()


def _held_bytes(items: Items, costs: ItemCosts, computed: np.ndarray) -> float:
    """Rows that owned vertices read and that are not replicated are received; replicated ones are held with edges."""
    total = 0.0
    for k in range(items.num_layers):
        total += float((items.demand[k] & ~computed[k]).sum()) * costs.receive_bytes[k]
        total += float(computed[k].sum()) * costs.row_held_bytes[k]
        total += float(items.in_degree[computed[k]].sum()) * costs.edge_held_bytes[k]
    return total


@pytest.mark.parametrize("num_layers", [2, 3, 4])
@pytest.mark.parametrize("whole", [True, False])
def test_it_is_the_published_greedy(num_layers: int, whole: bool) -> None:
    counts = []
    for seed in range(25):
        items = build_items(random_problem(seed, num_layers=num_layers, num_halo=40, world_size=3))
        costs = random_costs(seed, num_layers=num_layers, world_size=3, whole=whole)
        expected = by_definition(items, costs, None)
        np.testing.assert_array_equal(neutronstar_choice(items, costs), expected)
        counts.append(int(expected[1:].sum()))
    assert sum(count > 0 for count in counts) > 10, "above the first level, too"
    assert len(set(counts)) > 10


def test_it_is_so_within_a_memory() -> None:
    stopped = 0
    for seed in range(25):
        items = build_items(random_problem(seed, num_layers=3, num_halo=40, world_size=3))
        costs = random_costs(seed, num_layers=3, world_size=3)
        none = np.zeros((3, 40), dtype=bool)
        free = neutronstar_choice(items, costs)
        low, high = (_held_bytes(items, costs, choice) for choice in (none, free))
        if low >= high:
            continue
        memory_bytes = low + (high - low) * 0.5
        found = neutronstar_choice(items, costs, memory_bytes)
        np.testing.assert_array_equal(found, by_definition(items, costs, memory_bytes))
        stopped += int(found.sum() < free.sum())
    assert stopped > 5


def test_where_it_is_slow_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    items = build_items(random_problem(3, num_layers=3, num_halo=40, world_size=3))
    costs = random_costs(3, num_layers=3, world_size=3)
    expected = neutronstar_choice(items, costs)
    found = quick_neutronstar_choice(items, costs)
    assert found is not None
    np.testing.assert_array_equal(found, expected)
    monkeypatch.setattr(neutronstar, "QUICK_ROWS", 3)
    assert quick_neutronstar_choice(items, costs) is None
    monkeypatch.undo()
    monkeypatch.setattr(neutronstar, "QUICK_VERTICES", 39)
    assert quick_neutronstar_choice(items, costs) is None
