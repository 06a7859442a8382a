# SPDX-License-Identifier: Apache-2.0
"""A DistDGL job that looks at what the switchable fixes mend; every trainer writes what it found as JSON.

Arguments: folder for the results; `on`, `off` or `plugin` (all of dgl_hybrid on); names of the checks to make.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import dgl
import numpy as np
import torch
from dgl.distributed import DistGraph, rpc

import dgl_hybrid
from dgl_hybrid.compat import repairs

NUM_TRIALS = 100
NUM_SAMPLES = 200
FANOUT = 3


def count_requests(call: Callable[[], object]) -> int:
    """Returns how many requests `call` sends."""
    sent: list[int] = []
    original = rpc.send_request

    def counting(target: int, request: object) -> None:
        sent.append(target)
        original(target, request)

    rpc.send_request = counting
    try:
        call()
    finally:
        rpc.send_request = original
    return len(sent)


def fence(g: DistGraph, world_size: int) -> dict[str, object]:
    """One trainer pushes to all others, all meet, each looks at its own rows."""
    rank = int(os.environ["RANK"])
    part_id = g.get_partition_book().partid
    rows = dgl.distributed.DistTensor((g.num_nodes(), 1000), torch.float32, "rows")
    elsewhere = torch.cat(
        [g.get_partition_book().partid2nids(p) for p in range(g.get_partition_book().num_partitions()) if p != part_id]
    )
    num_stale = 0
    for trial in range(1, NUM_TRIALS + 1):
        pushed = trial % world_size == rank
        if pushed:
            rows[elsewhere] = torch.full((len(elsewhere), 1000), float(trial))
        g.barrier()
        pusher_part = (trial % world_size) * g.get_partition_book().num_partitions() // world_size
        if pusher_part != part_id:
            num_stale += int((rows.local_partition[-1, 0] != trial).item())
        g.barrier()
    idle = count_requests(g.barrier)
    rows[elsewhere] = torch.zeros(len(elsewhere), 1000)
    busy = count_requests(g.barrier)
    twice = count_requests(g.barrier)
    return {"stale": num_stale, "requests": [idle, busy, twice]}


def in_edges(g: DistGraph) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    eids = torch.arange(g.num_edges())
    return (*g.find_edges(eids), eids)


def in_subgraph(g: DistGraph, world_size: int) -> dict[str, object]:
    src, dst, eids = in_edges(g)
    seeds = torch.arange(0, g.num_nodes(), 3)
    got = dgl.distributed.in_subgraph(g, seeds)
    wanted = torch.isin(dst, seeds)
    order = torch.argsort(got.edata[dgl.EID])
    same = [
        torch.equal(have[order], want[wanted])
        for have, want in zip((*got.edges(), got.edata[dgl.EID]), (src, dst, eids), strict=True)
    ]
    return {"same": all(same), "edges": got.num_edges()}


def spread(counts: torch.Tensor, num_samples: int, share: torch.Tensor) -> float:
    """How far the squared errors of binomial counts are from what they should be, in standard deviations."""
    counts, share = counts[share < 1].double(), share[share < 1].double()
    squares = (counts - num_samples * share) ** 2 / (num_samples * share * (1 - share))
    return ((squares.sum() - len(counts)) / (2 * len(counts)) ** 0.5).item()


def exclude(g: DistGraph, world_size: int) -> dict[str, object]:
    """What is sampled when a third of all edges are excluded, a hub's among them."""
    src, dst, eids = in_edges(g)
    excluded = eids[torch.rand(len(eids), generator=torch.Generator().manual_seed(1)) < 0.33]
    left = ~torch.isin(eids, excluded)
    num_left = torch.bincount(dst[left], minlength=g.num_nodes())
    seeds = torch.arange(g.num_nodes())
    found: dict[str, object] = {}

    full = g.sample_neighbors(seeds, -1, exclude_edges=excluded)
    found["full"] = torch.equal(full.edata[dgl.EID].sort().values, eids[left])
    by_type = g.sample_neighbors(seeds, {"_E": -1}, exclude_edges=excluded)
    found["by_type"] = torch.equal(by_type.edata[dgl.EID].sort().values, eids[left])

    picks = torch.zeros(len(eids))
    leaks = wrong = 0
    for _ in range(NUM_SAMPLES):
        got = g.sample_neighbors(seeds, FANOUT, exclude_edges=excluded)
        ids = got.edata[dgl.EID]
        leaks += int(torch.isin(ids, excluded).sum())
        wrong += int((src[ids] != got.edges()[0]).sum() + (dst[ids] != got.edges()[1]).sum())
        wrong += int((torch.bincount(got.edges()[1], minlength=g.num_nodes()) != num_left.clamp(max=FANOUT)).sum())
        wrong += len(ids) - len(ids.unique())
        picks[ids] += 1
    partial = left & (num_left[dst] > FANOUT)
    share = FANOUT / num_left[dst[partial]]
    found |= {"leaks": leaks, "wrong": wrong, "spread": spread(picks[partial], NUM_SAMPLES, share)}

    replaced = g.sample_neighbors(seeds, FANOUT, exclude_edges=excluded, replace=True)
    found["replace"] = torch.equal(
        torch.bincount(replaced.edges()[1], minlength=g.num_nodes()), torch.where(num_left > 0, FANOUT, 0)
    ) and not bool(torch.isin(replaced.edata[dgl.EID], excluded).any())

    # Weight 0 is never picked, and of two edges that are left the one of weight 3 comes three times as often.
    weighted = torch.zeros(len(eids))
    for _ in range(NUM_SAMPLES):
        got = g.sample_neighbors(seeds, 1, exclude_edges=excluded, prob="weight")
        weighted[got.edata[dgl.EID]] += 1
    weight = g.edata["weight"][eids].flatten().double()
    total = torch.zeros(g.num_nodes(), dtype=torch.float64).index_add_(0, dst[left], weight[left])
    heavy = left & (weight > 0)
    found["weighted"] = bool((weighted[~heavy] == 0).all())
    found["weighted_spread"] = spread(weighted[heavy], NUM_SAMPLES, weight[heavy] / total[dst[heavy]])

    twice = g.sample_neighbors(torch.cat([seeds, seeds]), 1, exclude_edges=excluded)
    found["twice"] = torch.equal(
        torch.bincount(twice.edges()[1], minlength=g.num_nodes()), torch.where(num_left > 0, 2, 0)
    )
    untouched = count_requests(lambda: g.sample_neighbors(seeds, FANOUT, exclude_edges=excluded[:0]))
    found["untouched"] = (
        untouched == 0
    )  # neighbours are sampled by other calls of rpc; barriers and pushes are not used
    out = g.sample_neighbors(seeds[:5], -1, edge_dir="out")
    found["out"] = bool((out.edges()[0] < 5).all()) and out.num_edges() > 0
    return found


def edge_loader(g: DistGraph, world_size: int) -> dict[str, object]:
    """`exclude='reverse_id'`: no edge to be predicted, and no reverse of one, in the blocks."""
    half = g.num_edges() // 2  # edge i + half is the reverse of edge i, in the ids before partitioning
    original = g.edata["original"][torch.arange(g.num_edges())].flatten()
    position = torch.empty_like(original)
    position[original] = torch.arange(g.num_edges())
    reverse = position[(original + half) % (2 * half)]
    seeds = dgl.distributed.edge_split(torch.ones(g.num_edges(), dtype=torch.bool), g.get_partition_book())
    loader = dgl.dataloading.DistEdgeDataLoader(
        g,
        seeds,
        dgl.dataloading.NeighborSampler([-1, -1]),
        batch_size=32,
        exclude="reverse_id",
        reverse_eids=reverse,
        negative_sampler=dgl.dataloading.negative_sampler.Uniform(1),
    )
    leaks = num_batches = 0
    for _, pairs, _, blocks in loader:
        positive = pairs.edata[dgl.EID]
        secret = torch.cat([positive, reverse[positive]])
        leaks += sum(int(torch.isin(block.edata[dgl.EID], secret).sum()) for block in blocks)
        num_batches += 1
    return {"leaks": leaks, "batches": num_batches}


def exclude_typed(g: DistGraph, world_size: int) -> dict[str, object]:
    """Heterograph: ids by type, fanouts by type."""
    fanouts = {"follows": 2, "buys": -1, "bought-by": 1}
    ends = {etype: g.find_edges(torch.arange(g.num_edges(etype)), etype) for etype in fanouts}
    generator = torch.Generator().manual_seed(1)
    excluded = {
        etype: torch.nonzero(torch.rand(g.num_edges(etype), generator=generator) < 0.4).flatten()
        for etype in ("follows", "buys")
    }
    excluded["bought-by"] = excluded["buys"]
    seeds = {ntype: torch.arange(g.num_nodes(ntype)) for ntype in g.ntypes}
    picks = {etype: torch.zeros(g.num_edges(etype)) for etype in fanouts}
    leaks = wrong = 0
    spreads: dict[str, float] = {}
    num_left, left = {}, {}
    for etype in fanouts:
        left[etype] = ~torch.isin(torch.arange(g.num_edges(etype)), excluded[etype])
        num_nodes = g.num_nodes(g.to_canonical_etype(etype)[2])
        num_left[etype] = torch.bincount(ends[etype][1][left[etype]], minlength=num_nodes)
    for _ in range(NUM_SAMPLES // 2):
        got = g.sample_neighbors(seeds, fanouts, exclude_edges=excluded)
        for etype, fanout in fanouts.items():
            src, dst = got.edges(etype=etype)
            ids = got.edges[etype].data[dgl.EID]
            leaks += int(torch.isin(ids, excluded[etype]).sum())
            wrong += int((ends[etype][0][ids] != src).sum() + (ends[etype][1][ids] != dst).sum())
            expected = num_left[etype] if fanout < 0 else num_left[etype].clamp(max=fanout)
            wrong += int((torch.bincount(dst, minlength=len(expected)) != expected).sum())
            picks[etype][ids] += 1
    for etype in ("follows", "bought-by"):
        degree = num_left[etype][ends[etype][1]]
        partial = left[etype] & (degree > fanouts[etype])
        spreads[etype] = spread(picks[etype][partial], NUM_SAMPLES // 2, fanouts[etype] / degree[partial])
    try:
        g.sample_neighbors(seeds, 2, exclude_edges=torch.arange(3))
    except dgl.DGLError as error:
        message = str(error)
    else:
        message = ""
    return {"leaks": leaks, "wrong": wrong, "spreads": spreads, "message": message}


def typed_edge_loader(g: DistGraph, world_size: int) -> dict[str, object]:
    """`exclude='reverse_types'` with edges of a type and of its reverse in one batch."""
    seeds = {etype: torch.arange(g.num_edges(etype)) for etype in ("buys", "bought-by")}
    reverse = {"buys": "bought-by", "bought-by": "buys"}
    loader = dgl.dataloading.DistEdgeDataLoader(
        g,
        seeds,
        dgl.dataloading.NeighborSampler([-1]),
        batch_size=16,
        shuffle=True,
        exclude="reverse_types",
        reverse_etypes=reverse,
    )
    leaks = mixed = 0
    for _, pairs, blocks in loader:
        positive = {etype: pairs.edges[etype].data[dgl.EID] for etype in reverse}
        mixed += all(len(ids) > 0 for ids in positive.values())
        secret = torch.cat(list(positive.values()))  # the reverse of an edge has its id, in the other type
        for etype in reverse:
            leaks += int(torch.isin(blocks[0].edges[etype].data[dgl.EID], secret).sum())
    return {"leaks": leaks, "mixed": mixed}


def split(g: DistGraph, world_size: int) -> dict[str, object]:
    """All IDs in place of a mask, and a mask that leaves most trainers without a share."""
    share = dgl.distributed.node_split(np.arange(g.num_nodes()), g.get_partition_book(), force_even=True)
    edges = dgl.distributed.edge_split(torch.arange(g.num_edges()), g.get_partition_book(), force_even=False)
    first = torch.zeros(g.num_nodes())
    first[0] = 1
    rare = dgl.distributed.node_split(first, g.get_partition_book(), force_even=True)
    return {"nodes": share.tolist(), "edges": len(edges), "rare": rare.tolist(), "dtype": str(rare.dtype)}


def lacking(g: DistGraph, world_size: int) -> dict[str, object]:
    """A partition without items: structure and data as elsewhere."""
    items, users = torch.arange(g.num_nodes("item")), torch.arange(g.num_nodes("user"))
    sampled = g.sample_neighbors({"item": items, "user": users}, -1)
    got = {etype: sampled.num_edges(etype) for etype in sampled.etypes}  # DGL leaves out those without edges
    labels = g.nodes["item"].data["label"][items].sort().values
    tensor = dgl.distributed.DistTensor(
        (len(items), 2), torch.float32, "extra", part_policy=g.get_node_partition_policy("item")
    )
    tensor[items] = torch.ones(len(items), 2)
    g.barrier()
    own = len(g.get_partition_book().partid2nids(g.get_partition_book().partid, "item"))
    return {
        "edges": got,
        "labels": labels.tolist(),
        "written": tensor[items].sum().item(),
        "own": own,
        "share": len(dgl.distributed.node_split(torch.ones(len(items)), g.get_partition_book(), "item")),
    }


CHECKS = {
    check.__name__: check
    for check in (fence, in_subgraph, exclude, edge_loader, exclude_typed, typed_edge_loader, split, lacking)
}


def main() -> None:
    folder, switch, *names = sys.argv[1:]
    if switch == "on":
        repairs.switch_on()
    if switch == "plugin":
        dgl_hybrid.enable(budget="unlimited")
    torch.manual_seed(0)
    dgl.seed(0)
    dgl.distributed.initialize(os.environ["DGL_IP_CONFIG"])
    torch.distributed.init_process_group("gloo")
    g = DistGraph("repairs", part_config=os.environ["DGL_CONF_PATH"])
    found = {}
    for name in names:
        torch.distributed.barrier()
        found[name] = CHECKS[name](g, torch.distributed.get_world_size())
        Path(folder, f"{torch.distributed.get_rank()}.json").write_text(json.dumps(found))
    torch.distributed.barrier()


if __name__ == "__main__":
    main()
