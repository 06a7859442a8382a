# SPDX-License-Identifier: Apache-2.0
"""What tests of loaders share."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dgl_hybrid import PartitionedGraph
from tests.helpers.exactness import Case, Model
from tests.helpers.graphs import power_law


def open_graph(part_config: str) -> tuple[PartitionedGraph, Model]:
    g = PartitionedGraph.open(part_config)
    return g, Case(kind="gcn_both").build(g.ndata["feat"].shape[1])


def reference_curve(**options: object) -> list[float]:
    graph = power_law()
    model = Case(kind="gcn_both", **options).build(graph.ndata["feat"].shape[1])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train = graph.ndata["train_mask"]
    losses = []
    for _ in range(3):
        loss = F.cross_entropy(model([graph] * 2, graph.ndata["feat"])[train], graph.ndata["label"][train])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


class Centred(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, blocks: list[object], x: Tensor) -> Tensor:
        return self.model(blocks, x - x.mean(0))


class OtherHead(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, blocks: list[object], x: Tensor) -> Tensor:
        return 2.0 * self.model(blocks, x)
