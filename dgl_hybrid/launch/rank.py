# SPDX-License-Identifier: Apache-2.0
"""The life of one rank's process: join the others, do the job's task, leave a result or an error in its folder.

Started by `launch.local` as `python -m dgl_hybrid.launch.rank FOLDER`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import sys
import threading
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import dgl_hybrid  # noqa: F401  mends DGL before anything imports it
from dgl_hybrid.errors import ExchangeError
from dgl_hybrid.launch.job import EXIT_UNTOLD, FOLDER_PREFIX, Job, RankError, write_json

LEAST_MEETING_S = 60.0
"""That ranks wait for each other as they start, however short exchanges are to be: imports alone take seconds."""


def main(folder: Path) -> NoReturn:
    """Runs the task of the job in `folder`, then ends this process."""
    job = Job.read(folder)
    _exit_with(job.launcher_pid, folder)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO if job.verbose else logging.WARNING,
        format=f"[{rank}/{world_size}] %(levelname)s %(name)s: %(message)s",
    )
    code = 0
    try:
        result = _run(job, folder, rank, world_size)
        if rank == 0:
            write_json(folder / "result.json", result)
    except BaseException as error:  # also SystemExit: a rank that leaves early has failed
        code = _leave_error(folder, RankError.of(error, rank, traceback.format_exc()), world_size)
    try:
        sys.stdout.flush()
    except OSError as fault:  # a file on a full disk
        code = code or 1
        with contextlib.suppress(OSError):
            print(f"rank {rank} of {world_size}: what it has printed is lost: {fault}", file=sys.stderr)  # noqa: T201
    with contextlib.suppress(OSError):
        sys.stderr.flush()
    # Not sys.exit: after a failure, threads of gloo may wait for peers that will never come.
    os._exit(code)


def _leave_error(folder: Path, error: RankError, world_size: int) -> int:
    """Writes an error where the launcher looks for it; on stderr where that fails. Returns this process's exit code."""
    try:
        write_json(folder / f"error_{error.rank}.json", error.to_json())
    except FileNotFoundError:
        return 1  # a killed launcher's folder: nobody reads it
    except OSError as fault:
        with contextlib.suppress(OSError):
            print(  # noqa: T201
                f"{error.traceback}rank {error.rank} of {world_size} ended by this {error.kind}, and could not tell "
                f"its launcher: {fault}",
                file=sys.stderr,
            )
        return EXIT_UNTOLD
    return 1


def _run(job: Job, folder: Path, rank: int, world_size: int) -> Any:
    import torch
    import torch.distributed as dist

    from dgl_hybrid.launch.tasks import TASKS

    torch.set_num_threads(job.threads)
    # A file: see `launch.local`. Not by its URL, which PyTorch does not decode: a blank would be three characters.
    store = dist.FileStore(str(folder / "rank_store"), world_size)  # type: ignore[attr-defined]
    timeout = None if job.timeout_s is None else timedelta(seconds=max(job.timeout_s, LEAST_MEETING_S))
    try:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    except RuntimeError as error:
        raise ExchangeError(f"ranks did not all meet: rank {rank} of {world_size} waited in vain ({error})") from error
    result = TASKS[job.task](job.payload, show_progress=rank == 0 and job.show_progress)
    dist.barrier()
    return result


def _exit_with(launcher_pid: int, folder: Path) -> None:
    """Ends this process when its launcher is gone, however that ended: ranks are never left behind, nor is the job's
    folder, which a launcher that ends by itself removes.
    """

    def watch() -> None:
        while os.getppid() == launcher_pid:
            time.sleep(0.5)
        if folder.name.startswith(FOLDER_PREFIX):  # all ranks do so, as none knows which is the last
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="launcher-watch").start()


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except (OSError, json.JSONDecodeError, IndexError) as error:
        print(f"dgl_hybrid.launch.rank: cannot read its job: {error}", file=sys.stderr)  # noqa: T201
        sys.exit(1)
