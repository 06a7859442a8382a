# SPDX-License-Identifier: Apache-2.0
"""In-edge lists of owned and foreign nodes are those of the whole graph, in the order of its edge ids."""

from __future__ import annotations

from typing import Any

import torch

from dgl_hybrid import PartitionedGraph
from dgl_hybrid.errors import PartitionError
from tests.helpers.world import run_ranks


def run_lookup(rank: int, world_size: int, part_config: str) -> dict[str, Any]:
    g = PartitionedGraph.open(part_config)
    own = g.nodes.owned()
    everything = torch.arange(g.num_nodes()).flip(0)
    foreign = everything[~g.nodes.is_owned(everything)]
    message = ""
    unknown = foreign[~torch.isin(foreign, g.in_edges.known_halo())]
    if len(unknown):
        try:
            g.in_edges.lookup(unknown)
        except PartitionError as error:
            message = str(error)
    g.in_edges.ensure(foreign if rank == 0 else foreign[:5])
    g.in_edges.ensure(foreign[:0] if rank == 0 else foreign)
    asked = torch.cat([foreign[:3], own.flip(0), foreign[3:]])
    counts, src, eid = g.in_edges.lookup(asked)
    original = g.partition.orig_node_ids
    assert original is not None
    return {
        "dst": g.fetch_nodes(original, asked),
        "counts": counts,
        "src": g.fetch_nodes(original, src),
        "weight": g.edata["w"].local,
        "first_edge": g.edges.start,
        "eid": eid,
        "unknown": len(unknown),
        "message": message,
    }


def test_lists_of_any_node(graph: Any, folder: str) -> None:
    results = run_ranks(3, run_lookup, folder)
    weight = torch.cat([result["weight"] for result in results])
    for rank, result in enumerate(results):
        begin = 0
        for dst, count in zip(result["dst"].tolist(), result["counts"].tolist(), strict=True):
            src, _, eid = graph.in_edges(dst, form="all")
            order = torch.argsort(eid)
            assert result["src"][begin : begin + count].tolist() == src[order].tolist()
            assert torch.equal(weight[result["eid"][begin : begin + count]], graph.edata["w"][eid[order]])
            begin += count
        if result["unknown"]:
            assert f"are not known on rank {rank} of 3" in result["message"]
