# SPDX-License-Identifier: Apache-2.0
"""The example that the README shows, run as it says: partition, then torchrun."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from dgl_hybrid.cli import main
from tests.cli.commands import TIMEOUT_S, environment

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "full_graph_sage.py"


def test_full_graph_sage_learns(tmp_path: Path) -> None:
    parts = tmp_path / "parts"
    # In this process, which has imported what it needs; as a command of its own, cli/test_commands has it.
    assert main.main(["partition", "--data", "powerlaw:nodes=2000", "--ranks", "2", "--out", str(parts)]) == 0
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"),
            *map(str, (EXAMPLE, parts / "powerlaw.json")),
        ],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=environment(),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    accuracy = re.fullmatch(r"test accuracy (\d\.\d{4})", lines[-1])
    assert accuracy is not None, lines[-1]
    assert float(accuracy[1]) > 0.3
    losses = [float(line.rpartition(" ")[2]) for line in lines if line.startswith("epoch ")]
    assert len(losses) == 20, "only rank 0 prints, a line for each epoch"
    assert losses[-1] < 0.8 * losses[0]
