# SPDX-License-Identifier: Apache-2.0
"""`.npz` graphs: what is read, and every way a file can be wrong."""

from __future__ import annotations

import contextlib
import json
import random
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from dgl_hybrid.datasets import load_dataset
from dgl_hybrid.errors import DatasetError

Arrays = dict[str, npt.NDArray[np.generic]]


def good() -> Arrays:
    """Four vertices, a directed path with a duplicate edge and a self-loop."""
    return {
        "src": np.array([0, 1, 2, 0, 3], dtype=np.int32),
        "dst": np.array([1, 2, 3, 1, 3], dtype=np.int32),
        "num_nodes": np.array(4),
        "feat": np.arange(8, dtype=np.float16).reshape(4, 2),
        "label": np.array([0, 1, 2, -1]),
        "train_mask": np.array([True, False, False, False]),
        "val_mask": np.array([False, True, False, False]),
        "test_mask": np.array([False, False, True, False]),
        "meta": np.array(json.dumps({"name": "toy", "directed": True})),
    }


def sparse() -> Arrays:
    arrays = good()
    del arrays["feat"]
    return {
        **arrays,
        "feat_data": np.array([1.0, 2.0, 3.0, 4.0], dtype=np.float32),
        "feat_indices": np.array([2, 0, 1, 1]),
        "feat_indptr": np.array([0, 1, 3, 3, 4]),
        "feat_shape": np.array([4, 3]),
    }


def save(path: Path, arrays: Arrays) -> str:
    np.savez_compressed(path / "toy.npz", **arrays)
    return str(path / "toy.npz")


def test_dense(tmp_path: Path) -> None:
    dataset = load_dataset(save(tmp_path, good()))
    src, dst = dataset.graph.edges(order="eid")
    assert (src.tolist(), dst.tolist()) == ([0, 1, 2, 0, 3], [1, 2, 3, 1, 3])  # as given: directed, duplicate, loop
    assert dataset.graph.idtype == torch.int64
    assert torch.equal(dataset.graph.ndata["feat"], torch.arange(8.0).reshape(4, 2))
    assert dataset.graph.ndata["label"].tolist() == [0, 1, 2, -1]
    assert (dataset.name, dataset.num_classes, dataset.meta["directed"]) == ("toy", 3, True)
    assert dataset.meta["transforms"] == {"symmetric": False, "self_loops": False, "normalize_features": False}


def test_sparse_features(tmp_path: Path) -> None:
    feat = load_dataset(save(tmp_path, sparse())).graph.ndata["feat"]
    assert feat.tolist() == [[0, 0, 1], [2, 3, 0], [0, 0, 0], [0, 4, 0]]


def test_transformations_in_spec_or_keywords(tmp_path: Path) -> None:
    path = save(tmp_path, good())
    for dataset in (
        load_dataset(path + ":symmetric=true,self_loops=yes,normalize_features=1"),
        load_dataset(path, symmetric=True, self_loops=True, normalize_features=True),
    ):
        src, dst = dataset.graph.edges(order="eid")
        pairs = list(zip(src.tolist(), dst.tolist(), strict=True))
        assert sorted(pairs) == sorted([(0, 1), (1, 0), (1, 2), (2, 1), (2, 3), (3, 2), (0, 0), (1, 1), (2, 2), (3, 3)])
        assert dataset.graph.ndata["feat"][:2].tolist() == [[0.0, 1.0], pytest.approx([0.4, 0.6])]
        assert dataset.graph.ndata["label"].tolist() == [0, 1, 2, -1]
        assert dataset.meta["transforms"] == {"symmetric": True, "self_loops": True, "normalize_features": True}


def test_zero_rows_stay_zero(tmp_path: Path) -> None:
    feat = load_dataset(save(tmp_path, sparse()), normalize_features=True).graph.ndata["feat"]
    assert feat[2].tolist() == [0, 0, 0]


def test_one_of_several_splits(tmp_path: Path) -> None:
    arrays = good()
    for name in ("train", "val", "test"):
        arrays[f"{name}_masks"] = np.stack([arrays[f"{name}_mask"], np.roll(arrays[f"{name}_mask"], 1)])
    arrays["label"] = np.array([0, 1, 2, 0])
    path = save(tmp_path, arrays)
    assert load_dataset(path).graph.ndata["train_mask"].tolist() == [True, False, False, False]
    assert load_dataset(path + ":split=1").graph.ndata["train_mask"].tolist() == [False, True, False, False]
    with pytest.raises(DatasetError, match=r"split must be a row of train_masks, whose shape is \(2, 4\) \(got 2\)"):
        load_dataset(path + ":split=2")


def test_named_classes_may_exceed_those_seen(tmp_path: Path) -> None:
    arrays = {**good(), "meta": np.array(json.dumps({"num_classes": 7}))}
    assert load_dataset(save(tmp_path, arrays)).num_classes == 7


NAN = np.arange(8, dtype=np.float32).reshape(4, 2)
NAN[1, 0] = NAN[3, 1] = np.nan


@pytest.mark.parametrize("key", sorted(set(good()) - {"meta"}))
def test_missing_key(key: str, tmp_path: Path) -> None:
    arrays = good()
    del arrays[key]
    with pytest.raises(DatasetError, match=rf"toy\.npz: key '{key}' is missing"):
        load_dataset(save(tmp_path, arrays))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"feat": NAN}, r"feat must be finite \(got NaN or infinity in 2 of 4 rows, first rows: 1, 3\)"),
        ({"feat": np.full((4, 2), np.inf)}, "feat must be finite"),
        (
            {"feat": np.full((4, 2), -1e200)},
            r"feat must fit float32, numbers up to 3\.4e\+38 \(got float64 of up to 1e\+200\)",
        ),
        ({"feat": np.zeros((3, 2))}, r"feat must be numbers of shape \(4, F\) \(got float64 \(3, 2\)\)"),
        ({"feat": np.full((4, 2), "x")}, "feat must be numbers"),
        ({"src": np.array([0, 1, 2, 0, 4])}, r"src must be in 0\.\.3 \(got 0\.\.4\)"),
        ({"dst": np.array([0, 1, 2, 0, -1])}, r"dst must be in 0\.\.3 \(got -1\.\.2\)"),
        ({"src": np.array([0, 1])}, r"src and dst must be of one shape \(num_arcs,\) \(got \(2,\), \(5,\)\)"),
        ({"src": np.zeros(5)}, "src must be integers of one dimension"),
        (
            {"src": np.full(5, 2**63, dtype=np.uint64)},
            r"src must fit into 64 bits with a sign \(got 9223372036854775808\)",
        ),
        ({"num_nodes": np.array(-4)}, r"num_nodes must be one non-negative integer \(got int64 -4\)"),
        ({"num_nodes": np.array([4, 4])}, "num_nodes must be one non-negative integer"),
        ({"label": np.array([0, 1, 2, -2])}, r"label must be -1 \(none\) or a class id \(got -2\)"),
        ({"label": np.array([0, 1, 2])}, r"label must be integers of shape \(4,\)"),
        ({"label": np.zeros((4, 2), dtype=int)}, "label must be integers of one dimension"),
        ({"train_mask": np.array([1, 0, 0, 0])}, r"train_mask must be bool of shape \(4,\) \(got int64"),
        ({"test_mask": np.zeros(3, dtype=bool)}, r"test_mask must be bool of shape \(4,\)"),
        ({"val_mask": np.ones(4, dtype=bool)}, "val_mask selects 1 vertices without a label, the first is 3"),
        ({"label": np.array([0, 1, 9_999_999, -1])}, r"label must be class ids .* 10000000 classes of 4 vertices"),
        ({"meta": np.array('{"num_classes": 1000000000000}')}, r"label must be class ids .*\(largest label \d\)"),
        ({"meta": np.array('{"num_classes": 7.0}')}, r"num_classes in meta must be an integer, 0 or more \(got 7\.0\)"),
        ({"meta": np.array('{"num_classes": -4}')}, r"num_classes in meta must be an integer, 0 or more \(got -4\)"),
        ({"meta": np.array("{")}, "meta must be a JSON string"),
        ({"meta": np.array("[" * 100_000)}, "meta must be a JSON string"),
        ({"meta": np.array("[]")}, r"meta must hold a JSON object \(got list\)"),
    ],
)
def test_wrong_contents(changes: Arrays, message: str, tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"toy\.npz: " + message):
        load_dataset(save(tmp_path, {**good(), **changes}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"feat_indices": np.array([3, 0, 1, 1])}, r"feat_indices must be in 0\.\.2 \(got 0\.\.3\)"),
        ({"feat_indptr": np.array([0, 3, 1, 3, 4])}, "feat_indptr must be 5 rising offsets from 0"),
        ({"feat_indptr": np.array([0, 1, 3, 4])}, "feat_indptr must be 5 rising offsets from 0"),
        ({"feat_data": np.array([1.0])}, r"feat_data and feat_indices must hold feat_indptr\[-1\] = 4 numbers"),
        ({"feat_shape": np.array([5, 3])}, r"feat_shape must be \(4, F\) \(got \[5, 3\]\)"),
        ({"feat_shape": np.array([4, 2**62])}, f"feat_shape asks for 4 x {2**62} numbers of 4 bytes, for which there"),
        ({"feat_shape": np.array([4, 10**15])}, f"feat_shape asks for 4 x {10**15} numbers of 4 bytes, for which"),
        ({"feat_data": np.full(4, 1e300)}, r"feat_data must fit float32, .* \(got float64 of up to 1e\+300\)"),
        ({"feat_indptr": np.array([1, 1, 2, 3, 4])}, r"feat_indptr must be .* beginning with \[1, 1, 2\]\)"),
    ],
)
def test_wrong_sparse_features(changes: Arrays, message: str, tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"toy\.npz: " + message):
        load_dataset(save(tmp_path, {**sparse(), **changes}))


def test_what_is_not_read_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Weights of edges were ignored without a word."""
    load_dataset(save(tmp_path, good()))
    assert not caplog.records
    load_dataset(save(tmp_path, {**good(), "edge_weight": np.ones(5), "extra": np.ones(1)}))
    assert "toy.npz: edge_weight, extra is not read" in caplog.text
    load_dataset(save(tmp_path, {**sparse(), "feat": good()["feat"]}))
    assert "toy.npz: feat is read, and feat_data, feat_indices, feat_indptr, feat_shape are not" in caplog.text


def test_files_that_are_no_archives(tmp_path: Path) -> None:
    path = Path(save(tmp_path, good()))
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(DatasetError, match=r"toy\.npz cannot be read as \.npz .* It may be truncated"):
        load_dataset(str(path))
    path.write_bytes(b"no archive")
    with pytest.raises(DatasetError, match=r"cannot be read as \.npz \(it is no such archive\)") as caught:
        load_dataset(str(path))
    assert "pickle" not in str(caught.value), "which it is not either"
    path.write_bytes(b"")
    with pytest.raises(DatasetError, match=r"cannot be read as \.npz"):
        load_dataset(str(path))
    with path.open("wb") as stream:
        np.save(stream, np.zeros(3))
    with pytest.raises(DatasetError, match=r"is a single array, not an \.npz archive"):
        load_dataset(str(path))
    path.unlink()
    path.mkdir()
    with pytest.raises(DatasetError, match=r"toy\.npz is a folder\. Give the path of an \.npz graph\."):
        load_dataset(str(path))
    path.rmdir()
    with pytest.raises(DatasetError, match=r"toy\.npz does not exist"):
        load_dataset(str(path))


def test_every_flipped_bit_is_told_or_changes_values_alone(tmp_path: Path) -> None:
    """Headers of archives and of arrays: NumPy and zipfile raise seven kinds of errors for them."""
    path, draw = Path(save(tmp_path, good())), random.Random(0)
    content = path.read_bytes()
    told = 0
    for _ in range(1500):
        at = draw.randrange(len(content))
        path.write_bytes(content[:at] + bytes([content[at] ^ (1 << draw.randrange(8))]) + content[at + 1 :])
        with contextlib.suppress(DatasetError):
            load_dataset(str(path))
            continue
        told += 1
    assert told > 700


def test_pickles_are_refused(tmp_path: Path) -> None:
    arrays = {**good(), "feat": np.array([{"a": 1}] * 4, dtype=object)}
    with pytest.raises(DatasetError, match="hold pickled objects, which are refused"):
        load_dataset(save(tmp_path, arrays))


TABLE = {
    "cora": (2708, 10556, 1433, 7),
    "citeseer": (3327, 9104, 3703, 6),
    "pubmed": (19717, 88648, 500, 3),
    "debian-deps": (63664, 302472, 512, 57),
    "moby-thesaurus": (103305, 2520086, 128, 45),
    "tolokers": (11758, 1038000, 10, 2),
}


@pytest.mark.data
@pytest.mark.parametrize("name", TABLE)
def test_real_graphs(name: str, data_dir: Path) -> None:
    dataset = load_dataset(str(data_dir / f"{name}.npz"))
    graph = dataset.graph
    found = (graph.num_nodes(), graph.num_edges(), graph.ndata["feat"].shape[1], dataset.num_classes)
    assert found == TABLE[name]
    assert dataset.name == name
    assert bool(graph.ndata["train_mask"].any())
