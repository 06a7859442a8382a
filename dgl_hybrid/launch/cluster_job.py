# SPDX-License-Identifier: Apache-2.0
"""A DistDGL job in words: what is to run, of which parts it is made, what they are told, and how each has ended."""

from __future__ import annotations

import itertools
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from dgl_hybrid.errors import LaunchError
from dgl_hybrid.launch.machines import Machine
from dgl_hybrid.launch.threads import check_threads

SSH = (
    *("ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15"),
    *("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=6"),
)
_FORMATS = ("coo", "csr", "csc")

Role = Literal["server", "trainer"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterJob:
    """A DistDGL script and where it runs.

    Every server and trainer runs the same command, as DGL wants it: a process with `DGL_ROLE=server` becomes a server
    in `dgl.distributed.initialize`. All get the variables of DGL's own launcher (`DGL_IP_CONFIG` and `DGL_CONF_PATH`
    among them), trainers those of torchrun as well. Trainers connect to the addresses in `DGL_IP_CONFIG`, whatever file
    the script gives `initialize` (fix 0019).
    """

    part_config: Path
    """The partition's JSON file; a relative path is one in the workspace."""
    command: tuple[str, ...]
    """What the interpreter is given, as it is: the script and its arguments, or `-m`, a module and its arguments."""
    python: str = sys.executable
    """The interpreter; on all hosts the same. A relative path is one in the folder where the job is started."""
    workspace: Path | None = None
    """Folder in which all parts run, on every host; None: the current one."""
    ip_config: Path | None = None
    """One line per machine; a relative path is one in the workspace. None: this host, and free ports."""
    num_servers: int = 1
    """Of each machine: a main one and backups."""
    num_trainers: int = 1
    """Of each machine."""
    num_samplers: int = 0
    """Of each trainer."""
    graph_format: str = "csc"
    """Formats of the graph that servers keep, separated by commas."""
    threads: int | None = None
    """Of each trainer; None: the host's cores, shared by its trainers."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Further variables of all parts."""
    timeout_s: float | None = None
    """For the whole job."""
    start_timeout_s: float = 1800.0
    """Until all servers listen: they load their partitions first."""
    grace_s: float = 3.0
    """Between SIGTERM and SIGKILL when the job ends."""
    remote_shell: tuple[str, ...] = SSH
    """Followed by an address and a command, runs the command on another host."""
    machine_prefixes: tuple[tuple[str, ...], ...] = ()
    """For each machine a command that runs what follows it (`("ip", "netns", "exec", "host0")`): all machines are then
    on this host, each with its agent, servers and trainers under its prefix."""

    def __post_init__(self) -> None:
        """Checks every field."""
        for name, least in (("num_servers", 1), ("num_trainers", 1), ("num_samplers", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least} (got {getattr(self, name)})")
        for name in ("timeout_s", "start_timeout_s"):
            seconds = getattr(self, name)
            if seconds is not None and not 0.0 < seconds < math.inf:
                raise ValueError(f"{name} must be positive and finite (got {seconds})")
        if not self.command:
            raise ValueError("command must name the script to run (got nothing)")
        check_threads(self.threads)
        unknown = [word for word in self.graph_format.split(",") if word.strip() not in _FORMATS]
        if unknown:
            raise ValueError(f"graph_format must be of {', '.join(_FORMATS)} (got {self.graph_format!r})")

    @property
    def interpreter(self) -> str:
        """`python`, a path as an absolute one. Not resolved: a virtual environment is known by its link."""
        return os.path.abspath(self.python) if os.sep in self.python else self.python

    @property
    def runs_own_module(self) -> bool:
        """Whether the command is a module of this package, which mends DGL without the start-up hook."""
        after_options = itertools.dropwhile(lambda word: word.startswith("-") and word != "-m", self.command)
        option, name = [*after_options, "", ""][:2]
        return option == "-m" and name.startswith("dgl_hybrid.")

    @property
    def folder(self) -> Path:
        """The workspace as an absolute path."""
        return Path(os.path.abspath(self.workspace or Path.cwd()))


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A server or trainer."""

    role: Role
    index: int
    """The server's id, or the trainer's rank."""
    machine: Machine
    local_index: int
    """Among those of its machine."""

    @property
    def name(self) -> str:
        return f"{self.role} {self.index}"

    def __str__(self) -> str:
        return f"{self.name} on {self.machine}"


@dataclass(frozen=True, kw_only=True, slots=True)
class PartLine:
    """What a part wrote."""

    part: Part
    is_error: bool
    """To stderr."""
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PartResult:
    """How a part has ended."""

    part: Part
    exit_code: int | None
    """128 and the signal's number if it was killed; None: it was ended with the job, or never started."""
    elapsed_s: float
    last_lines: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterResult:
    """How a job has ended."""

    parts: tuple[PartResult, ...]
    elapsed_s: float
    exit_code: int = 0

    def part(self, name: str) -> PartResult:
        """Returns how a part has ended, by its name: `trainer 0`, `server 1`."""
        return next(result for result in self.parts if result.part.name == name)


class ClusterFailure(LaunchError):
    """A part has died or never came up. All others have been ended."""

    def __init__(self, message: str, *, details: str = "", exit_code: int = 1, part: str | None = None) -> None:
        super().__init__(message)
        self.details = details
        """The last lines of the part at fault."""
        self.exit_code = exit_code
        """The part's; 128 and the signal's number if it was killed."""
        self.part = part
        """Its name: `trainer 0`, `server 1`."""
        self.result: ClusterResult | None = None
        """How each part has ended; None before that is known."""


def plan_parts(job: ClusterJob, machines: tuple[Machine, ...]) -> tuple[Part, ...]:
    """Returns all servers, then all trainers; numbers run through the machines in order."""
    parts = []
    counts: tuple[tuple[Role, int], ...] = (("server", job.num_servers), ("trainer", job.num_trainers))
    for role, count in counts:
        for machine in machines:
            for local_index in range(count):
                index = machine.machine_id * count + local_index
                parts.append(Part(role=role, index=index, machine=machine, local_index=local_index))
    return tuple(parts)


def part_variables(job: ClusterJob, part: Part, num_machines: int, *, threads: int, master: str) -> dict[str, str]:
    """Returns the variables that a part needs, those of its machine aside.

    Args:
        job: The job.
        part: One of its parts.
        num_machines: Of the job.
        threads: Of each trainer on the part's host.
        master: `address:port` where rank 0 has its store.
    """
    variables = {
        "PYTHONUNBUFFERED": "1",
        "DGL_DIST_MODE": "distributed",
        "DGL_CONF_PATH": str(job.folder / job.part_config),
        "DGL_NUM_SERVER": str(job.num_servers),
        "DGL_NUM_CLIENT": str(num_machines * job.num_trainers * (1 + job.num_samplers)),
        "DGL_NUM_SAMPLER": str(job.num_samplers),
        "DGL_GRAPH_FORMAT": job.graph_format,
    }
    if job.ip_config is not None:
        variables["DGL_IP_CONFIG"] = str(job.folder / job.ip_config)
    if part.role == "server":
        variables |= {"DGL_ROLE": "server", "DGL_SERVER_ID": str(part.index), "OMP_NUM_THREADS": "1"}
    else:
        address, _, port = master.rpartition(":")
        variables |= {
            "DGL_ROLE": "client",
            "DGL_GROUP_ID": "0",
            "OMP_NUM_THREADS": str(threads),
            "RANK": str(part.index),
            "WORLD_SIZE": str(num_machines * job.num_trainers),
            "LOCAL_RANK": str(part.local_index),
            "LOCAL_WORLD_SIZE": str(job.num_trainers),
            "GROUP_RANK": str(part.machine.machine_id),
            "GROUP_WORLD_SIZE": str(num_machines),
            "MASTER_ADDR": address,
            "MASTER_PORT": port,
        }
    return {**variables, **job.environment}
