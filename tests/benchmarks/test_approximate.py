# SPDX-License-Identifier: Apache-2.0
"""The parts of benchmarks/approximate that need no processes."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.approximate import run
from benchmarks.systems.graphs import PreparedGraph
from dgl_hybrid.exchange.approximate import APPROXIMATIONS
from dgl_hybrid.training.report import Accuracy, EpochReport, TrainReport

SHARES = {None: 0.8, "bf16": 0.4, "int8": 0.22, "stale": 1.0, "stale+bf16": 0.5, "stale+int8": 0.27}


def reports() -> list[TrainReport]:
    made = []
    for name, share in SHARES.items():
        epoch = EpochReport(
            loss=2.0, time_s=0.1 * share, bytes_sent=int(1e6 * share), compute_s=0.05, exchange_s=0.01, wait_s=0.01
        )
        accuracy = Accuracy(epoch=3, train=0.9, val=0.5, test=0.8)
        made.append(
            TrainReport(
                strategy="depcomm",
                ranks=2,
                model="sage",
                dataset="products",
                dtype="float32",
                epochs=(epoch,) * 4,
                layers=(),
                best=accuracy,
                final=accuracy,
                peak_rss_bytes=(1, 1),
                base_rss_bytes=(1, 1),
                gradient_bytes=4,
                predicted_epoch_s=None,
                chosen_plan="depcomm",
                approximate=name,
            )
        )
    return made


PREPARED = PreparedGraph(
    part_config="",
    data={},
    num_nodes=10,
    num_edges=20,
    feat_dim=3,
    num_classes=2,
    num_train=4,
    halo_rows=5,
)


def records() -> list[dict[str, Any]]:
    return [run.record_of(report, run.CASES[0], PREPARED, 0, "loopback", None) for report in reports()]


def test_every_approximation_has_a_row_beside_the_exact_run() -> None:
    rows = run.rows_of(records())
    assert [row[1] for row in rows[:3]] == ["exact", "approximate (bf16 rows)", "approximate (int8 rows)"]
    assert len(rows) == 1 + len(APPROXIMATIONS)
    assert rows[0][2:6] == ["0.80 MB", "100%", "80 ms", "1.00"]
    assert rows[3][2:6] == ["1.00 MB", "125%", "100 ms", "0.80"]


def test_runs_are_checked() -> None:
    run.check(reports())
    wide, far = reports(), reports()
    wide[2] = replace(wide[2], epochs=wide[1].epochs)
    with pytest.raises(AssertionError, match=r"int8 sent 0.500 of the bytes that exact numbers would take"):
        run.check(wide)
    far[3] = replace(far[3], epochs=tuple(replace(epoch, loss=2.01) for epoch in far[3].epochs))
    with pytest.raises(AssertionError, match=r"stale: the first epoch's loss is 2.01, exactly it is 2.0"):
        run.check(far)


def test_two_epochs_are_enough() -> None:
    """All had trained when the quantiles of the one steady epoch failed."""
    report = replace(reports()[0], epochs=reports()[0].epochs[:2])
    assert len(report.steady_epochs()) == 1
    record = run.record_of(report, run.CASES[0], PREPARED, 0, "loopback", None)
    assert record["p20"] == record["p50"] == record["p80"] == pytest.approx(80.0)


def test_ranks_that_die_at_once_say_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody looked at them once the last had ended, and the missing reports were the error."""

    def die(command: object, **others: Any) -> subprocess.Popen[bytes]:
        process = popen([sys.executable, "-Sc", "raise SystemExit('no such part')"], **others)
        process.wait()
        return process

    popen = subprocess.Popen
    monkeypatch.setattr(run.subprocess, "Popen", die)
    with pytest.raises(RuntimeError, match=r"rank \[0, 1\] failed[^$]*no such part"):
        run.run_jobs([], 2, None, tmp_path / "jobs")


def test_writing_keeps_the_text_around_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "__file__", str(tmp_path / "run.py"))
    (tmp_path / "README.md").write_text(f"before\n{run.BEGIN}\n\nthe last table\n\n{run.END}\nafter\n", "utf-8")
    for _ in range(2):
        run.write(records())
    text = (tmp_path / "README.md").read_text("utf-8")
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "the last table" not in text
    assert text.count("products, 4") == len(SHARES)
    assert len((tmp_path / "results.jsonl").read_text("utf-8").splitlines()) == 2 * len(SHARES)


def test_the_readme_has_its_marks() -> None:
    text = (Path(run.__file__).parent / "README.md").read_text("utf-8")
    assert text.count(run.BEGIN) == text.count(run.END) == 1
