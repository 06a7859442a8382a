# SPDX-License-Identifier: Apache-2.0
"""`update_all` with a function applied after the reduce: with edges, without any, and with sums from owners."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import dgl
import dgl.function as fn
import dgl.nn as dglnn
import pytest
import torch
from torch import Tensor, nn

from dgl_hybrid import FullGraphLoader, PartitionedGraph
from dgl_hybrid.planner import uniform_topology
from tests.graph.blocks import loss_of_rows, one_layer
from tests.helpers.exactness import assert_close
from tests.helpers.graphs import power_law, with_isolated
from tests.helpers.partitions import PartitionStore
from tests.helpers.thinning import each_value
from tests.helpers.world import run_ranks


def sum_of_mailbox(nodes: Any) -> dict[str, Tensor]:
    return {"h": nodes.mailbox["m"].sum(1)}


def tanh_of_source(edges: Any) -> dict[str, Tensor]:
    return {"m": torch.tanh(edges.src["x"])}


FUNCTIONS: dict[str, tuple[Any, Any]] = {
    "user-defined reduce": (fn.copy_u("x", "m"), sum_of_mailbox),
    "user-defined functions": (tanh_of_source, sum_of_mailbox),
    "user-defined message": (tanh_of_source, fn.sum("m", "h")),
    "sum": (fn.copy_u("x", "m"), fn.sum("m", "h")),
    "mean": (fn.copy_u("x", "m"), fn.mean("m", "h")),
    "max": (fn.copy_u("x", "m"), fn.max("m", "h")),
    "min of products": (fn.u_mul_e("x", "w", "m"), fn.min("m", "h")),
}


class Applies(nn.Module):
    """One layer. DGL shows the function infinities of destinations without in-edges, and drops those it returns."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.functions = FUNCTIONS[kind]
        self.scale = nn.Parameter(torch.rand(5, dtype=torch.float64) + 0.5)
        self.bias = nn.Parameter(torch.rand(5, dtype=torch.float64))
        self.fields: list[str] = []

    def apply_to(self, nodes: Any) -> dict[str, Tensor]:
        h = nodes.data["h"]
        return {"y": h + self.bias * nodes.data["d"], "z": torch.tanh(h) * self.scale}

    def forward(self, block: Any, x: Tensor) -> Tensor:
        with block.local_scope():
            block.srcdata["x"] = torch.sin(x)
            block.dstdata["d"] = torch.cos(x[: block.num_dst_nodes()])
            block.update_all(*self.functions, self.apply_to)
            self.fields = sorted(set(block.dstdata) & {"h", "y", "z"})
            return torch.cat([block.dstdata["y"], block.dstdata["z"]], 1)


@dataclass(kw_only=True)
class Share:
    """What one rank has, by original ids."""

    num_edges: int
    fields: list[str]
    seeds: Tensor
    rows: Tensor
    input_ids: Tensor
    gradients: dict[str, Tensor]


def run_applies(rank: int, world_size: int, part_config: str, kind: str) -> Share:
    g, x, (block, loader) = one_layer(part_config, edgeless_rank=0, prefetch_edge_feats=["w"])
    model = Applies(kind)
    ids = g.fetch_nodes(g.partition.orig_node_ids, block.srcdata[dgl.NID])
    y = model.forward(block, x)  # by its forward, so that no loss weight enters
    loss_of_rows(y, ids[: len(y)]).backward()
    own = loader.num_seeds
    gradients = {"input": x.grad, "scale": model.scale.grad, "bias": model.bias.grad}
    return Share(
        num_edges=block.num_edges(),
        fields=model.fields,
        seeds=ids[:own],
        rows=y.detach()[:own],
        input_ids=ids,
        gradients={name: gradient for name, gradient in gradients.items() if gradient is not None},
    )


@pytest.mark.parametrize("kind", list(FUNCTIONS))
def test_a_function_is_applied_to_destinations_with_edges_and_without(
    kind: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """After a user-defined reduce on a rank without edges it ran on sources, whose field nobody reads."""
    graph, model = with_isolated(), Applies(kind)
    folder = PartitionStore(tmp_path_factory.mktemp("applies")).get("isolated", graph, 3)
    shares = run_ranks(3, run_applies, folder, kind)
    x = graph.ndata["feat"].clone().requires_grad_()
    y = model(graph, x)
    seeds = torch.cat([share.seeds for share in shares])
    loss_of_rows(y[seeds], seeds).backward()

    assert [share.num_edges > 0 for share in shares] == [False, True, True]
    assert [share.fields for share in shares] == [["y", "z"]] * 3 == [model.fields] * 3
    assert_close(torch.cat([share.rows for share in shares]), y.detach()[seeds], "results")
    for name, gradient in {"input": x.grad, "scale": model.scale.grad, "bias": model.bias.grad}.items():
        assert gradient is not None
        total = torch.zeros_like(gradient)
        for share in shares:
            rows = share.input_ids if name == "input" else torch.arange(len(total))
            total.index_add_(0, rows, share.gradients[name])
        assert_close(total, gradient, f"gradient of {name}")


class KeptThenApplied(nn.Module):
    """Sums raw rows by a first layer that is kept, so that owners sum for replicas; then one that is not."""

    def __init__(self, kind: str, *, inside: bool) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.functions = FUNCTIONS[kind]
        self.inside = inside
        self.linear = nn.Linear(5, 4).double()
        self.second = dglnn.SAGEConv(4, 3, "mean").double()

    def apply_to(self, nodes: Any) -> dict[str, Tensor]:
        return {"y": self.linear(torch.tanh(nodes.data["h"]))}

    def forward(self, blocks: Sequence[Any], x: Tensor) -> Tensor:
        with blocks[0].local_scope():
            blocks[0].srcdata["x"] = x
            blocks[0].update_all(*self.functions, self.apply_to if self.inside else None)
            y = blocks[0].dstdata["y"] if self.inside else self.linear(torch.tanh(blocks[0].dstdata["h"]))
        logits: Tensor = self.second(blocks[1], torch.tanh(y))
        return logits


def run_with_sums_of_owners(
    rank: int, world_size: int, part_config: str, kind: str, reduce: str
) -> tuple[int, Tensor, Tensor, list[Tensor]]:
    """Plans with a model that applies nothing inside, and trains another one by that plan."""
    g = PartitionedGraph.open(part_config)
    seeds = g.owned_nodes("train_mask")
    planned = KeptThenApplied(reduce, inside=False)
    topology = uniform_topology(world_size)
    made = FullGraphLoader(g, seeds, 2, model=planned, topology=topology, strategy="depcache", autotune=False)
    assert made.outcome is not None
    loader = FullGraphLoader(g, seeds, 2, plan=replace(made.outcome.plan), loss_reduction="sum")
    model = KeptThenApplied(kind, inside=True)
    ((input_nodes, ids, blocks),) = list(loader)
    replicas = blocks[0].structure.replicas
    logits = model(blocks, g.ndata["feat"][input_nodes])
    original = g.fetch_nodes(g.partition.orig_node_ids, ids)
    loss_of_rows(logits, original).backward()
    own = loader.num_seeds
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad / world_size for p in model.parameters()]
    num_replicas = 0 if replicas is None else len(replicas.positions)
    return num_replicas, original[:own], logits.detach()[:own], gradients


@each_value(world_size=[2, 3, 4], kind=["user-defined reduce", "sum", "max"])
def test_a_function_is_applied_to_what_owners_reduce(
    kind: str, world_size: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    graph = power_law()
    folder = PartitionStore(tmp_path_factory.mktemp("replicas")).get("power_law", graph, world_size)
    results = run_ranks(world_size, run_with_sums_of_owners, folder, kind, "sum")
    model = KeptThenApplied(kind, inside=True)
    logits = model([graph, graph], graph.ndata["feat"])
    seeds = torch.cat([seeds for _, seeds, _, _ in results])
    loss_of_rows(logits[seeds], seeds).backward()

    assert any(num_replicas for num_replicas, _, _, _ in results)
    assert_close(torch.cat([rows for _, _, rows, _ in results]), logits.detach()[seeds], "results")
    for index, (name, parameter) in enumerate(model.named_parameters()):
        total = torch.stack([gradients[index] for _, _, _, gradients in results]).sum(0)
        assert parameter.grad is not None
        assert_close(total, parameter.grad, f"gradient of {name}")
