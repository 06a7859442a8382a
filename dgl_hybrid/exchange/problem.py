# SPDX-License-Identifier: Apache-2.0
"""Builds a rank's planning problem: what its own vertices read, and the structure of what it could compute itself."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass

import torch
from torch import Tensor

from dgl_hybrid.exchange.communicator import Communicator
from dgl_hybrid.exchange.ids import Ownership, fetch_rows, request_ids
from dgl_hybrid.exchange.in_edges import InEdges
from dgl_hybrid.exchange.segments import count_unique, difference, find_sorted, indptr_of, union, unique
from dgl_hybrid.planner import PlanProblem

_logger = logging.getLogger(__name__)


def build_plan_problem(
    communicator: Communicator,
    ownership: Ownership,
    in_edges: InEdges,
    in_degrees: Tensor,
    seeds: Tensor,
    num_layers: int,
    *,
    dense_below: int = 0,
    inputs_are_free: bool = False,
    max_halo_edges: int = sys.maxsize,
) -> PlanProblem:
    """Builds this rank's problem. Collective: two passes of a few id exchanges per layer.

    The first pass finds D_l, the rows of level l that some seed depends on, each owner learning of its own. The second
    fetches the in-edges of the halo vertices that this rank could compute, level by level. Lists of vertices that could
    be computed at level 1 alone tell which input rows they would bring here; where those cost nothing the number of
    in-edges says all there is to know of them, and they, often most of the halo, are not fetched.

    Of a small world, or for many layers, these are most of the graph on every rank, so they have a limit. Vertices past
    it are not expandable: above level 0 they can only be received.

    Args:
        in_degrees: (N,) full-graph in-degrees of this rank's nodes.
        seeds: Sorted, from `settle_seeds`.
        dense_below: Levels below this one hold every owned node.
        inputs_are_free: Rows that are computed here bring no input rows of their in-neighbours: the first layer keeps
            what it aggregates, and owners hand that out. Alike on every rank.
        max_halo_edges: In-edges of halo vertices to look at: level by level from the top, and within one first of what
            owned vertices read, then of the vertices with the fewest.
    """
    reached = _find_reach(communicator, ownership, in_edges, seeds, num_layers, dense_below)
    demanded = [level.demanded for level in reached]

    # What this rank would read if it computed every halo vertex: level by level downwards from what it demands.
    lowest = 1 if inputs_are_free else 0
    needed: list[Tensor] = [seeds[:0]] * num_layers
    decided = listed = expanded = seeds[:0]
    num_left = max_halo_edges
    for level in range(num_layers - 1, -1, -1):
        needed[level] = demanded[level]
        if level + 1 == num_layers:
            continue
        # What was decided higher up stays so: its sources are there already, at every level that may need them.
        new = difference(needed[level + 1], decided, ownership.total)
        decided = needed[level + 1]
        needed[level] = union(needed[level], decided)
        if level >= lowest:
            degrees = fetch_rows(communicator, ownership, in_degrees, new)
            is_read, _ = find_sorted(demanded[level + 1], new, ownership.total)
            fits = _that_fit(degrees, is_read, num_left)
            new, num_left = new[fits], num_left - int(degrees[fits].sum())
            in_edges.ensure(new)
            _, src_global, _ = in_edges.lookup(new)
            sources = unique(src_global, ownership.total)
            needed[level] = union(needed[level], sources[~ownership.is_owned(sources)])
            listed = union(listed, new)
        expanded = union(expanded, new)
    halo = union(*needed)
    expandable = torch.zeros(len(halo), dtype=torch.bool)
    expandable[torch.searchsorted(halo, expanded)] = True
    if max_halo_edges and len(expanded) < len(decided):
        _logger.warning(
            "rank %d: in-edges of %d of %d halo vertices are past max_halo_edges=%d: above level 0 these are received",
            communicator.rank,
            len(decided) - len(expanded),
            len(decided),
            max_halo_edges,
        )

    counts, src_global, _ = in_edges.lookup(listed)
    reader = torch.repeat_interleave(torch.searchsorted(halo, listed), counts)
    is_halo, position = find_sorted(halo, src_global, ownership.total)
    reader, position = reader[is_halo], position[is_halo]
    owned_reads = torch.zeros(num_layers, len(halo), dtype=torch.int32)
    reach = torch.zeros(num_layers, len(halo), dtype=torch.bool)
    for level in range(num_layers):
        owned_reads[level, torch.searchsorted(halo, demanded[level])] = reached[level].num_reads.to(torch.int32)
        reach[level, torch.searchsorted(halo, needed[level])] = True
    return PlanProblem(
        rank=ownership.rank,
        world_size=ownership.world_size,
        num_layers=num_layers,
        halo_global=halo,
        owner=ownership.owner_of(halo),
        in_degree=fetch_rows(communicator, ownership, in_degrees, halo),
        expandable=expandable,
        in_indptr=indptr_of(torch.bincount(reader, minlength=len(halo))),
        in_halo=position.to(torch.int32),
        demand=owned_reads > 0,
        reach=reach,
        owned_rows=torch.tensor([*(level.num_rows for level in reached), len(seeds)]),
        owned_edges=torch.tensor([level.num_edges for level in reached], dtype=torch.int64),
        owned_reads=owned_reads,
        inputs_are_free=inputs_are_free,
    )


def _that_fit(num_edges: Tensor, is_first: Tensor, limit: int) -> Tensor:
    """Returns which of some vertices have `limit` in-edges together: the first ones, then those with the fewest.

    Each saves one received row, whatever it costs to compute.
    """
    order = torch.argsort(num_edges, stable=True)
    order = order[torch.argsort((~is_first[order]).to(torch.int8), stable=True)]
    fits = torch.zeros(len(num_edges), dtype=torch.bool)
    fits[order[num_edges[order].cumsum(0) <= limit]] = True
    return fits


@dataclass(frozen=True, kw_only=True)
class _Reached:
    """What some seed depends on, at one of the levels 0..L-1, as this rank has to do with it."""

    num_rows: int
    """Owned rows of the level, those of D_l."""
    num_edges: int
    """In-edges of the owned rows of the level above."""
    demanded: Tensor
    """Sorted halo vertices at which such in-edges begin."""
    num_reads: Tensor
    """How many begin at each."""


def _find_reach(
    communicator: Communicator,
    ownership: Ownership,
    in_edges: InEdges,
    seeds: Tensor,
    num_layers: int,
    dense_below: int,
) -> list[_Reached]:
    """Finds the owned rows of D_l and what those of D_(l+1) read, for the levels l = 0..L-1. Collective.

    A borrowed seed counts as its borrower's own, since that rank computes it whatever the plan.
    """
    above = seeds
    found: list[_Reached] = []
    for level in range(num_layers - 1, -1, -1):
        in_edges.ensure(above)
        _, src_global, _ = in_edges.lookup(above)
        sources, num_reads = count_unique(src_global, ownership.total)
        mine = ownership.is_owned(sources)
        is_borrowed, _ = find_sorted(above[~ownership.is_owned(above)], sources, ownership.total)
        is_demanded = ~mine & ~is_borrowed
        routing = request_ids(communicator, ownership, sources[is_demanded])
        own = ownership.owned() if level < dense_below else sources[mine]
        above = union(above, own, routing.send_local + ownership.start)
        found.append(
            _Reached(
                num_rows=len(above),
                num_edges=len(src_global),
                demanded=sources[is_demanded],
                num_reads=num_reads[is_demanded],
            )
        )
    return found[::-1]
