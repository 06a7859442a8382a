# SPDX-License-Identifier: Apache-2.0
"""How many bytes a process may hold, on the host that it finds itself on."""

from __future__ import annotations

import logging
import math
from types import SimpleNamespace
from typing import Any

import dgl_hybrid  # noqa: F401  before dgl, which it makes importable

# isort: split
import pytest
import torch
from dgl.distributed import role
from torch import Tensor

from dgl_hybrid.sampling import halo_store
from dgl_hybrid.sampling.config import HaloConfig
from dgl_hybrid.sampling.expected_reads import ExpectedReads
from dgl_hybrid.sampling.halo_store import HaloStore
from dgl_hybrid.sampling.list_sizes import ListSizes
from dgl_hybrid.sampling.observed import ObservedReads

TWO_MACHINES_ON_ONE_HOST = SimpleNamespace(
    machine_id=0, _server_namebook={0: (0, "10.0.0.1", 1, 1), 1: (1, "10.0.0.1", 2, 1)}
)


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(halo_store, "free_memory_bytes", lambda: 48e9)
    monkeypatch.setattr(halo_store, "free_shared_memory_bytes", lambda: 64e6)
    monkeypatch.setattr(role, "get_num_trainers", lambda: 4)
    monkeypatch.setenv("DGL_NUM_SAMPLER", "1")


def find(config: HaloConfig, *, share: bool) -> float:
    client: Any = TWO_MACHINES_ON_ONE_HOST
    return halo_store._find_budget(config, 10**9, client, share=share)


@pytest.mark.parametrize(("budget", "asked_bytes"), [("10%", 1e8), ("256MB", 256e6), (10**7, 1e7)])
def test_what_is_shared_has_room_in_shared_memory(
    budget: str | int, asked_bytes: float, caplog: pytest.LogCaptureFixture
) -> None:
    """64 MB are free, a quarter of which four trainers may take; whoever takes more is killed by a bus error."""
    assert find(HaloConfig(budget=budget), share=False) == asked_bytes
    assert not caplog.records
    assert find(HaloConfig(budget=budget), share=True) == 4e6
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert f"asks for {asked_bytes / 1e6:.1f} MB" in record.getMessage()
    assert "of whose 64.0 free MB this trainer may take 4.0" in record.getMessage()


def test_a_budget_that_fits_is_as_asked(caplog: pytest.LogCaptureFixture) -> None:
    assert find(HaloConfig(budget="4MB"), share=True) == 4e6
    assert not caplog.records


def test_all_that_is_reached_is_bounded_by_shared_memory_alone(caplog: pytest.LogCaptureFixture) -> None:
    assert find(HaloConfig(strategy="depcache"), share=False) == math.inf
    assert find(HaloConfig(strategy="depcache"), share=True) == 4e6
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_auto_is_a_quarter_divided_by_all_processes() -> None:
    assert find(HaloConfig(), share=False) == 48e9 / 4 / 8
    assert find(HaloConfig(), share=True) == 64e6 / 4 / 8


@pytest.mark.parametrize("is_guarded", [True, False])
def test_a_share_is_one_of_the_node_fields_whether_they_may_be_held_or_not(is_guarded: bool) -> None:
    """Where no row may be held, for want of the plugin on some server, lists still may."""
    names = {"node~_N~feat": True, "node~_N~label": True, "edge~_N:_E:_N~w": False}
    store: Any = object.__new__(HaloStore)
    store._written = SimpleNamespace(is_guarded=is_guarded, static_names=frozenset(names if is_guarded else ()))
    store._client = SimpleNamespace(
        gdata_name_list=lambda: list(names),
        _data_store={name: torch.zeros(10, 2) for name in names},
        _part_policy={name: SimpleNamespace(is_node=is_node, get_size=lambda: 30) for name, is_node in names.items()},
    )
    assert store._node_bytes() == 2 * 30 * 2 * 4
    assert bool(store._row_bytes()) is is_guarded


class KnownLists:
    """All of one length, which are fetched within the room that is given for them."""

    LENGTH = 10

    def __init__(self) -> None:
        self.known = torch.empty(0, dtype=torch.int64)
        self.asked: list[int] = []
        self.fetched_bytes = 0

    def is_known(self, ids: Tensor) -> Tensor:
        return torch.isin(ids, self.known)

    def fetch(self, ids: Tensor, *, room_bytes: float) -> int:
        self.asked.append(len(ids))
        count = min(len(ids), max(0, int(room_bytes // (24 + 16 * self.LENGTH))))
        self.known = torch.cat([self.known, ids[:count]])
        return count

    def degrees(self, ids: Tensor) -> Tensor:
        return torch.full((len(ids),), self.LENGTH)

    def keep_held(self, held: Any) -> None:
        self.known = self.known[:0] if held is None else held.tensors.ids


def test_lists_that_could_not_be_held_are_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reviews of vertices that many batches draw from come again and again: each fetched up to 256 MiB for nothing."""
    store: Any = object.__new__(HaloStore)
    sizes = ListSizes(list_bytes=16, entry_bytes=8, source_bytes=8, end_bytes=4)
    lists = KnownLists()
    store._lists, store._list_sizes, store._budget_bytes = lists, sizes, 2000.0
    store._is_unlimited = False
    store._rows, store._narrow_reserve, store.halo_graph = SimpleNamespace(num_bytes=0), 0.0, None
    store._expected, store._observed_seeds = ExpectedReads.none(), ObservedReads(2000)
    monkeypatch.setattr(
        store,
        "_pack",
        lambda ids: SimpleNamespace(
            tensors=SimpleNamespace(ids=ids), num_bytes=int(sizes.alone(lists.degrees(ids)).sum())
        ),
        raising=False,
    )
    for _ in range(20):
        store.note_remote_seeds(torch.arange(1500))
    assert len(store.halo_graph.tensors.ids) == 11, "of 176 bytes each"
    assert len(lists.asked) > 3
    nothing_came_back, first, *later = lists.asked
    assert (nothing_came_back, first) == (0, (2000 - 4) // 16)
    assert max(later) < 5, "the rest of the room takes no list"


def test_planning_has_a_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that made a loader over other seeds in each epoch was planned for each time, however long it took."""
    clock = SimpleNamespace(now_s=100.0)
    monkeypatch.setattr(halo_store, "time", SimpleNamespace(perf_counter=lambda: clock.now_s))
    store: Any = object.__new__(HaloStore)
    store._lists, store._planned, store._first_plan_at, store._planning_s = object(), set(), 0.0, 0.0
    for number in range(8):
        assert store.can_plan, "training, validation and test are planned for, however long it takes"
        with store.planning():
            clock.now_s += 10.0
        store._planned.add(number)
    assert not store.can_plan
    clock.now_s = 100.0 + 799.0
    assert not store.can_plan
    clock.now_s = 100.0 + 801.0
    assert store.can_plan, "80 s are a tenth by now"
    store._lists = None
    assert not store.can_plan
