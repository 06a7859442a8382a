# SPDX-License-Identifier: Apache-2.0
"""From reports to the final object, without any job."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from benchmarks.distdgl_reads import jobs, plot
from benchmarks.distdgl_reads.cells import count_payback_epochs, measurements, summarise
from benchmarks.distdgl_reads.jobs import DATA_VARIABLE, find_data, plan_jobs
from benchmarks.distdgl_reads.schedule import Schedule, read_message, write_message
from benchmarks.distdgl_reads.tables import TIME_HEAD, count_rows, markdown, time_rows

KEY = "graph/2/10,25"
COMMON = {"bench": "distdgl_reads", "dataset": "graph", "num_parts": 2}


def count_epoch(rows: int, seeds: int, fill: int = 0) -> dict[str, Any]:
    zeros = dict.fromkeys(("remote_bytes", "held_rows", "held_seeds", "fill_seeds"), 0)
    return zeros | {
        "remote_rows": rows,
        "remote_seeds": seeds,
        "remote_sampling_requests": 6,
        "fill_rows": fill,
        "fill_bytes": 4 * fill,
        "held_bytes": 40,
        "held_bytes_max": 30,
        "elapsed_s": 1.0,
    }


def epoch(elapsed_s: float) -> dict[str, float]:
    parts = {"sample_s": 0.1, "read_s": 0.2, "compute_s": 0.3, "cpu_s": 0.4}
    return parts | {"elapsed_s": elapsed_s, "loss": 1.5}


def times(mode: str, rate: int, elapsed_s: list[float], plan_s: float = 0.0) -> dict[str, Any]:
    epochs = [epoch(one) for one in elapsed_s]
    about = {"kind": "times", "mode": mode, "fanouts": [10, 25], "rate_bits_per_s": rate, "round": 0}
    return about | {"plan_s": plan_s, "epochs": epochs, "link_bits_per_s": 0.95 * rate}


@pytest.fixture
def messages() -> list[dict[str, Any]]:
    def counts(mode: str, *epochs: dict[str, Any]) -> dict[str, Any]:
        fetched = 0 if mode == "off" else 1000
        plan = {"plan_s": 0.5, "plan_counts": {"fill_rows": 0, "fill_bytes": fetched, "fill_seeds": fetched}}
        return {"kind": "counts", "mode": mode, "fanouts": [10, 25], **plan, "epochs": list(epochs)}

    slow = 200_000_000
    return [
        {"kind": "graph", "num_nodes": 9, "num_edges": 20, "feat_dim": 4, "feat_bytes": 144, "train_nodes": 5},
        {"kind": "gate", "batches": 2},
        counts("off", count_epoch(900, 90), count_epoch(1000, 100), count_epoch(1000, 100)),
        # The first epoch, while the store is filled, does not count as one of the others.
        counts("unlimited", count_epoch(70, 7, fill=50), count_epoch(0, 0), count_epoch(0, 0)),
        counts("10%", count_epoch(500, 50, fill=20), count_epoch(100, 120), count_epoch(100, 120)),
        times("off", slow, [9.0, 4.0, 4.0]),
        times("unlimited", slow, [4.0, 1.0, 1.0], plan_s=2.0),
        times("off", slow, [9.0, 4.0, 4.0]),
        times("unlimited", slow, [4.0, 1.0, 1.0], plan_s=2.0),
    ]


def test_final_object(messages: list[dict[str, Any]]) -> None:
    result = summarise(measurements(messages, COMMON), {"what": "why"})
    assert result["remote_rows_per_epoch_off"] == {KEY: 1000}
    assert result["remote_rows_per_epoch_unlimited"] == {KEY: 0}
    assert result["remote_sampling_requests_per_epoch_off"] == {KEY: 6}
    assert result["fill_bytes_unlimited"] == {KEY: 1000 + 4 * 50}
    assert result["remote_read_fraction_budget_10pct"] == {KEY: pytest.approx(220 / 1100)}
    assert result["remote_row_fraction_budget_10pct"] == {KEY: pytest.approx(0.1)}
    assert result["epoch_ratio_200mbit"] == {KEY: pytest.approx(4.0)}
    assert result["epoch_ratio_200mbit_min"] == pytest.approx(4.0)
    assert result["fill_s_200mbit"] == {KEY: pytest.approx(2.0 + 4.0 - 1.0)}
    assert result["epochs_until_fill_is_paid_200mbit"] == {KEY: 2}
    # What was not measured is there, and says so.
    assert result["epoch_ratio_1gbit"] == {KEY: None}
    assert result["epoch_ratio_200mbit_budget_10pct"] == {KEY: None}
    assert result["epoch_ratio_1gbit_median"] is None
    assert result["skipped"] == {"what": "why"}
    assert [cell["metric"] for cell in result["cells"]] == ["reads_per_epoch"] * 3 + ["epoch_time"] * 2
    json.dumps(result, allow_nan=False)


def test_scaled_features_are_told_apart(messages: list[dict[str, Any]]) -> None:
    lines = measurements(messages, COMMON)
    scaled = measurements(messages, {**COMMON, "dataset": "graph-float32", "is_full_precision": True})
    result = summarise([*lines, *scaled], {})
    assert set(result["remote_read_fraction_budget_10pct"]) == {KEY}
    assert set(result["remote_rows_per_epoch_off"]) == {KEY}
    assert result["remote_read_fraction_budget_10pct_full_precision"] == {"graph-float32/2/10,25": pytest.approx(0.2)}
    assert result["remote_rows_per_epoch_unlimited_full_precision_max"] == 0
    assert len(result["cells"]) == 2 * len(lines)


@pytest.mark.parametrize("is_absent", [False, True])
def test_the_plugin_is_absent_whatever_the_caller_has(
    is_absent: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DGL_HYBRID_ENABLE", "1")
    started = list[Any]()
    monkeypatch.setattr(jobs, "run_cluster", lambda job, on_line: started.append(job))
    prepared = SimpleNamespace(part_config=tmp_path / "g.json", num_classes=2)
    plan = jobs.JobPlan(data="npz:g.npz", num_parts=2, rates=(), is_plugin_absent=is_absent)
    ignore = lambda *_: None  # noqa: E731
    jobs.run_job(plan, cast(Any, prepared), tmp_path, on_epoch=ignore, on_text=ignore)
    assert [job.environment["DGL_HYBRID_ENABLE"] == "0" for job in started] == [is_absent]


def test_rounds_of_a_mode_are_one_measurement(messages: list[dict[str, Any]]) -> None:
    off, on = (line for line in measurements(messages, COMMON) if line["metric"] == "epoch_time")
    assert (off["iters"], off["warmup"], off["p50"]) == (4, 2, 4.0)
    assert (on["variant"], on["plan_s"], on["link_bits_per_s"]) == ("unlimited", 2.0, pytest.approx(1.9e8))


def test_a_fill_that_never_pays() -> None:
    line = {"p50": 2.0, "fill_s": 5.0}
    assert count_payback_epochs(line, line) is None
    assert count_payback_epochs({"p50": 3.0}, line) == 5


def test_tables(messages: list[dict[str, Any]]) -> None:
    lines = measurements(messages, COMMON)
    assert [row[1:3] for row in count_rows(lines)] == [("off", "1,000"), ("unlimited", "0"), ("10%", "100")]
    off, on = time_rows(lines)
    assert len(off) == len(on) == len(TIME_HEAD)
    assert on[-3:] == ("4.00", "5.00 s", "2 epochs")
    assert off[-3:] == ("", "", "")
    assert markdown(("a", "b"), [("1", "2")]) == "| a | b |\n| --- | --- |\n| 1 | 2 |"


def test_schedule_and_messages_survive_the_way() -> None:
    schedule = Schedule(graph_name="g", num_classes=3, fanouts=((10, 25), (5, 10, 15)), rates_bits_per_s=(10**9,))
    assert Schedule.from_json(schedule.to_json()) == schedule
    # 2 fanouts x (4 modes x 3 epochs + 1 rate x 2 rounds x 3 modes x (1 + 2) epochs)
    assert schedule.num_epochs == 60
    assert read_message(write_message("shape", rate_bits_per_s=1)) == {"kind": "shape", "rate_bits_per_s": 1}
    assert read_message("Epoch 1") is None


def test_jobs() -> None:
    (quick,) = plan_jobs(["a.npz"], [2], (1,), is_quick=True, is_main_only=True)
    assert (quick.num_parts, quick.fanouts, quick.rates) == (2, ((10, 25),), (1,))
    jobs = plan_jobs(["a.npz", "powerlaw"], [2, 3], (1,), is_quick=False, is_main_only=False)
    assert [(job.data, job.num_parts) for job in jobs[:4]] == [
        (data, parts) for data in ("a.npz", "powerlaw") for parts in (2, 3)
    ]
    assert [(job.data, job.is_plugin_absent, job.is_full_precision) for job in jobs[4:]] == [
        ("a.npz", True, False),
        ("a.npz", False, True),
    ]
    assert jobs[4].schedule().count_modes == ("off",)
    # Where links cannot be limited nothing is timed, nowhere.
    assert all(job.rates == () for job in plan_jobs(["a.npz"], [2, 3], (), is_quick=False, is_main_only=False))


def test_graphs_that_are_absent_are_generated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DATA_VARIABLE, str(tmp_path))
    (spec,), why = find_data()
    assert spec.startswith("powerlaw")
    assert why is not None
    assert str(tmp_path) in why
    (tmp_path / "debian-deps.npz").touch()
    data, why = find_data()
    assert data == (str(tmp_path / "debian-deps.npz"),)
    assert why is not None
    assert "moby-thesaurus.npz not found" in why
    (tmp_path / "moby-thesaurus.npz").touch()
    assert find_data()[1] is None


def test_a_drawing_of_the_same_lines_is_the_same_file(tmp_path: Path) -> None:
    """Else each drawing would look like a change of the committed figures."""
    cell = {"dataset": "graph", "num_parts": 2, "fanouts": [10, 25], "unit": "rows"}
    lines = [{**cell, "variant": name, "p20": 1.0, "p50": 2.0, "p80": 3.0} for name in plot.COLOURS]
    for name in ("a", "b"):
        plot.draw(lines, "title", "rows", tmp_path / name)
    for ending in (".svg", ".png"):
        assert (tmp_path / f"a{ending}").read_bytes() == (tmp_path / f"b{ending}").read_bytes()


def test_help_draws_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plot, "draw", lambda *_: pytest.fail("drawn"))
    with pytest.raises(SystemExit):
        plot.main(["--help"])
