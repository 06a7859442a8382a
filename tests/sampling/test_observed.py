# SPDX-License-Identifier: Apache-2.0
"""Learning from reads as they happen."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dgl_hybrid.sampling.observed import LEAST_COUNTED, ObservedReads, most_counted


def test_what_comes_back_is_found_the_most_read_first() -> None:
    observed = ObservedReads()
    assert not observed.add(torch.arange(100))
    assert not observed.add(torch.tensor([5, 7, 7]))
    assert observed.review(2).tolist() == [7, 5]
    assert len(observed.review(1)) == 100
    observed.forget(torch.tensor([7]))
    assert observed.review(2).tolist() == [5]


def test_reviews_come_after_1024_ids_and_each_time_their_number_doubled() -> None:
    observed = ObservedReads()
    due = []
    for step in range(40):
        if observed.add(torch.arange(1024)):
            due.append((step + 1) * 1024)
            observed.review(1)
    assert due == [1024, 2048, 4096, 8192, 16384, 32768]


def test_counts_survive_merging(monkeypatch: object) -> None:
    observed = ObservedReads()
    for _ in range(3):
        observed.add(torch.arange(600_000))
    assert len(observed.review(3)) == 600_000
    assert len(observed.review(4)) == 0


def test_what_is_read_once_by_all_is_not_kept_for_good() -> None:
    """A script that looks at every edge has no more of them counted than so many."""
    observed = ObservedReads(1000)
    often = torch.arange(7, 4000, 101)
    found: list[int] = []
    for ids in torch.arange(4000).split(300):
        for some in (ids, often):
            if observed.add(some):
                found += (come_back := observed.review(2)).tolist()
                observed.forget(come_back)
            assert observed.num_counted <= 1000
    assert set(found) == set(often.tolist())


def test_what_is_wanted_after_one_read_is_all_found() -> None:
    observed = ObservedReads(1000)
    found: list[Tensor] = []
    for ids in torch.arange(9000).split(70):
        if observed.add(ids):
            found.append(observed.review(1))
            observed.forget(found[-1])
    assert torch.cat([*found, observed.review(1)]).sort().values.tolist() == list(range(9000))


def test_more_is_counted_where_more_can_be_held() -> None:
    assert most_counted(float("inf")) == most_counted(1e6) == LEAST_COUNTED
    assert 16 * most_counted(1e10) == pytest.approx(1e10 / 16)
