# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import errno
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dgl_hybrid.cli import demo, main, plan, plots, train
from dgl_hybrid.cli.demo import DemoConfig, DemoRow, DistDGLRow, agreeing_digits, name_digits, print_rows
from dgl_hybrid.cli.plots import draw_plans, draw_results
from dgl_hybrid.cli.tables import format_bytes, format_seconds, print_plan, print_training
from dgl_hybrid.launch import distdgl
from dgl_hybrid.launch.workspace import PreparedGraph
from dgl_hybrid.planner import durable
from dgl_hybrid.training.config import ModelConfig, StrategyConfig, TrainConfig, TrainJob
from dgl_hybrid.training.distdgl import DistDGLReport
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


def distdgl_row(model: str = "sage", **changes: Any) -> DistDGLRow:
    job = TrainJob(
        part_config="g.json",
        dataset="g",
        model=ModelConfig(model=model),
        strategy=StrategyConfig(),
        training=TrainConfig(),
    )
    measured = DistDGLReport(
        ranks=2,
        times_s=(0.2, 0.22, 0.3, 0.21, 0.9),
        has_warmed_up=True,
        batch_size=None,
        seconds_by_batch_size={"all": 0.22, "8192": 0.4},
        given_up=(1024,),
        peak_rss_bytes=(900_000_000, 700_000_000),
        base_rss_bytes=(400_000_000, 400_000_000),
        initial_loss=1.0,
    )
    return DistDGLRow(job=job, ranks=2, report=replace(measured, **changes), digits=15.2)


def test_digits() -> None:
    assert agreeing_digits([1.0, 2.0], [1.0, 2.0]) == math.inf
    assert agreeing_digits([1.0, 2.002], [1.0, 2.0]) == pytest.approx(3.0)
    assert agreeing_digits([5.0], [1.0]) == 0.0
    assert name_digits(agreeing_digits([2.0], [1.0])) == "0 digits", "off by all of it: it were -0"
    assert agreeing_digits([math.nan], [1.0]) == 0.0
    assert agreeing_digits([1.0, math.nan], [1.0, 1.0]) == 0.0, "`max` passes over it"


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


def printed_with(row: DistDGLRow, capsys: pytest.CaptureFixture[str]) -> str:
    print_rows(rows(), cores=2, distdgl=row)
    return " ".join(capsys.readouterr().out.split())


def test_the_table_has_distdgl(capsys: pytest.CaptureFixture[str]) -> None:
    printed = printed_with(distdgl_row(), capsys)
    assert "│ DistDGL │ 15 digits │ 220 ms │ 0.14x │ - │ 500 MB │ - │ - │ - │" in printed
    assert "hybrid is 20.0 times as fast as DistDGL" in printed
    assert "by batches of all seeds of a trainer (8,192: 400 ms, 1,024: slower)" in printed
    assert "(median of 5 epochs)" in printed
    smaller = distdgl_row(batch_size=1024, seconds_by_batch_size={"all": 0.3, "1024": 0.22}, given_up=())
    printed = printed_with(smaller, capsys)
    assert "by batches of 1,024 seeds (all: 300 ms)" in printed
    assert "<= 500 MB" in printed, "the largest batch was tried in the same process"
    printed = printed_with(distdgl_row(times_s=(70.0,), has_warmed_up=False, stopped="it was killed"), capsys)
    assert "(few epochs)" in printed
    assert "It ended before it was done: it was killed." in printed
    assert "(few epochs: time was up)" in printed_with(distdgl_row(times_s=(70.0,), has_warmed_up=False), capsys)


def test_the_table_says_where_distdgl_trains_another_model(capsys: pytest.CaptureFixture[str]) -> None:
    printed = printed_with(replace(distdgl_row("gcn"), digits=None), capsys)
    assert "│ DistDGL │ other model │" in printed
    assert "DistDGL's GCN is another model" in printed
    assert "another model" not in printed_with(distdgl_row("gat"), capsys)


def run_known(task: str, payload: Any, **options: Any) -> Any:
    """What ranks tell, without any."""
    if task == "turns":
        return {row.measured.strategy: row.times_s for row in rows()}
    name = "plain DGL" if task == "reference" else payload["jobs"][0]["strategy"]["strategy"]
    return [report(name).to_json()] * 2


TINY = ("--data", "powerlaw:nodes=60,degree=4,features=4,classes=2")


def test_a_demo_goes_on_where_distdgl_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And ends well: the row says so, the pictures are of the others."""
    monkeypatch.setattr(demo, "run_local", run_known)
    monkeypatch.setattr(distdgl, "COMMAND", ("-c", "import sys; sys.exit('no luck today')"))
    small = (*TINY, "--out", str(tmp_path / "out"))
    assert main.main(["demo", *small, "--json"]) == 0
    printed = capsys.readouterr().out
    assert "│ DistDGL │ - │ failed │ - │" in " ".join(printed.split())
    assert any(
        line.startswith("DistDGL failed: ") and "exited with code 1: no luck today" in line
        for line in printed.splitlines()
    ), printed
    runs = json.loads(printed.splitlines()[-1])["runs"]
    assert [run["strategy"] for run in runs] == ["plain DGL", "DistDGL", "depcache", "depcomm", "hybrid"]
    assert "no luck today" in runs[1]["error"]
    assert runs[1]["epoch_time_s"] is None
    lines = (tmp_path / "out" / "results.jsonl").read_text().splitlines()
    assert json.loads(lines[1]).items() >= runs[1].items()
    assert main.main(["demo", *small, "--json", "--no-distdgl"]) == 0
    printed = capsys.readouterr().out
    assert "DistDGL" not in printed
    assert len(json.loads(printed.splitlines()[-1])["runs"]) == 4


def test_what_was_measured_outlives_what_cannot_be_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table and the object came after the pictures: a disk that was full by then cost all that was measured."""
    out = tmp_path / "out"

    def no_space(*_: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    def run_demo() -> tuple[int, list[str]]:
        code = main.main(["demo", *TINY, "--out", str(out), "--no-distdgl", "--json"])
        return code, capsys.readouterr().out.splitlines()

    monkeypatch.setattr(demo, "run_local", run_known)
    with monkeypatch.context() as patched:
        patched.setattr(demo, "draw_plans", no_space)
        code, lines = run_demo()
    assert code == 1
    assert any("depcache *" in line for line in lines), "the table"
    record = json.loads(lines[-1])
    assert [run["strategy"] for run in record["runs"]] == ["plain DGL", "depcache", "depcomm", "hybrid"]
    assert [Path(path).name for path in record["pictures"]] == ["demo_results.png", "demo_results.svg"]
    assert len((out / "results.jsonl").read_text().splitlines()) == 4
    before = (out / "results.jsonl").read_bytes()
    monkeypatch.setattr(durable.os, "fsync", no_space)
    code, lines = run_demo()
    assert code == 1
    assert any("depcache *" in line for line in lines)
    assert json.loads(lines[-1])["pictures"] == []
    assert (out / "results.jsonl").read_bytes() == before, "those of another run are whole"


def test_a_demo_says_that_distdgl_had_no_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_epoch(job: TrainJob, *, threads: int) -> DistDGLReport:
        raise distdgl.NoEpochInTime("DistDGL had done no epoch within 240 s of its start, and was ended")

    monkeypatch.setattr(demo, "run_local", run_known)
    monkeypatch.setattr(demo, "run_distdgl", no_epoch)
    assert main.main(["demo", *TINY, "--out", str(tmp_path / "out"), "--json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "│ DistDGL │ - │ no epoch │ - │" in " ".join(" ".join(lines).split())
    assert any(line.startswith("DistDGL had done no epoch within 240 s of its start, and was ended") for line in lines)
    assert "failed" not in " ".join(lines)
    assert json.loads(lines[-1])["runs"][1]["is_late"]


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
    assert "at a time" not in printed
    print_training(replace(report("depcomm"), chunk_rows=1234))
    assert "rows are received 1,234 at a time, to fit the memory budget" in " ".join(capsys.readouterr().out.split())


def test_plan_table(capsys: pytest.CaptureFixture[str]) -> None:
    row = {"rank": 0, "layer": 2, "cached": 3, "communicated": 4000, "compute_ms": 1.0, "comm_ms": 2.0}
    row |= {"received_bytes": 64_000.0, "held_bytes": 32_000.0}
    result: dict[str, Any] = {"model": "gcn", "dataset": "g", "ranks": 2, "strategy": "hybrid"}
    result |= {"chosen_plan": "depcomm", "predicted_epoch_s": 0.012, "chunk_rows": 64}
    result |= {"by_rank": [row], "explanations": []}
    print_plan(result)
    printed = capsys.readouterr().out
    assert "predicted epoch 12 ms; rows are received 64 at a time, to fit the memory budget" in printed
    assert "forward" in printed, "times beside it are of both ways"
    assert "64 kB" in printed
    assert "32 kB" in printed
    print_plan({**result, "chunk_rows": None})
    assert "at a time" not in capsys.readouterr().out


@pytest.mark.parametrize("is_writable", [True, False])
def test_a_plan_is_shown_where_it_cannot_be_saved(
    is_writable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A partition in a folder of others: all ranks planned, and then an error was all there was to see."""
    prepared = PreparedGraph(part_config=tmp_path / "g.json", dataset="g", num_classes=2, num_parts=2)
    planned: list[Any] = []

    def run_local(task: str, payload: dict[str, Any], **_: Any) -> dict[str, Any]:
        planned.append(payload["out"])
        result: dict[str, Any] = {"model": "gcn", "dataset": "g", "ranks": 2, "strategy": "hybrid", "by_rank": []}
        return result | {"chosen_plan": "depcomm", "predicted_epoch_s": 0.012, "chunk_rows": None, "explanations": []}

    monkeypatch.setattr(plan, "prepare_partition", lambda *_, **__: prepared)
    monkeypatch.setattr(plan, "run_local", run_local)
    monkeypatch.setattr(plan.os, "access", lambda path, mode: is_writable)
    assert main.main(["plan", "--json"]) == 0
    printed = capsys.readouterr().out
    assert "predicted epoch 12 ms" in printed
    folder = str(tmp_path / "plans" / "gcn-2x64-hybrid")
    assert planned == [folder if is_writable else None] == [json.loads(printed.splitlines()[-1])["out"]]
    assert (f"not saved: {folder} cannot be written; name a folder with --out" in printed) == (not is_writable)
    assert not (tmp_path / "plans").exists()


def test_a_run_whose_last_model_is_not_saved_is_shown_and_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prepared = PreparedGraph(part_config=tmp_path / "g.json", dataset="g", num_classes=2, num_parts=2)
    unsaved = replace(report("hybrid"), unsaved="the model of epoch 3 cannot be saved in full: No space left on device")
    monkeypatch.setattr(train, "prepare_partition", lambda *_, **__: prepared)
    monkeypatch.setattr(train, "run_local", lambda *_, **__: [unsaved.to_json()])
    out = tmp_path / "out"
    assert main.main(["train", "--json", "--out", str(out), "--checkpoint", "full"]) == 1
    printed = capsys.readouterr()
    assert "3 epochs" in printed.out
    assert json.loads(printed.out.splitlines()[-1])["unsaved"] == unsaved.unsaved
    assert printed.err.endswith(f"dgl-hybrid train: error: {unsaved.unsaved}\n")
    assert json.loads((out / "result.json").read_text())["unsaved"] == unsaved.unsaved


def test_names_of_graphs_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    """Brackets were read as styles, and left out or an error."""
    for name in ("runs[v2]", "a[/old]b", ":key:"):
        print_training(replace(report("hybrid"), dataset=name))
        print_rows([replace(row, measured=replace(row.measured, dataset=name)) for row in rows()], 2)
        printed = capsys.readouterr().out
        assert f"gcn on {name}, 2 ranks" in printed
        assert f"2 layers, on {name}" in printed


def test_what_is_sent_is_of_the_plan_that_stayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A candidate's turn may be the last epoch: what that sends stood beside times of another plan."""
    (epoch, *_) = report("hybrid").epochs
    sent = [(9_000_000, 0), (4_000_000, 0), (5_000_000, 0), (77_000_000, 1)]
    epochs = tuple(replace(epoch, bytes_sent=size, plan=plan) for size, plan in sent)
    ours = replace(rows()[-1], measured=replace(report("hybrid"), epochs=epochs, stayed_plan=0))
    assert ours.to_json()["steady_bytes_sent"] == 5_000_000
    lines = tmp_path / "results.jsonl"
    lines.write_text("\n".join(json.dumps(row.to_json()) for row in [*rows()[:-1], ours]) + "\n")
    figures: list[Any] = []
    monkeypatch.setattr(plots, "_save", lambda figure, folder, name: figures.append(figure))
    draw_results(lines, tmp_path)
    assert figures[0].axes[1].texts[-1].get_text() == "5 MB"


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


def test_a_bar_far_longer_than_the_others_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside DistDGL's the others could not be told apart; where its process failed there is none."""

    def draw(*records: dict[str, Any]) -> Any:
        lines = tmp_path / "results.jsonl"
        lines.write_text("\n".join(map(json.dumps, records)) + "\n")
        figures: list[Any] = []
        monkeypatch.setattr(plots, "_save", lambda figure, folder, name: figures.append(figure))
        draw_results(lines, tmp_path)
        draw_plans(lines, tmp_path)
        assert len(figures[1].axes) == 3, "DistDGL has no plan"
        return figures[0].axes

    plain, *ours = [row.to_json() for row in rows()]
    times, sent, memory = draw(plain, distdgl_row(times_s=(1.0,) * 5).to_json(), *ours)
    longest = plots.LONGEST * 66  # plain DGL's, with its error bar
    assert [bar.get_height() for bar in times.patches] == pytest.approx([30, longest, 10, 20, 11])
    assert [text.get_text() for text in times.texts] == ["30 ms", "1,000 ms", "10 ms", "20 ms", "11 ms"]
    assert times.get_ylim()[1] < 1.3 * longest
    assert len(sent.patches) == 3
    assert [text.get_text() for text in sent.texts] == ["1.23 MB"] * 3
    assert [text.get_text() for text in memory.texts] == ["200 MB", "500 MB", "200 MB", "200 MB", "200 MB"]
    *_, memory = draw(plain, distdgl_row(batch_size=1024).to_json(), *ours)
    assert memory.texts[1].get_text() == "<= 500 MB", "the largest batch was tried, too"
    times, *_ = draw(plain, distdgl_row(times_s=(0.1,) * 5).to_json(), *ours)
    assert times.patches[1].get_height() == pytest.approx(100), "it is not that much longer"
    times, *_ = draw(plain, replace(distdgl_row(), report=None, error="no luck").to_json(), *ours)
    assert len(times.patches) == 4


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
    ("value", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1500, "1.5 kB"),
        (2.5e7, "25 MB"),
        (999_600, "1 MB"),
        (3e12, "3 TB"),
        (4e15, "4,000 TB"),
    ],
)
def test_bytes(value: float, text: str) -> None:
    assert format_bytes(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(2.0, "2.00 s"), (0.0123, "12.3 ms"), (4.56e-5, "45.6 us"), (0.9996, "1.00 s"), (999.6e-6, "1 ms")],
)
def test_seconds(value: float, text: str) -> None:
    assert format_seconds(value) == text


def test_wrong_demo() -> None:
    with pytest.raises(
        ValueError, match=r"ranks and check_epochs must be at least 1, epochs at least 2 \(got 0, 5, 80\)"
    ):
        DemoConfig(ranks=0)
