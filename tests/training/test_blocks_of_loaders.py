# SPDX-License-Identifier: Apache-2.0
"""Which loader's blocks a model was given, and which of their edges: blocks as a script passes them on."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import dgl
import dgl.nn as dglnn
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dgl_hybrid import FullGraphLoader, PartitionedGraph
from dgl_hybrid.planner import uniform_topology
from tests.helpers.exactness import assert_close
from tests.helpers.graphs import NUM_CLASSES, NUM_FEATURES
from tests.helpers.world import run_ranks
from tests.training.user_scripts import (
    EPOCHS,
    RANKS,
    TwoLayers,
    assert_same_gradients,
    average_gradients,
    open_graph,
    original_ids,
    plain_gradients,
)


def train_beside_validation(
    rank: int, world_size: int, part_config: str, ways: Sequence[str]
) -> dict[str, tuple[list[list[Tensor]], Tensor, Tensor]]:
    """Gradients of each epoch; original ids and logits of the last validation."""
    g, plan = open_graph(part_config)
    results = {}
    for way in ways:
        model = TwoLayers(dropout=0.4).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        train = FullGraphLoader(g, g.owned_nodes("train_mask"), 2, plan=plan, seed=7)
        valid = FullGraphLoader(g, g.owned_nodes()[~g.ndata["train_mask"].local], 2, plan=plan, seed=8)
        grads = []

        def call(blocks: list[Any], x: Tensor, *, model: nn.Module = model, way: str = way) -> Tensor:
            if way.endswith("int"):
                blocks = [block.int() for block in blocks]
            out: Tensor = model(blocks=blocks, x=x) if way.startswith("keywords") else model(blocks, x)
            return out

        for _ in range(EPOCHS):
            for (input_nodes, seeds, blocks), (valid_inputs, _, valid_blocks) in zip(train, valid, strict=True):
                logits = call(blocks, g.ndata["feat"][input_nodes])
                optimizer.zero_grad()
                F.cross_entropy(logits, g.ndata["label"][seeds]).backward()
                grads.append(average_gradients(model))
                with torch.no_grad():
                    model.eval()
                    logits = call(valid_blocks, g.ndata["feat"][valid_inputs])
                    model.train()
                optimizer.step()
        results[way] = grads, original_ids(g, valid.seeds), logits
    return results


def test_blocks_as_keywords_and_copies_by_int_belong_to_their_own_loader(folder: str, folder_of_one: str) -> None:
    """Such blocks were not recognised, and the loader that had yielded last was taken: the validation's, in a zip.

    Dropout then failed on rows of unknown vertices or drew other masks, and outputs got the other loader's weight.
    """
    ways = ("positional", "positional, int", "keywords", "keywords, int")
    expected, ids, logits = run_ranks(1, train_beside_validation, folder_of_one, ways[:1])[0][ways[0]]
    by_node = logits[torch.argsort(ids)]
    results = run_ranks(RANKS, train_beside_validation, folder, ways)
    for way in ways:
        for result in results:
            assert_same_gradients(result[way][0], expected, way)
        order = torch.argsort(torch.cat([result[way][1] for result in results]))
        assert_close(torch.cat([result[way][2] for result in results])[order], by_node, f"{way}: validation")


class Weighted(nn.Module):
    """Takes one vector of edge weights for each layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        widths = [NUM_FEATURES, 4, 4, NUM_CLASSES]
        self.layers = nn.ModuleList(
            dglnn.GraphConv(a, b, norm="right", allow_zero_in_degree=True) for a, b in itertools.pairwise(widths)
        )

    def forward(self, blocks: Sequence[Any], x: Tensor, weights: list[Tensor]) -> Tensor:
        for layer, block, weight in zip(self.layers, blocks, weights, strict=True):
            x = torch.tanh(layer(block, x, edge_weight=weight))
        return x


def train_with_edge_weights(rank: int, world_size: int, part_config: str) -> tuple[list[float], list[bool], list[int]]:
    g = PartitionedGraph.open(part_config)
    loader = FullGraphLoader(g, g.owned_nodes(), 3, topology=uniform_topology(world_size))
    num_edges = [block.num_edges() for block in loader.blocks]
    model = Weighted().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, planned = [], []
    for _ in range(EPOCHS):
        for input_nodes, seeds, blocks in loader:
            weights = [g.edata["w"][block.edata[dgl.EID]] * k for k, block in enumerate(blocks, start=1)]
            logits = model(blocks, g.ndata["feat"][input_nodes], weights)
            loss = F.cross_entropy(logits, g.ndata["label"][seeds])
            optimizer.zero_grad()
            loss.backward()
            average_gradients(model)
            optimizer.step()
            losses.append(loss.item() * loader.loss_weight / world_size)
            planned.append(loader.outcome is not None)
    return losses, planned, num_edges


def test_edge_weights_of_layers_with_equally_many_edges_are_told_apart(folder: str) -> None:
    """With all nodes as seeds every block of the first epoch has the same edges; every list entry was then taken for
    weights of the first layer, and planning from that forward failed."""

    def loss_of(model: nn.Module, graph: dgl.DGLGraph, train: Tensor) -> Tensor:
        weights = [graph.edata["w"] * k for k in (1, 2, 3)]
        return F.cross_entropy(model([graph] * 3, graph.ndata["feat"], weights), graph.ndata["label"])

    expected, _ = plain_gradients(loss_of, Weighted().double())
    results = run_ranks(RANKS, train_with_edge_weights, folder)
    for _, planned, num_edges in results:
        assert len(set(num_edges)) == 1
        assert planned == [False, True, True]
    total = [sum(losses) for losses in zip(*(losses for losses, _, _ in results), strict=True)]
    assert total == pytest.approx(expected, rel=1e-9)
