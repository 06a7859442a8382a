# SPDX-License-Identifier: Apache-2.0
"""What the side-by-side benchmark is asked for."""

from __future__ import annotations

import pytest

from benchmarks.systems.measure import Settings
from benchmarks.systems.run import parse, settings_of


def test_a_system_that_there_is_not_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--system", "hybird"])
    assert "hybird" in capsys.readouterr().err
    assert parse(["--system", "sar_mfg"]).system == ["sar_mfg"]


@pytest.mark.parametrize("arguments", ["--quick --accuracy", "--memory --accuracy", "--accuracy --write"])
def test_two_measurements_at_once_are_refused(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`make bench ARGS=--accuracy` trained for hours, with the time limit of a few minutes, and kept nothing."""
    with pytest.raises(SystemExit):
        parse(arguments.split())
    told = capsys.readouterr().err.splitlines()[-1]
    assert "--accuracy" in told
    assert "different measurements" in told


@pytest.mark.parametrize("arguments", ["--quick --graph products", "--quick --scale 0.1", "--accuracy --ranks 3"])
def test_options_that_would_change_nothing_are_refused(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(arguments.split())
    told = capsys.readouterr().err.splitlines()[-1]  # the lines before show all options there are
    mode, option, _ = arguments.split()
    assert told.endswith(f"{mode} has cells of its own: leave out {option}")


def test_a_few_minutes_are_for_one_start_of_each_system() -> None:
    assert settings_of(parse(["--quick"])) == Settings(starts=1, more_rounds=8, timeout_s=300.0)
    words = ["--quick", "--starts", "2", "--rounds", "7", "--more-rounds", "3"]
    assert settings_of(parse(words)) == Settings(starts=2, rounds=7, more_rounds=3, timeout_s=300.0)
    assert settings_of(parse([])) == Settings()


def test_memory_is_asked_for_of_hybrid_and_sar_in_one_turn() -> None:
    args = parse(["--memory", "--graph", "products"])
    assert settings_of(args) == Settings(starts=1, rounds=1, more_rounds=0)
    assert settings_of(parse(["--memory", "--rounds", "3"])) == Settings(starts=1, rounds=3, more_rounds=0)
