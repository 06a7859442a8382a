# SPDX-License-Identifier: Apache-2.0
"""What a launcher tells its ranks and what they tell it, as JSON files in a folder of the job's own."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dgl_hybrid.errors import HybridError
from dgl_hybrid.partition.signals import ending_signals_wait

FOLDER_PREFIX = "dgl_hybrid_job_"
"""Of the temporary folder in which launcher and ranks meet."""

EXIT_UNTOLD = 74
"""Of a rank that failed and could not leave its error in the folder: `EX_IOERR` of sysexits.h."""


@contextlib.contextmanager
def job_folder() -> Iterator[Path]:
    """Makes a folder for what is between the processes of a job, and takes it away again, whatever signals come then: a
    second one would end the removal half-way.
    """
    folder = tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX)
    try:
        yield Path(folder.name)
    finally:
        with ending_signals_wait():
            folder.cleanup()


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One task on all ranks."""

    task: str
    """A key of `launch.tasks.TASKS`."""
    payload: dict[str, Any]
    """The task's arguments."""
    threads: int
    """Of each rank."""
    launcher_pid: int
    verbose: bool = False
    show_progress: bool = False
    timeout_s: float | None = None
    """For how long ranks wait for each other as they meet, a minute at least, and at the end; None: as PyTorch does."""

    def write(self, folder: Path) -> None:
        write_json(folder / "job.json", asdict(self))

    @classmethod
    def read(cls, folder: Path) -> Job:
        return cls(**json.loads((folder / "job.json").read_text(encoding="utf-8")))


@dataclass(frozen=True, kw_only=True, slots=True)
class RankError:
    """Why one rank ended."""

    rank: int
    kind: str
    """Name of the exception's class."""
    message: str
    is_expected: bool
    """A fault we describe, not a bug: its message is enough."""
    traceback: str
    time_s: float
    """`time.monotonic()`: one clock for all processes of a machine."""

    @classmethod
    def of(cls, error: BaseException, rank: int, trace: str) -> RankError:
        return cls(
            rank=rank,
            kind=type(error).__name__,
            message=str(error),
            is_expected=isinstance(error, (HybridError, ValueError)),
            traceback=trace,
            time_s=time.monotonic(),
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def write_json(path: Path, value: Any) -> None:
    """Writes aside and renames: whoever finds the file finds all of it."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        aside.write_text(json.dumps(value), encoding="utf-8")
        aside.rename(path)
    finally:
        aside.unlink(missing_ok=True)  # as on a disk that is full
