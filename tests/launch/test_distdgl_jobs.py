# SPDX-License-Identifier: Apache-2.0
"""Jobs of real DistDGL servers, trainers and samplers: partitions that share a host, and what a kill leaves of them."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dgl_hybrid  # before dgl, which it makes importable

# isort: split
import dgl
import torch

from dgl_hybrid.errors import LaunchError
from dgl_hybrid.launch.cluster import ClusterFailure, ClusterJob, run_cluster
from dgl_hybrid.launch.leftovers import SHM_FOLDER
from dgl_hybrid.launch.machines import write_ip_config
from tests.cli.commands import run_command
from tests.launch.jobs import END_WITHIN_S, SCRIPTS, Observer, driver_command, is_alive

START_WITHIN_S = 400.0
"""Several processes import DGL at once, on a machine that may be busy."""


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Number of partitions -> partition config; written at first use."""
    folder = tmp_path_factory.mktemp("parts")

    def write(num_parts: int) -> Path:
        path = folder / str(num_parts) / "tiny.json"
        if not path.exists():
            torch.manual_seed(0)
            graph = dgl.rand_graph(100, 700)
            graph.ndata["original"] = torch.arange(100)
            graph.ndata["feat"] = torch.arange(100.0)[:, None].repeat(1, 4)
            graph.ndata["train_mask"] = torch.arange(100) < 60
            dgl_hybrid.partition_graph(graph, "tiny", num_parts, str(path.parent), part_method="random")
        return path

    return write


def tiny_job(part_config: Path, folder: Path, stay: str, **options: Any) -> ClusterJob:
    num_parts = int(part_config.parent.name)
    return ClusterJob(
        part_config=part_config,
        command=(str(SCRIPTS / "tiny_distdgl.py"), stay),
        workspace=folder,
        ip_config=write_ip_config(folder / "ip_config.txt", num_parts, num_servers=options.get("num_servers", 1)),
        timeout_s=START_WITHIN_S,
        threads=1,
        **options,
    )


@pytest.mark.parametrize(
    ("num_parts", "options"),
    [(2, {}), pytest.param(3, {"num_servers": 2, "num_trainers": 2, "num_samplers": 1}, marks=pytest.mark.slow)],
)
def test_partitions_share_a_host(
    num_parts: int, options: dict[str, int], parts: Callable[[int], Path], tmp_path: Path
) -> None:
    """Each machine serves its own partition: every row that trainers read is the right one."""

    def act(name: str, text: str) -> None:
        if text == "at epoch" and observer.acted_s is None:
            observer.note()
            observer.shared_memory |= {f"{prefix}tiny" for prefix in observer.prefixes}
            assert all((SHM_FOLDER / name).exists() for name in observer.shared_memory)

    job = tiny_job(parts(num_parts), tmp_path, "nowhere", **options)
    observer = Observer(act)
    result = run_cluster(job, on_line=observer, verbose=True)
    told = sorted(text for name, text in observer.lines if text.startswith("machine "))
    num_trainers = options.get("num_trainers", 1)
    assert told == [f"machine {i}: 60 seeds, 0 wrong rows" for i in range(num_parts) for _ in range(num_trainers)]
    assert {one.exit_code for one in result.parts} == {0}
    assert observer.acted_s is not None
    observer.assert_nothing_left(job.ip_config)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-9]), r"is truncated: (\d+) bytes were written \(got \d+\)"),
        (lambda path: path.unlink(), "is missing"),
    ],
)
@pytest.mark.parametrize("name", ["graph.dgl", "node_feat.dgl"])
def test_damaged_files_are_named_before_anything_starts(
    name: str, damage: Callable[[Path], None], message: str, parts: Callable[[int], Path], tmp_path: Path
) -> None:
    """A server would end in the midst of DGL's C++."""
    folder = tmp_path / "2"
    shutil.copytree(parts(2).parent, folder)
    damage(folder / "part1" / name)
    observer = Observer()
    with pytest.raises(LaunchError, match=rf"^machine 1 \(127\.0\.0\.1\): {folder}/part1/{name} {message}"):
        run_cluster(tiny_job(folder / "tiny.json", tmp_path, "nowhere"), on_line=observer, verbose=True)
    assert observer.lines == []


@pytest.mark.parametrize("argument", ["sys.argv[2]", pytest.param("None", marks=pytest.mark.slow)])
def test_a_script_may_name_other_addresses(argument: str, parts: Callable[[int], Path], tmp_path: Path) -> None:
    """Those that the launcher has made are used, with the plugin and without it; one line says so."""
    text = (SCRIPTS / "tiny_distdgl.py").read_text()
    usual = 'os.environ["DGL_IP_CONFIG"]'
    assert usual in text
    (tmp_path / "script.py").write_text(text.replace(usual, argument))
    (tmp_path / "ip_config.txt").write_text("127.0.0.1 9\n")  # nobody listens there
    switch = {"sys.argv[2]": "off", "None": "depcomm"}[argument]
    words = ["--workspace", str(tmp_path), "--part-config", str(parts(1)), "--strategy", switch]
    words += ["--num-omp-threads", "1", "--timeout-s", str(START_WITHIN_S)]
    words += ["--extra-envs", "DGL_DIST_MAX_TRY_TIMES=3"]  # where they are not used, that is seen soon
    done = run_command("launch", *words, "script.py", "nowhere", "ip_config.txt")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "[trainer 0] machine 0: 60 seeds, 0 wrong rows" in done.stdout
    (line,) = [line for line in done.stderr.splitlines() if "addresses" in line]
    assert re.search(r"initialize: the servers' addresses are those of \S+/ip_config\.txt, which the launcher", line)
    assert line.endswith("not those of the script's " + {"sys.argv[2]": "'ip_config.txt'", "None": "None"}[argument])


def victim(observer: Observer, target: str) -> int:
    return observer.agents()[1] if target == "agent" else observer.pids[target]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "moment", "num_samplers"),
    [
        ("trainer 1", "start", 0),
        ("server 0", "start", 0),
        ("trainer 0", "epoch", 1),
        ("trainer 1", "epoch", 0),
        ("server 1", "epoch", 1),
        ("agent", "epoch", 1),
        ("trainer 1", "exit", 1),
        ("server 0", "exit", 0),
    ],
)
def test_a_kill_ends_the_job(
    target: str, moment: str, num_samplers: int, parts: Callable[[int], Path], tmp_path: Path
) -> None:
    job = tiny_job(parts(2), tmp_path, moment, num_samplers=num_samplers)

    def act(name: str, text: str) -> None:
        is_time = target in observer.pids if moment == "start" else text == f"at {moment}"
        if is_time and observer.acted_s is None:
            observer.note()
            os.kill(victim(observer, target), signal.SIGKILL)

    observer = Observer(act)
    with pytest.raises(ClusterFailure) as caught:
        run_cluster(job, on_line=observer, verbose=True)
    assert observer.acted_s is not None
    assert time.monotonic() - observer.acted_s < END_WITHIN_S
    assert caught.value.exit_code == 137
    name = "the agent of machine 1" if target == "agent" else f"{target} on machine {target[-1]}"
    assert str(caught.value) == f"{name} (127.0.0.1) was killed by SIGKILL (out of memory?)"
    observer.assert_nothing_left(job.ip_config)


@pytest.mark.slow
def test_a_killed_launcher_takes_servers_and_samplers_with_it(parts: Callable[[int], Path], tmp_path: Path) -> None:
    job = tiny_job(parts(2), tmp_path, "epoch", num_samplers=1)
    observer = Observer()
    with subprocess.Popen(driver_command(job), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as driver:
        assert driver.stdout is not None
        text = ""
        while text != "at epoch":
            name, _, text = driver.stdout.readline().rstrip("\n").partition("|")
            assert name, "the driver has ended early"
            observer.hear(name, text)
        observer.note(driver.pid)
        driver.kill()
    assert observer.acted_s is not None
    while any(is_alive(process.pid) for process in observer.processes):
        assert time.monotonic() - observer.acted_s < END_WITHIN_S
        time.sleep(0.05)
    observer.assert_nothing_left(job.ip_config)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("failure", "code", "told"),
    [("sys.exit(3)", 3, ""), ("raise KeyError('no such thing')", 1, "KeyError: 'no such thing'")],
)
def test_a_trainer_that_fails_does_not_wait_for_the_others(
    failure: str, code: int, told: str, parts: Callable[[int], Path], tmp_path: Path
) -> None:
    """As DGL does on its way out, while they wait for it in a collective. Without the plugin, too."""
    script = tmp_path / "fails.py"
    text = (SCRIPTS / "tiny_distdgl.py").read_text()
    batch = "            rows = graph"
    assert batch in text
    script.write_text(text.replace(batch, f"            if dist.get_rank() == 1:\n                {failure}\n{batch}"))
    job = tiny_job(parts(2), tmp_path, "nowhere", num_samplers=1)
    fields = {name: getattr(job, name) for name in job.__slots__} | {"command": ("fails.py", "nowhere")}
    observer = Observer()
    with pytest.raises(ClusterFailure) as caught:
        run_cluster(ClusterJob(**fields), on_line=observer, verbose=True)
    assert str(caught.value) == f"trainer 1 on machine 1 (127.0.0.1) exited with code {code}"
    assert caught.value.exit_code == code
    assert told in caught.value.details
    observer.assert_nothing_left(job.ip_config)
