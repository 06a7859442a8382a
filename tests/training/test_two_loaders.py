# SPDX-License-Identifier: Apache-2.0
"""Blocks of two loaders that are in use at the same time: whose loss weight, masks and statistics are taken."""

from __future__ import annotations

from typing import Any

import dgl
import dgl.nn as dglnn
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dgl_hybrid import FullGraphLoader, PartitionedGraph, average_gradients
from dgl_hybrid.planner import uniform_topology
from tests.helpers.exactness import Case, assert_close, forced_plan
from tests.helpers.graphs import NUM_CLASSES, NUM_FEATURES, power_law
from tests.helpers.partitions import PartitionStore
from tests.helpers.thinning import each_value
from tests.helpers.world import run_ranks, run_ranks_expect_errors
from tests.training.test_pieces import ring

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


# -------------------------------------------------------------------------------- parts that are given no blocks


class Pieces(nn.Module):
    """Parts that drop out or norm before, between and after layers, for a script to call, or for a checkpoint."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.model, self.way = Two(), way
        norm = [nn.BatchNorm1d(WIDTH).double()] if "norm" in way else []
        drop = [] if way == "norm alone" else [nn.Dropout(0.4)]
        self.before, self.between = nn.Sequential(nn.Dropout(0.4)), nn.Sequential(nn.Tanh(), *norm, *drop)
        if way == "norm alone":
            self.before = nn.Sequential(nn.Identity())

    def forward(self, blocks: Any, x: Tensor, *, repeats: bool = False) -> Tensor:
        h = self.model.first(blocks[0], self.part(self.before, x, repeats))
        out: Tensor = self.model.second(blocks[1], self.part(self.between, h, repeats))
        return out

    def part(self, module: nn.Module, h: Tensor, repeats: bool) -> Tensor:
        out: Tensor = checkpoint(module, h, use_reentrant=self.way.endswith("reentrant")) if repeats else module(h)
        return out


def seeds_of(g: PartitionedGraph, way: str) -> tuple[Tensor, Tensor]:
    """Of both loaders: few and all, unless they are to have as many rows."""
    own, original = g.nodes.owned(), g.partition.orig_node_ids
    assert original is not None
    if way == "as many":
        return own[:3], own[-3:]
    few = own[original % 10 < 2]
    return few, few if way == "the same" else own


def loaders_of(g: PartitionedGraph, way: str, **options: Any) -> list[FullGraphLoader]:
    """Without batch norm they compute what a model needs, so that few seeds have few rows at each level; else all."""
    if "norm" in way or way == "as many":
        options["plan"] = [torch.arange(0)] * 2
    else:
        options |= {"model": Two(), "strategy": "depcomm", "topology": uniform_topology(g.communicator.world_size)}
    return [FullGraphLoader(g, ids, 2, seed=5 + n, **options) for n, ids in enumerate(seeds_of(g, way))]


def call_pieces(rank: int, world_size: int, part_config: str, way: str) -> list[tuple[Tensor, Tensor]]:
    """Returns ids of seeds and outputs of the first loader's batch, and of the second one's, in two epochs."""
    g = PartitionedGraph.open(part_config)
    loaders = loaders_of(g, way)
    parts, results = Pieces(way), []
    held = next(iter(loaders[1]))
    for _ in range(2):
        for both in ((batch, held) for batch in loaders[0]) if way == "held" else zip(*loaders, strict=True):
            for inputs, seeds, blocks in both:
                h = parts.model.first(blocks[0], parts.before(g.ndata["feat"][inputs].clone()))
                out = parts.model.second(blocks[1], parts.between(h))
                results.append((g.fetch_nodes(g.partition.orig_node_ids, seeds), out.detach()))
    return results


def check_against_one_rank(function: Any, way: str, partitions: PartitionStore) -> None:
    (alone,) = run_ranks(1, function, partitions.get("ring", ring(), 1), way)
    whole = [torch.empty(ring().num_nodes(), NUM_CLASSES).double().index_copy(0, ids, out) for ids, out in alone]
    for results in run_ranks(3, function, partitions.get("ring", ring(), 3), way):
        for number, ((ids, output), expected) in enumerate(zip(results, whole, strict=True)):
            assert_close(output, expected[ids], f"{way}, batch {number}")


@pytest.mark.parametrize("way", ["drop", "norm alone", "held", "the same"])
def test_pieces_are_of_the_loader_whose_rows_they_get(way: str, partitions: PartitionStore) -> None:
    """They were taken for the latest one's: masks were by other vertices, or some ranks raised an error."""
    check_against_one_rank(call_pieces, way, partitions)


def test_pieces_that_could_be_of_two_loaders_are_refused(partitions: PartitionStore) -> None:
    for error in run_ranks_expect_errors(3, call_pieces, partitions.get("ring", ring(), 3), "as many"):
        assert error.type_name == "BlockError"
        assert "could be those of 2 loaders, which have other vertices" in error.message
        assert "Pass the blocks as arguments" in error.message


class PiecesOfBoth(nn.Module):
    """Gets the blocks of both."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.pieces = Pieces(way)

    def forward(self, first: Any, second: Any) -> tuple[Tensor, Tensor]:
        blocks, x, others, y = *first, *second
        h, g = self.pieces.before(x), self.pieces.before(y)
        h, g = self.pieces.model.first(blocks[0], h), self.pieces.model.first(others[0], g)
        h, g = self.pieces.between(h), self.pieces.between(g)
        return self.pieces.model.second(blocks[1], h), self.pieces.model.second(others[1], g)


def call_both(rank: int, world_size: int, part_config: str, way: str) -> list[tuple[Tensor, Tensor]]:
    """The same in one call for both."""
    g = PartitionedGraph.open(part_config)
    loaders = loaders_of(g, way, loss_reduction="weighted")
    model, results = PiecesOfBoth(way), []
    for _ in range(2):
        for both in zip(*loaders, strict=True):
            outputs = model(*((blocks, g.ndata["feat"][inputs].clone()) for inputs, _, blocks in both))
            for out, (_, seeds, _) in zip(outputs, both, strict=True):
                results.append((g.fetch_nodes(g.partition.orig_node_ids, seeds), out.detach()))
    return results


@pytest.mark.parametrize("way", ["drop", "norm alone", "the same"])
def test_one_call_on_blocks_of_two_loaders_drops_by_the_rows_of_each(way: str, partitions: PartitionStore) -> None:
    """By those of the first one, or some ranks raised an error."""
    check_against_one_rank(call_both, way, partitions)


def test_rows_in_one_call_that_could_be_of_two_loaders_are_refused(partitions: PartitionStore) -> None:
    for error in run_ranks_expect_errors(3, call_both, partitions.get("ring", ring(), 3), "as many"):
        assert error.type_name == "BlockError"
        assert "could be those of 2 loaders, which have other vertices" in error.message


def repeat_parts(rank: int, world_size: int, part_config: str, way: str, repeats: bool) -> list[Tensor | None]:
    """Returns gradients of two forwards that go back together."""
    g = PartitionedGraph.open(part_config)
    loaders = loaders_of(g, way)
    model = Pieces(way)
    for both in zip(*loaders, strict=True):
        losses = []
        for inputs, seeds, blocks in both:
            x = g.ndata["feat"][inputs].clone().requires_grad_()
            losses.append(F.cross_entropy(model(blocks, x, repeats=repeats), g.ndata["label"][seeds]))
        sum(losses).backward()  # type: ignore[union-attr]
    average_gradients(model, loaders[0])
    return [parameter.grad for parameter in model.parameters()]


def everybody_reads_all(num_nodes: int = 15) -> dgl.DGLGraph:
    nodes = torch.arange(num_nodes)
    graph = dgl.graph((nodes.repeat(num_nodes), nodes.repeat_interleave(num_nodes)))
    generator = torch.Generator().manual_seed(9)
    graph.ndata["feat"] = torch.randn(num_nodes, NUM_FEATURES, generator=generator, dtype=torch.float64)
    graph.ndata["label"] = nodes % NUM_CLASSES
    return graph


def train_in_turns(rank: int, world_size: int, part_config: str) -> None:
    """Epochs of two loaders whose levels are as large, of rows in another order, with parts that only norm."""
    g = PartitionedGraph.open(part_config)
    plan = forced_plan(g, Case(kind="sage_mean", plan="depcache"))
    loaders = [FullGraphLoader(g, ids, 2, plan=plan) for ids in (g.nodes.owned()[1:2], g.nodes.owned())]
    first, second = loaders
    assert first.sets.sizes[1] == second.sets.sizes[1]
    assert rank == 0 or not torch.equal(*(loader.sets.owned[: first.sets.sizes[1]] for loader in loaders))
    model = Pieces("norm alone")
    for loader in loaders * 2:
        for inputs, seeds, blocks in loader:
            x = g.ndata["feat"][inputs].clone().requires_grad_()
            loss = F.cross_entropy(model(blocks, x, repeats=True), g.ndata["label"][seeds])
            loss.backward()  # type: ignore[no-untyped-call]


def test_what_went_back_in_an_epoch_before_is_not_repeated(partitions: PartitionStore) -> None:
    """Its rows could be those of the loader that is next, and the part that norms them cannot tell."""
    run_ranks(3, train_in_turns, partitions.get("all", everybody_reads_all(), 3))


@each_value(way=["drop", "norm and drop", "norm alone", "drop, reentrant", "the same"], world_size=[3, 1, 3])
def test_what_a_checkpoint_repeats_is_of_the_loader_that_it_was_of(
    way: str, world_size: int, partitions: PartitionStore
) -> None:
    """Of the last one that the part was called for: masks were others than in the forward, silently."""
    folder = partitions.get("ring", ring(), world_size)
    kept, repeated = (run_ranks(world_size, repeat_parts, folder, way, repeats) for repeats in (False, True))
    for gradients, expected in zip(repeated, kept, strict=True):
        for gradient, other in zip(gradients, expected, strict=True):
            assert gradient is not None
            assert other is not None
            assert_close(gradient, other, way)
