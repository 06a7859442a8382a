# SPDX-License-Identifier: Apache-2.0
"""Ids, features, edge data, degrees and splits of a homogeneous graph, against the graph before partitioning."""

from __future__ import annotations

import pickle

import dgl
import numpy as np
import torch
import torch.nn.functional as F
from dgl import DGLGraph
from dgl.nn import SAGEConv
from torch import Tensor

from tests.distdgl.context import Context, Findings, named


def check_node_ids(c: Context, f: Findings) -> None:
    """The parts cover all vertices, once."""
    g, book = c.g, c.g.get_partition_book()
    num_nodes = c.truth.graph.num_nodes()
    f.equal("num_nodes", (g.num_nodes(), g.number_of_nodes()), (num_nodes, num_nodes))
    f.same_ids("original ids", c.orig_nodes(torch.arange(num_nodes)), torch.arange(num_nodes))
    f.equal("num_partitions", book.num_partitions(), len(book.metadata()))
    mine = book.partid2nids(book.partid)
    f.true("this machine owns vertices", len(mine) > 0)
    f.true("owned ids belong to this part", bool((book.nid2partid(mine) == book.partid).all()))
    every = torch.cat([book.partid2nids(p) for p in range(book.num_partitions())])
    f.same_ids("owned by some part", every, torch.arange(num_nodes))
    f.same("local ids", book.nid2localnid(mine, book.partid), torch.arange(len(mine)))
    f.equal("num_nodes of the parts", sum(int(m["num_nodes"]) for m in book.metadata()), num_nodes)
    local = g.local_partition
    inner = local.ndata["inner_node"].bool()
    f.same_ids("inner vertices of the local partition", local.ndata[dgl.NID][inner], mine)
    f.equal("types", (g.ntypes, g.etypes), (["_N"], ["_E"]))


def check_edge_ids(c: Context, f: Findings) -> None:
    """Every edge id stands for the edge it stood for; it lives where its destination does."""
    g, book, whole = c.g, c.g.get_partition_book(), c.truth.graph
    f.equal("num_edges", (g.num_edges(), g.number_of_edges()), (whole.num_edges(), whole.num_edges()))
    every = torch.randperm(g.num_edges(), generator=c.generator())
    src, dst = g.find_edges(every)
    true_src, true_dst = whole.find_edges(c.orig_edges(every))
    f.same("sources", c.orig_nodes(src), true_src)
    f.same("destinations", c.orig_nodes(dst), true_dst)
    f.same("edges' parts", book.eid2partid(every), book.nid2partid(dst))
    mine = book.partid2eids(book.partid)
    f.same("local edge ids", book.eid2localeid(mine, book.partid), torch.arange(len(mine)))
    some = every[:50]
    sub = g.edge_subgraph(some)
    u, v = sub.edges()
    f.same("edge_subgraph ids", sub.edata[dgl.EID], some)
    f.same("edge_subgraph sources", c.orig_nodes(sub.ndata[dgl.NID][u]), true_src[:50])
    f.same("edge_subgraph destinations", c.orig_nodes(sub.ndata[dgl.NID][v]), true_dst[:50])


def check_features(c: Context, f: Findings) -> None:
    """Rows of vertices: all, some, in any order, repeated, none, by list, array and slice."""
    g, whole = c.g, c.truth.graph
    f.equal("names", sorted(g.ndata.keys()), sorted(whole.ndata.keys()))
    num_nodes = g.num_nodes()
    every = torch.arange(num_nodes)
    some = c.some(num_nodes, 200)
    repeated = torch.cat([some[:30], some[:30].flip(0), some[:1]])
    for name, truth in whole.ndata.items():
        data = g.ndata[name]
        f.equal(
            f"{name}: shape, dtype, length",
            (tuple(data.shape), data.dtype, len(data)),
            (tuple(truth.shape), truth.dtype, num_nodes),
        )
        for what, ids in (("all", every), ("some", some), ("repeated", repeated)):
            f.same(f"{name}, {what}", data[ids], truth[c.orig_nodes(ids)])
        f.equal(f"{name}, none", tuple(data[torch.empty(0, dtype=torch.int64)].shape), (0, *truth.shape[1:]))
        f.same(f"{name}, list", data[some[:5].tolist()], truth[c.orig_nodes(some[:5])])
        f.same(f"{name}, array", data[some[:5].numpy()], truth[c.orig_nodes(some[:5])])
        f.same(f"{name}, slice", data[3:40], truth[c.orig_nodes(every[3:40])])
    for mask in ("train_mask", "val_mask"):
        f.equal(f"{mask}.count_nonzero()", int(g.ndata[mask].count_nonzero()), int(whole.ndata[mask].sum()))
    f.true("ndata has no other name", "nope" not in g.ndata)
    f.raises("reading another name", KeyError, lambda: g.ndata["nope"])
    schemes = g.node_attr_schemes()
    f.equal("scheme of feat", (tuple(schemes["feat"].shape), schemes["feat"].dtype), ((12,), torch.float32))


def check_edge_data(c: Context, f: Findings) -> None:
    g, whole = c.g, c.truth.graph
    f.equal("names", sorted(g.edata.keys()), sorted(whole.edata.keys()))
    some = c.some(g.num_edges(), 400)
    for name, truth in whole.edata.items():
        for ids in (some, some[:1], torch.arange(g.num_edges())):
            f.same(name, g.edata[name][ids], truth[c.orig_edges(ids)])
        f.equal(f"{name}: shape", tuple(g.edata[name].shape), tuple(truth.shape))
    f.equal("edge schemes", sorted(g.edge_attr_schemes()), sorted(whole.edata.keys()))


def check_degrees(c: Context, f: Findings) -> None:
    """In-degrees anywhere; out-degrees of a part count the edges stored there, as in stock DGL."""
    some = c.some(c.g.num_nodes(), 150)
    f.same("in_degrees", c.g.in_degrees(some), c.truth.graph.in_degrees(c.orig_nodes(some)))
    f.same("in_degrees of all", c.g.in_degrees(), c.truth.graph.in_degrees(c.orig_nodes(torch.arange(c.g.num_nodes()))))


def check_out_degrees(c: Context, f: Findings) -> None:
    some = torch.arange(0, c.g.num_nodes(), 3)
    f.notes["out_degrees"] = c.g.out_degrees(some).tolist()
    f.compared += len(some)


def check_splits(c: Context, f: Findings) -> None:
    """`node_split`, `edge_split`: together the trainers get each element of the mask once."""
    g, whole, book = c.g, c.truth.graph, c.g.get_partition_book()
    split_nodes, split_edges = dgl.distributed.node_split, dgl.distributed.edge_split
    node_mask = whole.ndata["train_mask"][c.orig_nodes(torch.arange(g.num_nodes()))]
    edge_mask = whole.edata["train_mask"][c.orig_edges(torch.arange(g.num_edges()))]
    splits = {
        "nodes, DistTensor": (split_nodes, g.ndata["train_mask"], node_mask),
        "nodes, tensor": (split_nodes, node_mask, node_mask),
        "nodes, array": (split_nodes, node_mask.numpy(), node_mask),
        "edges, DistTensor": (split_edges, g.edata["train_mask"], edge_mask),
        "edges, tensor": (split_edges, edge_mask, edge_mask),
    }
    for what, (split, given, mask) in splits.items():
        for even in (True, False):
            mine = split(given, book, force_even=even)
            parts = c.gather(mine)
            f.same_ids(f"{what}, force_even={even}: all trainers' elements", torch.cat(parts), mask.nonzero().flatten())
            if even:
                sizes = [len(part) for part in parts]
                f.true(f"{what}: sizes {sizes} are even", max(sizes) - min(sizes) <= 1)
            else:
                owner = book.nid2partid(mine) if split is split_nodes else book.eid2partid(mine)
                f.true(f"{what}: only owned elements", bool((owner == book.partid).all()))


def check_policies(c: Context, f: Findings) -> None:
    """Accessors that scripts use to lay out their own tensors."""
    g, book = c.g, c.g.get_partition_book()
    policy = g.get_node_partition_policy("_N")
    f.equal(
        "node policy", (policy.get_size(), policy.get_part_size()), (g.num_nodes(), len(book.partid2nids(book.partid)))
    )
    policy = g.get_edge_partition_policy("_E")
    f.equal(
        "edge policy", (policy.get_size(), policy.get_part_size()), (g.num_edges(), len(book.partid2eids(book.partid)))
    )
    ids = c.some(g.num_nodes(), 60)
    f.same("parts by policy", g.ndata["feat"].part_policy.to_partid(ids), book.nid2partid(ids))
    f.equal("ids of types", (g.get_ntype_id("_N"), g.get_etype_id("_E")), (0, 0))
    f.equal("canonical type", g.to_canonical_etype("_E"), ("_N", "_E", "_N"))
    f.true("device and id type", str(g.device) == "cpu" and g.idtype == torch.int64 and not g.is_pinned())
    ranks = c.gather(g.rank())
    f.equal("ranks", sorted(ranks), list(range(c.world)))
    mine = book.partid2nids(book.partid)
    f.same("local rows", g.ndata["feat"].local_partition, c.truth.graph.ndata["feat"][c.orig_nodes(mine)])


def check_pickled_graph(c: Context, f: Findings) -> None:
    """A pickled graph, as sampler processes get it, reads and samples as the graph itself."""
    again = pickle.loads(pickle.dumps(c.g))
    ids = c.some(c.g.num_nodes(), 100)
    f.same("features", again.ndata["feat"][ids], c.truth.graph.ndata["feat"][c.orig_nodes(ids)])
    f.same("in_degrees", again.in_degrees(ids), c.truth.graph.in_degrees(c.orig_nodes(ids)))
    frontier = dgl.distributed.sample_neighbors(again, ids, -1)
    f.same_ids("frontier", c.orig_edges(frontier.edata[dgl.EID]), c.truth.graph.in_edges(c.orig_nodes(ids), form="eid"))
    f.equal("sizes", (again.num_nodes(), again.num_edges()), (c.g.num_nodes(), c.g.num_edges()))


def check_layer_wise_inference(c: Context, f: Findings) -> None:
    """Layer by layer over all vertices, each layer's rows kept in a DistTensor, equals the whole graph at once."""
    g, whole = c.g, c.truth.graph
    torch.manual_seed(7)
    layers = torch.nn.ModuleList([SAGEConv(12, 8, "mean"), SAGEConv(8, 8, "pool"), SAGEConv(8, 5, "gcn")])
    nodes = dgl.distributed.node_split(torch.ones(g.num_nodes(), dtype=torch.bool), g.get_partition_book())
    rows = g.ndata["feat"]
    with torch.no_grad():
        for depth, layer in enumerate(layers):
            width = 5 if depth == 2 else 8
            out = dgl.distributed.DistTensor((g.num_nodes(), width), torch.float32, f"layer{depth}", persistent=True)
            loader = dgl.dataloading.DistNodeDataLoader(
                g, nodes, dgl.dataloading.NeighborSampler([-1]), batch_size=97, shuffle=False, drop_last=False
            )
            for input_nodes, output_nodes, blocks in loader:
                h = rows[input_nodes]
                out[output_nodes] = step(layer, blocks[0], h, last=depth == 2)
            rows = out
            c.fence()
        h = whole.ndata["feat"]
        for depth, layer in enumerate(layers):
            h = step(layer, whole, h, last=depth == 2)
    every = torch.arange(g.num_nodes())
    f.same("logits", rows[every], h[c.orig_nodes(every)], rtol=1e-5, atol=1e-6)
    c.fence()


def step(layer: torch.nn.Module, graph: DGLGraph, h: Tensor, *, last: bool) -> Tensor:
    y: Tensor = layer(graph, (h, h[: graph.num_dst_nodes()]) if graph.is_block else h)
    return y if last else F.relu(y)


def check_split_of_ids(c: Context, f: Findings) -> None:
    """Ids where a mask is expected, as in many scripts' inference: stock DGL loses vertex 0, the plugin does not."""
    nodes = dgl.distributed.node_split(np.arange(c.g.num_nodes()), c.g.get_partition_book(), force_even=True)
    every = torch.cat(c.gather(nodes))
    f.same_ids("vertices", every, torch.arange(0 if c.plugin else 1, c.g.num_nodes()))


DATA_CHECKS = named(
    check_node_ids,
    check_edge_ids,
    check_features,
    check_edge_data,
    check_degrees,
    check_out_degrees,
    check_splits,
    check_split_of_ids,
    check_policies,
    check_pickled_graph,
    check_layer_wise_inference,
)
