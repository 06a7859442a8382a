# SPDX-License-Identifier: Apache-2.0
"""A DistDGL job on one machine: starts its servers and trainers, relays what they write, ends them together.

Run as `python -m dgl_hybrid.launch.agent`, on the controller's host or through a remote shell; takes orders on stdin
and reports on stdout (`launch.messages`). Its parts end with it, whatever ends it: the order to do so, the loss of the
controller, a signal, or SIGKILL (`launch.watch`).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from dgl_hybrid.errors import LaunchError, PartitionError
from dgl_hybrid.launch import startup_hook
from dgl_hybrid.launch.leftovers import (
    LONGEST_FOLDER_BYTES,
    SHM_VARIABLE,
    find_processes,
    find_shared_memory,
    is_resource_tracker,
    remove_everything,
    send_signal,
    temporary_folder,
)
from dgl_hybrid.launch.machines import (
    find_free_ports,
    find_interface,
    ip_config_text,
    read_ip_config,
    why_port_unusable,
)
from dgl_hybrid.launch.messages import (
    Cleaned,
    End,
    Exited,
    Line,
    LineSplitter,
    Listening,
    Message,
    Ping,
    Prepare,
    Ready,
    Refused,
    StartPart,
    decode,
    encode,
)
from dgl_hybrid.launch.watch import Watch
from dgl_hybrid.partition.manifest import MANIFEST_NAME, partition_digest
from dgl_hybrid.partition.verify import find_problems_of_plain_part, verify_partition

TURN_S = 0.05
LOOK_S = 0.25
"""Between looks at who listens: the kernel writes a table of all sockets of the host for each, 10 ms where there are a
thousand, and servers need seconds to import DGL."""
WATCH_TIMEOUT_S = 20.0
LONGEST_LINE = 2**16

# What a launcher around this one may have set: of no meaning, or a wrong one, for the job's own processes.
_FOREIGN = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("DGL_ROLE", "DGL_SERVER_ID", "DGL_NUM_CLIENT", "DGL_NUM_SAMPLER", "DGL_GROUP_ID"),
)
_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


class _ControllerGone(Exception):
    """Nobody listens any more; says how that was noticed."""


@dataclass(slots=True)
class _RunningPart:
    """A server or trainer that was started."""

    name: str
    process: subprocess.Popen[bytes]
    splitters: dict[IO[bytes], tuple[bool, LineSplitter]] = field(default_factory=dict)
    """Its pipes that are open -> (is it stderr, the rest of the last line)."""


class Agent:
    """One machine of a job."""

    def __init__(self) -> None:
        self._parent = os.getppid()
        self._orders = LineSplitter()
        self._heard: deque[bytes] = deque()
        self._selector = selectors.DefaultSelector()
        self._parts: dict[int, _RunningPart] = {}
        self._silent_ports: dict[str, int] = {}
        self._next_look_s = 0.0
        self._last_heard = time.monotonic()
        self._prepared: Prepare | None = None
        self._watch: Watch | None = None
        self._is_ending = False
        self._is_alone = False
        self._exit_code = 0

    def run(self) -> int:
        """Serves until there is nothing left to do, then cleans up; returns the exit code."""
        # Left blocking: a remote shell may have given one socket for both directions, and writing must wait. It is read
        # from only when there is something.
        self._selector.register(0, selectors.EVENT_READ)
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: the controller gets it as well, and decides
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # what a dead part leaves behind is reaped here
        try:
            while not self._is_ending:
                self._turn()
        except _ControllerGone as error:
            self._is_alone = True
            with contextlib.suppress(OSError):
                os.write(2, f"the controller was lost ({error}): all parts are ended\n".encode())
        self._end()
        return 1 if self._is_alone else self._exit_code

    def _on_signal(self, number: int, frame: object) -> None:
        self._is_ending = True
        self._exit_code = 128 + number

    def _turn(self, timeout_s: float = TURN_S) -> None:
        for key, _ in self._selector.select(timeout_s):
            if key.fd == 0:
                self._hear()
            else:
                self._relay(key.data, key.fileobj)  # type: ignore[arg-type]
        self._obey()
        self._find_listening()
        self._reap()
        self._check_controller()

    def _say(self, *messages: Message) -> None:
        if self._is_alone:
            return
        data = memoryview(b"".join(map(encode, messages)))
        try:
            while data:
                # A remote shell that has lost its connection stops reading long before the system gives that up.
                if select.select([], [1], [], TURN_S)[1]:
                    data = data[os.write(1, data[: select.PIPE_BUF]) :]
                else:
                    if select.select([0], [], [], 0)[0]:
                        self._hear()
                    self._check_controller()
        except OSError as error:
            raise _ControllerGone("it does not read what is sent") from error

    def _hear(self) -> None:
        data = os.read(0, 65536)
        if not data:
            raise _ControllerGone("it has closed the connection")
        self._last_heard = time.monotonic()
        self._heard.extend(self._orders.feed(data))

    def _obey(self) -> None:
        """Carries out what was heard; more may be heard meanwhile."""
        while self._heard:
            match decode(self._heard.popleft()):
                case Prepare() as order:
                    self._prepare(order)
                case StartPart() as order:
                    self._start(order)
                case End():
                    self._is_ending = True
                case Ping() | None:
                    pass
                case other:
                    raise AssertionError(f"agents do not receive {type(other).__name__}")

    def _check_controller(self) -> None:
        if os.getppid() != self._parent:
            raise _ControllerGone("the process that has started this one is gone")
        timeout_s = self._prepared.silence_timeout_s if self._prepared else None
        if timeout_s is None or time.monotonic() - self._last_heard <= timeout_s:
            return
        # This process may have waited itself, for somebody to read what parts have written.
        if not select.select([0], [], [], 0)[0]:
            raise _ControllerGone(f"nothing was heard of it for {timeout_s:g} s")

    def _prepare(self, order: Prepare) -> None:
        self._prepared = order
        problems = find_problems(order)
        if problems:
            self._say(Refused(problems=problems))
            return
        folder = temporary_folder(order.shm_prefix)
        folder.mkdir(mode=0o700)
        self._watch = Watch(order.shm_prefix)
        environment = {
            "DGL_HYBRID_MACHINE_ID": str(order.machine_id),
            SHM_VARIABLE: order.shm_prefix,
            "TMPDIR": str(folder),
        }
        interface = find_interface(order.address)
        for name in ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
            if interface is not None and name not in os.environ:
                environment[name] = interface
        if order.ip_config is None:
            file = folder / "ip_config.txt"
            file.write_text(order.ip_config_text, encoding="utf-8")
            environment["DGL_IP_CONFIG"] = str(file)
        self._say(
            Ready(
                cores=len(os.sched_getaffinity(0)),
                host=_boot_id(),
                free_port=find_free_ports(order.address, avoid={*order.server_ports.values(), *order.foreign_ports}),
                environment=environment,
                partition=_digest_of_partition(Path(order.part_config)),
            )
        )

    def _start(self, order: StartPart) -> None:
        assert self._prepared is not None
        prepared = self._prepared
        agent = os.getpid()

        def die_with_agent() -> None:
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != agent:
                os._exit(1)

        try:
            process = subprocess.Popen(
                [prepared.python, *prepared.command],
                cwd=prepared.workspace,
                env=part_environment(os.environ, order.environment),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                preexec_fn=die_with_agent,
            )
        except OSError as error:
            self._say(Line(part=order.name, is_error=True, text=f"{prepared.python}: {error.strerror}"))
            self._say(Exited(part=order.name, code=127))
            return
        part = _RunningPart(order.name, process)
        for stream, is_error in ((process.stdout, False), (process.stderr, True)):
            assert stream is not None
            os.set_blocking(stream.fileno(), False)
            part.splitters[stream] = (is_error, LineSplitter(LONGEST_LINE))
            self._selector.register(stream, selectors.EVENT_READ, part)
        self._parts[process.pid] = part
        if order.name in prepared.server_ports:
            self._silent_ports[order.name] = prepared.server_ports[order.name]

    def _relay(self, part: _RunningPart, stream: IO[bytes]) -> None:
        """Sends on what a part has written, until there is no more for now."""
        is_error, splitter = part.splitters[stream]
        lines: list[bytes] = []
        is_open = True
        while is_open:
            try:
                data = os.read(stream.fileno(), 65536)
            except BlockingIOError:
                break
            is_open = bool(data)
            lines += splitter.feed(data)
            if len(lines) > 1000:
                break
        if not is_open:
            lines += splitter.flush()
            self._selector.unregister(stream)
            stream.close()
            del part.splitters[stream]
        self._say(*(_line(part, line, is_error=is_error) for line in lines))

    def _find_listening(self) -> None:
        now_s = time.monotonic()
        if not self._silent_ports or now_s < self._next_look_s:
            return
        self._next_look_s = now_s + LOOK_S
        listening = listening_ports()
        for name, port in list(self._silent_ports.items()):
            if port in listening:
                del self._silent_ports[name]
                self._say(Listening(part=name))

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if self._watch is not None and pid == self._watch.pid:
                if self._is_ending or self._is_alone:
                    self._watch = None
                else:
                    self._watch.restart()
            elif pid in self._parts:
                self._report_exit(pid, os.waitstatus_to_exitcode(status))

    def _report_exit(self, pid: int, code: int) -> None:
        part = self._parts.pop(pid)
        part.process.returncode = code  # it is reaped: Popen must not look for it
        for stream in list(part.splitters):
            self._relay(part, stream)
            # What a part has started may hold its pipes open; it ends soon, or writes on.
            if stream in part.splitters:
                is_error, splitter = part.splitters[stream]
                self._say(*(_line(part, line, is_error=is_error) for line in splitter.flush()))
        self._silent_ports.pop(part.name, None)
        self._say(Exited(part=part.name, code=code))

    def _end(self) -> None:
        """Asks all processes to end, has the watch kill the rest and clean up, and reports what became of them."""
        self._is_ending = True
        if self._prepared is not None and self._watch is not None:
            prefix = self._prepared.shm_prefix
            processes = find_processes(prefix)
            shared_memory = find_shared_memory(processes)
            # Resource trackers end by themselves, after what they look after. One that has just been started would die.
            send_signal([one for one in processes if not is_resource_tracker(one)], signal.SIGTERM)
            deadline = time.monotonic() + self._prepared.grace_s
            while self._parts and time.monotonic() < deadline:
                self._turn_at_end()
            self._clean(shared_memory | find_shared_memory(find_processes(prefix)))
            deadline = time.monotonic() + WATCH_TIMEOUT_S
            while self._watch is not None and time.monotonic() < deadline:
                self._turn_at_end()
        with contextlib.suppress(_ControllerGone):
            self._say(Cleaned())

    def _clean(self, shared_memory: set[str]) -> None:
        assert self._prepared is not None
        if self._watch is None:  # it was killed meanwhile
            remove_everything(self._prepared.shm_prefix, shared_memory)
        else:
            self._watch.clean(shared_memory)

    def _turn_at_end(self) -> None:
        try:
            for key, _ in self._selector.select(TURN_S / 2):
                if key.fd == 0:
                    self._selector.unregister(0)  # more orders change nothing
                else:
                    self._relay(key.data, key.fileobj)  # type: ignore[arg-type]
            self._reap()
        except _ControllerGone:
            self._is_alone = True


def _line(part: _RunningPart, line: bytes, *, is_error: bool) -> Line:
    # Of a progress bar, which is written over and over, where it ended: all of it would be hundreds of lines in one.
    last = line.rstrip(b"\r").rpartition(b"\r")[2]
    return Line(part=part.name, is_error=is_error, text=last.decode("utf-8", errors="replace"))


def find_problems(order: Prepare) -> list[str]:
    """Returns what keeps this machine's parts from running, before any is started."""
    problems = []
    workspace = Path(order.workspace)
    if not workspace.is_dir():
        return [f"the workspace {workspace} does not exist. Give the folder in which the script runs on every host."]
    if shutil.which(order.python) is None:
        problems.append(f"the interpreter {order.python} does not exist or cannot be run")
    elif (order.needs_plugin or order.needs_fixes) and not _loads_plugin(order.python, workspace):
        if order.needs_fixes:
            consequence, remedy = "machines of this job on one host would overwrite each other's graphs (fix 0011)", ""
        else:
            consequence, remedy = "parts would run without the plugin", "; --strategy off needs none"
        problems.append(
            f"the startup hook dgl_hybrid_startup.pth is not at work in {order.python}, or that did not answer, so "
            f"{consequence}. Install dgl_hybrid there with pip (not by PYTHONPATH){remedy}"
        )
    folder = temporary_folder(order.shm_prefix)
    if order.num_samplers and len(os.fsencode(folder)) > LONGEST_FOLDER_BYTES:
        problems.append(
            f"samplers cannot make their sockets in {folder}, whose name is longer than {LONGEST_FOLDER_BYTES} bytes: "
            "set TMPDIR to a folder with a shorter one"
        )
    script = order.command[0]
    if not script.startswith("-") and not (workspace / script).exists():
        problems.append(f"the script {workspace / script} does not exist. A relative path is one in the workspace.")
    problems += _problems_of_part(Path(order.part_config), order.machine_id)
    if order.ip_config is not None:
        problems += _problems_of_addresses(Path(order.ip_config), order.ip_config_text)
    for name, port in order.server_ports.items():
        reason = why_port_unusable(order.address, port)
        if reason is not None:
            problems.append(f"{name} cannot listen: {reason}. End what uses it, or change ip_config.")
    return problems


def _loads_plugin(python: str, workspace: Path) -> bool:
    if python == sys.executable:
        return startup_hook.is_at_work()
    with contextlib.suppress(OSError):
        return startup_hook.is_at_work_in(python, workspace)
    return False


def _problems_of_addresses(ip_config: Path, expected: str) -> list[str]:
    """Compares this host's file with that of the controller: servers would listen, and trainers ask, elsewhere."""
    wanted = expected.splitlines()
    try:
        found = ip_config_text(read_ip_config(ip_config, len(wanted))).splitlines()
    except LaunchError as error:
        return [str(error)]
    for machine_id, (here, there) in enumerate(zip(found, wanted, strict=True)):
        if here != there:
            return [
                f"{ip_config} says {here} of machine {machine_id} here, and {there} where the job was started. Copy "
                "that file to all hosts."
            ]
    return []


def _problems_of_part(part_config: Path, part_id: int) -> list[str]:
    """Looks for this machine's files of the partition: servers end in the midst of DGL's C++ where one is cut short."""
    if not part_config.is_file():
        return [f"the partition config {part_config} does not exist"]
    if not (part_config.parent / MANIFEST_NAME).is_file():
        return find_problems_of_plain_part(part_config, part_id)
    try:
        verify_partition(part_config, part_id, checksums=False)
    except PartitionError as error:
        return [str(error)]
    return []


def _digest_of_partition(part_config: Path) -> str | None:
    has_manifest = (part_config.parent / MANIFEST_NAME).is_file()
    return partition_digest(part_config) if has_manifest else None


def part_environment(inherited: Mapping[str, str], given: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of a part: this agent's, less what another launcher may have left, and what is given."""
    kept = {
        name: value
        for name, value in inherited.items()
        if name not in _FOREIGN and not name.startswith("TORCHELASTIC_")
    }
    return {**kept, **given}


def listening_ports() -> set[int]:
    """Returns the TCP ports on which this network namespace listens; nobody is disturbed by a connection."""
    ports = set()
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A":  # TCP_LISTEN
                    ports.add(int(fields[1].rpartition(":")[2], 16))
    return ports


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _prctl(option: int, value: int) -> None:
    _LIBC.prctl(option, value, 0, 0, 0)


def main() -> int:
    """Runs an agent; returns its exit code."""
    if not Path("/proc/self/environ").exists():
        sys.stderr.write("dgl_hybrid.launch.agent: DistDGL jobs need Linux with /proc\n")
        return 1
    try:
        return Agent().run()
    except (LaunchError, OSError) as error:
        sys.stderr.write(f"dgl_hybrid.launch.agent: {error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
