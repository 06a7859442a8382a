# SPDX-License-Identifier: Apache-2.0
"""Gradients of gradients on blocks, against differences of plain DGL's first ones: DGL's own second derivatives of a
softmax over edges are wrong.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dgl_hybrid import FullGraphLoader, PartitionedGraph
from tests.helpers.exactness import Case, forced_plan
from tests.helpers.graphs import power_law
from tests.helpers.partitions import PartitionStore
from tests.helpers.world import run_ranks

STEP = 1e-5


def directions(model: nn.Module) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(weight.shape, generator=generator, dtype=weight.dtype) for weight in model.parameters()]


def products_of_rank(rank: int, world_size: int, part_config: str, case: Case, num_train: int) -> list[Tensor]:
    """This rank's share of the Hessian of the whole graph's loss times a direction, one tensor for each weight."""
    g = PartitionedGraph.open(part_config)
    model = case.build(g.ndata["feat"].shape[1])
    own = g.owned_nodes("train_mask")
    # Weighted by the script: the loader's weight on first gradients would enter twice, and is refused.
    loader = FullGraphLoader(g, own, case.num_layers, plan=forced_plan(g, case), loss_reduction="weighted")
    for input_nodes, seeds, blocks in loader:
        logits = model(blocks, g.ndata["feat"][input_nodes])
        loss = world_size * len(own) / num_train * F.cross_entropy(logits, g.ndata["label"][seeds])
        weights = list(model.parameters())
        first = torch.autograd.grad(loss, weights, create_graph=True)
        along = torch.stack([(grad * way).sum() for grad, way in zip(first, directions(model), strict=True)]).sum()
        second = torch.autograd.grad(along, weights)
    return [grad / world_size for grad in second]


def differences(case: Case) -> list[Tensor]:
    """The same of the whole graph by plain DGL, by central differences of first gradients."""
    graph = power_law()
    model = case.build(graph.ndata["feat"].shape[1])
    train = graph.ndata["train_mask"].bool()
    weights, ways = list(model.parameters()), directions(model)
    found = []
    for sign in (1.0, -1.0):
        with torch.no_grad():
            for weight, way in zip(weights, ways, strict=True):
                weight.add_(way, alpha=sign * STEP)
        logits = model([graph] * case.num_layers, graph.ndata["feat"])
        found.append(torch.autograd.grad(F.cross_entropy(logits[train], graph.ndata["label"][train]), weights))
        with torch.no_grad():
            for weight, way in zip(weights, ways, strict=True):
                weight.sub_(way, alpha=sign * STEP)
    return [(after - before) / (2 * STEP) for after, before in zip(*found, strict=True)]


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("kind", ["gat", "gatv2", "dotgat", "sage_mean"])
def test_second_derivatives_are_those_of_the_whole_graph(
    kind: str, world_size: int, partitions: PartitionStore
) -> None:
    case = Case(kind=kind, plan="random:1:0.5")
    graph = power_law()
    num_train = int(graph.ndata["train_mask"].sum())
    folder = partitions.get("power_law", graph, world_size)
    by_rank = run_ranks(world_size, products_of_rank, folder, case, num_train)
    expected = differences(case)
    scale = max(float(x.abs().max()) for x in expected)
    assert scale > 1e-3
    for parts, whole in zip(zip(*by_rank, strict=True), expected, strict=True):
        assert float((sum(parts) - whole).abs().max()) < 1e-6 * scale
