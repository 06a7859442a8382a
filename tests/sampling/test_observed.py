# SPDX-License-Identifier: Apache-2.0
"""Learning from reads as they happen."""

from __future__ import annotations

import torch

from dgl_hybrid.sampling.observed import MOST_COUNTED, ObservedReads


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
    observed = ObservedReads()
    often = torch.arange(7, 4 * MOST_COUNTED, 1001)
    for ids in torch.arange(4 * MOST_COUNTED).split(MOST_COUNTED // 3):
        observed.add(ids)
        observed.add(often)
    assert len(observed._ids) <= MOST_COUNTED
    assert torch.equal(observed.review(2).sort().values, often)
