# SPDX-License-Identifier: Apache-2.0
"""A process that ends right after a collective ends well, whatever the threads of gloo have yet to do."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.cli.commands import TIMEOUT_S, environment


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.exchange.slow_gloo_thread", *words],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=environment(),
        check=False,
    )


@pytest.mark.parametrize("words", [(), ("end-all",)], ids=["groups-left", "groups-ended-by-script"])
def test_late_thread_of_gloo(words: tuple[str, ...]) -> None:
    done = run(*words)
    assert done.returncode == 0, done.stderr
    assert "terminate" not in done.stderr


def test_what_the_end_of_groups_prevents() -> None:
    """Once PyTorch does without it, so should we. On busy cores the thread may be early for once."""
    assert any(run("keep").returncode == -signal.SIGABRT for _ in range(10))
