# SPDX-License-Identifier: Apache-2.0
"""Lines of measurements: what is known again, what counts, and what a run shows."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tqdm import tqdm

from benchmarks.systems import results, run
from benchmarks.systems.grid import Cell, systems_of
from benchmarks.systems.measure import Bench, Settings, summarise_epochs
from benchmarks.systems.results import (
    append_lines,
    measured_run,
    newest,
    peer_versions,
    read_lines,
    spread,
    without_partial_runs,
)
from benchmarks.systems.summary import summarise
from benchmarks.systems.write import BEGIN, END, write
from tests.benchmarks.systems.measurements import (
    MACHINE,
    ONE_GAT,
    SETTINGS,
    SHAPED,
    TWO,
    make_line,
)


def test_epochs_are_of_the_slowest_rank() -> None:
    def rank(seconds: float, sent: int | None, wire: int) -> dict[str, Any]:
        parts = {"cpu_s": 0.5, "compute_s": 0.2, "exchange_s": None, "wait_s": None}
        return {"elapsed_s": seconds, "sent_bytes": sent, "wire_bytes": wire, **parts}

    epochs = [[rank(1.0, 30, 100), rank(3.0, 0, 200)], [rank(2.0, 30, 100), rank(1.0, 0, 200)]]
    found = summarise_epochs(epochs, is_emulated=True)
    assert (found["p50"], found["iters"], found["sent_bytes"], found["wire_bytes"]) == (2.5, 2, 30, 300)
    assert found["exchange_s"] is None
    assert found["exchanges"] is None
    # Ranks that share one interface all count the same bytes.
    assert summarise_epochs(epochs, is_emulated=False)["wire_bytes"] == 100


def test_exchanges_are_told_by_layer_and_direction() -> None:
    def epoch(*blocked: float) -> list[dict[str, Any]]:
        # The first layer exchanges twice in a forward.
        kinds = ((1, False), (1, False), (1, True))
        exchanges = [
            {"layer": layer, "backward": backward, "blocked_s": one, "beside_s": 2 * one}
            for (layer, backward), one in zip(kinds, blocked, strict=True)
        ]
        parts = dict.fromkeys(("cpu_s", "compute_s", "exchange_s", "wait_s", "sent_bytes", "wire_bytes"))
        return [{"elapsed_s": 1.0, "exchanges": exchanges, **parts}]

    found = summarise_epochs([epoch(1.0, 2.0, 5.0), epoch(1.0, 1.0, 3.0), epoch(4.0, 4.0, 4.0)], is_emulated=False)
    assert found["exchanges"] == [
        {"layer": 1, "backward": False, "blocked_s": 3.0, "beside_s": 6.0},
        {"layer": 1, "backward": True, "blocked_s": 4.0, "beside_s": 8.0},
    ]


def test_lines_survive_a_run_that_was_broken_off(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    assert read_lines(file) == []
    append_lines(file, [{"a": 1}, {"a": 2}])
    with file.open("a") as stream:
        stream.write('{"a": 3, "b')
    assert read_lines(file) == [{"a": 1}, {"a": 2}]
    append_lines(file, [{"a": 4}])
    assert read_lines(file) == [{"a": 1}, {"a": 2}, {"a": 4}]


def test_a_measured_cell_is_known_again(lines: list[dict[str, Any]]) -> None:
    def known(cell: Cell, *systems: str, code: str = "code1", **changes: Any) -> str | None:
        settings, machine = SETTINGS | changes.pop("settings", {}), MACHINE | changes.pop("machine", {})
        return measured_run(lines, cell.key, systems, code, settings, machine=machine, **changes)

    assert known(TWO, "hybrid", "sar") == "run1"
    assert not known(TWO, "hybrid", "dgl")
    assert not known(TWO, "hybrid", code="code2")
    assert not known(TWO, "hybrid", settings={"rounds": 7})
    assert not known(replace(TWO, ranks=3), "hybrid")
    # The file may have come with the sources, from somebody else's machine.
    assert not known(TWO, "hybrid", machine={"processor": "another"})
    assert known(TWO, "hybrid", machine={"system": "Linux 2"})
    # What failed counts as measured, unless it is to be tried again.
    assert known(SHAPED, "hybrid", "sar")
    assert not known(SHAPED, "hybrid", "sar", retry_failed=True)
    # Ratios are formed within a run, so two halves of two runs are not a measurement.
    lines.append(make_line(TWO, "dgl", 1.0, run="run2"))
    assert not known(TWO, "hybrid", "dgl")
    lines += [make_line(TWO, name, 1.0, run="run3") for name in ("hybrid", "dgl")]
    assert known(TWO, "hybrid", "dgl") == known(TWO, "hybrid") == "run3"
    assert known(TWO, "hybrid", "sar") == "run1"


def test_the_last_run_of_a_cell_counts(lines: list[dict[str, Any]]) -> None:
    lines += [make_line(ONE_GAT, "hybrid", 2.0, run="run2"), make_line(ONE_GAT, "dgl", 3.0, run="run2")]
    assert newest(lines)[ONE_GAT.key]["dgl"]["p50"] == 3.0
    assert summarise(lines, {})["vs_dgl_one_rank_gat_median"] == pytest.approx(1.5)


def test_a_run_of_a_part_of_the_systems_does_not_take_the_place_of_a_fuller_one(
    lines: list[dict[str, Any]], tmp_path: Path
) -> None:
    """`--system hybrid` left the tables without all the others, and so without its ratios."""
    readme = tmp_path / "README.md"
    readme.write_text(f"{BEGIN}\n{END}\n")
    write(lines, readme=readme, pictures=tmp_path)
    before = readme.read_text()
    cell = newest(lines)[TWO.key]
    lines.append(make_line(TWO, "hybrid", 77.0, run="a part"))
    lines.append(make_line(TWO, "sar", None, run="a part", status="unavailable", error="no checkout"))
    write(lines, readme=readme, pictures=tmp_path)
    assert readme.read_text() == before
    whole = [make_line(TWO, name, 88.0, run="whole") for name in cell if name != "sar"]
    whole.append(make_line(TWO, "sar", None, run="whole", status="failed", error="died"))
    write(lines + whole, readme=readme, pictures=tmp_path)
    after = readme.read_text()
    assert "| 88 " in after
    assert "| 77 " not in after
    assert "died" in after


@pytest.mark.parametrize(
    ("changes", "stays"),
    [
        ({}, True),
        ({"rounds": 7}, True),
        ({"rounds": 4}, False),
        ({"starts": 1}, False),
        ({"starts": 6}, True),
        ({"more_rounds": 0}, False),
        ({"allocator": "default"}, False),
    ],
)
def test_a_run_of_other_settings_does_not_take_the_place_of_a_longer_one(
    changes: dict[str, Any], stays: bool, lines: list[dict[str, Any]]
) -> None:
    """One turn by another allocator stood in the table, as if it were like the others."""
    other = [line | {"run": "run2", "settings": SETTINGS | changes} for line in lines if line["cell"] == TWO.key]
    assert without_partial_runs(lines + other) == (lines + other if stays else lines)
    # More turns or starts than usual were one cell's: the next run has as many as all others.
    usual = [line | {"run": "run3", "settings": SETTINGS} for line in other]
    assert newest(without_partial_runs(lines + other + usual))[TWO.key]["hybrid"]["run"] == "run3"


def test_spread() -> None:
    assert spread([3.0]) == {"p20": 3.0, "p50": 3.0, "p80": 3.0}
    assert spread([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]) == {"p20": 2.0, "p50": 3.5, "p80": 5.0}


def test_code_is_known_by_all_that_decides_what_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for pattern in results.MEASURING_SOURCES:
        assert list(results.ROOT.glob(pattern)), f"{pattern} is no source any more"
    packages = {"torch": "1"}
    monkeypatch.setattr(results, "ROOT", tmp_path)
    monkeypatch.setattr(results, "package_versions", lambda: packages)
    names = ("dgl_hybrid/graph/a.py", "dgl_hybrid/a.cu", "patches/a.patch", "benchmarks/systems/gate.py")
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1")
    versions = [results.code_version()]
    assert results.code_version() == versions[0]
    for name in names:
        (tmp_path / name).write_text("2")
        versions.append(results.code_version())
    (tmp_path / names[0]).rename(tmp_path / "dgl_hybrid/graph/b.py")
    versions.append(results.code_version())
    packages["torch"] = "2"
    versions.append(results.code_version())
    assert len(set(versions)) == len(versions)
    # What reads, draws and tells figures does not change them.
    (tmp_path / "benchmarks/systems/write.py").write_text("1")
    assert results.code_version() == versions[-1]


def test_lines_of_sources_that_changed_are_of_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "code_version", lambda: "b")
    assert results.mark_changed([{"code": "b"}], {"code": "b"}) == [{"code": "b"}]
    (line,) = results.mark_changed([{"code": "a"}], {"code": "a"})
    assert "changed" in line["code"]


def test_a_run_shows_what_was_measured_on_its_own_machine(lines: list[dict[str, Any]], tmp_path: Path) -> None:
    """Cells of the file that came with the sources were shown as the user's, also those that were skipped."""
    of_another = [line | {"machine": MACHINE | {"processor": "another"}} for line in lines]
    own = [make_line(TWO, system, 1.0, run="own") for system in systems_of(TWO)]
    file = tmp_path / "results.jsonl"
    append_lines(file, of_another + own)
    about = {"code": "code1", "machine": MACHINE}
    bench = Bench(settings=Settings(rounds=5), cache=tmp_path, peers=None, rates={}, about=about)  # type: ignore[arg-type]
    args = run.parse(["--hours", "0"])
    with tqdm(disable=True) as bar:
        found, skipped = run.measure_cells(bench, [TWO, ONE_GAT], args, file, bar)
    assert {(line["cell"], line["run"]) for line in found} == {(TWO.key, "own")}
    assert list(skipped) == [ONE_GAT.key]


def test_what_is_shown_is_the_run_of_what_was_asked_for(lines: list[dict[str, Any]], tmp_path: Path) -> None:
    """A later run of one system emptied the cell, though it was not measured again."""
    file = tmp_path / "results.jsonl"
    whole = [make_line(TWO, system, 1.0, run="whole") for system in systems_of(TWO)]
    append_lines(file, [*whole, make_line(TWO, "hybrid", 2.0, run="a part")])
    about = {"code": "code1", "machine": MACHINE}
    bench = Bench(settings=Settings(rounds=5), cache=tmp_path, peers=None, rates={}, about=about)  # type: ignore[arg-type]
    before = file.read_bytes()
    with tqdm(disable=True) as bar:
        found, skipped = run.measure_cells(bench, [TWO], run.parse([]), file, bar)
        assert ({line["run"] for line in found}, skipped) == ({"whole"}, {})
        # A system that is not there is no measurement.
        found, skipped = run.measure_cells(bench, [TWO], run.parse(["--system", "sar"]), file, bar)
    assert found == []
    assert "SAR" in skipped[TWO.key]
    assert file.read_bytes() == before


def test_commits_of_the_peers_are_told(tmp_path: Path) -> None:
    assert peer_versions(None) == {}
    assert peer_versions(tmp_path / "none") == {}
    (tmp_path / "SAR").mkdir()
    subprocess.run(["git", "init", "-q", str(tmp_path / "SAR")], check=True)
    name = ("-c", "user.name=n", "-c", "user.email=e")
    words = ["git", "-C", str(tmp_path / "SAR"), *name, "commit", "-q", "--allow-empty", "-m", "m"]
    subprocess.run(words, check=True)
    assert re.fullmatch("[0-9a-f]{7,}", peer_versions(tmp_path)["SAR"])
