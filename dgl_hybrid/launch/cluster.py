# SPDX-License-Identifier: Apache-2.0
"""Runs a DistDGL job: servers and trainers of all machines, on this host or over ssh, started and ended together."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from dgl_hybrid.errors import LaunchError, PartitionError
from dgl_hybrid.launch.cluster_job import (
    SSH,
    ClusterFailure,
    ClusterJob,
    ClusterResult,
    Part,
    PartLine,
    PartResult,
    plan_parts,
)
from dgl_hybrid.launch.controller import Controller
from dgl_hybrid.launch.machines import Machine, local_machines, read_ip_config
from dgl_hybrid.partition.manifest import read_json_object

__all__ = [
    "SSH",
    "ClusterFailure",
    "ClusterJob",
    "ClusterResult",
    "Part",
    "PartLine",
    "PartResult",
    "find_machines",
    "read_num_parts",
    "run_cluster",
]


def run_cluster(
    job: ClusterJob, *, on_line: Callable[[PartLine], None] | None = None, verbose: bool = False
) -> ClusterResult:
    """Starts the job and waits until it has ended.

    Args:
        job: What to run.
        on_line: Called with each line that a part writes; None: they go to our stdout and stderr, headed by the part's
            name.
        verbose: Show servers' lines too.
    Raises:
        ClusterFailure: A part died, or did not come up; all others have been ended, nothing is left of them.
        LaunchError: The job cannot be started as it is described.
    """
    machines = find_machines(job)
    parts = plan_parts(job, machines)
    return Controller(job, machines, parts, on_line or show_line, verbose=verbose).run()


def find_machines(job: ClusterJob) -> tuple[Machine, ...]:
    """Returns the job's machines: one per partition.

    Raises:
        LaunchError: The partition config or ip_config cannot be read, or they do not fit each other.
    """
    num_parts = read_num_parts(job.folder / job.part_config)
    if job.machine_prefixes and len(job.machine_prefixes) != num_parts:
        raise LaunchError(
            f"machine_prefixes must name {num_parts} commands, one per partition (got {len(job.machine_prefixes)})"
        )
    if job.ip_config is None:
        return local_machines(num_parts, job.num_servers)
    machines = read_ip_config(job.folder / job.ip_config, num_parts)
    taken: dict[tuple[str, int], Machine] = {}
    for machine in machines:
        if machine.port + job.num_servers > 2**16:
            raise LaunchError(
                f"{machine} of {job.ip_config} begins at port {machine.port}, and {job.num_servers} servers need as "
                f"many ports from there on, up to 65535"
            )
        for port in range(machine.port, machine.port + job.num_servers):
            other = taken.setdefault((machine.address, port), machine)
            if other is not machine:
                raise LaunchError(
                    f"{machine} and {other} of {job.ip_config} both need port {port} of {machine.address}: with "
                    f"{job.num_servers} servers per machine, ports of one host must be {job.num_servers} apart."
                )
    return machines


def read_num_parts(part_config: Path) -> int:
    """Returns the number of partitions.

    Raises:
        LaunchError: The file is not a partition config.
    """
    try:
        num_parts = read_json_object(part_config)["num_parts"]
    except PartitionError as error:
        if isinstance(error.__cause__, OSError):
            raise LaunchError(
                f"the partition config {part_config} cannot be read: {error.__cause__.strerror}. "
                "Name the JSON file that partition_graph wrote; a relative path is one in the workspace."
            ) from error
        raise LaunchError(str(error)) from error
    except KeyError as error:
        raise LaunchError(
            f"{part_config} is not a partition config: it has no num_parts. "
            "Name the JSON file that partition_graph wrote."
        ) from error
    if not isinstance(num_parts, int) or num_parts < 1:
        raise LaunchError(f"{part_config}: num_parts must be at least 1 (got {num_parts!r})")
    return num_parts


def show_line(line: PartLine) -> None:
    """Writes a part's line to our own stdout or stderr; what these have no characters for, as escapes."""
    stream = sys.stderr if line.is_error else sys.stdout
    encoding = getattr(stream, "encoding", None) or "utf-8"  # a script's own stream may have none
    text = f"[{line.part.name}] {line.text}\n".encode(encoding, errors="backslashreplace").decode(encoding)
    stream.write(text)
    stream.flush()
