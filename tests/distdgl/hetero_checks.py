# SPDX-License-Identifier: Apache-2.0
"""Ids, data, samplers, loaders and embeddings of a heterograph, against the graph before partitioning."""

from __future__ import annotations

import dgl
import torch
import torch.distributed as dist
from dgl import DGLGraph
from dgl.dataloading import DistEdgeDataLoader, DistNodeDataLoader, MultiLayerFullNeighborSampler, NeighborSampler
from torch import Tensor

from tests.distdgl.context import Context, Findings, named
from tests.helpers.distdgl import ETYPE

NUM_DRAWS = 120
NUM_DRAWN_FOR = 16
"""Owned papers, and as many others. A call costs the same for many as for few, and a bias is found as soon by a few
draws for many papers as by many draws for a few."""
MOST_EDGES = 24
"""Of a type and such a paper: each edge is drawn often enough for a chi-square."""
WRITES = ("author", "writes", "paper")
WRITTEN_BY = ("paper", "written-by", "author")
CITES = ("paper", "cites", "paper")
MIXED = {CITES: 3, WRITES: -1, WRITTEN_BY: 2, ("paper", "appears-in", "venue"): 0, ("venue", "publishes", "paper"): 1}


def check_distribution(c: Context, f: Findings) -> None:
    """As for homogeneous graphs: counts of drawn in-edges per type; the test outside judges them."""
    seeds = seeds_to_draw(c)
    f.true("there are vertices to draw for", len(seeds) == 2 * NUM_DRAWN_FOR)
    loader = DistNodeDataLoader(c.g, {"paper": seeds}, NeighborSampler([MIXED | {WRITES: 3}]), batch_size=len(seeds))
    for turn in range(c.world):
        if turn == c.rank and (turn == 0 or turn == c.world - 1):
            dgl.seed(c.seed + 10 + turn)
            f.notes["draws"] = draw_all(c, f, loader, seeds)
        dist.barrier()


def seeds_to_draw(c: Context) -> Tensor:
    """Owned papers and others, with enough in-edges of both types."""
    whole = c.truth.graph
    ids = torch.arange(c.g.num_nodes("paper"))
    orig = c.orig_nodes(ids, "paper")
    degrees = [whole.in_degrees(orig, etype=etype) for etype in (CITES, WRITES)]
    fit = (degrees[0] >= 7) & (degrees[0] <= MOST_EDGES) & (degrees[1] >= 5) & (degrees[1] <= MOST_EDGES)
    owned = c.owned(ids, "paper")
    return torch.cat([ids[fit & owned][:NUM_DRAWN_FOR], ids[fit & ~owned][:NUM_DRAWN_FOR]])


def draw_all(c: Context, f: Findings, loader: DistNodeDataLoader, seeds: Tensor) -> list[dict[str, object]]:
    whole = c.truth.graph
    kinds = {
        "etype_loader": ({CITES: 3, WRITES: 3}, lambda: next(iter(loader))[2][0]),
        "etype_uniform": (
            {CITES: 4, WRITES: 4},
            lambda: dgl.distributed.sample_etype_neighbors(c.g, {"paper": seeds}, 4),
        ),
        "etype_replace": (
            {CITES: 4, WRITES: 4},
            lambda: dgl.distributed.sample_etype_neighbors(c.g, {"paper": seeds}, 4, replace=True),
        ),
        "etype_prob": (
            {CITES: 1, WRITES: 1},
            lambda: dgl.distributed.sample_etype_neighbors(c.g, {"paper": seeds}, 1, prob="chance"),
        ),
    }
    draws = []
    for kind, (fanouts, draw) in kinds.items():
        counts = {etype: torch.zeros(whole.num_edges(etype), dtype=torch.int64) for etype in fanouts}
        for _ in range(NUM_DRAWS):
            frontier = draw()
            for etype in fanouts:
                eids = c.orig_edges(frontier.edges[etype].data[dgl.EID], etype)
                counts[etype].index_add_(0, eids, torch.ones_like(eids))
        for etype, fanout in fanouts.items():
            for seed in seeds.tolist():
                node = int(c.orig_nodes(torch.tensor(seed), "paper"))
                in_edges = whole.in_edges(node, form="eid", etype=etype)
                drawn = counts[etype][in_edges]
                f.equal(f"{kind}: draws of {etype[1]} for {node}", int(drawn.sum()), NUM_DRAWS * fanout)
                draws.append(
                    {
                        "kind": kind,
                        "fanout": fanout,
                        "num_draws": NUM_DRAWS,
                        "node": f"{etype[1]} {node}",
                        "owned": bool(c.owned(torch.tensor([seed]), "paper")),
                        "counts": drawn.tolist(),
                        "chance": whole.edges[etype].data["chance"][in_edges].tolist(),
                    }
                )
    return draws


def check_types_and_ids(c: Context, f: Findings) -> None:
    g, whole, book = c.g, c.truth.graph, c.g.get_partition_book()
    f.equal(
        "types", (sorted(g.ntypes), sorted(g.canonical_etypes)), (sorted(whole.ntypes), sorted(whole.canonical_etypes))
    )
    f.equal("sizes", (g.num_nodes(), g.num_edges()), (whole.num_nodes(), whole.num_edges()))
    for etype in whole.canonical_etypes:
        f.equal("canonical type", g.to_canonical_etype(etype[1]), etype)
        f.equal("num_edges", (g.num_edges(etype), g.num_edges(etype[1])), (whole.num_edges(etype),) * 2)
        ids = torch.randperm(g.num_edges(etype), generator=c.generator())
        src, dst = g.find_edges(ids, etype)
        true_src, true_dst = whole.find_edges(c.orig_edges(ids, etype), etype=etype)
        f.same(f"{etype[1]}: sources", c.orig_nodes(src, etype[0]), true_src)
        f.same(f"{etype[1]}: destinations", c.orig_nodes(dst, etype[2]), true_dst)
        f.same(f"{etype[1]}: parts", book.eid2partid(ids, etype), book.nid2partid(dst, etype[2]))
    for ntype in whole.ntypes:
        num = whole.num_nodes(ntype)
        f.equal("num_nodes", g.num_nodes(ntype), num)
        every = torch.cat([book.partid2nids(p, ntype) for p in range(book.num_partitions())])
        f.same_ids(f"{ntype}: owned by some part", every, torch.arange(num))
        homogeneous = book.map_to_homo_nid(torch.arange(num), ntype)
        types, back = book.map_to_per_ntype(homogeneous)
        f.same(f"{ntype}: id maps", back, torch.arange(num))
        f.true(f"{ntype}: type of the id", bool((types == g.get_ntype_id(ntype)).all()))


def check_data(c: Context, f: Findings) -> None:
    """Data by type, types without any among them."""
    g, whole = c.g, c.truth.graph
    for ntype in whole.ntypes:
        f.equal(f"{ntype}: names", sorted(g.nodes[ntype].data.keys()), sorted(whole.nodes[ntype].data.keys()))
        ids = c.some(g.num_nodes(ntype), 100)
        for name, truth in whole.nodes[ntype].data.items():
            f.same(f"{ntype}.{name}", g.nodes[ntype].data[name][ids], truth[c.orig_nodes(ids, ntype)])
    for etype in whole.canonical_etypes:
        for key in (etype, etype[1]):
            f.equal(f"{etype[1]}: names", sorted(g.edges[key].data.keys()), sorted(whole.edges[etype].data.keys()))
        ids = c.some(g.num_edges(etype), 200)
        for name, truth in whole.edges[etype].data.items():
            f.same(f"{etype[1]}.{name}", g.edges[etype].data[name][ids], truth[c.orig_edges(ids, etype)])


def check_splits(c: Context, f: Findings) -> None:
    g, whole, book = c.g, c.truth.graph, c.g.get_partition_book()
    nodes = whole.nodes["paper"].data["train_mask"][c.orig_nodes(torch.arange(g.num_nodes("paper")), "paper")]
    edges = whole.edges[WRITES].data["train_mask"][c.orig_edges(torch.arange(g.num_edges(WRITES)), WRITES)]
    for even in (True, False):
        mine = dgl.distributed.node_split(g.nodes["paper"].data["train_mask"], book, ntype="paper", force_even=even)
        f.same_ids(f"nodes, force_even={even}", torch.cat(c.gather(mine)), nodes.nonzero().flatten())
        mine = dgl.distributed.edge_split(g.edges[WRITES].data["train_mask"], book, etype=WRITES, force_even=even)
        f.same_ids(f"edges, force_even={even}", torch.cat(c.gather(mine)), edges.nonzero().flatten())
        authors = torch.ones(g.num_nodes("author"), dtype=torch.bool)
        mine = dgl.distributed.node_split(authors, book, ntype="author", force_even=even)
        f.same_ids(f"authors, force_even={even}", torch.cat(c.gather(mine)), torch.arange(g.num_nodes("author")))


def check_full_frontier(c: Context, f: Findings) -> None:
    """Fanout -1 by several types of seeds: exactly the in-edges of each edge type."""
    seeds = {t: c.some(c.g.num_nodes(t), n) for t, n in (("paper", 60), ("author", 50), ("venue", 4))}
    frontier = dgl.distributed.sample_etype_neighbors(c.g, seeds, -1)
    for etype in c.g.canonical_etypes:
        f.same_ids(f"{etype[1]}", edges_exist(c, f, etype[1], frontier, etype), in_edges(c, seeds, etype))
    only = dgl.distributed.sample_etype_neighbors(c.g, {"author": seeds["author"]}, -1)
    f.same_ids("authors only", edges_exist(c, f, "authors only", only, WRITTEN_BY), in_edges(c, seeds, WRITTEN_BY))
    f.equal("types in the frontier", only.canonical_etypes, [WRITTEN_BY])


def check_fanouts(c: Context, f: Findings) -> None:
    """Fanouts by edge type: each type has min(fanout, degree) in-edges."""
    seeds = {t: c.some(c.g.num_nodes(t), n, 3) for t, n in (("paper", 80), ("author", 60), ("venue", 5))}
    for fanout in (2, MIXED, {etype[1]: k for etype, k in MIXED.items()}):
        frontier = c.g.sample_neighbors(seeds, fanout)
        for etype, k in MIXED.items():
            wanted = fanout if isinstance(fanout, int) else k
            eids = edges_exist(c, f, f"fanout {wanted} of {etype[1]}", frontier, etype)
            f.equal(f"{etype[1]}: no edge twice", len(eids.unique()), len(eids))
            ids = seeds[etype[2]]
            degree = c.truth.graph.in_degrees(c.orig_nodes(ids, etype[2]), etype=etype)
            want = degree if wanted < 0 else degree.clamp(max=wanted)
            f.same(f"{etype[1]}: in-edges per seed", in_degrees(frontier, ids, etype), want)
    frontier = c.g.sample_neighbors(seeds, 3, replace=True)
    for etype in c.g.canonical_etypes:
        ids = seeds[etype[2]]
        degree = c.truth.graph.in_degrees(c.orig_nodes(ids, etype[2]), etype=etype)
        f.same(f"replace, {etype[1]}", in_degrees(frontier, ids, etype), (degree > 0).long() * 3)


def check_full_blocks(c: Context, f: Findings) -> None:
    """Blocks of a full-neighbour sampler are those of single-machine DGL, type by type; data arrives with them."""
    book, whole = c.g.get_partition_book(), c.truth.graph
    seeds = dgl.distributed.node_split(c.g.nodes["paper"].data["train_mask"], book, ntype="paper", force_even=True)
    loader = DistNodeDataLoader(
        c.g, {"paper": seeds}, MultiLayerFullNeighborSampler(2), batch_size=30, shuffle=True, drop_last=False
    )
    yielded = []
    for input_nodes, output_nodes, blocks in loader:
        yielded.append(output_nodes["paper"])
        sampler = MultiLayerFullNeighborSampler(2, fused=False)
        orig = {"paper": c.orig_nodes(output_nodes["paper"], "paper")}
        true_inputs, _, true_blocks = sampler.sample_blocks(whole, orig)
        for ntype in whole.ntypes:
            f.same_ids(f"inputs, {ntype}", c.orig_nodes(input_nodes[ntype], ntype), true_inputs[ntype])
        for depth, (block, true_block) in enumerate(zip(blocks, true_blocks, strict=True)):
            for etype in whole.canonical_etypes:
                eids = edges_exist(c, f, f"block {depth}, {etype[1]}", block, etype)
                f.same_ids(f"block {depth}, {etype[1]}: edges", eids, true_block.edges[etype].data[dgl.EID])
            for ntype in whole.ntypes:
                dst = block.dstnodes[ntype].data[dgl.NID]
                f.same_ids(
                    f"block {depth}, {ntype}", c.orig_nodes(dst, ntype), true_block.dstnodes[ntype].data[dgl.NID]
                )
        f.same(
            "features",
            c.g.nodes["paper"].data["feat"][input_nodes["paper"]],
            whole.nodes["paper"].data["feat"][c.orig_nodes(input_nodes["paper"], "paper")],
        )
        f.same(
            "features of venues",
            c.g.nodes["venue"].data["x"][input_nodes["venue"]],
            whole.nodes["venue"].data["x"][c.orig_nodes(input_nodes["venue"], "venue")],
        )
        cited = blocks[-1].edges[CITES].data[dgl.EID]
        f.same("edge data", c.g.edges[CITES].data["w"][cited], whole.edges[CITES].data["w"][c.orig_edges(cited, CITES)])
    f.same_ids("seeds of an epoch", torch.cat(yielded), seeds)


def check_mixed_seeds(c: Context, f: Findings) -> None:
    """A loader over seeds of two types with a fanout for each edge type."""
    seeds = {"paper": c.some(c.g.num_nodes("paper"), 40), "author": c.some(c.g.num_nodes("author"), 33)}
    loader = DistNodeDataLoader(c.g, seeds, NeighborSampler([MIXED, MIXED]), batch_size=20, shuffle=True)
    yielded: dict[str, list[Tensor]] = {"paper": [], "author": []}
    for _, output_nodes, blocks in loader:
        for ntype, ids in output_nodes.items():
            yielded.setdefault(ntype, []).append(ids)
        for depth, block in enumerate(blocks):
            for etype, fanout in MIXED.items():
                edges_exist(c, f, f"block {depth}, {etype[1]}", block, etype)
                dst = c.orig_nodes(block.dstnodes[etype[2]].data[dgl.NID], etype[2])
                degree = c.truth.graph.in_degrees(dst, etype=etype)
                want = degree if fanout < 0 else degree.clamp(max=fanout)
                f.same(f"block {depth}, {etype[1]}: in-edges", in_degrees(block, torch.arange(len(dst)), etype), want)
    for ntype, ids in seeds.items():
        f.same_ids(f"{ntype} of an epoch", torch.cat(yielded[ntype]), ids)


def check_edge_loader(c: Context, f: Findings) -> None:
    """Edges of one type with negatives; the plugin excludes them and, by DGL's rule, the reverse type's same ids."""
    book, whole = c.g.get_partition_book(), c.truth.graph
    eids = dgl.distributed.edge_split(c.g.edges[WRITES].data["train_mask"], book, etype=WRITES, force_even=True)[:90]
    loader = DistEdgeDataLoader(
        c.g, {WRITES: eids}, MultiLayerFullNeighborSampler(1), batch_size=40, exclude="reverse_types",
        reverse_etypes={WRITES: WRITTEN_BY, WRITTEN_BY: WRITES},
        negative_sampler=dgl.dataloading.negative_sampler.Uniform(2), shuffle=True,
    )  # fmt: skip
    yielded = []
    for input_nodes, pair_graph, negative_graph, blocks in loader:
        pairs = pair_graph.edges[WRITES].data[dgl.EID]
        yielded.append(pairs)
        edges_exist(c, f, "pair graph", pair_graph, WRITES)
        f.equal("negative pairs", negative_graph.num_edges(WRITES), 2 * len(pairs))
        f.same(
            "negative sources",
            negative_graph.edges(etype=WRITES)[0],
            pair_graph.edges(etype=WRITES)[0].repeat_interleave(2),
        )
        f.same("input papers", blocks[0].srcnodes["paper"].data[dgl.NID], input_nodes["paper"])
        gone = {WRITES: pairs, WRITTEN_BY: pairs} if c.plugin else {}
        for etype in whole.canonical_etypes:
            dst = c.orig_nodes(blocks[0].dstnodes[etype[2]].data[dgl.NID], etype[2])
            want = whole.in_edges(dst, form="eid", etype=etype)
            if etype in gone:
                want = want[~torch.isin(want, c.orig_edges(gone[etype], etype))]
            f.same_ids(f"{etype[1]} of the block", edges_exist(c, f, f"block, {etype[1]}", blocks[0], etype), want)
    f.same_ids("edges of an epoch", torch.cat(yielded), eids)


def check_excluded_edges(c: Context, f: Findings) -> None:
    """Excluded edges, by type, are no candidates."""
    seeds = {"paper": c.some(c.g.num_nodes("paper"), 80), "author": c.some(c.g.num_nodes("author"), 60)}
    allowed = {etype: in_edges(c, seeds, etype) for etype in (CITES, WRITES, WRITTEN_BY)}
    gone = {etype: ids[torch.rand(len(ids), generator=c.generator(5)) < 0.5] for etype, ids in allowed.items()}
    for fanout in (-1, 2):
        excluded = {etype: c.edges_of(ids, etype) for etype, ids in gone.items()}
        frontier = c.g.sample_neighbors(seeds, fanout, exclude_edges=excluded)
        for etype, ids in allowed.items():
            kept = ids[~torch.isin(ids, gone[etype])]
            eids = edges_exist(c, f, f"fanout {fanout}, {etype[1]}", frontier, etype)
            f.equal(f"fanout {fanout}, {etype[1]}: excluded", int(torch.isin(eids, gone[etype]).sum()), 0)
            if fanout == -1:
                f.same_ids(f"others of {etype[1]}", eids, kept)
            left = torch.zeros(c.truth.graph.num_nodes(etype[2]), dtype=torch.int64)
            left.index_add_(0, c.truth.graph.find_edges(kept, etype=etype)[1], torch.ones_like(kept))
            mine = left[c.orig_nodes(seeds[etype[2]], etype[2])]
            want = mine if fanout < 0 else mine.clamp(max=fanout)
            f.same(f"in-edges of {etype[1]}", in_degrees(frontier, seeds[etype[2]], etype), want)


def check_embeddings_of_a_type_without_data(c: Context, f: Findings) -> None:
    """Authors have no features: a DistEmbedding stands in for them, SparseAdam trains it, readers see it move."""
    g = c.g
    policy = g.get_node_partition_policy("author")
    embedding = dgl.distributed.DistEmbedding(g.num_nodes("author"), 5, "authors", init_func=halves, part_policy=policy)
    optimizer = dgl.distributed.optim.SparseAdam([embedding], lr=0.1)
    every = torch.arange(g.num_nodes("author"))
    f.same("initial rows", embedding.weight[every], halves((len(every), 5), torch.float32))
    c.fence()
    mine = every[every % c.world == c.rank]
    expected = halves((len(every), 5), torch.float32)
    for _ in range(2):
        embedding(mine).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        c.fence()
        expected -= 0.1  # Adam's step under a constant gradient of 1
        f.same("trained rows", embedding.weight[every], expected, rtol=1e-4, atol=1e-5)
        c.fence()
    tensor = dgl.distributed.DistTensor(
        (g.num_nodes("venue"), 2), torch.float32, "venues", part_policy=g.get_node_partition_policy("venue")
    )
    if c.rank == 0:
        tensor[torch.arange(g.num_nodes("venue"))] = torch.ones(g.num_nodes("venue"), 2)
    c.fence()
    f.same("rows of venues", tensor[torch.arange(g.num_nodes("venue"))], torch.ones(g.num_nodes("venue"), 2))
    c.fence()


def check_writes_after_fence(c: Context, f: Findings) -> None:
    """Features of one type are overwritten; all trainers read the new rows after the fence."""
    data = c.g.nodes["paper"].data["feat"]
    every = torch.arange(c.g.num_nodes("paper"))
    loader = DistNodeDataLoader(c.g, {"paper": every[:50]}, MultiLayerFullNeighborSampler(2), batch_size=50)
    inputs, _, _ = next(iter(loader))
    data[inputs["paper"]]
    c.fence()
    for value in range(6):
        if value % c.world == c.rank:
            data[every] = torch.full((len(every), 8), float(value))
        c.fence()
        f.same("rows", data[inputs["paper"]], torch.full((len(inputs["paper"]), 8), float(value)))
        c.fence()


def halves(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.full(shape, 0.5, dtype=dtype)


def in_edges(c: Context, seeds: dict[str, Tensor], etype: ETYPE) -> Tensor:
    """Original ids of the seeds' in-edges of a type."""
    ids: Tensor = c.truth.graph.in_edges(c.orig_nodes(seeds[etype[2]], etype[2]), form="eid", etype=etype)
    return ids


def in_degrees(graph: DGLGraph, ids: Tensor, etype: ETYPE) -> Tensor:
    """In-degrees of vertices of a sampled graph, in which stock DGL leaves out the edge types that have no edge."""
    if etype not in graph.canonical_etypes:
        return torch.zeros(len(ids), dtype=torch.int64)
    degrees: Tensor = graph.in_degrees(ids, etype=etype)
    return degrees


def edges_exist(c: Context, f: Findings, what: str, graph: DGLGraph, etype: ETYPE) -> Tensor:
    """Checks both ends of every edge of a type against the truth; returns the original edge ids."""
    if etype not in graph.canonical_etypes or graph.num_edges(etype) == 0:
        return torch.empty(0, dtype=torch.int64)
    src, dst = graph.edges(etype=etype)
    if graph.is_block:
        src = graph.srcnodes[etype[0]].data[dgl.NID][src]
        dst = graph.dstnodes[etype[2]].data[dgl.NID][dst]
    elif dgl.NID in graph.nodes[etype[0]].data:
        src, dst = graph.nodes[etype[0]].data[dgl.NID][src], graph.nodes[etype[2]].data[dgl.NID][dst]
    eids = c.orig_edges(graph.edges[etype].data[dgl.EID], etype)
    true_src, true_dst = c.truth.graph.find_edges(eids, etype=etype)
    f.same(f"{what}: sources", c.orig_nodes(src, etype[0]), true_src)
    f.same(f"{what}: destinations", c.orig_nodes(dst, etype[2]), true_dst)
    return eids


HETERO_CHECKS = [
    *named(check_distribution, check_types_and_ids, check_data, check_splits, check_full_frontier, check_fanouts),
    *named(check_full_blocks, check_mixed_seeds, check_edge_loader),
    *named(check_excluded_edges, needs_plugin=True),
    *named(check_embeddings_of_a_type_without_data, check_writes_after_fence),
]
