# SPDX-License-Identifier: Apache-2.0
"""Sets of ids: a table over their range finds what a search or a sort finds."""

from __future__ import annotations

import pytest
import torch

from dgl_hybrid.exchange import segments
from dgl_hybrid.exchange.segments import are_many, count_unique, difference, find_sorted, place_of, union, unique


@pytest.fixture(params=[1, 5, 1000, 100_000], ids=lambda n: f"{n}-ids")
def num_ids(request: pytest.FixtureRequest) -> int:
    """Of ids that are few or many beside their range."""
    return int(request.param)


@pytest.fixture(params=[0, 1, 37, 5000], ids=lambda n: f"{n}-asked")
def ids(request: pytest.FixtureRequest, num_ids: int) -> torch.Tensor:
    return torch.randint(num_ids, (request.param,), generator=torch.Generator().manual_seed(7))


@pytest.fixture
def some(num_ids: int) -> torch.Tensor:
    """A sorted set."""
    return torch.randint(num_ids, (40,), generator=torch.Generator().manual_seed(8)).unique()


def test_tables_find_what_searches_find(ids: torch.Tensor, some: torch.Tensor, num_ids: int) -> None:
    found, position = find_sorted(some, ids, num_ids)
    assert found.tolist() == [int(i) in set(some.tolist()) for i in ids]
    assert torch.equal(some[position[found]], ids[found])
    assert position.dtype == torch.int64
    assert bool(((position >= 0) & (position < max(len(some), 1))).all())
    for known in (0, num_ids):
        assert torch.equal(difference(ids, some, known), ids[~found])
        assert torch.equal(union(ids, some, num_ids=known), torch.cat([ids, some]).unique())
    nothing, _ = find_sorted(some[:0], ids, num_ids)
    assert not nothing.any()


def test_tables_count_what_sorts_count(ids: torch.Tensor, num_ids: int) -> None:
    distinct, counts = ids.unique(return_counts=True)
    assert torch.equal(unique(ids, num_ids), distinct)
    assert all(map(torch.equal, count_unique(ids, num_ids), (distinct, counts)))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_places(dtype: torch.dtype) -> None:
    table = place_of(torch.tensor([4, 0, 2]), 6, dtype)
    assert table.tolist() == [1, -1, 2, -1, 0, -1]
    assert table.dtype == dtype


def test_no_table_for_few_ids_of_a_large_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.tensor([10**12, 5, 10**12])
    assert not are_many(ids, 10**13)
    assert not are_many(ids, 0), "nothing is known of them"
    assert are_many(ids, 12)
    assert unique(ids, 10**13).tolist() == [5, 10**12]
    assert find_sorted(torch.tensor([5]), ids, 10**13)[0].tolist() == [False, True, False]
    monkeypatch.setattr(segments, "_SPARSEST", 0)
    assert not are_many(ids, 12)
