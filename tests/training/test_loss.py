# SPDX-License-Identifier: Apache-2.0
"""The weight of a rank's loss: denominators without borrowed seeds; gradients that a script takes in its own ways."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import dgl
import dgl.function as fn
import dgl.nn as dglnn
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dgl_hybrid import FullGraphLoader, PartitionedGraph
from dgl_hybrid.exchange.communicator import Communicator
from dgl_hybrid.exchange.transport import CollectiveTransport
from dgl_hybrid.training.loss import LossWeight, find_loss_weight
from tests.helpers.exactness import assert_close
from tests.helpers.graphs import NUM_CLASSES, NUM_FEATURES, power_law
from tests.helpers.partitions import PartitionStore
from tests.helpers.world import run_ranks, run_ranks_expect_errors

CLASS_WEIGHTS = torch.tensor([0.5, 2.0, 3.0], dtype=torch.float64)


@pytest.fixture(scope="module")
def partitions(tmp_path_factory: pytest.TempPathFactory) -> PartitionStore:
    return PartitionStore(tmp_path_factory.mktemp("losses"))


def build() -> nn.Module:
    torch.manual_seed(6)
    return dglnn.SAGEConv(NUM_FEATURES, NUM_CLASSES, "mean").double()


def average(world_size: int, parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    gradients = []
    for parameter in parameters:
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        gradients.append(parameter.grad / world_size)
    return gradients


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
    gradients = average(world_size, model.parameters())
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
    weights = [
        find_loss_weight(communicator, num_seeds),
        find_loss_weight(communicator, num_seeds, reduction="sum"),
        find_loss_weight(communicator, num_seeds, denominator=3.0),
        find_loss_weight(communicator, num_seeds, denominator=float("nan") if num_seeds == 0 else 1.0 + rank),
    ]
    assert not any(weight.is_one for weight in weights), "nor is it where this rank's happens to be"
    by_script = find_loss_weight(communicator, num_seeds, reduction="weighted")
    assert by_script == LossWeight(1.0 if num_seeds else 0.0, is_one=True)
    assert find_loss_weight(communicator, 5) == LossWeight(1.0, is_one=True)
    assert not find_loss_weight(communicator, 5, reduction="sum").is_one
    return [weight.value for weight in weights]


def test_weights_of_ranks() -> None:
    assert run_ranks(3, weigh) == [
        [0.0, 0.0, 0.0, 0.0],
        [1.0, 3.0, 1.5, pytest.approx(3 * 2 / 5)],
        [2.0, 3.0, 1.5, pytest.approx(3 * 3 / 5)],
    ]


def weigh_by(rank: int, world_size: int, denominators: list[float]) -> None:
    find_loss_weight(Communicator(CollectiveTransport(dist.new_group())), 3, denominator=denominators[rank])


@pytest.mark.parametrize(
    "denominators",
    [(1.0, math.inf, 1.0), (9.0, -1.0, -1.0), (0.0, 0.0, 0.0), (1.0, 1.0, math.nan), (1e308, 1e308, 1e308)],
)
def test_denominators_that_weigh_nothing_are_refused(denominators: tuple[float, ...]) -> None:
    """Of an infinite one, weights were NaN; of a negative one, gradients had the other sign."""
    for error in run_ranks_expect_errors(3, weigh_by, list(denominators)):
        assert error.type_name == "ValueError"
        assert "must be finite and not negative, and not all 0 (got [" in error.message


# -------------------------------------------------------------------- gradients that the script takes itself


class Two(nn.Module):
    """Two layers with something between that has second derivatives."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.first = dglnn.SAGEConv(NUM_FEATURES, 4, "mean", activation=torch.tanh).double()
        self.second = dglnn.SAGEConv(4, NUM_CLASSES, "mean").double()

    def forward(self, blocks: list[Any], x: Tensor) -> Tensor:
        out: Tensor = self.second(blocks[1], self.first(blocks[0], x))
        return out


def penalise(loss: Tensor, parameters: list[nn.Parameter]) -> None:
    gradients = torch.autograd.grad(loss, parameters, create_graph=True)
    torch.stack([gradient.sum() for gradient in gradients]).sum().backward()  # type: ignore[no-untyped-call]


def differentiate_twice(rank: int, world_size: int, part_config: str, way: str) -> tuple[list[Tensor], Tensor]:
    g = PartitionedGraph.open(part_config)
    own = g.nodes.owned()
    # In the last of these a rank has none, and borrows one.
    count = {"as many seeds": 5, "weighted, one rank without seeds": 3 * rank}.get(way, 3 + 4 * rank)
    seeds = own[:count]
    options: dict[str, Any] = {"loss_reduction": "weighted"} if way.startswith("weighted") else {}
    loader = FullGraphLoader(g, seeds, 2, plan=[own[:0]] * 2, **options)
    model = Two()
    for input_nodes, yielded, blocks in loader:
        loss = F.cross_entropy(model(blocks, g.ndata["feat"][input_nodes]), g.ndata["label"][yielded])
        if way.startswith("weighted"):
            num_seeds = torch.tensor(float(loader.num_seeds))
            dist.all_reduce(num_seeds)
            loss = loss * (world_size * loader.num_seeds / float(num_seeds))
        penalise(loss, list(model.parameters()))
    return average(world_size, model.parameters()), g.fetch_nodes(g.partition.orig_node_ids, seeds)


def assert_gradients(of_ranks: list[list[Tensor]], model: nn.Module) -> None:
    """Those of every rank are those of the model."""
    for gradients in of_ranks:
        for gradient, parameter in zip(gradients, model.parameters(), strict=True):
            assert parameter.grad is not None
            assert_close(gradient, parameter.grad, "gradient")


@pytest.mark.parametrize("way", ["as many seeds", "weighted by the script", "weighted, one rank without seeds"])
def test_second_derivatives(way: str, partitions: PartitionStore) -> None:
    graph, model = power_law(), Two()
    results = run_ranks(3, differentiate_twice, partitions.get("power_law", graph, 3), way)
    seeds = torch.cat([seeds for _, seeds in results])
    loss = F.cross_entropy(model([graph] * 2, graph.ndata["feat"])[seeds], graph.ndata["label"][seeds])
    penalise(loss, list(model.parameters()))
    assert_gradients([gradients for gradients, _ in results], model)


def test_second_derivatives_are_refused_where_ranks_weigh_differently(partitions: PartitionStore) -> None:
    """The weight was applied twice: a third off, and no error."""
    folder = partitions.get("power_law", power_law(), 3)
    for error in run_ranks_expect_errors(3, differentiate_twice, folder, "uneven"):
        assert error.type_name == "BlockError"
        assert "loss_reduction='weighted'" in error.message


class WholeStep(nn.Module):
    """Its forward is the whole step."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.model, self.way = Two(), way

    def forward(self, blocks: list[Any], x: Tensor, labels: Tensor) -> Tensor:
        with torch.enable_grad():
            loss = F.cross_entropy(self.model(blocks, x), labels)
        parameters = list(self.model.parameters())
        if self.way == "backward":
            loss.backward()
        elif self.way == "grad, evaluating":
            torch.autograd.grad(loss, parameters)
        else:
            for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                parameter.grad = gradient
        return loss.detach()


def step_inside(rank: int, world_size: int, part_config: str, way: str) -> list[Tensor]:
    g = PartitionedGraph.open(part_config)
    own = g.nodes.owned()
    seeds = own[: 5 if way == "grad, as many seeds" else 3 + 4 * rank]
    model = WholeStep(way)
    for input_nodes, yielded, blocks in FullGraphLoader(g, seeds, 2, plan=[own[:0]] * 2):
        with torch.set_grad_enabled(way != "grad, evaluating"):
            model(blocks, g.ndata["feat"][input_nodes], g.ndata["label"][yielded])
    ids = g.fetch_nodes(g.partition.orig_node_ids, yielded)
    return [ids, *([] if way == "grad, evaluating" else average(world_size, model.parameters()))]


@pytest.mark.parametrize("way", ["backward", "grad, as many seeds"])
def test_a_forward_that_is_the_whole_step(way: str, partitions: PartitionStore) -> None:
    graph, model = power_law(), Two()
    results = run_ranks(3, step_inside, partitions.get("power_law", graph, 3), way)
    seeds = torch.cat([ids for ids, *_ in results])
    F.cross_entropy(model([graph] * 2, graph.ndata["feat"])[seeds], graph.ndata["label"][seeds]).backward()
    assert_gradients([gradients for _, *gradients in results], model)


def test_gradients_that_a_forward_takes_itself_would_miss_the_weight(partitions: PartitionStore) -> None:
    folder = partitions.get("power_law", power_law(), 3)
    for error in run_ranks_expect_errors(3, step_inside, folder, "grad"):
        assert error.type_name == "BlockError"
        assert "loss.backward()" in error.message
    run_ranks(3, step_inside, folder, "grad, evaluating")


UNWEIGHTED = (
    *("deeper than the model", "deeper, repeated", "deeper, backed inside", "deeper, an object", "deeper, a closure"),
    *("the last block's size", "last hop outside", "all hops outside", "hops before a linear layer"),
    *("dgl.ops", "weights of dgl.ops", "deeper, stepped after the epoch", "given blocks, using none"),
)
WEIGHTED = (
    *("by the script", "as many seeds outside", "weights of edges outside", "two loaders, one module"),
    *("a step inside after a piece", "a step inside, repeated", "a look before"),
    *("a term of its own before", "another optimizer before", "whole model repeated", "a batch held before"),
    *("given blocks, using none, before", "two loaders, using the second"),
)


class OnRows(nn.Module):
    """Reads nothing of the blocks that it is given but how many rows there are."""

    def __init__(self, model: Two) -> None:
        super().__init__()
        self.model = model

    def forward(self, blocks: list[Any], x: Tensor) -> Tensor:
        out: Tensor = self.model.second.fc_neigh(self.model.first.fc_neigh(x[: blocks[-1].num_dst_nodes()]))
        return out


class StepInside(nn.Module):
    """The second layer, a loss and its backward."""

    def __init__(self, layer: nn.Module, *, repeats: bool) -> None:
        super().__init__()
        self.layer, self.repeats = layer, repeats

    def forward(self, block: Any, h: Tensor, labels: Tensor) -> Tensor:
        logits = checkpoint(self.layer, block, h, use_reentrant=False) if self.repeats else self.layer(block, h)
        loss = F.cross_entropy(logits, labels)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()


class Backing(nn.Module):
    """A model that backs the loss of its first rows."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, blocks: list[Any], x: Tensor, labels: Tensor) -> None:
        F.cross_entropy(self.model(blocks, x)[: len(labels)], labels).backward()  # type: ignore[no-untyped-call]


class Wrapping(nn.Module):
    """A model whose output is in an object that nobody looks into."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, blocks: list[Any], x: Tensor) -> Any:
        logits = self.model(blocks, x)
        return lambda: logits


class Second(nn.Module):
    """Is given blocks of two loaders, and uses those of one."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, unused: Any, block: Any, h: Tensor) -> Tensor:
        out: Tensor = self.layer(block, h)
        return out


class Both(nn.Module):
    """The second layer on blocks of two loaders."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, first: Any, second: Any, h: Tensor, g: Tensor) -> Tensor:
        out: Tensor = self.layer(first, h) + self.layer(second, g)
        return out


class Weigher(nn.Module):
    """Sums over weighted edges, in a module."""

    def forward(self, block: Any, h: Tensor, weights: Tensor) -> Tensor:
        return propagate(block, h, weights)


def propagate(block: Any, h: Tensor, weights: Tensor | None = None) -> Tensor:
    with block.local_scope():
        block.srcdata["h"] = h
        if weights is not None:
            block.edata["w"] = weights
            block.update_all(fn.u_mul_e("h", "w", "m"), fn.mean("m", "o"))
        else:
            block.update_all(fn.copy_u("h", "m"), fn.mean("m", "o"))
        out: Tensor = block.dstdata["o"]
        return out


def logits_of(way: str, model: Two, blocks: list[Any], x: Tensor, num_seeds: int) -> Tensor:
    """What is weighted, or not, in these ways; blocks of three layers."""
    first, second = model.first, model.second
    logits: Tensor
    if way in ("deeper than the model", "deeper, a closure", "deeper, stepped after the epoch", "by the script"):
        logits = model(blocks, x)[:num_seeds]
    elif way == "deeper, repeated":
        logits = checkpoint(model, blocks, x.requires_grad_(), use_reentrant=True)[:num_seeds]
    elif way == "deeper, an object":
        logits = Wrapping(model)(blocks, x)()[:num_seeds]
    elif way == "given blocks, using none":
        logits = OnRows(model)(blocks, x)
    elif way == "the last block's size":
        logits = second(blocks[1], first(blocks[0], x))[: blocks[-1].num_dst_nodes()]
    elif way in ("last hop outside", "as many seeds outside"):
        logits = propagate(blocks[2], second(blocks[1], first(blocks[0], x)))
    elif way == "all hops outside":
        h = propagate(blocks[1], propagate(blocks[0], x @ first.fc_neigh.weight.t()))
        logits = propagate(blocks[2], h @ second.fc_neigh.weight.t())
    elif way == "hops before a linear layer":
        h = propagate(blocks[2], propagate(blocks[1], propagate(blocks[0], x)))
        logits = second.fc_neigh(first.fc_neigh(h))
    elif way == "dgl.ops":
        logits = dgl.ops.copy_u_mean(blocks[2], second(blocks[1], first(blocks[0], x)))
    elif way == "weights of dgl.ops":
        h = propagate(blocks[1], propagate(blocks[0], x[:, :NUM_CLASSES]))
        logits = dgl.ops.u_mul_e_sum(blocks[2], h, model.second.fc_neigh.weight.sum().expand(blocks[2].num_edges(), 1))
    else:
        assert way == "weights of edges outside"
        h = second(blocks[1], first(blocks[0], x))
        with blocks[2].local_scope():
            blocks[2].srcdata["h"] = h
            blocks[2].apply_edges(fn.copy_u("h", "e"))
            weights = blocks[2].edata["e"].mean(1, keepdim=True).sigmoid()
        logits = Weigher()(blocks[2], h, weights)
    return logits


def train_deep(way: str, model: Two, optimizer: torch.optim.Optimizer, batch: Any, x: Tensor, labels: Tensor) -> None:
    """On blocks of three layers."""
    _, yielded, blocks = batch
    if way == "deeper, backed inside":
        Backing(model)(blocks, x, labels)
    elif way == "deeper, a closure":

        def close() -> float:
            optimizer.zero_grad()
            loss = F.cross_entropy(logits_of(way, model, blocks, x, len(yielded)), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            return float(loss)

        optimizer.step(close)
        return
    else:
        loss = F.cross_entropy(logits_of(way, model, blocks, x, len(yielded)), labels)
        if way == "by the script":
            share = torch.tensor(float(len(yielded)))
            dist.all_reduce(share)
            loss = loss * (dist.get_world_size() * len(yielded) / float(share))
        loss.backward()  # type: ignore[no-untyped-call]
    if way != "deeper, stepped after the epoch":
        optimizer.step()


def train_pieces(way: str, model: Two, optimizer: torch.optim.Optimizer, batch: Any, x: Tensor, labels: Tensor) -> None:
    """On blocks of two layers, which the script gives to one after the other."""
    _, _, blocks = batch
    if way == "given blocks, using none, before":
        x = x + 0.0 * OnRows(model)(blocks, x).sum()
    if way == "whole model repeated":
        logits = checkpoint(model, blocks, x.requires_grad_(), use_reentrant=True)
        F.cross_entropy(logits, labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return
    h = model.first(blocks[0], x)
    if way.startswith("a step inside"):
        StepInside(model.second, repeats=way.endswith("repeated"))(blocks[1], h, labels)
        optimizer.step()
        return
    if way == "a look before":
        torch.autograd.grad(h.pow(2).mean(), model.first.fc_neigh.weight, retain_graph=True)
    if way == "a term of its own before":
        (0.0 * h.pow(2).sum()).backward(retain_graph=True)  # type: ignore[no-untyped-call]
    if way == "another optimizer before":
        other = nn.Linear(h.shape[1], 1).double()
        other(h.detach()).mean().backward()
        torch.optim.SGD(other.parameters(), lr=0.1).step()
    F.cross_entropy(model.second(blocks[1], h), labels).backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def train_in_a_way(rank: int, world_size: int, part_config: str, way: str) -> list[Tensor]:
    """Returns ids of seeds, and gradients."""
    g = PartitionedGraph.open(part_config)
    own = g.nodes.owned()
    seeds = own[: 5 if way == "as many seeds outside" else 3 + 4 * rank]
    is_deep = way in UNWEIGHTED or way in WEIGHTED[:3]
    num_layers = 3 if is_deep else 2
    options: dict[str, Any] = {"loss_reduction": "weighted"} if way == "by the script" else {}
    loaders = [FullGraphLoader(g, seeds, num_layers, plan=[own[:0]] * num_layers, **options) for _ in range(2)]
    model = Two()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    if way == "a batch held before":
        held = next(iter(loaders[0]))
        model.first(held[2][0], g.ndata["feat"][held[0]])
    for batch, other in zip(*loaders[::-1], strict=True) if way.startswith("two loaders") else zip(loaders[0], [None]):
        input_nodes, yielded, blocks = batch
        x, labels = g.ndata["feat"][input_nodes].clone(), g.ndata["label"][yielded]
        if way == "two loaders, using the second":
            k = model.first(other[2][0], g.ndata["feat"][other[0]])
            F.cross_entropy(Second(model.second)(blocks[1], other[2][1], k), labels).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        elif way == "two loaders, one module":
            h, k = model.first(blocks[0], x), model.first(other[2][0], g.ndata["feat"][other[0]])
            logits = Both(model.second)(blocks[1], other[2][1], h, k)
            F.cross_entropy(logits, labels).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        else:
            (train_deep if is_deep else train_pieces)(way, model, optimizer, batch, x, labels)
    optimizer.step()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    return [g.fetch_nodes(g.partition.orig_node_ids, yielded), *average(world_size, model.parameters())]


@pytest.mark.parametrize("way", UNWEIGHTED)
def test_an_optimizer_does_not_step_without_the_weight(way: str, partitions: PartitionStore) -> None:
    """Gradients were those of another loss, up to 70 % off, and nothing was said."""
    for error in run_ranks_expect_errors(3, train_in_a_way, partitions.get("power_law", power_law(), 3), way):
        assert error.type_name == "BlockError"
        assert "an optimizer steps by gradients that lack the loss weight" in error.message
        assert "uses the block of layer 3, the last one" in error.message


@pytest.mark.parametrize("way", WEIGHTED)
def test_gradients_that_have_the_weight_in_other_ways(way: str, partitions: PartitionStore) -> None:
    graph, model = power_law(), Two()
    results = run_ranks(3, train_in_a_way, partitions.get("power_law", graph, 3), way)
    seeds = torch.cat([ids for ids, *_ in results])
    x, labels = graph.ndata["feat"], graph.ndata["label"]
    if way in WEIGHTED[:3]:
        logits = logits_of(way, model, [graph] * 3, x, graph.num_nodes())
    else:
        logits = model([graph] * 2, x) * (2 if way == "two loaders, one module" else 1)
    F.cross_entropy(logits[seeds], labels[seeds]).backward()
    assert_gradients([gradients for _, *gradients in results], model)
