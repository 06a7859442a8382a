# SPDX-License-Identifier: Apache-2.0
"""A rank's decision, and how it is kept beside the partition."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import PlanError
from .costs import ItemCosts
from .estimate import EpochEstimate
from .items import Bools, Items, build_items, require_match
from .model_trace import ModelTrace
from .problem import PlanProblem
from .topology import Topology


@dataclass(frozen=True, kw_only=True, slots=True, weakref_slot=True, eq=False)
class DependencyPlan:
    """Which halo vertices' rows one rank computes itself, per level; everything else it needs it receives."""

    strategy: str
    rank: int
    world_size: int
    num_layers: int
    cached: tuple[Tensor, ...]
    """L sorted int64 tensors of global ids: `cached[l]` are the halo vertices whose level-l row is computed here
    (level 0: whose input row is held here). `cached[l]` is contained in `cached[l - 1]`."""
    communicated: tuple[int, ...]
    """(L,) rows received per level."""
    objective_s: float
    """Seconds per epoch in the planner's objective."""
    estimate: EpochEstimate | None = None
    trace: ModelTrace | None = None
    topology: Topology | None = None
    partition_fingerprint: str = ""
    """Of the partition the global ids belong to; set by whoever knows it."""
    chunk_rows: int | None = None
    """Received rows come in messages of so many at most, used and dropped, since all of a layer's would not fit the
    memory budget; None: in one message."""
    made_for: Mapping[str, str | int | float] | None = None
    """What the model is that it was made for; set by whoever knows it."""

    @property
    def num_cached(self) -> tuple[int, ...]:
        """(L,) rows computed here per level."""
        return tuple(int(ids.numel()) for ids in self.cached)


def plan_from_choice(
    problem: PlanProblem,
    items: Items,
    costs: ItemCosts,
    computed: Bools,
    *,
    strategy: str,
    estimate: EpochEstimate | None = None,
    present: Bools | None = None,
) -> DependencyPlan:
    """Makes the plan that holds the choice `computed` (L, H), `present` being what follows from it, if known."""
    present = items.present(computed) if present is None else present
    received = present & ~computed
    return DependencyPlan(
        strategy=strategy,
        rank=problem.rank,
        world_size=problem.world_size,
        num_layers=problem.num_layers,
        cached=tuple(problem.halo_global[torch.from_numpy(row)] for row in computed),
        communicated=tuple(int(row.sum()) for row in received),
        objective_s=items.objective(costs, computed, present),
        estimate=estimate,
    )


def choice_from_plan(problem: PlanProblem, cached: tuple[Tensor, ...]) -> Bools:
    """Returns the (L, H) choice that `cached` stands for.

    Raises:
        PlanError: wrong number of levels, ids unsorted or repeated, or ids that are not halo vertices here.
    """
    where = f"rank {problem.rank} of {problem.world_size}"
    if len(cached) != problem.num_layers:
        raise PlanError(f"the plan of {where} has {len(cached)} layers, the model has {problem.num_layers}; plan again")
    computed = torch.zeros(problem.num_layers, problem.num_halo, dtype=torch.bool)
    for level, ids in enumerate(cached):
        if not ids.numel():
            continue
        if not bool((ids[1:] > ids[:-1]).all()):
            raise PlanError(f"the plan of {where} must list ids in ascending order, each once (level {level})")
        at = torch.searchsorted(problem.halo_global, ids).clamp(max=max(problem.num_halo - 1, 0))
        known = problem.halo_global[at] == ids if problem.num_halo else torch.zeros_like(ids, dtype=torch.bool)
        if not bool(known.all()):
            raise PlanError(
                f"the plan of {where} caches vertex {int(ids[~known][0])} at level {level}, which is no halo vertex "
                "here; it was made for another partition, plan again"
            )
        computed[level, at] = True
    return computed.numpy()


def check_plan(problem: PlanProblem, plan: DependencyPlan) -> None:
    """Checks that a plan can be applied to a problem: ranks, ids, nesting, known in-edges, counts.

    Raises:
        PlanError: naming rank, level and vertex.
    """
    where = f"rank {problem.rank} of {problem.world_size}"
    if (plan.rank, plan.world_size) != (problem.rank, problem.world_size):
        raise PlanError(f"the plan is for rank {plan.rank} of {plan.world_size} (expected {where}); plan again")
    computed = choice_from_plan(problem, plan.cached)
    items = build_items(problem)
    broken = items.broken_rule(computed)
    if broken is not None:
        raise PlanError(f"the plan of {where} cannot be applied: {broken}. Plan again")
    received = items.present(computed) & ~computed
    counts = tuple(int(row.sum()) for row in received)
    if counts != plan.communicated:
        raise PlanError(
            f"the plan of {where} counts {plan.communicated} received rows, it implies {counts}; plan again"
        )


def plan_objective(problem: PlanProblem, costs: ItemCosts, cached: tuple[Tensor, ...]) -> float:
    """Returns the seconds per epoch of a plan in the planner's objective: received rows at r, computed rows at p.

    Two plans of equal cost may differ in the last bits: compare with a relative 1e-12.
    """
    require_match(problem, costs)
    return build_items(problem).objective(costs, choice_from_plan(problem, cached))
