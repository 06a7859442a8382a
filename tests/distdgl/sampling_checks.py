# SPDX-License-Identifier: Apache-2.0
"""What samplers and loaders of a homogeneous graph return, against the graph before partitioning."""

from __future__ import annotations

import dgl
import numpy as np
import torch
import torch.distributed as dist
from dgl import DGLGraph
from dgl.dataloading import (
    DistEdgeDataLoader,
    DistNodeDataLoader,
    MultiLayerFullNeighborSampler,
    MultiLayerNeighborSampler,
    NeighborSampler,
)
from torch import Tensor

from tests.distdgl.context import Context, Findings, named

NUM_DRAWS = 300


# -- distribution ----------------------------------------------------------------------------------------------------


def check_distribution(c: Context, f: Findings) -> None:
    """Counts how often each in-edge of a few vertices is drawn; the test outside judges the counts.

    Trainers draw one after the other, so that a server meets the same requests in the same order in every run. Loaders
    are made by all at once: sampler processes wait for each other when they get the graph.
    """
    owned, other = seeds_to_draw(c)
    seeds = torch.cat([owned, other])
    f.true("there are vertices to draw for", len(owned) >= 3 and len(other) >= 3)
    loader = DistNodeDataLoader(c.g, seeds, NeighborSampler([4]), batch_size=len(seeds), shuffle=True)
    for turn in range(c.world):
        if turn == c.rank and (turn == 0 or turn == c.world - 1):
            dgl.seed(c.seed + 10 + turn)
            f.notes["draws"] = draw_all(c, f, loader, owned, other)
        dist.barrier()


def draw_all(
    c: Context, f: Findings, loader: DistNodeDataLoader, owned: Tensor, other: Tensor
) -> list[dict[str, object]]:
    seeds = torch.cat([owned, other])

    def by_loader() -> Tensor:
        return next(iter(loader))[2][0].edata[dgl.EID]

    def by_call(**options: object) -> Tensor:
        return dgl.distributed.sample_neighbors(c.g, seeds, **options).edata[dgl.EID]

    kinds = {
        "loader": (4, by_loader),
        "uniform": (5, lambda: by_call(fanout=5)),
        "replace": (6, lambda: by_call(fanout=6, replace=True)),
        "prob": (1, lambda: by_call(fanout=1, prob="chance")),
        "prob_replace": (3, lambda: by_call(fanout=3, prob="chance", replace=True)),
    }
    draws = []
    for kind, (fanout, draw) in kinds.items():
        counts = torch.zeros(c.g.num_edges(), dtype=torch.int64)
        for _ in range(NUM_DRAWS):
            eids = draw()
            counts.index_add_(0, c.orig_edges(eids), torch.ones_like(eids))
        for seed, is_owned in [(s, True) for s in owned.tolist()] + [(s, False) for s in other.tolist()]:
            orig = int(c.orig_nodes(torch.tensor(seed)))
            in_edges = c.truth.graph.in_edges(orig, form="eid")
            drawn = counts[in_edges]
            f.equal(f"{kind}: draws for {orig}", int(drawn.sum()), NUM_DRAWS * fanout)
            draws.append(
                {
                    "kind": kind,
                    "fanout": fanout,
                    "num_draws": NUM_DRAWS,
                    "node": orig,
                    "owned": is_owned,
                    "counts": drawn.tolist(),
                    "chance": c.truth.graph.edata["chance"][in_edges].tolist(),
                }
            )
    return draws


def seeds_to_draw(c: Context) -> tuple[Tensor, Tensor]:
    """Vertices with 8 to 40 in-edges: four owned, four others that are in-neighbours of owned ones. Global ids."""
    whole = c.truth.graph
    degree = whole.in_degrees()[c.orig_nodes(torch.arange(c.g.num_nodes()))]
    ids = torch.arange(c.g.num_nodes())
    fit = (degree >= 8) & (degree <= 40)
    owned = c.owned(ids)
    src, _ = whole.in_edges(c.orig_nodes(ids[owned]))
    near = torch.zeros(c.g.num_nodes(), dtype=torch.bool)
    near[c.nodes_of(src)] = True
    return ids[fit & owned][:4], ids[fit & ~owned & near][:4]


# -- frontiers -------------------------------------------------------------------------------------------------------


def check_full_frontier(c: Context, f: Findings) -> None:
    """Fanout -1: exactly the in-edges, for owned and other vertices, degree 0 among them."""
    for salt in range(3):
        seeds = c.some(c.g.num_nodes(), 60 if salt else c.g.num_nodes(), salt)
        frontier = dgl.distributed.sample_neighbors(c.g, seeds, -1)
        same_edges(c, f, "frontier", frontier, c.truth.graph.in_edges(c.orig_nodes(seeds), form="eid"))
        f.equal("vertices of the frontier", frontier.num_nodes(), c.g.num_nodes())
    frontier = c.g.sample_neighbors(seeds, -1)
    same_edges(c, f, "method", frontier, c.truth.graph.in_edges(c.orig_nodes(seeds), form="eid"))
    frontier = dgl.distributed.sample_neighbors(c.g, {"_N": seeds}, -1)
    same_edges(c, f, "seeds by type", frontier, c.truth.graph.in_edges(c.orig_nodes(seeds), form="eid"))
    same_edges(
        c,
        f,
        "one seed",
        dgl.distributed.sample_neighbors(c.g, seeds[:1], -1),
        c.truth.graph.in_edges(c.orig_nodes(seeds[:1]), form="eid"),
    )


def check_fanout(c: Context, f: Findings) -> None:
    """A fanout takes min(fanout, degree) different in-edges; with replacement exactly the fanout."""
    whole = c.truth.graph
    seeds = c.some(c.g.num_nodes(), 150)
    degree = whole.in_degrees(c.orig_nodes(seeds))
    allowed = whole.in_edges(c.orig_nodes(seeds), form="eid")
    for fanout in (1, 3, 1000):
        frontier = dgl.distributed.sample_neighbors(c.g, seeds, fanout)
        eids = edges_exist(c, f, f"fanout {fanout}", frontier)
        f.true(f"fanout {fanout}: only in-edges of the seeds", bool(torch.isin(eids, allowed).all()))
        f.equal(f"fanout {fanout}: no edge twice", len(eids.unique()), len(eids))
        f.same(f"fanout {fanout}: in-edges per seed", frontier.in_degrees(seeds), degree.clamp(max=fanout))
    for options in ({"replace": True}, {"replace": True, "prob": "chance"}):
        frontier = dgl.distributed.sample_neighbors(c.g, seeds, 4, **options)
        eids = edges_exist(c, f, f"{options}", frontier)
        f.true(f"{options}: only in-edges of the seeds", bool(torch.isin(eids, allowed).all()))
        f.same(f"{options}: in-edges per seed", frontier.in_degrees(seeds), (degree > 0).long() * 4)
    for fanout in (3, -1):
        frontier = dgl.distributed.sample_neighbors(c.g, seeds, fanout, prob="chance")
        eids = edges_exist(c, f, f"prob, fanout {fanout}", frontier)
        chance = whole.edata["chance"]
        f.true(f"prob, fanout {fanout}: no edge of chance 0", bool((chance[eids] > 0).all()))
        likely = torch.zeros(whole.num_nodes(), dtype=torch.int64)
        dst = whole.edges()[1]
        likely.index_add_(0, dst, (chance > 0).long())
        most = likely[c.orig_nodes(seeds)]
        f.same(
            f"prob, fanout {fanout}: in-edges per seed",
            frontier.in_degrees(seeds),
            most.clamp(max=3) if fanout > 0 else most,
        )


def check_out_edges(c: Context, f: Findings) -> None:
    """`edge_dir='out'`: edges that exist; which of them is compared between plugin off and on by the test outside.

    Stock DGL answers with the out-edges that the seed's own part stores, not with all.
    """
    seeds = torch.arange(0, c.g.num_nodes(), 5)
    frontier = dgl.distributed.sample_neighbors(c.g, seeds, -1, edge_dir="out")
    eids = edges_exist(c, f, "out", frontier)
    f.true(
        "only out-edges of the seeds", bool(torch.isin(c.truth.graph.find_edges(eids)[0], c.orig_nodes(seeds)).all())
    )
    f.notes["out_edges"] = eids.sort()[0].tolist()


def check_edge_cases(c: Context, f: Findings) -> None:
    """Odd calls have the outcome they have in stock DGL; the test outside compares plugin off and on."""
    sample = dgl.distributed.sample_neighbors
    nodes = c.g.get_partition_book().partid2nids(c.g.get_partition_book().partid)[:6]
    empty = torch.empty(0, dtype=torch.int64)
    calls = {
        "no seeds": lambda: sample(c.g, empty, 3).num_edges(),
        "fanout 0": lambda: sample(c.g, nodes, 0).num_edges(),
        "seed twice": lambda: sample(c.g, torch.cat([nodes, nodes]), -1).num_edges(),
        "int32 seeds": lambda: sample(c.g, nodes.int(), -1).num_edges(),
        "list of seeds": lambda: sample(c.g, nodes.tolist(), -1).num_edges(),
        "unknown prob": lambda: sample(c.g, nodes, 2, prob="nope").num_edges(),
        "2D ids": lambda: tuple(c.g.ndata["feat"][nodes.view(2, 3)].shape),
        "int32 ids": lambda: tuple(c.g.ndata["feat"][nodes.int()].shape),
        "one id": lambda: tuple(c.g.ndata["feat"][int(nodes[0])].shape),
        "mask as ids": lambda: tuple(c.g.ndata["feat"][torch.tensor([True, False])].shape),
        "degrees of none": lambda: tuple(c.g.in_degrees(empty).shape),
        "edges of none": lambda: [tuple(x.shape) for x in c.g.find_edges(empty)],
    }
    outcomes = {}
    for what, call in calls.items():
        try:
            outcomes[what] = repr(call())
        except Exception as error:  # the kind of error is the outcome
            outcomes[what] = type(error).__name__
        f.compared += 1
    f.notes["outcomes"] = outcomes


def check_in_subgraph(c: Context, f: Findings) -> None:
    """In-edges of vertices of all machines (ends the servers of stock DGL)."""
    seeds = c.some(c.g.num_nodes(), 80)
    sub = dgl.distributed.in_subgraph(c.g, seeds)
    same_edges(c, f, "in_subgraph", sub, c.truth.graph.in_edges(c.orig_nodes(seeds), form="eid"))


def check_excluded_edges(c: Context, f: Findings) -> None:
    """Excluded edges are no candidates: the others are drawn from, up to the fanout (stock DGL ignores them)."""
    seeds = c.some(c.g.num_nodes(), 150)
    allowed = c.truth.graph.in_edges(c.orig_nodes(seeds), form="eid")
    excluded = allowed[torch.rand(len(allowed), generator=c.generator(4)) < 0.5]
    kept = allowed[~torch.isin(allowed, excluded)]
    for fanout in (-1, 3):
        frontier = c.g.sample_neighbors(seeds, fanout, exclude_edges=c.edges_of(excluded))
        eids = edges_exist(c, f, f"fanout {fanout}", frontier)
        f.equal(f"fanout {fanout}: excluded edges drawn", int(torch.isin(eids, excluded).sum()), 0)
        if fanout == -1:
            f.same_ids("the others", eids, kept)
        else:
            left = torch.zeros(c.truth.graph.num_nodes(), dtype=torch.int64)
            left.index_add_(0, c.truth.graph.find_edges(kept)[1], torch.ones_like(kept))
            f.same("in-edges per seed", frontier.in_degrees(seeds), left[c.orig_nodes(seeds)].clamp(max=fanout))


# -- loaders ---------------------------------------------------------------------------------------------------------


def check_full_blocks(c: Context, f: Findings) -> None:
    """Blocks of a full-neighbour sampler are those of single-machine DGL; features arrive with them."""
    seeds = c.some(c.g.num_nodes(), 90)
    sampler = MultiLayerFullNeighborSampler(2)
    loader = DistNodeDataLoader(c.g, seeds, sampler, batch_size=32, shuffle=False, drop_last=False)
    yielded = []
    for _ in range(2):
        yielded.clear()
        for input_nodes, output_nodes, blocks in loader:
            yielded.append(output_nodes)
            same_blocks(c, f, input_nodes, output_nodes, blocks)
            f.same("features", c.g.ndata["feat"][input_nodes], c.truth.graph.ndata["feat"][c.orig_nodes(input_nodes)])
            f.same("labels", c.g.ndata["label"][output_nodes], c.truth.graph.ndata["label"][c.orig_nodes(output_nodes)])
            w = c.g.edata["w"][blocks[0].edata[dgl.EID]]
            f.same("edge data", w, c.truth.graph.edata["w"][c.orig_edges(blocks[0].edata[dgl.EID])])
        f.same_ids("seeds of an epoch", torch.cat(yielded), seeds)


def same_blocks(c: Context, f: Findings, input_nodes: Tensor, output_nodes: Tensor, blocks: list[DGLGraph]) -> None:
    sampler = MultiLayerFullNeighborSampler(len(blocks), fused=False)
    true_inputs, _, true_blocks = sampler.sample_blocks(c.truth.graph, c.orig_nodes(output_nodes))
    f.same_ids("input nodes", c.orig_nodes(input_nodes), true_inputs)
    f.same("seeds of the last block", blocks[-1].dstdata[dgl.NID], output_nodes)
    for depth, (block, true_block) in enumerate(zip(blocks, true_blocks, strict=True)):
        dst = block.dstdata[dgl.NID]
        f.same_ids(f"block {depth}: destinations", c.orig_nodes(dst), true_block.dstdata[dgl.NID])
        f.same_ids(f"block {depth}: sources", c.orig_nodes(block.srcdata[dgl.NID]), true_block.srcdata[dgl.NID])
        f.same(f"block {depth}: destinations come first", block.srcdata[dgl.NID][: len(dst)], dst)
        eids = edges_exist(c, f, f"block {depth}", block)
        f.same_ids(f"block {depth}: edges", eids, true_block.edata[dgl.EID])
    f.same("first block's sources", blocks[0].srcdata[dgl.NID], input_nodes)


def check_sampled_blocks(c: Context, f: Findings) -> None:
    """Blocks of a neighbour sampler: edges exist, each destination has min(fanout, degree) of them; epochs differ."""
    mask = c.g.ndata["train_mask"]
    seeds = dgl.distributed.node_split(mask, c.g.get_partition_book(), force_even=True)
    degree = c.truth.graph.in_degrees()
    for sampler in (NeighborSampler([3, 5]), MultiLayerNeighborSampler([2, 3, 4])):
        loader = DistNodeDataLoader(c.g, seeds, sampler, batch_size=20, shuffle=True, drop_last=False)
        epochs = []
        for _ in range(2):
            yielded, drawn = [], []
            for input_nodes, output_nodes, blocks in loader:
                yielded.append(output_nodes)
                f.same("first block's sources", blocks[0].srcdata[dgl.NID], input_nodes)
                for depth, (block, fanout) in enumerate(zip(blocks, sampler.fanouts, strict=True)):
                    drawn.append(edges_exist(c, f, f"block {depth}", block))
                    want = degree[c.orig_nodes(block.dstdata[dgl.NID])].clamp(max=fanout)
                    f.same(f"block {depth}: in-edges", block.in_degrees(), want)
                f.same(
                    "features", c.g.ndata["feat"][input_nodes], c.truth.graph.ndata["feat"][c.orig_nodes(input_nodes)]
                )
            f.same_ids("seeds of an epoch", torch.cat(yielded), seeds)
            epochs.append((torch.cat(yielded), torch.cat(drawn)))
        f.true("epochs draw other edges", not torch.equal(epochs[0][1], epochs[1][1]))
        f.true("epochs shuffle", not torch.equal(epochs[0][0], epochs[1][0]))


def check_drop_last(c: Context, f: Findings) -> None:
    seeds = c.some(c.g.num_nodes(), 50)
    sizes = {}
    for drop in (True, False):
        loader = DistNodeDataLoader(c.g, seeds, NeighborSampler([2]), batch_size=16, shuffle=False, drop_last=drop)
        sizes[drop] = sorted(len(output) for _, output, _ in loader)
    f.equal("batch sizes", sizes, {True: [16, 16, 16], False: [2, 16, 16, 16]})


class OldStyleSampler:
    """A sampler as scripts had it before DGL had `NeighborSampler`: its method is the loader's `collate_fn`."""

    def __init__(self, g: dgl.distributed.DistGraph, fanouts: list[int], sample_neighbors: object) -> None:
        self.g = g
        self.fanouts = fanouts
        self.sample_neighbors = sample_neighbors

    def sample_blocks(self, seeds: list[int]) -> tuple[Tensor, list[DGLGraph]]:
        nodes = torch.LongTensor(np.asarray(seeds))
        ids, blocks = nodes, []
        for fanout in reversed(self.fanouts):
            frontier = self.sample_neighbors(self.g, ids, fanout, replace=False)  # type: ignore[operator]
            block = dgl.to_block(frontier, ids)
            block.edata["id"] = frontier.edata[dgl.EID]
            ids = block.srcdata[dgl.NID]
            blocks.insert(0, block)
        blocks[0].srcdata["feat"] = self.g.ndata["feat"][ids]
        blocks[-1].dstdata["label"] = self.g.ndata["label"][nodes]
        return nodes, blocks


def check_custom_collate(c: Context, f: Findings) -> None:
    """A `DistDataLoader` with a script's own `collate_fn`, which also reads the features."""
    seeds = c.some(c.g.num_nodes(), 70)
    sampler = OldStyleSampler(c.g, [4, -1], dgl.distributed.sample_neighbors)
    loader = dgl.distributed.DistDataLoader(
        dataset=seeds.numpy(), batch_size=25, collate_fn=sampler.sample_blocks, shuffle=True, drop_last=False
    )
    yielded, whole = [], c.truth.graph
    for nodes, blocks in loader:
        yielded.append(nodes)
        same_edges(c, f, "last block", blocks[1], whole.in_edges(c.orig_nodes(nodes), form="eid"), "id")
        edges_exist(c, f, "first block", blocks[0], "id")
        want = whole.in_degrees(c.orig_nodes(blocks[0].dstdata[dgl.NID])).clamp(max=4)
        f.same("in-edges of the first block", blocks[0].in_degrees(), want)
        f.same("features", blocks[0].srcdata["feat"], whole.ndata["feat"][c.orig_nodes(blocks[0].srcdata[dgl.NID])])
        f.same("labels", blocks[1].dstdata["label"], whole.ndata["label"][c.orig_nodes(nodes)])
    f.same_ids("seeds of an epoch", torch.cat(yielded), seeds)


def check_edge_loader(c: Context, f: Findings) -> None:
    """Pair graphs, negative pairs and blocks of an edge loader; with the plugin on, exclusion as well."""
    book, whole = c.g.get_partition_book(), c.truth.graph
    eids = dgl.distributed.edge_split(c.g.edata["train_mask"], book, force_even=True)[:150]
    reverse = reverse_edges(c)
    for exclude in (None, "self", "reverse_id"):
        options = {"exclude": exclude, "reverse_eids": reverse} if exclude == "reverse_id" else {"exclude": exclude}
        loader = DistEdgeDataLoader(c.g, eids, MultiLayerFullNeighborSampler(2), batch_size=64, shuffle=True, **options)
        yielded = []
        for input_nodes, pair_graph, blocks in loader:
            yielded.append(same_pairs(c, f, pair_graph))
            f.same("seeds", blocks[-1].dstdata[dgl.NID], pair_graph.ndata[dgl.NID])
            f.same("first block's sources", blocks[0].srcdata[dgl.NID], input_nodes)
            gone = {
                None: yielded[-1][:0],
                "self": yielded[-1],
                "reverse_id": torch.cat([yielded[-1], reverse[yielded[-1]]]),
            }
            leaked(c, f, exclude, blocks, gone[exclude])
        f.same_ids(f"exclude={exclude}: edges of an epoch", torch.cat(yielded), eids)
    negatives = dgl.dataloading.negative_sampler.Uniform(3)
    loader = DistEdgeDataLoader(
        c.g, eids, NeighborSampler([4, 4]), batch_size=50, negative_sampler=negatives, exclude="reverse_id",
        reverse_eids=reverse, shuffle=False,
    )  # fmt: skip
    for input_nodes, pair_graph, negative_graph, blocks in loader:
        pairs = same_pairs(c, f, pair_graph)
        f.same("vertices of both pair graphs", negative_graph.ndata[dgl.NID], pair_graph.ndata[dgl.NID])
        src, _ = pair_graph.edges()
        f.same("negative sources", negative_graph.edges()[0], src.repeat_interleave(3))
        f.same("seeds", blocks[-1].dstdata[dgl.NID], pair_graph.ndata[dgl.NID])
        f.same("first block's sources", blocks[0].srcdata[dgl.NID], input_nodes)
        gone = torch.cat([pairs, reverse[pairs]])
        left = in_degrees_without(whole, c.orig_edges(gone)) if c.plugin else whole.in_degrees()
        for depth, block in enumerate(blocks):
            drawn = edges_exist(c, f, f"block {depth}", block)
            want = left[c.orig_nodes(block.dstdata[dgl.NID])].clamp(max=4)
            f.same(f"block {depth}: in-edges", block.in_degrees(), want)
            if c.plugin:
                f.equal(f"block {depth}: positives", int(torch.isin(drawn, c.orig_edges(gone)).sum()), 0)


def same_pairs(c: Context, f: Findings, pair_graph: DGLGraph) -> Tensor:
    """Compares a pair graph's edges with the truth; returns their global ids."""
    edges_exist(c, f, "pair graph", pair_graph)
    return pair_graph.edata[dgl.EID]


def leaked(c: Context, f: Findings, exclude: str | None, blocks: list[DGLGraph], gone: Tensor) -> None:
    """Full blocks hold all in-edges but those that were excluded; stock DGL excludes none (noted, not judged)."""
    whole = c.truth.graph
    if not c.plugin:
        f.notes[f"leaked, exclude={exclude}"] = int(torch.isin(blocks[-1].edata[dgl.EID], gone).sum())
        gone = gone[:0]
    for depth, block in enumerate(blocks):
        want = whole.in_edges(c.orig_nodes(block.dstdata[dgl.NID]), form="eid")
        same_edges(c, f, f"exclude={exclude}: block {depth}", block, want[~torch.isin(want, c.orig_edges(gone))])


def reverse_edges(c: Context) -> Tensor:
    """(E,): the global id of each edge's reverse; the two share a number `pair`."""
    pair = c.g.edata["pair"][torch.arange(c.g.num_edges())]
    order = pair.argsort()
    reverse = torch.empty_like(order)
    reverse[order[0::2]], reverse[order[1::2]] = order[1::2], order[0::2]
    return reverse


def in_degrees_without(whole: DGLGraph, gone: Tensor) -> Tensor:
    """In-degrees of all vertices when some edges (different or not) are taken away."""
    gone = gone.unique()
    left = whole.in_degrees().clone()
    return left.index_add_(0, whole.find_edges(gone)[1], -torch.ones_like(gone))


def edges_exist(c: Context, f: Findings, what: str, graph: DGLGraph, field: str = dgl.EID) -> Tensor:
    """Checks both ends of every edge against the truth; returns the original edge ids."""
    src, dst = graph.edges()
    if graph.is_block:
        src, dst = graph.srcdata[dgl.NID][src], graph.dstdata[dgl.NID][dst]
    elif dgl.NID in graph.ndata:
        src, dst = graph.ndata[dgl.NID][src], graph.ndata[dgl.NID][dst]
    eids = c.orig_edges(graph.edata[field])
    true_src, true_dst = c.truth.graph.find_edges(eids)
    f.same(f"{what}: sources", c.orig_nodes(src), true_src)
    f.same(f"{what}: destinations", c.orig_nodes(dst), true_dst)
    return eids


def same_edges(c: Context, f: Findings, what: str, graph: DGLGraph, expected: Tensor, field: str = dgl.EID) -> None:
    """The graph has exactly the edges of these original ids."""
    f.same_ids(f"{what}: edges", edges_exist(c, f, what, graph, field), expected)


SAMPLING_CHECKS = [
    *named(check_distribution, check_full_frontier, check_fanout, check_out_edges, check_edge_cases),
    *named(check_in_subgraph, check_excluded_edges, needs_plugin=True),
    *named(check_full_blocks, check_sampled_blocks, check_drop_last, check_custom_collate, check_edge_loader),
]
