# SPDX-License-Identifier: Apache-2.0
"""What a trainer makes of a batch that does not arrive; no servers are needed."""

from __future__ import annotations

import errno
import multiprocessing
import queue
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess

import pytest

import dgl_hybrid  # noqa: F401 (before dgl, which it makes importable)

# isort: split
import dgl
from dgl.distributed.dist_context import CustomPool

from dgl_hybrid.compat import repairs


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
