# SPDX-License-Identifier: Apache-2.0
"""`benchmarks.exchange.sums`: all ways give the same numbers, and figures come of it."""

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

from benchmarks.exchange import sums
from tests.cli.commands import wait_for


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has classes of threads")
def test_every_way_is_timed(capsys: pytest.CaptureFixture[str]) -> None:
    sums.main(["--ranks", "2", "--rounds", "1", "--json"])
    printed = capsys.readouterr()
    cells = json.loads(printed.out)["cells"]
    assert [cell["what"] for cell in cells] == ["gather of 1 KB", "sum of 150 KB", "sum of 1000 KB"]
    assert all(set(sums.WAYS) < set(cell) and cell["ranks"] == 2 for cell in cells)
    assert "What a step takes beside its work" in printed.err


def test_a_signal_ends_the_ranks(tmp_path: Path) -> None:
    words = ["-m", "benchmarks.exchange.sums", "--ranks", "2", "--rounds", "100000"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, *words], env=environment, stderr=subprocess.PIPE, text=True) as process:
        ranks: list[psutil.Process] = []

        def have_begun() -> bool:
            for child in psutil.Process(process.pid).children():
                with contextlib.suppress(psutil.Error):
                    if "spawn_main" in str(child.cmdline()) and child not in ranks:
                        ranks.append(child)
            return len(ranks) == 2 or process.poll() is not None

        wait_for(have_begun, "two ranks")
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60.0)
    assert process.returncode == 128 + signal.SIGTERM, errors
    assert "Traceback" not in errors
    assert not any(rank.is_running() for rank in ranks), "a rank was left behind"
    assert list(tmp_path.iterdir()) == []
