# SPDX-License-Identifier: Apache-2.0
"""Runs the real command in a process of its own."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

SMALL = "powerlaw:nodes=300,degree=6,features=12,classes=4"
TIMEOUT_S = 600.0
"""Processes import torch and DGL, which is slow where others work too."""


def environment() -> dict[str, str]:
    """The parent's, without what a launcher may have left there."""
    lost = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
    return {**{name: value for name, value in os.environ.items() if name not in lost}, "OMP_NUM_THREADS": "1"}


def command(*words: str | Path) -> list[str]:
    return [sys.executable, "-m", "dgl_hybrid.cli", *map(str, words)]


def run_command(*words: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*words), capture_output=True, text=True, timeout=TIMEOUT_S, cwd=cwd, env=environment(), check=False
    )


def wait_for(condition: Callable[[], bool], what: str, *, timeout_s: float = TIMEOUT_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come about within {timeout_s:g} s"
        time.sleep(0.1)


def rank_processes(launcher: int) -> list[psutil.Process]:
    """The ranks that a launcher has started, in the order of their start."""
    found = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(launcher).children(recursive=True):
            with contextlib.suppress(psutil.Error):  # ranks start helpers that soon end
                if "dgl_hybrid.launch.rank" in child.cmdline():
                    found.append(child)
    return sorted(found, key=lambda process: process.pid)
