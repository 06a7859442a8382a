# SPDX-License-Identifier: Apache-2.0
"""Writes: tensors, embeddings and sparse optimizers of a homogeneous graph; what was written is read everywhere."""

from __future__ import annotations

import os

import dgl
import torch
from dgl.dataloading import DistNodeDataLoader, NeighborSampler
from torch import Tensor

from tests.distdgl.context import Context, Findings, named

NUM_TRIALS = 100


def ones(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.ones(shape, dtype=dtype)


def small_numbers(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Initial embeddings: the same for every row."""
    return torch.linspace(-0.5, 0.5, shape[1], dtype=dtype).repeat(shape[0], 1)


def check_dist_tensor(c: Context, f: Findings) -> None:
    """Tensors by vertex and by edge: initial values, own writes and others', reductions."""
    g = c.g
    num_nodes = g.num_nodes()
    zeros = dgl.distributed.DistTensor((num_nodes, 3), torch.float32, "zeros")
    counts = dgl.distributed.DistTensor((num_nodes,), torch.int64, "counts", init_func=ones)
    on_edges = dgl.distributed.DistTensor(
        (g.num_edges(), 2), torch.float32, "on_edges", part_policy=g.get_edge_partition_policy("_E")
    )
    every = torch.arange(num_nodes)
    f.same("zeros", zeros[every], torch.zeros(num_nodes, 3))
    f.same("ones", counts[every], torch.ones(num_nodes, dtype=torch.int64))
    f.equal("names", (zeros.tensor_name, counts.shape, counts.dtype), ("zeros", (num_nodes,), torch.int64))
    c.fence()
    # Each trainer writes its share of the ids, all parts mixed.
    mine = every[every % c.world == c.rank]
    zeros[mine] = torch.stack([mine, mine * 2, mine * 3], 1).float()
    counts[mine] = mine + 7
    my_edges = torch.arange(g.num_edges())
    my_edges = my_edges[my_edges % c.world == c.rank]
    on_edges[my_edges] = torch.stack([my_edges, -my_edges], 1).float()
    c.fence()
    f.same("rows", zeros[every], torch.stack([every, every * 2, every * 3], 1).float())
    f.same("numbers", counts[every], every + 7)
    every_edge = torch.arange(g.num_edges())
    f.same("rows of edges", on_edges[every_edge], torch.stack([every_edge, -every_edge], 1).float())
    mask = dgl.distributed.DistTensor((num_nodes,), torch.int64, "mask")
    c.fence()
    if c.rank == 0:
        mask[every[:10]] = torch.ones(10, dtype=torch.int64)
    c.fence()
    f.equal("count_nonzero", int(mask.count_nonzero()), 10)
    c.fence()
    del zeros, counts, on_edges, mask
    c.fence()


def check_own_writes(c: Context, f: Findings) -> None:
    """A trainer reads at once what it wrote itself, wherever it lives, if each machine has one server to keep order."""
    if os.environ["DGL_NUM_SERVER"] != "1":
        c.fence()
        f.compared += 1
        return
    data = c.g.ndata["scratch"]
    ids = torch.arange(c.g.num_nodes())
    mine = ids[ids % c.world == c.rank]
    before = data[mine]
    for value in (1.5, 2.5):
        data[mine] = torch.full((len(mine), 4), value + c.rank)
        f.same("own writes", data[mine], torch.full((len(mine), 4), value + c.rank))
    c.fence()
    data[mine] = before
    c.fence()


def check_writes_after_fence(c: Context, f: Findings) -> None:
    """100 writes to rows of other machines, `g.barrier()` after each: every trainer reads the new rows, 100 times.

    The rows belong to a feature of the graph, which the plugin may hold, and to a wide tensor, whose writes take long.
    They are read through the KVStore, by every trainer, and by their owners in the shared memory.
    """
    book = c.g.get_partition_book()
    ids = torch.arange(c.g.num_nodes())
    part_of = book.nid2partid(ids)
    here = int(book.partid)
    machine_of = c.gather(here)
    wide = dgl.distributed.DistTensor((c.g.num_nodes(), 512), torch.float32, "fence_wide")
    feature = c.g.ndata["scratch"]
    # Two full layers from a few owned vertices: their rows are held from here on, if they ever are.
    seeds = ids[part_of == here][:40]
    loader = DistNodeDataLoader(c.g, seeds, NeighborSampler([-1, -1]), batch_size=40)
    held_nodes, _, _ = next(iter(loader))
    f.same("before", feature[held_nodes], torch.zeros(len(held_nodes), 4))
    stale = {"feature": 0, "held": 0, "wide": 0, "in place": 0}
    for trial in range(1, NUM_TRIALS + 1):
        writer = trial % c.world
        written = ids[part_of != machine_of[writer]]
        c.g.barrier()
        if c.rank == writer:
            feature[written] = torch.full((len(written), 4), float(trial))
            wide[written] = torch.full((len(written), 512), float(trial))
        c.g.barrier()
        held = held_nodes[part_of[held_nodes] != machine_of[writer]]
        stale["in place"] += here != machine_of[writer] and bool((wide.local_partition[-1] != trial).any())
        stale["held"] += bool((feature[held] != trial).any())
        stale["feature"] += bool((feature[written] != trial).any())
        stale["wide"] += bool((wide[written[::7]] != trial).any())
    f.compared += 4 * NUM_TRIALS
    f.notes["stale"] = stale
    if c.plugin:
        f.equal("stale trials", stale, dict.fromkeys(stale, 0))
    c.fence()
    del wide
    c.fence()


def check_embedding_and_sparse_adam(c: Context, f: Findings) -> None:
    """Three steps of SparseAdam on a DistEmbedding, trainers sharing rows, equal Adam written out in plain PyTorch."""
    num_nodes, width, lr = c.g.num_nodes(), 6, 0.05
    embedding = dgl.distributed.DistEmbedding(num_nodes, width, "embedding", init_func=small_numbers)
    optimizer = dgl.distributed.optim.SparseAdam([embedding], lr=lr)
    every = torch.arange(num_nodes)
    expected = small_numbers((num_nodes, width), torch.float32)
    f.same("initial rows", embedding.weight[every], expected)
    c.fence()
    steps, mean, power = torch.zeros(num_nodes), torch.zeros(num_nodes, width), torch.zeros(num_nodes, width)
    for round_ in range(3):
        ids = c.some(num_nodes, 120, round_)  # shared rows among trainers, too
        factors = torch.randn(len(ids), width, generator=c.generator(10 + round_))
        f.same("looked-up rows", embedding(ids).detach(), expected[ids], rtol=1e-4, atol=1e-6)
        embedding.reset_trace()
        optimizer.zero_grad()
        loss = (embedding(ids) * factors).sum()
        loss.backward()
        optimizer.step()
        c.fence()
        gathered = c.gather((ids, factors))
        all_ids, all_grads = (torch.cat([part[k] for part in gathered]) for k in (0, 1))
        unique, place, count = all_ids.unique(return_inverse=True, return_counts=True)
        grad = torch.zeros(len(unique), width).index_add_(0, place, all_grads) / count[:, None]
        steps[unique] += 1
        mean[unique] = 0.9 * mean[unique] + 0.1 * grad
        power[unique] = 0.999 * power[unique] + 0.001 * grad * grad
        unbiased = mean[unique] / (1 - 0.9 ** steps[unique])[:, None]
        scale = (power[unique] / (1 - 0.999 ** steps[unique])[:, None]).sqrt() + 1e-8
        expected[unique] -= lr * unbiased / scale
    f.same("trained rows", embedding.weight[every], expected, rtol=1e-4, atol=1e-5)
    f.true("rows moved", not torch.equal(expected, small_numbers((num_nodes, width), torch.float32)))
    c.fence()


WRITE_CHECKS = named(check_dist_tensor, check_own_writes, check_writes_after_fence, check_embedding_and_sparse_adam)
