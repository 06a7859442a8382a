# SPDX-License-Identifier: Apache-2.0
"""Names, DGL's and OGB's datasets (with stand-ins: tests need no network), and the feature check."""

from __future__ import annotations

import gzip
import sys
import types
from pathlib import Path

import dgl
import numpy as np
import pytest
import torch

from dgl_hybrid.datasets import builtin, check_features, list_datasets, load_dataset
from dgl_hybrid.errors import DatasetError


def stand_in(monkeypatch: pytest.MonkeyPatch, class_name: str, graph: dgl.DGLGraph) -> None:
    monkeypatch.setattr(dgl.data, class_name, lambda verbose: [graph], raising=False)


def small_graph(num_nodes: int = 300) -> dgl.DGLGraph:
    graph = dgl.graph((torch.arange(num_nodes - 1), torch.arange(1, num_nodes)), num_nodes=num_nodes)
    graph.ndata["feat"] = torch.ones(num_nodes, 2)
    graph.ndata["label"] = torch.arange(num_nodes) % 3
    return graph


def test_unknown_names_list_what_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        DatasetError, match=r"unknown dataset 'cora'\. Give .* one of: powerlaw, dgl:actor.*dgl:cora.*ogb:"
    ):
        load_dataset("cora")
    with pytest.raises(DatasetError, match="dgl:nope is unknown; known are dgl:actor"):
        load_dataset("dgl:nope")
    with pytest.raises(DatasetError, match="ogb:ogbn-mag is unknown or not a homogeneous single-label graph"):
        load_dataset("ogb:ogbn-mag")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.npz").write_bytes(b"")
    with pytest.raises(DatasetError, match=r"unknown dataset 'mine'\. Did you mean mine\.npz\?"):
        load_dataset("mine")


def test_every_listed_dgl_name_is_a_class_of_dgl() -> None:
    assert list_datasets()[0] == "powerlaw"
    assert all(hasattr(dgl.data, class_name) for class_name in builtin.DGL_CLASSES.values())


def test_dgl_masks_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = small_graph()
    for index, name in enumerate(("train_mask", "val_mask", "test_mask")):
        graph.ndata[name] = torch.arange(300) % 3 == index
    stand_in(monkeypatch, "CoraGraphDataset", graph)
    dataset = load_dataset("dgl:cora")
    assert (dataset.name, dataset.num_classes, dataset.graph.num_edges()) == ("cora", 3, 299)
    assert dataset.graph.ndata["val_mask"].nonzero()[0].item() == 1
    assert load_dataset("dgl:cora:symmetric=true").graph.num_edges() == 598


def test_dgl_masks_by_column_or_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = small_graph()
    for name in ("train_mask", "val_mask"):
        graph.ndata[name] = torch.stack([torch.zeros(300), torch.ones(300)], dim=1)
    graph.ndata["test_mask"] = torch.ones(300)
    stand_in(monkeypatch, "WikiCSDataset", graph)
    assert not bool(load_dataset("dgl:wiki-cs").graph.ndata["train_mask"].any())
    masks = load_dataset("dgl:wiki-cs:split=1").graph.ndata
    assert bool(masks["train_mask"].all())
    assert bool(masks["test_mask"].all())
    with pytest.raises(DatasetError, match=r"dgl:wiki-cs: split must be in 0\.\.1 \(got 2\)"):
        load_dataset("dgl:wiki-cs:split=2")

    stand_in(monkeypatch, "AmazonCoBuyPhotoDataset", small_graph())
    first, again, other = (load_dataset("dgl:amazon-photo", seed=seed) for seed in (0, 0, 1))
    assert [int(first.graph.ndata[m].sum()) for m in ("train_mask", "val_mask", "test_mask")] == [60, 90, 150]
    assert torch.equal(first.graph.ndata["train_mask"], again.graph.ndata["train_mask"])
    assert not torch.equal(first.graph.ndata["train_mask"], other.graph.ndata["train_mask"])
    assert first.meta["split"] == "random, seed 0: 20 train and 30 validation vertices per class"
    with pytest.raises(DatasetError, match=r"DGL has no splits of it to choose from \(got split=3\); seed= draws"):
        load_dataset("dgl:amazon-photo:split=3")


def test_multi_label_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = small_graph()
    graph.ndata["label"] = torch.zeros(300, 5)
    for name in ("train_mask", "val_mask", "test_mask"):
        graph.ndata[name] = torch.zeros(300, dtype=torch.bool)
    stand_in(monkeypatch, "FlickrDataset", graph)
    with pytest.raises(DatasetError, match=r"dgl:flickr: label must be integers .* multi-label and regression"):
        load_dataset("dgl:flickr")


def test_dgl_offline(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def offline(verbose: bool) -> None:
        print("Downloading ...")
        raise ConnectionError("Failed to resolve 'data.dgl.ai'")

    monkeypatch.setattr(dgl.data, "RedditDataset", offline)
    with pytest.raises(
        DatasetError, match=r"dgl:reddit cannot be loaded: ConnectionError: Failed to resolve .* copy that"
    ):
        load_dataset("dgl:reddit")
    assert capsys.readouterr().out == ""


def test_ogb_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ogb", None)
    with pytest.raises(DatasetError, match=r"needs the 'ogb' package .* pip install ogb"):
        load_dataset("ogb:ogbn-arxiv")


@pytest.fixture
def fake_ogb(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A stand-in with the few names of `ogb` that are used, asking before downloads as the real one does."""
    package, module, inner = types.ModuleType("ogb"), types.ModuleType("ogb.nodeproppred"), types.ModuleType("dataset")

    class Stored:
        num_classes = 4

        def __init__(self, name: str, root: str) -> None:
            print("asking", name)
            if not inner.decide_download("http://x"):  # type: ignore[attr-defined]
                raise SystemExit(-1)

        def __getitem__(self, index: int) -> tuple[dict[str, object], np.ndarray]:
            graph = {
                "num_nodes": 4,
                "edge_index": np.array([[0, 1, 2], [1, 2, 3]]),
                "node_feat": np.ones((4, 2), np.float32),
            }
            return graph, np.array([[0.0], [1.0], [2.0], [np.nan]])

        def get_idx_split(self) -> dict[str, np.ndarray]:
            return {"train": np.array([0]), "valid": np.array([1]), "test": np.array([2])}

    inner.decide_download = lambda url: False  # type: ignore[attr-defined]
    module.NodePropPredDataset, module.dataset = Stored, inner  # type: ignore[attr-defined]
    package.nodeproppred = module  # type: ignore[attr-defined]
    for name, value in (("ogb", package), ("ogb.nodeproppred", module), ("ogb.nodeproppred.dataset", inner)):
        monkeypatch.setitem(sys.modules, name, value)
    return inner


def test_ogb(fake_ogb: types.ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", raising=False)
    dataset = load_dataset("ogb:ogbn-papers100M")
    assert dataset.graph.ndata["label"].tolist() == [0, 1, 2, -1]
    assert dataset.num_classes == 4
    assert dataset.graph.ndata["val_mask"].tolist() == [False, True, False, False]
    assert dataset.graph.num_edges() == 3  # directed as it came
    assert fake_ogb.decide_download("http://x") is False  # put back
    assert "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD" not in builtin.os.environ
    assert capsys.readouterr().out == ""


def test_ogb_ends_the_process_and_we_do_not(fake_ogb: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def give_up(url: str) -> bool:
        raise SystemExit(-1)

    monkeypatch.setattr(builtin, "_unattended", lambda module: __import__("contextlib").nullcontext())
    fake_ogb.decide_download = give_up  # type: ignore[attr-defined]
    with pytest.raises(DatasetError, match="ogb:ogbn-arxiv cannot be loaded: SystemExit"):
        load_dataset("ogb:ogbn-arxiv")


def test_the_real_ogb_package_reads_its_own_files(tmp_path: Path) -> None:
    """A five-vertex graph in the folder layout of ogbn-arxiv: twice, since the second time comes from OGB's pickle."""
    pytest.importorskip("ogb", reason="the package ogb is not installed")
    folder = tmp_path / "ogbn_arxiv"
    tables = {
        "raw/edge": "0,1\n1,2\n2,3\n",
        "raw/node-feat": "1,2\n3,4\n5,6\n7,8\n9,10\n",
        "raw/node-label": "0\n1\n2\n3\n4\n",
        "raw/num-node-list": "5\n",
        "raw/num-edge-list": "3\n",
        "raw/node_year": "1\n1\n1\n1\n1\n",
        "split/time/train": "0\n1\n",
        "split/time/valid": "2\n",
        "split/time/test": "3\n4\n",
    }
    for name, text in tables.items():
        path = folder / f"{name}.csv.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(text.encode()))
    (folder / "processed").mkdir()
    (folder / "RELEASE_v1.txt").write_text("")
    for _ in range(2):
        dataset = builtin.load_ogb("ogbn-arxiv", root=tmp_path)
        assert dataset.graph.edges()[0].tolist() == [0, 1, 2]
        assert dataset.graph.ndata["label"].tolist() == [0, 1, 2, 3, 4]
        assert dataset.graph.ndata["test_mask"].tolist() == [False, False, False, True, True]
        assert dataset.num_classes == 40


def test_check_features_names_the_first_rows() -> None:
    feat = torch.zeros(10, 3)
    check_features("x", feat)
    check_features(
        "x", torch.full((3, 2), 60000.0, dtype=torch.float16)
    )  # the sum overflows half precision, no entry does
    check_features("x", torch.full((2, 2), torch.finfo(torch.float64).max, dtype=torch.float64))
    check_features("x", torch.zeros(3, dtype=torch.int64))
    check_features("x", torch.zeros(0, 3))
    feat[[2, 4, 5, 6, 7, 9], 1] = float("nan")
    with pytest.raises(
        DatasetError, match=r"x must be finite \(got NaN or infinity in 6 of 10 rows, first rows: 2, 4, 5, 6, 7\)"
    ):
        check_features("x", feat)
    with pytest.raises(DatasetError, match="1 of 2 rows, first rows: 1"):
        check_features("x", torch.tensor([1.0, float("inf")]))
