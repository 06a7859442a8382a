# SPDX-License-Identifier: Apache-2.0
"""For tests of scripts written as users write them, whose bugs were found that way; each test tells what went wrong.

Most were silent: gradients of one rank missed their weight, or a row was not what the script took it for. So every test
compares with the same script on the whole graph with plain DGL or, where our dropout masks matter, with the plain way
of writing it on one rank. `power_law` split at random gives ranks different numbers of seeds, so no weight is one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import dgl
import dgl.nn as dglnn
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from dgl_hybrid import PartitionedGraph
from tests.helpers.exactness import Case, assert_close, forced_plan
from tests.helpers.graphs import NUM_CLASSES, NUM_FEATURES, power_law

RANKS = 3
EPOCHS = 3


class TwoLayers(nn.Module):
    """GraphSAGE, then attention: with dropout, on rows of vertices and on edges."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = dglnn.SAGEConv(NUM_FEATURES, 4, "mean")
        self.second = dglnn.GATConv(4, NUM_CLASSES, 2, attn_drop=dropout, allow_zero_in_degree=True)
        self.dropout = nn.Dropout(dropout)

    def forward(self, blocks: Sequence[Any], x: Tensor) -> Tensor:
        h = torch.tanh(self.first(blocks[0], self.dropout(x)))
        return self.second(blocks[1], self.dropout(h)).mean(1)


def open_graph(part_config: str) -> tuple[PartitionedGraph, list[Tensor]]:
    """The graph of this rank, and a plan in which about half of the dependencies are cached."""
    g = PartitionedGraph.open(part_config)
    plan = forced_plan(g, Case(kind="sage_mean", plan="random:1:0.5"))
    assert plan is not None
    return g, plan


def average_gradients(model: nn.Module) -> list[Tensor]:
    """What DDP gives: the mean over ranks."""
    grads = []
    for parameter in model.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
        grads.append(parameter.grad.clone())
    return grads


def original_ids(g: PartitionedGraph, ids: Tensor) -> Tensor:
    assert g.partition.orig_node_ids is not None
    return g.fetch_nodes(g.partition.orig_node_ids, ids)


def plain_gradients(
    loss_of: Callable[[nn.Module, dgl.DGLGraph, Tensor], Tensor], model: nn.Module, epochs: int = EPOCHS
) -> tuple[list[float], list[list[Tensor]]]:
    """Losses and gradients of each epoch, by plain DGL on the whole graph, in the steps that `train` takes."""
    graph, losses, grads = power_law(), [], []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(epochs):
        optimizer.zero_grad()
        loss = loss_of(model, graph, graph.ndata["train_mask"])
        loss.backward()
        losses.append(loss.item())
        grads.append([parameter.grad.clone() for parameter in model.parameters()])
        optimizer.step()
    return losses, grads


def assert_same_gradients(actual: list[list[Tensor]], expected: list[list[Tensor]], what: str) -> None:
    assert len(actual) == len(expected)
    for epoch, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
        for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            assert_close(a, b, f"{what}: gradient {index} in epoch {epoch}")


def plain_loss(model: nn.Module, graph: dgl.DGLGraph, train: Tensor) -> Tensor:
    return F.cross_entropy(model([graph, graph], graph.ndata["feat"])[train], graph.ndata["label"][train])
