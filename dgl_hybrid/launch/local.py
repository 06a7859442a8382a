# SPDX-License-Identifier: Apache-2.0
"""Runs a task on ranks of this machine through PyTorch's elastic launcher, over the loopback interface only.

Launcher and ranks meet in files of the job's folder, which only its user can read or write. PyTorch's TCP stores listen
on all interfaces, whatever address they are given, and the launcher unpickles what it finds in its own.

When one rank fails all are ended at once, and the caller gets that rank's error. Ranks end as well when the launcher
itself is killed (`launch.rank`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import re
import signal
import sys
import tempfile
import threading
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dgl_hybrid.errors import LaunchError
from dgl_hybrid.launch.job import EXIT_UNTOLD, Job, RankError, job_folder
from dgl_hybrid.launch.threads import threads_per_rank
from dgl_hybrid.partition.signals import EndedBySignal, ending_signals_raise

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
_NO_TCP_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Else the launcher would open one for the ranks, which have a file."""


class RankFailure(LaunchError):
    """A rank failed; the message is the one line to show."""

    def __init__(self, message: str, details: str) -> None:
        super().__init__(message)
        self.details = details
        """The rank's traceback."""


def run_local(
    task: str,
    payload: Mapping[str, Any],
    *,
    ranks: int,
    threads: int | None = None,
    verbose: bool = False,
    show_progress: bool = False,
    timeout_s: float | None = None,
) -> Any:
    """Starts `ranks` processes, runs the task on each, and returns rank 0's result.

    Args:
        task: A key of `launch.tasks.TASKS`.
        payload: The task's arguments, JSON-serialisable.
        ranks: Number of processes.
        threads: Of each; None: cores / ranks.
        verbose: Ranks log what they do to stderr.
        show_progress: Rank 0 shows a progress bar on stderr.
        timeout_s: For how long ranks wait for each other as they meet, a minute at least, and at the end; None: as
            PyTorch does.
    Raises:
        RankFailure: A rank failed; all have ended.
        LaunchError: The ranks could not be started.
        KeyboardInterrupt: SIGINT came; all ranks have ended.
        EndedBySignal: Another signal that ends processes came; all ranks have ended.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    threads = threads_per_rank(ranks) if threads is None else threads
    # Until the launcher of PyTorch has its own handlers, too: what ends this process takes the folder along.
    with ending_signals_raise(), job_folder() as folder:
        job = Job(
            task=task,
            payload=dict(payload),
            threads=threads,
            launcher_pid=os.getpid(),
            verbose=verbose,
            show_progress=show_progress,
            timeout_s=timeout_s,
        )
        job.write(folder)
        environment = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), **_NO_TCP_STORE}
        if "GLOO_SOCKET_IFNAME" not in os.environ:
            environment["GLOO_SOCKET_IFNAME"] = LOOPBACK
        try:
            with _environment(environment), _quiet_launcher(), _signals_put_back():
                # -P: what lies in the current folder must not pass for a module of Python's.
                elastic_launch(_launch_config(ranks, folder), sys.executable)(
                    "-P", "-m", "dgl_hybrid.launch.rank", str(folder)
                )
        except ChildFailedError as error:
            raise explain_failure(
                read_errors(folder), {rank: failure.exitcode for rank, failure in error.failures.items()}, ranks
            ) from None
        except SignalException as error:
            if error.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            raise EndedBySignal(error.sigval) from None
        except OSError as error:
            raise LaunchError(f"{ranks} ranks could not be started: {error}") from error
        result = folder / "result.json"
        if not result.is_file():
            raise LaunchError(f"the {ranks} ranks ended without a result")
        return json.loads(result.read_text(encoding="utf-8"))


def read_errors(folder: Path) -> list[RankError]:
    """Returns the errors that ranks left in a job's folder, the earliest first."""
    errors = [RankError(**json.loads(path.read_text(encoding="utf-8"))) for path in folder.glob("error_*.json")]
    return sorted(errors, key=lambda error: error.time_s)


def explain_failure(errors: list[RankError], exit_codes: Mapping[int, int], ranks: int) -> RankFailure:
    """Finds the failure that came first among those that followed from it, and puts it into one line.

    Args:
        errors: What ranks reported, the earliest first.
        exit_codes: Of ranks that ended by themselves, as they were noticed, then of those that the launcher ended;
            negative: by that signal.
        ranks: Number of ranks.
    """
    reporting = {error.rank for error in errors}
    killed = {
        rank: -code
        for rank, code in sorted(exit_codes.items())
        if code < 0 and rank not in reporting and -code != signal.SIGTERM
    }
    causes = [error for error in errors if not _is_consequence(error)]
    # Who hung, or was stopped, outlives the launcher's SIGTERM until it sends SIGKILL; peers had waited for it in vain.
    has_hung = any("did not take part" in error.message and not _says_that_a_peer_ended(error) for error in errors)
    if not causes and killed and not has_hung:
        rank, number = next(iter(killed.items()))
        hint = " (out of memory?)" if number == signal.SIGKILL else ""
        return RankFailure(f"rank {rank} of {ranks} was killed by {signal.Signals(number).name}{hint}", "")
    untold = [rank for rank, code in sorted(exit_codes.items()) if code == EXIT_UNTOLD and rank not in reporting]
    if not causes and untold:
        return RankFailure(
            f"rank {untold[0]} of {ranks} failed, and could not write its error into {tempfile.gettempdir()}: it is on "
            f"stderr. Is that folder full? TMPDIR names another one.",
            "",
        )
    # The launcher ends the others by this signal, too; then it has noticed something else before.
    ended = [rank for rank, code in exit_codes.items() if code == -signal.SIGTERM and rank not in reporting]
    if not causes and ended and all(_says_that_a_peer_ended(error) for error in errors):
        return RankFailure(f"rank {ended[0]} of {ranks} was ended by SIGTERM, which the launcher did not send", "")
    if not causes and not errors:
        codes = ", ".join(f"rank {rank}: exit code {code}" for rank, code in sorted(exit_codes.items()))
        return RankFailure(f"a rank of {ranks} ended without a word ({codes or 'exit codes unknown'})", "")
    # Every rank raises what was agreed; the one whose fault it is says it in its own words.
    candidates = causes or errors
    own = [error for error in candidates if not error.message.startswith("rank ")] or candidates
    chosen = own[0]
    message = " ".join(chosen.message.split())
    if not chosen.is_expected:
        message = f"unexpected {chosen.kind}: {message} (--debug shows the traceback)"
    said_by_all = len(own) == ranks and len({error.message for error in own}) == 1
    if ranks > 1 and not said_by_all and not message.startswith("rank "):
        message = f"rank {chosen.rank} of {ranks}: {message}"
    return RankFailure(message, chosen.traceback)


def _is_consequence(error: RankError) -> bool:
    """Whether an error only says that a peer is gone: in our exchanges, or in a collective of PyTorch (DDP's sums)."""
    is_transport = error.kind in ("RuntimeError", "DistBackendError", "DistNetworkError") and re.search(
        r"gloo|NCCL|Connection (closed|reset)", error.message
    )
    return error.kind == "ExchangeError" or bool(is_transport)


def _says_that_a_peer_ended(error: RankError) -> bool:
    return re.search(r"has ended|Connection (closed|reset)", error.message) is not None


def _launch_config(ranks: int, folder: Path) -> Any:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint=str(folder / "launcher_store"),
        rdzv_configs={"store_type": "file"},
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(log_dir=str(folder / "logs")),
        **_signal_options(LaunchConfig),
    )


def _signal_options(config: type) -> dict[str, Any]:
    """Older versions of PyTorch handle all of them, whatever they are told."""
    is_told = any(entry.name == "signals_to_handle" for entry in dataclasses.fields(config))
    return {"signals_to_handle": ",".join(_signals_to_handle())} if is_told else {}


def _signals_to_handle() -> list[str]:
    """Those that end processes, but for what this one ignores: a job under `nohup` outlives its terminal."""
    names = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
    return [name for name in names if signal.getsignal(getattr(signal, name)) != signal.SIG_IGN]


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _signals_put_back() -> Iterator[None]:
    """The elastic agent leaves handlers behind, which raise what nobody expects once ranks have ended."""
    names = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
    before = {number: signal.getsignal(number) for name in names if (number := getattr(signal, name, None)) is not None}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                if handler is not None:  # of another language
                    signal.signal(number, handler)


@contextlib.contextmanager
def _quiet_launcher() -> Iterator[None]:
    """The elastic agent reports a failed rank on several lines; ours is one. Its loggers have levels of their own."""
    names = [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed")]
    loggers = [logging.getLogger(name) for name in names]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
