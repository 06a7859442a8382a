# SPDX-License-Identifier: Apache-2.0
"""Which of several failures is shown: the first cause, in one line."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from dgl_hybrid.errors import ExchangeError
from dgl_hybrid.launch import rank as rank_module
from dgl_hybrid.launch.controller import _LOST_PEER
from dgl_hybrid.launch.job import EXIT_UNTOLD, Job, RankError, job_folder
from dgl_hybrid.launch.local import (
    _launch_config,
    _signal_options,
    _signals_put_back,
    _signals_to_handle,
    explain_failure,
)
from dgl_hybrid.partition.signals import EndedBySignal, ending_signals_raise


def error(rank: int, kind: str, message: str, *, is_expected: bool = True, time_s: float = 0.0) -> RankError:
    return RankError(
        rank=rank, kind=kind, message=message, is_expected=is_expected, traceback=f"trace of {rank}", time_s=time_s
    )


def test_the_rank_at_fault_speaks_for_all() -> None:
    errors = [error(0, "PartitionError", "rank 1 of 2: x is missing"), error(1, "PartitionError", "x is missing")]
    failure = explain_failure(errors, {0: 1, 1: 1}, 2)
    assert str(failure) == "rank 1 of 2: x is missing"
    assert failure.details == "trace of 1"


def test_what_all_ranks_say_needs_no_rank() -> None:
    errors = [error(rank, "ValueError", "wrong\n  number") for rank in (0, 1)]
    assert str(explain_failure(errors, {0: 1, 1: 1}, 2)) == "wrong number"


def test_a_lost_peer_is_a_consequence() -> None:
    errors = [
        error(0, "ExchangeError", "a peer left", time_s=1.0),
        error(1, "MemoryError", "no room", is_expected=False, time_s=2.0),
    ]
    message = str(explain_failure(errors, {0: 1, 1: 1}, 2))
    assert message == "rank 1 of 2: unexpected MemoryError: no room (--debug shows the traceback)"


def test_a_collective_of_pytorch_that_lost_its_peer_is_a_consequence_too() -> None:
    lost = error(0, "RuntimeError", "[gloo/transport/tcp/pair.cc] Connection closed by peer", is_expected=False)
    failure = explain_failure([lost], {0: 1, 1: -signal.SIGKILL}, 2)
    assert str(failure) == "rank 1 of 2 was killed by SIGKILL (out of memory?)"


def test_a_killed_rank_is_named_before_what_followed() -> None:
    failure = explain_failure([error(0, "ExchangeError", "a peer left")], {0: 1, 2: -signal.SIGKILL}, 3)
    assert str(failure) == "rank 2 of 3 was killed by SIGKILL (out of memory?)"


def test_a_rank_that_hung_did_not_run_out_of_memory() -> None:
    """The launcher ends it by SIGKILL in the end; its peer had waited for it, and says so."""
    waited = "exchange 3 did not complete on rank 0 of 2: rank 1 did not take part. (nothing came for 5 s)"
    assert str(explain_failure([error(0, "ExchangeError", waited)], {0: 1, 1: -signal.SIGKILL}, 2)) == (
        f"rank 0 of 2: {waited}"
    )
    ended = "exchange 3 did not complete on rank 0 of 2: rank 1 did not take part. (the process of rank 1 has ended)"
    failure = explain_failure([error(0, "ExchangeError", ended)], {0: 1, 1: -signal.SIGKILL}, 2)
    assert str(failure) == "rank 1 of 2 was killed by SIGKILL (out of memory?)"


def test_ranks_ended_by_the_launcher_are_not_blamed() -> None:
    failure = explain_failure([error(1, "ExchangeError", "late")], {0: -signal.SIGTERM, 1: 1}, 2)
    assert str(failure) == "rank 1 of 2: late"


@pytest.mark.parametrize(
    ("errors", "exit_codes"),
    [
        ([], {2: -signal.SIGTERM, 0: -signal.SIGTERM, 1: -signal.SIGTERM}),
        ([error(0, "ExchangeError", "the process of rank 2 has ended")], {0: 1, 2: -signal.SIGTERM}),
        (
            [error(0, "RuntimeError", "gloo: Connection closed by peer", is_expected=False)],
            {0: 1, 2: -signal.SIGTERM, 1: -signal.SIGTERM},
        ),
    ],
)
def test_a_rank_that_somebody_else_ended_is_named(errors: list[RankError], exit_codes: dict[int, int]) -> None:
    failure = explain_failure(errors, exit_codes, 3)
    assert str(failure) == "rank 2 of 3 was ended by SIGTERM, which the launcher did not send"


@pytest.mark.parametrize("operation", ["exchange 5 (layer 2, forward)", "the probe of this cluster", "gather"])
def test_the_last_words_of_a_trainer_that_lost_its_peer_through_memory(operation: str) -> None:
    """Neither gloo nor a socket comes up in them."""
    words = (
        f"dgl_hybrid.errors.ExchangeError: {operation} did not complete on rank 0 of 2: rank 1 did not take part. "
        f"(the process of rank 1 has ended, or let go of its communicator)"
    )
    assert _LOST_PEER.search(f"Traceback (most recent call last):\n{words}")
    assert not _LOST_PEER.search(words.replace("did not complete on", "is refused by"))


def test_a_rank_that_could_not_write_its_error_is_named() -> None:
    follows = error(0, "ExchangeError", "the process of rank 1 has ended")
    for errors in ([], [follows]):
        message = str(explain_failure(errors, {0: -signal.SIGTERM, 1: EXIT_UNTOLD}, 2))
        assert message.startswith(f"rank 1 of 2 failed, and could not write its error into {tempfile.gettempdir()}: it")
    assert str(explain_failure([error(0, "ValueError", "no")], {1: EXIT_UNTOLD}, 2)) == "rank 0 of 2: no"


WITHOUT_ROOM = """
import errno, os, sys
from pathlib import Path
from dgl_hybrid.launch import rank

def write_json(path, value):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

rank.write_json = write_json
rank.main(Path(sys.argv[1]))
"""


def test_an_error_that_cannot_be_written_is_on_stderr(tmp_path: Path) -> None:
    """What was there of it were the words "cannot read its job: No space left on device"."""
    Job(task="no such task", payload={}, threads=1, launcher_pid=os.getpid()).write(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_ROOM, str(tmp_path)],
        env={**os.environ, "RANK": "0", "WORLD_SIZE": "1"},
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == EXIT_UNTOLD, done.stderr
    assert "KeyError: 'no such task'" in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("rank 0 of 1 ended by this KeyError, and could not tell its launcher: [Errno")


PRINTS = """
import sys
from pathlib import Path
from dgl_hybrid.launch import rank

rank._run = lambda *args: print("something")
rank.main(Path(sys.argv[1]))
"""


def test_a_rank_whose_words_are_lost_has_not_done_well(tmp_path: Path) -> None:
    Job(task="train", payload={}, threads=1, launcher_pid=os.getpid()).write(tmp_path)
    for path, code, said in (
        ("/dev/full", 1, "rank 0 of 1: what it has printed is lost: [Errno"),
        ("/dev/null", 0, ""),
    ):
        with open(path, "w", encoding="utf-8") as stdout:
            done = subprocess.run(
                [sys.executable, "-c", PRINTS, str(tmp_path)],
                env={**os.environ, "RANK": "0", "WORLD_SIZE": "1", "PYTHONUNBUFFERED": ""},
                cwd=Path(__file__).resolve().parents[2],
                stdout=stdout,
                stderr=subprocess.PIPE,
                text=True,
                timeout=300,
                check=False,
            )
        assert done.returncode == code, done.stderr
        assert done.stderr.startswith(said)


def test_nothing_known() -> None:
    assert str(explain_failure([], {1: 3}, 2)) == "a rank of 2 ended without a word (rank 1: exit code 3)"


def test_handlers_of_signals_are_put_back() -> None:
    """The agent's stayed, and a signal after the ranks had ended was an error nobody expects."""
    before = signal.getsignal(signal.SIGTERM)
    with _signals_put_back():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGTERM) is before


def test_what_is_ignored_is_not_handled(tmp_path: Path) -> None:
    """Under `nohup` a job outlives its terminal; torch's elastic agent handles SIGHUP if it is not told otherwise."""
    names = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
    before = {name: signal.signal(getattr(signal, name), signal.SIG_DFL) for name in names}  # of who runs the tests
    try:
        assert _signals_to_handle() == [*names]
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        assert _signals_to_handle() == ["SIGTERM", "SIGINT", "SIGQUIT"]
        assert _launch_config(2, tmp_path).signals_to_handle == "SIGTERM,SIGINT,SIGQUIT"
    finally:
        for name, handler in before.items():
            signal.signal(getattr(signal, name), handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_the_folder_of_a_job_is_removed_does_not_keep_it(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second one, of a supervisor or a double Ctrl-C, ended the removal of what the first one had ended."""
    unlink, removed = os.unlink, list[str]()

    def unlink_amid_signals(path: str, **options: Any) -> None:
        if not removed:
            signal.raise_signal(number)
        removed.append(path)
        unlink(path, **options)

    folders: list[Path] = []

    def run_job() -> None:
        with ending_signals_raise(), job_folder() as folder:
            folders.append(folder)
            for name in ("a", "b"):
                (folder / name).touch()
            monkeypatch.setattr(os, "unlink", unlink_amid_signals)

    with pytest.raises((EndedBySignal, KeyboardInterrupt)) as ended:
        run_job()
    assert len(removed) == 2
    assert not folders[0].exists()
    assert isinstance(ended.value, KeyboardInterrupt) == (number == signal.SIGINT), "it is not lost either"


def test_versions_of_pytorch_that_take_no_signals_are_given_none() -> None:
    @dataclasses.dataclass
    class Older:
        max_restarts: int = 0

    assert _signal_options(Older) == {}


@pytest.mark.parametrize(("timeout_s", "expected_s"), [(5.0, 60.0), (600.0, 600.0), (None, None)])
def test_ranks_that_do_not_meet_are_told_of_in_time(
    timeout_s: float | None, expected_s: float | None, tmp_path: Path
) -> None:
    """One that was stopped as it started kept the others for half an hour, whatever the user had said."""
    job = Job(task="train", payload={}, threads=1, launcher_pid=0, timeout_s=timeout_s)
    with (
        mock.patch("torch.distributed.init_process_group", side_effect=RuntimeError("rank 1 is late")) as meet,
        mock.patch("torch.set_num_threads"),
        pytest.raises(ExchangeError, match=r"ranks did not all meet: rank 0 of 2 waited in vain \(rank 1 is late\)"),
    ):
        rank_module._run(job, tmp_path, 0, 2)
    expected = None if expected_s is None else timedelta(seconds=expected_s)
    assert meet.call_args.kwargs["timeout"] == expected
