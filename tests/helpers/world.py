# SPDX-License-Identifier: Apache-2.0
"""Runs a function on every rank of a small gloo world, in worker processes that live as long as the test session.

```python
def sum_of_ranks(rank: int, world_size: int) -> float:      # at module level: workers import it by name
    x = torch.tensor([float(rank)])
    dist.all_reduce(x)
    return x.item()

assert run_ranks(3, sum_of_ranks) == [3.0, 3.0, 3.0]
```

Starting a process costs seconds (it imports torch and DGL), so one set of workers serves every world size: a world of P
ranks is the first P workers, and all are forked from one process that has imported torch. What is made anew for each
call is the default process group, which takes 10 to 30 ms. So one call can never leave a half-finished collective
behind for the next one, and no order of world sizes makes processes restart.

    pytest ──pipe──▶ worker 0 ─┐
           ──pipe──▶ worker 1 ─┼─ default group of this call: gloo over loopback, rendezvous in a file, no ports
           ──pipe──▶ worker 2 ─┘

A worker that fails, dies or does not answer makes the call raise `RankError`; all workers are then ended and started
again when next needed. A function that runs in workers may not use pytest fixtures, and plain `assert` is not rewritten
there: return tensors and compare in the test, or use `torch.testing.assert_close`.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import importlib
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

MAX_WORLD_SIZE = 4
START_TIMEOUT_S = 180.0
"""Workers import torch and DGL; on a loaded machine that is slow, and no fault of the test."""

CALL_TIMEOUT_S = 240.0
"""A call takes a second or two; on a machine where many others work, a hundred times that has been seen."""

COLLECTIVE_TIMEOUT_S = 150.0
"""A collective that a peer never joins becomes an error after this long, or after 3/4 of the call's timeout if less."""

GRACE_S = 1.0
"""After one rank fails, how long its peers may go on, so that the earliest failure is the one reported."""

PRELOADED = (
    *("torch", "torch.distributed", "torch.nn.parallel", "torch._dynamo"),
    *("networkx", "pandas", "scipy.sparse"),
)
"""What workers find imported when they are forked: slow to import, without threads of its own, and not from here (the
process that forks may see another checkout than this one). The first `DistributedDataParallel` of a process imports
`torch._dynamo`, which takes seconds."""

_ENDING = "the end of groups of an earlier call"
_WORKER_ENV = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
}

T = TypeVar("T")


class RankError(RuntimeError):
    """A rank raised, died or did not answer."""


@dataclass(frozen=True, kw_only=True)
class RaisedError:
    """What one rank raised."""

    rank: int
    type_name: str
    message: str
    traceback: str
    time_s: float
    """`time.monotonic()` when it was caught; one clock for all processes of a machine."""


def run_ranks(
    world_size: int, fn: Callable[..., T], /, *args: Any, timeout: float = CALL_TIMEOUT_S, **kwargs: Any
) -> list[T]:
    """Calls `fn(rank, world_size, *args, **kwargs)` on every rank at once, in a fresh default process group (gloo).

    Every call begins with the same generator seeds, one thread, float32 as the default dtype and gradients enabled.

    Args:
        world_size: 1 to 4.
        fn: A function at module level; arguments and result travel by pickle, tensors by value.
        timeout: Seconds for the whole call, the start of the workers not included.
    Returns:
        The results, by rank.
    Raises:
        RankError: the earliest failure, with "rank r/P" and its traceback; or the ranks that had not answered, with
            their stacks.
    """
    outcomes = _the_pool().call(world_size, fn, args, kwargs, timeout, wait_for_all=False)
    return [outcome for outcome in outcomes if not isinstance(outcome, RaisedError)]


def run_ranks_expect_errors(
    world_size: int, fn: Callable[..., object], /, *args: Any, timeout: float = CALL_TIMEOUT_S, **kwargs: Any
) -> list[RaisedError]:
    """Like `run_ranks`, for a call in which every rank is expected to raise.

    Returns:
        What each rank raised, by rank.
    Raises:
        RankError: a rank returned instead of raising, died or did not answer.
    """
    outcomes = _the_pool().call(world_size, fn, args, kwargs, timeout, wait_for_all=True)
    quiet = [rank for rank, outcome in enumerate(outcomes) if not isinstance(outcome, RaisedError)]
    if quiet:
        raised = "\n".join(_describe(o, world_size) for o in outcomes if isinstance(o, RaisedError))
        raise RankError(f"every rank was expected to raise; ranks {quiet} of {world_size} returned\n{raised}")
    return [outcome for outcome in outcomes if isinstance(outcome, RaisedError)]


def tell_who_stays_away(rank: int) -> None:
    """Called by a rank that has given up on one that stays away by `stay_away`."""
    dist.distributed_c10d._get_default_store().set(f"rank {rank} gave up", "")


def stay_away(rank: int, world_size: int) -> None:
    """Waits until all other ranks have given up on this one: no longer, and on a loaded machine as long as it takes."""
    others = [f"rank {other} gave up" for other in range(world_size) if other != rank]
    dist.distributed_c10d._get_default_store().wait(others, timedelta(seconds=COLLECTIVE_TIMEOUT_S))


def shutdown_pool() -> None:
    """Ends all workers; the next call starts new ones."""
    global _pool
    if _pool is not None:
        _pool.discard()
        _pool = None


def worker_pids() -> list[int]:
    """The process ids of the workers alive now, by rank."""
    return [] if _pool is None else [worker.process.pid or 0 for worker in _pool.workers]


# -------------------------------------------------------------------------------- the parent


@dataclass(kw_only=True)
class _Worker:
    process: BaseProcess
    connection: Connection
    stack_file: Path

    def stack(self) -> str:
        """What faulthandler wrote: on a fatal signal, or because `_Pool._dump_stacks` asked."""
        text = self.stack_file.read_text(errors="replace") if self.stack_file.exists() else ""
        return text.strip() or "(no Python stack was written)"

    def has_stack(self) -> bool:
        return self.stack_file.exists() and self.stack_file.stat().st_size > 0


@dataclass(kw_only=True)
class _Pool:
    workers: list[_Worker] = field(default_factory=list)
    num_calls: int = 0
    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="dgl_hybrid_world_")))

    def call(
        self,
        world_size: int,
        fn: Callable[..., object],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout: float,
        *,
        wait_for_all: bool,
    ) -> list[Any]:
        if not 1 <= world_size <= MAX_WORLD_SIZE:
            raise ValueError(f"world_size must be 1 to {MAX_WORLD_SIZE} (got {world_size})")
        payload = pickle.dumps((fn, args, kwargs))  # before any worker is involved: an unpicklable fn costs nothing
        self._grow(world_size)
        self.num_calls += 1
        rendezvous = self.folder / f"rendezvous_{self.num_calls}"
        collective_timeout_s = min(COLLECTIVE_TIMEOUT_S, 0.75 * timeout)
        deadline = time.monotonic() + timeout
        try:
            for rank, worker in enumerate(self.workers[:world_size]):
                header = (rank, world_size, str(rendezvous), collective_timeout_s)
                with contextlib.suppress(BrokenPipeError):  # a dead worker is reported by _collect, with its exit code
                    worker.connection.send_bytes(pickle.dumps((header, payload)))
            outcomes = self._collect(world_size, deadline, timeout, wait_for_all=wait_for_all)
        except BaseException:  # KeyboardInterrupt too: answers may be on their way, so these pipes cannot be used again
            shutdown_pool()
            raise
        rendezvous.unlink(missing_ok=True)
        return outcomes

    def _collect(self, world_size: int, deadline: float, timeout: float, *, wait_for_all: bool) -> list[Any]:
        outcomes: dict[int, Any] = {}
        failures: list[RaisedError] = []
        while len(outcomes) < world_size:
            pending = {self.workers[r].connection: r for r in range(world_size) if r not in outcomes}
            ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
            if not ready:
                if failures and not wait_for_all:
                    break
                raise self._timeout_error(sorted(pending.values()), world_size, timeout, failures)
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = pending[connection]
                outcome = outcomes[rank] = self._receive(rank, world_size)
                if isinstance(outcome, RaisedError):
                    failures.append(outcome)
                    if not wait_for_all:
                        deadline = min(deadline, time.monotonic() + GRACE_S)
        if failures and not wait_for_all:
            raise RankError(_describe(min(failures, key=lambda failure: failure.time_s), world_size))
        return [outcomes[rank] for rank in range(world_size)]

    def _receive(self, rank: int, world_size: int) -> Any:
        worker = self.workers[rank]
        try:
            return pickle.loads(worker.connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            worker.process.join(5.0)
            raise RankError(
                f"rank {rank}/{world_size} died with exit code {worker.process.exitcode}\n{worker.stack()}"
            ) from None

    def _timeout_error(
        self, late: list[int], world_size: int, timeout: float, failures: list[RaisedError]
    ) -> RankError:
        for rank in late:
            os.kill(self.workers[rank].process.pid or 0, signal.SIGUSR1)
        deadline = time.monotonic() + 10.0  # the handler writes as soon as the signal arrives, and the rank has a core
        while not all(self.workers[rank].has_stack() for rank in late) and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.2)  # line by line
        stacks = [f"--- rank {rank}/{world_size} is at\n{self.workers[rank].stack()}" for rank in late]
        raised = [_describe(failure, world_size) for failure in failures]
        return RankError(
            "\n".join([f"ranks {late} of {world_size} did not answer within {timeout:g} s", *stacks, *raised])
        )

    def _grow(self, world_size: int) -> None:
        new = range(len(self.workers), world_size)
        try:
            for rank in new:
                self.workers.append(_start_worker(rank, self.folder / f"stack_{rank}.txt"))
            deadline = time.monotonic() + START_TIMEOUT_S
            for rank in new:
                if not self.workers[rank].connection.poll(max(0.0, deadline - time.monotonic())):
                    raise RankError(f"worker {rank} did not start within {START_TIMEOUT_S:g} s")
                self._receive(rank, world_size)
        except BaseException:
            shutdown_pool()
            raise

    def discard(self) -> None:
        for worker in self.workers:
            worker.process.kill()
        for worker in self.workers:
            worker.process.join(5.0)
            worker.connection.close()
        self.workers.clear()
        shutil.rmtree(self.folder, ignore_errors=True)


_pool: _Pool | None = None


def _the_pool() -> _Pool:
    global _pool
    if _pool is None:
        _pool = _Pool()
    return _pool


atexit.register(shutdown_pool)


def _describe(failure: RaisedError, world_size: int) -> str:
    head = f"rank {failure.rank}/{world_size} raised {failure.type_name}: {failure.message}"
    return f"{head}\n{failure.traceback}"


def _start_worker(rank: int, stack_file: Path) -> _Worker:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, str(stack_file)), daemon=True, name=f"test-rank-{rank}")
    with _environment(_WORKER_ENV):  # inherited: OMP reads it when torch is loaded, before any of our code runs there
        process.start()
    theirs.close()  # so that the worker's death is seen here as the end of its pipe
    return _Worker(process=process, connection=ours, stack_file=stack_file)


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


# -------------------------------------------------------------------------------- the worker


def _serve(connection: Connection, stack_file: str) -> None:
    """The life of a worker: one call after another until the pipe or the parent is gone."""
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the parent decides
    stacks = open(stack_file, "w")  # noqa: SIM115 - faulthandler keeps the descriptor for the life of the process
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
    importlib.import_module("dgl_hybrid")  # before a test module imports dgl
    gc.collect()
    _freeze_new_modules()
    connection.send_bytes(pickle.dumps(None))
    while True:
        try:
            message = connection.recv_bytes()
        except (EOFError, OSError):
            return
        (rank, world_size, rendezvous, collective_timeout_s), payload = pickle.loads(message)
        try:
            outcome = pickle.dumps(_call(rank, world_size, rendezvous, collective_timeout_s, payload))
        except BaseException as error:  # SystemExit as well: a rank that leaves has failed
            outcome = pickle.dumps(
                RaisedError(
                    rank=rank,
                    type_name=type(error).__name__,
                    message=str(error),
                    traceback=traceback.format_exc(),
                    time_s=time.monotonic(),
                )
            )
        connection.send_bytes(outcome)


def _call(rank: int, world_size: int, rendezvous: str, collective_timeout_s: float, payload: bytes) -> object:
    # Loaders, their blocks and what a test kept of them refer to each other. A process group left behind has three
    # threads, one of which wakes a hundred times a second: after some hundred tests ranks would do little else.
    gc.collect()
    if dist.is_initialized():
        # Ended now rather than after its call: only now is it certain that no peer is still using it.
        _let_go_of_groups()
    _freeze_new_modules()
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=collective_timeout_s),
    )
    fn, args, kwargs = pickle.loads(payload)  # in here: a module that cannot be imported is this rank's failure
    dist.barrier()  # who is done with that first would wait in fn, in many a test for a second or two only
    return fn(rank, world_size, *args, **kwargs)


def _let_go_of_groups() -> None:
    """Destroys the default group and those made beside it; nobody waits for their threads to end.

    Those look around every 10 ms, one after another, which takes longer than to make a group. Who drops the last
    reference to one waits for them, without holding the GIL.
    """
    held = list(dist.distributed_c10d._world.pg_map)
    dist.destroy_process_group()
    threading.Thread(target=held.clear, daemon=True, name=_ENDING).start()


def groups_are_ending() -> bool:
    """Whether threads of an earlier call's groups may still be there; asked in a worker."""
    return any(thread.name == _ENDING for thread in threading.enumerate())


_num_frozen_modules = 0


def _freeze_new_modules() -> None:
    """After a collection: modules stay for good. Later collections, one a call, need not look at what they consist of.

    Without it a collection takes as long as many a call: DGL, test modules and what they import come with the first.
    """
    global _num_frozen_modules
    if _num_frozen_modules != len(sys.modules):
        _num_frozen_modules = len(sys.modules)
        gc.freeze()


def _exit_with_parent() -> None:
    """Ends this process when the parent is gone, even if it was killed and a collective is in progress here."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
