# SPDX-License-Identifier: Apache-2.0
"""Training under `torch.autocast` is that of plain DGL under it, up to the rounding of half precision."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import dgl
import dgl.nn as dglnn
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dgl_hybrid import FullGraphLoader, PartitionedGraph, optimize
from dgl_hybrid.planner import uniform_topology
from tests.helpers.graphs import power_law
from tests.helpers.partitions import PartitionStore
from tests.helpers.thinning import each_value
from tests.helpers.world import run_ranks

WORLD_SIZE, HIDDEN, CLASSES = 3, 16, 4
EPOCHS = 3


class Model(nn.Module):
    def __init__(self, kind: str, in_feats: int) -> None:
        super().__init__()
        torch.manual_seed(3)
        heads = 2 if kind == "gat" else 1
        make = {
            "gcn": lambda a, b: dglnn.GraphConv(a, b, allow_zero_in_degree=True),
            "sage": lambda a, b: dglnn.SAGEConv(a, b, "mean"),
            "gat": lambda a, b: dglnn.GATConv(a, b // heads, heads, allow_zero_in_degree=True),
        }[kind]
        self.layers = nn.ModuleList([make(in_feats, HIDDEN), make(HIDDEN, CLASSES)])

    def forward(self, blocks: list[dgl.DGLGraph], x: Tensor) -> Tensor:
        for layer, block in zip(self.layers, blocks, strict=True):
            x = F.elu(layer(block, x).flatten(1))
        return x


@dataclass
class Trained:
    losses: list[float]
    gradients: list[Tensor]


def casting(is_on: bool) -> contextlib.AbstractContextManager[object]:
    return torch.autocast("cpu", dtype=torch.bfloat16) if is_on else contextlib.nullcontext()


def train_ranks(rank: int, world_size: int, folder: str, kind: str, is_optimized: bool) -> Trained:
    g = PartitionedGraph.open(folder)
    g.ndata["feat"] = g.ndata["feat"].local.float()
    model = Model(kind, g.ndata["feat"].shape[1])
    if is_optimized:
        optimize(model)
    ddp = nn.parallel.DistributedDataParallel(model)
    loader = FullGraphLoader(
        g, g.owned_nodes("train_mask"), 2, model=model, topology=uniform_topology(world_size), autotune=False
    )
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    losses = []
    for _ in range(EPOCHS):
        for input_nodes, seeds, blocks in loader:
            with casting(True):
                loss = F.cross_entropy(ddp(blocks, g.ndata["feat"][input_nodes]).float(), g.ndata["label"][seeds])
            optimizer.zero_grad()
            loss.backward()
            losses.append(loss.item() * loader.loss_weight / world_size)
            optimizer.step()
    return Trained(losses, [parameter.grad for parameter in model.parameters()])


def plan_ranks(
    rank: int, world_size: int, folder: str, gives_model: bool, evaluates_first: bool
) -> tuple[list[bool], list[bool], list[int]]:
    """Of each epoch's plan: whether the first layer is kept, whether the last can split, the bytes of its row."""
    g = PartitionedGraph.open(folder)
    g.ndata["feat"] = g.ndata["feat"].local.float()
    model = optimize(Model("sage", g.ndata["feat"].shape[1]))
    given = model if gives_model else None
    topology = uniform_topology(world_size)
    loader = FullGraphLoader(g, g.owned_nodes("train_mask"), 2, model=given, topology=topology, autotune=False)
    keeps, splits, sizes = [], [], []
    if evaluates_first:
        for input_nodes, _, blocks in loader:
            with torch.no_grad():
                model(blocks, g.ndata["feat"][input_nodes])
    for _ in range(EPOCHS):
        for input_nodes, seeds, blocks in loader:
            with casting(True):
                loss = F.cross_entropy(model(blocks, g.ndata["feat"][input_nodes]).float(), g.ndata["label"][seeds])
            loss.backward()
            plan = None if loader.outcome is None else loader.outcome.plan
            if plan is not None and plan.trace is not None:
                first, last = plan.trace.layers
                keeps.append(first.keeps_result)
                splits.append(last.can_split)
                sizes.append(round(last.operand_bytes_fwd))
    return keeps, splits, sizes


@each_value(gives_model=[True, False], evaluates_first=[False, True])
def test_plans_are_made_for_what_is_cast(gives_model: bool, evaluates_first: bool, partitions: PartitionStore) -> None:
    """A loader that is given the model plans as if nothing were cast, and once more when it sees that it is; so does
    one that has seen an evaluation only.
    """
    folder = partitions.get("power_law", power_law(), WORLD_SIZE)
    for keeps, splits, sizes in run_ranks(WORLD_SIZE, plan_ranks, folder, gives_model, evaluates_first):
        is_planned = gives_model or evaluates_first
        assert keeps == [True] * is_planned + [False] * 2
        assert splits == [True] * is_planned + [False] * 2
        *before, second, third = sizes
        assert second == third == 2 * CLASSES
        assert before in ([], [4 * CLASSES])


def train_alone(kind: str, *, is_cast: bool) -> Trained:
    """Plain DGL in one process."""
    graph = power_law()
    features, mask = graph.ndata["feat"].float(), graph.ndata["train_mask"].bool()
    model = Model(kind, features.shape[1])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(EPOCHS):
        with casting(is_cast):
            loss = F.cross_entropy(model([graph] * 2, features)[mask].float(), graph.ndata["label"][mask])
        optimizer.zero_grad()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    return Trained(losses, [parameter.grad for parameter in model.parameters()])


def distance(one: Trained, other: Trained) -> list[float]:
    """Returns how far losses and each gradient are apart, relative to the largest element."""
    losses = max(abs(a - b) / abs(b) for a, b in zip(one.losses, other.losses, strict=True))
    pairs = zip(one.gradients, other.gradients, strict=True)
    return [losses, *(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)]


@each_value(kind=["gcn", "sage", "gat"], is_optimized=[False, True])
def test_ranks_train_as_one_process(kind: str, is_optimized: bool, partitions: PartitionStore) -> None:
    folder = partitions.get("power_law", power_law(), WORLD_SIZE)
    runs = run_ranks(WORLD_SIZE, train_ranks, folder, kind, is_optimized)
    total = Trained([sum(losses) for losses in zip(*(run.losses for run in runs), strict=True)], runs[0].gradients)
    exact, cast = train_alone(kind, is_cast=False), train_alone(kind, is_cast=True)
    rounding = max(distance(cast, exact))
    assert rounding > 1e-4, "half precision is at work"
    assert rounding < 0.1
    assert max(distance(total, exact)) < 3 * rounding
