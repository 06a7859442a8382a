# SPDX-License-Identifier: Apache-2.0
"""The choice of what to hold, against all subsets of small instances and by its rules."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from dgl_hybrid.sampling.choose import LIST_SHARE, RemoteCosts, choose_held

COSTS = RemoteCosts(row_s=2e-6, seed_s=1e-6, latency_s=1e-4)


def choose(seed_reads: list[float], row_reads: list[float], budget: float, **sizes: list[int]) -> tuple[list[int], ...]:
    num = len(seed_reads)
    choice = choose_held(
        seed_reads=torch.tensor(seed_reads, dtype=torch.float64),
        row_reads=torch.tensor(row_reads, dtype=torch.float64),
        list_bytes=torch.tensor(sizes.get("lists", [100] * num)),
        row_bytes=torch.tensor(sizes.get("rows", [100] * num)),
        costs=COSTS,
        budget_bytes=budget,
    )
    return torch.nonzero(choice.lists).flatten().tolist(), torch.nonzero(choice.rows).flatten().tolist()


def test_without_a_limit_all_that_is_read_is_held_and_nothing_else() -> None:
    assert choose([0.0, 3.0, 0.1], [1.0, 0.0, 0.2], math.inf) == ([1, 2], [0, 2])


def test_nothing_fits_into_nothing() -> None:
    assert choose([1.0], [1.0], 0.0) == ([], [])


def test_the_most_saved_per_byte_comes_first() -> None:
    assert choose([0.0] * 4, [1.0, 4.0, 2.0, 3.0], 250.0) == ([], [1, 3])
    assert choose([0.0] * 2, [4.0, 3.0], 100.0, rows=[200, 100]) == ([], [1])


def test_lists_get_their_share_and_what_rows_leave_over() -> None:
    many = 20
    lists, rows = choose([9.0] * many, [1.0] * many, 1000.0)
    assert len(lists) == LIST_SHARE * 10 - 0.5
    assert len(rows) == 8
    lists, rows = choose([9.0] * many, [1.0] + [0.0] * (many - 1), 1000.0)
    assert (len(lists), len(rows)) == (9, 1)


@pytest.mark.parametrize("seed", range(20))
def test_rows_are_within_one_item_of_the_best_subset(seed: int) -> None:
    """The greedy loses at most the item that no longer fits."""
    generator = torch.Generator().manual_seed(seed)
    reads = (torch.rand(9, generator=generator) * 10).tolist()
    sizes = torch.randint(20, 200, (9,), generator=generator).tolist()
    budget = 0.4 * sum(sizes)
    _, chosen = choose([0.0] * 9, reads, budget, rows=sizes)
    assert sum(sizes[k] for k in chosen) <= budget
    best = max(
        sum(reads[k] for k in subset)
        for count in range(10)
        for subset in itertools.combinations(range(9), count)
        if sum(sizes[k] for k in subset) <= budget
    )
    assert sum(reads[k] for k in chosen) >= best - max(reads)
