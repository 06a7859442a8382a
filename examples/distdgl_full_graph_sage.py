# SPDX-License-Identifier: Apache-2.0
"""Exact full-graph GraphSAGE on a running DistGraph: `distdgl_sage.py` with its training loader replaced.

    dgl-hybrid partition --data powerlaw --ranks 2 --out parts
    dgl-hybrid launch --part-config parts/powerlaw.json \
        examples/distdgl_full_graph_sage.py --graph-name powerlaw --part-config parts/powerlaw.json --num-epochs 60

The loader yields the whole graph as one batch: an epoch is one optimizer step. Of the sampler only the depth counts,
batch size and shuffling have no effect. `model = dgl_hybrid.optimize(model)` before DDP makes epochs faster; it is left
out here, so that one object differs.
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

import dgl_hybrid


class SAGE(nn.Module):
    def __init__(self, in_feats, num_hidden, num_classes, num_layers, dropout):
        super().__init__()
        widths = [in_feats] + [num_hidden] * (num_layers - 1) + [num_classes]
        self.layers = nn.ModuleList(dglnn.SAGEConv(a, b, "mean") for a, b in itertools.pairwise(widths))
        self.widths = widths[1:]
        self.dropout = nn.Dropout(dropout)

    def forward(self, blocks, x):
        for depth, (layer, block) in enumerate(zip(self.layers, blocks, strict=True)):
            x = layer(block, x)
            if depth < len(self.layers) - 1:
                x = self.dropout(F.relu(x))
        return x

    @torch.no_grad()
    def inference(self, g, x, batch_size):
        """Logits of all vertices: one layer after the other, each with all neighbours, rows kept in DistTensors."""
        everyone = torch.ones(g.num_nodes(), dtype=torch.bool)
        nodes = dgl.distributed.node_split(everyone, g.get_partition_book(), force_even=True)
        sampler = dgl.dataloading.NeighborSampler([-1])
        for depth, layer in enumerate(self.layers):
            y = dgl.distributed.DistTensor(
                (g.num_nodes(), self.widths[depth]), torch.float32, f"layer_{depth}", persistent=True
            )
            loader = dgl.dataloading.DistNodeDataLoader(
                g, nodes, sampler, batch_size=batch_size, shuffle=False, drop_last=False
            )
            for input_nodes, output_nodes, blocks in loader:
                h = layer(blocks[0], x[input_nodes])
                y[output_nodes] = F.relu(h) if depth < len(self.layers) - 1 else h
            x = y
            g.barrier()
        return x


def evaluate(model, g, val_nids, test_nids, batch_size):
    """Accuracy on validation and test vertices, over all trainers."""
    model.eval()
    logits = model.inference(g, g.ndata["feat"], batch_size)
    model.train()
    counts = []
    for nids in (val_nids, test_nids):
        correct = (logits[nids].argmax(1) == g.ndata["label"][nids]).sum()
        counts += [correct, torch.tensor(len(nids))]
    counts = torch.stack(counts)
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item(), (counts[2] / counts[3]).item()


def main(args):
    dgl.distributed.initialize(args.ip_config)  # a server stays in here until the trainers are done
    dist.init_process_group("gloo")
    torch.manual_seed(args.seed)
    dgl.seed(args.seed + dist.get_rank())

    g = dgl.distributed.DistGraph(args.graph_name, part_config=args.part_config)
    book = g.get_partition_book()
    train_nids = dgl.distributed.node_split(g.ndata["train_mask"], book, force_even=True)
    val_nids = dgl.distributed.node_split(g.ndata["val_mask"], book, force_even=True)
    test_nids = dgl.distributed.node_split(g.ndata["test_mask"], book, force_even=True)
    print(f"rank {g.rank()}: {len(train_nids)} train, {len(val_nids)} validation, {len(test_nids)} test vertices")
    num_classes = int(g.ndata["label"][torch.arange(g.num_nodes())].max()) + 1

    sampler = dgl.dataloading.NeighborSampler([int(fanout) for fanout in args.fan_out.split(",")])
    loader = dgl_hybrid.FullGraphLoader(
        g, train_nids, sampler, batch_size=args.batch_size, shuffle=True, drop_last=False
    )
    in_feats, num_layers = g.ndata["feat"].shape[1], len(sampler.fanouts)
    model = SAGE(in_feats, args.num_hidden, num_classes, num_layers, args.dropout)
    model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)

    for epoch in range(args.num_epochs):
        start = time.time()
        with model.join():  # trainers may have different numbers of batches
            for input_nodes, seeds, blocks in loader:
                logits = model(blocks, g.ndata["feat"][input_nodes])
                loss = F.cross_entropy(logits, g.ndata["label"][seeds])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        print(f"rank {g.rank()}: epoch {epoch}, loss {loss.item():.4f}, {time.time() - start:.2f} s")
        if (epoch + 1) % args.eval_every == 0 or epoch + 1 == args.num_epochs:
            val, test = evaluate(model.module, g, val_nids, test_nids, args.batch_size_eval)
            if g.rank() == 0:
                print(f"epoch {epoch}: validation accuracy {val:.4f}, test accuracy {test:.4f}")
    dist.barrier()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--graph-name", required=True)
    parser.add_argument("--part-config", required=True)
    parser.add_argument("--ip-config", default=os.environ.get("DGL_IP_CONFIG"))
    parser.add_argument("--num-epochs", type=int, default=10)
    parser.add_argument("--num-hidden", type=int, default=64)
    parser.add_argument("--fan-out", default="10,25")
    parser.add_argument("--batch-size", type=int, default=1000)
    parser.add_argument("--batch-size-eval", type=int, default=10000)
    parser.add_argument("--eval-every", type=int, default=5)
    parser.add_argument("--lr", type=float, default=0.003)
    parser.add_argument("--dropout", type=float, default=0.5)
    parser.add_argument("--seed", type=int, default=0)
    main(parser.parse_args())
