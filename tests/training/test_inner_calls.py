# SPDX-License-Identifier: Apache-2.0
"""Models inside of wrappers whose own call cannot be repeated: as PyTorch Lightning calls them, or a wrapper that waits
for other ranks.
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dgl_hybrid import FullGraphLoader, PartitionedGraph
from dgl_hybrid.planner import uniform_topology
from tests.helpers.exactness import Case
from tests.helpers.graphs import power_law
from tests.helpers.partitions import PartitionStore
from tests.helpers.world import run_ranks
from tests.training.loader_cases import open_graph, reference_curve


class Steps(nn.Module):
    """Has a step in which it calls its model; what it is called with by `forward` is the model's arguments, if any."""

    def __init__(self, model: nn.Module, g: PartitionedGraph, way: str) -> None:
        super().__init__()
        self.model, self.g, self.way = model, g, way
        self.teacher = Case(kind="gcn_both").build(g.ndata["feat"].shape[1]).requires_grad_(False)
        self.norm = nn.BatchNorm1d(g.ndata["feat"].shape[1], dtype=torch.float64) if way == "norms first" else None

    def forward(self, blocks: list[Any], x: Tensor) -> Tensor:
        if self.way == "has no forward":
            raise NotImplementedError('Module is missing the required "forward" function')
        logits: Tensor = self.model(blocks, x)
        return logits

    def step(self, batch: tuple[Tensor, Tensor, list[Any]], index: int) -> Tensor:
        input_nodes, seeds, blocks = batch
        x = self.g.ndata["feat"][input_nodes]
        if self.norm is not None:
            x = self.norm(x)
        if self.way == "asks a teacher":
            with torch.no_grad():
                taught = self.teacher(blocks, x)
        logits = self(blocks, x) if self.way == "calls itself" else self.model(blocks, x)
        loss = F.cross_entropy(logits, self.g.ndata["label"][seeds])
        return loss if self.way != "asks a teacher" else loss + (logits - taught).square().mean()


def call_in_place_of_forward(ddp: nn.parallel.DistributedDataParallel, method: Callable[..., Any], *args: Any) -> Any:
    """As Lightning calls a step: DDP calls `forward`, which is another method for that call."""
    inner = ddp.module
    forward = inner.forward

    def once(*given: Any) -> Any:
        inner.forward = forward
        return method(*given)

    inner.forward = once
    return ddp(*args)


def train_epoch(
    loader: FullGraphLoader, ddp: nn.parallel.DistributedDataParallel, optimizer: torch.optim.Optimizer
) -> float:
    """Returns this rank's share of the loss."""
    for index, batch in enumerate(loader):
        loss = call_in_place_of_forward(ddp, ddp.module.step, batch, index)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item() * loader.loss_weight / loader.communicator.world_size


def train_by_steps(
    rank: int, world_size: int, part_config: str, way: str, is_given: bool
) -> tuple[list[float], list[str | None], list[str]]:
    """Returns the losses of three epochs, which strategy ran in each, and what was said."""
    g, model = open_graph(part_config)
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("dgl_hybrid.training").addHandler(handler)
    steps = Steps(model, g, way)
    given = {"model": model} if is_given else {}
    loader = FullGraphLoader(
        g, g.owned_nodes("train_mask"), 2, strategy="depcache", topology=uniform_topology(world_size), **given
    )
    ddp = nn.parallel.DistributedDataParallel(steps)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    losses, strategies = [], []
    for _ in range(3):
        losses.append(train_epoch(loader, ddp, optimizer))
        strategies.append(None if loader.outcome is None else loader.outcome.plan.strategy)
    logging.getLogger("dgl_hybrid.training").removeHandler(handler)
    return losses, strategies, messages


def curve_with_norm() -> list[float]:
    """Returns the losses of one process whose features are normalised first."""
    graph = power_law()
    model = Case(kind="gcn_both").build(graph.ndata["feat"].shape[1])
    norm = nn.BatchNorm1d(graph.ndata["feat"].shape[1], dtype=torch.float64)
    optimizer = torch.optim.SGD([*model.parameters(), *norm.parameters()], lr=0.1)
    train, losses = graph.ndata["train_mask"], []
    for _ in range(3):
        logits = model([graph] * 2, norm(graph.ndata["feat"]))
        loss = F.cross_entropy(logits[train], graph.ndata["label"][train])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("is_given", [False, True], ids=["seen", "given"])
@pytest.mark.parametrize("way", ["has no forward", "calls itself", "norms first"])
@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_a_step_in_the_place_of_forward_is_planned_for_what_it_calls(
    world_size: int, way: str, is_given: bool, partitions: PartitionStore
) -> None:
    folder = partitions.get("power_law", power_law(), world_size)
    outcomes = run_ranks(world_size, train_by_steps, folder, way, is_given)
    total = [sum(losses) for losses in zip(*(losses for losses, _, _ in outcomes), strict=True)]
    assert total == pytest.approx(curve_with_norm() if way == "norms first" else reference_curve(), rel=1e-9)
    for rank, (_, strategies, messages) in enumerate(outcomes):
        assert strategies == ["depcache" if is_given else None, "depcache", "depcache"]
        assert len(messages) == (rank == 0), messages
        for message in messages:
            assert "DistributedDataParallel could not be run on the small blocks" in message
            stand_in = "Steps" if way == "calls itself" else "Model"
            assert f"{stand_in}, which it calls with the blocks of all layers, stands for it" in message


class NotACopy(nn.Module):
    """Runs as itself alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.itself = model, weakref.ref(self)

    def __deepcopy__(self, memo: Any) -> NotACopy:
        copy = NotACopy(Case(kind="gcn_both").build(8))
        copy.itself = self.itself
        return copy

    def forward(self, blocks: list[Any], x: Tensor) -> Tensor:
        if self.itself() is not self:
            raise ValueError("a copy")
        h = self.model.layers[0](blocks[0], x)
        logits: Tensor = self.model.layers[1](blocks[1], h)
        return logits


def drop_after_a_failed_plan(rank: int, world_size: int, part_config: str, way: str) -> tuple[bool, bool]:
    """Returns whether there is no plan, and whether the wrapper of a model is there after it was dropped."""
    g, model = open_graph(part_config)
    trained: nn.Module = NotACopy(model) if way == "nothing stands for it" else Steps(model, g, "has no forward")
    loader = FullGraphLoader(
        g, g.owned_nodes("train_mask"), 2, strategy="depcache", topology=uniform_topology(world_size)
    )
    ddp = nn.parallel.DistributedDataParallel(trained)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            for index, (input_nodes, seeds, blocks) in enumerate(loader):
                if way == "nothing stands for it":
                    loss = F.cross_entropy(ddp(blocks, g.ndata["feat"][input_nodes]), g.ndata["label"][seeds])
                else:
                    loss = call_in_place_of_forward(ddp, trained.step, (input_nodes, seeds, blocks), index)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        dropped = weakref.ref(ddp)
        del ddp, trained, model, optimizer, loss, blocks, input_nodes, seeds
        return loader.outcome is None, dropped() is not None
    finally:
        gc.enable()


@pytest.mark.parametrize("way", ["nothing stands for it", "its model stands for it"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_a_plan_that_cannot_be_made_holds_no_wrapper(world_size: int, way: str, partitions: PartitionStore) -> None:
    """The error has frames, and a frame that had the error would keep the wrapper until Python looks for cycles.
    Gradients of these parameters would then go to that one, too, besides another that is made for them.
    """
    folder = partitions.get("power_law", power_law(), world_size)
    for has_none, is_there in run_ranks(world_size, drop_after_a_failed_plan, folder, way):
        assert has_none == (way == "nothing stands for it")
        assert not is_there


def learn_from_a_teacher(rank: int, world_size: int, part_config: str) -> list[float]:
    g = PartitionedGraph.open(part_config)
    normed = Case(kind="gcn_both", batch_norm=True).build(g.ndata["feat"].shape[1])
    steps = Steps(normed, g, "asks a teacher")
    loader = FullGraphLoader(g, g.owned_nodes("train_mask"), 2, topology=uniform_topology(world_size))
    ddp = nn.parallel.DistributedDataParallel(steps)
    optimizer = torch.optim.SGD(normed.parameters(), lr=0.1)
    losses = [train_epoch(loader, ddp, optimizer) for _ in range(3)]
    assert loader.outcome is not None
    return losses


def test_batch_norm_of_what_nothing_stands_for_is_planned_for(partitions: PartitionStore) -> None:
    """The teacher is called first and stands for the step; it has no batch norm, where the student has."""
    (expected,) = run_ranks(1, learn_from_a_teacher, partitions.get("power_law", power_law(), 1))
    for world_size in (2, 3):
        by_rank = run_ranks(world_size, learn_from_a_teacher, partitions.get("power_law", power_law(), world_size))
        assert [sum(losses) for losses in zip(*by_rank, strict=True)] == pytest.approx(expected, rel=1e-9)


class LayerByLayer(nn.Module):
    """Gives each of its layers all blocks; works on the graph that it knows alone."""

    class Layer(nn.Module):
        def __init__(self, layer: nn.Module, index: int) -> None:
            super().__init__()
            self.layer, self.index = layer, index

        def forward(self, blocks: list[Any], h: Tensor) -> Tensor:
            out: Tensor = self.layer(blocks[self.index], h)
            return out

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Layer(layer, index) for index, layer in enumerate(model.layers))
        self.num_rows = 0

    def forward(self, blocks: list[Any], x: Tensor) -> Tensor:
        self.num_rows = self.num_rows or len(x)
        if len(x) != self.num_rows:
            raise RuntimeError("another graph")
        for layer in self.layers:
            x = layer(blocks, x)
        return x


def train_layer_by_layer(rank: int, world_size: int, part_config: str, is_given: bool) -> list[float]:
    g, model = open_graph(part_config)
    given = {"model": model} if is_given else {}
    loader = FullGraphLoader(
        g, g.owned_nodes("train_mask"), 2, strategy="depcache", topology=uniform_topology(world_size), **given
    )
    wrapper, losses = LayerByLayer(model), []
    for _ in range(3):
        for input_nodes, seeds, blocks in loader:
            loss = F.cross_entropy(wrapper(blocks, g.ndata["feat"][input_nodes]), g.ndata["label"][seeds])
            loss.backward()
        losses.append(loss.item())
    assert (loader.outcome is not None) == is_given
    return losses


@pytest.mark.parametrize("is_given", [False, True], ids=["planned for", "beside another"])
def test_a_layer_that_is_given_all_blocks_stands_for_nothing(is_given: bool, partitions: PartitionStore) -> None:
    """It uses one of them: taken for the model it would be refused for that."""
    for losses in run_ranks(3, train_layer_by_layer, partitions.get("power_law", power_law(), 3), is_given):
        assert losses == [losses[0]] * 3


def train_beside_a_normed_step(rank: int, world_size: int, part_config: str) -> tuple[list[float], int]:
    """A model that is planned for comes first; a step calls one with batch norm, which planning has to know of."""
    g, plain = open_graph(part_config)
    normed = Case(kind="gcn_both", batch_norm=True).build(g.ndata["feat"].shape[1])
    steps = Steps(normed, g, "has no forward")
    loader = FullGraphLoader(g, g.owned_nodes("train_mask"), 2, topology=uniform_topology(world_size))
    ddps = [nn.parallel.DistributedDataParallel(model) for model in (plain, steps)]
    optimizer = torch.optim.SGD(steps.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        for index, batch in enumerate(loader):
            input_nodes, seeds, blocks = batch
            logits = ddps[0](blocks, g.ndata["feat"][input_nodes])
            F.cross_entropy(logits, g.ndata["label"][seeds]).backward()
            loss = call_in_place_of_forward(ddps[1], steps.step, batch, index)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(loss.item() * loader.loss_weight / world_size)
    assert loader.outcome is not None
    return losses, loader.outcome.dense_below


def test_what_another_step_calls_is_checked_too(partitions: PartitionStore) -> None:
    outcomes = run_ranks(3, train_beside_a_normed_step, partitions.get("power_law", power_law(), 3))
    assert {dense_below for _, dense_below in outcomes} == {2}, "batch norm is over the rows of level 1"


def plan_twice(rank: int, world_size: int, part_config: str) -> tuple[int, int]:
    """Returns how many candidates a plan had that was made for a step, and how many when epochs had drifted."""
    g, model = open_graph(part_config)
    steps = Steps(model, g, "has no forward")
    loader = FullGraphLoader(g, g.owned_nodes("train_mask"), 2)
    ddp = nn.parallel.DistributedDataParallel(steps)
    for _ in range(2):
        for index, batch in enumerate(loader):
            call_in_place_of_forward(ddp, steps.step, batch, index).backward()
    choice = loader._choice
    before = choice.outcome
    after = choice.plan_anew()
    assert before is not None
    assert after is not before, "the candidates of before have another turn where no plan can be made"
    assert after.candidates[0] is not before.candidates[0]
    return len(before.candidates), len(after.candidates)


def test_plans_for_a_step_are_made_anew_when_epochs_drift(partitions: PartitionStore) -> None:
    for num_before, num_after in run_ranks(2, plan_twice, partitions.get("power_law", power_law(), 2)):
        assert num_before > 1
        assert num_after > 1
