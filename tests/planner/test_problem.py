# SPDX-License-Identifier: Apache-2.0
"""Malformed problems are refused by name."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from dgl_hybrid.errors import PlanError
from dgl_hybrid.planner.items import build_items

from .problems import make_problem, random_problem

GOOD = make_problem(
    in_neighbours=[[1], [2], [0, 2]],
    demand=np.array([[1, 1, 0], [1, 0, 0]], dtype=bool),
    owner=[1, 2, 1],
    world_size=3,
    expandable=np.array([True, True, False]),
)


@pytest.mark.parametrize("seed", range(5))
def test_edges_between_halo_vertices_come_sorted_and_once(seed: int) -> None:
    problem = random_problem(seed, num_layers=2, num_halo=12 * seed, world_size=3)
    items = build_items(problem)
    lists = [part.tolist() for part in problem.in_halo.tensor_split(problem.in_indptr[1:-1])] if seed else []
    expected = [(v, w) for v, sources in enumerate(lists) for w in sorted(set(sources)) if w != v]
    assert list(zip(items.reader.tolist(), items.source.tolist(), strict=True)) == expected


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"rank": 3}, r"rank must lie in 0..2 \(got 3\)"),
        ({"num_layers": 0}, r"num_layers must be at least 1"),
        ({"owner": torch.tensor([1, 2])}, r"owner must be \(3,\) torch.int64 on cpu \(got \(2,\)"),
        ({"in_degree": torch.ones(3)}, r"in_degree must be \(3,\) torch.int64"),
        ({"halo_global": torch.tensor([5, 5, 6])}, r"halo_global must be strictly ascending"),
        ({"owner": torch.tensor([1, 0, 1])}, r"owner must be another rank \(got 0 for vertex 103\)"),
        ({"in_degree": torch.tensor([1, -1, 0])}, r"in_degree must not be negative"),
        ({"in_indptr": torch.tensor([0, 1, 1, 1])}, r"in_indptr must ascend from 0 to 2"),
        ({"in_indptr": torch.tensor([0, 1, 1, 2])}, r"in-neighbours of expandable vertices only"),
        ({"in_halo": torch.tensor([1, 3], dtype=torch.int32)}, r"in_halo must hold positions in 0..2"),
        ({"reach": torch.zeros(2, 3, dtype=torch.bool)}, r"demand must lie within reach"),
        (
            {"demand": torch.zeros(2, 3).bool(), "reach": torch.tensor([[1, 0, 0], [1, 0, 0]]).bool()},
            r"reach of level 0 must hold what level 1 reads",
        ),
        ({"owned_rows": torch.tensor([1, -1, 1])}, r"owned_rows and owned_edges must not be negative"),
        ({"owned_reads": torch.tensor([1])}, r"owned_reads must be \(2, 3\) torch.int32"),
        (
            {"owned_reads": torch.ones(2, 3, dtype=torch.int32)},
            r"owned_reads must be positive where owned vertices read",
        ),
    ],
)
def test_malformed_problems(changes: dict[str, object], match: str) -> None:
    with pytest.raises(PlanError, match=match):
        dataclasses.replace(GOOD, **changes).validate()  # type: ignore[arg-type]
