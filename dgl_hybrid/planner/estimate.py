# SPDX-License-Identifier: Apache-2.0
"""Predicted epoch time of plans: per rank and layer, and of all ranks together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from ..errors import PlanError
from .costs import ItemCosts
from .items import Bools, Floats, Items
from .problem import PlanProblem


@dataclass(frozen=True, kw_only=True, slots=True)
class RankEstimate:
    """Prediction for one rank; tuples are by layer 1..L, seconds per epoch, forward and backward together."""

    comm_s: tuple[float, ...]
    """On the wire, towards this rank and, of gradients, from it; once all ranks were asked (`with_sending`), as long as
    this rank's link is taken."""
    held_s: tuple[float, ...]
    """What runs while rows are on the wire: aggregation along edges from rows held here, in layers that can be split by
    source, and products beside it, on links that move rows in the background; 0 elsewhere."""
    rest_s: tuple[float, ...]
    """Everything else: aggregation along the other edges, all other row work, packing."""
    fixed_s: float
    """What no plan changes: the last level's rows (but for what runs beside an exchange), calls, the optimizer's step,
    the all-reduce."""
    objective_s: float
    """The plan's cost in the planner's own objective."""
    held_bytes: float
    """Held by halo rows of all levels."""
    fits: bool = True
    """Within the memory budget of this rank."""

    @property
    def epoch_s(self) -> float:
        """Layers follow each other; within one the wire and the edges held run side by side, the rest after both."""
        return self.fixed_s + math.fsum(self.layer_s)

    @property
    def layer_s(self) -> tuple[float, ...]:
        """(L,) seconds of each layer, waiting for other ranks not counted."""
        layers = zip(self.comm_s, self.held_s, self.rest_s, strict=True)
        return tuple(max(comm, held) + rest for comm, held, rest in layers)

    def with_wire(self, factor: float) -> RankEstimate:
        """Returns the estimate if everything on the wire took `factor` times as long."""
        return replace(self, comm_s=tuple(factor * seconds for seconds in self.comm_s))

    def with_sending(self, received_s: Floats, sent_s: Floats) -> RankEstimate:
        """Returns the estimate with the link as long busy as it sends or receives, whichever takes longer.

        A plan charges who receives. Who owns what everybody reads receives little and sends it to all.

        Args:
            received_s: (P, L, 2) by owner, `links_s` of this rank's plan.
            sent_s: (P, L, 2) by receiver, what the links_s of their plans say of this rank.
        """
        comm_s = list(self.comm_s)
        for layer, direction in np.ndindex(received_s.shape[1:]):
            received, sent = (math.fsum(by_rank[:, layer, direction]) for by_rank in (received_s, sent_s))
            comm_s[layer] += max(sent - received, 0.0)
        return replace(self, comm_s=tuple(comm_s))

    @property
    def compute_s(self) -> float:
        """Seconds the device works."""
        return self.fixed_s + math.fsum(self.held_s) + math.fsum(self.rest_s)

    def to_json(self) -> dict[str, Any]:
        """Returns a dictionary that `json.dumps` takes."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RankEstimate:
        """Reads what `to_json` wrote."""
        # Files once held (L, P, 2) floats for each rank, by which its links were found to be busy for longer.
        fields: dict[str, Any] = {key: x for key, x in data.items() if key != "wire_s"}
        for key, x in fields.items():
            fields[key] = tuple(x) if isinstance(x, list) else x
        return cls(**fields)


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochEstimate:
    """Prediction for all ranks that were asked (for a lone plan: its own rank)."""

    ranks: tuple[RankEstimate, ...]

    @property
    def epoch_s(self) -> float:
        """The slowest rank of each stretch counts: ranks wait for each other at every exchange and at the end."""
        ranks = self.ranks
        total, since = 0.0, [rank.fixed_s for rank in ranks]
        for layer in range(len(ranks[0].comm_s) - 1, -1, -1):
            since = [seconds + rank.layer_s[layer] for seconds, rank in zip(since, ranks, strict=True)]
            if any(rank.comm_s[layer] for rank in ranks):
                total, since = total + max(since), [0.0] * len(ranks)
        return total + max(since)

    @property
    def slowest_rank(self) -> int:
        """Index, within `ranks`, of the rank the others wait for longest."""
        return max(range(len(self.ranks)), key=lambda i: (self.ranks[i].epoch_s, -i))

    def to_json(self) -> dict[str, Any]:
        """Returns a dictionary that `json.dumps` takes."""
        return {"ranks": [rank.to_json() for rank in self.ranks]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> EpochEstimate:
        """Reads what `to_json` wrote."""
        return cls(ranks=tuple(RankEstimate.from_json(record) for record in data["ranks"]))


def estimate_rank(
    problem: PlanProblem,
    items: Items,
    costs: ItemCosts,
    computed: Bools,
    *,
    present: Bools | None = None,
    memory_budget_bytes: float | None = None,
) -> RankEstimate:
    """Predicts one rank's epoch under the choice `computed` (L, H), `present` what follows from it if known. Pure."""
    present = items.present(computed) if present is None else present
    comm, held_s, rest = [], [], []
    objective = items.objective(costs, computed, present)
    held = items.held_bytes(costs, computed, present)
    row_s = [*costs.row_s, costs.output_row_s]
    edge_s = [*costs.edge_s, costs.output_edge_s]
    beside_s = [0.0] * (problem.num_layers + 1)
    """Of each level's row work, what runs beside the exchange of the layer that makes it."""
    for layer in range(1, problem.num_layers + 1):
        level = layer - 1
        received = present[level] & ~computed[level]
        wire = pack = 0.0
        rows = int(problem.owned_rows[level]) + int(computed[level].sum())
        num_received = int(received.sum())
        if num_received:
            by_owner = np.bincount(items.owner[received], minlength=costs.world_size)
            receive_s = math.fsum(price * int(n) for price, n in zip(costs.receive_s[level], by_owner, strict=True))
            pack = costs.pack_s[level] * num_received + costs.copy_s[level] * rows
            wire = max(receive_s - costs.pack_s[level] * num_received, 0.0) + costs.latency_s[level]
        edges = int(problem.owned_edges[level])
        if layer < problem.num_layers:
            edges += int(items.in_degree[computed[layer]].sum())
        held_edges = 0
        if costs.overlaps[level] and num_received:
            waiting = _waiting_edges(problem, items, computed, received, layer)
            held_edges = 0 if waiting is None else max(edges - waiting, 0)
            made = int(problem.owned_rows[layer])
            if layer < problem.num_layers:
                made += int(computed[layer].sum())
            beside_s[layer] = made * costs.beside_s[level]
        comm.append(wire)
        held_s.append(held_edges * edge_s[layer] + beside_s[layer])
        rest.append((edges - held_edges) * edge_s[layer] + rows * row_s[level] - beside_s[level] + pack)
    fits = memory_budget_bytes is None or held <= memory_budget_bytes
    return RankEstimate(
        comm_s=tuple(comm),
        held_s=tuple(held_s),
        rest_s=tuple(rest),
        fixed_s=int(problem.owned_rows[-1]) * costs.output_row_s - beside_s[-1] + costs.epoch_s,
        objective_s=objective,
        held_bytes=held,
        fits=fits,
    )


def links_s(items: Items, costs: ItemCosts, computed: Bools, present: Bools) -> Floats:
    """Returns (P, L, 2) by owner: for how long its link sends what is received here forward, and receives gradients
    backward, under the choice `computed` (L, H); 0 where rows take no link. Pure.
    """
    seconds = np.zeros((costs.world_size, items.num_layers, 2))
    for level, by_owner in enumerate(costs.wire_s):
        owners = items.owner[present[level] & ~computed[level]]
        counts = np.bincount(owners, minlength=costs.world_size)
        seconds[:, level] = counts[:, None] * np.array(by_owner)
    return seconds


def _waiting_edges(problem: PlanProblem, items: Items, computed: Bools, received: Bools, layer: int) -> int | None:
    """Returns how many in-edges of the layer's rows here begin at received rows; None if the problem cannot tell."""
    if problem.owned_reads is None:
        return None
    waiting = int(problem.owned_reads[layer - 1].numpy()[received].sum(dtype=np.int64))
    if layer < problem.num_layers and computed[layer].any():
        waiting += int(np.count_nonzero(computed[layer][items.reader] & received[items.source]))
    return waiting


def choose_plan(
    estimates_by_rank: Sequence[Sequence[RankEstimate]],
    *,
    chunked_bytes: float | None = None,
    unsplit: Sequence[int] = (),
) -> int:
    """Returns the index of the candidate with the least epoch of all ranks, the first of equals. Pure, alike on ranks.

    Args:
        estimates_by_rank: one list per rank, all of the same length and order.
        chunked_bytes: what is enough on each rank if rows are received in the smallest messages, for the error; None:
            they cannot be.
        unsplit: the layers for which they cannot, likewise.

    Raises:
        ValueError: no ranks, or lists of different length.
        PlanError: no candidate fits every rank's memory budget.
    """
    lengths = [len(estimates) for estimates in estimates_by_rank]
    if not lengths or min(lengths) != max(lengths) or lengths[0] < 1:
        raise ValueError(f"every rank must give the same number of candidates, at least one (got {lengths})")
    fitting = [i for i in range(lengths[0]) if all(estimates[i].fits for estimates in estimates_by_rank)]
    if not fitting:
        leanest = [min(estimates, key=lambda estimate: estimate.held_bytes) for estimates in estimates_by_rank]
        least = [estimate.held_bytes for estimate in leanest]
        # Budgets may differ by rank: who holds most need not be who lacks room.
        lacking = [rank for rank, estimate in enumerate(leanest) if not estimate.fits] or range(len(least))
        worst = max(lacking, key=lambda rank: least[rank])
        needed = math.ceil(least[worst] if chunked_bytes is None else min(least[worst], chunked_bytes))
        at_once = f" (layers {list(unsplit)} need all of theirs at once)" if unsplit else ""
        raise PlanError(
            f"no plan fits the memory budget of every rank: rank {worst} of {len(least)} needs at least "
            f"{needed} bytes for its halo rows{at_once}. Possible solutions: 1) raise memory_budget_bytes "
            "(--memory-budget), 2) use more partitions (--ranks), 3) use a narrower model or fewer layers"
        )
    epochs = {i: EpochEstimate(ranks=tuple(estimates[i] for estimates in estimates_by_rank)) for i in fitting}
    return min(fitting, key=lambda i: (epochs[i].epoch_s, i))
