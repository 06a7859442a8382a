# SPDX-License-Identifier: Apache-2.0
"""Threads of gloo wait for their turn; nobody else does."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from dgl_hybrid.exchange import connect
from dgl_hybrid.exchange.connect import RankTransport, create_communicator
from dgl_hybrid.exchange.gloo_threads import let_others_finish
from tests.helpers.world import groups_are_ending, run_ranks

pytestmark = pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="only Linux has classes of threads")


def classes() -> dict[str, set[int]]:
    """How threads of this process are scheduled, those of gloo and others, once all of gloo's have named themselves.

    A thread does so as soon as it runs, which on a busy machine is not at once.
    """
    threads = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu")).options._threads
    num_expected = len(dist.distributed_c10d._world.pg_map) * (1 + threads)  # one for the sockets
    until = time.monotonic() + 60
    while True:
        kinds: dict[str, list[int]] = {"gloo": [], "others": []}
        for task in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):  # it has ended
                kind = "gloo" if "gloo" in (task / "comm").read_text() else "others"
                kinds[kind].append(os.sched_getscheduler(int(task.name)))
        if len(kinds["gloo"]) == num_expected and not groups_are_ending():  # of an earlier call: they share names
            return {kind: set(found) for kind, found in kinds.items()}
        assert time.monotonic() < until, f"{kinds} after a minute, not {num_expected} threads of gloo"
        time.sleep(0.001)


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
        assert before == {"gloo": {os.SCHED_OTHER}, "others": {os.SCHED_OTHER}}
        assert after == {"gloo": {os.SCHED_BATCH}, "others": {os.SCHED_OTHER}}
        assert later == {"gloo": {os.SCHED_BATCH, os.SCHED_OTHER}, "others": {os.SCHED_OTHER}}


def run_unnamed(rank: int, world_size: int) -> list[dict[str, set[int]]]:
    before = classes()
    with mock.patch.object(connect, "let_others_finish"):  # as if none had a name yet
        communicator = create_communicator(transport="collective")  # whose group stays
    found = [before, classes()]
    group = dist.new_group()
    communicator.barrier()
    dist.barrier(group)
    return [*found, classes()]


def test_threads_that_have_not_named_themselves_wait_as_well() -> None:
    for before, after, later in run_ranks(2, run_unnamed):
        assert before == {"gloo": {os.SCHED_OTHER}, "others": {os.SCHED_OTHER}}
        assert after == {"gloo": {os.SCHED_OTHER, os.SCHED_BATCH}, "others": {os.SCHED_OTHER}}
        assert later == after


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
