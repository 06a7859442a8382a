# SPDX-License-Identifier: Apache-2.0
"""How much is fetched to decide by, in what messages, and how often it is gone through."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dgl_hybrid

# isort: split
import dgl
import pytest
import torch
from dgl.distributed import rpc
from torch import Tensor

from dgl_hybrid.errors import ExchangeError
from dgl_hybrid.sampling import halo_store, in_edge_lists
from dgl_hybrid.sampling.halo_store import HaloStore
from dgl_hybrid.sampling.in_edge_lists import InEdgeLists, PartitionLists, fetch_lists
from tests.sampling.offline import Machines, start_machines

NUM_NODES, HUB, HUB_DEGREE = 200, 150, 101
FOREIGN = torch.arange(110, NUM_NODES - 1)
"""Vertices of machine 1, outside the halo of machine 0."""


@pytest.fixture(autouse=True)
def plugin() -> Any:
    dgl_hybrid.enable(strategy="depcomm")
    yield
    dgl_hybrid.disable()


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machines:
    """Two halves of a ring, and a hub in the second that all vertices of the first lead to."""
    ring = torch.arange(NUM_NODES)
    src, dst = torch.cat([ring, torch.arange(100)]), torch.cat([(ring + 1) % NUM_NODES, torch.full((100,), HUB)])
    return start_machines(dgl.graph((src, dst)), tmp_path, 2, monkeypatch, part_method="contiguous")


def explore(machines: Machines, reads: Tensor) -> InEdgeLists:
    """What a store without a budget looks at of a frontier, `FOREIGN`."""
    store = object.__new__(HaloStore)
    store._budget_bytes, store._lists = 0.0, InEdgeLists(machines.view(0))
    store._explore(FOREIGN, reads)
    return store._lists


def test_what_was_fetched_is_not_gone_through_again(machines: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    """With every message that came, all that had come before was sorted and copied."""
    monkeypatch.setattr(in_edge_lists, "EDGES_PER_REQUEST", 8)
    gone_through: list[int] = []
    gather = in_edge_lists.gather_segments

    def counted(indptr: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        counts, positions = gather(indptr, rows)
        gone_through.append(len(positions))
        return counts, positions

    monkeypatch.setattr(in_edge_lists, "gather_segments", counted)
    lists = explore(machines, torch.rand(len(FOREIGN), dtype=torch.float64))
    assert bool(lists.is_known(FOREIGN).all())
    assert machines.num_requests > 20
    assert sum(gone_through) <= len(FOREIGN) - 1 + HUB_DEGREE


def test_messages_are_of_few_edges(machines: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many in-edges the vertices have: it was so many vertices a message, hubs first."""
    monkeypatch.setattr(in_edge_lists, "EDGES_PER_REQUEST", 20)
    answered: list[int] = []

    def answer(requests: list[tuple[int, Any]]) -> list[Any]:
        answers = machines.answer(requests)
        answered.extend(len(each.global_src) for each in answers if hasattr(each, "global_src"))
        return answers

    monkeypatch.setattr(rpc, "remote_call_to_machine", answer)
    lists = explore(machines, (FOREIGN == HUB).double())
    assert bool(lists.is_known(FOREIGN).all())
    assert max(answered) == HUB_DEGREE, "which is alone"
    assert sorted(answered)[-2] <= 20 / 2
    assert sum(answered) == len(FOREIGN) - 1 + HUB_DEGREE


def test_lists_to_decide_by_stay_within_the_limit(machines: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was looked at between messages, and a hub's list may be longer than all that there is room for."""
    monkeypatch.setattr(halo_store, "_EXPLORE_BYTES", 1000)
    reads = 1.0 + torch.arange(len(FOREIGN)).double()
    reads[FOREIGN == HUB] = 1e6
    lists = explore(machines, reads)
    assert 900 < lists.fetched_bytes <= 1000
    known = lists.is_known(FOREIGN)
    assert not bool(known[FOREIGN == HUB])
    assert float(reads[known].min()) > float(reads[~known & (FOREIGN != HUB)].max()), "those drawn from most often"


def test_lists_that_are_not_whole_are_refused(machines: Machines) -> None:
    with pytest.raises(ExchangeError, match=r"asked for the in-edges of 2 vertices and sent fewer or more"):
        fetch_lists(machines.states[0].partition_book, torch.tensor([HUB, HUB + 1]), torch.tensor([5, 1]))


@pytest.mark.parametrize("has_ids", [True, False])
def test_edges_without_ids_are_numbered_as_they_lie(has_ids: bool) -> None:
    """What DGL's `adj_tensors` says of an empty tensor of ids."""
    indptr, indices = torch.tensor([0, 2, 3, 3]), torch.tensor([1, 2, 0])
    ids = torch.arange(3) if has_ids else torch.empty(0, dtype=torch.int64)
    graph = SimpleNamespace(
        adj_tensors=lambda layout: (indptr, indices, ids),
        ndata={dgl.NID: torch.tensor([10, 11, 12])},
        edata={dgl.EID: torch.tensor([20, 21, 22])},
    )
    book = SimpleNamespace(partid=0, nid2localnid=lambda ids, part: ids - 10)
    lists = PartitionLists(SimpleNamespace(local_partition=graph, get_partition_book=lambda: book))
    found = lists.inner(torch.tensor([11, 10]))
    assert found.counts.tolist() == [1, 2]
    assert found.src_global.tolist() == [10, 11, 12]
    assert found.eid_global.tolist() == [22, 20, 21]
