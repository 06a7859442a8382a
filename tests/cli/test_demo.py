# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dgl_hybrid.cli import plots
from dgl_hybrid.cli.demo import DemoConfig, DemoRow, agreeing_digits, print_rows
from dgl_hybrid.cli.plots import draw_plans, draw_results
from dgl_hybrid.cli.tables import format_bytes, format_seconds, print_training
from dgl_hybrid.training.report import Accuracy, EpochReport, LayerReport, TrainReport


def report(strategy: str, epoch_s: float = 0.01) -> TrainReport:
    epoch = EpochReport(
        loss=1.0,
        time_s=epoch_s,
        bytes_sent=1234567,
        compute_s=0.7 * epoch_s,
        exchange_s=0.2 * epoch_s,
        wait_s=0.1 * epoch_s,
    )
    accuracy = Accuracy(epoch=3, train=0.9, val=math.nan, test=0.8)
    return TrainReport(
        strategy=strategy,
        ranks=2,
        model="gcn",
        dataset="g",
        dtype="float32",
        epochs=(epoch,) * 3,
        layers=(LayerReport(layer=1, cached=10, communicated=2000, forward_bytes=16000, backward_bytes=0),) * 2,
        best=accuracy,
        final=accuracy,
        peak_rss_bytes=(500_000_000, 600_000_000),
        base_rss_bytes=(400_000_000, 400_000_000),
        gradient_bytes=4,
        predicted_epoch_s=0.012,
        chosen_plan="hybrid@1" if strategy == "hybrid" else strategy,
    )


def rows() -> list[DemoRow]:
    times = {"plain DGL": 0.03, "depcache": 0.01, "depcomm": 0.02, "hybrid": 0.011}
    return [
        # Times of the run itself are not those that are shown.
        DemoRow(measured=report(name, 9.0), digits=14.6, times_s=(0.5 * time_s, time_s, time_s, 4 * time_s))
        for name, time_s in times.items()
    ]


def test_digits() -> None:
    assert agreeing_digits([1.0, 2.0], [1.0, 2.0]) == math.inf
    assert agreeing_digits([1.0, 2.002], [1.0, 2.0]) == pytest.approx(3.0)
    assert agreeing_digits([5.0], [1.0]) == 0.0
    assert agreeing_digits([math.nan], [1.0]) == 0.0


def test_the_table_marks_the_fastest_even_if_it_is_not_hybrid(capsys: pytest.CaptureFixture[str]) -> None:
    print_rows(rows(), cores=2)
    printed = capsys.readouterr().out
    assert "depcache *" in printed
    assert "hybrid *" not in printed
    tied = [*rows()[:-1], replace(rows()[-1], times_s=(0.0103,))]
    print_rows(tied, cores=2)
    assert "hybrid *" in capsys.readouterr().out, "3 % are no difference"
    assert "3.00x" in printed
    assert "200 MB" in printed, "memory is that of the largest rank above interpreter and libraries"


def test_training_table(capsys: pytest.CaptureFixture[str]) -> None:
    print_training(report("hybrid"), "self-loops added")
    printed = capsys.readouterr().out
    for words in (
        "strategy hybrid (chosen: hybrid@1)",
        "graph: self-loops added",
        "2,000",
        "16 kB",
        "7 ms (70%)",
        "80.0 %",
    ):
        assert words in printed


def test_pictures_are_drawn_from_lines_alone(tmp_path: Path) -> None:
    lines = tmp_path / "results.jsonl"
    lines.write_text("\n".join(json.dumps(row.to_json()) for row in rows()) + "\n")
    written = [*draw_results(lines, tmp_path), *draw_plans(lines, tmp_path)]
    assert [path.name for path in written] == [
        *("demo_results.png", "demo_results.svg", "demo_plan.png", "demo_plan.svg")
    ]
    assert all(path.stat().st_size > 1000 for path in written)


def test_bars_are_of_the_epochs_that_the_table_is_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = tmp_path / "results.jsonl"
    lines.write_text("\n".join(json.dumps(row.to_json()) for row in rows()) + "\n")
    figures: list[Any] = []
    monkeypatch.setattr(plots, "_save", lambda figure, folder, name: figures.append(figure))
    draw_results(lines, tmp_path)
    times_axis = figures[0].axes[0]
    assert [bar.get_height() for bar in times_axis.patches] == [1e3 * row.epoch_time_s for row in rows()]
    assert times_axis.texts[-1].get_text() == "11 ms"
    (error_bars,) = times_axis.collections
    assert error_bars.get_segments()[-1][:, 1] == pytest.approx([8.8, 24.2]), "quantiles are of the same epochs"


def test_steady_epochs_are_those_of_the_plan_that_stayed() -> None:
    """Whenever they ran, but for the first after each change: trials may end at the last epoch but one."""
    (epoch, *_) = report("hybrid").epochs

    def run(plans: str, trial_epochs: int) -> TrainReport:
        epochs = (replace(epoch, time_s=float(number), plan=int(plan)) for number, plan in enumerate(plans))
        return replace(report("hybrid"), epochs=tuple(epochs), trial_epochs=trial_epochs)

    tried_late = run("0001101110011", 11)
    assert [epoch.time_s for epoch in tried_late.steady_epochs()] == [4, 7, 8, 12]
    assert tried_late.epoch_time_s == 7.5
    assert TrainReport.from_json(tried_late.to_json()) == tried_late
    assert [epoch.time_s for epoch in run("0001", 3).steady_epochs()] == [3], "there is no other"
    ended_in_a_turn = replace(run("0000011", 7), stayed_plan=0)
    assert [epoch.time_s for epoch in ended_in_a_turn.steady_epochs()] == [1, 2, 3, 4]
    # Costs have drifted in between, and the same plan stayed.
    assert [epoch.time_s for epoch in run("000001000000", 6).steady_epochs()] == [7, 8, 9, 10, 11]
    assert [epoch.time_s for epoch in run("00000100000", 6).steady_epochs()] == [1, 2, 3, 4, 7, 8, 9, 10]


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (2.5e7, "25 MB"), (3e12, "3e+03 GB")]
)
def test_bytes(value: float, text: str) -> None:
    assert format_bytes(value) == text


@pytest.mark.parametrize(("value", "text"), [(2.0, "2.00 s"), (0.0123, "12.3 ms"), (4.56e-5, "45.6 us")])
def test_seconds(value: float, text: str) -> None:
    assert format_seconds(value) == text


def test_wrong_demo() -> None:
    with pytest.raises(
        ValueError, match=r"ranks and check_epochs must be at least 1, epochs at least 2 \(got 0, 5, 80\)"
    ):
        DemoConfig(ranks=0)
