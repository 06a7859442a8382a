# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import errno
import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import dgl
import dgl.distributed
import numpy as np
import pytest
import torch

import dgl_hybrid
from dgl_hybrid.cli import main
from dgl_hybrid.errors import DatasetError, PartitionError
from dgl_hybrid.launch import workspace
from dgl_hybrid.launch.workspace import (
    DataConfig,
    PartitionConfig,
    check_existing_partition,
    prepare_partition,
)
from dgl_hybrid.partition import load_partition, verify_partition
from dgl_hybrid.partition.location import find_part_config

SMALL = "powerlaw:nodes=120,degree=6,features=5,classes=3"


def prepare(root: Path, data: str = SMALL, **options: object) -> Path:
    partition = PartitionConfig(workspace=str(root), **options)  # type: ignore[arg-type]
    return prepare_partition(DataConfig(data=data), partition).part_config


def test_a_second_run_reuses_the_first_ones_partition(tmp_path: Path) -> None:
    first = prepare(tmp_path, ranks=3)
    written = first.stat().st_mtime_ns
    assert prepare(tmp_path, ranks=3) == first
    assert first.stat().st_mtime_ns == written
    others = {
        prepare(tmp_path, ranks=2),
        prepare(tmp_path, ranks=3, part_method="random"),
        prepare(tmp_path, ranks=3, num_hops=2),
    }
    assert len({first, *others}) == 4, "other options must not share a partition"


@pytest.mark.skipif(os.name != "posix", reason="modes are POSIX's")
@pytest.mark.parametrize(("umask", "mode"), [(0o000, 0o775), (0o002, 0o775), (0o022, 0o755), (0o077, 0o700)])
def test_a_workspace_is_never_everybodys(umask: int, mode: int, tmp_path: Path) -> None:
    """Compiled code is kept in the same folder, unless anybody may write into it."""
    before = os.umask(umask)
    try:
        prepare(tmp_path / "cache")
    finally:
        os.umask(before)
    assert (tmp_path / "cache").stat().st_mode & 0o777 == mode


def test_a_file_system_without_locks_will_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Lustre as it is often mounted: nothing could be planned or trained from a workspace there."""
    monkeypatch.setattr(workspace.fcntl, "flock", mock.Mock(side_effect=OSError(errno.ENOSYS, "not implemented")))
    first = prepare(tmp_path)
    left = first.parent.parent / f".x-{first.parent.name.rsplit('-', 1)[1]}.writing-1"
    left.mkdir()
    assert prepare(tmp_path) == first
    assert left.is_dir(), "it may be another run's"
    assert "do not start two runs of one graph at once" in caplog.text


KILLED = """
import os, signal, sys
from dgl_hybrid.launch import workspace
from dgl_hybrid.partition import write

write.sync_tree = lambda folder: os.kill(os.getpid(), signal.SIGKILL)
data, partition = workspace.DataConfig(data=sys.argv[2]), workspace.PartitionConfig(ranks=2, workspace=sys.argv[1])
workspace.prepare_partition(data, partition)
"""


ENDED = KILLED.replace("SIGKILL", "SIGTERM")
ENDED_WITH_OUT = """
import os, signal, sys
from dgl_hybrid.cli.main import main
from dgl_hybrid.partition import write

write.sync_tree = lambda folder: os.kill(os.getpid(), signal.SIGTERM)
main(["partition", "--data", sys.argv[2], "--out", sys.argv[1]])
"""


def test_what_a_killed_run_had_written_is_removed_by_the_next(tmp_path: Path) -> None:
    """It may be as large as a partition, and its name is never used again."""
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), SMALL], check=False, timeout=300)
    assert killed.returncode == -signal.SIGKILL
    (left,) = tmp_path.glob(".*.writing-*")
    others = tmp_path / ".other-2-0123456789abcdef.writing-x"
    others.mkdir()
    prepare(tmp_path)
    assert not left.exists()
    assert others.exists(), "of another partition, which a process may be writing"


def test_a_workspace_that_cannot_be_written_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock of another user, or a folder that is read-only, kept a complete partition from being used."""
    first = prepare(tmp_path)
    opened = Path.open

    def refuse(path: Path, *args: Any, **options: Any) -> Any:
        if path.name.endswith(".lock"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return opened(path, *args, **options)

    monkeypatch.setattr(Path, "open", refuse)
    assert prepare(tmp_path) == first
    with pytest.raises(PartitionError, match=r"workspace .*empty cannot be made.*\(Permission denied\). Name another"):
        prepare(tmp_path / "empty")


def test_a_workspace_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(PartitionError, match=r"workspace .*file.* cannot be made.*with --workspace"):
            prepare(place)


def test_a_damaged_partition_is_written_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = prepare(tmp_path, ranks=2)
    file = first.parent / "part1" / "node_feat.dgl"
    file.write_bytes(file.read_bytes()[:-3])
    with caplog.at_level(logging.WARNING):
        assert prepare(tmp_path, ranks=2) == first
    assert "partitioning again" in caplog.text
    verify_partition(first)


def write_npz(path: Path, **changes: object) -> str:
    content: dict[str, object] = {
        "src": np.array([0, 1, 2, 3], np.int32),
        "dst": np.array([1, 2, 3, 0], np.int32),
        "num_nodes": 4,
        "feat": np.arange(8, dtype=np.float32).reshape(4, 2),
        "label": np.array([0, 1, 0, 1]),
        **{f"{split}_mask": np.array([True, True, False, True]) for split in ("train", "val", "test")},
        "meta": "{}",
    } | changes
    np.savez_compressed(path, **content)  # type: ignore[arg-type]
    return str(path)


def test_a_file_counts_by_its_content_and_the_name_of_its_graph(tmp_path: Path) -> None:
    """A copy under another name got the partition of the first, whose name `launch` and tables then had for it."""
    first = prepare(tmp_path, write_npz(tmp_path / "a.npz"), ranks=2)
    (tmp_path / "moved").mkdir()
    assert prepare(tmp_path, write_npz(tmp_path / "moved" / "a.npz"), ranks=2) == first
    assert (first.name, prepare(tmp_path, write_npz(tmp_path / "b.npz"), ranks=2).name) == ("a.json", "b.json")
    changed = write_npz(tmp_path / "a.npz", label=np.array([1, 1, 0, 1]))
    assert prepare(tmp_path, changed, ranks=2) != first


def test_a_file_counts_by_its_content_whatever_its_folder_is_called(tmp_path: Path) -> None:
    file = tmp_path / "a.npz.d" / "a.npz"
    file.parent.mkdir()
    first = prepare(tmp_path, write_npz(file), ranks=2)
    assert prepare(tmp_path, write_npz(tmp_path / "a.npz"), ranks=2) == first
    assert prepare(tmp_path, f"{file}:self_loops=true", ranks=2) != first
    assert prepare(tmp_path, write_npz(file, label=np.array([1, 1, 0, 1])), ranks=2) != first


def test_an_ended_run_takes_with_it_what_it_had_written(tmp_path: Path) -> None:
    for folder, command in (
        (tmp_path / "kept", [sys.executable, "-c", ENDED, str(tmp_path / "kept"), SMALL]),
        (tmp_path, [sys.executable, "-c", ENDED_WITH_OUT, str(tmp_path / "out"), SMALL]),
    ):
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 143, done.stderr
        assert not [*folder.glob(".*.writing-*"), *folder.glob("**/part*")]


def test_binary_features_are_normalised_unless_told_otherwise(tmp_path: Path) -> None:
    binary = write_npz(tmp_path / "a.npz", feat=np.array([[1, 1], [0, 1], [1, 0], [0, 0]], np.float32))
    part = load_partition(prepare(tmp_path, binary, ranks=1), 0)
    assert sorted(part.node_data["feat"].sum(1).tolist()) == [0.0, 1.0, 1.0, 1.0]
    raw = DataConfig(data=binary, normalize_features=False).load()
    assert raw.graph.ndata["feat"].sum().item() == 4
    counts = write_npz(tmp_path / "c.npz")
    assert DataConfig(data=counts).load().graph.ndata["feat"].sum().item() == 28
    told = DataConfig(data=counts, normalize_features=True).load()
    assert told.graph.ndata["feat"].sum(1).tolist() == pytest.approx([1.0] * 4)


def test_the_graph_follows_the_model_unless_told_otherwise() -> None:
    gcn, sage = DataConfig().for_model("gcn"), DataConfig().for_model("sage")
    assert (gcn.symmetric, gcn.self_loops, sage.symmetric, sage.self_loops) == (True, True, False, False)
    assert gcn.changes() == (
        "reverse arcs added, one of parallel arcs kept, self-loops added, feature rows normalised if binary"
    )
    told = DataConfig(symmetric=False, self_loops=False, normalize_features=False).for_model("gcn")
    assert told.changes() == "as it is"


def test_the_name_of_a_graph_says_what_is_done_to_it(tmp_path: Path) -> None:
    """`=false` had no effect, and what the name asked for was not told."""
    file = write_npz(tmp_path / "a.npz", feat=np.array([[1, 1], [0, 1], [1, 0], [0, 0]], np.float32))
    as_it_is = DataConfig(data=f"{file}:symmetric=false,self_loops=no,normalize_features=0").for_model("gcn")
    plain = DataConfig(data=file, symmetric=False, self_loops=False, normalize_features=False).load().graph
    assert as_it_is.changes() == "as it is"
    assert as_it_is.load().graph.num_edges() == plain.num_edges()
    assert torch.equal(as_it_is.load().graph.ndata["feat"], plain.ndata["feat"])
    looped = DataConfig(data=f"{file}:self_loops=true,normalize_features=true").for_model("sage")
    assert looped.changes() == "self-loops added, feature rows normalised"
    assert looped.load().graph.num_edges() == plain.num_edges() + 4
    assert looped.load().graph.ndata["feat"].sum(1).tolist() == [1.0, 1.0, 1.0, 0.0]
    assert DataConfig(data=f"{file}:self_loops=true", self_loops=True).for_model("gcn").self_loops
    for data, message in (
        (DataConfig(data=f"{file}:self_loops=true", self_loops=False), "self_loops=true, and --no-self-loops is given"),
        (DataConfig(data=f"{file}:symmetric=false", symmetric=True), "symmetric=false, and --symmetric is given"),
    ):
        with pytest.raises(ValueError, match=message):
            data.for_model("gcn")
        with pytest.raises(ValueError, match=message):
            data.load()
    with pytest.raises(DatasetError, match=r"symmetric must be true or false \(got 'perhaps'\)"):
        DataConfig(data=f"{file}:symmetric=perhaps").for_model("gcn")


def test_one_of_parallel_arcs_is_kept_where_reverse_arcs_are_added(tmp_path: Path) -> None:
    file = write_npz(tmp_path / "a.npz", src=np.array([0, 0, 1]), dst=np.array([1, 1, 0]))
    assert DataConfig(data=file).load().graph.num_edges() == 3
    assert DataConfig(data=file, symmetric=True).load().graph.num_edges() == 2


def test_nan_features_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    file = write_npz(tmp_path / "a.npz", feat=np.full((4, 2), np.nan, np.float32))
    with pytest.raises(DatasetError, match=r"a.npz: feat must be finite \(got NaN or infinity in 4 of 4 rows"):
        prepare(tmp_path / "w", file, ranks=2)
    assert not list((tmp_path / "w").glob("a-*"))


def test_existing_partition(tmp_path: Path) -> None:
    part_config = prepare(tmp_path, ranks=2)
    for location in (part_config, part_config.parent):
        prepared = prepare_partition(DataConfig(), PartitionConfig(partition=str(location)))
        assert (prepared.part_config, prepared.num_parts, prepared.num_classes) == (part_config, 2, 3)
    with pytest.raises(PartitionError, match=r"has 2 parts \(asked for: 3\). Start 2 ranks, or partition"):
        prepare_partition(DataConfig(), PartitionConfig(partition=str(part_config), ranks=3))


def test_an_existing_partition_takes_no_options_of_a_new_one() -> None:
    existing = PartitionConfig(partition="parts", ranks=2)
    check_existing_partition(DataConfig(), existing)
    check_existing_partition(DataConfig(symmetric=True), PartitionConfig())
    for data, named in (
        (DataConfig(symmetric=True), "--symmetric"),
        (DataConfig(self_loops=False), "--no-self-loops"),
        (DataConfig(data="x.npz", normalize_features=True), "--data, --normalize-features"),
    ):
        with pytest.raises(ValueError, match=f"^{named} cannot be given with --partition: the graph in parts was"):
            check_existing_partition(data, existing)
    with pytest.raises(ValueError, match=r"^--part-method, --num-hops cannot be given"):
        check_existing_partition(DataConfig(), PartitionConfig(partition="p", part_method="random", num_hops=2))
    with pytest.raises(ValueError, match=r"^--workspace cannot be given with --partition: the graph in p was"):
        check_existing_partition(DataConfig(), PartitionConfig(partition="p", workspace="w"))


def test_no_partition(tmp_path: Path) -> None:
    with pytest.raises(PartitionError, match=r"does not exist\. Give a partition folder"):
        find_part_config(tmp_path / "nope")
    with pytest.raises(PartitionError, match=r"must hold one partition's <graph name>.json \(got none\)"):
        find_part_config(tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ranks": 0}, r"ranks must be at least 1 \(got 0\)"),
        ({"part_method": "best"}, r"unknown part_method \(got 'best'\); choose one of metis"),
        ({"num_hops": 0}, r"num_hops must be at least 1 \(got 0\)"),
    ],
)
def test_wrong_options(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PartitionConfig(**options)  # type: ignore[arg-type]


def partition_into(folder: Path, data: str, **options: Any) -> int:
    words = ["partition", "--data", data, "--ranks", str(options.get("ranks", 2)), "--out", str(folder)]
    return main.main(words)


def described(folder: Path, name: str) -> tuple[str, int | None]:
    prepared = prepare_partition(DataConfig(), PartitionConfig(partition=str(folder / f"{name}.json")))
    return prepared.dataset, prepared.num_classes


def test_a_partition_that_is_not_written_leaves_the_former_ones_description(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was deleted before anything was checked."""
    folder = tmp_path / "p"
    assert partition_into(folder, SMALL) == 0
    name = find_part_config(folder).stem
    expected = described(folder, name)
    assert expected[1] == 3
    other = write_npz(tmp_path / "other.npz")
    assert partition_into(folder, other) == 1
    assert "would overwrite its parts" in capsys.readouterr().err
    assert partition_into(folder, SMALL, ranks=1000) == 1
    assert described(folder, name) == expected


def test_a_description_is_believed_for_its_own_partition_only(tmp_path: Path) -> None:
    """Another graph written there later had the classes of the former one."""
    folder = tmp_path / "p"
    assert partition_into(folder, write_npz(tmp_path / "a.npz")) == 0
    name = find_part_config(folder).stem
    assert described(folder, name)[1] == 2
    dgl_hybrid.partition_graph(DataConfig(data=SMALL).load().graph, name, 2, folder)
    assert described(folder, name) == (name, None)
    assert partition_into(folder, str(tmp_path / "a.npz")) == 0
    assert described(folder, name)[1] == 2
    dgl.distributed.partition_graph(DataConfig(data=SMALL).load().graph, name, 2, str(folder))
    assert described(folder, name) == (name, None), "DGL leaves our files of the former one"


def test_somebody_elses_file_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "dataset.json").write_text('{"theirs": true}')
    assert partition_into(tmp_path, SMALL) == 1
    assert "dataset.json is not one of dgl_hybrid's" in capsys.readouterr().err
    assert (tmp_path / "dataset.json").read_text() == '{"theirs": true}'


@pytest.mark.parametrize("name", ["file", "file/folder/in/it"])
def test_a_file_is_no_folder_for_a_partition(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("kept")
    assert partition_into(tmp_path / name, SMALL) == 1
    assert f"{tmp_path / 'file'} is a file, and a partition needs a folder" in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "kept"


def test_a_partition_of_an_earlier_version_is_written_again(tmp_path: Path) -> None:
    first = prepare(tmp_path, ranks=2)
    record = json.loads((first.parent / "dataset.json").read_text())
    del record["manifest"]
    (first.parent / "dataset.json").write_text(json.dumps(record))
    assert prepare(tmp_path, ranks=2) == first
    assert described(first.parent, first.stem)[1] == 3


def test_a_dataset_called_as_our_own_file(tmp_path: Path) -> None:
    """Its partition's JSON was overwritten by the description."""
    folder = tmp_path / "p"
    assert partition_into(folder, write_npz(tmp_path / "dataset.npz")) == 0
    assert find_part_config(folder).name == "dataset_graph.json"
    assert described(folder, "dataset_graph") == ("dataset", 2)
