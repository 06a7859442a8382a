# SPDX-License-Identifier: Apache-2.0
"""DGL's and OGB's own datasets by name; both download on first use."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import dgl
import dgl.data
import numpy as np
import torch
from torch import Tensor

from dgl_hybrid.datasets.dataset import MASKS, GraphDataset, make_dataset
from dgl_hybrid.errors import DatasetError

DGL_CLASSES = {
    "actor": "ActorDataset",
    "amazon-computers": "AmazonCoBuyComputerDataset",
    "amazon-photo": "AmazonCoBuyPhotoDataset",
    "amazon-ratings": "AmazonRatingsDataset",
    "chameleon": "ChameleonDataset",
    "citeseer": "CiteseerGraphDataset",
    "coauthor-cs": "CoauthorCSDataset",
    "coauthor-physics": "CoauthorPhysicsDataset",
    "cora": "CoraGraphDataset",
    "cora-full": "CoraFullDataset",
    "cornell": "CornellDataset",
    "flickr": "FlickrDataset",
    "minesweeper": "MinesweeperDataset",
    "pubmed": "PubmedGraphDataset",
    "questions": "QuestionsDataset",
    "reddit": "RedditDataset",
    "roman-empire": "RomanEmpireDataset",
    "squirrel": "SquirrelDataset",
    "texas": "TexasDataset",
    "tolokers": "TolokersDataset",
    "wiki-cs": "WikiCSDataset",
    "wisconsin": "WisconsinDataset",
}
OGB_NAMES = ("ogbn-arxiv", "ogbn-papers100M", "ogbn-products")


def load_dgl(name: str, *, seed: int = 0, split: int | None = None) -> GraphDataset:
    """Loads one of DGL's datasets (`DGL_CLASSES`), downloading it into DGL's cache if it is not there.

    Args:
        name: Key of `DGL_CLASSES`.
        seed: For a random split (20 train and 30 validation vertices per class) where DGL has none.
        split: Column of the masks where DGL has several; 0 if None. Where it has none, the split follows from `seed`.
    Raises:
        DatasetError: unknown name (lists the known), or DGL cannot fetch or read it.
    """
    if name not in DGL_CLASSES:
        raise DatasetError(f"dgl:{name} is unknown; known are {', '.join('dgl:' + known for known in DGL_CLASSES)}")
    try:
        # Downloads report on stdout, which is for results.
        with contextlib.redirect_stdout(sys.stderr):
            graph = getattr(dgl.data, DGL_CLASSES[name])(verbose=False)[0]
    except Exception as error:  # DGL lets whatever requests, zipfile or scipy raise come through.
        raise _fetch_error(f"dgl:{name}", "DGL", str(dgl.data.utils.get_download_dir()), error) from error
    label = graph.ndata["label"]
    num_classes = int(label.max()) + 1
    masks, split_note = _dgl_masks(graph, label, seed, split, f"dgl:{name}")
    src, dst = graph.edges(order="eid")
    return make_dataset(
        name=name,
        origin=f"dgl:{name}",
        src=src,
        dst=dst,
        feat=graph.ndata["feat"],
        label=label,
        masks=masks,
        num_classes=num_classes,
        meta={"source": f"dgl.data.{DGL_CLASSES[name]}", "split": split_note},
    )


def load_ogb(name: str, *, root: str | Path | None = None) -> GraphDataset:
    """Loads one of OGB's vertex classification graphs (`OGB_NAMES`) through the `ogb` package.

    Directed graphs stay directed (ogbn-arxiv, ogbn-papers100M); ask for `symmetric=true` where wanted.

    Args:
        name: One of `OGB_NAMES`.
        root: Where OGB keeps its files; by default the environment's OGB_ROOT or "dataset", as in OGB's examples.
    Raises:
        DatasetError: unknown name, `ogb` not installed, or it cannot be fetched or read.
    """
    if name not in OGB_NAMES:
        raise DatasetError(
            f"ogb:{name} is unknown or not a homogeneous single-label graph; known are "
            f"{', '.join('ogb:' + known for known in OGB_NAMES)}"
        )
    try:
        from ogb.nodeproppred import NodePropPredDataset, dataset  # the extra [ogb]
    except ImportError as error:
        raise DatasetError(f"ogb:{name} needs the 'ogb' package ({error}). Install it with: pip install ogb") from error
    folder = str(root if root is not None else os.environ.get("OGB_ROOT", "dataset"))
    try:
        with contextlib.redirect_stdout(sys.stderr), _unattended(dataset):
            stored = NodePropPredDataset(name=name, root=folder)
            graph, raw_label = stored[0]
            split = stored.get_idx_split()
    except (Exception, SystemExit) as error:  # OGB ends the process when a download is declined or fails.
        raise _fetch_error(f"ogb:{name}", "OGB", folder, error) from error
    num_nodes = int(graph["num_nodes"])
    # ogbn-papers100M labels are float with NaN for "none".
    label = torch.from_numpy(np.nan_to_num(np.asarray(raw_label, dtype=np.float64).reshape(-1), nan=-1.0)).to(
        torch.int64
    )
    masks: dict[str, Tensor] = {}
    for key, part in zip(MASKS, ("train", "valid", "test"), strict=True):
        masks[key] = torch.zeros(num_nodes, dtype=torch.bool)
        masks[key][torch.from_numpy(np.array(split[part], dtype=np.int64))] = True
    src, dst = torch.from_numpy(np.require(graph["edge_index"], np.int64, "W"))
    return make_dataset(
        name=name,
        origin=f"ogb:{name}",
        src=src,
        dst=dst,
        feat=torch.from_numpy(np.require(graph["node_feat"], np.float32, "W")),
        label=label,
        masks=masks,
        num_classes=int(stored.num_classes),
        meta={"source": f"ogb {name}", "split": "OGB's own", "directed": name != "ogbn-products"},
    )


@contextlib.contextmanager
def _unattended(module: object) -> Iterator[None]:
    """Lets OGB run without a person at the keyboard, and read its own cache under PyTorch >= 2.6.

    OGB asks on stdin before large downloads; the caller has asked for the dataset by name, so the answer is yes. Its
    cache is a pickle that OGB itself wrote, which `torch.load` refuses since `weights_only` became the default.
    """
    asked = getattr(module, "decide_download", None)
    variable = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
    before = os.environ.get(variable)
    if asked is not None:
        setattr(module, "decide_download", lambda url: True)  # noqa: B010 - `module` is an object to mypy
    os.environ[variable] = "1"
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=f"Environment variable {variable} detected")
            yield
    finally:
        if asked is not None:
            setattr(module, "decide_download", asked)  # noqa: B010
        if before is None:
            del os.environ[variable]
        else:
            os.environ[variable] = before


def _dgl_masks(
    graph: dgl.DGLGraph, label: Tensor, seed: int, split: int | None, origin: str
) -> tuple[dict[str, Tensor], str]:
    if all(key in graph.ndata for key in MASKS):
        masks = {key: graph.ndata[key].bool() for key in MASKS}
        columns = max(mask.shape[1] if mask.ndim == 2 else 1 for mask in masks.values())
        column = 0 if split is None else split
        if not 0 <= column < columns:
            raise DatasetError(f"{origin}: split must be in 0..{columns - 1} (got {column})")
        # wiki-cs has twenty train and validation splits, and one test mask for all of them.
        masks = {key: mask[:, column] if mask.ndim == 2 else mask for key, mask in masks.items()}
        return masks, f"DGL's own, column {column}" if columns > 1 else "DGL's own"
    if split is not None:
        raise DatasetError(f"{origin}: DGL has no splits of it to choose from (got split={split}); seed= draws another")
    rng = np.random.default_rng(seed)
    order = rng.permutation(label.numel())
    masks = {key: torch.zeros(label.numel(), dtype=torch.bool) for key in MASKS}
    labels = label.numpy()[order]
    for class_id in np.unique(labels[labels >= 0]):
        members = torch.from_numpy(order[labels == class_id])
        masks["train_mask"][members[:20]] = True
        masks["val_mask"][members[20:50]] = True
        masks["test_mask"][members[50:]] = True
    return masks, f"random, seed {seed}: 20 train and 30 validation vertices per class"


def _fetch_error(spec: str, library: str, folder: str, error: BaseException) -> DatasetError:
    reason = (str(error).strip().splitlines() or [""])[-1][:200].rstrip(".")
    return DatasetError(
        f"{spec} cannot be loaded: {type(error).__name__}: {reason}. {library} downloads it into {folder}; without a "
        "network, copy that folder from a machine that has it, or use an .npz file or 'powerlaw'."
    )
