# SPDX-License-Identifier: Apache-2.0
"""A run that is saved and resumed is the run that was never broken off; nothing saved is ever lost or half there."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import stat
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

import dgl_hybrid

# isort: split
import dgl

from dgl_hybrid.datasets import PowerLawConfig, generate_powerlaw
from dgl_hybrid.datasets.dataset import GraphDataset
from dgl_hybrid.errors import CheckpointError, PlanError
from dgl_hybrid.planner import durable
from dgl_hybrid.training import checkpoint
from dgl_hybrid.training.checkpoint import BEST_NAME, LAST_NAME, load_model
from dgl_hybrid.training.config import ModelConfig, StrategyConfig, TrainConfig, TrainJob
from dgl_hybrid.training.report import TrainReport
from dgl_hybrid.training.trainer import train
from tests.helpers.rates import assumed_rates
from tests.helpers.world import RaisedError, run_ranks, run_ranks_expect_errors


def run_job(rank: int, world_size: int, record: dict[str, Any], is_disk_full: bool = False) -> dict[str, Any]:
    full = mock.patch.object(durable.os, "fsync", side_effect=OSError(28, "No space left on device"))
    with assumed_rates(world_size):
        if is_disk_full and rank == 0:
            with full:
                return train(TrainJob.from_json(record)).to_json()
        return train(TrainJob.from_json(record)).to_json()


@pytest.fixture(scope="module")
def dataset() -> GraphDataset:
    return generate_powerlaw(PowerLawConfig(nodes=300, degree=6.0, features=12, classes=4))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, dataset: GraphDataset) -> Path:
    root = tmp_path_factory.mktemp("checkpoint")
    for num_parts in (1, 2, 3):
        dgl_hybrid.partition_graph(dataset.graph, "g", num_parts, root / str(num_parts))
    return root


def make_job(folder: Path, num_parts: int, checkpoint: Path, *, model: str = "gcn", **options: Any) -> TrainJob:
    options = {"epochs": 6, "eval_every": 2, "dtype": "float64", "seed": 5} | options
    return TrainJob(
        part_config=str(folder / str(num_parts) / "g.json"),
        dataset="g",
        num_classes=4,
        model=ModelConfig(model=model, num_layers=2, hidden=8, heads=2, dropout=0.4),
        strategy=StrategyConfig(strategy="depcomm"),
        training=TrainConfig(checkpoint=str(checkpoint), **options),
    )


def run(job: TrainJob, num_parts: int) -> TrainReport:
    records = run_ranks(num_parts, run_job, job.to_json())
    assert all(record["epochs"] == records[0]["epochs"] for record in records)
    return TrainReport.from_json(records[0])


def losses(report: TrainReport) -> list[float]:
    return [epoch.loss for epoch in report.epochs]


def tensors_in(folder: Path) -> dict[str, Tensor]:
    return {
        f"{name}: {key}": value for name in (BEST_NAME, LAST_NAME) for key, value in load_file(folder / name).items()
    }


@pytest.mark.parametrize(
    ("model", "num_parts", "dtype", "device"),
    [
        *(("gcn", 2, "float32", "cpu"), ("gin", 3, "float64", "cpu")),
        pytest.param("gcn", 1, "float64", "cpu", marks=pytest.mark.slow),
        pytest.param("gat", 2, "float64", "cpu", marks=pytest.mark.slow),
        pytest.param("gin", 2, "float64", "cuda", marks=pytest.mark.cuda),
    ],
)
def test_resumed_is_as_if_never_broken_off(
    model: str, num_parts: int, dtype: str, device: str, folder: Path, tmp_path: Path
) -> None:
    """Dropout masks, batch norm's running statistics and Adam's moments included."""
    options: dict[str, Any] = {"model": model, "dtype": dtype, "device": device}
    whole = run(make_job(folder, num_parts, tmp_path / "whole", **options), num_parts)
    first = run(make_job(folder, num_parts, tmp_path / "two", **options, epochs=4), num_parts)
    second = run(make_job(folder, num_parts, tmp_path / "two", **options, resume=True), num_parts)
    assert (first.first_epoch, second.first_epoch) == (1, 5)
    close = {"rel": 1e-9 if dtype == "float64" else 1e-5}  # order of products goes by measured times
    assert losses(first) + losses(second) == pytest.approx(losses(whole), **close)
    for found, expected in ((second.final, whole.final), (second.best, whole.best)):
        assert asdict(found) == pytest.approx(asdict(expected), **close)
    wanted, saved = tensors_in(tmp_path / "whole"), tensors_in(tmp_path / "two")
    assert wanted.keys() == saved.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(saved[name], value, rtol=1e3 * close["rel"], atol=close["rel"], msg=name)


def test_resumed_on_another_number_of_ranks(folder: Path, tmp_path: Path) -> None:
    whole = run(make_job(folder, 2, tmp_path / "whole"), 2)
    run(make_job(folder, 2, tmp_path / "two", epochs=4), 2)
    second = run(make_job(folder, 3, tmp_path / "two", resume=True), 3)
    assert losses(second) == pytest.approx(losses(whole)[4:], rel=1e-9)


@pytest.mark.parametrize("model", ["gcn", "gin"])
def test_a_saved_model_is_one_of_plain_dgl(
    model: str, folder: Path, tmp_path: Path, dataset: GraphDataset, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger=load_model.__module__)
    report = run(make_job(folder, 2, tmp_path, model=model, epochs=9, eval_every=3), 2)
    for name, accuracy in ((BEST_NAME, report.best), (LAST_NAME, report.final)):
        loaded = load_model(tmp_path / name)
        assert not loaded.training
        sizes = f"{dataset.graph.num_nodes()} vertices and {dataset.graph.num_edges()} edges"
        assert f"{tmp_path / name} was trained on g as a graph of {sizes}" in caplog.messages[-1]
        assert {type(layer).__module__.partition(".")[0] for layer in loaded.layers} == {"dgl"}
        with torch.no_grad():
            logits = loaded([dataset.graph] * 2, dataset.graph.ndata["feat"].double())
        right = logits.argmax(1) == dataset.graph.ndata["label"]
        for split in ("train", "val", "test"):
            mask = dataset.graph.ndata[f"{split}_mask"].bool()
            assert float(right[mask].double().mean()) == pytest.approx(getattr(accuracy, split))
    # What the README says: without us, too.
    again = type(loaded)(loaded.layers, None)
    again.norms = loaded.norms
    again.load_state_dict(load_file(tmp_path / BEST_NAME))


def fails(job: TrainJob, num_parts: int, message: str, **options: Any) -> None:
    """On every rank, with the same words."""
    for error in run_ranks_expect_errors(num_parts, run_job, job.to_json(), **options):
        assert isinstance(error, RaisedError)
        assert error.type_name == CheckpointError.__name__
        assert message in error.message


def test_nothing_is_overwritten_unasked(folder: Path, tmp_path: Path) -> None:
    run(make_job(folder, 2, tmp_path, epochs=2), 2)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert {path.name for path in before} == {BEST_NAME, LAST_NAME}
    fails(make_job(folder, 2, tmp_path), 2, "is there already. Possible solutions: 1) go on from it with --resume")
    fails(make_job(folder, 2, tmp_path, epochs=2, resume=True), 2, "has done 2 epochs, and --epochs is 2")
    job = make_job(folder, 2, tmp_path, resume=True)
    fails(replace(job, model=replace(job.model, hidden=16)), 2, "is of a model with hidden 8 (expected 16)")
    fails(replace(job, training=replace(job.training, seed=6)), 2, "is of a run with seed 5 (expected 6)")
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("resume", [False, True])
def test_two_runs_do_not_write_into_one_folder(resume: bool, folder: Path, tmp_path: Path) -> None:
    """A job that was started twice: each saved over the other's weights, and removed what it was writing."""
    job = make_job(folder, 2, tmp_path / "c")
    (tmp_path / "c").mkdir()
    if resume:
        run(job, 2)
        job = replace(job, training=replace(job.training, epochs=8, resume=True))
    writing = tmp_path / "c" / f".{LAST_NAME}.1.tmp"
    writing.write_bytes(b"half of it")
    before = sorted((path.name, path.stat().st_mtime_ns) for path in (tmp_path / "c").iterdir())
    other = os.open(tmp_path / "c", os.O_RDONLY)
    try:
        fcntl.flock(other, fcntl.LOCK_EX)
        fails(job, 2, "another run is writing into")
        assert sorted((path.name, path.stat().st_mtime_ns) for path in (tmp_path / "c").iterdir()) == before
    finally:
        os.close(other)
    run(job, 2)
    assert not writing.exists()


def test_a_run_that_cannot_begin_keeps_no_other_out(folder: Path, tmp_path: Path) -> None:
    """Its error may be held for long, by a notebook say, and what had been made of it with that."""
    job = make_job(folder, 1, tmp_path / "c")
    wrong = replace(job, strategy=StrategyConfig(plan=str(tmp_path / "none")))
    with pytest.raises(PlanError) as kept:
        train(wrong)
    train(job)
    assert kept.value is not None
    assert (tmp_path / "c" / LAST_NAME).exists()


def test_a_file_system_without_locks_will_do(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint.fcntl, "flock", mock.Mock(side_effect=OSError(errno.EBADF, "no locks of folders")))
    train(make_job(folder, 1, tmp_path / "c"))
    assert (tmp_path / "c" / LAST_NAME).exists()


def test_another_graph_is_refused(folder: Path, tmp_path: Path, dataset: GraphDataset) -> None:
    run(make_job(folder, 2, tmp_path / "saved", epochs=2), 2)
    other = generate_powerlaw(PowerLawConfig(nodes=301, degree=6.0, features=12, classes=4)).graph
    relabelled = dataset.graph.clone()
    relabelled.ndata["label"] = relabelled.ndata["label"].flip(0)
    rescaled = dataset.graph.clone()
    rescaled.ndata["feat"] = rescaled.ndata["feat"].clone()
    rescaled.ndata["feat"][7, 3] *= 2
    swapped = dataset.graph.clone()
    swapped.ndata["feat"] = swapped.ndata["feat"][:, torch.arange(12).roll(1)]
    # The same sizes, numbers of labels in each split, and rows, which others have.
    moved = dataset.graph.clone()
    moved.ndata["feat"] = moved.ndata["feat"].roll(1, 0)
    exchanged, train_ids = dataset.graph.clone(), dataset.graph.ndata["train_mask"].nonzero().squeeze(1)
    exchanged.ndata["label"] = exchanged.ndata["label"].clone()
    exchanged.ndata["label"][train_ids] = exchanged.ndata["label"][train_ids.roll(1)]
    source, destination = dataset.graph.edges()
    rewired = dgl.graph((source.roll(1), destination), num_nodes=dataset.graph.num_nodes())
    rewired.ndata.update(dataset.graph.ndata)
    for name, graph, message in (
        ("other", other, "a graph with vertices 300"),
        ("flip", relabelled, "with labels "),
        ("rescaled", rescaled, "a graph with features "),
        ("swapped", swapped, "a graph with features "),
        ("moved", moved, "a graph with rows "),
        ("exchanged", exchanged, "a graph with rows "),
        ("rewired", rewired, "a graph with links "),
    ):
        dgl_hybrid.partition_graph(graph, "g", 2, tmp_path / name / "2")
        fails(make_job(tmp_path / name, 2, tmp_path / "saved", resume=True), 2, message)
    run(make_job(tmp_path / "rewired", 2, tmp_path / "of rewired"), 2)
    dgl_hybrid.partition_graph(dgl.reverse(rewired), "g", 2, tmp_path / "turned" / "2")
    fails(make_job(tmp_path / "turned", 2, tmp_path / "of rewired", resume=True), 2, "a graph with links ")


def test_resumed_approximate_runs_say_that_they_differ(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for approximate, is_told in (("bf16", False), ("stale", True)):
        options: dict[str, Any] = {"approximate": approximate, "eval_every": 1}
        for epochs in (1, 2):
            caplog.clear()
            job = make_job(folder, 1, tmp_path / approximate, epochs=epochs, resume=epochs > 1, **options)
            train(job)
            told = "approximate rows (stale) begin anew with --resume" in caplog.text
            assert told == (is_told and epochs == 2)


def test_a_run_that_was_approximate_once_does_not_become_exact(folder: Path, tmp_path: Path) -> None:
    """Resumed without the option it called itself exact, weights of approximate epochs and all."""
    run(make_job(folder, 2, tmp_path, epochs=1, approximate="stale+bf16"), 2)
    for epochs, approximate, exactness in (
        (2, None, "approximate (bf16 rows, rows one epoch old)"),
        (3, "int8", "approximate (bf16 rows, int8 rows, rows one epoch old)"),
        (4, None, "approximate (bf16 rows, int8 rows, rows one epoch old)"),
    ):
        job = make_job(folder, 2, tmp_path, epochs=epochs, eval_every=1, resume=True, approximate=approximate)
        assert run(job, 2).exactness == exactness


def test_another_learning_rate_is_taken_and_told(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(make_job(folder, 1, tmp_path, epochs=1, lr=0.02))
    train(make_job(folder, 1, tmp_path, epochs=2, lr=0.02, resume=True))
    assert "was trained with" not in caplog.text
    train(make_job(folder, 1, tmp_path, epochs=3, lr=0.001, weight_decay=0.0, resume=True))
    assert f"{LAST_NAME} was trained with lr 0.02, and goes on with 0.001" in caplog.text
    assert f"{LAST_NAME} was trained with weight_decay 0.0005, and goes on with 0.0" in caplog.text


def test_files_of_before_are_resumed(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They tell neither of features nor of the learning rate, nor whether rows were approximate."""

    def as_before(record: dict[str, Any], tensors: dict[str, Tensor]) -> str:
        record.pop("options", None)
        record["graph"].pop("features", None)
        record["progress"].pop("approximate", None)
        return digest(record, tensors)

    digest = checkpoint._digest
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_digest", as_before)
        train(make_job(folder, 1, tmp_path, epochs=2))
    assert json.loads(metadata(tmp_path / LAST_NAME)).keys().isdisjoint({"options"})
    assert train(make_job(folder, 1, tmp_path, epochs=4, resume=True)).exactness == "exact"


def metadata(path: Path) -> str:
    with safe_open(path, framework="pt") as file:
        return str(file.metadata()["dgl_hybrid"])


def test_what_killed_runs_were_writing_is_removed(folder: Path, tmp_path: Path) -> None:
    left, other = tmp_path / f".{LAST_NAME}.12345.tmp", tmp_path / ".mine.12345.tmp"
    for path in (left, other):
        path.touch()
    train(make_job(folder, 1, tmp_path, epochs=2))
    assert not left.exists()
    assert other.exists()


def test_what_is_left_of_a_first_save_is_not_to_be_resumed(folder: Path, tmp_path: Path) -> None:
    (tmp_path / BEST_NAME).touch()
    fails(make_job(folder, 2, tmp_path), 2, f"{BEST_NAME} is there already. Possible solutions: 1) choose another")


def test_nothing_to_resume(folder: Path, tmp_path: Path) -> None:
    fails(make_job(folder, 2, tmp_path / "none", resume=True), 2, "there is no checkpoint")
    assert not (tmp_path / "none").exists()
    with pytest.raises(ValueError, match="resume needs checkpoint"):
        TrainConfig(resume=True)


def test_a_damaged_file_is_refused(folder: Path, tmp_path: Path) -> None:
    run(make_job(folder, 2, tmp_path, epochs=2), 2)
    path = tmp_path / LAST_NAME
    whole = path.read_bytes()
    for damaged in (
        whole[:-1],
        whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:],
        b"",
        whole.replace(b'\\"epoch\\": 2', b'\\"epoch\\": 1'),
    ):
        assert damaged != whole
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="is damaged"):
            load_model(path)
    fails(make_job(folder, 2, tmp_path, resume=True), 2, "is damaged: its checksum does not match")


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    path = tmp_path / BEST_NAME
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        load_model(path)
    with pytest.raises(CheckpointError, match=rf"is a folder: name {BEST_NAME} or last\.safetensors in it"):
        load_model(tmp_path)
    save_file({"x": torch.zeros(2)}, path)
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        load_model(path)
    save_file({"x": torch.zeros(2)}, path, {"dgl_hybrid": json.dumps({"format_version": 99})})
    with pytest.raises(CheckpointError, match=r"must have format version 1 \(got 99\)"):
        load_model(path)


def test_a_full_disk_loses_nothing(folder: Path, tmp_path: Path) -> None:
    run(make_job(folder, 2, tmp_path, epochs=2), 2)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    message = f"cannot be saved in {tmp_path}: No space left on device"
    fails(make_job(folder, 2, tmp_path, resume=True), 2, message, is_disk_full=True)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_disk_that_is_full_at_the_end_does_not_cost_the_report(folder: Path, tmp_path: Path) -> None:
    """All that a run had found was lost with its last model."""
    (tmp_path / "saved").mkdir()
    saved = run(make_job(folder, 2, tmp_path / "saved", epochs=2), 2)
    assert saved.unsaved is None
    records = run_ranks(2, run_job, make_job(folder, 2, tmp_path / "full", epochs=2).to_json(), is_disk_full=True)
    for record in records:
        report = TrainReport.from_json(record)
        assert losses(report) == losses(saved)
        assert report.final == saved.final
        assert report.unsaved is not None
        assert f"the model of epoch 2 cannot be saved in {tmp_path / 'full'}: No space left" in report.unsaved
    assert list((tmp_path / "full").iterdir()) == []


def test_of_two_files_none_is_written_alone(tmp_path: Path) -> None:
    """The first fits, the second does not."""
    for name in "ab":
        (tmp_path / name).write_bytes(b"old")
    with (
        mock.patch.object(durable.os, "fsync", side_effect=[None, OSError(28, "No space left on device")]),
        pytest.raises(OSError, match="No space left"),
    ):
        durable.write_durably(tmp_path, {"a": b"new", "b": b"new"})
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"a": b"old", "b": b"old"}
    durable.write_durably(tmp_path, {"a": b"new", "b": b"newer"})
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"a": b"new", "b": b"newer"}


def test_a_folder_that_cannot_be_written_into_is_told_before_training(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    # In the last nobody may make files, root neither.
    for place in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc")):
        fails(make_job(folder, 2, place, epochs=2), 2, f"--checkpoint {place} must be a folder that can be written")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_can_be_read_only_is_told_before_training_goes_on(folder: Path, tmp_path: Path) -> None:
    run(make_job(folder, 2, tmp_path, epochs=2), 2)
    tmp_path.chmod(0o500)
    try:
        fails(make_job(folder, 2, tmp_path, epochs=2, resume=True), 2, "must be a folder that can be written into")
    finally:
        tmp_path.chmod(0o700)


def test_a_file_system_that_syncs_no_folders_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sync, codes = os.fsync, [errno.EINVAL, errno.EIO]

    def fsync(file: int) -> None:
        if stat.S_ISDIR(os.fstat(file).st_mode):
            raise OSError(codes.pop(0), "no folders")
        sync(file)

    monkeypatch.setattr(os, "fsync", fsync)
    durable.write_durably(tmp_path, {"a": b"new"})
    assert (tmp_path / "a").read_bytes() == b"new"
    with pytest.raises(OSError, match="no folders"):
        durable.write_durably(tmp_path, {"a": b"newer"})
