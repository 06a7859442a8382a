# SPDX-License-Identifier: Apache-2.0
"""Tables and pictures of measurements."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib.axes import Axes

from benchmarks.systems import results
from benchmarks.systems.summary import summarise
from benchmarks.systems.tables import CELL_HEAD, LINE_HEAD, cell_rows, drop_empty_columns, line_rows
from benchmarks.systems.write import BEGIN, END, draw_all, report, write
from tests.benchmarks.systems.measurements import (
    ONE_GAT,
    SHAPED,
    TWO,
    make_line,
)


def test_tables(lines: list[dict[str, Any]]) -> None:
    cells = summarise(lines, {})["cells"]
    rows = {row[0]: dict(zip(CELL_HEAD, row, strict=True)) for row in cell_rows(cells)}
    assert rows[SHAPED.key]["SAR"] == "failed"
    assert rows[SHAPED.key]["best_pure"] == "*0.95*"
    assert rows[TWO.key]["distdgl_full"] == "20.00"
    assert rows[ONE_GAT.key]["SAR"] == ""
    found = line_rows([line for line in lines if line["cell"] == SHAPED.key])
    assert all(len(row) == len(LINE_HEAD) for row in found)
    assert found[-1][:2] == ("SAR", "failed: it broke / here")
    assert found[-2] == (
        *("hybrid", "2 s (1.8 s to 2.4 s)", "", "100 ms", "100 ms", "", "", "", "2.0 MB", "100, 200 MB", "2.2 s"),
        *("10 ms", "3 s"),
    )
    full = next(line for line in lines if line["variant"] == "distdgl_full" and line["cell"] == SHAPED.key)
    named = [line_rows([full | {"facts": {"skips_largest": skips}}])[0][0] for skips in (False, True)]
    assert named == ["DistDGL, full", "DistDGL, full, not all seeds at once"]
    assert drop_empty_columns(("a", "b"), [("1", ""), ("2", "")]) == (("a",), [("1",), ("2",)])


def test_readme_is_written_from_lines_alone(lines: list[dict[str, Any]], tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"# Mine\n\n{BEGIN}\nold\n{END}\ntail\n")
    write(lines, readme=readme, pictures=tmp_path)
    text = readme.read_text()
    assert text.startswith("# Mine\n")
    assert text.endswith(f"{END}\ntail\n")
    assert "old" not in text
    assert f"| {SHAPED.key} | best_pure | 0.95 |" in text
    assert "it broke / here" in text
    assert "![epoch times](epoch_products_loopback.png)" in text
    assert {file.name for file in tmp_path.glob("epoch_*")} == {
        f"epoch_products_{network}.{ending}" for network in ("loopback", "1gbit") for ending in ("png", "svg")
    }
    write(lines, readme=readme, pictures=tmp_path)
    assert readme.read_text() == text
    readme.write_text("no marks")
    with pytest.raises(ValueError, match="must have the lines"):
        write(lines, readme=readme, pictures=tmp_path)


def test_report_says_on_which_processor_each_cell_was_measured(lines: list[dict[str, Any]]) -> None:
    for line in lines:
        if line["cell"] == TWO.key:
            line["machine"] = {**line["machine"], "processor": "Quick 7"}
            line["git_sha"] = "def"
    text = report(lines)
    assert "Quick 7 (1 cells)" in text
    assert "processor not recorded (3 cells)" in text
    assert f"<summary>{TWO.key} (def, Quick 7)</summary>" in text
    assert f"<summary>{SHAPED.key} (abc, processor not recorded)</summary>" in text


def test_report_is_about_what_it_shows(lines: list[dict[str, Any]]) -> None:
    old = [{**line, "run": "run0", "git_sha": "old"} for line in lines if line["cell"] == TWO.key]
    assert "Commits (+: with changes): abc." in report([*old, *lines])


def test_processor_tells_its_name(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel\t\t: 17\nmodel name\t: Quick 7\n\nprocessor\t: 1\n")
    assert results.processor_name(cpuinfo) == "Quick 7, model 17"
    cpuinfo.write_text("Features\t: fp asimd\n")
    assert results.processor_name(cpuinfo) == "unknown, model unknown"
    assert results.processor_name(tmp_path / "none")


@pytest.mark.parametrize(
    ("figure", "factor", "is_logarithmic"), [("p50", 1.0, False), ("p50", 40.0, True), ("p80", 40.0, True)]
)
def test_bars_are_as_long_as_times_unless_those_are_far_apart(
    figure: str, factor: float, is_logarithmic: bool, lines: list[dict[str, Any]], tmp_path: Path
) -> None:
    shaped = [line for line in lines if line["cell"] == SHAPED.key]
    for line in shaped:
        if line["variant"] == "distdgl_full":
            line[figure] *= factor
    files = draw_all(shaped, tmp_path)
    (drawn,) = (file.read_text() for file in files if file.suffix == ".svg")
    assert ("logarithmic" in drawn) == is_logarithmic


def test_bars_are_medians_of_the_fastest_and_reach_to_both_quantiles(
    lines: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = [line for line in lines if line["cell"] == SHAPED.key]
    for line, quantiles in zip(cell, [(1.5, 2.0, 4.0), (1.0, 1.75, 2.75), (7.0, 8.0, 8.5)]):
        line["p20"], line["p50"], line["p80"] = quantiles
    drawn: dict[str, tuple[list[float], list[list[float]]]] = {}
    draw = Axes.barh

    def barh(self: Axes, places: Any, values: Any, *args: Any, **options: Any) -> Any:
        drawn[options["label"]] = (list(values), options["xerr"])
        return draw(self, places, values, *args, **options)

    monkeypatch.setattr(Axes, "barh", barh)
    draw_all(cell, tmp_path)
    assert drawn["hybrid"] == ([2.0], [[0.5], [2.0]])
    assert drawn["best pure"] == ([1.75], [[0.75], [1.0]]), "depcache, not depcomm"
    assert sorted(drawn) == ["DistDGL, full", "best pure", "hybrid", "neutronstar"]


def test_tables_say_all_allocator_settings_there_were(lines: list[dict[str, Any]]) -> None:
    pages = [line | {"allocator_variables": {"MALLOC_MMAP_MAX_": "0", "PAGES": "1"}} for line in lines[-1:]]
    told = report(lines[:-1] + pages)
    assert "`MALLOC_MMAP_MAX_=0` or `MALLOC_MMAP_MAX_=0 PAGES=1`" in told


def test_pictures_are_of_what_was_measured(lines: list[dict[str, Any]], tmp_path: Path) -> None:
    """A graph of which there are failures alone has none, and the others have theirs."""
    failed = make_line(replace(TWO, graph="reddit"), "sar", None, status="unavailable", error="no checkout")
    names = {file.name for file in draw_all([*lines, failed], tmp_path)}
    assert any(name.startswith("epoch_products") for name in names)
    assert not any(name.startswith("epoch_reddit") for name in names)
