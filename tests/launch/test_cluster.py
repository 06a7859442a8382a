# SPDX-License-Identifier: Apache-2.0
"""The life of a job of several machines on this host, with parts that need no DGL: they start and end in no time."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from dgl_hybrid.errors import LaunchError
from dgl_hybrid.launch import controller
from dgl_hybrid.launch.cluster import ClusterFailure, ClusterJob, run_cluster
from tests.launch.jobs import END_WITHIN_S, FAKE, Observer, driver_command, fake_job, is_alive, run_observed

FOREVER = ["sleep", 600]
EVERYBODY = ("server 0", "server 1", "trainer 0", "trainer 1")


def test_a_job_ends_well(tmp_path: Path) -> None:
    job = fake_job(tmp_path, parts=3, num_servers=2, num_trainers=2)
    result, observer = run_observed(job)

    assert result.exit_code == 0
    assert [one.part.name for one in result.parts] == [f"{r} {i}" for r in ("server", "trainer") for i in range(6)]
    assert [one.exit_code for one in result.parts] == [0] * 12
    assert str(result.part("trainer 3").part) == "trainer 3 on machine 1 (127.0.0.1)"
    assert result.part("server 5").last_lines[0].startswith("pid ")
    assert all(0 < one.elapsed_s <= result.elapsed_s for one in result.parts)
    assert len(observer.prefixes) == 3
    assert job.ip_config is not None
    observer.assert_nothing_left(job.ip_config)


SHOW_ENVIRONMENT = """
import json, os, sys, time
print(json.dumps({"env": dict(os.environ), "argv": sys.argv[1:], "cwd": os.getcwd()}), flush=True)
"""


def test_what_parts_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DGL's variables, torchrun's, ours; arguments and interpreter as they were given."""
    for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE", "DGL_ROLE", "GLOO_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "foreign")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    (tmp_path / "show.py").write_text(SHOW_ENVIRONMENT)
    python = tmp_path / "python3.11 with blanks"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    arguments = ["--num-trainers", "9", "--", "-x", "a b", "", "$HOME", "'", '"', "ü", "*"]
    (tmp_path / "graph.json").write_text('{"num_parts": 2}')
    result = run_cluster(
        ClusterJob(
            part_config=Path("graph.json"),
            command=("show.py", *arguments),
            python=str(python),
            workspace=tmp_path,
            num_servers=2,
            num_trainers=2,
            num_samplers=1,
            graph_format="csr,csc",
            threads=3,
            environment={"MINE": "1"},
            timeout_s=600,
        ),
        on_line=lambda line: None,
    )
    told = {one.part.name: json.loads(one.last_lines[0]) for one in result.parts}
    for what in told.values():
        assert what["argv"] == arguments
        assert what["cwd"] == str(tmp_path)
        env = what["env"]
        assert env["DGL_DIST_MODE"] == "distributed"
        assert env["DGL_CONF_PATH"] == str(tmp_path / "graph.json")
        assert (env["DGL_NUM_SERVER"], env["DGL_NUM_CLIENT"], env["DGL_NUM_SAMPLER"]) == ("2", "8", "1")
        assert env["DGL_GRAPH_FORMAT"] == "csr,csc"
        assert env["GLOO_SOCKET_IFNAME"] == "lo"
        assert env["PYTHONUNBUFFERED"] == "1"
        assert env["MINE"] == "1"
        assert not [name for name in env if name.startswith("TORCHELASTIC")]
    servers = [told[f"server {i}"]["env"] for i in range(4)]
    assert [env["DGL_SERVER_ID"] for env in servers] == ["0", "1", "2", "3"]
    assert [env["DGL_HYBRID_MACHINE_ID"] for env in servers] == ["0", "0", "1", "1"]
    assert {(env["DGL_ROLE"], env["OMP_NUM_THREADS"], env.get("RANK")) for env in servers} == {("server", "1", None)}
    trainers = [told[f"trainer {i}"]["env"] for i in range(4)]
    assert [env["RANK"] for env in trainers] == ["0", "1", "2", "3"]
    assert [env["LOCAL_RANK"] for env in trainers] == ["0", "1", "0", "1"]
    assert [env["GROUP_RANK"] for env in trainers] == ["0", "0", "1", "1"]
    assert [env["DGL_HYBRID_MACHINE_ID"] for env in trainers] == ["0", "0", "1", "1"]
    common = [("DGL_ROLE", "client"), ("DGL_GROUP_ID", "0"), ("WORLD_SIZE", "4"), ("LOCAL_WORLD_SIZE", "2")]
    common += [("MASTER_ADDR", "127.0.0.1"), ("OMP_NUM_THREADS", "3")]
    for name, value in common:
        assert {env[name] for env in trainers} == {value}, name
    assert len({env["MASTER_PORT"] for env in trainers}) == 1
    for env in (*servers, *trainers):
        prefixes = {other["DGL_HYBRID_SHM_PREFIX"] for other in (*servers, *trainers)
                    if other["DGL_HYBRID_MACHINE_ID"] == env["DGL_HYBRID_MACHINE_ID"]}  # fmt: skip
        assert prefixes == {env["DGL_HYBRID_SHM_PREFIX"]}
    assert servers[0]["DGL_HYBRID_SHM_PREFIX"] != servers[2]["DGL_HYBRID_SHM_PREFIX"]


def test_threads_share_the_hosts_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainers of all machines of a host together, not of each machine."""
    (tmp_path / "show.py").write_text(SHOW_ENVIRONMENT)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    job = fake_job(tmp_path, num_trainers=1)
    result = run_cluster(
        ClusterJob(part_config=job.part_config, command=("show.py",), workspace=tmp_path), on_line=lambda line: None
    )
    told = json.loads(result.part("trainer 0").last_lines[0])["env"]
    assert int(told["OMP_NUM_THREADS"]) == max(1, len(os.sched_getaffinity(0)) // 2)


def test_lines_are_shown_by_part(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Trainers' to where they were written; servers' only when asked for."""
    plan = {
        "trainer 0": [["print", "bonjour"], ["complain", "hélas"], ["touch", "stop"]],
        "trainer 1": [],
        "server 1": [["print", "chatter"], ["listen", None], ["wait", "stop"]],
    }
    run_cluster(fake_job(tmp_path, plan))
    captured = capfd.readouterr()
    assert "[trainer 0] bonjour\n" in captured.out
    assert "[trainer 0] hélas\n" in captured.err
    assert "chatter" not in captured.out
    (tmp_path / "stop").unlink()
    run_cluster(fake_job(tmp_path, plan), verbose=True)
    assert "[server 1] chatter\n" in capfd.readouterr().out


def fail(job: ClusterJob, act: Any = None) -> tuple[ClusterFailure, Observer]:
    observer = Observer(act)
    with pytest.raises(ClusterFailure) as caught:
        run_cluster(job, on_line=observer, verbose=True)
    observer.assert_nothing_left(job.ip_config)
    return caught.value, observer


def test_exit_code_of_a_trainer_is_the_jobs(tmp_path: Path) -> None:
    """And its last words are kept, although others speak after it."""
    tracker = "resource_tracker.py:254: UserWarning: resource_tracker: There appear to be 10 leaked semaphore objects"
    plan = {
        "trainer 1": [["print", "I have"], ["complain", "had enough"], ["complain", tracker], ["exit", 3]],
        "trainer 0": [FOREVER],
    }
    error, _ = fail(fake_job(tmp_path, plan))
    assert str(error) == "trainer 1 on machine 1 (127.0.0.1) exited with code 3"
    assert error.exit_code == 3
    assert error.part == "trainer 1"
    assert "I have" in error.details
    assert "had enough" in error.details
    assert "leaked" not in error.details, "nothing is leaked: it would only worry"


@pytest.mark.parametrize(
    "lost",
    [
        [["complain", "RuntimeError: Connection closed by peer [127.0.0.1]:1234"], ["exit", 1]],
        [["complain", "socket_communicator.cc:177: Check failed"], ["kill", int(signal.SIGABRT)]],
    ],
)
def test_the_first_cause_is_named(lost: list[list[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lost its peer has often ended, and is heard of, before that peer; in DGL's threads it is aborted."""
    monkeypatch.setattr(controller, "CAUSE_TIMEOUT_S", 10.0)
    plan = {
        "trainer 0": lost,
        "trainer 1": [FOREVER],
        "server 0": [["listen", None], ["outlive", "trainer 0"], ["sleep", 0.5], ["exit", 7]],
    }
    error, observer = fail(fake_job(tmp_path, plan))
    assert ("trainer 0", lost[0][1]) in observer.lines
    assert error.part == "server 0"
    assert error.exit_code == 7


def test_a_lost_peer_is_named_if_nothing_else_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller, "CAUSE_TIMEOUT_S", 0.1)
    error, _ = fail(
        fake_job(tmp_path, {"trainer 1": [["complain", "gloo: timeout"], ["exit", 1]], "trainer 0": [FOREVER]})
    )
    assert error.part == "trainer 1"


def test_trainers_that_were_through_before_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What looks like a success may be what the others died of: `os._exit(0)` in the middle."""
    monkeypatch.setattr(controller, "CAUSE_TIMEOUT_S", 0.1)
    lost = [["outlive", "trainer 1"], ["sleep", 1.0], ["complain", "gloo: Connection closed by peer"], ["exit", 1]]
    error, _ = fail(fake_job(tmp_path, {"trainer 1": [["exit", 0]], "trainer 0": lost}))
    assert str(error).startswith(
        "trainer 0 on machine 0 (127.0.0.1) exited with code 1. Before that trainer 1 had ended with exit code 0, while"
    )
    assert (error.part, error.exit_code) == ("trainer 0", 1)


def test_when_all_trainers_are_through_none_of_them_is_named(tmp_path: Path) -> None:
    ended = [["outlive", "trainer 0"], ["outlive", "trainer 1"]]
    plan = {"server 0": [["listen", None], *ended, ["sleep", 1.0], ["exit", 3]]}
    error, _ = fail(fake_job(tmp_path, plan))
    assert str(error) == "server 0 on machine 0 (127.0.0.1) exited with code 3"


def test_what_dgl_says_when_it_is_ended_is_not_shown(tmp_path: Path) -> None:
    plan = {"trainer 0": [["complain_at_end", "User pressed Ctrl+C, Exiting"], ["touch", "set"], FOREVER],
            "server 0": [["complain_at_end", "saved what I had"], ["touch", "set too"], FOREVER],
            "trainer 1": [["wait", "set"], ["wait", "set too"], ["exit", 1]]}  # fmt: skip
    _, observer = fail(fake_job(tmp_path, plan))
    assert ("server 0", "saved what I had") in observer.lines
    assert ("trainer 0", "User pressed Ctrl+C, Exiting") not in observer.lines


@pytest.mark.parametrize("target", ["trainer 0", "trainer 1", "server 0", "server 1"])
@pytest.mark.parametrize("moment", ["start", "middle", "exit"])
def test_a_killed_part_ends_the_job(target: str, moment: str, tmp_path: Path) -> None:
    """Its samplers, and processes that left its group, go with it: memory, semaphores, ports, files as well."""
    spawn = [["sampler", 600], ["detach", 600], ["litter", None]]
    plan: dict[str, list[list[Any]]] = {
        name: [["listen", None], *spawn, ["print", "ready"], FOREVER] for name in ("server 0", "server 1")
    }
    plan |= {name: [*spawn, ["print", "ready"], FOREVER] for name in ("trainer 0", "trainer 1")}
    if moment == "start":  # `multiprocessing` forgets a semaphore whose maker dies before its tracker runs
        for steps in plan.values():
            steps.remove(["sampler", 600])
    if moment == "exit":  # the others are through
        for name in plan:
            if name != target:
                plan[name][-1] = ["exit", 0]
    job = fake_job(tmp_path, plan)
    ready: set[str] = set()

    def act(name: str, text: str) -> None:
        if text == "ready":
            ready.add(name)
        is_time = target in observer.pids if moment == "start" else len(ready) == 4
        if is_time and observer.acted_s is None:
            observer.note()
            os.kill(observer.pids[target], signal.SIGKILL)

    observer = Observer(act)
    with pytest.raises(ClusterFailure, match=f"{target} on machine {target[-1]} .* was killed by SIGKILL") as caught:
        run_cluster(job, on_line=observer, verbose=True)
    assert observer.acted_s is not None
    assert time.monotonic() - observer.acted_s < END_WITHIN_S
    assert caught.value.exit_code == 137
    assert "pid " in caught.value.details
    if moment == "middle":
        assert len(observer.children) == 8
        assert observer.shared_memory, "the samplers' semaphores were not seen"
    observer.assert_nothing_left(job.ip_config)


def test_a_part_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    plan = {
        "trainer 0": [["refuse_to_end", None], ["touch", "deaf"], FOREVER],
        "trainer 1": [["wait", "deaf"], ["exit", 1]],
    }
    begun_s = time.monotonic()
    fail(fake_job(tmp_path, plan, grace_s=0.5))
    assert time.monotonic() - begun_s < END_WITHIN_S


def test_a_killed_agent_ends_the_job(tmp_path: Path) -> None:
    forever = [["sampler", 600], ["detach", 600], ["litter", None], ["print", "ready"], FOREVER]
    plan = dict.fromkeys(EVERYBODY, forever)
    ready: set[str] = set()

    def act(name: str, text: str) -> None:
        if text == "ready":
            ready.add(name)
        if len(ready) == 4 and observer.acted_s is None:
            observer.note()
            os.kill(observer.agents()[1], signal.SIGKILL)

    job = fake_job(tmp_path, plan)
    observer = Observer(act)
    with pytest.raises(ClusterFailure, match=r"the agent of machine 1 \(127.0.0.1\) was killed by SIGKILL") as caught:
        run_cluster(job, on_line=observer, verbose=True)
    assert observer.acted_s is not None
    assert time.monotonic() - observer.acted_s < END_WITHIN_S
    assert caught.value.exit_code == 137
    observer.assert_nothing_left(job.ip_config)


def watch_of(agent: int) -> psutil.Process:
    (found,) = (
        child for child in psutil.Process(agent).children() if child.cmdline()[-1:] == ["dgl_hybrid.launch.agent"]
    )
    return found


def test_a_killed_watch_is_replaced(tmp_path: Path) -> None:
    """Then even an agent that is killed after it leaves nothing."""
    plan = {"trainer 0": [["sampler", 600], ["print", "ready"], FOREVER], "trainer 1": [FOREVER]}

    def act(name: str, text: str) -> None:
        if text == "ready":
            agent = observer.agents()[0]
            first = watch_of(agent)
            first.kill()
            deadline = time.monotonic() + 30
            while time.monotonic() < deadline:
                with contextlib.suppress(ValueError, psutil.Error):
                    if watch_of(agent).pid != first.pid:
                        break
                time.sleep(0.02)
            else:
                pytest.fail("no other watch came")
            observer.note()
            os.kill(agent, signal.SIGKILL)

    job = fake_job(tmp_path, plan)
    observer = Observer(act)
    with pytest.raises(ClusterFailure, match="the agent of machine 0"):
        run_cluster(job, on_line=observer, verbose=True)
    observer.assert_nothing_left(job.ip_config)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_killed_launcher_takes_the_job_with_it(number: signal.Signals, tmp_path: Path) -> None:
    forever = [["sampler", 600], ["detach", 600], ["litter", None], ["print", "ready"], FOREVER]
    plan = dict.fromkeys(EVERYBODY, forever)
    job = fake_job(tmp_path, plan)
    observer = Observer()
    with subprocess.Popen(driver_command(job), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as driver:
        assert driver.stdout is not None
        num_ready = 0
        while num_ready < 4:
            name, _, text = driver.stdout.readline().rstrip("\n").partition("|")
            assert name, "the driver has ended early"
            observer.hear(name, text)
            num_ready += text == "ready"
        observer.note(driver.pid)
        driver.send_signal(number)
        driver.stdout.read()
        assert driver.wait(timeout=END_WITHIN_S) != 0
    while any(is_alive(process.pid) for process in observer.processes):
        assert observer.acted_s is not None
        assert time.monotonic() - observer.acted_s < END_WITHIN_S
        time.sleep(0.05)
    observer.assert_nothing_left(job.ip_config)


def test_an_agent_and_its_watch_may_die_together(tmp_path: Path) -> None:
    """On the launcher's own host it sees to what they leave."""
    forever = [["sampler", 600], ["detach", 600], ["litter", None], ["print", "ready"], FOREVER]
    ready: set[str] = set()

    def act(name: str, text: str) -> None:
        if text == "ready":
            ready.add(name)
        if len(ready) == 4 and observer.acted_s is None:
            observer.note()
            agent = psutil.Process(observer.agents()[0])
            for process in (watch_of(agent.pid), agent):
                process.kill()

    job = fake_job(tmp_path, dict.fromkeys(EVERYBODY, forever))
    observer = Observer(act)
    with pytest.raises(ClusterFailure, match="the agent of machine 0"):
        run_cluster(job, on_line=observer, verbose=True)
    observer.assert_nothing_left(job.ip_config)


def test_a_whole_process_group_can_be_killed(tmp_path: Path) -> None:
    """As a batch system does: launcher and agents at once; the watches remain to clean up."""
    forever = [["sampler", 600], ["litter", None], ["print", "ready"], FOREVER]
    plan = dict.fromkeys(("server 0", "trainer 0"), forever)
    job = fake_job(tmp_path, plan, parts=1)
    observer = Observer()
    with subprocess.Popen(driver_command(job), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as driver:
        assert driver.stdout is not None
        num_ready = 0
        while num_ready < 2:
            name, _, text = driver.stdout.readline().rstrip("\n").partition("|")
            observer.hear(name, text)
            num_ready += text == "ready"
        observer.note(driver.pid)
        agent = observer.agents()[0]
        driver.kill()
        os.kill(agent, signal.SIGKILL)
    begun_s = time.monotonic()
    while any(is_alive(process.pid) for process in observer.processes):
        assert time.monotonic() - begun_s < END_WITHIN_S
        time.sleep(0.05)
    observer.assert_nothing_left(job.ip_config)


def test_a_killed_launcher_is_missed_though_its_pipes_live_on(tmp_path: Path) -> None:
    """A child that it has forked holds the other end of its agents' stdin."""
    forever = [["sampler", 600], ["print", "ready"], FOREVER]
    job = fake_job(tmp_path, dict.fromkeys(EVERYBODY, forever))
    observer = Observer()
    hold = 'holder = os.fork() or time.sleep(600); print("holder", holder, sep="|", flush=True)'
    with subprocess.Popen(
        driver_command(job, at_first_line=hold), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as driver:
        assert driver.stdout is not None
        name, _, holder = driver.stdout.readline().rstrip("\n").partition("|")
        assert name == "holder"
        try:
            num_ready = 0
            while num_ready < 4:
                name, _, text = driver.stdout.readline().rstrip("\n").partition("|")
                observer.hear(name, text)
                num_ready += text == "ready"
            observer.note(driver.pid)
            observer.processes.discard(psutil.Process(int(holder)))
            driver.kill()
            begun_s = time.monotonic()
            while any(is_alive(process.pid) for process in observer.processes):
                assert time.monotonic() - begun_s < END_WITHIN_S
                time.sleep(0.05)
        finally:
            os.kill(int(holder), signal.SIGKILL)
    observer.assert_nothing_left(job.ip_config)


def test_trainers_may_end_at_different_times(tmp_path: Path) -> None:
    late = [["outlive", "trainer 1"], ["sleep", 1.0], ["touch", "stop"]]
    plan = {"trainer 1": [["print", "through"]], "trainer 0": late}
    result, _ = run_observed(fake_job(tmp_path, plan))
    assert result.part("trainer 0").elapsed_s > result.part("trainer 1").elapsed_s + 0.5


def test_a_server_that_lingers_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(controller, "LINGER_S", 0.3)
    result, observer = run_observed(fake_job(tmp_path, {"server 1": [["listen", None], FOREVER]}))
    assert result.exit_code == 0
    assert "server 1 have not" in caplog.text
    observer.assert_nothing_left()


def test_a_server_that_ends_while_trainers_need_it_is_a_fault(tmp_path: Path) -> None:
    plan = {"server 0": [["print", "no role for me"]], "trainer 0": [FOREVER], "trainer 1": [FOREVER]}
    error, _ = fail(fake_job(tmp_path, plan))
    assert str(error).startswith("server 0 on machine 0 (127.0.0.1) ended with exit code 0 without having served.")
    assert "initialize" in str(error)
    assert "no role for me" in error.details
    assert error.exit_code == 1


def test_a_script_that_only_prints_its_help_ends_well(tmp_path: Path) -> None:
    plan: dict[str, list[list[Any]]] = {
        f"{role} {i}": [["print", "usage"]] for role in ("server", "trainer") for i in (0, 1)
    }
    result, _ = run_observed(fake_job(tmp_path, plan))
    assert result.exit_code == 0


def test_a_server_that_never_comes_up(tmp_path: Path) -> None:
    plan = {"server 1": [["print", "loading"], FOREVER], "trainer 0": [FOREVER], "trainer 1": [FOREVER]}
    job = fake_job(tmp_path, plan, start_timeout_s=5.0)
    error, _ = fail(job)
    assert job.ip_config is not None
    port = job.ip_config.read_text().splitlines()[1].split()[1]
    assert str(error).startswith(f"server 1 on machine 1 (127.0.0.1) does not listen on port {port} after 5 s.")
    assert "with --start-timeout-s (start_timeout_s= of a ClusterJob)" in str(error)
    assert "loading" in error.details


def test_a_job_that_takes_too_long(tmp_path: Path) -> None:
    error, _ = fail(fake_job(tmp_path, {"trainer 1": [["print", "busy"], FOREVER]}, timeout_s=12.0))
    assert "did not end within 12 s; still running: server 0, server 1, trainer 0, trainer 1" in str(error)
    assert error.exit_code == 124


def test_a_port_in_use(tmp_path: Path) -> None:
    job = fake_job(tmp_path)
    assert job.ip_config is not None
    port = int(job.ip_config.read_text().splitlines()[1].split()[1])
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", port))
        sock.listen()
        message = rf"^machine 1 \(127.0.0.1\): server 1 cannot listen: port {port} of 127.0.0.1 is already in use"
        with pytest.raises(LaunchError, match=message):
            run_cluster(job)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"command": ("nope.py",)}, r"the script .*/nope\.py does not exist"),
        ({"python": "/no/python"}, "the interpreter /no/python does not exist"),
        ({"workspace": Path("/no/where"), "part_config": None}, "the workspace /no/where does not exist"),
        ({"part_config": Path("other.json")}, r"the partition config .*other\.json cannot be read: No such file"),
        ({"part_config": Path(FAKE)}, r"fake_part\.py is not valid JSON, it may be truncated .*Copy the folder again"),
        ({"part_config": Path("none.json")}, r"none\.json is not a partition config: it has no num_parts"),
        ({"part_config": Path("list.json")}, r"list\.json must hold a JSON object \(got list\)"),
        ({"ip_config": Path("none.txt")}, r"ip_config .*none\.txt cannot be read: No such file"),
        ({"ip_config": Path("high.txt"), "num_servers": 2}, r"machine 1 .* begins at port 65535, and 2 servers need"),
        ({"machine_prefixes": (("env",),)}, r"machine_prefixes must name 2 commands, one per partition \(got 1\)"),
        (
            {"machine_prefixes": (("/no/such",),) * 2},
            "machine 0 .* cannot be started: /no/such: No such file",
        ),
        ({"machine_prefixes": (("false",),) * 2}, r"the agent of machine \d .* exited with code 1"),
    ],
)
def test_wrong_jobs(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    job = fake_job(tmp_path)
    (tmp_path / "none.json").write_text("{}")
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "high.txt").write_text("127.0.0.1 30050\n127.0.0.1 65535\n")
    fields = {name: getattr(job, name) for name in job.__slots__} | change
    if fields["part_config"] is None:
        fields["part_config"] = tmp_path / "graph.json"
        fields["ip_config"] = tmp_path / "ip_config.txt"
    with pytest.raises(LaunchError, match=message):
        run_cluster(ClusterJob(**fields))


def test_an_interpreter_that_leaves_the_plugin_out(tmp_path: Path) -> None:
    """It would run without the plugin, and without what a launched DGL needs."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    python.chmod(0o755)
    on, off = {"DGL_HYBRID_ENABLE": "1"}, {"DGL_HYBRID_ENABLE": "0"}
    said = r"the startup hook dgl_hybrid_startup\.pth is not at work in /.*/python, or that did not answer, so "
    with pytest.raises(LaunchError, match=said + r"parts would run without the plugin.*--strategy off needs none"):
        run_cluster(fake_job(tmp_path, parts=1, python=str(python), environment=on))
    run_cluster(fake_job(tmp_path, parts=1, python=str(python), environment=off))  # stock DGL, say
    for environment in (on, off):  # stock DGL takes all machines of one host for the same one
        with pytest.raises(LaunchError, match=said + r"machines of this job on one host would overwrite each other's"):
            run_cluster(fake_job(tmp_path, python=str(python), environment=environment))


@pytest.mark.parametrize("length", [47, 48])
def test_samplers_need_a_folder_in_which_sockets_fit(
    length: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would lose what they send, and their trainers would wait for half an hour. A letter may have two bytes."""
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        folder = Path(short, "é" + "x" * (length - len(short) - 3))
        folder.mkdir()
        bind = "import os, socket, sys; socket.socket(socket.AF_UNIX).bind(sys.argv[1])"
        monkeypatch.setenv("TMPDIR", str(folder))
        monkeypatch.setattr(tempfile, "tempdir", None)
        run_cluster(fake_job(tmp_path))
        job = fake_job(tmp_path, num_samplers=1)
        prefix = "dgl_hybrid_12345678_0_files"
        address = folder / prefix / "pymp-12345678" / "listener-12345678"
        address.parent.mkdir(parents=True)
        fits = subprocess.run([sys.executable, "-c", bind, address], capture_output=True, check=False).returncode == 0
        assert fits is (length == 47)
        if fits:
            run_cluster(job)
        else:
            with pytest.raises(LaunchError, match=r"samplers cannot make their sockets in .* longer than 75 bytes"):
                run_cluster(job)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_what_a_terminal_cannot_show_ends_no_job(
    encoding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding))
    run_cluster(fake_job(tmp_path, {"trainer 0": [["print", "é €"], ["touch", "stop"]]}))
    shown = {"ascii": rb"\xe9 \u20ac", "latin-1": b"\xe9 \\u20ac", "utf-8": "é €".encode()}
    assert b"[trainer 0] " + shown[encoding] + b"\n" in written.getvalue()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("localhost\n127.0.0.1 30052\n", r"line 1: expected an IPv4 address such as 10.0.0.1 \(got 'localhost'\)"),
        ("127.0.0.1\n::1\n", r"line 2: expected an IPv4 address such as 10.0.0.1 \(got '::1'\)"),
        ("10.0.0..1\n127.0.0.1\n", r"line 1: expected an IPv4 address .* \(got '10.0.0..1'\)"),
        ("-oProxyCommand=x\n127.0.0.1\n", "line 1: expected an IPv4 address"),
        ("127.0.0.1 30050\n", "names 1 machines, but the graph has 2 partitions. Write one line per partition"),
        ("127.0.0.1 30050\n\n127.0.0.1 30051\n", r"line 2: expected an address and perhaps a port \(got ''\)"),
        ("127.0.0.1 x\n127.0.0.1 30051\n", r"line 1: expected an address and perhaps a port \(got '127.0.0.1 x'\)"),
        ("127.0.0.1\n127.0.0.1 30051\n", "both need port 30051 of 127.0.0.1"),
    ],
)
def test_wrong_ip_configs(text: str, message: str, tmp_path: Path) -> None:
    job = fake_job(tmp_path, num_servers=2)
    assert job.ip_config is not None
    job.ip_config.write_text(text)
    with pytest.raises(LaunchError, match=message):
        run_cluster(job)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_trainers": 0}, r"num_trainers must be at least 1 \(got 0\)"),
        ({"num_samplers": -1}, r"num_samplers must be at least 0 \(got -1\)"),
        ({"command": ()}, "command must name the script"),
        ({"graph_format": "csc,foo"}, r"graph_format must be of coo, csr, csc \(got 'csc,foo'\)"),
        ({"threads": 0}, r"threads must be at least 1 and at most 4096 \(got 0\)"),
        ({"threads": 4097}, r"threads must be at least 1 and at most 4096 \(got 4097\)"),
    ],
)
def test_wrong_fields(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ClusterJob(**({"part_config": Path("p.json"), "command": ("s.py",)} | change))


def test_machines_run_under_their_prefixes(tmp_path: Path) -> None:
    """What benchmarks need: each machine's agent, servers and trainers in a network namespace of its own."""
    (tmp_path / "show.py").write_text(SHOW_ENVIRONMENT)
    job = fake_job(tmp_path)
    prefixes = tuple(("env", f"HOST_NAME=host{i}") for i in (0, 1))
    result = run_cluster(
        ClusterJob(part_config=job.part_config, command=("show.py",), workspace=tmp_path, machine_prefixes=prefixes),
        on_line=lambda line: None,
    )
    for one in result.parts:
        assert json.loads(one.last_lines[0])["env"]["HOST_NAME"] == f"host{one.part.machine.machine_id}"


def test_where_nobody_reads_any_more_parts_still_end_in_their_own_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`launch ... | head`: what a part said at its end failed again, in the midst of ending, and agents were killed."""
    plan = {name: [["complain_at_end", "bye"], ["print", "ready"], FOREVER] for name in ("trainer 0", "trainer 1")}
    job = fake_job(tmp_path, plan)
    heard: list[str] = []

    def show(line: Any) -> None:
        heard.append(line.text)
        if line.text in ("ready", "bye"):
            raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        run_cluster(job, on_line=show)
    assert "bye" in heard
    assert "killed" not in caplog.text
