# SPDX-License-Identifier: Apache-2.0
"""The example for PyTorch Lightning, which is not among what the tests install."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dgl_hybrid.cli import main
from tests.cli.commands import TIMEOUT_S, environment

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "lightning_full_graph_sage.py"


@pytest.mark.skipif(
    importlib.util.find_spec("pytorch_lightning") is None, reason="pytorch-lightning is not installed here"
)
def test_it_learns_by_a_plan_for_what_the_step_calls(tmp_path: Path) -> None:
    parts = tmp_path / "parts"
    assert main.main(["partition", "--data", "powerlaw:nodes=2000", "--ranks", "2", "--out", str(parts)]) == 0
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), str(parts / "powerlaw.json")],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=environment(),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    accuracy = re.fullmatch(r"validation accuracy (\d\.\d{4})", done.stdout.splitlines()[-1])
    assert accuracy is not None, done.stdout
    assert float(accuracy[1]) > 0.5
    assert done.stderr.count("SAGE, which it calls with the blocks of all layers, stands for it") == 1
