# SPDX-License-Identifier: Apache-2.0
"""An ordinary DistDGL script; its argument says where it stays for a while, to be killed there."""

from __future__ import annotations

import os
import sys
import time

import dgl
import torch
import torch.distributed as dist


def announce(moment: str) -> None:
    """Says where this part is, and stays there if it is told to."""
    print(f"at {moment}", flush=True)
    if sys.argv[1] == moment:
        time.sleep(600)


def main() -> None:
    print(f"pid {os.getpid()} {os.environ['DGL_HYBRID_SHM_PREFIX']}", flush=True)
    announce("start")
    dgl.distributed.initialize(os.environ["DGL_IP_CONFIG"])
    dist.init_process_group("gloo")
    graph = dgl.distributed.DistGraph("tiny", part_config=os.environ["DGL_CONF_PATH"])
    book = graph.get_partition_book()
    nodes = dgl.distributed.node_split(graph.ndata["train_mask"], book, force_even=True)
    sampler = dgl.dataloading.NeighborSampler([3, 3])
    loader = dgl.dataloading.DistNodeDataLoader(graph, nodes, sampler, batch_size=8)
    for _ in range(2):
        counts = torch.zeros(2, dtype=torch.int64)
        for input_nodes, seeds, _ in loader:
            rows = graph.ndata["feat"][input_nodes]
            wrong = rows[:, 0].long() != graph.ndata["original"][input_nodes]
            counts += torch.tensor([len(seeds), int(wrong.sum())])
            dist.all_reduce(torch.zeros(1))
            if dist.get_rank() == 0:
                announce("epoch")
        dist.all_reduce(counts)
    print(f"machine {book.partid}: {counts[0]} seeds, {counts[1]} wrong rows", flush=True)
    dist.barrier()
    if dist.get_rank() == 1:  # rank 0 waits for it in DGL's barrier at exit
        announce("exit")


if __name__ == "__main__":
    main()
