# SPDX-License-Identifier: Apache-2.0
"""Ids of a block's edges are one tensor on each device."""

from __future__ import annotations

import torch
from torch import Tensor

from dgl_hybrid.graph.edge_ids import EdgeIds
from dgl_hybrid.partition.narrow_ids import NarrowIds


def test_a_block_that_is_moved_again_has_the_same_ids() -> None:
    """By identity: whoever moves blocks in every epoch asked other ranks anew each time for what the edges have."""
    made: list[Tensor] = []
    ids, there = EdgeIds(NarrowIds(torch.arange(5)), 3, torch.device("cpu"), made.append), torch.device("meta")
    assert ids.all_made() == []
    moved = ids.on(there).get()
    assert moved.device == there
    assert len(moved) == 3
    assert ids.on(there).get() is moved
    assert ids.on(there).on(torch.device("cpu")) is ids, "there and back"
    assert len(made) == 1
    assert made[0] is moved
    here = ids.get()
    assert here.tolist() == [0, 1, 2]
    assert [id(one) for one in ids.all_made()] == [id(here), id(moved)], "a loader forgets what was read by either"
