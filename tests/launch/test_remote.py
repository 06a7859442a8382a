# SPDX-License-Identifier: Apache-2.0
"""Machines on other hosts: a stand-in for ssh that runs the command here, and network namespaces as hosts."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from dgl_hybrid.launch import controller
from dgl_hybrid.launch.cluster import SSH, ClusterFailure, ClusterJob, PartLine, run_cluster
from tests.launch.jobs import END_WITHIN_S, SCRIPTS, Observer, fake_job, is_alive, run_observed

RELAY = (sys.executable, str(SCRIPTS / "relayed_shell.py"), "-o", "Some=option")
FOREVER = ["sleep", 600]
SHOW = """
import json, os, sys
print(json.dumps({"env": dict(os.environ), "argv": sys.argv[1:], "cwd": os.getcwd()}), flush=True)
"""


@pytest.fixture
def all_remote(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loopback addresses count as other hosts'."""
    monkeypatch.setattr(controller, "is_local_address", lambda address: False)


def test_ssh_does_not_ask_questions() -> None:
    assert SSH[0] == "ssh"
    assert "BatchMode=yes" in SSH


@pytest.mark.usefixtures("all_remote")
def test_parts_on_other_hosts_get_their_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of this host's environment is counted on; words are not taken apart by the shells on the way."""
    monkeypatch.setenv("ONLY_HERE", "1")
    workspace = tmp_path / "a folder's"
    workspace.mkdir()
    (workspace / "show.py").write_text(SHOW)
    job = fake_job(workspace)
    arguments = ["a b", "$HOME", "'", "--", ""]
    result = run_cluster(
        ClusterJob(
            part_config=job.part_config,
            command=("show.py", *arguments),
            workspace=workspace,
            ip_config=job.ip_config,
            remote_shell=RELAY,
            environment={"MINE": "a 'b'"},
            timeout_s=600,
        ),
        on_line=lambda line: None,
    )
    for one in result.parts:
        told = json.loads(one.last_lines[0])
        assert told["argv"] == arguments
        assert told["cwd"] == str(workspace)
        env = told["env"]
        assert env["ON_HOST"] == "127.0.0.1"
        assert env["MINE"] == "a 'b'"
        assert env["DGL_IP_CONFIG"] == str(job.ip_config)
        assert env["DGL_HYBRID_MACHINE_ID"] == str(one.part.machine.machine_id)
        assert "ONLY_HERE" not in env


@pytest.mark.usefixtures("all_remote")
def test_a_relative_interpreter_is_that_of_the_launching_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On every host: logins begin in another folder than the job."""
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    run_cluster(fake_job(tmp_path, remote_shell=RELAY, python="bin/python"))


@pytest.mark.usefixtures("all_remote")
@pytest.mark.parametrize("target", ["trainer 1", "server 0", "agent"])
def test_a_kill_on_another_host_ends_the_job(target: str, tmp_path: Path) -> None:
    forever = [["sampler", 600], ["litter", None], ["print", "ready"], FOREVER]
    job = fake_job(
        tmp_path, dict.fromkeys(("server 0", "server 1", "trainer 0", "trainer 1"), forever), remote_shell=RELAY
    )
    ready: set[str] = set()

    def act(name: str, text: str) -> None:
        if text == "ready":
            ready.add(name)
        if len(ready) == 4 and observer.acted_s is None:
            observer.note()
            os.kill(observer.agents()[1] if target == "agent" else observer.pids[target], signal.SIGKILL)

    observer = Observer(act)
    with pytest.raises(ClusterFailure) as caught:
        run_cluster(job, on_line=observer, verbose=True)
    assert observer.acted_s is not None
    assert time.monotonic() - observer.acted_s < END_WITHIN_S
    assert caught.value.exit_code == (255 if target == "agent" else 137)
    named = "the agent of machine 1" if target == "agent" else f"{target} on machine {target[-1]}"
    assert str(caught.value).startswith(named)
    observer.assert_nothing_left(job.ip_config)


@pytest.mark.usefixtures("all_remote")
@pytest.mark.parametrize("loss", ["cut", "silent"])
def test_a_lost_connection_ends_the_job_on_both_sides(
    loss: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the connection is closed, or just carries nothing any more."""
    if loss == "silent":
        monkeypatch.setattr(controller, "SILENCE_TIMEOUT_S", 4.0)
        monkeypatch.setattr(controller, "PING_EVERY_S", 0.2)
    forever = [["sampler", 600], ["litter", None], ["print", "ready"], FOREVER]
    job = fake_job(
        tmp_path, dict.fromkeys(("server 0", "server 1", "trainer 0", "trainer 1"), forever), remote_shell=RELAY
    )
    ready: set[str] = set()

    def act(name: str, text: str) -> None:
        if text == "ready":
            ready.add(name)
        if len(ready) == 4 and observer.acted_s is None:
            observer.note()
            relay = psutil.Process(observer.agents()[1]).parent()
            assert relay is not None
            while "relayed_shell.py" not in " ".join(relay.cmdline()):
                relay = relay.parent()
                assert relay is not None
            if loss == "cut":
                relay.kill()
            else:
                monkeypatch.setattr(controller, "PING_EVERY_S", 600.0)

    observer = Observer(act)
    with pytest.raises(ClusterFailure, match=r"the agent of machine \d \(127.0.0.1\)") as caught:
        run_cluster(job, on_line=observer, verbose=True)
    if loss == "silent":
        assert "nothing was heard of it for 4 s" in caught.value.details
    assert observer.acted_s is not None
    while any(is_alive(process.pid) for process in observer.processes):
        assert time.monotonic() - observer.acted_s < END_WITHIN_S
        time.sleep(0.05)
    observer.assert_nothing_left(job.ip_config)


@pytest.mark.usefixtures("all_remote")
def test_who_reads_slowly_ends_no_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`| less` takes no line while somebody looks at the first ones."""
    monkeypatch.setattr(controller, "SILENCE_TIMEOUT_S", 4.0)
    monkeypatch.setattr(controller, "PING_EVERY_S", 0.2)
    working = [["print", "ready"], ["sleep", 9.0], ["print", "done"]]
    ends = {"trainer 0": [["wait", "through"], ["touch", "stop"]], "trainer 1": [["touch", "through"]]}
    plan = {name: working + end for name, end in ends.items()}
    job = fake_job(tmp_path, plan, remote_shell=RELAY)
    read: list[str] = []

    def read_slowly(line: PartLine) -> None:
        if not read:
            time.sleep(7.0)
        read.append(line.text)

    assert run_cluster(job, on_line=read_slowly).exit_code == 0
    assert read.count("done") == 2


@pytest.mark.usefixtures("all_remote")
def test_what_the_remote_shell_says_is_shown(tmp_path: Path) -> None:
    shell = tmp_path / "ssh"
    shell.write_text("#!/bin/sh\necho Permission denied >&2\nexit 255\n")
    shell.chmod(0o755)
    # Neither machine is reached: the one whose shell ends first is named.
    with pytest.raises(
        ClusterFailure, match=r"the agent of machine [01] \(127.0.0.1\) exited with code 255 \(of the remote shell"
    ) as caught:
        run_cluster(fake_job(tmp_path, remote_shell=(str(shell),)))
    assert caught.value.details == "Permission denied"
    assert caught.value.exit_code == 255


@pytest.mark.usefixtures("all_remote")
def test_a_host_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller, "AGENT_TIMEOUT_S", 0.5)
    monkeypatch.setattr(controller, "CLEAN_TIMEOUT_S", 0.5)
    shell = tmp_path / "ssh"
    shell.write_text("#!/bin/sh\nexec sleep 600\n")
    shell.chmod(0o755)
    with pytest.raises(ClusterFailure, match=r"the agent of machine 0 \(127.0.0.1\) did not answer within 0.5 s"):
        run_cluster(fake_job(tmp_path, remote_shell=(str(shell),), grace_s=0.1))


@pytest.mark.usefixtures("all_remote")
def test_a_host_that_does_not_answer_within_the_time_of_the_job(tmp_path: Path) -> None:
    """Of the whole job, not of its parts alone. Nobody waits for such a host to clean up."""
    shell = tmp_path / "ssh"
    shell.write_text("#!/bin/sh\nexec sleep 600\n")
    shell.chmod(0o755)
    begun_s = time.monotonic()
    with pytest.raises(
        ClusterFailure, match=r"the job did not end within 0.5 s; the agent of machine 0 \(127.0.0.1\) has not answered"
    ) as caught:
        run_cluster(fake_job(tmp_path, remote_shell=(str(shell),), timeout_s=0.5, grace_s=60.0))
    assert caught.value.exit_code == 124
    assert time.monotonic() - begun_s < controller.AGENT_TIMEOUT_S


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Two network namespaces joined by a cable; their names. Addresses: 10.203.0.1 and 10.203.0.2."""
    tag = secrets.token_hex(3)
    names = [f"dgh{tag}{i}" for i in (1, 2)]
    commands = [
        *(f"ip netns add {name}" for name in names),
        f"ip link add v{tag}1 netns {names[0]} type veth peer name v{tag}2 netns {names[1]}",
    ]
    for i, name in enumerate(names, start=1):
        commands += [
            f"ip -n {name} addr add 10.203.0.{i}/24 dev v{tag}{i}",
            f"ip -n {name} link set v{tag}{i} up",
            f"ip -n {name} link set lo up",
        ]
    try:
        for command in commands:
            done = subprocess.run(command.split(), capture_output=True, text=True, check=False, timeout=30)
            if done.returncode != 0:
                pytest.skip(f"network namespaces do not work here: {command}: {done.stderr.strip()}")
        yield names
    finally:
        for name in names:
            with contextlib.suppress(subprocess.SubprocessError):
                subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False, timeout=30)


@pytest.mark.netns
@pytest.mark.parametrize("way", ["prefix", "remote shell"])
def test_machines_in_network_namespaces(
    way: str, hosts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each machine has an address of its own that this host does not; gloo is told its interface."""
    (tmp_path / "show.py").write_text(
        SHOW + "import socket\nif os.environ['DGL_ROLE'] == 'client' and os.environ['RANK'] == '0':\n"
        "    socket.create_server((os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT']))).accept()\n"
        "elif os.environ['DGL_ROLE'] == 'client':\n"
        "    for _ in range(400):\n"
        "        sock = socket.socket()\n"
        "        if sock.connect_ex((os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT']))) == 0: break\n"
        "        import time; time.sleep(0.05)\n"
        "    else: sys.exit('rank 0 cannot be reached')\n"
    )
    (tmp_path / "ip_config.txt").write_text("10.203.0.1 30050\n10.203.0.2 30050\n")
    for i, name in enumerate(hosts, start=1):
        script = tmp_path / f"10.203.0.{i}"
        script.write_text(f'#!/bin/sh\nexec ip netns exec {name} "$@"\n')
        script.chmod(0o755)
    monkeypatch.setenv("RELAY_PREFIX", f"{tmp_path}/{{address}}")
    fake_job(tmp_path)
    (tmp_path / "ip_config.txt").write_text("10.203.0.1 30050\n10.203.0.2 30050\n")
    prefixes = tuple(("ip", "netns", "exec", name) for name in hosts)
    job = ClusterJob(
        part_config=Path("graph.json"),
        command=("show.py",),
        workspace=tmp_path,
        ip_config=Path("ip_config.txt"),
        machine_prefixes=prefixes if way == "prefix" else (),
        remote_shell=RELAY,
        timeout_s=600,
    )
    result, _ = run_observed(job)
    for one in result.parts:
        env = json.loads(one.last_lines[0])["env"]
        machine = one.part.machine.machine_id + 1
        assert env["GLOO_SOCKET_IFNAME"].endswith(str(machine))
        assert ("ON_HOST" in env) == (way == "remote shell")
