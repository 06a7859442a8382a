# SPDX-License-Identifier: Apache-2.0
"""Builds a rank's planning problem: what its own vertices read, and the structure of what it could compute itself."""

from __future__ import annotations

import torch
from torch import Tensor

from dgl_hybrid.exchange.communicator import Communicator
from dgl_hybrid.exchange.ids import Ownership, fetch_rows, request_ids
from dgl_hybrid.exchange.in_edges import InEdges
from dgl_hybrid.exchange.segments import difference, find_sorted, indptr_of, union
from dgl_hybrid.planner import PlanProblem


def build_plan_problem(
    communicator: Communicator,
    ownership: Ownership,
    in_edges: InEdges,
    in_degrees: Tensor,
    seeds: Tensor,
    num_layers: int,
    *,
    dense_below: int = 0,
) -> PlanProblem:
    """Builds this rank's problem. Collective: two passes of one id exchange per layer.

    The first pass finds D_l, the rows of level l that some seed depends on, each owner learning of its own. The second
    fetches the in-edges of the halo vertices that this rank could compute, level by level.

    Args:
        in_degrees: (N,) full-graph in-degrees of this rank's nodes.
        seeds: Sorted, from `settle_seeds`.
        dense_below: Levels below this one hold every owned node.
    """
    reached, demanded = _find_reach(communicator, ownership, in_edges, seeds, num_layers, dense_below)

    # What this rank would read if it computed every halo vertex: level by level downwards from what it demands.
    needed: list[Tensor] = [seeds[:0]] * num_layers
    for level in range(num_layers - 1, -1, -1):
        needed[level] = demanded[level]
        if level + 1 < num_layers:
            above = needed[level + 1]
            in_edges.ensure(above)
            _, src_global, _ = in_edges.lookup(above)
            sources = torch.unique(src_global)
            needed[level] = union(needed[level], above, sources[~ownership.is_owned(sources)])
    halo = union(*needed)
    expandable = torch.zeros(len(halo), dtype=torch.bool)
    computable = union(*needed[1:]) if num_layers > 1 else halo[:0]
    expandable[find_sorted(halo, computable)[1]] = True

    counts, src_global, _ = in_edges.lookup(computable)
    reader = torch.repeat_interleave(torch.searchsorted(halo, computable), counts)
    is_halo, position = find_sorted(halo, src_global)
    reader, position = reader[is_halo], position[is_halo]
    demand = torch.zeros(num_layers, len(halo), dtype=torch.bool)
    reach = torch.zeros(num_layers, len(halo), dtype=torch.bool)
    for level in range(num_layers):
        demand[level, torch.searchsorted(halo, demanded[level])] = True
        reach[level, torch.searchsorted(halo, needed[level])] = True
    owned_edges = [int(in_edges.lookup(reached[layer])[0].sum()) for layer in range(1, num_layers + 1)]
    return PlanProblem(
        rank=ownership.rank,
        world_size=ownership.world_size,
        num_layers=num_layers,
        halo_global=halo,
        owner=ownership.owner_of(halo),
        in_degree=fetch_rows(communicator, ownership, in_degrees, halo),
        expandable=expandable,
        in_indptr=indptr_of(torch.bincount(reader, minlength=len(halo))),
        in_halo=position,
        demand=demand,
        reach=reach,
        owned_rows=torch.tensor([len(level) for level in reached]),
        owned_edges=torch.tensor(owned_edges, dtype=torch.int64),
    )


def _find_reach(
    communicator: Communicator,
    ownership: Ownership,
    in_edges: InEdges,
    seeds: Tensor,
    num_layers: int,
    dense_below: int,
) -> tuple[list[Tensor], list[Tensor]]:
    """Finds `reached[l]`, the owned rows of D_l, and `demanded[l]`, the halo rows of level l that those of l + 1 read.

    A borrowed seed counts as its borrower's own, since that rank computes it whatever the plan.
    """
    reached: list[Tensor] = [seeds] * (num_layers + 1)
    demanded: list[Tensor] = [seeds[:0]] * num_layers
    for level in range(num_layers - 1, -1, -1):
        above = reached[level + 1]
        in_edges.ensure(above)
        _, src_global, _ = in_edges.lookup(above)
        sources = torch.unique(src_global)
        mine = ownership.is_owned(sources)
        borrowed = above[~ownership.is_owned(above)]
        demanded[level] = difference(sources[~mine], borrowed)
        routing = request_ids(communicator, ownership, demanded[level])
        own = ownership.owned() if level < dense_below else sources[mine]
        reached[level] = union(above, own, routing.send_local + ownership.start)
    return reached, demanded
