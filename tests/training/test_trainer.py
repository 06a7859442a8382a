# SPDX-License-Identifier: Apache-2.0
"""A whole training run on ranks, and the faults every rank must report."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import dgl_hybrid
from dgl_hybrid import planner
from dgl_hybrid.datasets import PowerLawConfig, generate_powerlaw
from dgl_hybrid.datasets.dataset import GraphDataset
from dgl_hybrid.launch.tasks import reference_task
from dgl_hybrid.launch.workspace import DataConfig
from dgl_hybrid.partition.manifest import partition_digest
from dgl_hybrid.planner import DependencyPlan
from dgl_hybrid.training import loader, plan_trials, trainer
from dgl_hybrid.training.config import ModelConfig, StrategyConfig, TrainConfig, TrainJob
from dgl_hybrid.training.loader import FullGraphLoader
from dgl_hybrid.training.memory import give_back_memory
from dgl_hybrid.training.reference import train_reference
from dgl_hybrid.training.report import Accuracy, TrainReport
from dgl_hybrid.training.resident_memory import current_rss_bytes
from dgl_hybrid.training.trainer import Evaluator, train
from tests.helpers.rates import assumed_rates
from tests.helpers.thinning import marks_of
from tests.helpers.world import RaisedError, run_ranks, run_ranks_expect_errors

NUM_LAYERS = 3


def run_job(rank: int, world_size: int, record: dict[str, Any], is_probed: bool = True) -> dict[str, Any]:
    """Trains; without measuring rates where figures of time say nothing."""
    with contextlib.nullcontext() if is_probed else assumed_rates(world_size):
        return train(TrainJob.from_json(record)).to_json()


@pytest.fixture(scope="module")
def dataset() -> GraphDataset:
    return generate_powerlaw(PowerLawConfig(nodes=300, degree=6.0, features=12, classes=4))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, dataset: GraphDataset) -> Path:
    root = tmp_path_factory.mktemp("trainer")
    for num_parts in (1, 2, 3):
        dgl_hybrid.partition_graph(dataset.graph, "g", num_parts, root / str(num_parts))
    return root


def make_job(folder: Path, num_parts: int, **options: Any) -> TrainJob:
    return TrainJob(
        part_config=str(folder / str(num_parts) / "g.json"),
        dataset="g",
        num_classes=4,
        model=ModelConfig(model=options.pop("model", "gcn"), num_layers=NUM_LAYERS, hidden=8, heads=2, dropout=0.0),
        strategy=StrategyConfig(strategy=options.pop("strategy", "hybrid"), plan=options.pop("plan", None)),
        training=TrainConfig(epochs=4, eval_every=2, dtype="float64", seed=5, **options),
    )


def run(job: TrainJob, num_parts: int, *, is_probed: bool = False) -> TrainReport:
    records = run_ranks(num_parts, run_job, job.to_json(), is_probed)
    assert all(record["epochs"] == records[0]["epochs"] for record in records), "ranks report different epochs"
    return TrainReport.from_json(records[0])


MODELS = ("gcn", "sage", "gat", "gatv2", "gin")
WAYS = ((1, "depcomm"), (2, "depcache"), (3, "depcomm"), (3, "hybrid"))


def each_model() -> list[object]:
    """Every model hybrid on three ranks, and in one of the other ways in turn; the rest is slow."""
    return [
        pytest.param(model, *WAYS[way], id=f"{model}-{WAYS[way][0]}-{WAYS[way][1]}", marks=marks_of(is_kept))
        for turn, model in enumerate(MODELS)
        for way in range(len(WAYS))
        for is_kept in [WAYS[way] == (3, "hybrid") or way == turn % 3]
    ]


@pytest.mark.parametrize(("model", "num_parts", "strategy"), each_model())
def test_equals_plain_dgl(model: str, num_parts: int, strategy: str, folder: Path, dataset: GraphDataset) -> None:
    expected = train_reference(make_job(folder, 3, model=model), dataset)
    report = run(make_job(folder, num_parts, model=model, strategy=strategy), num_parts)
    assert [epoch.loss for epoch in report.epochs] == pytest.approx([epoch.loss for epoch in expected.epochs], rel=1e-9)
    assert (report.final.train, report.final.val, report.final.test) == pytest.approx(
        (expected.final.train, expected.final.val, expected.final.test)
    )


@pytest.mark.cuda
@pytest.mark.parametrize(("model", "num_parts"), [("gcn", 1), ("gat", 2), ("gin", 3)])
def test_on_a_gpu_equals_plain_dgl(model: str, num_parts: int, folder: Path, dataset: GraphDataset) -> None:
    expected = train_reference(make_job(folder, 3, model=model), dataset)
    report = run(make_job(folder, num_parts, model=model, device="cuda"), num_parts, is_probed=True)
    assert [epoch.loss for epoch in report.epochs] == pytest.approx([epoch.loss for epoch in expected.epochs], rel=1e-9)
    assert (report.final.train, report.final.val, report.final.test) == pytest.approx(
        (expected.final.train, expected.final.val, expected.final.test)
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_no_gpu_where_one_is_wanted(folder: Path) -> None:
    job = make_job(folder, 2, device="cuda").to_json()
    for error in run_ranks_expect_errors(2, run_job, job, False):
        assert error.type_name == "ValueError"
        assert "device cuda needs a GPU and a PyTorch built for it on every rank" in error.message
        assert f"(rank {error.rank} has PyTorch" in error.message


def test_dropout_does_not_depend_on_ranks_or_strategy(folder: Path) -> None:
    curves = []
    for num_parts, strategy in ((1, "depcomm"), (2, "depcache"), (3, "hybrid")):
        job = make_job(folder, num_parts, strategy=strategy)
        job = replace(job, model=replace(job.model, model="gat", dropout=0.4))
        curves.append([epoch.loss for epoch in run(job, num_parts).epochs])
    assert curves[1] == pytest.approx(curves[0], rel=1e-9)
    assert curves[2] == pytest.approx(curves[0], rel=1e-9)


def test_report_counts_bytes_and_dependencies(folder: Path) -> None:
    caching = run(make_job(folder, 3, strategy="depcache"), 3)
    # Raw features travel once, since the first layer keeps what it makes of them, and so do the sums of what is cached
    # at level 1; nothing travels after that.
    raw, sums = caching.layers[0].communicated, caching.layers[1].cached
    assert caching.epochs[0].bytes_sent == (raw + sums) * 12 * 8
    assert sums > 0
    assert all(epoch.bytes_sent == 0 for epoch in caching.epochs[1:])
    assert all(layer.forward_bytes == layer.backward_bytes == 0 for layer in caching.layers)
    assert all(layer.communicated == 0 and layer.cached > 0 for layer in caching.layers[1:])
    communicating = run(make_job(folder, 3, strategy="depcomm"), 3)
    assert all(layer.cached == 0 and layer.communicated > 0 for layer in communicating.layers)
    # Layer 1 exchanges its 12 raw features in the first epoch, and keeps their sum; layer 2 exchanges 8; float64.
    first, second, _ = communicating.layers
    assert first.forward_bytes == first.backward_bytes == 0
    assert second.forward_bytes == second.backward_bytes == second.communicated * 8 * 8
    sent = sum(layer.forward_bytes + layer.backward_bytes for layer in communicating.layers)
    once = first.communicated * 12 * 8
    assert [epoch.bytes_sent for epoch in communicating.epochs] == [sent + once, sent, sent, sent]
    for epoch in communicating.epochs:
        assert epoch.compute_s + epoch.exchange_s + epoch.wait_s == pytest.approx(epoch.time_s, rel=1e-6)
    weights = 12 * 8 + 8 + 8 * 8 + 8 + 8 * 4 + 4
    assert communicating.gradient_bytes == 8 * weights
    assert len(communicating.peak_rss_bytes) == 3
    assert all(
        peak >= base > 0 for peak, base in zip(communicating.peak_rss_bytes, communicating.base_rss_bytes, strict=True)
    )
    assert communicating.predicted_epoch_s is not None
    assert communicating.predicted_epoch_s > 0
    assert communicating.best.epoch in (2, 4)
    assert communicating.final.epoch == 4


def test_json_has_the_promised_keys(folder: Path) -> None:
    record = run(make_job(folder, 2), 2, is_probed=True).to_json()
    assert {
        *("strategy", "ranks", "model", "dataset", "epochs", "train_accuracy", "val_accuracy", "test_accuracy"),
        *("peak_rss_bytes", "plan", "predicted_epoch_s"),
    } <= set(record)
    assert {"loss", "time_s", "bytes_sent", "plan"} <= set(record["epochs"][0])
    assert {"layer", "cached", "communicated"} <= set(record["plan"][0])
    assert TrainReport.from_json(record).to_json() == record
    # A loss that has diverged is null: JSON has no infinity and no NaN.
    record["epochs"][-1]["loss"] = math.inf
    text = json.dumps(TrainReport.from_json(record).to_json(), allow_nan=False)
    assert math.isnan(TrainReport.from_json(json.loads(text)).epochs[-1].loss)


def expect_everywhere(errors: list[RaisedError], kind: str, message: str) -> None:
    """Every rank raises that kind; the words come from the rank at fault."""
    assert [error.type_name for error in errors] == [kind] * len(errors)
    for error in errors:
        with pytest.raises(RuntimeError, match=message):
            raise RuntimeError(error.message)


def test_another_number_of_ranks_than_parts(folder: Path) -> None:
    errors = run_ranks_expect_errors(3, run_job, make_job(folder, 2).to_json())
    expect_everywhere(errors, "PartitionError", "has 2 parts, but 3 ranks are running")


@pytest.mark.parametrize("fault", ["missing", "truncated", "changed"])
def test_damaged_partition(fault: str, tmp_path: Path, dataset: GraphDataset) -> None:
    dgl_hybrid.partition_graph(dataset.graph, "g", 3, tmp_path / "3")
    file = tmp_path / "3" / "part1" / "node_feat.dgl"
    data = bytearray(file.read_bytes())
    if fault == "missing":
        file.unlink()
    elif fault == "truncated":
        file.write_bytes(data[: len(data) // 2])
    else:
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    errors = run_ranks_expect_errors(3, run_job, make_job(tmp_path, 3).to_json())
    words = {"missing": "is missing", "truncated": "is truncated", "changed": "checksum mismatch"}[fault]
    expect_everywhere(errors, "PartitionError", f"part1/node_feat.dgl.* ?{words}")


def test_nan_features_of_one_part(tmp_path: Path, dataset: GraphDataset) -> None:
    graph = dataset.graph.clone()
    feat = graph.ndata["feat"].clone()
    feat[17, 3] = float("nan")
    graph.ndata["feat"] = feat
    dgl_hybrid.partition_graph(graph, "g", 3, tmp_path / "3")
    errors = run_ranks_expect_errors(3, run_job, make_job(tmp_path, 3).to_json())
    expect_everywhere(errors, "DatasetError", r"feat of part \d of g.json must be finite \(got NaN or infinity in 1 of")


def run_and_listen(rank: int, world_size: int, record: dict[str, Any]) -> tuple[list[float | None], list[str]]:
    """Trains; returns the losses and what the trainer warns of."""
    told: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda entry: told.append(entry.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger(trainer.__name__)
    logger.addHandler(handler)
    try:
        report = run_job(rank, world_size, record, is_probed=False)
    finally:
        logger.removeHandler(handler)
    return [epoch["loss"] for epoch in report["epochs"]], told


def test_diverging_is_told_once(folder: Path) -> None:
    """A run whose loss was not a number any more went on to its end without a word."""
    found = run_ranks(2, run_and_listen, make_job(folder, 2, lr=1e200).to_json())
    losses = found[0][0]
    first = losses.index(None) + 1
    assert 1 < first < len(losses)
    (warning,) = found[0][1]
    assert f"the loss of epoch {first} is " in warning
    assert "a smaller --lr (it is 1e+200)" in warning
    assert found[1] == (losses, []), "ranks other than 0 repeat it"
    assert run_ranks(2, run_and_listen, make_job(folder, 2).to_json())[0][1] == []


def test_labels_past_the_number_of_classes(folder: Path) -> None:
    job = replace(make_job(folder, 2), num_classes=2)
    errors = run_ranks_expect_errors(2, run_job, job.to_json())
    expect_everywhere(errors, "DatasetError", r"labels must be below num_classes=2 \(got 3\)")


def test_nothing_to_train_on(tmp_path: Path, dataset: GraphDataset) -> None:
    graph = dataset.graph.clone()
    graph.ndata["train_mask"] = torch.zeros_like(graph.ndata["train_mask"])
    dgl_hybrid.partition_graph(graph, "g", 2, tmp_path / "2")
    errors = run_ranks_expect_errors(2, run_job, make_job(tmp_path, 2).to_json())
    expect_everywhere(errors, "DatasetError", r"train_mask of .*g\.json selects no vertex")


def test_one_class(tmp_path: Path, dataset: GraphDataset) -> None:
    """One logit was taken for a yes or no: right or wrong by its sign."""
    graph = dataset.graph.clone()
    graph.ndata["label"] = torch.zeros_like(graph.ndata["label"])
    dgl_hybrid.partition_graph(graph, "g", 2, tmp_path / "2")
    report = run(replace(make_job(tmp_path, 2), num_classes=1), 2)
    assert (report.final.train, report.final.val, report.final.test) == (1.0, 1.0, 1.0)


def with_fields(dataset: GraphDataset, folder: Path, **fields: torch.Tensor) -> Path:
    """Partitions the graph in two with other fields."""
    graph = dataset.graph.clone()
    for name, field in fields.items():
        graph.ndata[name] = field
    dgl_hybrid.partition_graph(graph, "g", 2, folder / "2")
    return folder


@pytest.mark.parametrize("shape", [(-1,), (-1, 1)])
def test_labels_may_be_narrow_integers_or_one_column(
    shape: tuple[int, ...], folder: Path, dataset: GraphDataset
) -> None:
    label = dataset.graph.ndata["label"].to(torch.int32).reshape(shape)
    other = with_fields(dataset, folder / f"labels{len(shape)}", label=label)
    assert [epoch.loss for epoch in run(make_job(other, 2), 2).epochs] == [
        epoch.loss for epoch in run(make_job(folder, 2), 2).epochs
    ]


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("float_label", r"label of part \d of g.json must be integers of shape \(\d+,\) \(got torch.float32"),
        ("two_labels", r"label of part \d of g.json must be integers of shape \(\d+,\) .* multi-label"),
        ("flat_feat", r"feat of part \d of g.json must be numbers of shape \(N, F\) \(got torch.float32"),
        ("two_splits", r"val_mask of part \d of g.json must have shape \(\d+,\) .* choose one of its splits"),
    ],
)
def test_fields_of_another_kind_are_told_before_training(
    field: str, message: str, tmp_path: Path, dataset: GraphDataset
) -> None:
    data = dataset.graph.ndata
    fields = {
        "float_label": {"label": data["label"].float()},
        "two_labels": {"label": data["label"][:, None].expand(-1, 2).clone()},
        "flat_feat": {"feat": data["feat"][:, 0].clone()},
        "two_splits": {"val_mask": data["val_mask"][:, None].expand(-1, 2).clone()},
    }[field]
    job = replace(make_job(with_fields(dataset, tmp_path, **fields), 2), num_classes=None)
    expect_everywhere(run_ranks_expect_errors(2, run_job, job.to_json()), "DatasetError", message)


def run_ending_in_a_turn(rank: int, world_size: int, record: dict[str, Any]) -> dict[str, Any]:
    """Trains with trials one after the other, of which the run's end is in the midst."""
    made: list[tuple[FullGraphLoader, DependencyPlan]] = []

    def make_loader(*args: Any) -> tuple[FullGraphLoader, DependencyPlan]:
        made.append(trainer_make_loader(*args))
        return made[0]

    trainer_make_loader = trainer.make_loader
    with (
        assumed_rates(world_size),
        mock.patch.object(trainer, "make_loader", make_loader),
        mock.patch.object(FullGraphLoader, "best_plan", property(lambda loader: made[0][1])),
        mock.patch.object(loader, "SHARE", math.inf),
        mock.patch.object(plan_trials, "MAX_TIMED_EPOCHS", plan_trials.TIMED_EPOCHS),
    ):
        return train(TrainJob.from_json(record)).to_json()


def test_the_report_is_of_the_plan_that_stayed(folder: Path) -> None:
    """Rows and bytes by layer were those of the last epoch, under the name of another plan."""
    job = make_job(folder, 3, model="gat")
    job = replace(job, training=replace(job.training, epochs=plan_trials.WARM_UP_EPOCHS + plan_trials.TIMED_EPOCHS + 2))
    records = run_ranks(3, run_ending_in_a_turn, job.to_json())
    report = TrainReport.from_json(records[0])
    assert all(record["plan"] == records[0]["plan"] for record in records)
    stayed = [epoch.bytes_sent for epoch in report.epochs if epoch.plan == report.stayed_plan]
    assert report.stayed_plan == 0
    assert report.epochs[-1].plan != 0
    assert report.epochs[-1].bytes_sent != stayed[-1]
    assert sum(layer.forward_bytes + layer.backward_bytes for layer in report.layers) == stayed[-1]


def test_missing_fields(tmp_path: Path, dataset: GraphDataset) -> None:
    graph = dataset.graph.clone()
    del graph.ndata["val_mask"]
    dgl_hybrid.partition_graph(graph, "g", 2, tmp_path / "2")
    errors = run_ranks_expect_errors(2, run_job, make_job(tmp_path, 2).to_json())
    expect_everywhere(errors, "DatasetError", "has no node field val_mask")


def test_classes_are_counted_over_all_ranks(folder: Path) -> None:
    job = replace(make_job(folder, 3), num_classes=None)
    known = run(make_job(folder, 3), 3)
    assert [epoch.loss for epoch in run(job, 3).epochs] == [epoch.loss for epoch in known.epochs]


def test_a_graph_without_validation_nodes(tmp_path: Path, dataset: GraphDataset) -> None:
    graph = dataset.graph.clone()
    graph.ndata["val_mask"] = torch.zeros(graph.num_nodes(), dtype=torch.bool)
    dgl_hybrid.partition_graph(graph, "g", 2, tmp_path / "2")
    record = run_ranks(2, run_job, make_job(tmp_path, 2).to_json(), False)[0]
    assert record["val_accuracy"] is None
    assert record["best_epoch"] == 4


def save_plan(rank: int, world_size: int, record: dict[str, Any], out: str) -> dict[str, Any]:
    from dgl_hybrid.launch.tasks import plan_task

    with assumed_rates(world_size):
        found: dict[str, Any] = plan_task({"job": record, "out": out, "explain": None, "explain_is_global": False})
    return found


@pytest.mark.parametrize("strategy", ["depcache", "greedy", "depcomm"])
def test_tables_of_plans_have_the_rows_that_run(strategy: str, tmp_path: Path, dataset: GraphDataset) -> None:
    """Where few vertices train, all on one rank, rows that owners computed only for others were counted, and explained,
    for ranks that compute instead; and the seed that a rank without any borrows was a cached row.
    """
    graph = dataset.graph.clone()
    graph.ndata["train_mask"] = torch.zeros(graph.num_nodes(), dtype=torch.bool)
    graph.ndata["train_mask"][:4] = True
    dgl_hybrid.partition_graph(graph, "g", 3, tmp_path / "3", part_method="contiguous")
    job = make_job(tmp_path, 3, strategy=strategy).to_json()
    planned = run_ranks(3, save_plan, job, str(tmp_path / "plan"))[0]
    by_layer = [[row for row in planned["by_rank"] if row["layer"] == layer + 1] for layer in range(NUM_LAYERS)]
    for layer, rows in zip(planned["plan"], by_layer, strict=True):
        assert len(rows) == 3
        assert sum(row["cached"] for row in rows) == layer["cached"]
        assert sum(row["communicated"] for row in rows) == layer["communicated"]
    assert (sum(layer["cached"] for layer in planned["plan"]) == 0) == (strategy == "depcomm")
    plans = [planner.load_plan(tmp_path / "plan", rank) for rank in range(3)]
    listed = [sum(len(plan.cached[level]) for plan in plans) for level in range(NUM_LAYERS)]
    all_run = all(count == layer["cached"] for count, layer in zip(listed, planned["plan"], strict=True))
    assert strategy != "depcache" or not all_run, "this test shows nothing"


def test_saved_plans(tmp_path: Path, folder: Path) -> None:
    job = make_job(folder, 3, strategy="depcache")
    run_ranks(3, save_plan, job.to_json(), str(tmp_path))
    again = make_job(folder, 3, plan=str(tmp_path))
    assert run(again, 3).epochs[-1].bytes_sent == 0, "the saved plan was not followed"
    deeper = replace(again, model=replace(again.model, num_layers=2))
    errors = run_ranks_expect_errors(3, run_job, deeper.to_json())
    expect_everywhere(errors, "PlanError", r"was made for num_layers 3 \(expected 2\); plan again")
    (tmp_path / "plan_rank1.json").unlink()
    errors = run_ranks_expect_errors(3, run_job, again.to_json())
    expect_everywhere(errors, "PlanError", "no plan for rank 1")


@pytest.mark.parametrize("strategy", ["depcache", "hybrid"])
def test_runs_by_saved_plans_have_the_strategy_of_these(strategy: str, tmp_path: Path, folder: Path) -> None:
    """They were all reported as hybrid, whatever had made the plans."""
    job = make_job(folder, 2, strategy=strategy)
    for rank in range(2):
        plan = DependencyPlan(
            strategy="hybrid@0.5" if strategy == "hybrid" else strategy,
            rank=rank,
            world_size=2,
            num_layers=NUM_LAYERS,
            cached=(torch.arange(0),) * NUM_LAYERS,
            communicated=(0,) * NUM_LAYERS,
            objective_s=0.0,
            partition_fingerprint=partition_digest(Path(job.part_config)),
        )
        planner.save_plan(plan, tmp_path)
    report = run(make_job(folder, 2, plan=str(tmp_path)), 2)
    assert (report.strategy, report.chosen_plan) == (strategy, plan.strategy)
    assert run(make_job(folder, 2, strategy="depcomm"), 2).strategy == "depcomm"


def test_plans_and_reports_tell_of_chunks(tmp_path: Path) -> None:
    """Only bytes far over the budget were told, and nothing of what keeps to it."""
    larger = generate_powerlaw(PowerLawConfig(nodes=1500, degree=8.0, features=12, classes=4))
    dgl_hybrid.partition_graph(larger.graph, "g", 2, tmp_path / "2", part_method="random")
    job = make_job(tmp_path, 2)
    budget = 8 * 64 * 12 * 8.0
    within = replace(job, strategy=replace(job.strategy, memory_budget=budget))
    for planned in run_ranks(2, save_plan, within.to_json(), str(tmp_path / "plan")):
        assert (planned["chosen_plan"], planned["chunk_rows"]) == ("depcomm", 64)
        assert sum(row["communicated"] for row in planned["by_rank"]) > 64
        assert all(0 < row["held_bytes"] <= budget for row in planned["by_rank"])
    report = run(replace(job, strategy=StrategyConfig(plan=str(tmp_path / "plan"))), 2)
    assert report.chunk_rows == 64
    assert TrainReport.from_json(json.loads(json.dumps(report.to_json()))).chunk_rows == 64
    for planned in run_ranks(2, save_plan, job.to_json(), str(tmp_path / "plan")):
        assert planned["chunk_rows"] is None


def test_the_graph_counts_in_the_memory_of_plain_dgl(
    folder: Path, dataset: GraphDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was left out, and not in that of our ranks; and what making it took is not in it, as it is not in ours."""
    give_back_memory()  # what tests before this one have freed
    before: list[int] = []
    held_bytes = dataset.graph.num_nodes() * 300_000 * 4

    def load(config: DataConfig) -> GraphDataset:
        before.append(current_rss_bytes())
        made_of = bytearray(b"x") * (held_bytes + 500_000_000)
        del made_of
        dataset.graph.ndata["held"] = torch.ones(dataset.graph.num_nodes(), 300_000)
        return dataset

    monkeypatch.setattr(DataConfig, "load", load)
    try:
        (record,) = reference_task({"data": {}, "jobs": [make_job(folder, 1).to_json()]})
    finally:
        del dataset.graph.ndata["held"]
    assert record["base_rss_bytes"][0] < before[0] + 100_000_000
    assert record["peak_rss_bytes"][0] > before[0] + 300_000_000
    if sys.platform == "linux":  # elsewhere a peak cannot be forgotten
        assert record["peak_rss_bytes"][0] < before[0] + held_bytes + 250_000_000


def chunks_of_evaluations(rank: int, world_size: int, record: dict[str, Any]) -> list[int | None]:
    """Trains; returns how many rows at a time each of its evaluators receives."""
    made: list[Evaluator] = []

    class Noted(Evaluator):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            made.append(self)

    with mock.patch.object(trainer, "Evaluator", Noted):
        run_job(rank, world_size, record, is_probed=False)
    return [evaluator._loader._builder.chunk_rows for evaluator in made]


def test_evaluations_keep_to_the_chunks_of_a_saved_plan(tmp_path: Path, folder: Path) -> None:
    """What a memory budget asks for holds for evaluations, too; with a saved plan they received all rows at once."""
    job = make_job(folder, 2, plan=str(tmp_path))
    for rank in range(2):
        plan = DependencyPlan(
            strategy="depcomm",
            rank=rank,
            world_size=2,
            num_layers=NUM_LAYERS,
            cached=(torch.arange(0),) * NUM_LAYERS,
            communicated=(0,) * NUM_LAYERS,
            objective_s=0.0,
            partition_fingerprint=partition_digest(Path(job.part_config)),
            chunk_rows=7,
        )
        planner.save_plan(plan, tmp_path)
    assert run_ranks(2, chunks_of_evaluations, job.to_json()) == [[7], [7]]


@pytest.mark.parametrize("strategy", ["hybrid", "depcache"])
def test_evaluations_keep_to_a_budget_that_the_plan_fits(strategy: str, folder: Path) -> None:
    job = make_job(folder, 2, strategy=strategy)
    within = replace(job, strategy=replace(job.strategy, memory_budget=1e6))
    widest_bytes = 12 * 8
    assert run_ranks(2, chunks_of_evaluations, within.to_json()) == [[int(1e6 / (8 * widest_bytes))]] * 2
    assert run_ranks(2, chunks_of_evaluations, job.to_json()) == [[None], [None]]


def test_the_best_evaluation_is_one_whose_loss_is_known() -> None:
    """One loss that was not a number, as of an epoch that diverged, made the last epoch the best."""

    def measured(*losses: float) -> list[Accuracy]:
        return [
            Accuracy(epoch=epoch, train=0.5, val=0.5, test=0.5, val_loss=loss)
            for epoch, loss in enumerate(losses, start=1)
        ]

    nan = float("nan")
    assert trainer._best(measured(nan, 0.5, 0.3, nan, 0.3, 0.4)).epoch == 3, "the first of equals"
    assert trainer._best(measured(0.3, nan)).epoch == 1
    assert trainer._best(measured(float("inf"), nan)).epoch == 1
    assert trainer._best(measured(nan, nan)).epoch == 2, "no validation nodes"


def test_plan_of_another_partition(tmp_path: Path, folder: Path, dataset: GraphDataset) -> None:
    run_ranks(2, save_plan, make_job(folder, 2).to_json(), str(tmp_path / "plan"))
    dgl_hybrid.partition_graph(dataset.graph, "g", 2, tmp_path / "2", part_method="random")
    errors = run_ranks_expect_errors(2, run_job, make_job(tmp_path, 2, plan=str(tmp_path / "plan")).to_json())
    expect_everywhere(errors, "PlanError", "was made for partition_fingerprint")


def test_plan_of_another_model(tmp_path: Path, folder: Path) -> None:
    """What the first layer keeps of raw features is not there for one that attends to them."""
    run_ranks(2, save_plan, make_job(folder, 2, model="sage").to_json(), str(tmp_path / "plan"))
    errors = run_ranks_expect_errors(
        2, run_job, make_job(folder, 2, model="gat", plan=str(tmp_path / "plan")).to_json()
    )
    expect_everywhere(errors, "PlanError", re.escape("for a model with model sage (expected gat); plan again"))


def test_plan_over_the_budget(tmp_path: Path, folder: Path) -> None:
    run_ranks(2, save_plan, make_job(folder, 2, strategy="depcache").to_json(), str(tmp_path / "plan"))
    job = make_job(folder, 2, plan=str(tmp_path / "plan"))
    within = replace(job, strategy=replace(job.strategy, memory_budget=1e3))
    errors = run_ranks_expect_errors(2, run_job, within.to_json())
    expect_everywhere(errors, "PlanError", "and the memory budget is 1,000: plan again with this budget")
    wide = replace(job, training=replace(job.training, dtype="float32"))
    errors = run_ranks_expect_errors(2, run_job, wide.to_json())
    expect_everywhere(errors, "PlanError", re.escape("for a model with dtype float64 (expected float32)"))
    roomy = replace(job, strategy=replace(job.strategy, memory_budget=1e9))
    assert run(roomy, 2).chosen_plan == "depcache"
    with pytest.raises(ValueError, match="nothing is planned with a plan: leave strategy depcache out"):
        replace(job.strategy, strategy="depcache")


def test_plan_in_larger_messages_than_the_budget_has_room_for(tmp_path: Path, folder: Path) -> None:
    job = make_job(folder, 2, strategy="depcomm")
    run_ranks(2, save_plan, job.to_json(), str(tmp_path / "plan"))
    made = [planner.load_plan(tmp_path / "plan", rank) for rank in range(2)]
    follows = replace(job, strategy=StrategyConfig(plan=str(tmp_path / "plan"), memory_budget=1e6))
    room = int(1e6 / (8 * 12 * 8))
    for chunk_rows in (room, room + 1):
        for plan in made:
            planner.save_plan(replace(plan, chunk_rows=chunk_rows), tmp_path / "plan")
        if chunk_rows == room:
            assert run(follows, 2).chosen_plan == "depcomm"
    errors = run_ranks_expect_errors(2, run_job, follows.to_json())
    expect_everywhere(errors, "PlanError", f"receives {room + 1:,} rows at a time, .* has room for {room:,}")
