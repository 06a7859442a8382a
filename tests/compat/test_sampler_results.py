# SPDX-License-Identifier: Apache-2.0
"""What a trainer makes of a batch that does not arrive; no servers are needed."""

from __future__ import annotations

import errno
import multiprocessing
import os
import queue
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace

import pytest

import dgl_hybrid  # noqa: F401 (before dgl, which it makes importable)

# isort: split
import dgl
import torch
from dgl.distributed import dist_context, dist_dataloader
from dgl.distributed.dist_context import CustomPool

from dgl_hybrid.compat import repairs
from tests.compat.processes import CHECKOUT


class Results:
    """A queue of results that fails once, and is empty then."""

    def __init__(self, error: Exception) -> None:
        self.errors = [error]

    def get(self, timeout: float) -> object:
        if self.errors:
            raise self.errors.pop()
        raise queue.Empty


@pytest.fixture(autouse=True)
def mended() -> Iterator[None]:
    repairs.switch_on()
    yield
    repairs.switch_off()


@pytest.fixture
def workers() -> Iterator[list[BaseProcess]]:
    processes: list[BaseProcess] = [
        multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,)) for _ in range(2)
    ]
    for process in processes:
        process.start()
    yield processes
    for process in processes:
        process.kill()
        process.join()


def pool_of(workers: list[BaseProcess], error: Exception) -> CustomPool:
    pool = CustomPool.__new__(CustomPool)
    pool.process_list, pool.result_queue = workers, Results(error)
    pool.results = {"loader": []}
    return pool


@pytest.mark.parametrize("error", [OSError(errno.EMFILE, "Too many open files"), EOFError("nothing came")])
def test_a_batch_that_is_lost_is_an_error(error: Exception, workers: list[BaseProcess]) -> None:
    """All workers are alive: nobody sends it again, so the loader would wait for half an hour."""
    with pytest.raises(type(error), match=str(error.args[-1])):
        pool_of(workers, error).get_result("loader", timeout=5)


def test_a_worker_that_is_gone_is_named(workers: list[BaseProcess]) -> None:
    """Its memory is gone with it, also where that is seen first."""
    pool = pool_of(workers, ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"))
    workers[1].kill()
    with pytest.raises(dgl.DGLError, match=rf"sampler process {workers[1].pid}\) ended with exit code -9"):
        pool.get_result("loader", timeout=5)


def test_a_batch_for_a_loader_that_is_gone_is_dropped(workers: list[BaseProcess]) -> None:
    """Nobody would ever take it, and its tensors hold files open."""
    pool = pool_of(workers, OSError())
    sent = [("gone", "its batch"), ("loader", "mine")]
    pool.result_queue = SimpleNamespace(get=lambda timeout: sent.pop(0))
    assert pool.get_result("loader", timeout=5) == "mine"
    assert pool.results == {"loader": []}


class Samplers:
    """A pool that answers every task with the batch that was asked for."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.most = 0

    def set_collate_fn(self, collate_fn: object, name: str) -> None: ...

    def delete_collate_fn(self, name: str) -> None: ...

    def submit_task(self, name: str, batch: list[int]) -> None:
        self.batches.append(batch)
        self.most = max(self.most, len(self.batches))

    def get_result(self, name: str, timeout: float) -> list[int]:
        return self.batches.pop(0)


@pytest.mark.parametrize("num_steps", [1, 3, 10])
def test_an_epoch_has_its_own_batches_after_one_that_was_left(num_steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It began with what the one before had asked for, lacked as much at its end, and more was left each time."""
    samplers = Samplers()
    monkeypatch.setattr(dist_dataloader, "get_sampler_pool", lambda: (samplers, 1))
    loader = dist_dataloader.DistDataLoader(torch.arange(20), 2, shuffle=True, collate_fn=lambda batch: batch)
    for _ in range(5):
        for _ in zip(range(num_steps), loader, strict=False):
            pass
    assert sorted(seed for batch in loader for seed in batch) == list(range(20))
    assert samplers.most <= 4
    assert samplers.batches == []


def test_a_sampler_that_does_not_start_ends_its_trainer() -> None:
    """Which waits for servers that wait for the sampler. The script has no guard, so Python refuses to start one."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("starting_script.py"))],
        env={**os.environ, "PYTHONPATH": str(CHECKOUT), "DGL_DIST_MODE": "distributed", "DGL_NUM_SAMPLER": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 1
    assert re.search(
        r"^DGLError: SpawnProcess-1 \(sampler process \d+\) ended with exit code 1 before it was", done.stderr, re.M
    )
    assert 'is it under `if __name__ == "__main__":`?' in done.stderr
    assert "RuntimeError" in done.stderr, "what the sampler has said itself is there, too"


def test_a_trainer_that_fails_to_connect_says_so_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its samplers, which it ends, are then nobody's concern."""

    class Pool(CustomPool):
        def __init__(self, num_workers: int, rpc_config: object) -> None:
            context = multiprocessing.get_context("spawn")
            self.process_list = [context.Process(target=time.sleep, args=(600,)) for _ in range(num_workers)]
            for process in self.process_list:
                process.start()

    def refuse(*args: object, **options: object) -> None:
        raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")

    def end(code: int) -> None:
        ended_with.append(code)

    ended_with: list[int] = []
    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setenv("DGL_DIST_MODE", "distributed")
    monkeypatch.setenv("DGL_NUM_SAMPLER", "1")
    monkeypatch.setattr(dist_context, "CustomPool", Pool)
    monkeypatch.setattr(dist_context, "connect_to_server", refuse)
    with pytest.raises(ConnectionRefusedError):
        dist_context.initialize("ip_config.txt")
    (process,) = dist_context.SAMPLER_POOL.process_list
    dist_context.SAMPLER_POOL = None
    process.kill()
    process.join()
    time.sleep(1)  # the thread looks twice a second
    assert ended_with == []
