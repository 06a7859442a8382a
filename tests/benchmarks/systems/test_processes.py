# SPDX-License-Identifier: Apache-2.0
"""A tiny run of the side-by-side benchmark, with real processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from benchmarks.systems import gate, results
from benchmarks.systems.results import (
    read_lines,
)
from benchmarks.systems.run import main
from benchmarks.systems.team import SystemFailure, Team
from tests.benchmarks.systems.measurements import (
    tiny_job,
)
from tests.cli.commands import wait_for


def test_a_system_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    team = Team(job=tiny_job("pipegcn"), folder=tmp_path / "team")
    before = set(psutil.Process().children(recursive=True))
    try:
        team.start()
        with pytest.raises(SystemFailure, match="prepare: NotImplementedError: PipeGCN has GraphSAGE only"):
            team.ask("prepare", timeout_s=100)
    finally:
        team.end()
    assert set(psutil.Process().children(recursive=True)) <= before


@pytest.mark.parametrize("starts", [1, pytest.param(2, marks=pytest.mark.slow)])  # figures of several: above
def test_tiny_grid_end_to_end_and_again(
    starts: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "code_version", lambda: "of this test")  # whoever edits sources meanwhile
    words = "--json --graph powerlaw --scale 0.01 --model sage --layers 2 --hidden 128 --ranks 2 --network loopback"
    file = tmp_path / "results.jsonl"
    systems = ("--system", "hybrid", "--system", "depcomm", "--system", "sar")
    places = (
        "--results",
        str(file),
        "--cache",
        str(tmp_path / "cache"),
        "--rounds",
        "1",
        "--starts",
        str(starts),
        "--peers",
        str(tmp_path),
    )
    arguments = [*words.split(), *systems, *places]
    main(arguments)
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    (cell,) = result["cells"]
    assert cell["cell"] == "powerlaw@0.01/sage-2x128/2/loopback"
    assert cell["failed"] == {}
    assert cell["unavailable"] == ["sar"]
    assert cell["seconds"]["hybrid"] > 0
    assert result["vs_sar_median"] is None
    own, other = (next(line for line in read_lines(file) if line["variant"] == name) for name in ("hybrid", "depcomm"))
    assert own["starts"][0]["in_processes_of"] == ["hybrid", "depcomm"]
    assert other["gate"] == pytest.approx(own["gate"], abs=1e-4)
    assert other["starts"][0]["plan"] == "depcomm"
    assert other["sent_bytes"] > 0
    assert own["gate"]["is_comparable"]
    assert own["gate"]["losses"] == 3
    assert own["gate"]["vertices"] > 50
    assert own["gate"]["gradient_error"] < gate.GRADIENT_TOLERANCE
    assert own["iters"] >= 2
    assert len(own["starts"]) == starts
    assert min(s["p50"] for s in own["starts"]) <= own["p50"] <= max(s["p50"] for s in own["starts"])
    assert own["wire_bytes"] is not None
    assert len(own["peak_rss_bytes"]) == 2
    content = file.read_bytes()
    main(arguments)  # knows it again, and measures nothing
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["cells"] == result["cells"]
    assert file.read_bytes() == content


SYSTEMS = "benchmarks.systems --model sage --layers 2 --hidden 128 --ranks 2 --system hybrid --results results.jsonl"


@pytest.mark.parametrize(("command", "number"), [(SYSTEMS, signal.SIGTERM), ("benchmarks.overlap", signal.SIGHUP)])
def test_a_signal_ends_what_was_started(command: str, number: signal.Signals, tmp_path: Path) -> None:
    """And removes its folders: sockets, reports and partitions of hours of a grid."""
    root, temporary = Path(__file__).parents[3], tmp_path / ("temporary" * 12)  # addresses of sockets have 107 bytes
    temporary.mkdir()
    words = [*command.split(), "--graph", "powerlaw", "--scale", "0.01", "--network", "loopback", "--cache", "cache"]
    with subprocess.Popen(
        [sys.executable, "-m", *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(root), "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # whoever runs the tests under nohup
    ) as process:
        ranks: list[psutil.Process] = []

        def have_begun() -> bool:
            for child in psutil.Process(process.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    if "benchmarks.systems.worker" in child.cmdline() and child not in ranks:
                        ranks.append(child)
            return bool(ranks) or process.poll() is not None

        wait_for(have_begun, "a rank")
        process.send_signal(number)
        _, errors = process.communicate(timeout=120.0)
    assert process.returncode == 128 + number, errors
    assert "Traceback" not in errors
    psutil.wait_procs(ranks, timeout=30.0)
    assert ranks
    assert not any(rank.is_running() for rank in ranks), "a rank was left behind"
    assert list(temporary.iterdir()) == []
