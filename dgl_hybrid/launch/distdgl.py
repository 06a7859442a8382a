# SPDX-License-Identifier: Apache-2.0
"""Measures DistDGL on this host: starts its servers and trainers, plugin off, and reads what they have found.

They meet in a folder that only its user can read; what they listen on is the loopback interface.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
from dataclasses import replace
from pathlib import Path

from dgl_hybrid.errors import LaunchError
from dgl_hybrid.launch.cluster import ClusterFailure, ClusterJob, PartLine, run_cluster
from dgl_hybrid.launch.job import job_folder, write_json
from dgl_hybrid.ops.cpu.memory import KEEPING_ENVIRONMENT
from dgl_hybrid.partition import read_partition_summary
from dgl_hybrid.partition.signals import ending_signals_raise
from dgl_hybrid.sampling.config import ENABLE_VARIABLE
from dgl_hybrid.training.config import TrainJob
from dgl_hybrid.training.distdgl import DistDGLReport

logger = logging.getLogger(__name__)

TIMEOUT_S = 240.0
"""For everything, from the start of the parts on; as long again for smaller batches, where all seeds at once came to
nothing. Epochs stop long before, unless the first one takes as long."""
_TIMED_OUT = 124
"""Exit code of a job that `run_cluster` has ended for its time."""
COMMAND = ("-P", "-m", "dgl_hybrid.launch.distdgl_part")
"""-P: what lies in the current folder must not pass for a module of Python's."""


class NoEpochInTime(LaunchError):
    """No epoch was done in the time that there was: nothing is known of DistDGL, and nothing has failed."""


def run_distdgl(job: TrainJob, *, threads: int) -> DistDGLReport:
    """Trains with DistDGL, one trainer for each part, and returns what it took; as far as it got, if it got anywhere.

    Args:
        job: `strategy` is not used.
        threads: Of each trainer.
    Raises:
        NoEpochInTime: No epoch was done in `TIMEOUT_S`, by any batch size. Nothing is left of it.
        LaunchError: It failed before an epoch was done; the message is one line. Nothing is left of it.
        KeyboardInterrupt: SIGINT came; nothing is left.
        EndedBySignal: SIGTERM or SIGHUP came; nothing is left.
    """
    with ending_signals_raise():
        report, failure = _run_once(job, threads, skips_largest=False)
        if report is None and failure is not None and (_lacked_memory(failure) or _lacked_time(failure)):
            # All seeds at once are the first to be tried, and take longest and most.
            report, of_smaller = _run_once(job, threads, skips_largest=True)
            if report is not None:
                failure = of_smaller
    if report is None and failure is not None and _lacked_time(failure):
        raise NoEpochInTime(f"DistDGL had done no epoch within {TIMEOUT_S:g} s of its start, and was ended")
    if report is None:
        raise LaunchError(_explain(failure))
    return report if failure is None or report.is_complete else replace(report, stopped=_explain(failure))


def _run_once(
    job: TrainJob, threads: int, *, skips_largest: bool
) -> tuple[DistDGLReport | None, ClusterFailure | None]:
    with job_folder() as folder:
        part_config = Path(os.path.abspath(job.part_config))
        task = {
            "job": job.to_json(),
            "threads": threads,
            "graph_name": read_partition_summary(part_config).graph_name,
            "skips_largest": skips_largest,
        }
        write_json(folder / "job.json", task)
        cluster = ClusterJob(
            part_config=part_config,
            command=(*COMMAND, str(folder)),
            threads=threads,
            # Freed memory is kept, as a `FullGraphLoader` does for us, and for plain DGL in turns with us. The plugin's
            # variable is not left out: parts inherit what we have.
            environment={**KEEPING_ENVIRONMENT, "MKL_NUM_THREADS": str(threads), ENABLE_VARIABLE: "0"},
            timeout_s=TIMEOUT_S,
        )
        failure = report = None
        try:
            run_cluster(cluster, on_line=_log)
        except ClusterFailure as error:
            failure = error
        with contextlib.suppress(FileNotFoundError):
            report = DistDGLReport.from_json(json.loads((folder / "report.json").read_text(encoding="utf-8")))
        return report, failure


def _lacked_memory(failure: ClusterFailure) -> bool:
    """Whether a part was killed, which the system does for memory, or PyTorch got none."""
    return failure.exit_code == 128 + signal.SIGKILL or "allocate memory" in failure.details


def _lacked_time(failure: ClusterFailure) -> bool:
    """Whether it was ended for its time, and no part was at fault."""
    return failure.part is None and failure.exit_code == _TIMED_OUT


def _explain(failure: ClusterFailure | None) -> str:
    """Puts a failure into one line: which part, and its last word, the exception of a Python process."""
    if failure is None:
        return "DistDGL's trainers ended without a result"
    if failure.part is None:
        return " ".join(str(failure).split())
    last = [line for line in failure.details.strip().splitlines()[-1:] if line.strip() != "(none)"]
    return " ".join(": ".join([str(failure), *last]).split())


def _log(line: PartLine) -> None:
    logger.info("[%s] %s", line.part.name, line.text)
