# SPDX-License-Identifier: Apache-2.0
"""Which vertices lie within k in-hops of the vertices of one part."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dgl_hybrid.partition.split import expand_ranges


@dataclass(frozen=True, kw_only=True)
class Closure:
    """Halo vertices by in-distance, as far as the in-edges held here reach."""

    halo_global: Tensor
    """(M,) int64, sorted: halo vertices at in-distance 1..k from the seeds."""
    distance: Tensor
    """(M,) int64: in-distance of each; exact unless `blocked` has vertices at a smaller distance."""
    blocked: Tensor
    """int64, sorted: halo vertices at in-distance < k whose in-edges are not held; vertices beyond may be missing."""

    @property
    def is_complete(self) -> bool:
        """Whether every vertex within k in-hops is listed for certain."""
        return self.blocked.numel() == 0


def khop_closure(
    *,
    first_inner: int,
    indptr: Tensor,
    src_global: Tensor,
    halo_global: Tensor,
    halo_indptr: Tensor,
    halo_src_global: Tensor,
    num_hops: int,
    seeds: Tensor | None = None,
) -> Closure:
    """Follows in-edges backwards from `seeds` for `num_hops` steps; pure, no communication.

    Example: with edges 7->5->0, vertex 0 inner, 5 and 7 halo and the list of 5 held, two hops give [5, 7] at [1, 2].

    Args:
        first_inner: Global id of inner vertex 0; inner vertices are `first_inner..first_inner + N - 1`.
        indptr: (N+1,) int64, CSC of the inner vertices.
        src_global: (E,) int64.
        halo_global: (Hc,) int64 sorted: halo vertices with complete lists.
        halo_indptr: (Hc+1,) int64.
        halo_src_global: (Eh,) int64.
        num_hops: k >= 0.
        seeds: global ids of inner vertices to start from, all of them if None.
    Returns:
        The halo vertices within k in-hops. Paths may run through inner vertices as well.
    Raises:
        ValueError: negative num_hops, or a seed that is not an inner vertex.
    """
    if num_hops < 0:
        raise ValueError(f"num_hops must not be negative (got {num_hops})")
    last_inner = first_inner + indptr.numel() - 1
    frontier = torch.arange(first_inner, last_inner) if seeds is None else torch.unique(seeds)
    if frontier.numel() and (int(frontier[0]) < first_inner or int(frontier[-1]) >= last_inner):
        raise ValueError(
            f"seeds must be inner vertices {first_inner}..{last_inner - 1} "
            f"(got {int(frontier[0])}..{int(frontier[-1])})"
        )
    seen = frontier
    found: list[Tensor] = []
    blocked: list[Tensor] = []
    for _ in range(num_hops):
        is_inner = (frontier >= first_inner) & (frontier < last_inner)
        inner = frontier[is_inner] - first_inner
        outer = frontier[~is_inner]
        held = torch.isin(outer, halo_global)
        blocked.append(outer[~held])
        rows = torch.searchsorted(halo_global, outer[held])
        sources = torch.cat(
            [
                src_global[expand_ranges(indptr[inner], indptr[inner + 1])],
                halo_src_global[expand_ranges(halo_indptr[rows], halo_indptr[rows + 1])],
            ]
        )
        frontier = torch.unique(sources)
        frontier = frontier[~torch.isin(frontier, seen)]
        seen = torch.cat([seen, frontier])
        found.append(frontier[(frontier < first_inner) | (frontier >= last_inner)])
    empty = torch.empty(0, dtype=torch.int64)
    vertices = torch.cat([empty, *found])
    hops = torch.repeat_interleave(
        torch.arange(1, num_hops + 1), torch.tensor([len(part) for part in found], dtype=torch.int64)
    )
    order = torch.argsort(vertices)
    return Closure(
        halo_global=vertices[order], distance=hops[order], blocked=torch.cat([empty, *blocked]).sort().values
    )
