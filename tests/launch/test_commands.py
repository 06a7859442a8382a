# SPDX-License-Identifier: Apache-2.0
"""`dgl-hybrid launch` and `dgl-hybrid run`: whose words are whose, and what comes out."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dgl_hybrid.cli import launch, main, run
from dgl_hybrid.cli.one_line_parser import OneLineParser
from dgl_hybrid.cli.script_words import check_script, split_words
from dgl_hybrid.launch.cluster import SSH, ClusterJob
from dgl_hybrid.sampling.config import ENABLE_VARIABLE, HaloConfig
from tests.cli.commands import command, environment, run_command
from tests.launch.jobs import END_WITHIN_S, FAKE, Observer, fake_job, is_alive

OURS = ["--part-config", "p.json", "--num-trainers", "2"]


def split(module: Any, *words: str) -> tuple[list[str], list[str]]:
    parser = OneLineParser(prog="p")
    module.add_options(parser)
    return split_words(parser, words)


@pytest.mark.parametrize(
    "script",
    [
        ["train.py"],
        ["train.py", "--num-trainers", "9", "--strategy", "none", "--help", "-h"],
        ["train.py", "--", "x", "--", "--json"],
        ["train.py", "--num", "1"],  # short for several options of ours
        ["train.py", "--fan_out", "10,25", "", "-", "a b"],
    ],
)
def test_the_scripts_words_are_its_own(script: list[str]) -> None:
    assert split(launch, *OURS, *script) == (OURS, script)
    assert split(launch, *OURS, "--", *script) == (OURS, script)
    assert split(run, "--strategy", "depcomm", *script) == (["--strategy", "depcomm"], script)
    assert split(run, *script) == ([], script)
    assert split(run, "--", *script) == ([], script)


def test_names_are_those_of_dgls_launcher() -> None:
    ours, script = split(
        launch, "--part_config", "a_b.json", "--num_trainers=2", "--json", "train_it.py", "--part_config", "c"
    )
    assert ours == ["--part-config", "a_b.json", "--num-trainers=2", "--json"]
    assert script == ["train_it.py", "--part_config", "c"]


def test_a_module_may_be_run() -> None:
    assert split(run, "--", "-m", "package.train", "--json") == ([], ["-m", "package.train", "--json"])


@pytest.mark.parametrize(
    "words", [["python3 train.py --x 1"], ["python3.11", "train.py"], ["/usr/bin/python", "-u", "t.py"]]
)
def test_interpreters_are_not_scripts(words: list[str]) -> None:
    with pytest.raises(ValueError, match="name the script without an interpreter"):
        check_script(words)


def test_scripts_may_have_any_name() -> None:
    for name in ("python.py", "python3.11.py", "pythonic/train.py", "train"):
        assert check_script([name, "x"]) == (name, "x")


def parse(*words: str) -> ClusterJob:
    parser = OneLineParser(prog="p")
    launch.add_options(parser)
    ours, script = split_words(parser, words)
    args = parser.parse_args(ours)
    args.script = script
    return launch.make_job(args)


def test_options_become_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    words = "--workspace w --part_config p.json --ip_config i.txt --num_trainers 2 --num_servers 3 --num_samplers 4"
    words += (
        " --num_omp_threads 5 --graph_format csr --python python3.11 --ssh_port 2222 --ssh_username me --timeout-s 7"
    )
    words += " --start-timeout-s 8 --extra_envs A=b=c --extra-envs D= --strategy depcomm --budget 10% train.py x"
    job = parse(*words.split())
    assert job == ClusterJob(
        workspace=Path("w"),
        part_config=Path("p.json"),
        ip_config=Path("i.txt"),
        num_trainers=2,
        num_servers=3,
        num_samplers=4,
        threads=5,
        graph_format="csr",
        python="python3.11",
        remote_shell=(*SSH, "-p", "2222", "-l", "me"),
        timeout_s=7.0,
        start_timeout_s=8.0,
        environment={
            "A": "b=c",
            "D": "",
            ENABLE_VARIABLE: HaloConfig(strategy="depcomm", budget="10%").to_environment(),
        },
        command=("train.py", "x"),
    )
    # What the user does not say is the script's to say.
    for words, value in ((), "1"), (("--budget", "10%"), '{"budget": "10%"}'):
        assert parse("--part-config", "p.json", *words, "t.py").environment == {ENABLE_VARIABLE: value}
    monkeypatch.setenv(ENABLE_VARIABLE, "hybrid:10%")
    for words, value in ((), "hybrid:10%"), (("--budget", "1MB"), '{"strategy": "hybrid", "budget": "1MB"}'):
        assert parse("--part-config", "p.json", *words, "t.py").environment == {ENABLE_VARIABLE: value}
    for off in ("0", "off"):
        monkeypatch.setenv(ENABLE_VARIABLE, off)
        assert parse("--part-config", "p.json", "t.py").environment == {ENABLE_VARIABLE: off}, "the last word"
        job = parse("--part-config", "p.json", "--strategy", "depcomm", "t.py")
        assert job.environment == {ENABLE_VARIABLE: '{"strategy": "depcomm"}'}
    monkeypatch.setenv(ENABLE_VARIABLE, "1")
    job = parse("--part-config", "p.json", "--strategy", "off", "t.py")
    # Not without it: parts would inherit what we have, and a script's own enable() is to do nothing.
    environment = {ENABLE_VARIABLE: "0"}
    assert job == ClusterJob(part_config=Path("p.json"), command=("t.py",), environment=environment)


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["launch", "--part-config", "p.json"], 1, "name the script to run, after our own options"),
        (["launch", "train.py"], 2, "the following arguments are required: --part-config"),
        (["launch", "--part-config", "p.json", "--foo", "train.py"], 2, "unrecognized arguments: --foo"),
        # An option cut short took the script's place: its value was missing then.
        (["launch", "--part-conf", "p.json", "train.py"], 2, "arguments are required: --part-config"),
        (["launch", *OURS, "--strategy", "none", "t.py"], 2, "argument --strategy: invalid choice: 'none'"),
        (["launch", *OURS, "--budget", "much", "t.py"], 1, "budget must be 'auto', 'unlimited', a share"),
        (
            ["launch", *OURS, "--strategy", "off", "--budget", "10%", "t.py"],
            1,
            "--budget cannot be given with --strategy off, which leaves the plugin out (got '10%')",
        ),
        (["launch", *OURS, "--extra-envs", "A", "t.py"], 1, "--extra-envs must be NAME=VALUE (got 'A')"),
        (
            ["launch", *OURS, "--extra-envs", "DGL_HYBRID_ENABLE=0", "t.py"],
            1,
            "--extra-envs DGL_HYBRID_ENABLE=... would be overridden by --strategy and --budget: give these, or "
            "--strategy off for stock DGL",
        ),
        (["launch", *OURS, "t.py"], 1, "p.json cannot be read: No such file or directory"),
        (["launch", *OURS, "--num-servers", "0", "t.py"], 1, "num_servers must be at least 1 (got 0)"),
        (["launch", *OURS, "--timeout-s", "-5", "t.py"], 1, "timeout_s must be positive and finite (got -5.0)"),
        (
            ["launch", *OURS, "--start-timeout-s", "nan", "t.py"],
            1,
            "start_timeout_s must be positive and finite (got nan)",
        ),
        (["launch", *OURS, "--ssh-port", "99999999", "t.py"], 1, "--ssh-port must lie in 1..65535 (got 99999999)"),
        (["run"], 1, "name the script to run, after our own options"),
        (["run", "--strategy", "off", "t.py"], 2, "argument --strategy: invalid choice: 'off'"),
        (["run", "nope.py"], 1, "the script nope.py does not exist"),
        (["run", "python3 train.py"], 1, "name the script without an interpreter"),
    ],
)
def test_wrong_words_end_in_one_line(
    words: list[str],
    code: int,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        found = main.main(words)
    except SystemExit as error:
        found = error.code if isinstance(error.code, int) else -1
    captured = capsys.readouterr()
    assert found == code
    assert captured.out == ""
    assert captured.err.count("\n") == 1, captured.err
    assert message in captured.err


@pytest.mark.parametrize("words", [["launch", *OURS, "t.py"], ["run", "t.py"], ["run", "--budget", "10%", "t.py"]])
def test_a_variable_that_nobody_can_read_is_told_before_anything_starts(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each server and trainer died of it, with a traceback."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.py").touch()
    monkeypatch.setenv(ENABLE_VARIABLE, "true")
    assert main.main(words) == 1
    told = capsys.readouterr().err
    assert "DGL_HYBRID_ENABLE must be 1, 0, a strategy" in told
    assert told.count("\n") == 1, told


def test_without_the_startup_hook_the_plugin_would_be_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "t.py").touch()
    monkeypatch.setattr(
        sys, "meta_path", [f for f in sys.meta_path if getattr(f, "__name__", "") != "DglHybridStartup"]
    )
    assert main.main(["run", str(tmp_path / "t.py")]) == 1
    assert "the startup hook dgl_hybrid_startup.pth is not at work in this Python" in capsys.readouterr().err


SHOW = """
import json, os, sys
told = {"argv": sys.argv, "exe": sys.executable, "pid": os.getpid(), "name": __name__}
told["enable"] = os.environ.get("DGL_HYBRID_ENABLE")
told["modules"] = sorted(name for name in sys.modules if name.split(".")[0] in ("dgl", "dgl_hybrid"))
print(json.dumps(told))
sys.exit(int(os.environ.get("LEAVE_WITH", "0")))
"""


def test_run_becomes_the_script(tmp_path: Path) -> None:
    """An ordinary Python program: its name, arguments, exit code and process id; nothing is imported before it asks."""
    (tmp_path / "show.py").write_text(SHOW)
    words = ["--strategy", "depcomm", "--budget", "1MB", "show.py", "--strategy", "mine", "--", "a b"]
    with subprocess.Popen(
        command("run", *words),
        cwd=tmp_path,
        env={**environment(), "LEAVE_WITH": "5"},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        told = json.loads(process.stdout.read())
        assert process.wait(timeout=600) == 5
        assert told["pid"] == process.pid
    assert told["argv"] == ["show.py", "--strategy", "mine", "--", "a b"]
    assert told["name"] == "__main__"
    assert told["exe"] == sys.executable
    assert told["modules"] == []
    assert HaloConfig.from_environment(told["enable"]) == HaloConfig(strategy="depcomm", budget="1MB")


def test_run_switches_the_plugin_on(tmp_path: Path) -> None:
    (tmp_path / "uses_dgl.py").write_text("import dgl, sys\nprint('dgl_hybrid.sampling' in sys.modules)\n")
    done = run_command("run", "uses_dgl.py", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
    for added in ({}, {ENABLE_VARIABLE: "0"}, {ENABLE_VARIABLE: "off"}):
        done = subprocess.run(
            [sys.executable, "uses_dgl.py"],
            cwd=tmp_path,
            env=environment() | added,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.stdout == "False\n", done.stderr


def launch_words(folder: Path, plan: dict[str, list[list[Any]]], *words: str) -> list[str]:
    fake_job(folder)
    return ["launch", "--workspace", str(folder), "--part_config", "graph.json", "--ip_config", "ip_config.txt", *words,
            FAKE, json.dumps(plan), "--json", "--verbose"]  # fmt: skip


def test_launch_tells_how_all_parts_ended(tmp_path: Path) -> None:
    plan = {"trainer 0": [["print", "done"], ["touch", "stop"]], "trainer 1": []}
    done = run_command(*launch_words(tmp_path, plan, "--json"))
    assert done.returncode == 0, done.stderr
    assert "[trainer 0] done\n" in done.stdout
    assert "[server" not in done.stdout
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["exit_code"] == 0
    assert [part["name"] for part in result["parts"]] == ["server 0", "server 1", "trainer 0", "trainer 1"]
    assert result["parts"][2]["last_lines"][-1] == "done"
    assert [part["machine"] for part in result["parts"]] == [0, 1, 0, 1]


def test_launch_leaves_with_the_trainers_code(tmp_path: Path) -> None:
    plan = {"trainer 1": [["complain", "my last words"], ["exit", 3]], "trainer 0": [["sleep", 600]]}
    done = run_command(*launch_words(tmp_path, plan, "--json", "--"))
    assert done.returncode == 3
    result = json.loads(done.stdout.splitlines()[-1])
    codes = {part["name"]: part["exit_code"] for part in result["parts"]}
    assert (result["exit_code"], codes.pop("trainer 1")) == (3, 3)
    assert codes == {"server 0": None, "server 1": None, "trainer 0": None}, "ended with the job"
    assert result["parts"][3]["last_lines"][-1] == "my last words"
    *details, last = done.stderr.splitlines()
    assert last == "dgl-hybrid launch: error: trainer 1 on machine 1 (127.0.0.1) exited with code 3"
    assert details[details.index("last lines of trainer 1 on machine 1 (127.0.0.1):") + 2] == "  my last words"


def test_a_job_under_nohup_outlives_its_terminal(tmp_path: Path) -> None:
    plan = {"trainer 0": [["print", "ready"], ["sleep", 3], ["touch", "stop"]], "trainer 1": []}
    with subprocess.Popen(
        command(*launch_words(tmp_path, plan)),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        while "ready" not in (line := process.stdout.readline()):
            assert line, process.stderr.read()
        process.send_signal(signal.SIGHUP)
        _, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_launch_ends_the_job_before_it_leaves(number: signal.Signals, code: int, tmp_path: Path) -> None:
    plan = {
        name: [["sampler", 600], ["litter", None], ["print", "ready"], ["sleep", 600]]
        for name in ("trainer 0", "trainer 1")
    }
    observer = Observer()
    with subprocess.Popen(
        command(*launch_words(tmp_path, plan, "--verbose")),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        num_ready = 0
        while num_ready < 2:
            name, _, text = process.stdout.readline().rstrip("\n").removeprefix("[").partition("] ")
            assert name, "the launcher has ended early"
            observer.hear(name, text)
            num_ready += text == "ready"
        observer.note(process.pid)
        process.send_signal(number)
        begun_s = time.monotonic()
        _, errors = process.communicate(timeout=END_WITHIN_S)
        assert process.returncode == code
        assert time.monotonic() - begun_s < END_WITHIN_S
    why = "interrupted" if number == signal.SIGINT else f"ended by {number.name}"
    assert errors.rstrip().endswith(f"dgl-hybrid launch: error: {why}"), errors
    assert not [one for one in observer.processes if is_alive(one.pid)]
    observer.assert_nothing_left(tmp_path / "ip_config.txt")
