# SPDX-License-Identifier: Apache-2.0
"""Denominators of a mean: those of the seeds that are yielded, borrowed ones left out."""

from __future__ import annotations

from typing import Any

import dgl.nn as dglnn
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from dgl_hybrid import FullGraphLoader, PartitionedGraph
from dgl_hybrid.exchange.communicator import Communicator
from dgl_hybrid.exchange.transport import CollectiveTransport
from dgl_hybrid.training.loss import find_loss_weight
from tests.helpers.exactness import assert_close
from tests.helpers.graphs import NUM_CLASSES, NUM_FEATURES, power_law
from tests.helpers.partitions import PartitionStore
from tests.helpers.world import run_ranks

CLASS_WEIGHTS = torch.tensor([0.5, 2.0, 3.0], dtype=torch.float64)


@pytest.fixture(scope="module")
def partitions(tmp_path_factory: pytest.TempPathFactory) -> PartitionStore:
    return PartitionStore(tmp_path_factory.mktemp("losses"))


def build() -> nn.Module:
    torch.manual_seed(6)
    return dglnn.SAGEConv(NUM_FEATURES, NUM_CLASSES, "mean").double()


def train_by_denominators(
    rank: int, world_size: int, part_config: str, hands_over: bool
) -> tuple[float, float, list[Tensor], Tensor]:
    """Rank 1 owns no seeds: it is given none, or some of rank 0's, which are moved to their owner.

    Denominators are those of the seeds that are yielded, as of a script that asks a first loader for them.
    """
    g = PartitionedGraph.open(part_config)
    mine = g.owned_nodes("train_mask")
    of_all: list[Any] = [None] * world_size
    dist.all_gather_object(of_all, mine)
    given = mine if rank > 1 or not hands_over else of_all[0][: len(of_all[0]) // 2]
    if rank == 0 and hands_over:
        given = of_all[0][len(of_all[0]) // 2 :]
    if rank == 1 and not hands_over:
        given = mine[:0]
    plan = [torch.arange(0)]
    ((_, yielded, _),) = list(FullGraphLoader(g, given, 1, plan=plan))
    denominator = float(CLASS_WEIGHTS[g.ndata["label"][yielded]].sum())
    loader = FullGraphLoader(g, given, 1, plan=plan, loss_denominator=denominator)
    model = build()
    for input_nodes, seeds, blocks in loader:
        logits = model(blocks[0], g.ndata["feat"][input_nodes])
        loss = F.cross_entropy(logits, g.ndata["label"][seeds], weight=CLASS_WEIGHTS)
        loss.backward()
    gradients = []
    for parameter in model.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        gradients.append(parameter.grad / world_size)
    own = g.fetch_nodes(g.partition.orig_node_ids, seeds)[: loader.num_seeds]
    return loader.loss_weight, float(loss) * loader.loss_weight / world_size, gradients, own


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("hands_over", [False, True])
def test_a_borrowed_seed_has_no_denominator(world_size: int, hands_over: bool, partitions: PartitionStore) -> None:
    """It was counted twice: by its owner, and by the rank that borrows it with its own denominator."""
    graph, model = power_law(), build()
    folder = partitions.get("power_law", graph, world_size)
    results = run_ranks(world_size, train_by_denominators, folder, hands_over)
    seeds = torch.cat([seeds for _, _, _, seeds in results])
    assert len(results[1][3]) == 0
    assert len(torch.unique(seeds)) == len(seeds)
    logits = model(graph, graph.ndata["feat"])[seeds]
    loss = F.cross_entropy(logits, graph.ndata["label"][seeds], weight=CLASS_WEIGHTS)
    loss.backward()

    assert results[1][0] == 0.0
    assert sum(share for _, share, _, _ in results) == pytest.approx(loss.item(), rel=1e-12)
    for _, _, gradients, _ in results:
        for gradient, parameter in zip(gradients, model.parameters(), strict=True):
            assert parameter.grad is not None
            assert_close(gradient, parameter.grad, "gradient")


def weigh(rank: int, world_size: int) -> list[float]:
    """Of ranks that own 0, 2 and 4 seeds."""
    communicator = Communicator(CollectiveTransport(dist.new_group()))
    num_seeds = 2 * rank
    return [
        find_loss_weight(communicator, num_seeds),
        find_loss_weight(communicator, num_seeds, reduction="sum"),
        find_loss_weight(communicator, num_seeds, denominator=3.0),
        find_loss_weight(communicator, num_seeds, denominator=float("nan") if num_seeds == 0 else 1.0 + rank),
    ]


def test_weights_of_ranks() -> None:
    assert run_ranks(3, weigh) == [
        [0.0, 0.0, 0.0, 0.0],
        [1.0, 3.0, 1.5, pytest.approx(3 * 2 / 5)],
        [2.0, 3.0, 1.5, pytest.approx(3 * 3 / 5)],
    ]
