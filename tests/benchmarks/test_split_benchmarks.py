# SPDX-License-Identifier: Apache-2.0
"""`benchmarks.overlap` and `benchmarks.memory_budget`: what becomes of lines, failed ones too."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.memory_budget import run as memory_budget
from benchmarks.overlap import run as overlap
from benchmarks.systems import variants
from benchmarks.systems.adaptors import SYSTEMS
from benchmarks.systems.graphs import GraphError
from benchmarks.systems.grid import Cell
from benchmarks.systems.measure import Settings
from benchmarks.systems.team import SystemFailure
from benchmarks.systems.variants import MARK, Comparison, make_parser


def line(variant: str, **figures: Any) -> dict[str, Any]:
    return {"cell": "powerlaw/sage-2x128/2/1gbit", "variant": variant, "status": "ok", "wait_s": 0.0} | figures


def test_every_variant_is_a_system() -> None:
    assert set(overlap.SYSTEMS) | set(memory_budget.SYSTEMS) <= set(SYSTEMS)


def test_overlap_compares_blocked_times_and_epochs() -> None:
    def exchanges(*seconds: tuple[float, float]) -> list[dict[str, Any]]:
        return [
            {"layer": 2, "backward": backward, "blocked_s": blocked, "beside_s": beside}
            for backward, (blocked, beside) in zip((False, True), seconds, strict=True)
        ]

    apart = exchanges((0.12, 0.0), (0.08, 0.0))
    together = exchanges((0.03, 0.13), (0.02, 0.07))
    lines = [
        line(overlap.APART, p50=0.4, exchange_s=0.15, wait_s=0.05, sent_bytes=1000, exchanges=apart),
        line(overlap.TOGETHER, p50=0.25, exchange_s=0.05, sent_bytes=1000, exchanges=together),
        line(overlap.SUMS, p50=0.2, exchange_s=0.04, sent_bytes=600, exchanges=together),
    ]
    found = overlap.COMPARISON.compare(lines)
    assert found["gain"] == pytest.approx(1.6)
    assert found["hidden"] == pytest.approx(0.75)
    assert found["gain_of_sums"] == pytest.approx(1.25)
    assert found["bytes_saved"] == pytest.approx(0.4)
    # Backward, less was done meanwhile than the exchange takes.
    assert found["enough"] == [{"layer": 2, "backward": False}]
    assert found["hidden_of_enough"] == pytest.approx(0.75)
    assert found["beside_s"] == pytest.approx(0.2)
    (row,) = overlap.COMPARISON.rows_of([found])
    assert len(row) == len(overlap.COMPARISON.head)
    figures = ("400", "250", "1.60", "200", "200", "50", "75%", "1 of 2", "75%", "200", "40%")
    assert row[1:] == figures


def test_memory_is_compared_with_that_of_few_rows() -> None:
    mib = 2**20
    lines = [
        line(memory_budget.MIRRORED, p50=0.1, peak_rss_bytes=[600 * mib, 700 * mib]),
        line(memory_budget.LARGE, p50=0.2, peak_rss_bytes=[310 * mib, 328 * mib]),
        line(memory_budget.SMALL, p50=0.2, peak_rss_bytes=[230 * mib, 216 * mib]),
        line(memory_budget.FEW, p50=0.3, peak_rss_bytes=[200 * mib, 190 * mib]),
    ]
    found = memory_budget.COMPARISON.compare(lines)
    assert (found["mirrored_mib"], found["large_mib"], found["small_mib"]) == (500.0, 128.0, 30.0)
    assert (found["share_of_large"], found["share_of_small"]) == pytest.approx((1.0, 30 / 32))
    (row,) = memory_budget.COMPARISON.rows_of([found])
    assert len(row) == len(memory_budget.COMPARISON.head)


@pytest.mark.parametrize("comparison", [overlap.COMPARISON, memory_budget.COMPARISON])
def test_a_failure_is_in_the_table(comparison: Comparison, tmp_path: Path) -> None:
    failed = {"cell": "a cell", "variant": comparison.systems[0], "status": "failed", "error": "no memory"}
    results = [comparison.compare([failed])]
    (row,) = comparison.rows_of(results)
    assert len(row) == len(comparison.head)
    assert "no memory" in row[1]
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{MARK}\nan old table\n")
    replace(comparison, readme=readme).write(results)
    text = readme.read_text()
    assert text.startswith(f"before\n{MARK}\n")
    assert "no memory" in text
    assert "an old table" not in text
    assert MARK in comparison.readme.read_text(), "the benchmark's own table has its place"


@pytest.mark.parametrize("ending", [GraphError("no such file"), SystemFailure("plain DGL died"), KeyboardInterrupt()])
def test_what_was_measured_before_a_cell_failed_is_told(
    ending: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file that was missing for the last cell lost the hours of all others."""
    cells = [Cell(graph=name) for name in ("products", "reddit", "powerlaw")]
    failed = {"variant": memory_budget.LARGE, "status": "failed", "error": "no memory"}

    def prepare(graph: str, *_: Any) -> None:
        if graph == "reddit":
            raise ending

    monkeypatch.setattr(variants, "prepare", prepare)
    monkeypatch.setattr(variants, "measure_rates", lambda: None)
    monkeypatch.setattr(variants.Bench, "measure", lambda _, cell, *__: [failed | {"cell": cell.key}])
    if isinstance(ending, KeyboardInterrupt):  # with --write, part of a table is not to replace the whole one
        with pytest.raises(SystemExit) as end:
            memory_budget.COMPARISON.measure(cells, Settings(), tmp_path)
        assert end.value.code == 130
        told_user = capsys.readouterr().err
        assert "no memory" in told_user
        assert "interrupted" in told_user
        return
    results = memory_budget.COMPARISON.measure(cells, Settings(), tmp_path)
    told = {result["cell"]: result["failed"] for result in results}
    assert told[cells[0].key] == {memory_budget.LARGE: "no memory"}
    assert told[cells[1].key] == {"cell": str(ending)}
    assert list(told) == [cell.key for cell in cells]


def test_json_has_the_table_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    failed = {"cell": "a cell", "variant": memory_budget.LARGE, "status": "failed", "error": "no memory"}
    results = [memory_budget.COMPARISON.compare([failed])]
    memory_budget.COMPARISON.report(results, make_parser("p").parse_args(["--json"]), budgets_mib=[128.0, 32.0])
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {"budgets_mib": [128.0, 32.0], "cells": results}
    assert "MiB that rows of other ranks take" in printed.err
