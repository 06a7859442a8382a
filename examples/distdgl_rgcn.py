# SPDX-License-Identifier: Apache-2.0
"""Relational GCN on a partitioned heterograph: an ordinary DistDGL script that classifies papers.

    python examples/partition_scholar.py --num-parts 2 --out scholar_parts
    dgl-hybrid launch --part-config scholar_parts/scholar.json \
        examples/distdgl_rgcn.py --graph-name scholar --part-config scholar_parts/scholar.json

Papers have features; authors and venues have none and get embeddings, which live in the KVStore and are trained by
DGL's sparse optimizer.
"""

import argparse
import os
import time

import dgl
import dgl.nn as dglnn
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

TARGET = "paper"


class RelationalLayer(nn.Module):
    """One weight per edge type, one for the vertex itself."""

    def __init__(self, width, etypes):
        super().__init__()
        relations = {etype: dglnn.GraphConv(width, width, norm="right", bias=False) for etype in etypes}
        self.conv = dglnn.HeteroGraphConv(relations, aggregate="sum")
        for relation in relations.values():
            relation.set_allow_zero_in_degree(True)
        self.self_loop = nn.Linear(width, width)

    def forward(self, block, h):
        received = self.conv(block, h)
        out = {}
        for ntype, rows in h.items():
            rows = self.self_loop(rows[: block.num_dst_nodes(ntype)])
            out[ntype] = F.relu(rows + received[ntype] if ntype in received else rows)
        return out


class RGCN(nn.Module):
    def __init__(self, in_feats, width, num_classes, etypes, num_layers):
        super().__init__()
        self.project = nn.Linear(in_feats, width)
        self.layers = nn.ModuleList(RelationalLayer(width, etypes) for _ in range(num_layers))
        self.classify = nn.Linear(width, num_classes)

    def forward(self, blocks, feats, embeddings):
        h = {TARGET: self.project(feats), **embeddings}
        for layer, block in zip(self.layers, blocks, strict=True):
            h = layer(block, h)
        return self.classify(h[TARGET])


def uniform(shape, dtype):
    return torch.empty(shape, dtype=dtype).uniform_(-0.5, 0.5)


def main(args):
    dgl.distributed.initialize(args.ip_config)
    dist.init_process_group("gloo")
    torch.manual_seed(args.seed)
    dgl.seed(args.seed + dist.get_rank())

    g = dgl.distributed.DistGraph(args.graph_name, part_config=args.part_config)
    book, papers = g.get_partition_book(), g.nodes[TARGET].data
    train_nids = dgl.distributed.node_split(papers["train_mask"], book, ntype=TARGET, force_even=True)
    test_nids = dgl.distributed.node_split(papers["test_mask"], book, ntype=TARGET, force_even=True)
    # The sparse optimizer is collective: all trainers need the same number of batches.
    shortest = torch.tensor(len(train_nids))
    dist.all_reduce(shortest, dist.ReduceOp.MIN)
    train_nids = train_nids[: int(shortest)]
    num_classes = int(papers["label"][torch.arange(g.num_nodes(TARGET))].max()) + 1

    fanouts = [int(fanout) for fanout in args.fan_out.split(",")]
    sampler = dgl.dataloading.NeighborSampler(fanouts)
    loader = dgl.dataloading.DistNodeDataLoader(
        g, {TARGET: train_nids}, sampler, batch_size=args.batch_size, shuffle=True, drop_last=False
    )
    model = RGCN(papers["feat"].shape[1], args.num_hidden, num_classes, g.etypes, len(fanouts))
    # Not every batch has edges of every type.
    model = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    embeddings = {
        ntype: dgl.distributed.DistEmbedding(
            g.num_nodes(ntype), args.num_hidden, ntype, uniform, g.get_node_partition_policy(ntype)
        )
        for ntype in g.ntypes
        if ntype != TARGET
    }
    sparse_optimizer = dgl.distributed.optim.SparseAdam(list(embeddings.values()), lr=args.sparse_lr)

    def run_model(module, input_nodes, blocks):
        rows = {ntype: embedding(input_nodes[ntype]) for ntype, embedding in embeddings.items()}
        return module(blocks, papers["feat"][input_nodes[TARGET]], rows)

    for epoch in range(args.num_epochs):
        start = time.time()
        for input_nodes, seeds, blocks in loader:
            logits = run_model(model, input_nodes, blocks)
            loss = F.cross_entropy(logits, papers["label"][seeds[TARGET]])
            optimizer.zero_grad()
            sparse_optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            sparse_optimizer.step()
        print(f"rank {g.rank()}: epoch {epoch}, loss {loss.item():.4f}, {time.time() - start:.2f} s")

    model.eval()
    counts = torch.zeros(2)
    full = dgl.dataloading.MultiLayerFullNeighborSampler(len(fanouts))
    loader = dgl.dataloading.DistNodeDataLoader(g, {TARGET: test_nids}, full, batch_size=args.batch_size)
    with torch.no_grad():
        for input_nodes, seeds, blocks in loader:
            logits = run_model(model.module, input_nodes, blocks)
            right = logits.argmax(1) == papers["label"][seeds[TARGET]]
            counts += torch.tensor([right.sum(), len(right)])
    dist.all_reduce(counts)
    if g.rank() == 0:
        print(f"test accuracy {(counts[0] / counts[1]).item():.4f}")
    dist.barrier()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--graph-name", required=True)
    parser.add_argument("--part-config", required=True)
    parser.add_argument("--ip-config", default=os.environ.get("DGL_IP_CONFIG"))
    parser.add_argument("--num-epochs", type=int, default=5)
    parser.add_argument("--num-hidden", type=int, default=32)
    parser.add_argument("--fan-out", default="5,10")
    parser.add_argument("--batch-size", type=int, default=200)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--sparse-lr", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=0)
    main(parser.parse_args())
