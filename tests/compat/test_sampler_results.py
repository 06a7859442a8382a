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

import pytest

import dgl_hybrid  # noqa: F401 (before dgl, which it makes importable)

# isort: split
import dgl
from dgl.distributed import dist_context
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


def test_a_sampler_that_does_not_start_ends_its_trainer() -> None:
    """Which waits for servers that wait for the sampler. The script has no guard, so Python refuses to start one."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("starting_script.py"))],
        env={**os.environ, "PYTHONPATH": str(CHECKOUT), "DGL_DIST_MODE": "distributed", "DGL_NUM_SAMPLER": "1"},
        capture_output=True,
        text=True,
        timeout=60,
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
