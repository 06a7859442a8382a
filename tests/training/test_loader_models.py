# SPDX-License-Identifier: Apache-2.0
"""Models that are called in other ways: objects that hold blocks, losses inside, several models of one loader."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import dgl.nn as dglnn
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dgl_hybrid import FullGraphLoader, PartitionedGraph, infer
from dgl_hybrid.graph.model_timing import time_model
from dgl_hybrid.planner import uniform_topology
from dgl_hybrid.training import planning
from tests.helpers.graphs import NUM_CLASSES, NUM_FEATURES, power_law
from tests.helpers.partitions import PartitionStore
from tests.helpers.world import run_ranks, run_ranks_expect_errors
from tests.training.loader_cases import Centred, OtherHead, open_graph, reference_curve


@dataclass(frozen=True)
class _Batch:
    blocks: list[Any]
    x: Tensor


class _Holder:
    """As a script's own batch is, in which nobody can put other blocks."""

    def __init__(self, blocks: list[Any], x: Tensor) -> None:
        self.blocks, self.x = blocks, x


@dataclass
class _Cached:
    """Has its last block twice: nobody can put another one there."""

    blocks: list[Any]
    x: Tensor

    def __post_init__(self) -> None:
        self.last = self.blocks[-1]


class _OfBatch(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Any, *others: Any) -> Tensor:
        if isinstance(batch, _Cached):
            return self.model([*batch.blocks[:-1], batch.last], batch.x)
        return self.model(batch.blocks, batch.x)


def train_on_batches(rank: int, world_size: int, part_config: str, kind: str) -> tuple[list[float], bool]:
    g, model = open_graph(part_config)
    make = {"dataclass": _Batch, "object": _Holder, "block kept twice": _Cached, "object beside blocks": _Holder}[kind]
    loader = FullGraphLoader(g, g.owned_nodes("train_mask"), 2, topology=uniform_topology(world_size))
    ddp = nn.parallel.DistributedDataParallel(_OfBatch(model))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        for input_nodes, seeds, blocks in loader:
            beside = [blocks] if kind == "object beside blocks" else []
            loss = F.cross_entropy(ddp(make(blocks, g.ndata["feat"][input_nodes]), *beside), g.ndata["label"][seeds])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(loss.item() * loader.loss_weight / world_size)
    return losses, loader.outcome is not None


class _OwnLoss(nn.Module):
    """Is given labels, and maybe numbers of vertices; returns the loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, blocks: Sequence[Any], x: Tensor, labels: Tensor, ids: Tensor | None = None) -> Tensor:
        if ids is not None:
            x = x * (ids >= 0).unsqueeze(1)
        return F.cross_entropy(self.model(blocks, x), labels)


def train_by_own_loss(rank: int, world_size: int, part_config: str, seeds: str, gives_ids: bool) -> list[Any]:
    """Returns losses, whether there is a plan, and how often the model was timed for it."""
    g, model = open_graph(part_config)
    nids = g.owned_nodes("train_mask")
    if seeds == "all" or (seeds == "all of rank 0" and rank == 0) or (seeds == "all but of rank 0" and rank > 0):
        nids = g.owned_nodes()
    loader = FullGraphLoader(g, nids, 2, autotune=False)
    timed: list[bool] = []

    def note_times(*args: Any, **options: Any) -> Any:
        times = time_model(*args, **options)
        timed.append(times is not None)
        return times

    ddp = nn.parallel.DistributedDataParallel(_OwnLoss(model))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    losses = []
    with mock.patch.object(planning, "time_model", note_times):
        for _ in range(3):
            for input_nodes, seed_ids, blocks in loader:
                ids = (input_nodes,) if gives_ids else ()
                loss = ddp(blocks, g.ndata["feat"][input_nodes], g.ndata["label"][seed_ids], *ids)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            losses.append(loss.item() * loader.loss_weight / world_size)
    return [losses, loader.outcome is not None, timed]


@pytest.mark.parametrize(
    ("seeds", "gives_ids"),
    [("all", False), ("all of rank 0", False), ("all but of rank 0", False), ("train", False), ("train", True)],
)
def test_a_model_that_takes_labels_is_planned_for(seeds: str, gives_ids: bool, partitions: PartitionStore) -> None:
    """Where all nodes are seeds, levels have equally many rows at first, so that labels may be of any of them."""
    graph = power_law()
    runs = run_ranks(3, train_by_own_loss, partitions.get("power_law", graph, 3), seeds, gives_ids)
    assert all(is_planned for _, is_planned, _ in runs)
    assert [timed for _, _, timed in runs] == [[True]] * 3
    if seeds in ("all", "train"):
        ((expected, _, _),) = run_ranks(1, train_by_own_loss, partitions.get("power_law", graph, 1), seeds, gives_ids)
        totals = [sum(of_epoch) for of_epoch in zip(*(losses for losses, _, _ in runs), strict=True)]
        assert totals == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("kind", ["dataclass", "object", "block kept twice", "object beside blocks"])
def test_blocks_inside_an_object_train(kind: str, partitions: PartitionStore) -> None:
    """The second epoch ran the model on real blocks, on rank 0 alone: ranks waited for each other."""
    by_rank = run_ranks(3, train_on_batches, partitions.get("power_law", power_law(), 3), kind)
    total = [sum(losses) for losses in zip(*(losses for losses, _ in by_rank), strict=True)]
    assert total == pytest.approx(reference_curve(), rel=1e-9)
    assert all(planned for _, planned in by_rank), "by what the module calls, if not by itself"


def train_two_models(rank: int, world_size: int, part_config: str, how: str) -> list[bool]:
    g, model = open_graph(part_config)
    given = {"model": model} if how == "another is given" else {}
    loader = FullGraphLoader(
        g, g.owned_nodes("train_mask"), 2, topology=uniform_topology(world_size), seed=2**70, **given
    )
    mixing, other = Centred(model), OtherHead(model)
    turns: dict[str, list[list[nn.Module]]] = {
        "none mixes": [[model], [model], [model], [other], [other], [other]],
        "second": [[model], [model], [mixing], [mixing]],
        "third in one epoch": [[model], [model, other, mixing], [model, other, mixing], [model, other, mixing]],
        "another is given": [[mixing], [mixing]],
        "another is evaluated": [[], [mixing], [mixing], [mixing]],
    }
    done = []
    for chosen in turns[how]:
        for input_nodes, seeds, blocks in loader:
            x, labels = g.ndata["feat"][input_nodes], g.ndata["label"][seeds]
            for one in chosen:
                F.cross_entropy(one(blocks, x), labels).backward()
            if not chosen:
                with torch.no_grad():
                    model(blocks, x)
        done.append(loader.outcome is not None)
    return done


class _HoldsGraph(nn.Module):
    """As many DGL scripts do."""

    def __init__(self, model: nn.Module, g: PartitionedGraph) -> None:
        super().__init__()
        self.model, self.g = model, g

    def forward(self, blocks: list[object], x: Tensor) -> Tensor:
        assert self.g.num_nodes() > 0
        logits: Tensor = self.model(blocks, x)
        return logits


def train_what_holds_the_graph(rank: int, world_size: int, part_config: str, is_given: bool) -> tuple[int, bool]:
    g, inner = open_graph(part_config)
    model = _HoldsGraph(inner, g)
    ddp = nn.parallel.DistributedDataParallel(model)
    given = {"model": ddp} if is_given else {}
    loader = FullGraphLoader(
        g, g.owned_nodes("train_mask"), 2, strategy="depcache", topology=uniform_topology(world_size), **given
    )
    for _ in range(2):
        for input_nodes, seeds, blocks in loader:
            F.cross_entropy(ddp(blocks, g.ndata["feat"][input_nodes]), g.ndata["label"][seeds]).backward()
    assert loader.outcome is not None
    infer(model, g, 2)
    return sum(loader.outcome.plan.num_cached), copy.deepcopy(model).g is g


@pytest.mark.parametrize("is_given", [False, True])
def test_a_model_that_holds_its_graph_is_planned_for(is_given: bool, partitions: PartitionStore) -> None:
    folder = partitions.get("power_law", power_law(), 3)
    for num_cached, shares_graph in run_ranks(3, train_what_holds_the_graph, folder, is_given):
        assert num_cached > 0
        assert shares_graph


class _HoldsLoader(_HoldsGraph):
    loader: FullGraphLoader


def hold_loader(rank: int, world_size: int, part_config: str) -> list[bool]:
    g, inner = open_graph(part_config)
    model = _HoldsLoader(inner, g)
    model.loader = FullGraphLoader(g, g.owned_nodes("train_mask"), 2, topology=uniform_topology(world_size))
    for _ in range(2):
        for input_nodes, seeds, blocks in model.loader:
            F.cross_entropy(model(blocks, g.ndata["feat"][input_nodes]), g.ndata["label"][seeds]).backward()
    return [model.loader.outcome is not None, copy.deepcopy(model).loader is model.loader]


def test_a_model_that_holds_its_loader_is_planned_for(partitions: PartitionStore) -> None:
    assert run_ranks(2, hold_loader, partitions.get("power_law", power_law(), 2)) == [[True, True]] * 2


class _CallsByFunction(nn.Module):
    """Deep copies of a function are that function: those of the model call parts of this one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.slope, self.norm = nn.PReLU(), nn.BatchNorm1d(4)
        self.first = dglnn.SAGEConv(NUM_FEATURES, 4, "mean", activation=lambda h: self.slope(self.norm(h)))
        self.second = dglnn.SAGEConv(4, NUM_CLASSES, "mean")
        self.double()

    def forward(self, blocks: Sequence[Any], x: Tensor) -> Tensor:
        out: Tensor = self.second(blocks[1], self.first(blocks[0], x))
        return out


def plan_for_functions(rank: int, world_size: int, part_config: str) -> list[float]:
    g, _ = open_graph(part_config)
    model = _CallsByFunction()
    model.slope.weight.grad = torch.full_like(model.slope.weight, 7.0)
    loader = FullGraphLoader(g, g.owned_nodes("train_mask"), 2, model=model)
    assert loader.outcome is not None
    left = [model.slope.weight.grad.item(), float(model.norm.num_batches_tracked)]
    assert model.norm.weight.grad is None
    return [*left, *model.norm.running_mean.tolist()]


def test_parts_that_a_model_calls_by_functions_stay_as_they_are(partitions: PartitionStore) -> None:
    """Planning left gradients of made-up rows in them, and made-up rows in their running statistics: on each rank its
    own, silently.
    """
    folder = partitions.get("power_law", power_law(), 2)
    assert run_ranks(2, plan_for_functions, folder) == [[7.0, 0.0, *[0.0] * 4]] * 2


class _TakesMore(nn.Module):
    def forward(self, blocks: Sequence[Any], x: Tensor, edge_weights: Sequence[Tensor]) -> Tensor:
        raise AssertionError("nobody gives it these")


def make_for_more(rank: int, world_size: int, part_config: str) -> None:
    g, _ = open_graph(part_config)
    FullGraphLoader(g, g.owned_nodes("train_mask"), 2, model=_TakesMore())


def test_who_gives_a_model_that_is_called_otherwise_is_told_what_to_do(partitions: PartitionStore) -> None:
    for error in run_ranks_expect_errors(2, make_for_more, partitions.get("power_law", power_law(), 2)):
        assert "Called was model(blocks, x)" in error.message
        assert "leave `model=` out" in error.message


def test_a_second_model_on_a_loader_is_checked_too(partitions: PartitionStore) -> None:
    folder = partitions.get("power_law", power_law(), 3)
    assert run_ranks(3, train_two_models, folder, "none mixes") == [[False, *[True] * 5]] * 3
    for how in ("second", "third in one epoch", "another is given", "another is evaluated"):
        errors = run_ranks_expect_errors(3, train_two_models, folder, how)
        assert len(errors) == 3, how
        assert all("mixes rows of different vertices" in error.message for error in errors), how
