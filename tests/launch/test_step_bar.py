# SPDX-License-Identifier: Apache-2.0
"""Who partitions a graph sees on a terminal what is being done; nothing is printed elsewhere."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from dgl_hybrid.cli import main
from dgl_hybrid.launch.step_bar import step_bar
from dgl_hybrid.launch.workspace import DataConfig, PartitionConfig, prepare_partition
from dgl_hybrid.partition import partition_graph
from tests.helpers.graphs import hand_drawn

SMALL = "powerlaw:nodes=120,degree=6,features=5,classes=3"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [Terminal, io.StringIO])
@pytest.mark.parametrize("shows", [True, False])
def test_a_bar_is_shown_on_a_terminal_alone(
    stream: type[io.StringIO], shows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    err = stream()
    monkeypatch.setattr(sys, "stderr", err)
    with step_bar(shows) as on_step:
        on_step("splitting", 0, 3)
        on_step("writing", 2, 3)
    if not shows or stream is io.StringIO:
        assert err.getvalue() == ""
        return
    shown = err.getvalue().split("\r")
    assert any(line.startswith("splitting |") and " 0/3 [" in line for line in shown)
    assert any(line.startswith("writing |") and " 2/3 [" in line for line in shown)
    assert shown[-1].strip() == "", "nothing stays"


def test_steps_are_told_in_order(tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    partition_graph(hand_drawn(), "g", 2, tmp_path / "p", part_method="random", on_step=lambda *step: told.append(step))
    assert told == [
        ("splitting the graph (random)", 0, 4),
        ("writing part 0", 1, 4),
        ("writing part 1", 2, 4),
        ("checksums", 3, 4),
    ]


def test_a_partition_that_is_kept_has_no_steps(tmp_path: Path) -> None:
    told: list[str] = []
    partition = PartitionConfig(ranks=2, workspace=str(tmp_path))
    for _ in range(2):
        prepare_partition(DataConfig(data=SMALL), partition, on_step=lambda what, *_: told.append(what))
    assert told[0] == f"loading {SMALL}"
    assert told[-1] == "checksums"
    assert len(told) == 5


@pytest.mark.parametrize("options", [[], ["--json"]])
@pytest.mark.parametrize("place", ["--out", "--workspace"])
def test_the_command_shows_them(
    options: list[str], place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    err = Terminal()
    monkeypatch.setattr(sys, "stderr", err)
    assert main.main(["partition", "--data", SMALL, "--ranks", "2", place, str(tmp_path / "p"), *options]) == 0
    assert ("writing part 1 |" in err.getvalue()) == (not options)
