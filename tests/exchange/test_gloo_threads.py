# SPDX-License-Identifier: Apache-2.0
"""Threads of gloo wait for their turn; nobody else does."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from dgl_hybrid.exchange.connect import RankTransport, create_communicator
from dgl_hybrid.exchange.gloo_threads import let_others_finish
from tests.helpers.world import run_ranks

pytestmark = pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="only Linux has classes of threads")


def classes() -> dict[str, set[int]]:
    """By the beginning of their names, how threads of this process are scheduled."""
    found: dict[str, set[int]] = {}
    for task in Path("/proc/self/task").iterdir():
        name = (task / "comm").read_text()
        kind = "gloo" if "gloo" in name else "others"
        found.setdefault(kind, set()).add(os.sched_getscheduler(int(task.name)))
    return found


def run_groups(rank: int, world_size: int, transport: RankTransport) -> list[dict[str, set[int]]]:
    end = threading.Event()
    other = threading.Thread(target=end.wait)
    other.start()
    try:
        found = [classes()]
        communicator = create_communicator(transport=transport)
        found.append(classes())
        assert let_others_finish() == 0
        group = dist.new_group()  # a later one of the script's
        total = torch.ones(1000)
        dist.all_reduce(total, group=group)
        communicator.sum_(total)
        assert torch.equal(total, torch.full((1000,), float(world_size) ** 2))
        found.append(classes())
        assert let_others_finish() > 0
        return found
    finally:
        end.set()
        other.join()


@pytest.mark.parametrize("transport", ["auto", "collective"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_threads_of_gloo_wait_for_their_turn(world_size: int, transport: RankTransport) -> None:
    for before, after, later in run_ranks(world_size, run_groups, transport):
        assert before["others"] == {os.SCHED_OTHER}
        assert os.SCHED_OTHER in before["gloo"]  # those of the default group, which is made for this test
        assert after == {"gloo": {os.SCHED_BATCH}, "others": {os.SCHED_OTHER}}
        assert later == {"gloo": {os.SCHED_BATCH, os.SCHED_OTHER}, "others": {os.SCHED_OTHER}}


def run_where_it_is_not_allowed(rank: int, world_size: int) -> tuple[int, set[int]]:
    with mock.patch.object(os, "sched_setscheduler", side_effect=PermissionError("not here")) as refuse:
        create_communicator()
    return refuse.call_count, classes()["gloo"]


def test_where_it_is_not_allowed_they_stay_as_they_are() -> None:
    for num_tried, found in run_ranks(2, run_where_it_is_not_allowed):
        assert num_tried > 0
        assert os.SCHED_OTHER in found


def test_systems_without_classes_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "SCHED_BATCH")
    assert let_others_finish() == 0
