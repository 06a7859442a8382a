# SPDX-License-Identifier: Apache-2.0
"""Small named graphs that hold what breaks distributed message passing. All are seeded: the same call, the same graph.

Every graph carries `ndata`: `feat` (N, F) float64, `label` (N,) int64, `train_mask` (N,) bool (few of the nodes),
and `edata`: `w` (E,) float64 in [0.5, 1.5).
`NAMED` lists the builders that need no arguments, for `pytest.mark.parametrize`.
"""

from __future__ import annotations

from collections.abc import Callable

import dgl_hybrid  # noqa: F401 - before dgl, which it makes importable

# isort: split
import dgl
import numpy as np
import torch
from dgl import DGLGraph
from torch import Tensor

NUM_FEATURES = 5
NUM_CLASSES = 3


def hand_drawn() -> DGLGraph:
    """Six nodes whose answers can be worked out on paper.

        0 ──▶ 1 ──▶ 2         in-neighbours   0: 5      1: 0      2: 1, 4
        ▲     ▼     ▲                         3: 1      4: 3      5: 4
        5 ◀── 4 ◀── 3         edge ids        0: 0▶1    1: 1▶2    2: 1▶3    3: 3▶4
                └▶ 2                          4: 4▶5    5: 5▶0    6: 4▶2
              1 ──▶ 3

    `feat` is the node id in column 0 and 1 in column 1; `w` is the edge id + 1; nodes 2 and 5 are for training.
    """
    g = dgl.graph((torch.tensor([0, 1, 1, 3, 4, 5, 4]), torch.tensor([1, 2, 3, 4, 5, 0, 2])), num_nodes=6)
    g.ndata["feat"] = torch.stack([torch.arange(6.0, dtype=torch.float64), torch.ones(6, dtype=torch.float64)], 1)
    g.ndata["label"] = torch.tensor([0, 1, 2, 0, 1, 2])
    g.ndata["train_mask"] = torch.tensor([False, False, True, False, False, True])
    g.edata["w"] = torch.arange(1.0, 8.0, dtype=torch.float64)
    return g


def directed(num_nodes: int = 40, num_edges: int = 160, seed: int = 0) -> DGLGraph:
    """Random, directed, without duplicates or self-loops; every node has an in-edge and an out-edge."""
    rng = np.random.default_rng(seed)
    ring = rng.permutation(num_nodes)
    pairs = {(int(a), int(b)) for a, b in zip(ring, np.roll(ring, -1), strict=True)}
    while len(pairs) < num_edges:
        u, v = rng.integers(num_nodes, size=2)
        if u != v:
            pairs.add((int(u), int(v)))
    return _finish([p[0] for p in sorted(pairs)], [p[1] for p in sorted(pairs)], num_nodes, seed)


def power_law(num_nodes: int = 60, num_edges: int = 300, seed: int = 0) -> DGLGraph:
    """In- and out-degrees fall off as a power; node 0 is a hub that reads all others and is read by all."""
    rng = np.random.default_rng(seed)
    chance = 1.0 / np.arange(1, num_nodes + 1) ** 0.8
    chance /= chance.sum()
    pairs = {(0, v) for v in range(1, num_nodes)} | {(v, 0) for v in range(1, num_nodes)}
    while len(pairs) < num_edges:
        u, v = rng.choice(num_nodes, size=2, p=chance)
        if u != v:
            pairs.add((int(u), int(v)))
    return _finish([p[0] for p in sorted(pairs)], [p[1] for p in sorted(pairs)], num_nodes, seed)


def with_isolated(num_nodes: int = 40, seed: int = 0) -> DGLGraph:
    """Every fifth node (0, 5, 10 …) has no edge at all; node 1 has only out-edges, node 2 only in-edges."""
    rng = np.random.default_rng(seed)
    ids = np.array([v for v in range(num_nodes) if v % 5])
    pairs = {(1, 2), (1, 3), (4, 2)}
    while len(pairs) < 3 * num_nodes:
        u, v = (int(x) for x in rng.choice(ids, size=2))
        if u != v and u != 2 and v != 1:
            pairs.add((u, v))
    return _finish([p[0] for p in sorted(pairs)], [p[1] for p in sorted(pairs)], num_nodes, seed)


def with_duplicates(num_nodes: int = 36, num_edges: int = 140, seed: int = 0) -> DGLGraph:
    """Many edges occur two or three times (weights differ, ids apart); a third of the nodes has self-loops."""
    rng = np.random.default_rng(seed)
    src = rng.integers(num_nodes, size=num_edges)
    dst = rng.integers(num_nodes, size=num_edges)
    loops = np.arange(0, num_nodes, 3)
    src = np.concatenate([src, src[: num_edges // 2], loops, src[: num_edges // 4], loops[:2]])
    dst = np.concatenate([dst, dst[: num_edges // 2], loops, dst[: num_edges // 4], loops[:2]])
    order = rng.permutation(len(src))
    return _finish(src[order], dst[order], num_nodes, seed)


def with_empty_pair(num_parts: int = 3, nodes_per_part: int = 14, seed: int = 0) -> tuple[DGLGraph, Tensor]:
    """A graph and its partition in which no edge leads from part 0 to the last part, although edges lead back.

    Args:
        num_parts: 2 to 4; between all other ordered pairs of parts there are edges.
    Returns:
        The graph, and (N,) int64: the part of each node. Node ids are mixed, so parts are no ranges of ids.
    """
    rng = np.random.default_rng(seed)
    num_nodes = num_parts * nodes_per_part
    part = rng.permutation(np.repeat(np.arange(num_parts), nodes_per_part))
    pairs: set[tuple[int, int]] = set()
    for p in range(num_parts):  # three edges for every pair of parts that has any: no other pair is empty by chance
        for q in range(num_parts):
            if (p, q) != (0, num_parts - 1):
                sources, targets = rng.choice(np.flatnonzero(part == p), 3), rng.choice(np.flatnonzero(part == q), 3)
                pairs.update((int(u), int(v)) for u, v in zip(sources, targets, strict=True) if u != v)
    while len(pairs) < 4 * num_nodes:
        u, v = (int(x) for x in rng.integers(num_nodes, size=2))
        if u != v and (part[u], part[v]) != (0, num_parts - 1):
            pairs.add((u, v))
    g = _finish([p[0] for p in sorted(pairs)], [p[1] for p in sorted(pairs)], num_nodes, seed)
    return g, torch.from_numpy(part)


NAMED: dict[str, Callable[[], DGLGraph]] = {
    "hand_drawn": hand_drawn,
    "directed": directed,
    "power_law": power_law,
    "isolated": with_isolated,
    "duplicates": with_duplicates,
    "empty_pair": lambda: with_empty_pair()[0],
}


def train_mask(num_nodes: int, *, fraction: float = 0.2, none_in: range | None = None, seed: int = 0) -> Tensor:
    """Which nodes carry loss: `fraction` of all (at least one; 1.0 is all), none of those whose id lies in `none_in`.

    Returns:
        (num_nodes,) bool.
    """
    allowed = np.array([v for v in range(num_nodes) if none_in is None or v not in none_in])
    count = max(1, round(fraction * len(allowed)))
    chosen = np.random.default_rng(seed).permutation(allowed)[:count]
    mask = torch.zeros(num_nodes, dtype=torch.bool)
    mask[torch.from_numpy(chosen)] = True
    return mask


def random_parts(num_nodes: int, num_parts: int, seed: int = 0) -> Tensor:
    """A random partition of uneven sizes in which every part has a node: (num_nodes,) int64."""
    rng = np.random.default_rng(seed)
    share = np.arange(1, num_parts + 1) / sum(range(1, num_parts + 1))
    part = rng.choice(num_parts, size=num_nodes, p=share)
    part[rng.permutation(num_nodes)[:num_parts]] = np.arange(num_parts)
    return torch.from_numpy(part)


def _finish(src: object, dst: object, num_nodes: int, seed: int) -> DGLGraph:
    g = dgl.graph((torch.as_tensor(src), torch.as_tensor(dst)), num_nodes=num_nodes)
    generator = torch.Generator().manual_seed(seed)
    g.ndata["feat"] = torch.randn(num_nodes, NUM_FEATURES, dtype=torch.float64, generator=generator)
    g.ndata["label"] = torch.randint(NUM_CLASSES, (num_nodes,), generator=generator)
    g.ndata["train_mask"] = train_mask(num_nodes, seed=seed)
    g.edata["w"] = torch.rand(g.num_edges(), dtype=torch.float64, generator=generator) + 0.5
    return g
