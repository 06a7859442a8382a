# SPDX-License-Identifier: Apache-2.0
"""The ranks of one system, seen from the starting process: starts them, gives orders, ends them whatever happens."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from benchmarks.emulated_network import INTERFACE, EmulatedNetwork
from benchmarks.systems.job import Job, socket_address
from dgl_hybrid.errors import LaunchError
from dgl_hybrid.launch.cluster import ClusterFailure, ClusterJob, PartLine, run_cluster
from dgl_hybrid.ops.cpu.memory import KEEPING_ENVIRONMENT
from dgl_hybrid.sampling.config import ENABLE_VARIABLE

ROOT = Path(__file__).resolve().parents[2]
Allocator = Literal["keep", "mapped", "default"]
ALLOCATORS: dict[str, dict[str, str]] = {
    # glibc maps large blocks anew each time and hands them back when freed: every epoch then pays for its page faults.
    # Huge pages, which a `FullGraphLoader` asks for by itself, are asked for by glibc here.
    "keep": KEEPING_ENVIRONMENT,
    # Every large tensor is mapped by itself and goes back when it is freed: memory that is resident is in use.
    "mapped": {"MALLOC_MMAP_THRESHOLD_": str(2**20)},
    "default": {},
}
"""Settings of glibc's malloc, the same for every system."""
_FOREIGN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "DGL_ROLE", ENABLE_VARIABLE)
_SERVER_PORT = 30050
_FIRST_PORT = 29600
START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 30.0


class SystemFailure(RuntimeError):
    """A system did not do what was ordered; all its processes have been ended, or will be by `end`."""

    def __init__(self, message: str, details: str = "", *, has_died: bool = False) -> None:
        super().__init__(message)
        self.details = details
        self.has_died = has_died
        """One of its processes has ended, and has told of no error."""


@dataclass(kw_only=True)
class Team:
    """All ranks of one system."""

    job: Job
    folder: Path
    """Of this team alone."""
    network: EmulatedNetwork | None = None
    """One host for each rank; None: all on the loopback interface."""
    port: int = _FIRST_PORT
    """Where rank 0 has its store, in its network namespace; other teams of the same hosts have others."""
    allocator: str = "keep"
    is_cluster: bool = False
    """Whether it needs DistDGL's servers."""
    _processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    _lines: dict[int, socket.socket] = field(default_factory=dict)
    _buffers: dict[int, bytearray] = field(default_factory=dict)
    _cluster: threading.Thread | None = None
    _cluster_error: LaunchError | None = None
    _has_failed: bool = False

    # ---------------------------------------------------------------- life

    def start(self, *, timeout_s: float = START_TIMEOUT_S) -> None:
        """Starts all processes and waits until they have joined each other.

        Raises:
            SystemFailure: One ended or did not come.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        path = str(self.folder / "orders")
        self.job = replace(self.job, socket=path, interface="lo" if self.network is None else INTERFACE)
        with socket.socket(socket.AF_UNIX) as server:
            with socket_address(path) as address:
                server.bind(address)
            server.listen(self.job.world_size)
            server.settimeout(0.2)
            if self.is_cluster:
                self._start_cluster(timeout_s)
            else:
                self._start_ranks()
            deadline = time.monotonic() + timeout_s
            while len(self._lines) < self.job.world_size:
                with contextlib.suppress(TimeoutError):
                    connection, _ = server.accept()
                    connection.settimeout(10.0)
                    rank = int(json.loads(connection.makefile("rb", buffering=0).readline())["rank"])
                    self._lines[rank], self._buffers[rank] = connection, bytearray()
                self._check_alive("while it started")
                if time.monotonic() > deadline:
                    raise SystemFailure(f"not all ranks had started after {timeout_s:g} s", self._last_words())

    def _environment(self) -> dict[str, str]:
        threads = str(self.job.threads)
        names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")
        return dict.fromkeys(names, threads) | ALLOCATORS[self.allocator]

    def _command(self) -> tuple[str, ...]:
        return ("-m", "benchmarks.systems.worker", self.job.to_json())

    def _start_ranks(self) -> None:
        address = "127.0.0.1" if self.network is None else self.network.hosts[0].address
        port = _find_free_port() if self.network is None else self.port
        inherited = {name: value for name, value in os.environ.items() if name not in _FOREIGN}
        for rank in range(self.job.world_size):
            prefix = () if self.network is None else self.network.hosts[rank].prefix
            environment = {
                **inherited,
                **self._environment(),
                "RANK": str(rank),
                "WORLD_SIZE": str(self.job.world_size),
                "LOCAL_RANK": "0",
                "MASTER_ADDR": address,
                "MASTER_PORT": str(port),
                "GLOO_SOCKET_IFNAME": self.job.interface,
                "TP_SOCKET_IFNAME": self.job.interface,
            }
            with (self.folder / f"rank{rank}.log").open("wb") as log:
                process = subprocess.Popen(
                    [*prefix, sys.executable, *self._command()],
                    cwd=ROOT,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C is for this process, which then ends the ranks
                )
            self._processes.append(process)

    def _start_cluster(self, timeout_s: float) -> None:
        job = ClusterJob(
            part_config=Path(self.job.part_config),
            command=self._command(),
            workspace=ROOT,
            threads=self.job.threads,
            environment={**self._environment(), ENABLE_VARIABLE: "0"},  # the caller's may have it on
            start_timeout_s=timeout_s,
        )
        if self.network is not None:
            ip_config = self.folder / "ip_config.txt"
            ip_config.write_text("".join(f"{host.address} {_SERVER_PORT}\n" for host in self.network.hosts), "utf-8")
            job = replace(job, ip_config=ip_config, machine_prefixes=tuple(host.prefix for host in self.network.hosts))
        log = (self.folder / "cluster.log").open("w", encoding="utf-8")

        def note(line: PartLine) -> None:
            log.write(f"[{line.part.name}] {line.text}\n")
            log.flush()

        def run() -> None:
            with log:
                try:
                    run_cluster(job, on_line=note)
                except LaunchError as error:
                    self._cluster_error = error

        self._cluster = threading.Thread(target=run, name=f"cluster of {self.job.system}")
        self._cluster.start()

    def end(self) -> None:
        """Asks the ranks to leave, ends those that do not, and waits until nothing is left."""
        deadline = time.monotonic() + STOP_TIMEOUT_S
        with contextlib.suppress(SystemFailure):
            if len(self._lines) == self.job.world_size and not self._has_failed:
                self.ask("stop", timeout_s=STOP_TIMEOUT_S)
        for line in self._lines.values():
            line.close()  # a rank that still waits for something ends now
        self._lines.clear()
        for process in self._processes:
            try:
                process.wait(timeout=max(1.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes.clear()
        if self._cluster is not None:
            self._cluster.join()
            self._cluster = None

    # ---------------------------------------------------------------- orders

    def ask(self, order: str, *, timeout_s: float, **arguments: Any) -> list[Any]:
        """Gives all ranks an order and returns their answers, by rank.

        Raises:
            SystemFailure: A rank failed or died, or not all had answered in time.
        """
        try:
            return self._ask(order, timeout_s, arguments)
        except SystemFailure:
            self._has_failed = True
            raise

    def _ask(self, order: str, timeout_s: float, arguments: dict[str, Any]) -> list[Any]:
        message = json.dumps({"do": order, "arguments": arguments}).encode() + b"\n"
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            for rank, line in self._lines.items():
                selector.register(line, selectors.EVENT_READ, rank)
                with contextlib.suppress(OSError):  # it has died: found out below
                    line.sendall(message)
            while len(answers) < self.job.world_size:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise SystemFailure(f"timed out: {order} was not done after {timeout_s:g} s", self._last_words())
                for key, _ in selector.select(min(left_s, 1.0)):
                    self._receive(key.data, order, answers)
        return [answers[rank] for rank in sorted(answers)]

    def _receive(self, rank: int, order: str, answers: dict[int, Any]) -> None:
        data = b""
        with contextlib.suppress(OSError):
            data = self._lines[rank].recv(2**20)
        buffer = self._buffers[rank]
        if not data:
            time.sleep(0.5)  # let it write its last words
            message = f"rank {rank} of {self.job.world_size} died during {order}"
            raise SystemFailure(message, self._last_words(), has_died=True)
        buffer += data
        if not buffer.endswith(b"\n"):
            return
        message = json.loads(buffer)
        buffer.clear()
        if "error" in message:
            raise SystemFailure(
                f"rank {rank} of {self.job.world_size}, {order}: {message['error']}", message["traceback"]
            )
        answers[rank] = message["answer"]

    def _check_alive(self, when: str) -> None:
        for rank, process in enumerate(self._processes):
            if process.poll() is not None:
                raise SystemFailure(
                    f"rank {rank} of {self.job.world_size} ended {when} (exit code {process.returncode})",
                    self._last_words(),
                    has_died=True,
                )
        if self._cluster is not None and not self._cluster.is_alive():
            error = self._cluster_error
            details = error.details if isinstance(error, ClusterFailure) else ""
            message = str(error or f"DistDGL's job ended {when}")
            raise SystemFailure(message, details or self._last_words(), has_died=True)

    def _last_words(self) -> str:
        words = []
        for log in sorted(self.folder.glob("*.log")):
            with contextlib.suppress(OSError):
                lines = log.read_text("utf-8", errors="replace").splitlines()[-15:]
                words += [f"{log.stem}: {line}" for line in lines]
        return "\n".join(words)


def _find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
