# SPDX-License-Identifier: Apache-2.0
"""Planning problems for tests: random small ones, real ones cut out of a graph, and a brute force to hold against."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import torch

from dgl_hybrid.planner import ItemCosts, PlanProblem


def make_problem(
    *,
    in_neighbours: list[list[int]],
    demand: np.ndarray,
    owner: list[int] | np.ndarray,
    world_size: int,
    rank: int = 0,
    in_degree: list[int] | np.ndarray | None = None,
    expandable: np.ndarray | None = None,
) -> PlanProblem:
    """Builds a problem from lists; global ids are 100 + 3 * position, reach is what the demand's subtrees need."""
    num_layers, num_halo = demand.shape
    if expandable is None:
        expandable = np.ones(num_halo, dtype=bool)
    lists = [list_ if expandable[v] else [] for v, list_ in enumerate(in_neighbours)]
    indptr = np.concatenate([[0], np.cumsum([len(x) for x in lists])]).astype(np.int64)
    reach = demand.copy()
    for level in range(num_layers - 1, 0, -1):
        reach[level - 1] |= reach[level]
        for v in np.flatnonzero(reach[level]):
            reach[level - 1, in_neighbours[v]] = True
    problem = PlanProblem(
        rank=rank,
        world_size=world_size,
        num_layers=num_layers,
        halo_global=torch.arange(num_halo) * 3 + 100,
        owner=torch.as_tensor(np.asarray(owner, dtype=np.int64)),
        in_degree=torch.tensor([len(x) for x in in_neighbours] if in_degree is None else list(in_degree)).long(),
        expandable=torch.from_numpy(expandable),
        in_indptr=torch.from_numpy(indptr),
        in_halo=torch.tensor([w for x in lists for w in x], dtype=torch.int32),
        demand=torch.from_numpy(demand),
        reach=torch.from_numpy(reach),
        owned_rows=torch.full((num_layers + 1,), 10),
        owned_edges=torch.full((num_layers,), 40),
    )
    problem.validate()
    return problem


def random_problem(seed: int, *, num_layers: int, num_halo: int, world_size: int) -> PlanProblem:
    """Draws a directed halo graph with self-loops, duplicates, unexpandable and undemanded vertices.

    With every third seed rows that are computed bring no inputs.
    """
    rng = np.random.default_rng([seed, num_layers, num_halo, world_size])
    density = rng.choice([1.0, 1.5, 2.5, 4.0]) / max(num_halo, 1)
    lists = [
        [w for w in range(num_halo) for _ in range(rng.integers(1, 3)) if rng.random() < density]
        for _ in range(num_halo)
    ]
    rank = int(rng.integers(world_size))
    others = [q for q in range(world_size) if q != rank]
    problem = make_problem(
        in_neighbours=lists,
        demand=rng.random((num_layers, num_halo)) < rng.choice([0.2, 0.5, 0.9], size=(num_layers, 1)),
        owner=rng.choice(others, size=num_halo),
        world_size=world_size,
        rank=rank,
        in_degree=[len(x) + int(rng.integers(0, 3)) for x in lists],
        expandable=rng.random(num_halo) < rng.choice([0.8, 1.0]),
    )
    return replace(problem, inputs_are_free=seed % 3 == 1)


def random_costs(seed: int, *, num_layers: int, world_size: int, whole: bool = True) -> ItemCosts:
    """Draws prices in a range where choices are close; whole numbers make ties likely."""
    rng = np.random.default_rng([seed, 7])

    def draw(low: float, high: float) -> float:
        return float(rng.integers(low, high + 1)) if whole else float(rng.uniform(low, high))

    zeros = (0.0,)
    return ItemCosts(
        receive_s=tuple(
            tuple(draw(0, 6) if level == 0 else draw(2, 14) for _ in range(world_size)) for level in range(num_layers)
        ),
        row_s=tuple(draw(0, 4) for _ in range(num_layers)),
        edge_s=zeros + tuple(draw(0, 1) for _ in range(num_layers - 1)),
        receive_bytes=tuple(draw(1, 8) for _ in range(num_layers)),
        row_held_bytes=tuple(draw(4, 12) for _ in range(num_layers)),
        edge_held_bytes=zeros + tuple(draw(0, 2) for _ in range(num_layers - 1)),
        widths=tuple(draw(1, 5) for _ in range(num_layers)),
    )


def brute_force(problem: PlanProblem, costs: ItemCosts) -> tuple[float, np.ndarray, np.ndarray]:
    """Tries every nested choice; presence follows. Written from the definition, apart from the package.

    Returns:
        The least seconds; the seconds and the held bytes of every choice.
    """
    num_layers, num_halo = problem.num_layers, problem.num_halo
    tops = []
    for u in range(num_halo):
        top = -1
        for level in range(num_layers):
            if not problem.reach[level, u] or (level > 0 and not problem.expandable[u]):
                break
            top = level
        tops.append(range(-1, top + 1))
    heights = np.array(list(itertools.product(*tops)), dtype=np.int8).reshape(-1, num_halo)
    seconds = np.zeros(len(heights))
    held = np.zeros(len(heights))
    for level in range(num_layers):
        computed = heights >= level
        for u in range(num_halo):
            present = computed[:, u] | bool(problem.demand[level, u])
            if level + 1 < num_layers and not (level == 0 and problem.inputs_are_free):
                for reader in range(num_halo):
                    start, end = int(problem.in_indptr[reader]), int(problem.in_indptr[reader + 1])
                    if u in problem.in_halo[start:end].tolist():
                        present = present | (heights[:, reader] >= level + 1)
            degree = int(problem.in_degree[u])
            receive = costs.receive_s[level][int(problem.owner[u])]
            compute = costs.row_s[level] + costs.edge_s[level] * degree
            seconds += np.where(computed[:, u], compute, np.where(present, receive, 0.0))
            bytes_computed = costs.row_held_bytes[level] + costs.edge_held_bytes[level] * degree
            held += np.where(computed[:, u], bytes_computed, np.where(present, costs.receive_bytes[level], 0.0))
    return float(seconds.min()), seconds, held


def problem_from_graph(
    src: np.ndarray, dst: np.ndarray, part: np.ndarray, *, rank: int, num_layers: int, seeds: np.ndarray, num_hops: int
) -> PlanProblem:
    """Cuts one rank's problem out of a whole graph, as the exchange builds it from partitions.

    Args:
        src: (E,) sources.
        dst: (E,) destinations.
        part: (N,) owner of each vertex.
        rank: whose problem.
        num_layers: L.
        seeds: (N,) bool, vertices the loss reads.
        num_hops: halo hops of the partition; vertices nearer than that have known in-edges.
    """
    num_nodes = part.size
    degree = np.bincount(dst, minlength=num_nodes)
    reach = np.zeros((num_layers + 1, num_nodes), dtype=bool)
    reach[num_layers] = seeds
    for level in range(num_layers, 0, -1):
        reach[level - 1] = reach[level]
        reach[level - 1, src[reach[level][dst]]] = True
    owned = part == rank
    known, near = owned.copy(), owned.copy()
    for _ in range(num_hops):
        known = near.copy()
        near[src[known[dst]]] = True
    halo = np.flatnonzero(near & ~owned)
    position = np.full(num_nodes, -1)
    position[halo] = np.arange(halo.size)
    inside = known[dst] & ~owned[dst] & ~owned[src]
    order = np.argsort(dst[inside], kind="stable")
    reader, source = position[dst[inside][order]], position[src[inside][order]]
    demand = np.zeros((num_layers, halo.size), dtype=bool)
    for level in range(num_layers):
        read = owned[dst] & reach[level + 1][dst] & ~owned[src]
        demand[level, position[src[read]]] = True
    return PlanProblem(
        rank=rank,
        world_size=int(part.max()) + 1,
        num_layers=num_layers,
        halo_global=torch.from_numpy(halo.astype(np.int64)),
        owner=torch.from_numpy(part[halo].astype(np.int64)),
        in_degree=torch.from_numpy(degree[halo].astype(np.int64)),
        expandable=torch.from_numpy(known[halo]),
        in_indptr=torch.from_numpy(np.searchsorted(reader, np.arange(halo.size + 1)).astype(np.int64)),
        in_halo=torch.from_numpy(source.astype(np.int32)),
        demand=torch.from_numpy(demand),
        reach=torch.from_numpy(reach[:num_layers, halo].copy()),
        owned_rows=torch.from_numpy((reach & owned).sum(axis=1)),
        owned_edges=torch.from_numpy(np.array([int((owned & reach[k])[dst].sum()) for k in range(1, num_layers + 1)])),
    )
