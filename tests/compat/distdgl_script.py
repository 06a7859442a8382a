# SPDX-License-Identifier: Apache-2.0
"""An ordinary DistDGL script: imports dgl and never dgl_hybrid; run as server and as trainer by `test_distdgl`."""

import sys

import dgl
import torch


def main() -> None:
    ip_config, part_config, num_epochs = sys.argv[1], sys.argv[2], 2
    dgl.distributed.initialize(ip_config)  # a server stays in here until the trainer is done
    torch.distributed.init_process_group("gloo", rank=0, world_size=1)
    graph = dgl.distributed.DistGraph("tiny", part_config=part_config)
    nodes = dgl.distributed.node_split(graph.ndata["train_mask"], graph.get_partition_book())
    loader = dgl.dataloading.DistNodeDataLoader(
        graph, nodes, dgl.dataloading.NeighborSampler([3, 3]), batch_size=16, shuffle=True
    )
    model = torch.nn.ModuleList([dgl.nn.SAGEConv(8, 8, "mean"), dgl.nn.SAGEConv(8, 3, "mean")])
    embedding = dgl.distributed.DistEmbedding(graph.num_nodes(), 4, "extra")
    sparse = dgl.distributed.optim.SparseAdam([embedding], lr=0.01)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    num_batches = 0
    for _ in range(num_epochs):
        for input_nodes, seeds, blocks in loader:
            rows = torch.cat([graph.ndata["feat"][input_nodes], embedding(input_nodes)], dim=1)
            for layer, block in zip(model, blocks, strict=True):
                rows = layer(block, rows)
            loss = torch.nn.functional.cross_entropy(rows, graph.ndata["label"][seeds])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            sparse.step()
            num_batches += 1
    torch.distributed.barrier()
    print(f"trained {num_batches} batches, loss {float(loss):.3f}", flush=True)


if __name__ == "__main__":
    main()
