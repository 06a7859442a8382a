# SPDX-License-Identifier: Apache-2.0
"""The graphs hold what their names promise; otherwise the tests built on them would prove less than they say."""

from __future__ import annotations

import pytest
import torch

from tests.helpers import graphs


@pytest.mark.parametrize("name", graphs.NAMED)
def test_every_graph_has_its_data_and_is_reproducible(name: str) -> None:
    g, again = graphs.NAMED[name](), graphs.NAMED[name]()
    assert g.ndata["feat"].dtype == g.edata["w"].dtype == torch.float64
    assert g.ndata["label"].dtype == torch.int64
    assert 0 < int(g.ndata["train_mask"].sum()) < g.num_nodes()
    for ours, theirs in zip(g.edges(), again.edges(), strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(g.ndata["feat"], again.ndata["feat"])
    assert torch.equal(g.edata["w"], again.edata["w"])


def test_hand_drawn_has_the_drawn_in_neighbours() -> None:
    g = graphs.hand_drawn()
    assert [sorted(g.predecessors(v).tolist()) for v in range(6)] == [[5], [0], [1, 4], [1], [3], [4]]


def test_the_hub_reads_and_is_read_by_all() -> None:
    g = graphs.power_law()
    assert g.in_degrees(0) == g.out_degrees(0) == g.num_nodes() - 1


def test_isolated_nodes() -> None:
    g = graphs.with_isolated()
    alone = torch.arange(0, g.num_nodes(), 5)
    assert int(g.in_degrees(alone).sum() + g.out_degrees(alone).sum()) == 0
    assert g.in_degrees(1) == 0 < g.out_degrees(1)
    assert g.out_degrees(2) == 0 < g.in_degrees(2)


def test_duplicates_and_self_loops() -> None:
    g = graphs.with_duplicates()
    src, dst = g.edges()
    _, counts = torch.unique(torch.stack([src, dst]), dim=1, return_counts=True)
    assert int(counts.max()) >= 3
    assert int((src == dst).sum()) >= g.num_nodes() // 3


@pytest.mark.parametrize("num_parts", [2, 3, 4])
def test_only_the_named_pair_of_parts_is_empty(num_parts: int) -> None:
    g, part = graphs.with_empty_pair(num_parts)
    src, dst = g.edges()
    pairs = set(zip(part[src].tolist(), part[dst].tolist(), strict=True))
    every = {(p, q) for p in range(num_parts) for q in range(num_parts)}
    assert every - pairs == {(0, num_parts - 1)}


def test_train_masks() -> None:
    assert graphs.train_mask(30, fraction=1.0).all()
    mask = graphs.train_mask(30, none_in=range(10, 20))
    assert int(mask.sum()) == 4
    assert not mask[10:20].any()


@pytest.mark.parametrize("num_parts", [1, 2, 3, 4])
def test_random_parts_are_never_empty(num_parts: int) -> None:
    assert torch.bincount(graphs.random_parts(12, num_parts)).shape == (num_parts,)
    assert torch.bincount(graphs.random_parts(12, num_parts)).min() > 0
