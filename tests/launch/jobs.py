# SPDX-License-Identifier: Apache-2.0
"""Jobs for these tests, and what must not be left of one."""

from __future__ import annotations

import json
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from dgl_hybrid.launch.cluster import ClusterJob, ClusterResult, PartLine, run_cluster
from dgl_hybrid.launch.leftovers import SHM_FOLDER, find_processes, find_shared_memory
from dgl_hybrid.launch.machines import write_ip_config

SCRIPTS = Path(__file__).with_name("scripts")
FAKE = str(SCRIPTS / "fake_part.py")
END_WITHIN_S = 20.0
"""What is promised of a job one of whose parts has died."""


def fake_job(
    folder: Path, plan: dict[str, list[list[Any]]] | None = None, *, parts: int = 2, **options: Any
) -> ClusterJob:
    """A job whose parts do what `plan` says and need no DGL."""
    (folder / "graph.json").write_text(json.dumps({"num_parts": parts}))
    options.setdefault("ip_config", write_ip_config(folder / "ip_config.txt", parts, num_servers=2))
    options.setdefault("timeout_s", 300.0)
    return ClusterJob(
        part_config=Path("graph.json"),
        command=(FAKE, json.dumps(plan or {})),
        workspace=folder,
        **options,
    )


@dataclass
class Observer:
    """Hears all parts, notes what they hold, and may act when a line comes."""

    act: Callable[[str, str], None] | None = None
    """Called with a part's name and a line."""
    lines: list[tuple[str, str]] = field(default_factory=list)
    pids: dict[str, int] = field(default_factory=dict)
    children: list[int] = field(default_factory=list)
    prefixes: set[str] = field(default_factory=set)
    processes: set[psutil.Process] = field(default_factory=set)
    others: set[psutil.Process] = field(default_factory=lambda: set(psutil.Process().children(recursive=True)))
    """Children of this process from before the job: ranks that other tests share."""
    shared_memory: set[str] = field(default_factory=set)
    acted_s: float | None = None

    def __call__(self, line: PartLine) -> None:
        self.hear(line.part.name, line.text)

    def hear(self, name: str, text: str) -> None:
        self.lines.append((name, text))
        words = text.split()
        if words[:1] == ["pid"]:
            self.pids[name] = int(words[1])
            self.prefixes.add(words[2])
        elif words[:1] == ["child"]:
            self.children.append(int(words[1]))
        if self.act is not None:
            self.act(name, text)

    def note(self, launcher: int | None = None) -> None:
        """Remembers the job's processes and their shared memory, before something is killed."""
        self.acted_s = time.monotonic()
        self.processes |= set(psutil.Process(launcher).children(recursive=True)) - self.others
        for prefix in sorted(self.prefixes):
            processes = find_processes(prefix)
            self.processes |= {psutil.Process(process) for process in processes}
            self.shared_memory |= find_shared_memory(processes)

    def agents(self) -> dict[int, int]:
        """Machine -> its agent, which is the parent of its parts."""
        return {
            int(prefix.split("_")[-2]): psutil.Process(pid).ppid()
            for name, pid in self.pids.items()
            for prefix in self.prefixes
            if psutil.Process(pid).environ()["DGL_HYBRID_SHM_PREFIX"] == prefix
        }

    def assert_nothing_left(self, ip_config: Path | None = None) -> None:
        assert [process for process in self.processes if is_alive(process.pid)] == []
        assert [pid for pid in self.children if is_alive(pid)] == []
        assert self.prefixes, "no part was heard: nothing is known"
        for prefix in sorted(self.prefixes):
            assert find_processes(prefix) == []
            assert list(SHM_FOLDER.glob(f"*{prefix}*")) == []
            assert list(Path(tempfile.gettempdir()).glob(f"{prefix}*")) == []
        assert [name for name in self.shared_memory if (SHM_FOLDER / name).exists()] == []
        if ip_config is not None:
            for line in ip_config.read_text().splitlines():
                address, port = line.split()
                with socket.socket() as sock:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    sock.bind((address, int(port)))


def is_alive(pid: int) -> bool:
    """Zombies are not: orphans become the system's, which may take its time to collect them."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def run_observed(job: ClusterJob, act: Callable[[str, str], None] | None = None) -> tuple[ClusterResult, Observer]:
    observer = Observer(act)
    return run_cluster(job, on_line=observer, verbose=True), observer


def driver_command(job: ClusterJob, *, at_first_line: str = "pass") -> list[str]:
    """A process of its own that runs the job and prints every line of it: a launcher that can be killed."""
    code = f"""
import json, os, sys, time
from pathlib import Path
from dgl_hybrid.launch import cluster
seen = []
def show(line):
    if not seen:
        seen.append(line)
        {at_first_line}
    print(line.part.name, line.text, sep="|", flush=True)
try:
    cluster.run_cluster(cluster.ClusterJob(**{{k: Path(v) if k in ("part_config", "workspace", "ip_config") else v
        for k, v in json.loads(sys.argv[1]).items()}}), on_line=show, verbose=True)
except cluster.ClusterFailure as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
"""
    fields = {name: _plain(getattr(job, name)) for name in job.__slots__ if getattr(job, name) is not None}
    return [sys.executable, "-c", code, json.dumps(fields)]


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value
