# SPDX-License-Identifier: Apache-2.0
"""The harness itself: results by rank, failures named, hangs ended, nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.helpers import world
from tests.helpers.world import RankError, run_ranks, run_ranks_expect_errors, shutdown_pool, worker_pids


def sum_of_ranks(rank: int, world_size: int, scale: float = 1.0) -> float:
    x = torch.tensor([rank * scale])
    dist.all_reduce(x)
    return float(x)


def uneven_all_to_all(rank: int, world_size: int) -> torch.Tensor:
    """Rank r sends r rows to every peer."""
    received = torch.full((sum(range(world_size)),), -1.0)
    sent = torch.full((rank * world_size,), float(rank))
    dist.all_to_all_single(received, sent, list(range(world_size)), [rank] * world_size)
    return received


def settings(rank: int, world_size: int) -> tuple[int, int, torch.dtype, str, float]:
    result = (
        os.getpid(),
        torch.get_num_threads(),
        torch.get_default_dtype(),
        dist.get_backend(),
        float(torch.rand(())),
    )
    torch.set_default_dtype(torch.float64)  # must not reach the next call
    return result


def fail_on(rank: int, world_size: int, failing: int) -> None:
    if rank == failing:
        raise ValueError("planted")
    dist.barrier()


def fail_everywhere(rank: int, world_size: int) -> None:
    raise KeyError(f"rank {rank} says no")


def fail_inside_a_collective(rank: int, world_size: int) -> None:
    if rank > 0:
        dist.all_reduce(torch.ones(1))
    raise ValueError("planted")


def sleep_on(rank: int, world_size: int, sleeping: int) -> None:
    if rank == sleeping:
        time.sleep(600)


def skip_a_collective(rank: int, world_size: int) -> None:
    if rank == 0:
        time.sleep(600)
    dist.barrier()


def die_on(rank: int, world_size: int, dying: int) -> None:
    if rank == dying:
        os.kill(os.getpid(), signal.SIGSEGV)
    dist.barrier()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_results_come_by_rank(world_size: int) -> None:
    total = sum(range(world_size))
    assert run_ranks(world_size, sum_of_ranks) == [total] * world_size
    assert run_ranks(world_size, sum_of_ranks, 2.0) == [2 * total] * world_size
    assert run_ranks(world_size, sum_of_ranks, scale=3.0) == [3 * total] * world_size


def test_gloo_takes_uneven_and_zero_splits() -> None:
    for received in run_ranks(4, uneven_all_to_all):
        assert received.tolist() == [1, 2, 2, 3, 3, 3]


def test_workers_are_shared_by_world_sizes_and_each_call_starts_clean() -> None:
    first = run_ranks(2, settings)
    second = run_ranks(3, settings)
    assert [s[0] for s in first] == [s[0] for s in second[:2]] == worker_pids()[:2]
    for _, num_threads, dtype, backend, draw in first + second:
        assert (num_threads, dtype, backend) == (1, torch.float32, "gloo")
        assert draw == first[0][4]


@pytest.mark.parametrize("failing", [0, 2])
def test_the_failing_rank_is_named_and_its_peers_are_ended(failing: int) -> None:
    run_ranks(3, sum_of_ranks)
    before = worker_pids()
    with pytest.raises(RankError, match=rf"(?s)rank {failing}/3 raised ValueError: planted.*in fail_on"):
        run_ranks(3, fail_on, failing)
    assert not any(_is_alive(pid) for pid in before)
    assert run_ranks(3, sum_of_ranks) == [3.0] * 3


def test_expected_errors_keep_the_workers() -> None:
    run_ranks(3, sum_of_ranks)
    before = worker_pids()
    errors = run_ranks_expect_errors(3, fail_everywhere)
    assert [(e.rank, e.type_name, e.message) for e in errors] == [
        (r, "KeyError", f"'rank {r} says no'") for r in range(3)
    ]
    assert run_ranks(3, sum_of_ranks) == [3.0] * 3
    assert worker_pids() == before


def test_a_collective_left_half_done_does_not_reach_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "COLLECTIVE_TIMEOUT_S", 2.0)
    errors = run_ranks_expect_errors(2, fail_inside_a_collective)
    assert [e.type_name for e in errors] == ["ValueError", "RuntimeError"]
    assert run_ranks(2, sum_of_ranks) == [1.0] * 2


def test_expected_errors_must_come_from_every_rank() -> None:
    with pytest.raises(RankError, match=r"ranks \[0\] of 2 returned"):
        run_ranks_expect_errors(2, _fail_on_odd)


def _fail_on_odd(rank: int, world_size: int) -> None:
    if rank % 2:
        raise ValueError("odd")


def test_a_timeout_names_the_ranks_and_shows_where_they_are() -> None:
    run_ranks(2, sum_of_ranks)  # rank 0 has the timeout for its answer, not for its start
    with pytest.raises(RankError, match=r"(?s)ranks \[1\] of 2 did not answer within 6 s.*rank 1/2 is at.*in sleep_on"):
        run_ranks(2, sleep_on, 1, timeout=6.0)


def test_a_hung_collective_is_an_error_before_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "COLLECTIVE_TIMEOUT_S", 2.0)
    with pytest.raises(RankError, match=r"(?s)rank 1/2 raised RuntimeError.*in skip_a_collective"):
        run_ranks(2, skip_a_collective)


def test_a_dead_rank_is_reported_with_its_exit_code_and_stack() -> None:
    with pytest.raises(RankError, match=r"(?s)rank 1/2 died with exit code -11.*Segmentation fault.*in die_on"):
        run_ranks(2, die_on, 1)


def test_world_size_is_checked() -> None:
    with pytest.raises(ValueError, match=r"world_size must be 1 to 4 \(got 5\)"):
        run_ranks(5, sum_of_ranks)


@pytest.mark.slow
def test_workers_end_when_the_test_session_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "session.py"
    script.write_text(
        "import os, signal\n"
        "from tests.helpers import test_world, world\n"
        "if __name__ == '__main__':\n"
        "    world.run_ranks(1, test_world.sum_of_ranks)\n"
        "    print(*world.worker_pids(), flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    (pid,) = map(int, done.stdout.split())
    deadline = time.monotonic() + 10
    while _is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _is_alive(pid)


def test_the_pool_can_be_shut_down() -> None:
    run_ranks(1, sum_of_ranks)
    (pid, *_) = worker_pids()
    shutdown_pool()
    assert not _is_alive(pid)
    assert worker_pids() == []


def _is_alive(pid: int) -> bool:
    """Whether the process runs; one that has ended and waits to be reaped by a parent other than us does not count."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
