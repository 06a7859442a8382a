# SPDX-License-Identifier: Apache-2.0
"""The generated graph: its shape, its repeatability, and that neighbours help."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from dgl_hybrid.datasets import GraphDataset, load_dataset
from dgl_hybrid.errors import DatasetError

SMALL = "powerlaw:nodes=3000,degree=12,features=32,classes=8"


def ridge_accuracy(dataset: GraphDataset, feat: Tensor) -> float:
    """Test accuracy of a linear classifier, in closed form: no training loop, no chance."""
    masks, label = dataset.graph.ndata, dataset.graph.ndata["label"]
    x = feat.double()[masks["train_mask"]]
    y = torch.nn.functional.one_hot(label[masks["train_mask"]], dataset.num_classes).double()
    weight = torch.linalg.solve(x.T @ x + torch.eye(x.shape[1], dtype=torch.float64), x.T @ y)
    guess = (feat.double() @ weight).argmax(dim=1)
    return float((guess == label)[masks["test_mask"]].double().mean())


def smoothed(dataset: GraphDataset) -> Tensor:
    """Two rounds of mean over in-neighbours and self."""
    src, dst = dataset.graph.edges()
    feat = dataset.graph.ndata["feat"]
    for _ in range(2):
        feat = (feat.index_add(0, dst, feat[src])) / (dataset.graph.in_degrees() + 1)[:, None]
    return feat


def test_neighbours_help_much() -> None:
    dataset = load_dataset(SMALL)
    alone, together = ridge_accuracy(dataset, dataset.graph.ndata["feat"]), ridge_accuracy(dataset, smoothed(dataset))
    assert 0.2 < alone < 0.6  # features say something, 0.125 is chance
    assert 0.7 < together < 0.95


def test_shape_and_degrees() -> None:
    dataset = load_dataset(SMALL)
    graph = dataset.graph
    assert (graph.num_nodes(), graph.num_edges()) == (3000, 36000)
    assert graph.ndata["feat"].shape == (3000, 32)
    assert graph.ndata["feat"].dtype == torch.float32
    assert graph.ndata["label"].dtype == torch.int64
    assert (dataset.name, dataset.num_classes) == ("powerlaw", 8)
    src, dst = graph.edges()
    key = src * 3000 + dst
    assert key.unique().numel() == key.numel()
    assert torch.equal(key.sort().values, (dst * 3000 + src).sort().values)
    assert not bool((src == dst).any())
    degrees = graph.in_degrees().double()
    assert float(degrees.max()) > 8 * float(degrees.mean())
    assert float(degrees.median()) < 0.8 * float(degrees.mean())


def test_the_degrees_fall_as_the_exponent_says() -> None:
    """Hill's estimate over the tail; the structural cut-off and the small size allow for a wide margin."""
    degrees = np.sort(load_dataset("powerlaw:nodes=50000,degree=10,features=1,classes=1").graph.in_degrees().numpy())
    tail = degrees[-1500:-20].astype(float)
    exponent = 1 + 1 / np.mean(np.log(tail / tail[0]))
    assert 2.1 < exponent < 3.0


def test_masks_split_the_vertices() -> None:
    masks = load_dataset(SMALL + ",train=0.25,val=0.25").graph.ndata
    together = sum(masks[name].int() for name in ("train_mask", "val_mask", "test_mask"))
    assert bool((together == 1).all())
    assert [int(masks[name].sum()) for name in ("train_mask", "val_mask", "test_mask")] == [750, 750, 1500]


def test_seeds() -> None:
    first, again, other = load_dataset(SMALL), load_dataset(SMALL), load_dataset(SMALL, seed=1)
    for name in first.graph.ndata:
        assert torch.equal(first.graph.ndata[name], again.graph.ndata[name])
    assert torch.equal(first.graph.edges()[0], again.graph.edges()[0])
    assert not torch.equal(first.graph.ndata["feat"], other.graph.ndata["feat"])
    assert torch.equal(load_dataset(SMALL + ",seed=1").graph.ndata["feat"], other.graph.ndata["feat"])
    assert first.meta["seed"] == 0


EXPECTED = (11266764, 205)


def test_repeats_across_releases() -> None:
    """Numbers written down once: a change of the generator changes every published result and must be meant."""
    dataset = load_dataset("powerlaw:nodes=200,degree=6,features=4,classes=3")
    src, dst = dataset.graph.edges()
    assert (int((src * dst).sum()), int(dataset.graph.ndata["label"].sum())) == EXPECTED


@pytest.mark.parametrize(
    "options", ["nodes=1,degree=0,classes=1", "nodes=5,degree=2,features=1,classes=9", "nodes=50,degree=0"]
)
def test_tiny_and_edgeless(options: str) -> None:
    dataset = load_dataset(f"powerlaw:{options}")
    assert dataset.graph.num_nodes() in (1, 5, 50)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("nodes=0", r"nodes must be at least 1 \(got 0\)"),
        ("nodes=many", r"nodes must be an integer \(got 'many'\)"),
        ("train=yes", r"train must be a number \(got 'yes'\)"),
        ("symmetric=2", r"symmetric must be true or false \(got '2'\)"),
        ("nodes=10,degree=9", r"degree must be between 0 and \(nodes - 1\) / 2 = 4.5 \(got 9\)"),
        ("train=0.8,val=0.3", r"train \+ val must not exceed 1"),
        ("homophily=1.5", r"homophily must be between 0 and 1 \(got 1.5\)"),
        ("exponent=2", r"exponent must be above 2 \(got 2\)"),
        ("signal=-1", "signal must not be negative"),
        ("signal=nan", "signal must not be negative"),
        ("degree=inf", "degree must be between"),
        ("node=3", "unknown option 'node'; known are classes, degree, exponent, features"),
        ("nodes", r"options must look like key=value,key=value \(got 'nodes'\)"),
        ("nodes=3,nodes=4", "option 'nodes' is given twice"),
        ("seed=-1", r"seed must not be negative \(got -1\)"),
    ],
)
def test_wrong_options(options: str, message: str) -> None:
    with pytest.raises(DatasetError, match=message):
        load_dataset(f"powerlaw:{options}")
