# SPDX-License-Identifier: Apache-2.0
"""Unsupervised GraphSAGE on a partitioned graph: an ordinary DistDGL script that learns to tell edges from other pairs.

    dgl-hybrid partition --data powerlaw --ranks 2 --out parts
    dgl-hybrid launch --part-config parts/powerlaw.json \
        examples/distdgl_link_prediction.py --graph-name powerlaw --part-config parts/powerlaw.json

The edges of a batch and their reverses are excluded from what its blocks are sampled from: otherwise the model sees
what it is to predict. (Stock DGL 2.1 ignores that in distributed loaders; with the plugin on it holds.)
"""

import argparse
import itertools
import os
import time

import dgl
import dgl.nn as dglnn
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


class SAGE(nn.Module):
    def __init__(self, in_feats, num_hidden, num_layers):
        super().__init__()
        widths = [in_feats] + [num_hidden] * num_layers
        self.layers = nn.ModuleList(dglnn.SAGEConv(a, b, "mean") for a, b in itertools.pairwise(widths))
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, blocks, x):
        for depth, (layer, block) in enumerate(zip(self.layers, blocks, strict=True)):
            x = layer(block, x)
            if depth < len(self.layers) - 1:
                x = F.relu(x)
        return F.normalize(x) * self.scale  # scores are cosines, sharpened as training finds right


def scores(pair_graph, h):
    src, dst = pair_graph.edges()
    return (h[src] * h[dst]).sum(1)


def find_reverse_edges(g):
    """(E,): for each edge the id of an edge that leads back, or its own id."""
    eids = torch.arange(g.num_edges())
    src, dst = g.find_edges(eids)
    there, back = src * g.num_nodes() + dst, dst * g.num_nodes() + src
    sorted_there, order = there.sort()
    place = torch.searchsorted(sorted_there, back).clamp(max=len(eids) - 1)
    return torch.where(sorted_there[place] == back, order[place], eids)


def main(args):
    dgl.distributed.initialize(args.ip_config)
    dist.init_process_group("gloo")
    torch.manual_seed(args.seed)
    dgl.seed(args.seed + dist.get_rank())

    g = dgl.distributed.DistGraph(args.graph_name, part_config=args.part_config)
    book = g.get_partition_book()
    reverse_eids = find_reverse_edges(g)
    # Every tenth edge is kept for the test, together with its reverse.
    is_test = torch.minimum(torch.arange(g.num_edges()), reverse_eids) % 10 == 0
    train_eids = dgl.distributed.edge_split(~is_test, book, force_even=True)
    test_eids = dgl.distributed.edge_split(is_test, book, force_even=True)
    print(f"rank {g.rank()}: {len(train_eids)} train, {len(test_eids)} test edges")

    def make_loader(eids, num_negatives):
        return dgl.dataloading.DistEdgeDataLoader(
            g,
            eids,
            dgl.dataloading.NeighborSampler([int(fanout) for fanout in args.fan_out.split(",")]),
            negative_sampler=dgl.dataloading.negative_sampler.Uniform(num_negatives),
            exclude="reverse_id",
            reverse_eids=reverse_eids,
            batch_size=args.batch_size,
            shuffle=True,
            drop_last=False,
        )

    train_loader, test_loader = make_loader(train_eids, args.num_negatives), make_loader(test_eids, 1)
    num_layers = len(args.fan_out.split(","))
    model = nn.parallel.DistributedDataParallel(SAGE(g.ndata["feat"].shape[1], args.num_hidden, num_layers))
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)

    for epoch in range(args.num_epochs):
        start = time.time()
        with model.join():  # trainers may have different numbers of batches
            for input_nodes, pair_graph, negative_graph, blocks in train_loader:
                h = model(blocks, g.ndata["feat"][input_nodes])
                positive, negative = scores(pair_graph, h), scores(negative_graph, h)
                truth = torch.cat([torch.ones_like(positive), torch.zeros_like(negative)])
                weight = torch.cat([torch.full_like(positive, args.num_negatives), torch.ones_like(negative)])
                loss = F.binary_cross_entropy_with_logits(torch.cat([positive, negative]), truth, weight)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        print(f"rank {g.rank()}: epoch {epoch}, loss {loss.item():.4f}, {time.time() - start:.2f} s")

    counts = torch.zeros(2)
    with torch.no_grad():
        for input_nodes, pair_graph, negative_graph, blocks in test_loader:
            h = model.module(blocks, g.ndata["feat"][input_nodes])
            wins = scores(pair_graph, h) > scores(negative_graph, h)
            counts += torch.tensor([wins.sum(), len(wins)])
    dist.all_reduce(counts)
    if g.rank() == 0:
        print(f"test edges scored above a random pair: {(counts[0] / counts[1]).item():.4f}")
    dist.barrier()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--graph-name", required=True)
    parser.add_argument("--part-config", required=True)
    parser.add_argument("--ip-config", default=os.environ.get("DGL_IP_CONFIG"))
    parser.add_argument("--num-epochs", type=int, default=5)
    parser.add_argument("--num-hidden", type=int, default=32)
    parser.add_argument("--num-negatives", type=int, default=3)
    parser.add_argument("--fan-out", default="5,10")
    parser.add_argument("--batch-size", type=int, default=500)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=0)
    main(parser.parse_args())
