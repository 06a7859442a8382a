# SPDX-License-Identifier: Apache-2.0
"""The grid of the side-by-side benchmark, and its graphs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.systems.graphs import SHAPES, GraphShape, generate
from benchmarks.systems.grid import Cell, full_grid, quick_grid, quick_systems_of, systems_of
from benchmarks.systems.measure import Settings
from tests.benchmarks.systems.measurements import (
    ONE_GAT,
    SHAPED,
    TWO,
)


def test_grid_has_every_combination_once_and_the_plainest_first() -> None:
    cells = full_grid(("products", "debian-deps"))
    # models x layers x hidden x (one rank on loopback, three numbers of ranks on three networks)
    assert len(cells) == len({cell.key for cell in cells}) == 2 * 3 * 2 * 2 * (1 + 3 * 3)
    assert {cell.key for cell in cells[:6]} == {
        f"{graph}/{model}-2x128/2/1gbit" for graph in ("products", "debian-deps") for model in ("gcn", "sage", "gat")
    }
    scaled = full_grid(("products", "debian-deps"), scale=0.1)
    assert {cell.scale for cell in scaled if cell.graph == "debian-deps"} == {1.0}
    assert {cell.dataset for cell in scaled} == {"products@0.1", "debian-deps"}


def test_a_sample_is_the_grid_in_an_order_drawn_once() -> None:
    """Cells that were measured are told by this order: it stays."""
    cells = full_grid(ranks=(2, 3, 4), sample=5)
    assert set(cells) == set(full_grid(ranks=(2, 3, 4)))
    assert [cell.key for cell in cells[:3]] == [
        "debian-deps/gat-2x256/3/1gbit",
        "powerlaw/sage-3x256/4/200mbit",
        "moby-thesaurus/sage-3x128/3/loopback",
    ]
    assert full_grid(ranks=(2, 3, 4), sample=6) != cells


def test_quick_grid_has_what_every_figure_needs() -> None:
    cells = quick_grid()
    assert {cell.model for cell in cells if cell.ranks == 1} == {"gcn", "sage", "gat"}
    assert {cell.network for cell in cells} == {"loopback", "1gbit", "200mbit"}
    assert {3} <= {cell.num_layers for cell in cells}
    for cell in cells:
        assert set(quick_systems_of(cell)) <= set(systems_of(cell))
        assert {"dgl", "hybrid"} <= set(quick_systems_of(cell)) or cell.ranks > 1


def test_systems_that_run_a_cell() -> None:
    assert systems_of(ONE_GAT) == ("hybrid", "dgl", "dgl_blocks", "distdgl_full", "sar", "sar_mfg", "sar_mfg_no_sr")
    only_here = set(systems_of(TWO)) - set(systems_of(replace(TWO, network="1gbit")))
    assert only_here == {"dgl", "dgl_blocks", "dgl_one_thread"}
    # On blocks the norm of GCN takes other degrees.
    assert "dgl_blocks" not in systems_of(replace(TWO, model="gcn"))
    # SAR's message-flow graphs compute another GCN; PipeGCN has GraphSAGE only.
    assert not {"sar_mfg", "pipegcn"} & set(systems_of(SHAPED))


def test_cell_says_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="unknown network"):
        Cell(graph="products", network="wlan")
    with pytest.raises(ValueError, match="one rank uses no link"):
        Cell(graph="products", ranks=1, network="1gbit")
    with pytest.raises(ValueError, match="unknown allocator"):
        Settings(allocator="mine")


def test_generated_graph_is_what_its_shape_says() -> None:
    shape = GraphShape(nodes=4000, degree=30, features=16, classes=8, train=0.08, far=0.02, label_noise=0.0)
    graph = generate(shape)
    src, dst = graph["src"].astype(np.int64), graph["dst"].astype(np.int64)
    keys = src * shape.nodes + dst
    assert len(np.unique(keys)) == len(keys)
    assert not (src == dst).any()
    assert np.array_equal(np.sort(keys), np.sort(dst * shape.nodes + src))
    assert len(src) / shape.nodes == pytest.approx(30, rel=0.02)
    degrees = np.bincount(dst, minlength=shape.nodes)
    assert degrees.max() > 8 * np.median(degrees)
    label = graph["label"]
    assert set(label.tolist()) == set(range(8))
    assert (label[src] == label[dst]).mean() > 0.6
    assert graph["train_mask"].sum() == 320
    masks = np.stack([graph[name] for name in ("train_mask", "val_mask", "test_mask")])
    assert (masks.sum(0) == 1).all()
    # Features are drawn around their class's centre, so the nearest centre tells more than chance.
    centres = np.stack([graph["feat"][label == c].mean(0) for c in range(8)])
    nearest = ((graph["feat"][:, None] - centres) ** 2).sum(2).argmin(1)
    assert (nearest == label).mean() > 0.3
    again = generate(shape)
    assert all(np.array_equal(graph[name], again[name]) for name in graph)


def test_shapes_keep_their_degree_when_scaled() -> None:
    assert SHAPES["products"].scaled(0.05).nodes == 10_000
    assert SHAPES["products"].scaled(0.05).degree == 50
    small = SHAPES["reddit"].scaled(0.001)
    assert small.degree <= small.nodes / 8
