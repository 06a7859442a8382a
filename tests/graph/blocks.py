# SPDX-License-Identifier: Apache-2.0
"""What ranks run in the tests of blocks: one layer, all from the owners."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import dgl
import dgl.backend.pytorch.sparse as dgls_sparse
import dgl.function as fn
import dgl.nn as dglnn
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dgl_hybrid import FullGraphLoader, PartitionedGraph
from dgl_hybrid.ops.op_counts import op_counts, reset_op_counts
from dgl_hybrid.ops.routing import route_ops


def one_layer(
    part_config: str, *, edgeless_rank: int | None = None, keep_static: bool = True, **sampler: Any
) -> tuple[Any, Any, Any]:
    """Opens the graph and yields `(g, x, block)`; the rank's block has no edges if its seed has no in-edge."""
    g = PartitionedGraph.open(part_config)
    seeds = g.owned_nodes()
    if g.rank() == edgeless_rank:
        seeds = seeds[g.partition.in_degrees == 0]
    loader = FullGraphLoader(
        g,
        seeds,
        dgl.dataloading.MultiLayerFullNeighborSampler(1, **sampler),
        plan=[torch.empty(0, dtype=torch.int64)],
        seed=7,
        keep_static=keep_static,
    )
    ((input_nodes, _, (block,)),) = list(loader)
    x = g.ndata["feat"][input_nodes].clone().requires_grad_()
    return g, x, (block, loader)


class UserReduce(nn.Module):
    """User-defined reduces that have caught ranks without edges."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.table = nn.Embedding(1, 5).double()
        self.edge = nn.Linear(1, 5).double()

    def forward(self, block: Any, x: Tensor) -> Tensor:
        with block.local_scope():
            block.srcdata["h"] = x
            block.dstdata["h"] = x[: block.num_dst_nodes()]
            getattr(self, self.kind)(block, x)
            return block.dstdata["h"]

    def overwrite(self, block: Any, x: Tensor) -> None:
        block.update_all(fn.copy_u("h", "m"), lambda nodes: {"h": nodes.mailbox["m"].sum(1)})

    def two_exchanges(self, block: Any, x: Tensor) -> None:
        block.update_all(fn.copy_u("h", "m"), lambda nodes: {"a": nodes.mailbox["m"].sum(1)})
        block.srcdata["g"] = x * 2
        block.update_all(fn.copy_u("g", "m"), lambda nodes: {"h": nodes.mailbox["m"].max(1)[0]})
        block.dstdata["h"] = block.dstdata["h"] + block.dstdata["a"]

    def table_lookup(self, block: Any, x: Tensor) -> None:
        block.srcdata["t"] = torch.zeros(len(x), dtype=torch.int64)
        block.update_all(
            lambda edges: {"m": edges.src["h"] + self.table(edges.src["t"])},
            lambda nodes: {"h": nodes.mailbox["m"].sum(1)},
        )

    def dropped_messages(self, block: Any, x: Tensor) -> None:
        block.update_all(
            lambda edges: {"m": F.dropout(edges.src["h"], 0.5)}, lambda nodes: {"h": nodes.mailbox["m"].sum(1)}
        )

    def edge_field(self, block: Any, x: Tensor) -> None:
        block.edata["e"] = self.edge(block.edata["w"][:, None])
        block.update_all(fn.copy_e("e", "m"), lambda nodes: {"h": nodes.mailbox["m"].sum(1)})

    def max_of_edges(self, block: Any, x: Tensor) -> None:
        block.apply_edges(lambda edges: {"e": edges.src["h"] * 2.0})
        block.update_all(fn.copy_e("e", "m"), fn.max("m", "h"))

    def flattened_messages(self, block: Any, x: Tensor) -> None:
        def flatten(edges: Any) -> dict[str, Tensor]:
            rows = F.dropout(edges.src["h"], 0.5) * self.edge(edges.data["w"][:, None])
            return {"m": rows.reshape(len(rows), -1)}

        block.update_all(flatten, fn.max("m", "h"))

    def flattened_and_applied(self, block: Any, x: Tensor) -> None:
        def flatten(edges: Any) -> dict[str, Tensor]:
            return {"m": edges.src["h"].reshape(len(edges), -1)}

        block.update_all(flatten, fn.mean("m", "a"), lambda nodes: {"h": nodes.data["a"] + 0.0 * nodes.data["h"]})

    def flattened_edges(self, block: Any, x: Tensor) -> None:
        block.apply_edges(lambda edges: {"e": edges.src["h"].reshape(len(edges), -1)})
        block.update_all(fn.copy_e("e", "m"), fn.sum("m", "h"))

    def messages_times_outer(self, block: Any, x: Tensor) -> None:
        by_edge = self.edge(block.edata["w"][:, None])
        block.update_all(lambda edges: {"m": torch.cat([edges.src["h"], by_edge], 1)}, fn.sum("m", "h"))

    def direct_max(self, block: Any, x: Tensor) -> None:
        y = dgl.ops.u_mul_e_max(block, x, self.edge(block.edata["w"][:, None]))
        # DGL answers -inf where there is no in-edge, here as on the whole graph.
        assert torch.equal(torch.isneginf(y).all(1), block.in_degrees() == 0)
        block.dstdata["h"] = torch.where(torch.isinf(y), torch.zeros_like(y), y)


class ReadsSome(nn.Module):
    """User-defined functions that read some of the fields that are set: "h" and "z" need gradients, "feat" does not."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.kind = kind
        self.linear = nn.Linear(5, 5).double()

    def forward(self, block: Any, x: Tensor) -> Tensor:
        with block.local_scope():
            block.srcdata["feat"] = x.detach().clone()
            block.srcdata["h"] = torch.sin(x)
            block.srcdata["z"] = (3 * x).float()  # of another dtype, so in a message of its own
            block.dstdata["d"] = torch.cos(x[: block.num_dst_nodes()])
            getattr(self, self.kind)(block)
            result: Tensor = block.dstdata["y"]
            return result

    def one_of_two_dtypes(self, block: Any) -> None:
        block.update_all(
            lambda edges: {"m": torch.tanh(edges.src["h"])}, lambda nodes: {"y": nodes.mailbox["m"].sum(1)}
        )

    def two_fields_of_two_ends(self, block: Any) -> None:
        block.update_all(
            lambda edges: {"m": edges.src["h"] * edges.src["feat"]},
            lambda nodes: {"y": nodes.mailbox["m"].sum(1) * nodes.data["d"]},
        )

    def no_gradient(self, block: Any) -> None:
        block.update_all(lambda edges: {"m": edges.src["feat"]}, lambda nodes: {"y": nodes.mailbox["m"].mean(1)})

    def writes_in_place(self, block: Any) -> None:
        block.edata["e"] = block.edata["w"][:, None] * self.linear.weight[0]
        block.update_all(
            lambda edges: {"m": edges.src["h"].mul_(2.0) * edges.data["e"].mul_(3.0)},
            lambda nodes: {"y": nodes.mailbox["m"].add_(1.0).sum(1) + nodes.data["d"].mul_(3.0)},
        )

    def parameter_alone(self, block: Any) -> None:
        block.update_all(
            lambda edges: {"m": self.linear(edges.src["feat"])}, lambda nodes: {"y": nodes.mailbox["m"].sum(1)}
        )


@dataclass(kw_only=True)
class SomeRead:
    """One rank's share, by original ids."""

    num_edges: int
    requires_grad: bool
    events: list[bool]
    """Of every exchange, whether it was one of the backward."""
    seeds: Tensor
    input_ids: Tensor
    gradients: dict[str, Tensor | None]


def loss_of_rows(y: Tensor, ids: Tensor) -> Tensor:
    """Another number for every row and column."""
    return (y * torch.sin(1.0 + ids[:, None] * 7.0 + torch.arange(y.shape[1]))).sum()


def run_reads_some(rank: int, world_size: int, part_config: str, kind: str, *, is_checkpointed: bool) -> SomeRead:
    g, x, (block, loader) = one_layer(part_config, edgeless_rank=0, prefetch_edge_feats=["w"])
    model = ReadsSome(kind)
    ids = g.fetch_nodes(g.partition.orig_node_ids, block.srcdata[dgl.NID])
    g.communicator.clock.drain()
    # By its forward, so that no loss weight enters.
    y = checkpoint(model.forward, block, x, use_reentrant=False) if is_checkpointed else model.forward(block, x)
    if y.requires_grad:
        loss_of_rows(y, ids[: len(y)]).backward()
    return SomeRead(
        num_edges=block.num_edges(),
        requires_grad=y.requires_grad,
        events=[event.backward for event in g.communicator.clock.drain()],
        seeds=ids[: loader.num_seeds],
        input_ids=ids,
        gradients={"input": x.grad, "weight": model.linear.weight.grad},
    )


def run_user_reduce(rank: int, world_size: int, part_config: str, kind: str) -> dict[str, Any]:
    torch.manual_seed(1)
    model = UserReduce(kind)
    g, x, (block, loader) = one_layer(part_config, edgeless_rank=0, prefetch_edge_feats=["w"])
    with torch.no_grad():
        evaluated = model(block, x)
    g.communicator.clock.drain()
    y = model(block, x)
    y.sum().backward()
    events = [event.backward for event in g.communicator.clock.drain()]
    no_edges = block.in_degrees() == 0
    return {
        "edges": block.num_edges(),
        "events": events,
        "of_nothing": float(y[no_edges].abs().sum() + evaluated[no_edges].abs().sum()),
        "edge_grad": model.edge.weight.grad is not None,
        "random_calls": loader._step.num_random_calls,
    }


def run_fields(rank: int, world_size: int, part_config: str) -> dict[str, bool]:
    _, x, (block, _) = one_layer(part_config)

    def aggregate() -> Tensor:
        block.update_all(fn.copy_u("h", "m"), fn.sum("m", "y"))
        result: Tensor = block.dstdata["y"]
        return result

    block.srcdata["h"] = x
    with torch.no_grad():
        aggregate()
    aggregate().sum().backward()
    kept, x.grad = x.grad, None
    block.srcdata["h"] = x
    aggregate().sum().backward()
    ones = torch.ones(len(x), 1)
    block.srcdata["h"] = ones
    before = aggregate()
    ones.mul_(2.0)
    after = aggregate()
    return {
        "gradient_after_no_grad": torch.equal(kept, x.grad),
        "in_place_write_is_seen": torch.equal(after, 2.0 * before),
    }


def run_routes(rank: int, world_size: int, part_config: str, served: Any) -> dict[str, int]:
    """Counts one forward and backward; of DGL's kernels none may run unless they are asked for."""
    _, x, (block, _) = one_layer(part_config)
    convs = [
        dglnn.SAGEConv(5, 3, "pool"),
        dglnn.GATConv(5, 3, 2, allow_zero_in_degree=True),
        dglnn.DotGatConv(5, 3, 2, allow_zero_in_degree=True),
    ]
    route_ops(served)
    reset_op_counts()
    kernels = {name: getattr(dgls_sparse, name) for name in ("_gspmm", "_gsddmm", "_edge_softmax_forward")}
    try:
        if served != "none":
            for name in kernels:
                setattr(dgls_sparse, name, None)
        for conv in convs:
            conv.double()(block, x).sum().backward()
        return op_counts()
    finally:
        for name, kernel in kernels.items():
            setattr(dgls_sparse, name, kernel)
        route_ops("layer_blocks")
        reset_op_counts()


def run_sums(rank: int, world_size: int, part_config: str, served: Any, chunk_rows: int | None) -> Any:
    """Sums of an unmodified layer, forward and backward, and which ops they went to."""
    g = PartitionedGraph.open(part_config)
    sampler = dgl.dataloading.MultiLayerFullNeighborSampler(1)
    plan = [torch.empty(0, dtype=torch.int64)]
    loader = FullGraphLoader(g, g.owned_nodes(), sampler, plan=plan, chunk_rows=chunk_rows)
    route_ops(served)
    reset_op_counts()
    try:
        ((input_nodes, seeds, (block,)),) = list(loader)
        x = g.ndata["feat"][input_nodes].clone().requires_grad_()
        out = dglnn.SAGEConv(5, 3, "mean").double()(block, x)
        out.square().sum().backward()
        return out.detach(), g.fetch_nodes(g.partition.orig_node_ids, seeds), x.grad, op_counts()
    finally:
        route_ops("layer_blocks")
        reset_op_counts()


def run_copies(rank: int, world_size: int, part_config: str) -> dict[str, bool]:
    g, _, (block, _) = one_layer(part_config, prefetch_node_feats=["feat"])
    checks = {}
    for name, copied in (("int", block.int()), ("long", block.int().long()), ("local_var", block.local_var())):
        checks[f"{name} keeps fields"] = copied.srcdata["feat"] is block.srcdata["feat"]
        read = g.ndata["feat"][copied.srcdata[dgl.NID]]
        checks[f"{name} keeps ids"] = read is g.ndata["feat"][block.srcdata[dgl.NID]]
        checks[f"{name} keeps degrees"] = torch.equal(copied.out_degrees().long(), block.out_degrees().long())
        checks[f"{name} keeps ids of edges"] = copied.edata[dgl.EID] is block.edata[dgl.EID]
    checks["to cpu is itself"] = block.to("cpu") is block and block.to(torch.device("cpu")) is block
    return checks


def run_edge_ids(rank: int, world_size: int, part_config: str) -> dict[str, bool]:
    """Ids of edges are made when first asked for, in whatever way, and rows are read by them from then on."""
    checks = {}
    nothing = torch.zeros(0)

    def ask_directly(block: Any) -> Tensor:
        asked: Tensor = block.edata[dgl.EID]
        return asked

    def ask_in_a_scope(block: Any) -> Tensor:
        with block.local_scope():
            asked: Tensor = block.edata[dgl.EID]
        return asked

    def ask_in_a_function(block: Any) -> Tensor:
        with block.local_scope():
            block.apply_edges(lambda edges: {"ids": edges.data[dgl.EID]})
            asked: Tensor = block.edata["ids"]
        return asked

    def ask_by_a_builtin(block: Any) -> Tensor:
        with block.local_scope():
            block.update_all(fn.copy_e(dgl.EID, "m"), lambda nodes: {"ids": nodes.mailbox["m"].sum(1)})
            sums: Tensor = block.dstdata["ids"]
        expected = torch.zeros_like(sums)
        dst = torch.repeat_interleave(torch.arange(len(sums)), block.in_degrees())
        expected.index_add_(0, dst, block.edata[dgl.EID])
        return block.edata[dgl.EID] if torch.equal(sums, expected) else nothing

    for ask in (ask_directly, ask_in_a_scope, ask_in_a_function, ask_by_a_builtin):
        g, _, (block, loader) = one_layer(part_config)
        lists = [g.in_edges.lookup(node[None])[2] for node in block.dstdata[dgl.NID]]
        name = ask.__name__
        checks[f"{name}: nothing before"] = dgl.EID not in block._block.edata and block._edge_ids.made is None
        checks[f"{name}: the ids"] = torch.equal(ask(block), torch.cat(lists))
        checks[f"{name}: the same tensor again"] = block.edata[dgl.EID] is block.edata[dgl.EID]
        rows = g.edata["w"][block.edata[dgl.EID]]
        checks[f"{name}: a known tensor"] = rows is g.edata["w"][block.edata[dgl.EID]]
        checks[f"{name}: the same after an epoch"] = next(iter(loader))[2][0].edata[dgl.EID] is block._edge_ids.made
    return checks


def run_id_types(rank: int, world_size: int, part_config: str) -> dict[str, bool]:
    """The structure takes four bytes for an edge; what a script sees is as wide as a sampler's blocks."""
    _, _, (block, _) = one_layer(part_config)
    checks = {"held in few bytes": block.real_index.dtype == "int32" and block.structure.indices.dtype == torch.int32}
    for name, copied, dtype in (
        ("itself", block, torch.int64),
        ("int", block.int(), torch.int32),
        ("long", block.int().long(), torch.int64),
    ):
        ids = (copied.in_degrees(), copied.srcnodes(), copied.dstnodes())
        checks[name] = copied.idtype == dtype and all(tensor.dtype == dtype for tensor in ids)
        checks[f"{name}: positions"] = copied.dstnodes().tolist() == list(range(copied.num_dst_nodes()))
        checks[f"{name}: fields"] = copied.dstnodes[copied.dsttypes[0]].data[dgl.NID] is copied.dstdata[dgl.NID]
    return checks


def run_reads(rank: int, world_size: int, part_config: str) -> dict[str, bool]:
    g, _, (_, loader) = one_layer(part_config)
    field, ids = g.ndata["feat"], loader.input_nodes
    with torch.inference_mode():
        first = field[ids]
    checks = {"same tensor": field[ids] is first, "no inference tensor": not first.is_inference()}
    kept = first.clone()
    first.mul_(2.0)
    checks["write is not kept"] = torch.equal(field[ids], kept)
    field[ids].requires_grad_()
    checks["leaf is not kept"] = not field[ids].requires_grad
    checks["same tensor again"] = field[ids] is field[ids]
    return checks
