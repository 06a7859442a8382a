# SPDX-License-Identifier: Apache-2.0
"""One training step on ranks and on one process, compared element by element.

`run_step` is the function ranks run; `reference_step` is the same script on the whole graph with plain DGL. Both
return results by original node id.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import dgl
import dgl.nn as dglnn
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dgl_hybrid import FullGraphLoader, PartitionedGraph
from dgl_hybrid.exchange.connect import RankTransport, create_communicator
from dgl_hybrid.exchange.locality import RowOrder
from dgl_hybrid.graph.optimize import optimize
from dgl_hybrid.planner import DependencyPlan, PlannerConfig, uniform_topology
from dgl_hybrid.training.gradients import average_gradients
from tests.helpers.graphs import NUM_CLASSES
from tests.helpers.rates import assumed_slowdowns

TOLERANCE = 1e-9
"""Of |a - b| relative to max(|b|, max|tensor|): float64 sums in another order stay far below it."""

MIXING_RATES = {"latency_s": 0.0, "bandwidth_bytes_per_s": 3e8}
"""Of the machine that is planned for. With latencies of a real one no row of so small a graph is worth a message, and
what is called hybrid would be depcache."""
DEAR_ROWS = {"gatv2": 4.0}
"""How many times as long rows of a kind travel there. A row that takes long to compute would always be communicated,
and what is called hybrid would be depcomm above the inputs."""

ROUNDING = 1e-15
"""Absolute, for quantities whose terms are of order one and cancel."""


def mixing_rates(kind: str) -> dict[str, float]:
    """Returns rates of a machine on which hybrid plans of such layers mix."""
    bandwidth = MIXING_RATES["bandwidth_bytes_per_s"] / DEAR_ROWS.get(kind, 1.0)
    return MIXING_RATES | {"bandwidth_bytes_per_s": bandwidth}


class UserDefined(nn.Module):
    """A layer whose message and reduce functions are plain Python: no builtin of DGL."""

    def __init__(self, in_feats: int, out_feats: int) -> None:
        super().__init__()
        self.message = nn.Linear(2 * in_feats, out_feats)
        self.self_loop = nn.Linear(in_feats, out_feats)

    def forward(self, graph: Any, feat: Tensor) -> Tensor:
        with graph.local_scope():
            graph.srcdata["x"] = feat
            graph.dstdata["x"] = feat[: graph.num_dst_nodes()]
            graph.update_all(
                lambda edges: {
                    "m": torch.tanh(self.message(torch.cat([edges.src["x"], edges.dst["x"]], 1)))
                    * edges.data["w"][:, None]
                },
                lambda nodes: {"y": nodes.mailbox["m"].sum(1)},
            )
            return self.self_loop(feat[: graph.num_dst_nodes()]) + graph.dstdata["y"]


class DirectOps(nn.Module):
    """A layer that gives operands to `dgl.ops` itself, past the graph's frames."""

    def __init__(self, in_feats: int, out_feats: int) -> None:
        super().__init__()
        self.linear = nn.Linear(in_feats, out_feats)

    def forward(self, graph: Any, feat: Tensor) -> Tensor:
        h = self.linear(feat)
        score = dgl.ops.u_dot_v(graph, h, h[: graph.num_dst_nodes()])
        weight = dgl.nn.functional.edge_softmax(graph, score)
        return dgl.ops.u_mul_e_sum(graph, h, weight) + dgl.ops.copy_u_max(graph, h)


class WeightedConv(nn.Module):
    """GraphConv over weights normalised by EdgeWeightNorm."""

    def __init__(self, in_feats: int, out_feats: int, norm: str = "both", eps: float = 0.0) -> None:
        super().__init__()
        self.norm = dglnn.EdgeWeightNorm(norm=norm, eps=eps)
        self.conv = dglnn.GraphConv(in_feats, out_feats, norm="none", allow_zero_in_degree=True)

    def forward(self, graph: Any, feat: Tensor) -> Tensor:
        return self.conv(graph, feat, edge_weight=self.norm(graph, graph.edata["w"]))


class EveryWay(nn.Module):
    """A layer that sums rows, sums them by weights, and attends to them."""

    def __init__(self, in_feats: int, out_feats: int) -> None:
        super().__init__()
        self.sums = dglnn.GraphConv(in_feats, out_feats, norm="right", allow_zero_in_degree=True)
        self.weighted = dglnn.GraphConv(in_feats, out_feats, norm="none", allow_zero_in_degree=True)
        self.attention = _gat(dglnn.GATConv, in_feats, out_feats)

    def forward(self, graph: Any, feat: Tensor) -> Tensor:
        weighted = self.weighted(graph, feat, edge_weight=graph.edata["w"])
        out: Tensor = self.sums(graph, feat) + weighted + self.attention(graph, feat).mean(1)
        return out


def _gat(kind: Any, a: int, b: int, **options: float) -> nn.Module:
    return kind(a, b, 2, residual=True, allow_zero_in_degree=True, **options)


LAYERS: dict[str, Callable[[int, int], nn.Module]] = {
    "gcn_both": lambda a, b: dglnn.GraphConv(a, b, norm="both", allow_zero_in_degree=True),
    "gcn_right": lambda a, b: dglnn.GraphConv(a, b, norm="right", allow_zero_in_degree=True),
    "gcn_left": lambda a, b: dglnn.GraphConv(a, b, norm="left", allow_zero_in_degree=True),
    "gcn_none": lambda a, b: dglnn.GraphConv(a, b, norm="none", allow_zero_in_degree=True),
    "sage_mean": lambda a, b: dglnn.SAGEConv(a, b, "mean"),
    "sage_gcn": lambda a, b: dglnn.SAGEConv(a, b, "gcn"),
    "sage_pool": lambda a, b: dglnn.SAGEConv(a, b, "pool"),
    "gat": lambda a, b: _gat(dglnn.GATConv, a, b),
    "gatv2": lambda a, b: _gat(dglnn.GATv2Conv, a, b),
    "gin": lambda a, b: dglnn.GINConv(nn.Sequential(nn.Linear(a, b), nn.Tanh(), nn.Linear(b, b)), "sum"),
    "gin_max": lambda a, b: dglnn.GINConv(nn.Linear(a, b), "max"),
    "gin_learned": lambda a, b: dglnn.GINConv(nn.Linear(a, b), "mean", init_eps=0.3, learn_eps=True),
    "edge_weight_norm": WeightedConv,
    "edge_weight_norm_eps": lambda a, b: WeightedConv(a, b, "both", eps=0.3),
    "edge_weight_norm_right": lambda a, b: WeightedConv(a, b, "right", eps=0.3),
    "user_defined": UserDefined,
    "direct_ops": DirectOps,
    "dotgat": lambda a, b: dglnn.DotGatConv(a, b, 1, allow_zero_in_degree=True),
    "agnn": lambda a, b: nn.ModuleList([dglnn.AGNNConv(allow_zero_in_degree=True), nn.Linear(a, b)]),
    "every_way": EveryWay,
    "edgeconv": lambda a, b: dglnn.EdgeConv(a, b, allow_zero_in_degree=True),
}

RANDOM_LAYERS: dict[str, Callable[[int, int], nn.Module]] = {
    "gat_attn_drop": lambda a, b: _gat(dglnn.GATConv, a, b, attn_drop=0.3),
}
"""Whose masks are ours, so that plain DGL gives other numbers: to be compared with fewer ranks."""


class Model(nn.Module):
    """A stack of one kind of layer, called as `model(blocks, x)`; on the whole graph, blocks are the graph itself."""

    def __init__(
        self,
        kind: str,
        in_feats: int,
        num_layers: int,
        *,
        residual: bool = False,
        dropout: float = 0.0,
        batch_norm: bool = False,
        head_norm: bool = False,
        norm_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        hidden = 4
        widths = [in_feats] + [hidden] * (num_layers - 1) + [NUM_CLASSES]
        self.layers = nn.ModuleList((LAYERS | RANDOM_LAYERS)[kind](a, b) for a, b in itertools.pairwise(widths))
        self.residual = residual
        self.dropout = nn.Dropout(dropout)

        def norms(width: int) -> nn.ModuleList:
            return nn.ModuleList(nn.BatchNorm1d(width, **(norm_options or {})) for _ in range(num_layers - 1))

        self.norms = norms(hidden) if batch_norm else None
        self.head_norms = norms(2) if head_norm else None

    def forward(self, blocks: Sequence[Any], x: Tensor) -> Tensor:
        h = x
        for index, (layer, block) in enumerate(zip(self.layers, blocks, strict=True)):
            h = self.dropout(h)
            if isinstance(layer, nn.ModuleList):
                out = layer[1](layer[0](block, h))
            else:
                out = layer(block, h)
            if out.dim() == 3:
                if self.head_norms is not None and index < len(self.head_norms):
                    out = self.head_norms[index](out)
                out = out.mean(1)
            if self.residual and out.shape[1] == h.shape[1]:
                out = out + h[: len(out)]
            if index < len(self.layers) - 1:
                if self.norms is not None:
                    out = self.norms[index](out)
                out = torch.tanh(out)
            h = out
        return h


@dataclass(frozen=True, kw_only=True)
class Case:
    """What to train and how its dependencies are treated."""

    kind: str
    num_layers: int = 2
    residual: bool = False
    dropout: float = 0.0
    batch_norm: bool = False
    head_norm: bool = False
    """Batch norm of each head of attention, before their mean: over rows of three dimensions."""
    norm_options: Mapping[str, Any] | None = None
    """Of `nn.BatchNorm1d`."""
    plan: str = "depcomm"
    """"depcomm", "depcache", "random:<seed>:<probability>", "planned:<strategy>[:<max_halo_edges>]", or
    "planned-random:…": random ids in a plan that knows the model, so that owners aggregate for what is cached at level
    1."""
    dtype: torch.dtype = torch.float64
    epochs: int = 1
    lr: float = 0.05
    seed: int = 3
    row_order: RowOrder = "id"
    optimized: bool = False
    """Whether ranks run the model after `optimize`; the reference never does."""
    overlap: bool = True
    chunk_rows: int | None = None
    partial_sums: bool | None = None
    rank_transport: RankTransport = "auto"
    device: str = "cpu"
    """Where ranks train; the reference is computed on the CPU."""

    def build(self, in_feats: int) -> Model:
        torch.manual_seed(self.seed)
        model = Model(
            self.kind,
            in_feats,
            self.num_layers,
            residual=self.residual,
            dropout=self.dropout,
            batch_norm=self.batch_norm,
            head_norm=self.head_norm,
            norm_options=self.norm_options,
        )
        return model.to(self.dtype)


@dataclass(kw_only=True)
class StepResult:
    """Results by original id; sums over ranks are the caller's."""

    losses: list[float] = field(default_factory=list)
    """Of the whole graph, each epoch."""
    node_ids: Tensor
    logits: Tensor
    input_ids: Tensor
    input_grad: Tensor
    weight_grads: dict[str, Tensor]
    buffers: dict[str, Tensor]
    forward_exchanges: int = 0
    backward_exchanges: int = 0
    cached: list[int] = field(default_factory=list)
    """By level: foreign rows that this rank computes itself, and those that it receives."""
    received: list[int] = field(default_factory=list)


def forced_plan(
    g: PartitionedGraph, case: Case, model: nn.Module | None = None
) -> list[Tensor] | DependencyPlan | None:
    foreign = torch.arange(g.num_nodes())
    foreign = foreign[~g.nodes.is_owned(foreign)]
    kind, *options = case.plan.split(":")
    if kind == "planned-random":
        ids = forced_plan(g, replace(case, plan=f"random:{case.plan.partition(':')[2]}"))
        topology = uniform_topology(g.nodes.world_size)
        seeds = g.owned_nodes("train_mask")
        sampler = dgl.dataloading.MultiLayerFullNeighborSampler(case.num_layers, prefetch_edge_feats=["w"])
        with assumed_slowdowns():
            made = FullGraphLoader(g, seeds, sampler, model=model, topology=topology, autotune=False)
        assert made.outcome is not None
        assert isinstance(ids, list)
        return replace(made.outcome.plan, cached=tuple(ids))
    if kind == "depcomm":
        return [foreign[:0]] * case.num_layers
    if kind == "depcache":
        return [foreign] * case.num_layers
    if kind == "random":
        generator = torch.Generator().manual_seed(int(options[0]) * 100 + g.rank())
        return [
            foreign[torch.rand(len(foreign), generator=generator) < float(options[1])] for _ in range(case.num_layers)
        ]
    return None


def run_step(
    rank: int, world_size: int, part_config: str, case: Case, original_ids: Tensor | None = None
) -> StepResult:
    """What a user's script does, on one rank.

    Args:
        original_ids: (num_nodes,) by global id, where the folder does not tell them.
    """
    communicator = create_communicator(transport=case.rank_transport)
    g = PartitionedGraph.open(part_config, communicator=communicator)
    local = g.partition.orig_node_ids if original_ids is None else original_ids[g.nodes.owned()]
    return step_on(g, g, case, local)


def step_on(
    graph: Any, g: PartitionedGraph, case: Case, original_ids: Tensor, *, transport: str | None = None
) -> StepResult:
    """One rank's training.

    Args:
        graph: What the script has: `g` itself, or a `DistGraph`.
        g: As this rank sees it.
        original_ids: (N,) of the nodes this rank owns.
        transport: Of a `DistGraph`; with "kvstore" gradients are averaged without DDP.
    """
    world_size = g.nodes.world_size
    model = case.build(g.ndata["feat"].shape[1]).to(case.device)
    if case.optimized:
        optimize(model)
    plan = forced_plan(g, case, model)
    has_ddp = transport != "kvstore" and torch.distributed.is_initialized()
    ddp = nn.parallel.DistributedDataParallel(model) if has_ddp else model
    sampler = dgl.dataloading.MultiLayerFullNeighborSampler(
        case.num_layers, prefetch_node_feats=["feat"], prefetch_edge_feats=["w"]
    )
    planner = PlannerConfig(strategy="depcomm")
    if plan is None:
        _, strategy, *limit = case.plan.split(":")
        planner = PlannerConfig(strategy=strategy)
        if limit:
            planner = replace(planner, max_halo_edges=int(limit[0]))
    with assumed_slowdowns():
        loader = FullGraphLoader(
            graph,
            g.owned_nodes("train_mask"),
            sampler,
            case.device,
            plan=plan,
            model=None if plan else model,
            planner=planner,
            topology=uniform_topology(world_size, **mixing_rates(case.kind)),
            seed=7,
            row_order=case.row_order,
            overlap=case.overlap,
            chunk_rows=case.chunk_rows,
            partial_sums=case.partial_sums,
            transport=transport,
        )
    optimizer = torch.optim.SGD(ddp.parameters(), lr=case.lr)
    losses = []
    g.communicator.clock.drain()
    for _ in range(case.epochs):
        for input_nodes, seeds, blocks in loader:
            x = graph.ndata["feat"][input_nodes].clone().requires_grad_()
            optimizer.zero_grad()
            logits = ddp(blocks, x)
            loss = F.cross_entropy(logits, graph.ndata["label"][seeds])
            loss.backward()
            if not has_ddp:
                average_gradients(model, loader)
        losses.append(loss.item() * loader.loss_weight / world_size)
        grads = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        optimizer.step()
    events = [event for event in g.communicator.clock.drain() if event.layer > 0]
    own = loader.num_seeds
    return StepResult(
        losses=losses,
        node_ids=original_ids[seeds[:own].cpu() - g.nodes.start],
        logits=logits.detach()[:own].cpu(),
        input_ids=g.fetch_nodes(original_ids, input_nodes.cpu()),
        # Every rank's loss entered with the factor world_size that DDP's average takes away again.
        input_grad=x.grad.cpu() / world_size,
        weight_grads={name: grad.cpu() for name, grad in grads.items()},
        buffers={name: buffer.clone().cpu() for name, buffer in model.named_buffers()},
        forward_exchanges=sum(not event.backward for event in events),
        backward_exchanges=sum(event.backward for event in events),
        cached=[loader.sets.num_recomputed(level) for level in range(case.num_layers)],
        received=[structure.exchange.num_received for structure in loader.sets.layers],
    )


def reference_step(graph: dgl.DGLGraph, case: Case) -> StepResult:
    """The same on one process with plain DGL and the whole graph; without dropout (its masks are ours)."""
    assert case.dropout == 0.0
    model = case.build(graph.ndata["feat"].shape[1])
    optimizer = torch.optim.SGD(model.parameters(), lr=case.lr)
    train = graph.ndata["train_mask"].bool()
    losses = []
    for _ in range(case.epochs):
        x = graph.ndata["feat"].clone().requires_grad_()
        optimizer.zero_grad()
        logits = model([graph] * case.num_layers, x)
        loss = F.cross_entropy(logits[train], graph.ndata["label"][train])
        loss.backward()
        losses.append(loss.item())
        grads = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        optimizer.step()
    ids = torch.nonzero(train).flatten()
    return StepResult(
        losses=losses,
        node_ids=ids,
        logits=logits.detach()[ids],
        input_ids=torch.arange(graph.num_nodes()),
        input_grad=x.grad,
        weight_grads=grads,
        buffers={name: buffer.clone() for name, buffer in model.named_buffers()},
    )


def assert_close(actual: Tensor, expected: Tensor, what: str, tolerance: float = TOLERANCE) -> None:
    """`|a - b| <= 1e-9 * max(|b|, max|tensor|)`, element by element.

    Some gradients are zero by mathematics and rounding noise by computation: a bias before batch norm, attention terms
    where every destination has one in-edge. Hence the floor of `ROUNDING`.
    """
    assert actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)} for {tuple(expected.shape)}"
    scale = expected.abs().clamp(min=float(expected.abs().max()) if expected.numel() else 0.0)
    wrong = (actual - expected).abs() > tolerance * scale + max(ROUNDING, 1e-3 * tolerance * (tolerance > TOLERANCE))
    wrong |= ~torch.isfinite(actual)
    assert not bool(wrong.any()), (
        f"{what}: {int(wrong.sum())} of {wrong.numel()} elements differ, the worst by "
        f"{float((actual - expected).abs().max()):.3e} (largest element {float(expected.abs().max()):.3e})"
    )


def assert_same_step(results: list[StepResult], expected: StepResult, tolerance: float = TOLERANCE) -> None:
    """Compares what all ranks computed with the reference: losses, logits, input gradients, weight gradients."""
    for epoch, loss in enumerate(expected.losses):
        total = sum(result.losses[epoch] for result in results)
        assert abs(total - loss) <= tolerance * max(1.0, abs(loss)), f"loss of epoch {epoch}: {total} for {loss}"
    logits = torch.full_like(expected.logits, float("nan"))
    position = {int(node): row for row, node in enumerate(expected.node_ids)}
    for result in results:
        for row, node in enumerate(result.node_ids.tolist()):
            logits[position[node]] = result.logits[row]
    assert_close(logits, expected.logits, "logits", tolerance)
    input_grad = torch.zeros_like(expected.input_grad)
    for result in results:
        input_grad.index_add_(0, result.input_ids, result.input_grad)
    assert_close(input_grad, expected.input_grad, "input gradients", tolerance)
    for result in results:
        for name, grad in expected.weight_grads.items():
            assert_close(result.weight_grads[name], grad, f"gradient of {name}", tolerance)
        assert result.buffers.keys() == expected.buffers.keys()
        for name, buffer in expected.buffers.items():
            if buffer.is_floating_point():
                assert_close(result.buffers[name], buffer, f"buffer {name}", tolerance)
            else:
                assert torch.equal(result.buffers[name], buffer), f"buffer {name}: {result.buffers[name]} for {buffer}"


def is_mixed(results: Sequence[StepResult]) -> bool:
    """Whether some rank computes some foreign rows of a level and receives others of it."""
    return any(
        cached > 0 and received > 0
        for result in results
        for cached, received in zip(result.cached, result.received, strict=True)
    )
