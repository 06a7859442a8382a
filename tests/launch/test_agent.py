# SPDX-License-Identifier: Apache-2.0
"""An agent on its own, spoken to as a controller does."""

from __future__ import annotations

import array
import fcntl
import os
import socket
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest

import dgl_hybrid
from dgl_hybrid.errors import LaunchError
from dgl_hybrid.launch import agent
from dgl_hybrid.launch.agent import find_problems
from dgl_hybrid.launch.cluster import find_machines
from dgl_hybrid.launch.cluster_job import plan_parts
from dgl_hybrid.launch.controller import Controller
from dgl_hybrid.launch.messages import (
    Cleaned,
    End,
    Exited,
    Line,
    LineSplitter,
    Message,
    Prepare,
    Ready,
    StartPart,
    decode,
    encode,
)
from dgl_hybrid.launch.watch import Watch
from dgl_hybrid.partition.manifest import MANIFEST_NAME
from tests.launch.jobs import fake_job

NUM_LINES = 40_000
PREPARE = Prepare(
    machine_id=0,
    address="127.0.0.1",
    server_ports={},
    foreign_ports=[],
    shm_prefix="dgl_hybrid_agent_0_",
    python=sys.executable,
    needs_plugin=True,
    needs_fixes=False,
    num_samplers=0,
    command=["-c", "pass"],
    workspace="/",
    part_config="graph.json",
    ip_config=None,
    ip_config_text="127.0.0.1 30050\n",
    grace_s=5.0,
    silence_timeout_s=None,
)


def wait_until_full(sock: socket.socket) -> None:
    """Waits until nothing more arrives though nothing is read: the other side has to wait, or has given up."""
    unread, waiting, turns = -1, array.array("i", [0]), 0
    while turns < 15:
        time.sleep(0.02)
        fcntl.ioctl(sock, termios.FIONREAD, waiting)
        turns = turns + 1 if waiting[0] == unread > 0 else 0
        unread = waiting[0]


def messages_of(sock: socket.socket) -> Iterator[Message]:
    splitter = LineSplitter()
    while data := sock.recv(65536):
        for line in splitter.feed(data):
            message = decode(line)
            assert message is not None
            yield message


def test_one_socket_for_both_directions_loses_nothing_when_its_reader_pauses(tmp_path: Path) -> None:
    """As a remote shell gives it to its command. Made non-blocking for reading, it was so for writing, too: the first
    moment in which it was full was taken for the loss of the controller, and ended the job.
    """
    (tmp_path / "graph.json").write_text("{}")
    ours, theirs = socket.socketpair()
    with ours:
        ours.settimeout(60.0)
        with theirs:
            agent = subprocess.Popen(
                [sys.executable, "-m", "dgl_hybrid.launch.agent"],
                cwd=Path(dgl_hybrid.__file__).parents[1],
                stdin=theirs,
                stdout=theirs,
                stderr=subprocess.PIPE,
            )
        try:
            order = replace(
                PREPARE,
                shm_prefix=f"dgl_hybrid_socket_{os.getpid()}_0_",
                command=["-c", f"for number in range({NUM_LINES}): print(number, 'of many')"],
                workspace=str(tmp_path),
                part_config=str(tmp_path / "graph.json"),
            )
            ours.sendall(encode(order))
            said = messages_of(ours)
            assert isinstance(next(said), Ready)
            ours.sendall(encode(StartPart(name="trainer 0", environment={})))
            wait_until_full(ours)
            lines = []
            for message in said:
                if isinstance(message, Line):
                    lines.append(message.text)
                else:
                    break
            assert message == Exited(part="trainer 0", code=0)
            is_whole = lines == [f"{number} of many" for number in range(NUM_LINES)]
            assert is_whole, f"{len(lines)} of {NUM_LINES} lines came"
            ours.sendall(encode(End()))
            assert list(said) == [Cleaned()]
            assert agent.wait(30.0) == 0
        finally:
            agent.kill()
            _, complaints = agent.communicate()
        assert complaints == b""


def test_who_is_not_heard_of_is_missed_amid_writing_too(tmp_path: Path) -> None:
    """A remote shell that has lost its connection reads no more, and parts that print kept the agent writing: they were
    ended when the system gave the connection up, a quarter of an hour later.
    """
    (tmp_path / "graph.json").write_text("{}")
    read_end, write_end = os.pipe()
    try:
        agent = subprocess.Popen(
            [sys.executable, "-m", "dgl_hybrid.launch.agent"],
            cwd=Path(dgl_hybrid.__file__).parents[1],
            stdin=subprocess.PIPE,
            stdout=write_end,
            stderr=subprocess.PIPE,
        )
        try:
            order = replace(
                PREPARE,
                shm_prefix=f"dgl_hybrid_unheard_{os.getpid()}_0_",
                command=["-c", "while True: print('and on')"],
                workspace=str(tmp_path),
                part_config=str(tmp_path / "graph.json"),
                silence_timeout_s=2.0,
            )
            assert agent.stdin is not None
            agent.stdin.write(encode(order) + encode(StartPart(name="trainer 0", environment={})))
            agent.stdin.flush()
            assert agent.wait(120.0) == 1
        finally:
            agent.kill()
            _, complaints = agent.communicate()
        assert b"the controller was lost (nothing was heard of it for 2 s)" in complaints
    finally:
        os.close(read_end)
        os.close(write_end)


@pytest.mark.parametrize(
    ("here", "problem"),
    [
        ("10.0.0.1 30050\n10.0.0.2\n", None),
        ("10.0.0.1 30050\n10.0.0.2 30060\n", "says 10.0.0.2 30060 of machine 1 here, and 10.0.0.2 30050 where"),
        ("10.0.0.1 30050\n", "names 1 machines, but the graph has 2 partitions"),
        (None, "cannot be read: No such file"),
    ],
)
def test_hosts_whose_ip_configs_differ_do_not_wait_for_each_other(
    here: str | None, problem: str | None, tmp_path: Path
) -> None:
    """Its servers would listen where no trainer asks, until the job is given up."""
    file = tmp_path / "ip_config.txt"
    if here is not None:
        file.write_text(here)
    (tmp_path / "graph.json").write_text("{}")
    there = "10.0.0.1 30050\n10.0.0.2 30050\n"
    places = {"workspace": str(tmp_path), "part_config": str(tmp_path / "graph.json"), "ip_config": str(file)}
    problems = find_problems(replace(PREPARE, ip_config_text=there, **places))
    if problem is None:
        assert problems == []
    else:
        assert len(problems) == 1
        assert f"{file} {problem}" in problems[0]


def test_a_part_that_is_not_here_is_told_before_anything_starts(tmp_path: Path) -> None:
    places = {"workspace": str(tmp_path), "part_config": str(tmp_path / "graph.json")}
    assert find_problems(replace(PREPARE, **places)) == [f"the partition config {tmp_path}/graph.json does not exist"]
    (tmp_path / "graph.json").write_text('{"part-0": {"part_graph": "part0/graph.dgl"}}')
    (problem,) = find_problems(replace(PREPARE, **places))
    assert f"{tmp_path}/part0/graph.dgl is missing, which graph.json names for part 0" in problem


def test_rank_0_has_its_store_where_no_server_will_listen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of other machines on the same host have not begun to."""
    said: list[Message] = []
    one: Any = object.__new__(agent.Agent)
    one._say = said.append
    monkeypatch.setattr(agent, "find_problems", lambda order: [])
    monkeypatch.setattr(agent, "temporary_folder", lambda prefix: tmp_path / "files")
    monkeypatch.setattr(agent, "Watch", lambda prefix: None)
    monkeypatch.setattr(agent, "find_free_ports", lambda address, *, avoid: len(avoid))
    one._prepare(replace(PREPARE, server_ports={"server 0": 30050}, foreign_ports=[30050, 30060, 30061]))
    assert isinstance(said[0], Ready)
    assert said[0].free_port == 3, "all of them were avoided"
    job = fake_job(tmp_path, parts=3, num_servers=2)
    machines = find_machines(job)
    control = Controller(job, machines, plan_parts(job, machines), lambda line: None)
    orders = [control._preparation(SimpleNamespace(machine=machine, is_remote=False)) for machine in machines]  # type: ignore[arg-type]
    ports = [set(order.server_ports.values()) for order in orders]
    assert [set(order.foreign_ports) for order in orders] == [
        ports[1] | ports[2],
        ports[0] | ports[2],
        ports[0] | ports[1],
    ]
    assert all(len(of_machine) == 2 for of_machine in ports)
    assert all(order.needs_fixes for order in orders)
    assert not replace(job, command=("script.py", "-m", "dgl_hybrid.launch.distdgl_part")).runs_own_module
    own = replace(job, command=("-P", "-m", "dgl_hybrid.launch.distdgl_part", "folder"))
    control = Controller(own, machines, plan_parts(own, machines), lambda line: None)
    assert not control._preparation(SimpleNamespace(machine=machines[0], is_remote=False)).needs_fixes, "it mends DGL"  # type: ignore[arg-type]


def test_hosts_whose_partitions_differ_do_not_train_on_a_mixture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host that was forgotten when a graph was partitioned again has files of the same sizes, maybe."""
    said: list[Message] = []
    one: Any = object.__new__(agent.Agent)
    one._say = said.append
    monkeypatch.setattr(agent, "find_problems", lambda order: [])
    monkeypatch.setattr(agent, "Watch", lambda prefix: None)
    for number, manifest in enumerate(["{}", "{ }", "{}", None]):
        folder = tmp_path / str(number)
        folder.mkdir()
        if manifest is not None:
            (folder / MANIFEST_NAME).write_text(manifest)
        monkeypatch.setattr(agent, "temporary_folder", lambda prefix, folder=folder: folder / "files")
        one._prepare(replace(PREPARE, part_config=str(folder / "graph.json")))
    job = fake_job(tmp_path, parts=3)
    machines = find_machines(job)
    control = Controller(job, machines, plan_parts(job, machines), lambda line: None)

    def check(*numbers: int) -> None:
        """As a job begins, once all have answered."""
        control._agents.clear()
        answers = dict(zip(machines, numbers, strict=True))
        control._start_agent = lambda machine, *_, **__: SimpleNamespace(  # type: ignore[method-assign, assignment, return-value]
            machine=machine, ready=said[answers[machine]], is_remote=True
        )
        control._start_agents()

    control._send = lambda *_: None  # type: ignore[method-assign]
    control._pings = SimpleNamespace(start=lambda: None)  # type: ignore[assignment]

    check(0, 2, 0)
    check(0, 3, 0)  # of DGL's own partitions nobody knows
    with pytest.raises(LaunchError, match=r"machine 2 \(127.0.0.1\) has another partition .* than machine 0"):
        check(0, 2, 1)


def test_a_watch_that_dies_at_the_end_leaves_the_cleaning_to_the_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended with an AttributeError, and nobody removed shared memory."""
    one, removed, said = agent.Agent(), list[Any](), list[Message]()
    one._prepared = PREPARE
    one._watch = cast(Any, SimpleNamespace(clean=lambda names: removed.append("by the watch")))
    one._parts = {1: cast(Any, None)}

    def turn() -> None:
        one._watch = None
        one._parts.clear()

    monkeypatch.setattr(one, "_turn_at_end", turn)
    monkeypatch.setattr(one, "_say", said.append)
    monkeypatch.setattr(agent, "find_shared_memory", lambda processes: {"some"})
    monkeypatch.setattr(agent, "remove_everything", lambda *what: removed.append(what))
    one._end()
    assert removed == [(PREPARE.shm_prefix, {"some"})]
    assert said == [Cleaned()]


def test_the_watch_holds_nothing_open_but_its_pipe(tmp_path: Path) -> None:
    """Parts and the controller wait for the end of what the agent had open."""
    with (tmp_path / "open").open("w"):
        watch = Watch(f"dgl_hybrid_watch_{os.getpid()}_0_")
        try:
            deadline = time.monotonic() + 30.0
            while (held := len(os.listdir(f"/proc/{watch.pid}/fd"))) != 4 and time.monotonic() < deadline:
                time.sleep(0.02)
            assert held == 4, "stdin, stdout, stderr and the pipe"
            assert str(tmp_path / "open") not in [file.path for file in psutil.Process(watch.pid).open_files()]
        finally:
            watch.clean(set())
            os.waitpid(watch.pid, 0)
