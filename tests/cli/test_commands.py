# SPDX-License-Identifier: Apache-2.0
"""The commands as users start them; each start costs seconds, so one run answers several questions.

The default run plans, trains, cannot keep results, loses a rank, and is ended; the slow run has the rest.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from dgl_hybrid.launch.machines import find_free_ports
from tests.cli.commands import SMALL, TIMEOUT_S, command, environment, rank_processes, run_command, wait_for

TRAIN = ("--model", "sage", "--num-layers", "3", "--hidden", "8", "--epochs", "3", "--dtype", "float64")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("commands")


@pytest.fixture(scope="module")
def partition(folder: Path) -> Path:
    done = run_command("partition", "--data", SMALL, "--ranks", "2", "--out", folder / "parts", "--json")
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout.splitlines()[-1])
    assert sum(record["num_nodes"]) == 300
    return Path(record["part_config"])


def fails(done: subprocess.CompletedProcess[str], message: str, *, code: int = 1) -> None:
    assert done.returncode == code
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1, done.stderr
    assert message in done.stderr


@pytest.mark.slow
def test_a_folder_that_plans_cannot_be_written_to_is_named(partition: Path, folder: Path) -> None:
    (folder / "file").write_text("")
    done = run_command("plan", "--partition", partition, *TRAIN, "--out", folder / "file" / "plan")
    assert done.returncode == 1
    assert f"--out {folder / 'file' / 'plan'} must be a folder that can be written into" in done.stderr
    assert "Traceback" not in done.stderr
    assert "unexpected" not in done.stderr


def test_plan_then_train_by_it(partition: Path, folder: Path) -> None:
    done = run_command("plan", "--partition", partition, *TRAIN, "--explain", "7", "--json", "--out", folder / "plan")
    assert done.returncode == 0, done.stderr
    planned = json.loads(done.stdout.splitlines()[-1])
    assert "original id 7 is global id" in planned["explanations"][0]
    assert planned["predicted_epoch_s"] > 0
    out = folder / "result"
    words = ("--partition", partition.parent, "--plan", folder / "plan", "--json", "--out", out)
    done = run_command("train", *words, *TRAIN)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", "nothing belongs on stderr where it is no terminal"
    trained = json.loads(done.stdout.splitlines()[-1])
    assert trained["chosen_plan"] == planned["chosen_plan"]
    assert trained["ranks"] == 2
    assert len(trained["epochs"]) == 3
    assert trained["plan"][0].keys() >= {"layer", "cached", "communicated"}
    assert [row["communicated"] for row in trained["plan"]] == [row["communicated"] for row in planned["plan"]]
    # What a table tells of bytes is what is sent forward in every epoch: it was twice that, and of a first layer whose
    # sums are kept what comes once.
    told = [sum(row["received_bytes"] for row in planned["by_rank"] if row["layer"] == layer) for layer in (1, 2, 3)]
    assert told == [row["forward_bytes"] for row in trained["plan"]]
    written = json.loads((out / "config.json").read_text())
    assert written["model"] == "sage"
    assert json.loads((out / "result.json").read_text())["epochs"] == trained["epochs"]


@pytest.mark.slow
def test_torchrun_gives_the_same_losses(folder: Path) -> None:
    words = ("train", "--data", SMALL, "--workspace", folder / "w", *TRAIN, "--json")
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
    done = subprocess.run(
        [sys.executable, *launcher, *command(*words)[1:]],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=environment(),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    under_torchrun = json.loads(done.stdout.splitlines()[-1])
    done = run_command(*words, "--ranks", "3", "--strategy", "depcache")
    assert done.returncode == 0, done.stderr
    ours = json.loads(done.stdout.splitlines()[-1])
    assert (under_torchrun["ranks"], ours["ranks"]) == (2, 3)
    assert [epoch["loss"] for epoch in under_torchrun["epochs"]] == pytest.approx(
        # Dropout is on: the masks agree for any number of ranks, strategy and launcher.
        [epoch["loss"] for epoch in ours["epochs"]],
        rel=1e-9,
    )


def test_results_that_cannot_be_kept_are_no_end_of_training(partition: Path, folder: Path) -> None:
    """It was found out after the last epoch, and the report was lost."""
    out = folder / "a_file"
    out.touch()
    done = run_command("train", "--partition", partition, *TRAIN[:-4], "--epochs", "10000000", "--out", out)
    fails(done, f"--out {out} must be a folder that can be written into: ")


def test_results_are_kept_where_nobody_reads_what_is_printed(partition: Path, folder: Path) -> None:
    """`| head -1`, or a pager that was quit: a finished run ended without a file."""
    out = folder / "unread"
    process = subprocess.Popen(
        command("train", "--partition", partition, *TRAIN, "--out", out),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment(),
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait(timeout=TIMEOUT_S) != 0
    assert len(json.loads((out / "result.json").read_text(encoding="utf-8"))["epochs"]) == 3
    assert json.loads((out / "config.json").read_text(encoding="utf-8"))["epochs"] == 3


@pytest.mark.parametrize(
    "words",
    [
        ("partition", "--data", SMALL, "--out", "parts of nobody"),
        pytest.param(("plan",), marks=pytest.mark.slow),
        ("doctor",),
    ],
    ids=lambda words: words[0],
)
def test_commands_run_where_streams_are_closed(words: tuple[str, ...], partition: Path, folder: Path) -> None:
    """As in some daemons: tracebacks of attributes of None, in ranks, too."""
    given = [
        *words,
        *(("--partition", str(partition), *TRAIN, "--out", "plan of nobody") if words == ("plan",) else ()),
    ]
    closed = ["sh", "-c", 'exec "$@" <&- >&- 2>err', "sh", *command(*given)]
    done = subprocess.run(closed, timeout=TIMEOUT_S, env=environment(), cwd=folder, check=False)
    assert (done.returncode, (folder / "err").read_text()) == (0, "")
    assert words == ("doctor",) or [*folder.glob("* of nobody/*.json")]


def test_results_that_cannot_be_kept_end_all_ranks_of_torchrun(partition: Path, folder: Path) -> None:
    """Rank 0 found it out by itself, and ranks on other hosts waited for it in `init_process_group`."""
    out = folder / "a_file"
    out.touch()
    port = find_free_ports("127.0.0.1")
    # As torchrun starts them, which would end the other ranks of its own host.
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            command("train", "--partition", partition, *TRAIN, "--out", out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**environment(), **meeting, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=TIMEOUT_S)[1] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    message = f"--out {out} must be a folder that can be written into: "
    assert f"[0/2] dgl-hybrid train: error: {message}" in said[0]
    assert f"[1/2] dgl-hybrid train: error: rank 0 of 2: {message}" in said[1]
    assert [process.returncode for process in ranks] == [1, 1]


@pytest.mark.slow  # training/test_trainer has the error on all ranks, and above one of them ends in one line
def test_damaged_partition(partition: Path, folder: Path) -> None:
    shutil.copytree(partition.parent, folder / "damaged")
    file = folder / "damaged" / "part1" / "graph.dgl"
    file.write_bytes(file.read_bytes()[:-100])
    start_s = time.monotonic()
    done = run_command("train", "--partition", folder / "damaged", *TRAIN)
    fails(done, "rank 1 of 2: ")
    assert "part1/graph.dgl is truncated" in done.stderr
    assert time.monotonic() - start_s < 180, "its peer waits for it"


def start_endless(partition: Path) -> subprocess.Popen[str]:
    words = ("train", "--partition", partition, *TRAIN[:-4], "--epochs", "10000000")
    process = subprocess.Popen(
        command(*words), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    )

    def have_worked() -> bool:
        # Until both have used the time of a start they may not even have met; later is the more telling moment.
        ranks = rank_processes(process.pid)
        return len(ranks) == 2 and all(sum(rank.cpu_times()[:2]) > 4 for rank in ranks)

    wait_for(lambda: have_worked() or process.poll() is not None, "training")
    assert process.poll() is None, process.communicate()[1]
    return process


def test_a_killed_rank_ends_the_job(partition: Path) -> None:
    process = start_endless(partition)
    ranks = rank_processes(process.pid)
    ranks[1].kill()
    start_s = time.monotonic()
    _, errors = process.communicate(timeout=TIMEOUT_S)
    assert time.monotonic() - start_s < 20
    assert process.returncode == 1
    assert errors.count("\n") == 1, errors
    assert "was killed by SIGKILL" in errors
    psutil.wait_procs(ranks, timeout=30)
    assert not any(rank.is_running() for rank in ranks), "a rank was left behind"


@pytest.mark.slow
def test_a_rank_that_is_ended_from_outside_is_named(partition: Path) -> None:
    process = start_endless(partition)
    rank_processes(process.pid)[1].terminate()
    _, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 1
    assert "of 2 was ended by SIGTERM, which the launcher did not send" in errors


@pytest.mark.slow
def test_ranks_do_not_outlive_their_launcher(partition: Path) -> None:
    process = start_endless(partition)
    ranks = rank_processes(process.pid)
    folder = Path(ranks[0].cmdline()[-1])
    assert folder.is_dir()
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=TIMEOUT_S)
    _, alive = psutil.wait_procs(ranks, timeout=60)
    assert not alive, "a rank was left behind"
    assert not folder.exists(), "the job's folder was left behind"


@pytest.mark.slow
def test_demo(folder: Path) -> None:
    """DistDGL among the rest: its own servers and trainers."""
    small = ("--data", SMALL, "--hidden", "8", "--epochs", "3", "--check-epochs", "2")
    done = run_command("demo", *small, "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout.splitlines()[-1])
    assert [run["strategy"] for run in record["runs"]] == ["plain DGL", "DistDGL", "depcache", "depcomm", "hybrid"]
    assert record["runs"][1]["error"] is None
    assert record["runs"][1]["loss_is_compared"]
    for run in record["runs"][1:]:
        assert run["loss_digits"] is None or run["loss_digits"] > 9, run["strategy"]
    for name in ("demo_results", "demo_plan"):
        for suffix in ("png", "svg"):
            assert (folder / "demo_output" / f"{name}.{suffix}").stat().st_size > 1000


@pytest.mark.slow
def test_a_run_broken_off_is_resumed(partition: Path, folder: Path) -> None:
    """By options as they are typed, from a folder relative to where the command runs."""
    words = ("train", "--partition", partition, *TRAIN, "--json", "--checkpoint", "runs/one")
    # One that PyTorch imports as an optimizer is made, in ranks.
    (folder / "profile.py").write_text("raise SystemExit('a file of the user in place of a module of Python')\n")
    assert run_command(*words, "--epochs", "2", cwd=folder).returncode == 0
    assert sorted(path.name for path in (folder / "runs/one").iterdir()) == ["best.safetensors", "last.safetensors"]
    fails(run_command(*words, cwd=folder), "last.safetensors is there already")
    done = run_command(*words, "--resume", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "epochs 3 to 3, resumed" in done.stdout
    record = json.loads(done.stdout.splitlines()[-1])
    assert (record["first_epoch"], len(record["epochs"])) == (3, 1)


_SWALLOWS = """
import os, signal
try:
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(1000): pass
except KeyboardInterrupt:
    pass
def add_options(parser): pass
def run(args): print("went on without it"); return 0
"""


def test_ctrl_c_while_libraries_are_imported_ends_a_command(tmp_path: Path) -> None:
    """Some take a KeyboardInterrupt for what they lack: a command went on, or failed for it later."""
    (tmp_path / "swallows.py").write_text(_SWALLOWS)
    program = (
        "import sys; from dgl_hybrid.cli import main; main.COMMANDS['doctor'] = ('swallows', 'x'); "
        "sys.exit(main.main(['doctor']))"
    )
    variables = environment()
    variables["PYTHONPATH"] = f"{tmp_path}:{variables.get('PYTHONPATH', '')}"
    done = subprocess.run(
        [sys.executable, "-c", program], env=variables, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert (done.returncode, done.stderr) == (130, "dgl-hybrid doctor: error: interrupted\n")
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("number", "code"), [pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow), (signal.SIGTERM, 143)]
)
def test_signals_end_the_job_and_give_its_exit_code(number: signal.Signals, code: int, partition: Path) -> None:
    process = start_endless(partition)
    ranks = rank_processes(process.pid)
    assert listeners_of([psutil.Process(process.pid), *ranks]) <= {"127.0.0.1", "::1"}, "nobody else may reach them"
    process.send_signal(number)
    _, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == code, errors
    why = "interrupted" if number == signal.SIGINT else "ended by SIGTERM"
    assert errors == f"dgl-hybrid train: error: {why}\n"
    _, alive = psutil.wait_procs(ranks, timeout=30)
    assert not alive, "a rank was left behind"


def listeners_of(processes: list[psutil.Process]) -> set[str]:
    """Returns the addresses at which anybody may connect to these processes."""
    return {
        connection.laddr.ip
        for process in processes
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }


@pytest.mark.slow
def test_jobs_run_where_temporary_folders_have_any_name(
    partition: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that meet in a file looked for it under the name that a URL has for it."""
    (tmp_path / "pbs.12[3] ü@b").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "pbs.12[3] ü@b"))
    done = run_command("train", "--partition", partition, *TRAIN)
    assert done.returncode == 0, done.stderr
