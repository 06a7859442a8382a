# SPDX-License-Identifier: Apache-2.0
"""How a script uses the loader: binding to a model, two loaders at once, stable reads, errors on every rank."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import re
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import dgl
import dgl.nn as dglnn
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from dgl.data.utils import load_tensors, save_tensors
from dgl.distributed import DistTensor
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dgl_hybrid import FullGraphLoader, PartitionedGraph, infer, partition_graph
from dgl_hybrid.errors import BlockError, ExchangeError, PartitionError, PlanError
from dgl_hybrid.exchange.shared_memory_transport import SharedMemoryTransport
from dgl_hybrid.graph.model_timing import time_model
from dgl_hybrid.planner import PlannerConfig, uniform_topology
from dgl_hybrid.training import planning
from dgl_hybrid.training.fields import StoredFields
from dgl_hybrid.training.gradients import average_gradients
from dgl_hybrid.training.loader_arguments import dense_below_of, num_layers_of
from tests.helpers.exactness import Case, Model, assert_close
from tests.helpers.graphs import power_law
from tests.helpers.partitions import PartitionStore
from tests.helpers.world import run_ranks, run_ranks_expect_errors


def open_graph(part_config: str) -> tuple[PartitionedGraph, Model]:
    g = PartitionedGraph.open(part_config)
    return g, Case(kind="gcn_both").build(g.ndata["feat"].shape[1])


def train_without_model(rank: int, world_size: int, part_config: str, **options: object) -> list[float]:
    """The loader is built before the model and never told of it."""
    g = PartitionedGraph.open(part_config)
    loader = FullGraphLoader(
        g,
        g.owned_nodes("train_mask"),
        dgl.dataloading.NeighborSampler([10, 25]),
        topology=uniform_topology(world_size),
        batch_size=1024,
        shuffle=True,
        drop_last=False,
    )
    model = Case(kind="gcn_both", **options).build(g.ndata["feat"].shape[1])
    ddp = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    losses = []
    planned = []
    for _ in range(3):
        for input_nodes, seeds, blocks in loader:
            loss = F.cross_entropy(ddp(blocks, g.ndata["feat"][input_nodes]), g.ndata["label"][seeds])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(loss.item() * loader.loss_weight / world_size)
        planned.append(loader.outcome is not None)
    assert planned == [False, True, True]
    return losses


def train_beside_a_normed_one(rank: int, world_size: int, part_config: str, how: str) -> list[float]:
    """Of two models that share a loader the one with batch norm, which planning has to know of; its losses."""
    g, plain = open_graph(part_config)
    normed = Case(kind="gcn_both", batch_norm=True).build(g.ndata["feat"].shape[1])
    given = {"model": normed} if how == "given, second" else {}
    loader = FullGraphLoader(g, g.owned_nodes("train_mask"), 2, topology=uniform_topology(world_size), **given)
    chosen = [_OtherHead(plain), plain, normed] if how == "third" else [plain, normed]
    ddps = [nn.parallel.DistributedDataParallel(model) for model in chosen]
    optimizer = torch.optim.SGD(ddps[-1].parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        for input_nodes, seeds, blocks in loader:
            for ddp in ddps:
                with torch.autocast("cpu", enabled=how == "given, second" and ddp is ddps[0]):
                    logits = ddp(blocks, g.ndata["feat"][input_nodes])
                loss = F.cross_entropy(logits, g.ndata["label"][seeds])
                optimizer.zero_grad()
                loss.backward()
            optimizer.step()
        losses.append(loss.item() * loader.loss_weight / world_size)
    outcome = loader.outcome
    assert outcome is not None
    assert outcome.dense_below == 2, "batch norm is over the rows of level 1"
    assert dense_below_of(loader.best_plan, 2) == 2, "so will it be for who is given this plan"
    return losses


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


@pytest.mark.parametrize("batch_norm", [False, True])
def test_plans_after_the_first_forward_when_not_given_a_model(batch_norm: bool, partitions: PartitionStore) -> None:
    folder = partitions.get("power_law", power_law(), 3)
    by_rank = run_ranks(3, train_without_model, folder, batch_norm=batch_norm)
    total = [sum(losses) for losses in zip(*by_rank, strict=True)]
    assert total == pytest.approx(reference_curve(batch_norm=batch_norm), rel=1e-9)


@pytest.mark.parametrize("how", ["second", "third", "given, second"])
def test_batch_norm_of_any_model_on_a_loader_is_planned_for(how: str, partitions: PartitionStore) -> None:
    """One without comes first in each epoch; from the second on vertices are left out that no model needs."""
    folder = partitions.get("power_law", power_law(), 3)
    by_rank = run_ranks(3, train_beside_a_normed_one, folder, how)
    total = [sum(losses) for losses in zip(*by_rank, strict=True)]
    assert total == pytest.approx(reference_curve(batch_norm=True), rel=1e-9)


def train_and_validate(rank: int, world_size: int, part_config: str) -> tuple[list[float], Tensor, Tensor]:
    g, model = open_graph(part_config)
    ddp = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    train = FullGraphLoader(g, g.owned_nodes("train_mask"), 2, model=model, topology=uniform_topology(world_size))
    seeds, topology = ~g.ndata["train_mask"].local, uniform_topology(world_size)
    valid = FullGraphLoader(g, seeds, 2, model=model, strategy="depcache", topology=topology)
    losses = []
    for _ in range(3):
        for input_nodes, seeds, blocks in train:
            loss = F.cross_entropy(ddp(blocks, g.ndata["feat"][input_nodes]), g.ndata["label"][seeds])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(loss.item() * train.loss_weight / world_size)
        infer(ddp, g, 2, loader=valid)
        assert model.training
    nids, logits = infer(ddp, g, 2)
    return losses, g.partition.orig_node_ids[nids - g.nodes.start], logits


@pytest.mark.parametrize("world_size", [1, 3])
def test_train_and_validation_loaders_side_by_side(world_size: int, partitions: PartitionStore) -> None:
    results = run_ranks(world_size, train_and_validate, partitions.get("power_law", power_law(), world_size))
    assert [sum(x) for x in zip(*(r[0] for r in results), strict=True)] == pytest.approx(reference_curve(), rel=1e-9)
    graph = power_law()
    model = Case(kind="gcn_both").build(graph.ndata["feat"].shape[1])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train = graph.ndata["train_mask"]
    for _ in range(3):
        loss = F.cross_entropy(model([graph] * 2, graph.ndata["feat"])[train], graph.ndata["label"][train])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    order = torch.argsort(torch.cat([r[1] for r in results]))
    logits = torch.cat([r[2] for r in results])[order]
    assert_close(logits, model([graph] * 2, graph.ndata["feat"]).detach(), "inference")


def read_identities(rank: int, world_size: int, part_config: str) -> list[bool]:
    g, _ = open_graph(part_config)
    sampler = dgl.dataloading.MultiLayerFullNeighborSampler(
        2, prefetch_node_feats=["feat"], prefetch_labels=["label"], prefetch_edge_feats=["w"]
    )
    foreign = torch.arange(g.num_nodes())[~g.nodes.is_owned(torch.arange(g.num_nodes()))]
    loader = FullGraphLoader(g, g.owned_nodes(), sampler, plan=[foreign, foreign])
    first, seeds, blocks = next(iter(loader))
    second, _, _ = next(iter(loader))
    x = g.ndata["feat"][first]
    checks = [
        first is second,
        x is g.ndata["feat"][second],
        blocks[0].srcdata["feat"] is x,
        blocks[-1].dstdata["label"] is g.ndata["label"][seeds],
        blocks[0].edata["w"] is g.edata["w"][blocks[0].edata[dgl.EID]],
        blocks[0].srcdata[dgl.NID] is first,
        torch.equal(blocks[0].to("cpu").srcdata[dgl.NID], first),
        len(loader) == 1,
    ]
    g.ndata["feat"].set_local(g.ndata["feat"].local * 2)
    checks.append(torch.equal(g.ndata["feat"][first], 2 * x))
    return checks


def test_reads_of_a_loaders_ids_are_stable(partitions: PartitionStore) -> None:
    for checks in run_ranks(3, read_identities, partitions.get("power_law", power_law(), 3)):
        assert all(checks), checks


def hold_edges(rank: int, world_size: int, part_config: str, plan: str) -> dict[str, Any]:
    g, model = open_graph(part_config)
    planner = PlannerConfig(strategy=plan)
    topology = uniform_topology(world_size)
    loader = FullGraphLoader(g, g.owned_nodes(), 2, model=model, planner=planner, topology=topology)
    for _ in range(3):
        for input_nodes, seeds, blocks in loader:
            F.cross_entropy(model(blocks, g.ndata["feat"][input_nodes]), g.ndata["label"][seeds]).backward()
    num_edges = blocks[-1].num_edges()
    own = {value.untyped_storage().data_ptr() for value in vars(g.partition).values() if isinstance(value, Tensor)}

    def held() -> int:
        """Tensors of eight bytes for every edge, each memory once, without the partition's own."""
        gc.collect()
        alive = [thing for thing in gc.get_objects() if isinstance(thing, Tensor)]
        wide = [x for x in alive if x.dtype == torch.int64 and x.dim() == 1 and len(x) >= num_edges]
        return len({x.untyped_storage().data_ptr() for x in wide} - own)

    before = held()
    ids = blocks[0].edata[dgl.EID]
    return {
        "is_telling": num_edges > 2 * g.num_nodes(),
        "before": before,
        "asked": held(),
        "is_asked": len(ids) == blocks[0].num_edges(),
    }


@pytest.mark.parametrize("plan", ["depcache", "depcomm"])
def test_nothing_takes_eight_bytes_for_every_edge_unless_asked_for(plan: str, partitions: PartitionStore) -> None:
    graph = power_law(num_edges=1500)
    for result in run_ranks(3, hold_edges, partitions.get("power_law_of_many_edges", graph, 3), plan):
        assert result["is_telling"], "else ids of vertices are as many"
        assert (result["before"], result["asked"], result["is_asked"]) == (0, 1, True)


class Checkpointed(nn.Module):
    def __init__(self, in_feats: int, use_reentrant: bool | None) -> None:
        super().__init__()
        self.first = dglnn.GraphConv(in_feats, 6, allow_zero_in_degree=True)
        self.second = dglnn.GATConv(6, 3, 1, feat_drop=0.2, attn_drop=0.3, allow_zero_in_degree=True)
        self.dropout = nn.Dropout(0.5)
        self.use_reentrant = use_reentrant

    def _first(self, block: object, x: Tensor) -> Tensor:
        return torch.tanh(self.first(block, self.dropout(x)))

    def forward(self, blocks: list[object], x: Tensor) -> Tensor:
        if self.use_reentrant is None:
            h = self._first(blocks[0], x)
            return self.second(blocks[1], self.dropout(h)).mean(1)
        h = checkpoint(self._first, blocks[0], x, use_reentrant=self.use_reentrant)
        return checkpoint(self.second, blocks[1], self.dropout(h), use_reentrant=self.use_reentrant).mean(1)


def train_checkpointed(rank: int, world_size: int, part_config: str, use_reentrant: bool | None) -> list[Tensor]:
    g = PartitionedGraph.open(part_config)
    torch.manual_seed(0)
    model = Checkpointed(g.ndata["feat"].shape[1], use_reentrant).double()
    topology = uniform_topology(world_size)
    loader = FullGraphLoader(g, g.owned_nodes("train_mask"), 2, strategy="depcomm", topology=topology, seed=1)
    grads = []
    for _ in range(2):
        for input_nodes, seeds, blocks in loader:
            x = g.ndata["feat"][input_nodes].clone().requires_grad_()
            loss = F.cross_entropy(model(blocks, x), g.ndata["label"][seeds])
            model.zero_grad()
            loss.backward()
            for parameter in model.parameters():
                grads.append(g.communicator.sum_(parameter.grad.clone()) / world_size)
    return grads


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_repeats_masks_and_exchanges(use_reentrant: bool, partitions: PartitionStore) -> None:
    folder = partitions.get("power_law", power_law(), 3)
    plain = run_ranks(3, train_checkpointed, folder, None)
    recomputed = run_ranks(3, train_checkpointed, folder, use_reentrant)
    alone = run_ranks(1, train_checkpointed, partitions.get("power_law", power_law(), 1), None)
    for a, b, c in zip(plain[0], recomputed[0], alone[0], strict=True):
        assert_close(b, a, "recomputed gradient")
        assert_close(a, c, "gradient on three ranks")


def train_epoch(
    g: PartitionedGraph, loader: FullGraphLoader, model: nn.Module, optimizer: torch.optim.Optimizer
) -> float:
    for input_nodes, seeds, blocks in loader:
        loss = F.cross_entropy(model(blocks, g.ndata["feat"][input_nodes]), g.ndata["label"][seeds])
        optimizer.zero_grad()
        loss.backward()
        average_gradients(model, loader)
        optimizer.step()
    return loss.item()


def train_with_looks(rank: int, world_size: int, part_config: str, between: str) -> list[float]:
    """Losses of training steps with dropout, each after something that is no training step."""
    g = PartitionedGraph.open(part_config)
    model = Case(kind="gcn_both", dropout=0.5).build(g.ndata["feat"].shape[1])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = FullGraphLoader(g, g.owned_nodes("train_mask"), 2, plan=[torch.arange(0)] * 2, seed=3)
    losses = []
    for _ in range(3):
        if between == "evaluation":
            model.eval()
            for input_nodes, _, blocks in loader:
                with torch.no_grad():
                    model(blocks, g.ndata["feat"][input_nodes])
            model.train()
        elif between == "a look":
            _, seeds, blocks = next(iter(loader))
            assert blocks[-1].num_dst_nodes() == len(seeds)
        losses.append(train_epoch(g, loader, model, optimizer))
    return losses


@pytest.mark.parametrize("between", ["evaluation", "a look"])
def test_what_draws_no_masks_leaves_those_of_later_steps_alone(between: str, partitions: PartitionStore) -> None:
    """Every batch that was taken counted as a step, so a run with other evaluations was another run."""
    folder = partitions.get("power_law", power_law(), 2)
    plain = run_ranks(2, train_with_looks, folder, "nothing")
    assert run_ranks(2, train_with_looks, folder, between) == plain
    assert len(set(plain[0])) == 3


def train_and_resume(rank: int, world_size: int, part_config: str, resumed: str) -> tuple[list[float], dict[str, int]]:
    """Losses of four epochs, the last two of them by another loader if the run is interrupted; the last state."""
    g = PartitionedGraph.open(part_config)
    model = Case(kind="gcn_both", dropout=0.5).build(g.ndata["feat"].shape[1])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def make_loader(seed: int) -> FullGraphLoader:
        return FullGraphLoader(g, g.owned_nodes("train_mask"), 2, plan=[torch.arange(0)] * 2, seed=seed)

    loader = make_loader(3)
    assert loader.state_dict() == {"steps": 0, "seed": 3}
    losses = []
    for epoch in range(4):
        if epoch == 2:
            if resumed == "after an evaluation":
                with torch.no_grad():
                    input_nodes, _, blocks = next(iter(loader))
                    model.eval()(blocks, g.ndata["feat"][input_nodes])
                    model.train()
            state = loader.state_dict()
            assert state == {"steps": 2, "seed": 3}
            if resumed:
                loader = make_loader(4)
                if resumed == "after a step of its own":
                    input_nodes, _, blocks = next(iter(loader))
                    model(blocks, g.ndata["feat"][input_nodes])
                if resumed != "without the state":
                    loader.load_state_dict(state)
        losses.append(train_epoch(g, loader, model, optimizer))
    return losses, loader.state_dict()


def test_a_loader_that_loads_a_state_goes_on_with_the_same_masks(partitions: PartitionStore) -> None:
    """A run that went on from a checkpoint drew the masks of its first epochs again."""
    folder = partitions.get("power_law", power_law(), 2)
    straight = run_ranks(2, train_and_resume, folder, "")
    for resumed in ("at once", "after an evaluation", "after a step of its own"):
        assert run_ranks(2, train_and_resume, folder, resumed) == straight, resumed
    assert [state for _, state in straight] == [{"steps": 4, "seed": 3}] * 2
    other = run_ranks(2, train_and_resume, folder, "without the state")
    for (losses, _), (expected, _) in zip(other, straight, strict=True):
        assert losses[:2] == expected[:2]
        assert losses[2] != expected[2], "masks of another seed"


def load_with_numbers_of_numpy(rank: int, world_size: int, part_config: str) -> list[int | None]:
    g, _ = open_graph(part_config)
    nothing = [torch.arange(0)] * 2
    rows = [
        FullGraphLoader(g, g.owned_nodes("train_mask"), 2, plan=nothing, chunk_rows=number)._builder.chunk_rows  # type: ignore[arg-type]
        for number in (np.int64(5), torch.tensor(6), 7.0, None)
    ]
    for share in (np.float32(0.5), np.int64(1), torch.tensor(0.1), np.True_):
        FullGraphLoader(g, g.owned_nodes("train_mask"), 2, plan=nothing, autotune=share)  # type: ignore[arg-type]
    return rows


def test_numbers_of_numpy_are_numbers(partitions: PartitionStore) -> None:
    folder = partitions.get("power_law", power_law(), 1)
    assert run_ranks(1, load_with_numbers_of_numpy, folder) == [[5, 6, 7, None]]
    for budget in (np.int64(10**9), np.float32(1e9), torch.tensor(1e9)):
        PlannerConfig(memory_budget_bytes=budget)  # type: ignore[arg-type]


def load_wrong_states(rank: int, world_size: int, part_config: str) -> tuple[dict[str, str], dict[str, int]]:
    g, _ = open_graph(part_config)
    loader = FullGraphLoader(g, g.owned_nodes("train_mask"), 2, plan=[torch.arange(0)] * 2, seed=3)
    messages = {}
    wrong: dict[str, dict[str, Any]] = {
        "of something else": {"steps": 1},
        "with more": {"steps": 1, "seed": 2, "epoch": 3},
        "as text": {"steps": "1", "seed": 2},
        "negative": {"steps": -1, "seed": 2},
    }
    for name, state in wrong.items():
        try:
            loader.load_state_dict(state)
        except ValueError as error:
            messages[name] = str(error)
    unchanged = loader.state_dict()
    loader.load_state_dict({"steps": 0, "seed": -1})  # any integer is one
    assert loader.state_dict()["seed"] == -1
    return messages, unchanged


def test_a_wrong_state_is_refused(partitions: PartitionStore) -> None:
    ((messages, state),) = run_ranks(1, load_wrong_states, partitions.get("power_law", power_law(), 1))
    assert set(messages) == {"of something else", "with more", "as text", "negative"}
    for message in messages.values():
        assert "expected what FullGraphLoader.state_dict returns: steps and seed (got {" in message
    assert state == {"steps": 0, "seed": 3}, "refused, it changes nothing"


def make_loader(rank: int, world_size: int, part_config: str, mistake: str) -> None:
    g, model = open_graph(part_config)
    seeds, options = g.owned_nodes("train_mask"), {"topology": uniform_topology(world_size)}
    sampler: Any = 2
    if mistake == "seed out of range" and rank == 1:
        seeds = torch.tensor([0, g.num_nodes()])
    elif mistake == "no seeds":
        seeds = seeds[:0]
    elif mistake == "float seeds" and rank == 0:
        seeds = seeds.double()
    elif mistake == "short mask" and rank == world_size - 1:
        seeds = torch.ones(3, dtype=torch.bool)
    elif mistake == "strategy":
        options["strategy"] = "best"
    elif mistake == "two strategies":
        options |= {"strategy": "hybrid", "planner": PlannerConfig(strategy="depcomm")}
    elif mistake == "plan depth":
        options["plan"] = [seeds[:0]] * 3
    elif mistake == "model depth":
        options["model"] = Case(kind="gcn_both", num_layers=1).build(g.ndata["feat"].shape[1])
    elif mistake == "last norm":
        options["model"] = _Normalised(model)
    elif mistake == "unlike" and rank == 2:
        options["plan"] = [seeds[:0]] * 2
    elif mistake == "unlike strategies" and rank == 1:
        options["strategy"] = "depcache"
    elif mistake == "unlike rates" and rank == 0:
        options["topology"] = None
    elif mistake == "no memory for an order of rows":
        options["row_order"] = "locality"
        if rank == 1:
            g.places = mock.Mock(find=mock.Mock(side_effect=MemoryError("no room for 5 clusters")))
    elif mistake == "unlike row orders" and rank == 1:
        options["row_order"] = "id"
    elif mistake == "float plan":
        options["plan"] = [torch.tensor([1.5]), seeds[:0]]
    elif mistake == "mask by name" and rank == 0:
        seeds = "train_mask"
    elif mistake == "no ids" and rank == 2:
        seeds = None
    elif mistake == "field of the whole graph" and rank == 1:
        seeds = object.__new__(_Field)
    elif mistake == "plan by folder":
        options["plan"] = "plans"
    elif mistake == "planner as a dictionary" and rank == 1:
        options["planner"] = {"strategy": "depcomm"}
    elif mistake == "half a row":
        options["chunk_rows"] = 1.5
    elif mistake == "autotune in words":
        options["autotune"] = "yes"
    elif mistake == "model by name":
        options["model"] = "sage"
    elif mistake == "mask of two columns" and rank == 0:
        with g.communicator.agreed():
            g.owned_nodes("feat")
    elif mistake == "mask of two columns":
        with g.communicator.agreed():
            pass
    elif mistake == "no such device" and rank == 1:
        options["device"] = "gpu"
    elif mistake == "no layers" and rank == 2:
        sampler = 0
    elif mistake == "nothing to prefetch" and rank == 0:
        sampler = dgl.dataloading.NeighborSampler([1, 1], prefetch_edge_feats=["colour"])
    elif mistake == "two types to prefetch" and rank == 1:
        sampler = dgl.dataloading.NeighborSampler([1, 1], prefetch_labels={"a": ["label"], "b": ["label"]})
    elif mistake == "no input":
        options["model"] = model
        if rank == 1:
            g.ndata = StoredFields({"x1": torch.zeros(len(g.nodes.owned()), 2)}, g.nodes, g.row_sets, "node")
    elif mistake == "function to infer":
        infer(lambda blocks, x: x, g, 2)  # type: ignore[arg-type]
    elif mistake == "mixing in a dataclass":
        options["model"] = _Wrapped(_Centred(model))
    elif mistake == "mixing":
        options["model"] = _Centred(model)
    FullGraphLoader(g, seeds, sampler, **options)


MISTAKE_TIMEOUT_S = 120.0
"""Ranks that are left alone wait for three quarters of it."""


class _Field(DistTensor):  # type: ignore[misc]
    """Of a `DistGraph`: every number that is asked for comes from a server."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: Any) -> Tensor:
        raise AssertionError("nobody is to read it number by number")

    def __del__(self) -> None: ...


class _Normalised(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.norm = model, nn.BatchNorm1d(3).double()

    def forward(self, blocks: list[object], x: Tensor) -> Tensor:
        return self.norm(self.model(blocks, x))


@dataclass
class _Output:
    logits: Tensor


class _Wrapped(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, blocks: list[object], x: Tensor) -> _Output:
        return _Output(self.model(blocks, x))


class _Centred(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, blocks: list[object], x: Tensor) -> Tensor:
        return self.model(blocks, x - x.mean(0))


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ("seed out of range", r"seeds must lie in \[0, 60\) \(got 60, and 1 such in all\)"),
        ("no seeds", "no rank has a seed"),
        ("float seeds", "one-dimensional integer tensor"),
        ("short mask", "a mask of seeds must have"),
        ("strategy", "unknown strategy .*choose one of hybrid"),
        ("two strategies", r"strategy='hybrid' and planner=PlannerConfig\(strategy='depcomm'\) contradict each other"),
        ("plan depth", "the plan has 3 layers, but the model has 2"),
        (
            "unlike",
            "make the same loader: plan given is 0 on rank 0 and 1 on rank 2$",
        ),
        ("unlike strategies", r"make the same loader: strategy is \d on rank 0 and \d on rank 1$"),
        ("unlike rates", "make the same loader: rates given is 0 on rank 0 and 1 on rank 1$"),
        ("no memory for an order of rows", "no room for 5 clusters"),
        ("unlike row orders", r"loader: row_order \(of auto, id, locality\) is 0 on rank 0 and 1 on rank 1$"),
        ("float plan", "the ids of a plan must be integers"),
        ("mask by name", r"nids must be ids of nodes.*got str 'train_mask'\): g\.owned_nodes\('train_mask'\), say"),
        ("no ids", r"nids must be ids of nodes, or a mask over this rank's own \(got NoneType None\)"),
        ("field of the whole graph", r"nids must be ids of nodes.*\(got _Field\): g\.owned_nodes\('train_mask'\), say"),
        (
            "plan by folder",
            r"plan must be a DependencyPlan, or ids by level \(got 'plans'\): .*load_plan\(folder, rank\)",
        ),
        ("planner as a dictionary", r"planner must be a PlannerConfig \(got dict\)"),
        ("half a row", r"chunk_rows must be a positive integer or None \(got 1\.5\)"),
        ("autotune in words", r"autotune must be a bool or a share of at least 0 \(got 'yes'\)"),
        ("model by name", r"model must be the torch\.nn\.Module that is trained, or None \(got str\)"),
        ("mask of two columns", r"a mask has one entry for each node \(field 'feat' has \(\d+,\)\)"),
        ("no such device", "Expected one of cpu, cuda"),
        ("no layers", r"the number of layers must be at least 1 \(got 0\)"),
        ("nothing to prefetch", "no edge field .{1,3}colour"),
        ("two types to prefetch", r"prefetch_labels names fields of 2 types \(a, b\)"),
        ("no input", r"cannot tell which node field is the model's input.* \(got fields \['x1'\]\)"),
        ("function to infer", r"infer needs a torch\.nn\.Module, called as model\(blocks, x\) \(got function\)"),
        ("model depth", "zip|does not use the blocks"),
        ("last norm", "normalises the output of its last layer"),
        ("mixing", "mixes rows of different vertices"),
        ("mixing in a dataclass", "mixes rows of different vertices"),
    ],
)
def test_a_mistake_on_one_rank_is_raised_on_all(mistake: str, message: str, partitions: PartitionStore) -> None:
    folder = partitions.get("power_law", power_law(), 3)
    errors = run_ranks_expect_errors(3, make_loader, folder, mistake, timeout=MISTAKE_TIMEOUT_S)
    assert len(errors) == 3
    for error in errors:
        assert re.search(message, error.message), error.message


def open_wrong_number(rank: int, world_size: int, part_config: str) -> None:
    PartitionedGraph.open(part_config)


def test_other_number_of_ranks_than_parts(partitions: PartitionStore) -> None:
    errors = run_ranks_expect_errors(2, open_wrong_number, partitions.get("power_law", power_law(), 3))
    assert all("has 3 parts, but 2 ranks are running" in error.message for error in errors)
    assert not any("init_process_group" in error.message for error in errors)


def test_who_opens_a_graph_before_the_process_group_is_told(partitions: PartitionStore) -> None:
    """Under torchrun each of two ranks was told that one was running."""
    with pytest.raises(PartitionError, match=r"has 3 parts, but 1 ranks .*call init_process_group before"):
        PartitionedGraph.open(partitions.get("power_law", power_law(), 3))


def evaluate_twice(rank: int, world_size: int, part_config: str) -> list[bool]:
    """A loader that only ever evaluates plans from its first forward as well, without gradients though it is."""
    g, model = open_graph(part_config)
    planned = []
    for guard in (torch.no_grad, torch.inference_mode):
        loader = FullGraphLoader(g, g.owned_nodes(), 2, topology=uniform_topology(world_size))
        for _ in range(2):
            with guard():
                for input_nodes, _, blocks in loader:
                    model.eval()(blocks, g.ndata["feat"][input_nodes])
            planned.append(loader.outcome is not None)
    return planned


def test_a_loader_that_only_evaluates_plans_too(partitions: PartitionStore) -> None:
    folder = partitions.get("power_law", power_law(), 3)
    assert run_ranks(3, evaluate_twice, folder) == [[False, True, False, True]] * 3


def train_with_given_plan(rank: int, world_size: int, part_config: str, mixes: bool) -> list[float]:
    g, model = open_graph(part_config)
    chosen: nn.Module = _Centred(model) if mixes else _Unrepeatable(model)
    loader = FullGraphLoader(g, g.owned_nodes("train_mask"), 2, plan=[torch.arange(0)] * 2)
    ddp = nn.parallel.DistributedDataParallel(chosen)
    losses = []
    for _ in range(3):
        for input_nodes, seeds, blocks in loader:
            loss = F.cross_entropy(ddp(blocks, g.ndata["feat"][input_nodes]), g.ndata["label"][seeds])
            loss.backward()
        losses.append(loss.item())
    return losses


def look_at_comparing(rank: int, world_size: int, part_config: str) -> list[bool]:
    """Returns whether ranks compare what they exchange, by epoch; asked to always do so in the third."""
    g, _ = open_graph(part_config)
    loader = FullGraphLoader(g, g.owned_nodes("train_mask"), 2, plan=[torch.arange(0)] * 2)
    compared = []
    for epoch in range(4):
        g.communicator.always_cross_check = epoch == 2
        for _ in loader:
            compared.append(g.communicator.cross_check)
    return compared


def test_ranks_compare_what_they_exchange_in_the_first_epoch(partitions: PartitionStore) -> None:
    """Later ones exchange the same; each comparison costs a gather."""
    folder = partitions.get("power_law", power_law(), 2)
    assert run_ranks(2, look_at_comparing, folder) == [[True, False, True, False]] * 2


class _Unrepeatable(nn.Module):
    """Works on the graph it knows, not on a made-up one."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.num_rows = model, 0

    def forward(self, blocks: list[object], x: Tensor) -> Tensor:
        self.num_rows = self.num_rows or len(x)
        if len(x) != self.num_rows:
            raise RuntimeError("another graph")
        return self.model(blocks, x)


def test_a_given_plan_does_not_hide_that_a_model_mixes_rows(partitions: PartitionStore) -> None:
    folder = partitions.get("power_law", power_law(), 3)
    errors = run_ranks_expect_errors(3, train_with_given_plan, folder, True)
    assert all("mixes rows of different vertices" in error.message for error in errors)


def test_a_model_that_cannot_be_traced_trains_all_the_same(partitions: PartitionStore) -> None:
    for losses in run_ranks(3, train_with_given_plan, partitions.get("power_law", power_law(), 3), False):
        assert losses[0] == losses[1] == losses[2]


def train_on_a_ring(rank: int, world_size: int, part_config: str) -> tuple[float, int]:
    """Every vertex has one in-edge, so vertices and edges are equally many at every level."""
    g = PartitionedGraph.open(part_config)
    torch.manual_seed(0)
    model = Checkpointed(g.ndata["feat"].shape[1], None).double()
    foreign = torch.arange(g.num_nodes())
    foreign = foreign[~g.nodes.is_owned(foreign)]
    loader = FullGraphLoader(g, g.owned_nodes(), 2, plan=[foreign, foreign], seed=1)
    g.communicator.clock.drain()
    for input_nodes, seeds, blocks in loader:
        loss = F.cross_entropy(model(blocks, g.ndata["feat"][input_nodes]), g.ndata["label"][seeds])
        loss.backward()
    exchanges = sum(event.layer > 0 for event in g.communicator.clock.drain())
    return loss.item() * loader.loss_weight / world_size, exchanges


def test_masks_where_vertices_and_edges_are_equally_many(partitions: PartitionStore) -> None:
    ids = torch.arange(12)
    ring = dgl.graph((ids, (ids + 1) % 12))
    ring.ndata["feat"] = torch.randn(12, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ring.ndata["label"] = ids % 3
    curves = [run_ranks(p, train_on_a_ring, partitions.get("ring", ring, p, "contiguous")) for p in (1, 2, 3)]
    totals = [sum(loss for loss, _ in results) for results in curves]
    assert totals == pytest.approx([totals[0]] * 3, rel=1e-9)
    # Everything is cached: no rank receives anything, and all know it.
    assert all(exchanges == 0 for results in curves for _, exchanges in results)


def send_much_once(rank: int, world_size: int, part_config: str) -> list[int]:
    """Returns how much shared and pooled memory this rank holds: after a large exchange, and after an epoch."""
    g, model = open_graph(part_config)
    communicator, held = g.communicator, []

    def measure() -> None:
        transport = communicator.transport
        assert isinstance(transport, SharedMemoryTransport)
        shared = os.fstat(transport._outbox.descriptor).st_blocks * 512
        held.append(shared + communicator.buffers.free_bytes)

    for fill in (1, 2):  # as when features are fetched, then something else
        send = communicator.send_buffer((world_size, 8 << 20), torch.uint8, torch.device("cpu")).fill_(fill)
        received = communicator.buffers.take((world_size, 8 << 20), torch.uint8)
        assert communicator.transport is not None
        communicator.transport.all_to_all(received, send, [1] * world_size, [1] * world_size)
        assert torch.unique(received).tolist() == [fill]
    del send, received
    measure()
    loader = FullGraphLoader(g, g.owned_nodes("train_mask"), 2, model=model, seed=0, strategy="depcomm")
    for input_nodes, _, blocks in loader:
        model(blocks, g.ndata["feat"][input_nodes]).sum().backward()
    measure()
    return held


def test_memory_of_earlier_exchanges_is_given_back(partitions: PartitionStore) -> None:
    for before, after in run_ranks(3, send_much_once, partitions.get("power_law", power_law(), 3)):
        assert before > 60 << 20
        assert after <= 4 << 20


def make_and_drop(rank: int, world_size: int, part_config: str) -> list[bool]:
    """Returns which of a loader, its blocks and its step are still there once a script has dropped them."""
    g = PartitionedGraph.open(part_config)
    model = Case(kind="sage_mean", num_layers=2).build(g.ndata["feat"].shape[1])
    loader = FullGraphLoader(g, g.owned_nodes("train_mask"), 2, model=model, seed=0)
    for input_nodes, _, blocks in loader:
        model(blocks, g.ndata["feat"][input_nodes]).sum().backward()
    watched = [weakref.ref(thing) for thing in (loader, blocks[0], loader._step, loader.communicator)]
    del loader, blocks, input_nodes, g
    gc.collect()
    return [reference() is not None for reference in watched]


def test_nothing_of_a_loader_stays_when_it_is_dropped(partitions: PartitionStore) -> None:
    """Neither hooks nor observers may hold it: its process group has threads of its own."""
    for left in run_ranks(2, make_and_drop, partitions.get("power_law", power_law(), 2)):
        assert left == [False] * 4


def open_another(rank: int, world_size: int, part_configs: list[str]) -> str:
    try:
        PartitionedGraph.open(part_configs[rank])
    except PartitionError as error:
        return str(error)
    return ""


def test_ranks_on_different_partitions_are_told(tmp_path: Path) -> None:
    """Each is sound in itself: copied at another time to another host. Rows of another graph were exchanged."""
    graph = power_law()
    for name in ("old", "new"):
        partition_graph(graph, "g", 2, tmp_path / name, part_method="contiguous")
        graph.ndata["feat"] = graph.ndata["feat"] + 1.0
    for said in run_ranks(2, open_another, [str(tmp_path / name / "g.json") for name in ("old", "new")]):
        assert said.startswith("rank 1 of 2 has opened another partition than rank 0 has")
        assert "Copy one partition folder to all hosts again" in said


@pytest.mark.parametrize("fault", ["no field", "narrower", "another dtype", "edges", "none in rank 0"])
def test_parts_with_other_fields_are_told(fault: str, tmp_path: Path) -> None:
    """Nothing in a plain folder says what its parts hold: one rank failed where it read, and the others waited for it,
    or took its bytes for rows of their own width.
    """
    dgl.distributed.partition_graph(power_law(), "g", 3, str(tmp_path), part_method="random")
    part = 0 if fault == "none in rank 0" else 2
    kind, key = ("edge", "_N:_E:_N/w") if fault == "edges" else ("node", "_N/feat")
    path = tmp_path / f"part{part}" / f"{kind}_feat.dgl"
    data = load_tensors(str(path))
    if fault in ("no field", "none in rank 0"):
        del data[key]
    elif fault == "narrower":
        data[key] = data[key][:, 1:].contiguous()
    elif fault == "another dtype":
        data[key] = data[key].to(torch.float16)
    else:
        data[key] = data[key][:, None].expand(-1, 2).contiguous()
    save_tensors(str(path), data)
    other = 1 if part == 0 else 2
    for error in run_ranks_expect_errors(3, open_wrong_number, str(tmp_path / "g.json")):
        assert error.type_name == "PartitionError"
        assert f"the {kind} field {key.partition('/')[2]!r} is " in error.message
        assert "in the part of rank 0, and " in error.message
        assert f"in that of rank {other} of 3" in error.message


def make_with_loss(rank: int, world_size: int, part_config: str, **of_rank: dict[str, Any]) -> str:
    g = PartitionedGraph.open(part_config)
    try:
        FullGraphLoader(g, g.owned_nodes(), 2, **of_rank[f"rank{rank}"])
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (
            {"loss_reduction": "none"},
            {"loss_reduction": "none"},
            "loss_reduction must be one of mean, sum, weighted (got 'none')",
        ),
        ({}, {"loss_reduction": "Sum"}, "loss_reduction must be one of mean, sum, weighted (got 'Sum')"),
        ({}, {"loss_reduction": "sum"}, "loss_reduction is 0 on rank 0 and 1 on rank 1"),
        (*[{"loss_reduction": "sum", "loss_denominator": 3.0}] * 2, "has no meaning with loss_reduction='sum'"),
        (
            *[{"loss_reduction": "weighted", "loss_denominator": 1.0}] * 2,
            "has no meaning with loss_reduction='weighted'",
        ),
    ],
)
def test_how_the_loss_is_reduced_is_checked(
    first: dict[str, Any], second: dict[str, Any], message: str, partitions: PartitionStore
) -> None:
    """Anything but "sum" was taken for "mean", on each rank by itself: the weights of the loss were wrong."""
    part_config = partitions.get("power_law", power_law(), 2)
    for said in run_ranks(2, make_with_loss, part_config, rank0=first, rank1=second):
        assert message in said


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
    assert [planned for _, planned in by_rank] == [kind == "dataclass"] * 3


def make_several(rank: int, world_size: int, part_config: str) -> list[int]:
    g, _ = open_graph(part_config)
    torch.manual_seed(10 + rank)
    nothing = [torch.arange(0)] * 2
    loaders = [FullGraphLoader(g, g.owned_nodes("train_mask"), 2, plan=nothing) for _ in range(3)]
    return [loader.seed for loader in loaders]


def test_loaders_made_one_after_another_draw_other_masks(partitions: PartitionStore) -> None:
    """A script that makes one in every epoch trained the same subnetwork for ever."""
    first, second = run_ranks(2, make_several, partitions.get("power_law", power_law(), 2))
    assert first == second
    assert first[0] == 10
    assert len(set(first)) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mask": "keep"}, "draws edges by 'keep'"),
        ({"prob": "w"}, "draws edges by 'w'"),
        ({"edge_dir": "out"}, "'out'"),
    ],
)
def test_samplers_that_leave_edges_out_are_refused(options: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        num_layers_of(dgl.dataloading.MultiLayerFullNeighborSampler(2, **options))
    assert num_layers_of(dgl.dataloading.MultiLayerFullNeighborSampler(2)) == 2
    assert num_layers_of(SimpleNamespace(fanouts=[3, 4], prob=0.0, edge_dir="both")) == 2, "of the script's own"


def load_state_on_one_rank(rank: int, world_size: int, part_config: str) -> None:
    g, _ = open_graph(part_config)
    loader = FullGraphLoader(g, g.owned_nodes("train_mask"), 2, plan=[torch.arange(0)] * 2, seed=3)
    if rank == 0:
        loader.load_state_dict({"steps": 7, "seed": 3})
    next(iter(loader))


def test_a_state_of_one_rank_alone_is_refused(partitions: PartitionStore) -> None:
    folder = partitions.get("power_law", power_law(), 2)
    errors = run_ranks_expect_errors(2, load_state_on_one_rank, folder)
    assert len(errors) == 2
    for error in errors:
        assert "rank 0 is at step 7 of seed 3, rank 1 at step 0 of seed 3" in error.message


def train_two_models(rank: int, world_size: int, part_config: str, how: str) -> list[bool]:
    g, model = open_graph(part_config)
    given = {"model": model} if how == "another is given" else {}
    loader = FullGraphLoader(
        g, g.owned_nodes("train_mask"), 2, topology=uniform_topology(world_size), seed=2**70, **given
    )
    mixing, other = _Centred(model), _OtherHead(model)
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


class _OtherHead(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, blocks: list[object], x: Tensor) -> Tensor:
        return 2.0 * self.model(blocks, x)


def test_a_second_model_on_a_loader_is_checked_too(partitions: PartitionStore) -> None:
    folder = partitions.get("power_law", power_law(), 3)
    assert run_ranks(3, train_two_models, folder, "none mixes") == [[False, *[True] * 5]] * 3
    for how in ("second", "third in one epoch", "another is given", "another is evaluated"):
        errors = run_ranks_expect_errors(3, train_two_models, folder, how)
        assert len(errors) == 3, how
        assert all("mixes rows of different vertices" in error.message for error in errors), how


def read_seeds(rank: int, world_size: int, part_config: str) -> tuple[bool, int, int]:
    g, model = open_graph(part_config)
    loader = FullGraphLoader(
        g, g.owned_nodes(), 2, model=model, row_order="locality", autotune=float("inf"), planner=PlannerConfig()
    )
    first, orders, plans = loader.seeds.clone(), set(), set()
    is_kept = True
    while not loader.is_settled:
        for input_nodes, seeds, blocks in loader:
            assert loader.outcome is not None
            plans.add(loader.outcome.plan.num_cached)
            orders.add(tuple(input_nodes.tolist()))
            is_kept &= torch.equal(seeds, first) and torch.equal(blocks[-1].dstdata[dgl.NID], first)
            F.cross_entropy(model(blocks, g.ndata["feat"][input_nodes]), g.ndata["label"][seeds]).backward()
    return is_kept, len(plans), len(orders)


def test_seeds_keep_their_order_when_plans_change(partitions: PartitionStore) -> None:
    """Scripts may read labels once."""
    for is_kept, num_plans, num_orders in run_ranks(2, read_seeds, partitions.get("power_law", power_law(), 2)):
        assert num_plans > 1
        assert num_orders > 1
        assert is_kept


def draw_after_a_change_of_plans(rank: int, world_size: int, part_config: str) -> list[bool]:
    g, model = open_graph(part_config)
    loader = FullGraphLoader(g, g.owned_nodes("train_mask"), 2, model=model, topology=uniform_topology(1))
    found = []
    for epoch in range(4):
        if epoch == 2:
            loader._follow(loader.outcome)
        for input_nodes, _, blocks in loader:
            model(blocks, F.dropout(g.ndata["feat"][input_nodes], 0.5)).sum().backward()
            loader._step.next_random_call()
            found.append(loader._step.is_first_draw)
    return found


def test_ranks_ask_each_other_again_what_they_draw_for_once_plans_have_changed(partitions: PartitionStore) -> None:
    """Other plans have other rows."""
    (found,) = run_ranks(1, draw_after_a_change_of_plans, partitions.get("power_law", power_law(), 1))
    assert found == [True, False, True, False]


def interrupt_change_of_plans(rank: int, world_size: int, part_config: str) -> tuple[str, str]:
    g, model = open_graph(part_config)
    loader = FullGraphLoader(g, g.owned_nodes("train_mask"), 2, model=model, topology=uniform_topology(1))
    assert loader.outcome is not None

    def interrupted(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    loader._builder.build = interrupted  # type: ignore[method-assign, assignment]
    with contextlib.suppress(KeyboardInterrupt):
        loader._follow(loader.outcome)
    said = []
    for _ in range(2):
        try:
            next(iter(loader))
        except RuntimeError as error:
            said.append(str(error))
    return said[0], said[1]


def test_a_change_of_plans_that_was_interrupted_is_told(partitions: PartitionStore) -> None:
    (said,) = run_ranks(1, interrupt_change_of_plans, partitions.get("power_law", power_law(), 1))
    assert set(said) == {"a change of plans was interrupted and has left no blocks: make the loader anew"}


def plan_where_nothing_fits_any_more(rank: int, world_size: int, part_config: str, error: Exception) -> tuple[str, str]:
    g, model = open_graph(part_config)
    loader = FullGraphLoader(
        g, g.owned_nodes("train_mask"), 2, model=model, topology=uniform_topology(world_size), autotune=float("inf")
    )
    while not loader.is_settled:
        for input_nodes, seeds, blocks in loader:
            F.cross_entropy(model(blocks, g.ndata["feat"][input_nodes]), g.ndata["label"][seeds]).backward()

    def nothing_fits(*args: object, **kwargs: object) -> None:
        raise error

    outcome = loader.outcome
    assert outcome is not None
    assert loader._choice.trials is not None
    loader._choice.maker.make = nothing_fits  # type: ignore[method-assign, assignment]
    loader._choice.maker._given_topology = None  # rates are measured again
    before = outcome.plan.strategy
    loader._follow(loader._choice.plan_anew())
    for input_nodes, seeds, blocks in loader:
        F.cross_entropy(model(blocks, g.ndata["feat"][input_nodes]), g.ndata["label"][seeds]).backward()
    assert loader.outcome is not None
    return before, loader.outcome.plan.strategy


@pytest.mark.parametrize(
    "error",
    [
        PlanError("the plan needs at least 9 bytes for halo rows"),
        BlockError("the model does not use the blocks of layers [1]"),  # as it is by now: it trains all the same
    ],
)
def test_where_no_plan_is_found_after_a_drift_those_of_before_stay(
    error: Exception, partitions: PartitionStore
) -> None:
    by_rank = run_ranks(2, plan_where_nothing_fits_any_more, partitions.get("power_law", power_law(), 2), error)
    assert by_rank[0] == by_rank[1]


def test_ranks_that_part_ways_as_they_plan_anew_are_told(partitions: PartitionStore) -> None:
    folder, error = partitions.get("power_law", power_law(), 2), ExchangeError("a peer left")
    for raised in run_ranks_expect_errors(2, plan_where_nothing_fits_any_more, folder, error):
        assert (raised.type_name, raised.message) == ("ExchangeError", "a peer left")


def plan_for_other_ranks(rank: int, world_size: int, part_config: str) -> None:
    g = PartitionedGraph.open(part_config)
    model = Case(kind="gcn_both").build(g.ndata["feat"].shape[1])
    FullGraphLoader(g, g.owned_nodes(), 2, model=model, topology=uniform_topology(world_size + 2))


def test_a_topology_of_other_ranks_is_named(partitions: PartitionStore) -> None:
    for error in run_ranks_expect_errors(2, plan_for_other_ranks, partitions.get("power_law", power_law(), 2)):
        assert "the topology is of 4 ranks, and 2 are running" in error.message
