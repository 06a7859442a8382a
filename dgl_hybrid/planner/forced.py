# SPDX-License-Identifier: Apache-2.0
"""Plans that weigh nothing: the two pure ones, a forced ratio, and random ones for tests."""

from __future__ import annotations

import numpy as np

from .costs import ItemCosts
from .items import Bools, Items, build_items
from .plan import DependencyPlan, plan_from_choice
from .problem import PlanProblem


def depcomm_choice(items: Items) -> Bools:
    """Returns the (L, H) choice that computes nothing: every dependency is received, input rows too."""
    return np.zeros((items.num_layers, items.num_halo), dtype=np.bool_)


def depcache_choice(items: Items) -> Bools:
    """Returns the (L, H) choice that computes all that is needed and can be; unknown in-edges mean receiving."""
    return _fill(items, items.allowed)


def ratio_choice(items: Items, costs: ItemCosts, cache_ratio: float) -> Bools:
    """Returns the (L, H) choice that computes a share of what owned vertices read, with the subtrees beneath.

    At each level the share `cache_ratio` of the rows that owned vertices read and that can be computed, cheapest first,
    lower position first among equals; 0 is depcomm. Inputs of those rows are computed too where they can be.
    """
    prices = items.compute_prices(costs)
    chosen = depcomm_choice(items)
    for level in range(items.num_layers):
        candidates = np.flatnonzero(items.demand[level] & items.allowed[level])
        count = round(cache_ratio * candidates.size)
        chosen[level, candidates[np.argsort(prices[level, candidates], kind="stable")[:count]]] = True
    for level in range(items.num_layers - 1, 0, -1):
        chosen[level - 1] |= chosen[level] | (items.reads(chosen[level], level) & items.allowed[level - 1])
    return items.as_run(chosen)


def random_plan(problem: PlanProblem, seed: int, probability: float, costs: ItemCosts | None = None) -> DependencyPlan:
    """Makes a valid plan by coin tosses, for tests of exactness under any plan. The same for the same arguments.

    Args:
        problem: of this rank.
        seed: combined with the rank, so ranks decide differently.
        probability: that a needed row which can be computed here is.
        costs: to fill in `objective_s`; without them it is 0.
    """
    items = build_items(problem)
    generator = np.random.default_rng([seed, problem.rank])
    tosses = generator.random((items.num_layers, items.num_halo)) < probability
    computed = _fill(items, items.allowed & tosses)
    return plan_from_choice(problem, items, costs or free_costs(problem), computed, strategy="random")


def free_costs(problem: PlanProblem) -> ItemCosts:
    """Returns costs of 0 for everything: for plans made without a model or a cluster."""
    zeros = (0.0,) * problem.num_layers
    return ItemCosts(
        receive_s=((0.0,) * problem.world_size,) * problem.num_layers,
        row_s=zeros,
        edge_s=zeros,
        receive_bytes=zeros,
        row_held_bytes=zeros,
        edge_held_bytes=zeros,
    )


def _fill(items: Items, wanted: Bools) -> Bools:
    """Computes, from the top level down, whatever is needed and wanted, and what nesting asks for."""
    computed = depcomm_choice(items)
    needed = items.demand[-1]
    for level in range(items.num_layers - 1, -1, -1):
        computed[level] = needed & wanted[level]
        if level + 1 < items.num_layers:
            computed[level] |= computed[level + 1]
        if level:
            needed = items.demand[level - 1] | computed[level] | items.reads(computed[level], level)
    return items.as_run(computed)
