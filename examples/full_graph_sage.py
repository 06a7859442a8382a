# SPDX-License-Identifier: Apache-2.0
"""Exact full-graph training of a GraphSAGE, as a DistDGL user writes it.

    dgl-hybrid partition --data powerlaw --ranks 2 --out parts
    torchrun --nproc_per_node 2 examples/full_graph_sage.py parts/powerlaw.json

Only the loader differs from a mini-batch script: it yields one batch an epoch, the whole graph. The model, its layers,
DDP, the optimizer and the loss are plain DGL and PyTorch. `dgl_hybrid.optimize` is optional: layers then compute the
same in fewer passes.
"""

from __future__ import annotations

import argparse

import dgl
import dgl.nn as dglnn
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import dgl_hybrid


class SAGE(nn.Module):
    def __init__(self, in_feats: int, hidden: int, num_classes: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [dglnn.SAGEConv(in_feats, hidden, "mean"), dglnn.SAGEConv(hidden, num_classes, "mean")]
        )
        self.dropout = nn.Dropout(0.5)

    def forward(self, blocks: list[dgl.DGLGraph], x: Tensor) -> Tensor:
        h = F.relu(self.layers[0](blocks[0], x))
        return self.layers[1](blocks[1], self.dropout(h))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("part_config")
    parser.add_argument("--num-epochs", type=int, default=20)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    g = dgl_hybrid.PartitionedGraph.open(args.part_config)
    labels = g.ndata["label"].local
    # A rank may own no vertex.
    tops = g.communicator.gather_ints([int(labels.max()) if len(labels) else -1])
    num_classes = 1 + max(top for (top,) in tops)

    sampler = dgl.dataloading.MultiLayerFullNeighborSampler(2)
    loader = dgl_hybrid.FullGraphLoader(g, g.owned_nodes("train_mask"), sampler)
    model = dgl_hybrid.optimize(SAGE(g.ndata["feat"].shape[1], 64, num_classes))
    model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    for epoch in range(args.num_epochs):
        for input_nodes, seeds, blocks in loader:
            logits = model(blocks, g.ndata["feat"][input_nodes])
            loss = F.cross_entropy(logits, g.ndata["label"][seeds])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if g.rank() == 0:
            print(f"epoch {epoch}: loss of this rank's seeds {loss.item():.4f}")

    nids, logits = dgl_hybrid.infer(model, g, sampler, nids=g.owned_nodes("test_mask"))
    accuracy = dgl_hybrid.global_accuracy(logits, g.ndata["label"][nids], communicator=g.communicator)
    if g.rank() == 0:
        print(f"test accuracy {accuracy:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
