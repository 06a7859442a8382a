# SPDX-License-Identifier: Apache-2.0
"""Every convolution of `dgl.nn`, each as a two-layer model of width four, on ranks and on the whole graph; and other
ways to use a block in a layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import dgl
import dgl.nn as dglnn
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dgl_hybrid import FullGraphLoader, PartitionedGraph

WIDTH = 4
NUM_TYPES = 2


def _edge_rows(graph: Any) -> Tensor:
    w = graph.edata["w"]
    return torch.stack([w, w * w, torch.cos(w), torch.sin(w)], 1)


def _edge_types(graph: Any) -> Tensor:
    return (graph.edata["w"] > 1.0).long()


def _plain(conv: Any, graph: Any, h: Tensor) -> Tensor:
    return conv(graph, h)


def _with_weight(conv: Any, graph: Any, h: Tensor) -> Tensor:
    return conv(graph, h, edge_weight=graph.edata["w"])


def _with_edges(conv: Any, graph: Any, h: Tensor) -> Tensor:
    return conv(graph, h, _edge_rows(graph))


def _with_types(conv: Any, graph: Any, h: Tensor) -> Tensor:
    return conv(graph, h, _edge_types(graph))


@dataclass(frozen=True)
class Entry:
    """How to make a module and how to call it; `error` is what a `LayerBlock` says if it cannot be exact."""

    make: Callable[[], nn.Module]
    call: Callable[[Any, Any, Tensor], Tensor] = _plain
    error: str | None = None


def _egat(conv: Any, graph: Any, h: Tensor) -> Tensor:
    nodes, edges = conv(graph, (h, h[: graph.num_dst_nodes()]) if graph.is_block else h, _edge_rows(graph))
    # Edge rows, too: each goes into the row of its destination.
    with graph.local_scope():
        graph.edata["e"] = edges
        graph.update_all(dgl.function.copy_e("e", "m"), dgl.function.sum("m", "y"))
        return nodes + graph.dstdata["y"]


def _hgt(conv: Any, graph: Any, h: Tensor) -> Tensor:
    types = (h[:, 0] > 0).long()
    return conv(graph, h, types, _edge_types(graph))


# On blocks alone, so that the whole graph says which rows go to which matrices: its edges are not sorted either.
def _with_types_said_to_be_sorted(conv: Any, graph: Any, h: Tensor) -> Tensor:
    return conv(graph, h, _edge_types(graph), presorted=graph.is_block)


def _hgt_said_to_be_sorted(conv: Any, graph: Any, h: Tensor) -> Tensor:
    types = (h[:, 0] > 0).long()
    return conv(graph, h, types, _edge_types(graph), presorted=graph.is_block)


def _long_names_of_targets(conv: Any, graph: Any, h: Tensor) -> Tensor:
    y, num_dst = conv(h), graph.num_dst_nodes()
    # DGL's own backward takes operands of the longer names for rows of edges.
    src, edge, dst = ("src", "edge", "dst") if graph.is_block else ("u", "e", "v")
    score = dgl.ops.gsddmm(graph, "dot", y, y[:num_dst], lhs_target=src, rhs_target=dst)
    score = dgl.ops.gsddmm(graph, "mul", score, y[:, :1], lhs_target=edge, rhs_target=src)
    copied = dgl.ops.gsddmm(graph, "copy_rhs", None, y, lhs_target=dst, rhs_target=src)
    return dgl.ops.copy_e_sum(graph, score * copied)


def _fields_by_type(conv: Any, graph: Any, h: Tensor) -> Tensor:
    with graph.local_scope():
        (source,), (destination,) = graph.srctypes, graph.dsttypes
        graph.srcnodes[source].data["x"] = conv(h)
        graph.update_all(dgl.function.copy_u("x", "m"), dgl.function.sum("m", "y"))
        return graph.dstnodes[destination].data["y"] + graph.srcnodes[source].data["x"][: graph.num_dst_nodes()]


def _gcn2(conv: Any, graph: Any, h: Tensor) -> Tensor:
    return conv(graph, h, h * 0.5)


def _egnn(conv: Any, graph: Any, h: Tensor) -> Tensor:
    x, coordinates = conv(graph, h, h[:, :3])
    return torch.cat([x[:, :3], coordinates[:, :1]], 1)


def _dgn(conv: Any, graph: Any, h: Tensor) -> Tensor:
    return conv(graph, h, eig_vec=h[:, :2])


def _gated(conv: Any, graph: Any, h: Tensor) -> Tensor:
    nodes, _ = conv(graph, h, _edge_rows(graph))
    return nodes


def _nnconv() -> nn.Module:
    return dglnn.NNConv(WIDTH, WIDTH, nn.Linear(WIDTH, WIDTH * WIDTH), "mean")


NOT_ON_BLOCKS = "does not work on blocks"
ZERO = {"allow_zero_in_degree": True}
MODULES: dict[str, Entry] = {
    "GraphConv": Entry(lambda: dglnn.GraphConv(WIDTH, WIDTH, **ZERO)),
    "GraphConv-weighted": Entry(lambda: dglnn.GraphConv(WIDTH, WIDTH, **ZERO), _with_weight),
    "SAGEConv-mean": Entry(lambda: dglnn.SAGEConv(WIDTH, WIDTH, "mean")),
    "SAGEConv-gcn": Entry(lambda: dglnn.SAGEConv(WIDTH, WIDTH, "gcn")),
    "SAGEConv-pool": Entry(lambda: dglnn.SAGEConv(WIDTH, WIDTH, "pool")),
    "SAGEConv-lstm": Entry(lambda: dglnn.SAGEConv(WIDTH, WIDTH, "lstm")),
    "SAGEConv-weighted": Entry(lambda: dglnn.SAGEConv(WIDTH, WIDTH, "mean"), _with_weight),
    "GATConv": Entry(lambda: dglnn.GATConv(WIDTH, WIDTH, 2, **ZERO)),
    "GATConv-weighted": Entry(lambda: dglnn.GATConv(WIDTH, WIDTH, 2, **ZERO), _with_weight),
    "GATv2Conv": Entry(lambda: dglnn.GATv2Conv(WIDTH, WIDTH, 2, **ZERO)),
    "GATv2Conv-shared": Entry(lambda: dglnn.GATv2Conv(WIDTH, WIDTH, 2, share_weights=True, **ZERO)),
    "EdgeGATConv": Entry(lambda: dglnn.EdgeGATConv(WIDTH, WIDTH, WIDTH, 2, **ZERO), _with_edges),
    "EGATConv": Entry(lambda: dglnn.EGATConv(WIDTH, WIDTH, WIDTH, WIDTH, 2), _egat),
    "GINConv-sum": Entry(lambda: dglnn.GINConv(nn.Linear(WIDTH, WIDTH), "sum", learn_eps=True)),
    "GINConv-mean": Entry(lambda: dglnn.GINConv(nn.Linear(WIDTH, WIDTH), "mean"), _with_weight),
    "GINConv-max": Entry(lambda: dglnn.GINConv(nn.Linear(WIDTH, WIDTH), "max")),
    "GINEConv": Entry(lambda: dglnn.GINEConv(nn.Linear(WIDTH, WIDTH)), _with_edges),
    "EdgeConv": Entry(lambda: dglnn.EdgeConv(WIDTH, WIDTH, **ZERO)),
    "EdgeConv-norm": Entry(lambda: dglnn.EdgeConv(WIDTH, WIDTH, batch_norm=True, **ZERO), error="batch norm"),
    "AGNNConv": Entry(lambda: dglnn.AGNNConv(**ZERO)),
    "DotGatConv": Entry(lambda: dglnn.DotGatConv(WIDTH, WIDTH, 2, **ZERO)),
    "CFConv": Entry(lambda: dglnn.CFConv(WIDTH, WIDTH, WIDTH, WIDTH), _with_edges),
    "NNConv": Entry(_nnconv, _with_edges),
    "GMMConv": Entry(lambda: dglnn.GMMConv(WIDTH, WIDTH, WIDTH, 3, "mean", **ZERO), _with_edges),
    "RelGraphConv": Entry(lambda: dglnn.RelGraphConv(WIDTH, WIDTH, NUM_TYPES), _with_types),
    "RelGraphConv-basis": Entry(
        lambda: dglnn.RelGraphConv(WIDTH, WIDTH, NUM_TYPES, regularizer="basis", num_bases=2), _with_types
    ),
    "RelGraphConv-bdd": Entry(
        lambda: dglnn.RelGraphConv(WIDTH, WIDTH, NUM_TYPES, regularizer="bdd", num_bases=2, layer_norm=True),
        _with_types,
    ),
    "HGTConv": Entry(lambda: dglnn.HGTConv(WIDTH, WIDTH // 2, 2, NUM_TYPES, NUM_TYPES, dropout=0.0), _hgt),
    "PNAConv": Entry(
        lambda: dglnn.PNAConv(WIDTH, WIDTH, ["mean", "max", "sum"], ["identity"], 2.5), error=NOT_ON_BLOCKS
    ),
    "DGNConv": Entry(
        lambda: dglnn.DGNConv(WIDTH, WIDTH, ["dir1-av", "dir1-dx", "sum"], ["identity"], 2.5), _dgn, error=NOT_ON_BLOCKS
    ),
    "GatedGCNConv": Entry(
        lambda: dglnn.GatedGCNConv(WIDTH, WIDTH, WIDTH, batch_norm=False), _gated, error=NOT_ON_BLOCKS
    ),
    "GatedGraphConv": Entry(lambda: dglnn.GatedGraphConv(WIDTH, WIDTH, 1, 1), error=NOT_ON_BLOCKS),
    "GatedGraphConv-steps": Entry(lambda: dglnn.GatedGraphConv(WIDTH, WIDTH, 3, 1), error=NOT_ON_BLOCKS),
    "GCN2Conv": Entry(lambda: dglnn.GCN2Conv(WIDTH, 1, allow_zero_in_degree=True), _gcn2, error=NOT_ON_BLOCKS),
    "SGConv-1": Entry(lambda: dglnn.SGConv(WIDTH, WIDTH, 1, allow_zero_in_degree=True), error=NOT_ON_BLOCKS),
    "SGConv-2": Entry(lambda: dglnn.SGConv(WIDTH, WIDTH, 2, allow_zero_in_degree=True), error=NOT_ON_BLOCKS),
    "TAGConv-1": Entry(lambda: dglnn.TAGConv(WIDTH, WIDTH, 1), error=NOT_ON_BLOCKS),
    "TAGConv-2": Entry(lambda: dglnn.TAGConv(WIDTH, WIDTH, 2), error=NOT_ON_BLOCKS),
    "APPNPConv": Entry(lambda: dglnn.APPNPConv(2, 0.3), error=NOT_ON_BLOCKS),
    "ChebConv": Entry(
        lambda: dglnn.ChebConv(WIDTH, WIDTH, 2), lambda c, g, h: c(g, h, lambda_max=[2.0]), error=NOT_ON_BLOCKS
    ),
    "EGNNConv": Entry(lambda: dglnn.EGNNConv(WIDTH, WIDTH, WIDTH), _egnn, error=NOT_ON_BLOCKS),
    "TWIRLSConv": Entry(lambda: dglnn.TWIRLSConv(WIDTH, WIDTH, WIDTH, prop_step=2), error=NOT_ON_BLOCKS),
    "AtomicConv": Entry(
        lambda: dglnn.AtomicConv(torch.ones(2), torch.ones(2), torch.ones(2)),
        lambda c, g, h: c(g, h[:, :1], g.edata["w"][:, None]).repeat(1, 2),
        error=NOT_ON_BLOCKS,
    ),
    "HeteroGraphConv": Entry(
        lambda: dglnn.HeteroGraphConv({"_E": dglnn.SAGEConv(WIDTH, WIDTH, "mean")}),
        lambda c, g, h: c(g, {"_N": h})["_N"],
    ),
}
OTHER_WAYS: dict[str, Entry] = {
    "RelGraphConv-presorted": Entry(lambda: dglnn.RelGraphConv(WIDTH, WIDTH, NUM_TYPES), _with_types_said_to_be_sorted),
    "RelGraphConv-basis-presorted": Entry(
        lambda: dglnn.RelGraphConv(WIDTH, WIDTH, NUM_TYPES, regularizer="basis", num_bases=2),
        _with_types_said_to_be_sorted,
    ),
    "HGTConv-presorted": Entry(
        lambda: dglnn.HGTConv(WIDTH, WIDTH // 2, 2, NUM_TYPES, NUM_TYPES, dropout=0.0), _hgt_said_to_be_sorted
    ),
    "gsddmm": Entry(lambda: nn.Linear(WIDTH, WIDTH), _long_names_of_targets),
    "srcnodes": Entry(lambda: nn.Linear(WIDTH, WIDTH), _fields_by_type),
    "GroupRevRes": Entry(
        lambda: dglnn.GroupRevRes(dglnn.GraphConv(WIDTH // 2, WIDTH // 2, **ZERO), 2), error=NOT_ON_BLOCKS
    ),
}
"""To use modules and blocks."""


class Stack(nn.Module):
    def __init__(self, name: str, num_layers: int = 2) -> None:
        super().__init__()
        self.entry = (MODULES | OTHER_WAYS)[name]
        self.first = nn.Linear(5, WIDTH)
        self.convs = nn.ModuleList(self.entry.make() for _ in range(num_layers))

    def forward(self, graphs: list[Any], x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        for conv, graph in zip(self.convs, graphs, strict=True):
            h = self.entry.call(conv, graph, h)
            h = torch.tanh(h.mean(1) if h.dim() == 3 else h)
        return h


def build(name: str) -> Stack:
    torch.manual_seed(5)
    return Stack(name).double()


def _loss(logits: Tensor, node_ids: Tensor) -> Tensor:
    """A sum of terms that depend on the node, so that no two rows may change places."""
    columns = torch.arange(logits.shape[1], dtype=logits.dtype)
    return (logits * torch.sin(node_ids[:, None] + 2.0 * columns)).sum()


@dataclass
class Outcome:
    node_ids: Tensor
    logits: Tensor
    grads: dict[str, Tensor]


def run_module(rank: int, world_size: int, part_config: str, name: str) -> Outcome:
    g = PartitionedGraph.open(part_config)
    foreign = torch.arange(g.num_nodes())
    foreign = foreign[~g.nodes.is_owned(foreign)]
    generator = torch.Generator().manual_seed(17 + rank)
    plan = [foreign[torch.rand(len(foreign), generator=generator) < 0.5] for _ in range(2)]
    sampler = dgl.dataloading.MultiLayerFullNeighborSampler(2, prefetch_edge_feats=["w"])
    loader = FullGraphLoader(g, g.owned_nodes("train_mask"), sampler, plan=plan, loss_reduction="sum")
    model = build(name)
    for input_nodes, seeds, blocks in loader:
        ids = g.ndata["id"][seeds]
        logits = model(blocks, g.ndata["feat"][input_nodes])
        _loss(logits, ids).backward()
    grads = {}
    for key, parameter in model.named_parameters():
        grads[key] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad / world_size
        dist.all_reduce(grads[key])
    own = loader.num_seeds
    return Outcome(ids[:own], logits.detach()[:own], grads)


def run_reference(graph: Any, name: str) -> Outcome:
    model = build(name)
    ids = torch.nonzero(graph.ndata["train_mask"]).flatten()
    logits = model([graph, graph], graph.ndata["feat"])[ids]
    _loss(logits, ids).backward()
    grads = {
        key: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for key, parameter in model.named_parameters()
    }
    return Outcome(ids, logits.detach(), grads)
