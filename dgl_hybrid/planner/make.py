# SPDX-License-Identifier: Apache-2.0
"""From a strategy's name to a plan, and the candidates from which all ranks choose one together."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from .bound import lower_bound
from .config import PlannerConfig
from .costs import ItemCosts
from .cut import cut_choice, settle_inputs, settle_most
from .estimate import EpochEstimate, RankEstimate, estimate_rank, links_s
from .forced import depcache_choice, depcomm_choice, ratio_choice
from .greedy import Prices, greedy_choice, grow
from .items import Bools, Floats, Items, build_items, require_match
from .memory import choose_near, choose_within, too_large
from .neutronstar import neutronstar_choice, quick_neutronstar_choice
from .plan import DependencyPlan, plan_from_choice
from .problem import PlanProblem

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Candidate:
    """One rank's version of a plan that all ranks might run, with its prediction."""

    plan: DependencyPlan
    estimate: RankEstimate
    links_s: Floats
    """(P, L, 2) by owner: for how long its link is taken by what is received here; see `estimate.links_s`."""


def make_plan(problem: PlanProblem, costs: ItemCosts, config: PlannerConfig) -> DependencyPlan:
    """Makes one rank's plan. Pure and deterministic.

    Args:
        problem: of this rank; validated here.
        costs: of this rank, from `cost_model`.
        config: strategy and limits.

    Raises:
        PlanError: the problem is malformed, the costs are for another model or world size, or nothing fits the memory
            budget. The last can differ by rank: the caller agrees on it before anybody goes on.
    """
    problem.validate()
    require_match(problem, costs)
    items = build_items(problem)
    computed = choose_items(items, costs, config)
    return _candidate(problem, items, costs, computed, config.strategy, config.memory_budget_bytes).plan


def choose_items(items: Items, costs: ItemCosts, config: PlannerConfig) -> Bools:
    """Returns the (L, H) choice of the configured strategy, within the memory budget."""
    budget = config.memory_budget_bytes
    if config.strategy in ("hybrid", "greedy"):
        solver = _Solver(items, config)
        try:
            if budget is not None:
                return choose_within(items, costs, solver, budget, max_edges=config.max_sweep_edges)
            return solver(Prices.of(items, costs))
        finally:
            solver.tell()
    if config.strategy == "neutronstar":
        computed = items.as_run(neutronstar_choice(items, costs, budget))
    elif config.strategy == "depcache":
        computed = depcache_choice(items)
    elif config.strategy == "depcomm":
        computed = depcomm_choice(items)
    else:
        computed = ratio_choice(items, costs, config.cache_ratio)
    held = items.held_bytes(costs, computed)
    if budget is not None and held > budget:
        raise too_large(items, costs, held, budget)
    return computed


def propose_plans(problem: PlanProblem, costs: ItemCosts, config: PlannerConfig) -> list[Candidate]:
    """Makes the candidates of one rank: the same number in the same order on every rank, whatever its problem. Pure.

    For strategy "hybrid": one cut per price on communication (the plan cheapest to one rank need not be the one that
    lets the slowest rank finish first, and overlap makes communication cheaper than it looks), then the greedy,
    NeutronStar's (where it is quick; the greedy's again elsewhere), depcache and depcomm; with a memory budget,
    first of all the plan made for it. For any other strategy: that one.
    A rank whose problem is past `max_sweep_edges` gives its one plan at the measured prices for each of the sweep.
    Candidates over the budget are marked by `estimate.fits`, not left out.

    Raises:
        PlanError: the problem is malformed or the costs are for another model or world size.
    """
    problem.validate()
    require_match(problem, costs)
    items = build_items(problem)
    budget = config.memory_budget_bytes
    named: list[tuple[str, Bools]] = []
    solver = _Solver(items, config)
    if budget is not None and config.strategy in ("hybrid", "greedy"):
        choice = choose_near(items, costs, solver, budget, max_edges=config.max_sweep_edges)
        named.append((config.strategy, choice))
    if config.strategy == "neutronstar":
        named.append((config.strategy, items.as_run(neutronstar_choice(items, costs, budget))))
    elif config.strategy != "hybrid":
        named.append((config.strategy, choose_items(items, costs, replace(config, memory_budget_bytes=None))))
    else:
        named += _sweep(items, costs, solver, config)
        is_large = items.reader.size > config.max_sweep_edges
        published = None if is_large else quick_neutronstar_choice(items, costs, budget)
        named.append(("neutronstar", named[-1][1] if published is None else items.as_run(published)))
        named.append(("depcache", depcache_choice(items)))
        named.append(("depcomm", depcomm_choice(items)))
    solver.tell()
    candidates: list[Candidate] = []
    for position, (name, computed) in enumerate(named):
        if position and computed is named[position - 1][1]:
            candidates.append(candidates[-1])
        else:
            candidates.append(_candidate(problem, items, costs, computed, name, budget))
    return candidates


def _sweep(items: Items, costs: ItemCosts, solver: _Solver, config: PlannerConfig) -> list[tuple[str, Bools]]:
    """Makes a choice for each price on communication, and the greedy's; one and the same for all in a large problem."""
    base = Prices.of(items, costs)
    if items.reader.size > config.max_sweep_edges:
        return [("hybrid@1", solver(base))] * (len(config.prices) + 1)
    choices = []
    for price in config.prices:
        scaled = Prices(receive=base.receive * price, compute=base.compute, tolerance=base.tolerance)
        choices.append((f"hybrid@{price:g}", solver(scaled)))
    return [*choices, ("greedy", greedy_choice(items, costs))]


class _Solver:
    """Gives the choice for prices; solves once for those that it was given first.

    With a memory budget these are the measured ones, for which the sweep asks again: of a large problem that fits the
    budget it was one of two solves.
    """

    def __init__(self, items: Items, config: PlannerConfig) -> None:
        self._items, self._config = items, config
        self._first: tuple[Prices, Bools] | None = None
        self._gaps: list[float] = []
        """How far choices of the greedy, in place of the cut's, may be from the best, relative to it."""

    def __call__(self, prices: Prices) -> Bools:
        if self._first is not None and prices.equals(self._first[0]):
            return self._first[1].copy()  # another plan for whoever tells plans apart by identity
        computed = self._solve(prices)
        if self._first is None:
            self._first = prices, computed
        return computed

    def _solve(self, prices: Prices) -> Bools:
        items = self._items
        if self._config.strategy != "hybrid":
            return settle_inputs(items, prices, grow(items, prices, depcomm_choice(items)))
        settled = settle_most(items, prices)
        computed = cut_choice(items, prices, settled, max_arcs=self._config.max_cut_arcs)
        if computed is None:
            computed = settle_inputs(items, prices, grow(items, prices, settled))
            self._gaps.append(prices.objective(items, computed) / max(lower_bound(items, prices), 1e-30) - 1.0)
        return computed

    def tell(self) -> None:
        """Warns of the greedy where it took the cut's place, once for all prices."""
        if self._gaps:
            logger.warning(
                "the minimum cut would have more than %d arcs: using the greedy, whose plan costs at most %.1f %% more",
                self._config.max_cut_arcs,
                100.0 * max(self._gaps),
            )


def _candidate(
    problem: PlanProblem, items: Items, costs: ItemCosts, computed: Bools, strategy: str, budget: float | None
) -> Candidate:
    present = items.present(computed)
    estimate = estimate_rank(problem, items, costs, computed, present=present, memory_budget_bytes=budget)
    epoch = EpochEstimate(ranks=(estimate,))
    plan = plan_from_choice(problem, items, costs, computed, strategy=strategy, estimate=epoch, present=present)
    return Candidate(plan=plan, estimate=estimate, links_s=links_s(items, costs, computed, present))
