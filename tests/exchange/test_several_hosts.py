# SPDX-License-Identifier: Apache-2.0
"""Ranks of one host share its memory, rows of other hosts take the process group: the same bits, and who is late."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from dgl_hybrid.errors import ExchangeError
from dgl_hybrid.exchange.communicator import Communicator
from dgl_hybrid.exchange.connect import create_communicator
from dgl_hybrid.exchange.far_rows import _joined
from dgl_hybrid.planner.probe import probe
from dgl_hybrid.planner.topology import Topology
from tests.exchange.test_rows import make_plans
from tests.exchange.test_shared_memory import run_both, run_raw, run_uneven_pace
from tests.helpers.hosts import on_hosts
from tests.helpers.thinning import pairwise
from tests.helpers.world import run_ranks, stay_away, tell_who_stays_away

HOSTS = [(0, 0, 1), (0, 1, 0), (0, 1, 1), (0, 0, 1, 1), (0, 1, 0, 1), (0, 1, 1, 2), (0, 0, 0, 1)]


def communicator_on(rank: int, hosts: Sequence[int], timeout_s: float = 30.0) -> Communicator:
    with on_hosts(rank, hosts):
        return create_communicator(timeout_s=timeout_s)


def run_backends(rank: int, world_size: int, hosts: Sequence[int]) -> tuple[str, str]:
    try:
        with on_hosts(rank, hosts):
            forced = create_communicator(transport="shared_memory").backend
    except ExchangeError as error:
        forced = str(error)
    return communicator_on(rank, hosts).backend, forced


@pytest.mark.parametrize("hosts", [*HOSTS, (0, 1), (0, 1, 2), (0, 0, 0)])
def test_who_has_a_mate_shares_memory_with_it(hosts: Sequence[int]) -> None:
    for rank, (chosen, forced) in enumerate(run_ranks(len(hosts), run_backends, hosts)):
        if len(set(hosts)) == 1:
            assert (chosen, forced) == ("shared_memory", "shared_memory")
        else:
            assert chosen == ("mixed" if hosts.count(hosts[rank]) > 1 else "gloo")
            assert "are not on one host. Give transport='collective'." in forced


@pytest.mark.parametrize("hosts", HOSTS)
def test_rows_and_gradients_are_bitwise_those_of_the_collective_transport(hosts: Sequence[int]) -> None:
    assert run_ranks(len(hosts), run_both, hosts) == [[]] * len(hosts)


@pairwise(hosts=HOSTS, round_bytes=[48, 1 << 20])
def test_any_splits_of_any_dtype(hosts: Sequence[int], round_bytes: int) -> None:
    assert run_ranks(len(hosts), run_raw, round_bytes, hosts) == [[]] * len(hosts)


@pytest.mark.parametrize("hosts", [(0, 0, 1, 1), (0, 1, 1, 2)])
def test_a_fast_rank_does_not_overwrite_what_a_slow_one_reads(hosts: Sequence[int]) -> None:
    assert run_ranks(len(hosts), run_uneven_pace, hosts) == [[]] * len(hosts)


def run_in_the_background(rank: int, world_size: int, hosts: Sequence[int]) -> list[str]:
    """Exchanges are begun and ended much later, with parts of every size."""
    collective, mixed = create_communicator(transport="collective"), communicator_on(rank, hosts)
    rng, wrong = random.Random(5), []
    for number in range(20):
        counts = [[rng.choice([0, 3, 20_000]) for _ in range(world_size)] for _ in range(world_size)]
        sent, expected = counts[rank], [row[rank] for row in counts]
        rows = torch.randn(sum(sent), 3, generator=torch.Generator().manual_seed(100 * rank + number))
        wanted = collective.exchange(rows, sent, expected)
        out = torch.empty_like(wanted) if number % 2 else None
        pending = mixed.start_exchange(rows, sent, expected, out=out)
        time.sleep(0.002 * (rank == number % world_size))
        found = pending.wait()
        if not torch.equal(torch.cat(found), wanted) or (out is not None and not torch.equal(out, wanted)):
            wrong.append(f"exchange {number}")
        total = mixed.sum_(torch.tensor([rank]))
        if int(total) != sum(range(world_size)):
            wrong.append(f"sum {number}")
    return wrong


@pytest.mark.parametrize("hosts", [(0, 0, 1, 1), (0, 1, 0, 1), (0, 1, 1, 2)])
def test_both_kinds_travel_in_the_background(hosts: Sequence[int]) -> None:
    assert run_ranks(len(hosts), run_in_the_background, hosts) == [[]] * len(hosts)


def run_probe(rank: int, world_size: int, hosts: Sequence[int]) -> Topology:
    communicator = communicator_on(rank, hosts)
    return probe(communicator.lend("the probe"))


@pytest.mark.parametrize("hosts", HOSTS)
def test_ranks_of_any_hosts_probe_together(hosts: Sequence[int]) -> None:
    """Who was alone on its host left out what others measured together, and all waited for each other."""
    first, *others = run_ranks(len(hosts), run_probe, hosts)
    assert all(other == first for other in others)


# -------------------------------------------------------------------- ranks that part ways


def run_absent(rank: int, world_size: int, hosts: Sequence[int], absent: int) -> str:
    communicator = communicator_on(rank, hosts, timeout_s=4.0)
    plan = make_plans(world_size)[rank]
    rows = torch.ones(plan.num_sent, 2)
    communicator.exchange(rows, plan.send_counts, plan.recv_counts)
    try:
        if rank == absent:
            stay_away(rank, world_size)
            return "late"
        communicator.exchange(rows, plan.send_counts, plan.recv_counts, layer=2)
    except ExchangeError as error:
        tell_who_stays_away(rank)
        return str(error)
    return "no error"


@pytest.mark.parametrize("absent", [0, 3])
def test_who_does_not_come_is_missed_on_both_hosts(absent: int) -> None:
    """By its mates, who see that nothing comes, and by the others, whose process group ends."""
    for rank, message in enumerate(run_ranks(4, run_absent, (0, 0, 1, 1), absent)):
        if rank != absent:
            assert (
                f"exchange 2 (layer 2, forward) did not complete on rank {rank} of 4: rank {absent} did not" in message
            )


def run_disagreeing(rank: int, world_size: int, hosts: Sequence[int]) -> str:
    communicator = communicator_on(rank, hosts, timeout_s=4.0)
    ones = [1] * world_size
    try:
        dtype = torch.int32 if rank == 3 else torch.float32
        communicator.exchange(torch.ones(world_size, 2, dtype=dtype), ones, ones, layer=4)
        communicator.exchange(torch.ones(world_size, 2), ones, ones, layer=5)
    except ExchangeError as error:
        return str(error)
    return "no error"


def test_mates_that_disagree_say_so() -> None:
    """The others, to whom nobody says so, miss them in the next exchange."""
    messages = run_ranks(4, run_disagreeing, (0, 0, 1, 1))
    assert "no error" not in messages
    for message in messages[2:]:
        assert "rank 2 of 4 exchanges float32 rows of 8 bytes for layer 4 in forward" in message
        assert "rank 3 exchanges int32 rows of 8 bytes for layer 4 in forward" in message


def run_with_gradients(rank: int, world_size: int, hosts: Sequence[int]) -> bool:
    """Rows that need a gradient, sent where gradients are recorded: what arrives is rows alone."""
    communicator = communicator_on(rank, hosts)
    rows = torch.arange(3.0 * world_size).view(world_size, 3).requires_grad_()
    received = communicator.exchange(rows, [1] * world_size, [1] * world_size)
    borrowed = torch.cat(communicator.borrow(rows, [1] * world_size, [1] * world_size))
    wanted = rows[rank].expand(world_size, 3)
    return torch.equal(received, wanted) and torch.equal(borrowed, wanted) and not received.requires_grad


def test_rows_that_need_gradients_travel_without() -> None:
    assert run_ranks(4, run_with_gradients, (0, 1, 1, 2)) == [True] * 4


def test_parts_that_lie_one_behind_the_other_are_one_tensor() -> None:
    rows: Tensor = torch.arange(12.0).view(6, 2)
    first, second, third = rows.split([1, 3, 2])
    joined = _joined(rows, [first, second])
    assert joined is not None
    assert joined.data_ptr() == rows.data_ptr()
    assert torch.equal(joined, rows[:4])
    assert _joined(rows, [first, third]) is None
    nothing = _joined(rows, [])
    assert nothing is not None
    assert nothing.shape == (0, 2)


def name_two(rank: int, world_size: int) -> list[str]:
    return [create_communicator(transport="collective").name, create_communicator().name]


def test_who_is_late_is_looked_for_by_communicator() -> None:
    """Two graphs have one each: ranks that had timed out in one were taken for those that waited in the other."""
    first, second = run_ranks(2, name_two)
    assert first == second
    assert len(set(first)) == 2


def connect_often(rank: int, world_size: int) -> int:
    return sum(create_communicator(transport="collective").world_size for _ in range(120))


def test_communicators_are_let_go_of_at_once() -> None:
    """A rank that had connected to all closed what others were still connecting to: one time in some ten of 4 ranks."""
    assert run_ranks(4, connect_often) == [480] * 4
