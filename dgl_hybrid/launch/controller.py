# SPDX-License-Identifier: Apache-2.0
"""Holds a DistDGL job together: starts an agent per machine, follows all parts, ends everything when one dies."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import select
import selectors
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import IO

from dgl_hybrid.errors import LaunchError
from dgl_hybrid.launch.cluster_job import (
    ClusterFailure,
    ClusterJob,
    ClusterResult,
    Part,
    PartLine,
    PartResult,
    part_variables,
)
from dgl_hybrid.launch.leftovers import remove_everything
from dgl_hybrid.launch.machines import Machine, ip_config_text, is_local_address
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
from dgl_hybrid.sampling.config import ENABLE_VARIABLE, OFF_WORDS

logger = logging.getLogger(__name__)

TURN_S = 0.05
AGENT_TIMEOUT_S = 60.0
"""Until an agent on another host has answered."""
SETTLE_S = 0.4
"""After the first death: what dies with it may have been reported first."""
CAUSE_TIMEOUT_S = 3.0
"""After a death that only follows from another one, for that other one: a failed part takes its time to end."""
NEVER_SERVED_S = 3.0
"""After a server has ended without having served, for trainers to end as well (a script that prints its --help)."""
LINGER_S = 10.0
"""For servers, after all trainers have ended: DGL ends them."""
CLEAN_TIMEOUT_S = 12.0
"""For an agent to clean up, beyond the grace between SIGTERM and SIGKILL."""
PING_EVERY_S = 5.0
SILENCE_TIMEOUT_S = 60.0
WAITING_NOTE_S = 60.0
NUM_LINES_KEPT = 200
NUM_LINES_SHOWN = 20

_LOST_PEER = re.compile(
    r"gloo|NCCL|tensorpipe|socket_communicator|Connection (closed|reset|refused)|Broken pipe"
    r"|Dist(Connect|Network)Error|EOFError|ExchangeError: .* did not complete on rank",
    re.IGNORECASE,
)
_NOISE_AT_END = re.compile(
    r"User pressed Ctrl\+C, Exiting|/rpc\.cc:\d+: ?$|^terminate called without an active exception$"
)
"""What DGL writes when it is sent SIGTERM."""
_NOISE = re.compile(
    r"resource_tracker: There appear to be \d+ leaked|^ *warnings\.warn\('resource_tracker: There appear"
)
"""What `multiprocessing` writes about parts that died. It removes what they leave, and so do we."""


@dataclass(slots=True)
class _Agent:
    """The controller's side of one machine."""

    machine: Machine
    process: subprocess.Popen[bytes]
    is_remote: bool
    splitter: LineSplitter = field(default_factory=LineSplitter)
    error_splitter: LineSplitter = field(default_factory=LineSplitter)
    noise: deque[str] = field(default_factory=lambda: deque(maxlen=NUM_LINES_SHOWN))
    """What came that is not a message: the remote shell's complaints."""
    ready: Ready | None = None
    is_cleaned: bool = False
    num_open: int = 2
    """Of its stdout and stderr."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Of its stdin."""


@dataclass(slots=True)
class _State:
    """What is known of a part."""

    part: Part
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=NUM_LINES_KEPT))
    has_listened: bool = False
    exit_code: int | None = None
    ended_s: float = 0.0
    was_ended: bool = False
    """By us, with the job: its exit code says nothing of it."""


class Controller:
    """Runs one job."""

    def __init__(
        self,
        job: ClusterJob,
        machines: tuple[Machine, ...],
        parts: tuple[Part, ...],
        on_line: Callable[[PartLine], None],
        *,
        verbose: bool = False,
    ) -> None:
        self._job = job
        self._machines = machines
        self._states = {part.name: _State(part) for part in parts}
        self._on_line = on_line
        self._verbose = verbose
        self._job_id = secrets.token_hex(4)
        self._selector = selectors.DefaultSelector()
        self._agents: list[_Agent] = []
        self._refusals: list[str] = []
        self._deaths: list[_State] = []
        """In the order in which they were heard of."""
        self._is_ending = False
        self._begun_s = 0.0
        self._started_s = 0.0
        """When the parts were started, which agents are before."""
        self._has_ended = threading.Event()
        self._pings = threading.Thread(target=self._ping, daemon=True, name="pings")

    def run(self) -> ClusterResult:
        """Runs the job to its end.

        Raises:
            ClusterFailure: It has not ended well; `result` says how each part has.
        """
        self._begun_s = time.monotonic()
        try:
            try:
                self._start_agents()
                self._start_parts()
                self._follow()
            finally:
                self._end_agents()
        except ClusterFailure as error:
            error.result = self._result(error.exit_code)
            raise
        return self._result(0)

    def _result(self, exit_code: int) -> ClusterResult:
        return ClusterResult(
            parts=tuple(
                PartResult(
                    part=state.part,
                    exit_code=None if state.was_ended or state.exit_code is None else _exit_code(state.exit_code),
                    elapsed_s=max(state.ended_s - self._started_s, 0.0),
                    last_lines=tuple(state.lines),
                )
                for state in self._states.values()
            ),
            elapsed_s=time.monotonic() - self._begun_s,
            exit_code=exit_code,
        )

    # Beginning

    def _start_agents(self) -> None:
        prefixes = self._job.machine_prefixes
        for machine in self._machines:
            is_remote = not prefixes and not is_local_address(machine.address)
            prefix = prefixes[machine.machine_id] if prefixes else ()
            self._agents.append(self._start_agent(machine, prefix, is_remote=is_remote))
        self._pings.start()
        for agent in self._agents:
            self._send(agent, self._preparation(agent))
        deadline = time.monotonic() + AGENT_TIMEOUT_S
        while not all(agent.ready or self._refusals for agent in self._agents):
            self._turn()
            self._check_agents()
            silent = [agent for agent in self._agents if agent.ready is None]
            if not silent or self._refusals:
                continue
            if self._is_late():
                raise ClusterFailure(
                    f"the job did not end within {self._job.timeout_s:g} s; the agent of {silent[0].machine} has not "
                    f"answered",
                    details="\n".join(silent[0].noise),
                    exit_code=124,
                )
            if time.monotonic() > deadline:
                raise ClusterFailure(
                    f"the agent of {silent[0].machine} did not answer within {AGENT_TIMEOUT_S:g} s",
                    details="\n".join(silent[0].noise),
                )
        if self._refusals:
            self._settle(SETTLE_S)  # for those of other machines
            raise LaunchError(". ".join(self._refusals))
        self._check_partitions()

    def _check_partitions(self) -> None:
        """Refuses hosts whose folders are of different partitions: of equal sizes, they would train on a mixture."""
        known = [agent for agent in self._agents if agent.ready is not None and agent.ready.partition is not None]
        for agent in known[1:]:
            if agent.ready.partition != known[0].ready.partition:  # type: ignore[union-attr]
                raise LaunchError(
                    f"{agent.machine} has another partition in {self._job.part_config} than {known[0].machine}. Copy "
                    f"one partition folder to all hosts again."
                )

    def _start_agent(self, machine: Machine, prefix: Sequence[str], *, is_remote: bool) -> _Agent:
        # -P: what lies in the current folder must not pass for a module of Python's.
        words = ["-P", "-m", "dgl_hybrid.launch.agent"]
        if is_remote:
            command = [*self._job.remote_shell, machine.address, f"exec {shlex.join([self._job.interpreter, *words])}"]
        else:
            command = [*prefix, sys.executable, *words]
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,  # Ctrl-C is for this process, which then ends the job in order
            )
        except OSError as error:
            raise LaunchError(f"the agent of {machine} cannot be started: {command[0]}: {error.strerror}") from error
        agent = _Agent(machine, process, is_remote)
        for stream in (process.stdout, process.stderr):
            assert stream is not None
            os.set_blocking(stream.fileno(), False)
            self._selector.register(stream, selectors.EVENT_READ, agent)
        return agent

    def _preparation(self, agent: _Agent) -> Prepare:
        job, machine = self._job, agent.machine
        servers = [state.part for state in self._states.values() if state.part.role == "server"]
        return Prepare(
            machine_id=machine.machine_id,
            address=machine.address,
            server_ports={part.name: machine.port + part.local_index for part in servers if part.machine is machine},
            foreign_ports=[
                part.machine.port + part.local_index
                for part in servers
                if part.machine is not machine and part.machine.address == machine.address
            ],
            shm_prefix=self._shm_prefix(machine),
            python=job.interpreter,
            needs_plugin=job.environment.get(ENABLE_VARIABLE, "") not in ("", *OFF_WORDS),
            needs_fixes=self._shares_host(machine) and not job.runs_own_module,
            num_samplers=job.num_samplers,
            command=list(job.command),
            workspace=str(job.folder),
            part_config=str(job.folder / job.part_config),
            ip_config=None if job.ip_config is None else str(job.folder / job.ip_config),
            ip_config_text=ip_config_text(self._machines),
            grace_s=job.grace_s,
            silence_timeout_s=SILENCE_TIMEOUT_S if agent.is_remote else None,
        )

    def _shares_host(self, machine: Machine) -> bool:
        if self._job.machine_prefixes:
            return len(self._machines) > 1
        return any(other is not machine and other.address == machine.address for other in self._machines)

    def _shm_prefix(self, machine: Machine) -> str:
        return f"dgl_hybrid_{self._job_id}_{machine.machine_id}_"

    def _start_parts(self) -> None:
        first = self._agents[0]
        assert first.ready is not None
        master = f"{first.machine.address}:{first.ready.free_port}"
        machines_on = Counter(agent.ready.host for agent in self._agents if agent.ready)
        self._started_s = time.monotonic()
        for state in self._states.values():
            agent = self._agents[state.part.machine.machine_id]
            assert agent.ready is not None
            trainers = self._job.num_trainers * machines_on[agent.ready.host]
            threads = self._job.threads or max(1, agent.ready.cores // trainers)
            variables = part_variables(self._job, state.part, len(self._machines), threads=threads, master=master)
            self._send(agent, StartPart(name=state.part.name, environment={**agent.ready.environment, **variables}))

    # Middle

    def _is_late(self) -> bool:
        return self._job.timeout_s is not None and time.monotonic() - self._begun_s > self._job.timeout_s

    def _follow(self) -> None:
        """Returns when the job has ended well.

        Raises:
            ClusterFailure: It has not.
        """
        trainers = [state for state in self._states.values() if state.part.role == "trainer"]
        servers = [state for state in self._states.values() if state.part.role == "server"]
        trainers_ended_s: float | None = None
        next_note_s = self._started_s + WAITING_NOTE_S
        while any(state.exit_code is None for state in self._states.values()):
            self._turn()
            self._check_agents()
            now = time.monotonic()
            if self._deaths:
                self._settle(SETTLE_S)
                self._settle(CAUSE_TIMEOUT_S, until=lambda: not all(map(_is_consequence, self._deaths)))
                self._check_agents()
                raise self._explain_death()
            if all(state.exit_code == 0 for state in trainers):
                trainers_ended_s = trainers_ended_s or now
                if now - trainers_ended_s > LINGER_S:
                    lingering = [state.part.name for state in servers if state.exit_code is None]
                    logger.warning("all trainers have ended, %s have not: ended", ", ".join(lingering))
                    for state in servers:
                        state.ended_s = state.ended_s or now
                    return
            else:
                self._check_servers(servers, now)
            silent = [state for state in servers if not state.has_listened and state.exit_code is None]
            if silent and trainers_ended_s is None and now > next_note_s:
                next_note_s += WAITING_NOTE_S
                logger.warning("waiting for %s to listen (%.0f s)", silent[0].part, now - self._started_s)
            if self._is_late():
                running = [state.part.name for state in self._states.values() if state.exit_code is None]
                raise ClusterFailure(
                    f"the job did not end within {self._job.timeout_s:g} s; still running: {', '.join(running)}",
                    details=self._details(self._states[running[0]]),
                    exit_code=124,
                )
        if self._deaths:
            raise self._explain_death()

    def _check_servers(self, servers: Sequence[_State], now: float) -> None:
        """Finds servers without which trainers would wait for very long."""
        for state in servers:
            if state.exit_code == 0 and not state.has_listened and now - state.ended_s > NEVER_SERVED_S:
                raise ClusterFailure(
                    f"{state.part} ended with exit code 0 without having served. "
                    "Does the script call dgl.distributed.initialize?",
                    details=self._details(state),
                    part=state.part.name,
                )
            late = not state.has_listened and now - self._started_s > self._job.start_timeout_s
            if late and state.exit_code is None:
                port = state.part.machine.port + state.part.local_index
                raise ClusterFailure(
                    f"{state.part} does not listen on port {port} after {self._job.start_timeout_s:g} s. "
                    "Servers load their partition in dgl.distributed.initialize; if it is large, give them more time "
                    "with --start-timeout-s (start_timeout_s= of a ClusterJob).",
                    details=self._details(state),
                    part=state.part.name,
                )

    def _check_agents(self) -> None:
        """Finds an agent that is gone, though nobody told it to go."""
        for agent in self._agents:
            code = agent.process.poll()
            if code is None:
                continue
            self._settle(CLEAN_TIMEOUT_S, until=lambda agent=agent: agent.num_open == 0)  # type: ignore[misc]
            if agent.is_cleaned and self._refusals:
                continue
            of_shell = agent.is_remote and code == 255
            raise ClusterFailure(
                f"the agent of {agent.machine} {_how_it_ended(code)}"
                + (" (of the remote shell: no connection, a lost one, or the agent was killed)" if of_shell else ""),
                details="\n".join(agent.noise),
                exit_code=_exit_code(code) or 1,
            )

    def _explain_death(self) -> ClusterFailure:
        """Finds the death from which the others followed."""
        state = next((state for state in self._deaths if not _is_consequence(state)), self._deaths[0])
        assert state.exit_code is not None
        return ClusterFailure(
            f"{state.part} {_how_it_ended(state.exit_code)}{self._who_had_left(state)}",
            details=self._details(state),
            exit_code=_exit_code(state.exit_code),
            part=state.part.name,
        )

    def _who_had_left(self, state: _State) -> str:
        """Names trainers that had ended before a part died: others, still running, may have waited for them."""
        trainers = [one for one in self._states.values() if one.part.role == "trainer"]
        left = [one for one in trainers if one.exit_code == 0 and one.ended_s < state.ended_s]
        if not left or len(left) == len(trainers):
            return ""
        names = ", ".join(one.part.name for one in left)
        return (
            f". Before that {names} had ended with exit code 0, while others were still running. If these waited for "
            f"{'it' if len(left) == 1 else 'them'}: does the script leave early (os._exit(0)), or have trainers "
            f"different numbers of batches?"
        )

    def _details(self, state: _State) -> str:
        lines = list(state.lines)[-NUM_LINES_SHOWN:]
        return "\n".join([f"last lines of {state.part}:", *(f"  {line}" for line in lines or ["(none)"])])

    # End

    def _end_agents(self) -> None:
        """Has all agents end what still runs, and waits until they have cleaned up."""
        self._is_ending = True
        for state in self._states.values():
            state.was_ended = state.exit_code is None
        for agent in self._agents:
            self._send(agent, End())
        try:
            # A host that has not answered has nothing to clean up, and may never answer.
            reached = [agent for agent in self._agents if agent.ready is not None or not agent.is_remote]
            self._settle(
                self._job.grace_s + CLEAN_TIMEOUT_S, until=lambda: all(agent.num_open == 0 for agent in reached)
            )
        finally:
            self._has_ended.set()
            if self._pings.is_alive():
                self._pings.join()
            for agent in self._agents:
                if agent.process.poll() is None and agent.num_open > 0:
                    logger.warning("the agent of %s does not end: killed", agent.machine)
                    agent.process.send_signal(signal.SIGKILL)  # its watch cleans up
                agent.process.wait()
                for stream in (agent.process.stdin, agent.process.stdout, agent.process.stderr):
                    if stream is not None:
                        with contextlib.suppress(OSError):
                            stream.close()
                if not agent.is_cleaned and not agent.is_remote:
                    remove_everything(self._shm_prefix(agent.machine), set())  # its watch may have been killed, too
            self._selector.close()

    # Talking

    def _settle(self, timeout_s: float, until: Callable[[], bool] | None = None) -> None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and not (until is not None and until()):
            self._turn()

    def _turn(self) -> None:
        if not self._selector.get_map():
            time.sleep(TURN_S)
        for key, _ in self._selector.select(TURN_S):
            self._receive(key.data, key.fileobj)  # type: ignore[arg-type]

    def _ping(self) -> None:
        """Lets agents know that this process lives, also while whoever reads its output is in no hurry (`| less`).

        Never waits for one: an agent that reads nothing has pings before it, and the others wait for theirs.
        """
        while not self._has_ended.wait(PING_EVERY_S):
            for agent in self._agents:
                stdin = agent.process.stdin
                if stdin is None or not agent.lock.acquire(blocking=False):
                    continue  # it is just being told something
                try:
                    # Whatever can be written to takes as much as a ping at once.
                    if select.select([], [stdin], [], 0)[1]:
                        self._write(agent, Ping())
                except (OSError, ValueError):
                    pass  # it is gone: seen by the thread that reads
                finally:
                    agent.lock.release()

    def _send(self, agent: _Agent, message: Message) -> None:
        # It is gone: seen in the next turn.
        with agent.lock, contextlib.suppress(OSError, ValueError):
            self._write(agent, message)

    @staticmethod
    def _write(agent: _Agent, message: Message) -> None:
        assert agent.process.stdin is not None
        data = memoryview(encode(message))
        while data:
            data = data[agent.process.stdin.write(data) :]

    def _receive(self, agent: _Agent, stream: IO[bytes]) -> None:
        try:
            data = os.read(stream.fileno(), 2**18)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        is_error = stream is agent.process.stderr
        splitter = agent.error_splitter if is_error else agent.splitter
        lines = splitter.feed(data) if data else splitter.flush()
        if not data:
            self._selector.unregister(stream)
            agent.num_open -= 1
        for line in lines:
            message = None if is_error else decode(line)
            if message is None:
                agent.noise.append(line.decode("utf-8", errors="replace").rstrip())
            else:
                self._handle(agent, message)

    def _show(self, line: PartLine) -> None:
        try:
            self._on_line(line)
        except OSError:
            # Nobody reads any more (`| head`), which ends the job: what parts say while they end is nobody's error.
            if not self._is_ending:
                raise

    def _handle(self, agent: _Agent, message: Message) -> None:
        match message:
            case Ready():
                agent.ready = message
            case Refused():
                self._refusals += [f"{agent.machine}: {problem.removesuffix('.')}" for problem in message.problems]
            case Line():
                if _NOISE.search(message.text) or (self._is_ending and _NOISE_AT_END.search(message.text)):
                    return
                state = self._states[message.part]
                state.lines.append(message.text)
                if self._verbose or state.part.role == "trainer":
                    self._show(PartLine(part=state.part, is_error=message.is_error, text=message.text))
            case Listening():
                self._states[message.part].has_listened = True
            case Exited():
                state = self._states[message.part]
                state.exit_code, state.ended_s = message.code, time.monotonic()
                if message.code != 0:
                    self._deaths.append(state)
            case Cleaned():
                agent.is_cleaned = True
            case other:
                raise AssertionError(f"agents do not send {type(other).__name__}")


def _is_consequence(state: _State) -> bool:
    """Whether a part has died only because it lost a peer: of an exception, or of one in a thread of DGL's."""
    last = "\n".join(list(state.lines)[-NUM_LINES_SHOWN:])
    code = state.exit_code or 0
    return (code > 0 or code == -signal.SIGABRT) and _LOST_PEER.search(last) is not None


def _how_it_ended(code: int) -> str:
    if code >= 0:
        return f"exited with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was killed by {name}" + (" (out of memory?)" if -code == signal.SIGKILL else "")


def _exit_code(code: int) -> int:
    """Returns what a shell would: 128 and the signal's number."""
    return code if code >= 0 else 128 - code
