# SPDX-License-Identifier: Apache-2.0
"""Closure rules over a problem's items, as vectorised numpy: the one place that knows what a choice implies.

A choice is `computed`, an (L, H) bool array; what must be present follows from it:
an item is present if owned vertices read it, if it is computed here, or if a computed item reads it (but for inputs,
where owners hand out what the first layer aggregates from them).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import sparse

from ..errors import PlanError
from .costs import ItemCosts
from .problem import PlanProblem

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Positions = npt.NDArray[np.int32]
"""Positions of halo vertices, where there is one for each of up to 10^8 edges."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Items:
    """Numpy view of a problem. E: halo in-edges of expandable vertices, without self-loops and duplicates."""

    num_layers: int
    num_halo: int
    owner: Ints
    in_degree: Ints
    reach: Bools
    """(L, H): read by what this rank computes or, as far as in-edges are known here, could compute."""
    demand: Bools
    """(L, H)"""
    allowed: Bools
    """(L, H): the item exists and may be computed here."""
    reader: Positions
    """(E,) position of the vertex that reads, ascending."""
    source: Positions
    """(E,) position of the vertex that is read, ascending for each reader."""
    lowest: int = 0
    """Rows that are computed here bring the rows of this level and above that they read, and none below."""

    def reads(self, computed: Bools, level: int) -> Bools:
        """Returns (H,) bool: brought here, one level down, by the vertices in `computed` (H,) of a level above 0."""
        result = np.zeros(self.num_halo, dtype=np.bool_)
        if level > self.lowest and computed.any():
            result[self.source[computed[self.reader]]] = True
        return result

    def present(self, computed: Bools) -> Bools:
        """Returns (L, H) bool: the rows that are here, received or computed."""
        result = self.demand | computed
        for level in range(1, self.num_layers):
            result[level - 1] |= self.reads(computed[level], level)
        return result

    def as_run(self, computed: Bools) -> Bools:
        """Returns a choice without what has no effect: where owners hand out what the first layer aggregates, inputs
        are held for nobody, and those that owned vertices read are received whatever a plan says. Nesting stays.
        """
        if self.lowest == 0:
            return computed
        result = computed.copy()
        result[0] = result[1] if self.num_layers > 1 else False
        return result

    def receive_prices(self, costs: ItemCosts) -> Floats:
        """Returns r, (L, H) seconds."""
        return np.array(costs.receive_s, dtype=np.float64)[:, self.owner]

    def compute_prices(self, costs: ItemCosts) -> Floats:
        """Returns p, (L, H) seconds."""
        edge_s = np.array(costs.edge_s, dtype=np.float64)[:, None]
        return np.array(costs.row_s, dtype=np.float64)[:, None] + edge_s * self.in_degree[None, :]

    def objective(self, costs: ItemCosts, computed: Bools, present: Bools | None = None) -> float:
        """Returns the seconds a choice costs per epoch: received rows at r, computed rows at p.

        Counts are multiplied, not rows added, so that equal choices give equal floats in any order.

        Args:
            costs: of this rank.
            computed: (L, H) the choice.
            present: what `present` returns for it, where that is known: finding it takes a pass over the edges.
        """
        return math.fsum(self._terms(computed, present, costs.receive_s, costs.row_s, costs.edge_s))

    def held_bytes(self, costs: ItemCosts, computed: Bools, present: Bools | None = None) -> float:
        """Returns the bytes the halo rows of a choice hold on this rank; arguments as of `objective`."""
        receive = tuple((x,) * costs.world_size for x in costs.receive_bytes)
        return math.fsum(self._terms(computed, present, receive, costs.row_held_bytes, costs.edge_held_bytes))

    def _terms(
        self,
        computed: Bools,
        present: Bools | None,
        receive: tuple[tuple[float, ...], ...],
        row: tuple[float, ...],
        edge: tuple[float, ...],
    ) -> list[float]:
        terms = []
        received = (self.present(computed) if present is None else present) & ~computed
        for level in range(self.num_layers):
            counts = np.bincount(self.owner[received[level]], minlength=len(receive[level]))
            terms += [price * int(count) for price, count in zip(receive[level], counts, strict=True)]
            terms.append(row[level] * int(computed[level].sum()))
            terms.append(edge[level] * int(self.in_degree[computed[level]].sum()))
        return terms

    def broken_rule(self, computed: Bools) -> str | None:
        """Returns what is wrong with a choice, or None."""
        for level in range(self.num_layers):
            wrong = computed[level] & ~self.allowed[level]
            if wrong.any():
                reason = (
                    "has unknown in-edges"
                    if self.reach[level][wrong][0]
                    else "is read by nothing that this rank computes or could compute"
                )
                count, first = int(wrong.sum()), int(wrong.argmax())
                return f"level {level}: {count} cached vertices cannot be, the first at position {first} {reason}"
            if level:
                wrong = computed[level] & ~computed[level - 1]
                if wrong.any():
                    return (
                        f"level {level}: {int(wrong.sum())} cached vertices are not cached at level {level - 1}, "
                        f"the first at position {int(wrong.argmax())}"
                    )
        return None


def build_items(problem: PlanProblem) -> Items:
    """Makes the numpy view of a validated problem. Arrays share memory with its tensors where they can."""
    reader, source = _distinct_edges(problem)
    reach = problem.reach.numpy()
    allowed = reach.copy()
    allowed[1:] &= problem.expandable.numpy()[None, :]
    return Items(
        num_layers=problem.num_layers,
        num_halo=problem.num_halo,
        owner=problem.owner.numpy(),
        in_degree=problem.in_degree.numpy(),
        reach=reach,
        demand=problem.demand.numpy(),
        allowed=allowed,
        reader=reader,
        source=source,
        lowest=1 if problem.inputs_are_free else 0,
    )


def _distinct_edges(problem: PlanProblem) -> tuple[Positions, Positions]:
    """Returns (E,) readers and sources, sorted, without self-loops and duplicates, in few passes over the edges."""
    indptr = problem.in_indptr.numpy()
    reader = np.repeat(np.arange(problem.num_halo, dtype=np.int32), np.diff(indptr))
    source = problem.in_halo.numpy()
    if not ((source[1:] >= source[:-1]) | (reader[1:] != reader[:-1])).all():
        # Transposed twice, which counts instead of comparing: half the time of a sort.
        shape = (problem.num_halo, problem.num_halo)
        matrix = sparse.csr_matrix((np.ones(source.size, dtype=np.int8), source, indptr), shape=shape)
        source = matrix.tocsc().tocsr().indices.astype(np.int32, copy=False)
    # A duplicate would charge one row twice in the greedy.
    keep = reader != source
    keep[1:] &= (source[1:] != source[:-1]) | (reader[1:] != reader[:-1])
    return (reader, source) if keep.all() else (reader[keep], source[keep])


def require_match(problem: PlanProblem, costs: ItemCosts) -> None:
    """Raises PlanError unless the costs have the problem's levels and ranks."""
    if costs.num_layers != problem.num_layers:
        raise PlanError(
            f"the traced model has {costs.num_layers} layers, the planning problem of rank {problem.rank} has "
            f"{problem.num_layers}; build both for one model"
        )
    if costs.world_size != problem.world_size:
        raise PlanError(
            f"the costs are for {costs.world_size} ranks, the planning problem of rank {problem.rank} for "
            f"{problem.world_size}; probe the cluster with all ranks"
        )
