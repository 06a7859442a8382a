# SPDX-License-Identifier: Apache-2.0
"""Real graphs, three ranks, hybrid, the README's commands: near the accuracy that the data's own table names."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.cli.commands import command, environment

PLANETOID = ("--hidden", "16", "--normalize-features")


@pytest.mark.data
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options", "at_least"),
    [
        ("cora", PLANETOID, 0.805),
        ("citeseer", PLANETOID, 0.705),
        ("pubmed", PLANETOID, 0.781),
        ("debian-deps", (), 0.74),
    ],
)
def test_accuracy(name: str, options: tuple[str, ...], at_least: float, data_dir: Path, tmp_path: Path) -> None:
    words = command(
        *("train", "--data", data_dir / f"{name}.npz", "--model", "gcn", "--num-layers", "2"),
        *("--ranks", "3", "--strategy", "hybrid", "--json", "--workspace", tmp_path, *options),
    )
    done = subprocess.run(words, capture_output=True, text=True, timeout=900, env=environment(), check=False)
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout.splitlines()[-1])
    assert record["test_accuracy"] >= at_least
    assert len(record["epochs"]) == 200
