# SPDX-License-Identifier: Apache-2.0
"""Splits a homogeneous graph into DistDGL parts: pure functions from tensors to tensors.

Why not `dgl.partition.partition_graph_with_halo`: it numbers the in-edges of one vertex in an arbitrary order (ties in
a max aggregation then differ from the single-machine run), and it fails on a part without edges. The files it would
write and the ones made from here have the same meaning; only the order inside one destination differs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Renumbering:
    """DistDGL's renumbering: every part owns one contiguous range of vertex ids and one of edge ids."""

    node_offsets: Tensor
    """(P+1,) int64: part p owns vertices `node_offsets[p]..node_offsets[p+1]`."""
    edge_offsets: Tensor
    """(P+1,) int64: the same for edges; an edge belongs to the owner of its destination."""
    orig_node_ids: Tensor
    """(N_total,) int64: original id of every global vertex id."""
    orig_edge_ids: Tensor
    """(E_total,) int64: original id of every global edge id."""
    src: Tensor
    """(E_total,) int64: source (global id) of every global edge id."""
    dst: Tensor
    """(E_total,) int64: destination (global id) of every global edge id."""
    indptr: Tensor | None
    """(N_total+1,) int64: in-edges of vertex v are edge ids `indptr[v]..indptr[v+1]`; None if not sorted by dst."""


@dataclass(frozen=True, kw_only=True)
class PartStructure:
    """One part's graph: inner vertices first (by global id), then halo vertices (by global id); edges likewise."""

    nodes: Tensor
    """(n,) int64 global ids; the first `num_inner_nodes` are owned."""
    num_inner_nodes: int
    edges: Tensor
    """(m,) int64 global ids; the first `num_inner_edges` are owned."""
    num_inner_edges: int
    src: Tensor
    """(m,) int64 positions in `nodes`."""
    dst: Tensor
    """(m,) int64 positions in `nodes`."""


def renumber(src: Tensor, dst: Tensor, node_part: Tensor, num_parts: int) -> Renumbering:
    """Numbers vertices by part and edges by (destination, original edge id).

    With one part nothing is renumbered, as in DGL.

    Args:
        src: (E_total,) int64 original vertex ids.
        dst: (E_total,) int64 original vertex ids.
        node_part: (N_total,) int64 in 0..num_parts-1.
        num_parts: P.
    Returns:
        The renumbering; inside one destination, edge ids rise in original edge-id order.
    """
    num_nodes = int(node_part.numel())
    num_edges = int(src.numel())
    if num_parts == 1:
        return Renumbering(
            node_offsets=torch.tensor([0, num_nodes]),
            edge_offsets=torch.tensor([0, num_edges]),
            orig_node_ids=torch.arange(num_nodes),
            orig_edge_ids=torch.arange(num_edges),
            src=src,
            dst=dst,
            indptr=None,
        )
    orig_node_ids = torch.sort(node_part, stable=True).indices
    global_of = torch.empty_like(orig_node_ids)
    global_of[orig_node_ids] = torch.arange(num_nodes)
    new_dst, orig_edge_ids = torch.sort(global_of[dst], stable=True)
    node_offsets = counts_to_offsets(torch.bincount(node_part, minlength=num_parts))
    indptr = counts_to_offsets(torch.bincount(new_dst, minlength=num_nodes))
    return Renumbering(
        node_offsets=node_offsets,
        edge_offsets=indptr[node_offsets],
        orig_node_ids=orig_node_ids,
        orig_edge_ids=orig_edge_ids,
        src=global_of[src[orig_edge_ids]],
        dst=new_dst,
        indptr=indptr,
    )


def cut_part(ids: Renumbering, part_id: int, num_hops: int) -> PartStructure:
    """Builds one part: owned vertices with all in-edges and out-edges, and in-edges of halo vertices near by.

    As in DGL: in-edges are stored of halo vertices at in-distance < num_hops. Out-edges of owned vertices are stored as
    well, because `DistGraph.out_degrees` counts them in the owner's part.

    Args:
        ids: The renumbering of the whole graph.
        part_id: The part to build.
        num_hops: How far the halo reaches, at least 1.
    Returns:
        The structure; halo vertices are those at in-distance 1..num_hops and the ends of out-edges.
    """
    first, last = int(ids.node_offsets[part_id]), int(ids.node_offsets[part_id + 1])
    if ids.indptr is None:
        num_nodes = int(ids.orig_node_ids.numel())
        num_edges = int(ids.orig_edge_ids.numel())
        return PartStructure(
            nodes=torch.arange(num_nodes),
            num_inner_nodes=num_nodes,
            edges=torch.arange(num_edges),
            num_inner_edges=num_edges,
            src=ids.src,
            dst=ids.dst,
        )
    num_nodes = ids.orig_node_ids.numel()
    inner_edges = torch.arange(int(ids.indptr[first]), int(ids.indptr[last]))
    expanded = torch.zeros(num_nodes, dtype=torch.bool)  # vertices whose in-edges are stored
    expanded[first:last] = True
    new_edges = inner_edges
    for _ in range(1, num_hops):
        sources = ids.src[new_edges]
        frontier = torch.unique(sources[~expanded[sources]])
        if not len(frontier):
            break
        expanded[frontier] = True
        new_edges = expand_ranges(ids.indptr[frontier], ids.indptr[frontier + 1])
    is_owned_source = (ids.src >= first) & (ids.src < last)
    is_stored = expanded[ids.dst] | is_owned_source
    is_stored[inner_edges] = False
    edges = torch.cat([inner_edges, is_stored.nonzero().flatten()])
    held = torch.zeros(num_nodes, dtype=torch.bool)
    held[ids.src[edges]] = True
    held[ids.dst[edges]] = True
    held[first:last] = False
    nodes = torch.cat([torch.arange(first, last), held.nonzero().flatten()])
    position = torch.empty(num_nodes, dtype=torch.int64)
    position[nodes] = torch.arange(nodes.numel())
    return PartStructure(
        nodes=nodes,
        num_inner_nodes=last - first,
        edges=edges,
        num_inner_edges=inner_edges.numel(),
        src=position[ids.src[edges]],
        dst=position[ids.dst[edges]],
    )


def counts_to_offsets(counts: Tensor) -> Tensor:
    """Prefix sums with a leading zero: (n,) int64 to (n+1,) int64."""
    offsets = torch.zeros(counts.numel() + 1, dtype=torch.int64)
    torch.cumsum(counts, 0, out=offsets[1:])
    return offsets


def expand_ranges(starts: Tensor, ends: Tensor) -> Tensor:
    """Concatenates `starts[i]..ends[i]-1` for all i.

    Args:
        starts: (n,) int64.
        ends: (n,) int64, each at least its start.
    Returns:
        (sum(ends - starts),) int64. Example: [3, 9], [5, 10] gives [3, 4, 9].
    """
    lengths = ends - starts
    offsets = counts_to_offsets(lengths)
    return torch.arange(int(offsets[-1])) + torch.repeat_interleave(starts - offsets[:-1], lengths)
