# SPDX-License-Identifier: Apache-2.0
"""From a strategy's name to a plan."""

from __future__ import annotations

from .config import PlannerConfig
from .costs import ItemCosts
from .estimate import EpochEstimate, estimate_rank
from .forced import depcache_choice, depcomm_choice, ratio_choice
from .items import Bools, Items, build_items, require_match
from .plan import DependencyPlan, plan_from_choice
from .problem import PlanProblem


def make_plan(problem: PlanProblem, costs: ItemCosts, config: PlannerConfig) -> DependencyPlan:
    """Makes one rank's plan. Pure and deterministic.

    Args:
        problem: of this rank; validated here.
        costs: of this rank, from `cost_model`.
        config: strategy and limits.

    Raises:
        PlanError: the problem is malformed, the costs are for another model or world size.
    """
    problem.validate()
    require_match(problem, costs)
    items = build_items(problem)
    computed = choose_items(items, costs, config)
    estimate = EpochEstimate(ranks=(estimate_rank(problem, items, costs, computed),))
    return plan_from_choice(problem, items, costs, computed, strategy=config.strategy, estimate=estimate)


def choose_items(items: Items, costs: ItemCosts, config: PlannerConfig) -> Bools:
    """Returns the (L, H) choice of the configured strategy."""
    if config.strategy == "depcache":
        return depcache_choice(items)
    if config.strategy == "depcomm":
        return depcomm_choice(items)
    if config.strategy == "ratio":
        return ratio_choice(items, costs, config.cache_ratio)
    raise NotImplementedError(config.strategy)
