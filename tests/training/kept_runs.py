# SPDX-License-Identifier: Apache-2.0
"""Training over some epochs, by ranks and with plain DGL, and what blocks keep meanwhile."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import dgl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dgl_hybrid import FullGraphLoader, PartitionedGraph
from dgl_hybrid.graph.optimize import optimize
from dgl_hybrid.ops import SparseRows
from dgl_hybrid.ops.cpu import resting_rows
from dgl_hybrid.planner import uniform_topology
from tests.helpers.exactness import (
    Case,
    assert_close,
    forced_plan,
)
from tests.helpers.graphs import power_law

EPOCHS = 3


@dataclass
class Run:
    losses: list[float] = field(default_factory=list)
    grads: list[dict[str, Tensor]] = field(default_factory=list)
    first_layer_exchanges: list[int] = field(default_factory=list)
    kept_bytes: int = 0
    num_sparse: int = 0
    """Results kept by their entries."""
    num_without_edges: int = 0
    """Vertices of the first layer whose owners aggregate for them."""
    num_left: int = 0
    """Fields that were left on disk."""
    warnings: list[str] = field(default_factory=list)
    """Of the loader."""


def train(
    rank: int,
    world_size: int,
    part_config: str,
    case: Case,
    *,
    optimized: bool = False,
    change: str = "",
    keep_static: bool = True,
    rests: bool = False,
) -> Run:
    g = PartitionedGraph.open(part_config)
    model = case.build(g.ndata["feat"].shape[1])
    if optimized:
        optimize(model)
    ddp = nn.parallel.DistributedDataParallel(model) if world_size > 1 else model
    plan = forced_plan(g, case, model)
    loader = FullGraphLoader(
        g,
        g.owned_nodes("train_mask"),
        dgl.dataloading.MultiLayerFullNeighborSampler(case.num_layers, prefetch_edge_feats=["w"]),
        plan=plan,
        model=None if plan else model,
        topology=uniform_topology(world_size),
        seed=5,
        keep_static=keep_static,
    )
    optimizer = torch.optim.SGD(ddp.parameters(), lr=case.lr)
    run = Run()
    heard = logging.Handler()
    heard.emit = lambda record: run.warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("dgl_hybrid.training.loader").addHandler(heard)
    g.communicator.clock.drain()
    for epoch in range(EPOCHS):
        for input_nodes, seeds, blocks in loader:
            if epoch == 1:
                make_change(change, rank, g, input_nodes, blocks)
            x = g.ndata["feat"][input_nodes]
            if change == "copies on rank 1" and rank == 1:
                x = x.clone()
            if change == "evaluates first" and epoch == 0:
                model.eval()
                with torch.inference_mode():
                    model(blocks, x)
                model.train()
            optimizer.zero_grad()
            with contextlib.ExitStack() as contexts:
                if change == "autocast":
                    contexts.enter_context(torch.autocast("cpu", dtype=torch.bfloat16))
                loss = F.cross_entropy(ddp(blocks, x), g.ndata["label"][seeds])
            loss.backward()
        if change == "writes on rank 0 between epochs" and epoch == 0 and rank == 0:
            # Nobody else knows; the ranks must still run the same collectives.
            blocks[0].static_results._kept[next(iter(blocks[0].static_results._kept))].result.add_(1.0)
        run.losses.append(loss.item() * loader.loss_weight / world_size)
        run.grads.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
        events = Counter(event.layer for event in g.communicator.clock.drain())
        run.first_layer_exchanges.append(events[1])
        optimizer.step()
        if rests:
            num_resident = len(resting_rows._in_memory)
            loader._free_memory.leave_rows_on_disk()
            run.num_left += num_resident - len(resting_rows._in_memory)
    logging.getLogger("dgl_hybrid.training.loader").removeHandler(heard)
    results = blocks[0].static_results
    run.kept_bytes = results.num_bytes
    replicas = blocks[0].structure.replicas
    run.num_without_edges = 0 if replicas is None else len(replicas.positions)
    run.num_sparse = sum(isinstance(kept.result, SparseRows) for kept in results._kept.values())
    return run


def make_change(change: str, rank: int, g: PartitionedGraph, input_nodes: Tensor, blocks: list[Any]) -> None:
    """Does to the features what makes kept results wrong."""
    if change == "sets the field":
        g.ndata["feat"] = g.ndata["feat"].local * 2.0
    elif change == "writes in place":
        g.ndata["feat"][input_nodes].mul_(2.0)
    elif change == "writes weights in place":
        blocks[0].edata["w"].mul_(2.0)


def reference(case: Case, *, change: str = "", graph: dgl.DGLGraph | None = None) -> Run:
    graph = power_law() if graph is None else graph
    model = case.build(graph.ndata["feat"].shape[1])
    optimizer = torch.optim.SGD(model.parameters(), lr=case.lr)
    mask = graph.ndata["train_mask"].bool()
    run = Run()
    for epoch in range(EPOCHS):
        x = graph.ndata["feat"]
        if change == "sets the field" and epoch >= 1:
            x = x * 2.0
        optimizer.zero_grad()
        loss = F.cross_entropy(model([graph] * case.num_layers, x)[mask], graph.ndata["label"][mask])
        loss.backward()
        run.losses.append(loss.item())
        run.grads.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
        optimizer.step()
    return run


def assert_same(runs: list[Run], expected: Run) -> None:
    for epoch in range(EPOCHS):
        assert sum(run.losses[epoch] for run in runs) == pytest.approx(expected.losses[epoch], rel=1e-9)
        for name, grad in expected.grads[epoch].items():
            for run in runs:
                assert_close(run.grads[epoch][name], grad, f"epoch {epoch}: gradient of {name}")
