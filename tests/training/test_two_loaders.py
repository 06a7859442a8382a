# SPDX-License-Identifier: Apache-2.0
"""Blocks of two loaders that are in use at the same time: whose loss weight, masks and statistics are taken."""

from __future__ import annotations

from typing import Any

import dgl.nn as dglnn
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dgl_hybrid import FullGraphLoader, PartitionedGraph, average_gradients
from tests.helpers.exactness import assert_close
from tests.helpers.graphs import NUM_CLASSES, NUM_FEATURES, power_law
from tests.helpers.partitions import PartitionStore
from tests.helpers.world import run_ranks, run_ranks_expect_errors

WIDTH = 4
NUM_SEEDS = {"alike": [(2, 4), (5, 10), (3, 6)], "otherwise": [(2, 2), (2, 1), (2, 3)]}
"""Of both loaders by rank. Weights of one rank are the same in either case."""


class Two(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.first = dglnn.SAGEConv(NUM_FEATURES, WIDTH, "mean", activation=torch.tanh).double()
        self.second = dglnn.SAGEConv(WIDTH, NUM_CLASSES, "mean").double()

    def forward(self, blocks: Any, x: Tensor) -> Tensor:
        out: Tensor = self.second(blocks[1], self.first(blocks[0], x))
        return out


class Held:
    """An object of the script's, which cannot be looked into."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch


# -------------------------------------------------------------------------------- one output, one weight


class Both(nn.Module):
    """A model of the batches of two loaders."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.model, self.way = Two(), way

    def forward(self, first: Any, second: Any) -> Any:
        (blocks, x, labels), (others, y, other_labels) = first, second.batch if isinstance(second, Held) else second
        out = torch.zeros(len(labels), NUM_CLASSES).double()
        if self.way != "unused":
            with torch.set_grad_enabled(self.way != "a teacher first"):
                out = self.model(blocks, x)
        if self.way == "reentrant":
            other = checkpoint(self.model, others, y.requires_grad_(), use_reentrant=True)
        else:
            with torch.set_grad_enabled(self.way != "a teacher"):
                other = self.model(others, y)
        if "backed" not in self.way:
            return out, other
        loss = F.cross_entropy(out, labels) + F.cross_entropy(other, other_labels)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()


def train_both(
    rank: int, world_size: int, part_config: str, way: str, counts: str
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Returns ids of the seeds of both loaders, and gradients."""
    g = PartitionedGraph.open(part_config)
    own, numbers = g.nodes.owned(), NUM_SEEDS[counts][rank]
    loaders = [FullGraphLoader(g, own[-count:], 2, plan=[own[:0]] * 2) for count in numbers]
    model = Both(way)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for both in zip(*loaders, strict=True):
        ids = [g.fetch_nodes(g.partition.orig_node_ids, seeds) for _, seeds, _ in both]
        given = [(blocks, g.ndata["feat"][inputs].clone(), g.ndata["label"][seeds]) for inputs, seeds, blocks in both]
        first, second = given
        if way == "backed twice":
            for batch in given:
                F.cross_entropy(model.model(*batch[:2]), batch[2]).backward()  # type: ignore[no-untyped-call]
        elif "backed" in way:
            model(first, second)
        else:
            out, other = model(first, Held(second) if "object" in way else second)
            losses = [F.cross_entropy(out, first[2]), F.cross_entropy(other, second[2])]
            loss = sum(loss for loss in losses if loss.requires_grad)
            loss.backward()  # type: ignore[union-attr]
        optimizer.step()
    average_gradients(model, loaders[0])
    return ids, [parameter.grad for parameter in model.parameters()]


def check_both(way: str, counts: str, partitions: PartitionStore) -> None:
    graph, model = power_law(), Two()
    results = run_ranks(3, train_both, partitions.get("power_law", graph, 3), way, counts)
    logits = model([graph] * 2, graph.ndata["feat"])
    both = (torch.cat([ids[which] for ids, _ in results]) for which in (0, 1))
    losses = [F.cross_entropy(logits[seeds], graph.ndata["label"][seeds]) for seeds in both]
    counted = losses[:1] if way == "a teacher" else losses[1:] if way in ("a teacher first", "unused") else losses
    sum(counted).backward()  # type: ignore[union-attr]
    for _, gradients in results:
        for gradient, parameter in zip(gradients, model.parameters(), strict=True):
            assert parameter.grad is not None
            assert_close(gradient, parameter.grad, way)


@pytest.mark.parametrize("way", ["arguments", "an object", "reentrant", "backed inside"])
def test_one_call_on_blocks_of_two_loaders_that_weigh_alike(way: str, partitions: PartitionStore) -> None:
    check_both(way, "alike", partitions)


@pytest.mark.parametrize("way", ["arguments", "an object", "reentrant", "backed inside"])
def test_one_call_on_blocks_of_two_loaders_that_weigh_otherwise_is_refused(
    way: str, partitions: PartitionStore
) -> None:
    """Gradients had the first loader's weight, silently; some ranks raised as the optimizer stepped, others did not."""
    folder = partitions.get("power_law", power_law(), 3)
    for error in run_ranks_expect_errors(3, train_both, folder, way, "otherwise"):
        assert error.type_name == "BlockError"
        assert "has used the last blocks of 2 loaders, whose loss weights differ" in error.message
        assert "Call the module for one loader after another" in error.message
        assert "loss_reduction='weighted'" in error.message


@pytest.mark.parametrize("way", ["a teacher", "a teacher first", "unused", "backed twice"])
def test_the_weight_is_that_of_the_loader_whose_gradients_are_taken(way: str, partitions: PartitionStore) -> None:
    """It was that of the first blocks among the arguments, whatever was made of them."""
    check_both(way, "otherwise", partitions)
