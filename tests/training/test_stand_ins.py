# SPDX-License-Identifier: Apache-2.0
"""What stands for an outermost call while plans are made leaves everything around it as it was."""

from __future__ import annotations

import copy
import gc
import logging
import weakref
from collections.abc import Sequence
from typing import Any

import dgl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dgl_hybrid import FullGraphLoader, PartitionedGraph, average_gradients
from dgl_hybrid.planner import PlannerConfig, uniform_topology
from tests.helpers.exactness import NUM_CLASSES, Case
from tests.helpers.graphs import directed, power_law
from tests.helpers.partitions import PartitionStore
from tests.helpers.world import run_ranks
from tests.training.test_inner_calls import call_in_place_of_forward

EPOCHS = 4


class Net(nn.Module):
    """The model inside, with whatever its wrapper has it call at its end."""

    def __init__(self, num_feats: int, *, kind: str = "sage_mean") -> None:
        super().__init__()
        self.model = Case(kind=kind).build(num_feats)
        self.end: Any = None

    def forward(self, blocks: Sequence[Any], x: Tensor, end: Any = None) -> Tensor:
        out: Tensor = self.model(blocks, x)
        for function in (self.end, end):
            out = out if function is None else function(out)
        return out


class Around(nn.Module):
    """A step around a model, as a framework's module is; parts of it are reached from inside the model."""

    def __init__(self, num_feats: int, way: str) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.way, self.epoch = way, 0
        self.net = Net(num_feats)
        self.head = nn.Linear(NUM_CLASSES, NUM_CLASSES, dtype=torch.float64)
        self.norm = nn.BatchNorm1d(num_feats, dtype=torch.float64)
        self.outputs: list[Tensor] = []
        self.end = self.head if way == "part as argument" else None
        if way == "part by closure":
            self.net.end = lambda h: self.head(h)
        if way == "part by hook":
            self.net.model.register_forward_hook(lambda module, args, out: self.head(out))
        if way == "hook collects":
            self.net.register_forward_hook(lambda module, args, out: self.outputs.append(out))

    def loss_of(self, blocks: Sequence[Any], x: Tensor, labels: Tensor, rows: Any = slice(None)) -> Tensor | None:
        if "norm" in self.way:
            self.norm.train(self.training and (self.way != "frozen norm" or self.epoch > 0))
            x = self.norm(x)
        logits = self.net(blocks, x, self.end)[rows]
        loss = F.cross_entropy(logits, labels)
        for out in self.outputs:
            loss = loss + 0.1 * out[rows].square().mean()
        self.outputs.clear()
        if self.way == "backs by itself":
            loss.backward()
        self.last = loss.detach()
        return None if self.way == "backs by itself" else loss

    def forward(self, *args: Any) -> Tensor:
        raise NotImplementedError('Module is missing the required "forward" function')


class Undivided(nn.Module):
    """In the place of DDP."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any) -> Any:
        return self.module(*args)


def sparse_graph() -> dgl.DGLGraph:
    """Few vertices are read by those that train, so that plans leave some out."""
    return directed(60, 90)


def train(rank: int, world_size: int, part_config: str, way: str) -> tuple[list[float], list[Tensor], list[str], bool]:
    """Returns losses, weights at the end, what was said, and whether there is a plan."""
    g = PartitionedGraph.open(part_config)
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("dgl_hybrid.training").addHandler(handler)
    around = Around(g.ndata["feat"].shape[1], way)
    loader = FullGraphLoader(
        g, g.owned_nodes("train_mask"), 2, strategy="depcache", topology=uniform_topology(world_size)
    )

    class Batched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.around = around

        def step(self, batch: tuple[Tensor, Tensor, list[Any]]) -> Tensor | None:
            input_nodes, seeds, blocks = batch
            return around.loss_of(blocks, g.ndata["feat"][input_nodes], g.ndata["label"][seeds])

    batched = Batched()
    ddp: Any = Undivided(batched)
    if way != "backs by itself":  # DDP's own backward begins after its forward
        ddp = nn.parallel.DistributedDataParallel(batched, find_unused_parameters=True)
    optimizer = torch.optim.SGD(around.parameters(), lr=0.1)
    if way == "norm, evaluated first":
        ddp.eval()
        with torch.no_grad():
            for batch in loader:
                call_in_place_of_forward(ddp, batched.step, batch)
        ddp.train()
    losses = []
    for around.epoch in range(EPOCHS):
        for batch in loader:
            loss = call_in_place_of_forward(ddp, batched.step, batch)
            if loss is not None:
                loss.backward()
            if way == "backs by itself":
                average_gradients(around, loader)
            optimizer.step()
            optimizer.zero_grad()  # what planning would leave in gradients counts in the next step
        losses.append(around.last.item() * loader.loss_weight / world_size)
    logging.getLogger("dgl_hybrid.training").removeHandler(handler)
    return losses, [x.detach() for x in around.parameters()], messages, loader.outcome is not None


def train_plain(way: str) -> tuple[list[float], list[Tensor]]:
    """The same in one process by DGL alone."""
    graph = sparse_graph()
    x, mask, labels = graph.ndata["feat"], graph.ndata["train_mask"], graph.ndata["label"]
    around = Around(x.shape[1], way)
    optimizer = torch.optim.SGD(around.parameters(), lr=0.1)
    losses = []
    for around.epoch in range(EPOCHS):
        loss = around.loss_of([graph] * 2, x, labels[mask], mask)
        if loss is not None:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(around.last.item())
    return losses, [x.detach() for x in around.parameters()]


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize(
    "way",
    [
        *("part by closure", "part as argument", "part by hook", "hook collects"),
        *("norm", "norm, evaluated first", "frozen norm", "backs by itself"),
    ],
)
def test_what_is_around_a_stand_in_trains_as_without_a_plan(
    way: str, world_size: int, partitions: PartitionStore
) -> None:
    folder = partitions.get("sparse_seeds", sparse_graph(), world_size)
    outcomes = run_ranks(world_size, train, folder, way)
    losses, weights = train_plain(way)
    total = [sum(of_epoch) for of_epoch in zip(*(of_rank for of_rank, *_ in outcomes), strict=True)]
    assert total == pytest.approx(losses, rel=1e-9)
    for rank, (_, found, messages, is_planned) in enumerate(outcomes):
        torch.testing.assert_close(found, weights, rtol=1e-9, atol=1e-12)
        assert is_planned
        said = [message for message in messages if "Net, which it calls with the blocks of all layers" in message]
        assert len(said) == (rank == 0), messages


class Batch:
    """As a script's own is, in which nobody can put other blocks."""

    def __init__(self, blocks: list[Any], x: Tensor) -> None:
        self.blocks, self.x = blocks, x


class OfBatch(nn.Module):
    def __init__(self, net: Net) -> None:
        super().__init__()
        self.net = net

    def forward(self, batch: Batch, extra: Any = None) -> Tensor:
        out: Tensor = self.net(batch.blocks, batch.x, extra)
        return out


class Extra:
    """An argument of the model's that is no rows; holds what an epoch has made."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def __call__(self, out: Tensor) -> Tensor:
        return out


def hold_objects(rank: int, world_size: int, part_config: str, budget: float | None) -> tuple[list[str], list[bool]]:
    """Returns what was said, and whether anything of the first epoch is there in the fourth."""
    g = PartitionedGraph.open(part_config)
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("dgl_hybrid.training").addHandler(handler)
    model = OfBatch(Net(g.ndata["feat"].shape[1]))
    planner = PlannerConfig(strategy="depcache", memory_budget_bytes=budget)
    loader = FullGraphLoader(g, g.owned_nodes("train_mask"), 2, planner=planner, topology=uniform_topology(world_size))
    first: list[weakref.ref[Any]] = []
    for _ in range(EPOCHS):
        for input_nodes, seeds, blocks in loader:
            batch = Batch(blocks, g.ndata["feat"][input_nodes])
            first += [weakref.ref(batch)] * (not first)
            F.cross_entropy(model(batch), g.ndata["label"][seeds]).backward()
            del batch, blocks
    gc.collect()
    assert loader.outcome is not None
    logging.getLogger("dgl_hybrid.training").removeHandler(handler)
    return messages, [reference() is not None for reference in first]


@pytest.mark.parametrize("budget", [None, 1e9], ids=["no budget", "budget"])
def test_a_batch_of_a_plain_class_is_planned_for_and_not_held(budget: float | None, partitions: PartitionStore) -> None:
    outcomes = run_ranks(2, hold_objects, partitions.get("power_law", power_law(), 2), budget)
    for rank, (messages, are_there) in enumerate(outcomes):
        said = [message for message in messages if "stands for it" in message]
        assert len(said) == (rank == 0)
        for message in said:
            assert "OfBatch is given blocks inside of an object in which no others can be put: Net" in message
            assert ("nor kept to the memory budget" in message) == (budget is not None)
        assert are_there == [False]


class Outer(nn.Module):
    """Can be called with other blocks, as the model that it calls can."""

    def __init__(self, net: Net) -> None:
        super().__init__()
        self.net = net
        self.made: list[weakref.ref[Any]] = []

    def forward(self, blocks: list[Any], x: Tensor) -> Tensor:
        extra = Extra(self.net.model.layers[0].fc_self.weight * 2.0)
        self.made.append(weakref.ref(extra))
        out: Tensor = self.net(blocks, x, extra)
        return out


def watch_arguments(rank: int, world_size: int, part_config: str, is_given: bool) -> list[bool]:
    """Returns which of the arguments of inner calls are there at the end."""
    g = PartitionedGraph.open(part_config)
    model = Outer(Net(g.ndata["feat"].shape[1]))
    loader = FullGraphLoader(
        g,
        g.owned_nodes("train_mask"),
        2,
        topology=uniform_topology(world_size),
        **({"model": model} if is_given else {}),
    )
    for _ in range(EPOCHS):
        for input_nodes, seeds, blocks in loader:
            logits = model(blocks, g.ndata["feat"][input_nodes])
            F.cross_entropy(logits, g.ndata["label"][seeds]).backward()
            del logits
    gc.collect()
    assert loader.outcome is not None
    return [reference() is not None for reference in model.made]


@pytest.mark.parametrize("is_given", [False, True], ids=["seen", "given"])
def test_arguments_of_inner_calls_are_not_held_where_none_stands_in(is_given: bool, partitions: PartitionStore) -> None:
    for are_there in run_ranks(2, watch_arguments, partitions.get("power_law", power_law(), 2), is_given):
        assert len(are_there) == EPOCHS, "what copies have made is put back"
        assert not any(are_there)


class OfTwo(Outer):
    """Is given blocks of two loaders; nothing is planned for such a call."""

    def forward(self, first: list[Any], second: list[Any], x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        out: Tensor = super().forward(first, x) + super().forward(second, y)
        return out


def watch_arguments_of_two(rank: int, world_size: int, part_config: str) -> list[bool]:
    """Returns which of the arguments of inner calls are there at the end."""
    g = PartitionedGraph.open(part_config)
    model, feat = OfTwo(Net(g.ndata["feat"].shape[1])), g.ndata["feat"]
    loaders = [
        FullGraphLoader(g, g.owned_nodes("train_mask"), 2, topology=uniform_topology(world_size)) for _ in range(2)
    ]
    for _ in range(EPOCHS):
        for (nodes, seeds, blocks), (other_nodes, _, other_blocks) in zip(*loaders, strict=True):
            logits = model(blocks, other_blocks, feat[nodes], feat[other_nodes])
            F.cross_entropy(logits, g.ndata["label"][seeds]).backward()
            del logits
    gc.collect()
    return [reference() is not None for reference in model.made]


def test_arguments_of_inner_calls_are_not_held_where_nothing_is_planned_for(partitions: PartitionStore) -> None:
    for are_there in run_ranks(2, watch_arguments_of_two, partitions.get("power_law", power_law(), 2)):
        assert len(are_there) == 2 * EPOCHS
        assert not any(are_there)


class Casting(OfBatch):
    """Enters an autocast of its own before it calls its model, which it may make anew in every call."""

    def __init__(self, net: Net, makes_anew: bool) -> None:
        super().__init__(net)
        self.makes_anew = makes_anew

    def forward(self, batch: Batch, extra: Any = None) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            net = copy.copy(self.net.model) if self.makes_anew else self.net
            out: Tensor = net(batch.blocks, batch.x)
            return out


def plan_for_casting(rank: int, world_size: int, part_config: str, makes_anew: bool) -> tuple[list[Any], list[str]]:
    """Returns by which outcome each epoch ran, as numbers from 0, and what was said."""
    g = PartitionedGraph.open(part_config)
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("dgl_hybrid.training").addHandler(handler)
    model = Casting(Net(g.ndata["feat"].shape[1]), makes_anew)
    loader = FullGraphLoader(
        g, g.owned_nodes("train_mask"), 2, strategy="depcache", topology=uniform_topology(world_size)
    )
    outcomes = []
    for _ in range(EPOCHS):
        for input_nodes, seeds, blocks in loader:
            logits = model(Batch(blocks, g.ndata["feat"][input_nodes]))
            F.cross_entropy(logits, g.ndata["label"][seeds]).backward()
            del logits
        gc.collect()
        outcomes.append(loader.outcome)
    logging.getLogger("dgl_hybrid.training").removeHandler(handler)
    kinds = list(dict.fromkeys(map(id, outcomes)))
    return [None if outcome is None else kinds.index(id(outcome)) for outcome in outcomes], messages


def test_an_autocast_around_a_stand_in_is_planned_for_once(partitions: PartitionStore) -> None:
    for outcomes, _ in run_ranks(2, plan_for_casting, partitions.get("power_law", power_law(), 2), False):
        assert outcomes == [None, 1, 1, 1]


def test_a_stand_in_that_is_gone_is_told_of(partitions: PartitionStore) -> None:
    folder = partitions.get("power_law", power_law(), 2)
    for rank, (outcomes, messages) in enumerate(run_ranks(2, plan_for_casting, folder, True)):
        assert outcomes == [None] * EPOCHS
        assert len([x for x in messages if "no module is given the blocks of all 2 layers" in x]) == (rank == 0)
