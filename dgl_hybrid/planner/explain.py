# SPDX-License-Identifier: Apache-2.0
"""Why a plan does what it does with one vertex: both prices with their parts, and the decision, level by level."""

from __future__ import annotations

import numpy as np
import torch

from ..errors import PlanError
from .costs import ItemCosts
from .items import Bools, Items, build_items, require_match
from .plan import DependencyPlan, check_plan, choice_from_plan
from .problem import PlanProblem
from .run_rows import RunRows, masks_of

_TIE = 1e-9
"""Of two prices: what they differ by is rounding."""


def explain_vertex(
    problem: PlanProblem, costs: ItemCosts, plan: DependencyPlan, vertex_global: int, run: RunRows | None = None
) -> str:
    """Says what the plan does with a halo vertex at each level and what the other way would have cost.

    Args:
        problem: of this rank.
        costs: the plan was made with.
        plan: of this rank.
        vertex_global: a halo vertex of this rank.
        run: what there is of the plan when it runs; None: what the problem says, which may be more.

    Returns:
        Several lines, times in microseconds per epoch.

    Raises:
        PlanError: the vertex is no halo vertex of this rank, or plan, problem and costs do not belong together.
    """
    require_match(problem, costs)
    check_plan(problem, plan)
    at = int(torch.searchsorted(problem.halo_global, vertex_global))
    where = f"rank {problem.rank} of {problem.world_size}"
    if at >= problem.num_halo or int(problem.halo_global[at]) != vertex_global:
        raise PlanError(
            f"vertex {vertex_global} is no halo vertex of {where}, so there is nothing to decide about it: "
            "this rank owns it or never reads it"
        )
    items = build_items(problem)
    computed = choice_from_plan(problem, plan.cached)
    known = "known" if problem.expandable[at] else "not known"
    lines = [
        f"vertex {vertex_global} on {where}, plan {plan.strategy}: owned by rank {int(items.owner[at])}, "
        f"{int(items.in_degree[at])} in-edges, {known} here"
    ]
    present = items.present(computed)
    is_run = present if run is None else masks_of(problem, run.computed) | masks_of(problem, run.received)
    for level in range(problem.num_layers):
        if present[level, at] and not is_run[level, at]:
            lines.append(
                f"level {level} (read by layer {level + 1}): not needed here: only rows that no rank asks for under "
                f"this plan would read it"
            )
            continue
        lines += _explain_level(items, costs, computed, present, at, level, plan.strategy)
    return "\n".join(lines)


def _explain_level(
    items: Items, costs: ItemCosts, computed: Bools, present: Bools, at: int, level: int, strategy: str
) -> list[str]:
    head = f"level {level} (read by layer {level + 1}): "
    if not items.reach[level, at]:
        return [head + "nothing that this rank computes or could compute reads it"]
    if not present[level, at]:
        return [head + "not needed here"]
    owner, degree = int(items.owner[at]), int(items.in_degree[at])
    receive = costs.receive_s[level][owner]
    row, edges = costs.row_s[level], costs.edge_s[level] * degree
    if items.demand[level, at]:
        reason = "vertices of this rank read it"
    else:
        reason = "only rows computed here need it"
    decision = "received"
    if computed[level, at]:
        decision = "computed here" if level else "held here"
    pack = min(costs.pack_s[level], receive)
    lines = [
        head + f"{decision}; {reason}",
        f"  receive: {_us(receive)} = wire {_us(receive - pack)} + pack {_us(pack)}",
    ]
    if not items.allowed[level, at]:
        reason = "its in-edges were not looked at: strategy depcomm looks at none, others at max_halo_edges"
        return [*lines, f"  compute: not possible, {reason}"]
    text = f"  compute: {_us(row + edges)} = row {_us(row)}"
    if level:
        text += f" + {degree} in-edges {_us(edges)}"
    lines.append(text)
    compute = row + edges
    if level:
        others = _without(items, computed, at, level)
        inputs, price = _missing_inputs(items, costs, others, at, level)
        lines.append(
            f"  its inputs: {inputs[0]} halo rows of level {level - 1}, {inputs[1]} of them here anyway, "
            f"{inputs[2]} to be received for it alone: {_us(price)}"
        )
        compute += price
        if not others[level - 1, at]:
            nest = _nested_rows(items, costs, others, items.present(others), at, level)
            more = f"{_us(nest)} more" if nest >= 0 else f"which saves {_us(-nest)}"
            has_to = "is" if computed[level, at] else "would have to be"
            lines.append(f"  its own row of level {level - 1} {has_to} computed too: {more}")
            compute += nest
    difference = compute - receive
    other = "receiving" if computed[level, at] else "computing"
    if abs(difference) <= _TIE * max(compute, receive):
        return [*lines, f"  {decision} costs the same as {other} it"]
    verdict = "saves" if (difference < 0) == bool(computed[level, at]) else "loses"
    note = ""
    if verdict == "loses":
        note = f" by itself; {_why_dearer(strategy, is_computed=bool(computed[level, at]))}"
    lines.append(f"  {decision} {verdict} {_us(abs(difference))} against {other} it{note}")
    return lines


def _why_dearer(strategy: str, *, is_computed: bool) -> str:
    """Says what made a plan compute a row that costs more than receiving it, or receive one that costs more than
    computing it.
    """
    name, _, price = strategy.partition("@")
    if price and float(price) != 1.0:
        return f"this plan was made with receiving priced {price} times, as it takes more or less than it seems"
    if name not in ("hybrid", "greedy"):
        return f"strategy {name} does not weigh rows so"
    if is_computed:
        return "it pays together with other rows, or within the memory budget"
    return "computing it does not pay together with other rows, or is past the memory budget"


def _without(items: Items, computed: Bools, at: int, level: int) -> Bools:
    """Returns what is computed without one row of a level, those above it, and what is computed or held for them alone;
    all of it where that row is not computed.
    """
    others = computed.copy()
    if not computed[level, at]:
        return others
    others[level:, at] = False
    for below in range(level - 1, -1, -1):
        was_needed, is_needed = (
            items.demand[below] | items.reads(rows[below + 1], below + 1) | rows[below + 1]
            for rows in (computed, others)
        )
        others[below] &= is_needed | ~was_needed
    return others


def _nested_rows(items: Items, costs: ItemCosts, computed: Bools, present: Bools, at: int, level: int) -> float:
    """Returns what it would cost to compute a vertex's own rows of the levels below one, with what these read; inputs
    are held where that is cheaper.
    """
    raised = computed.copy()
    raised[:level, at] = True
    inputs = items.present(raised)[0] & ~present[0] & items.allowed[0]
    raised[0] |= inputs & (costs.row_s[0] < np.array(costs.receive_s[0])[items.owner])
    return items.objective(costs, raised) - items.objective(costs, computed, present)


def _missing_inputs(
    items: Items, costs: ItemCosts, others: Bools, at: int, level: int
) -> tuple[tuple[int, int, int], float]:
    """Returns (all, here anyway, for it alone) halo inputs of one row, and the price of the last, received, where these
    others are computed.
    """
    span = slice(*np.searchsorted(items.reader, [at, at + 1]))
    inputs = items.source[span] if level > items.lowest else items.source[:0]
    here = items.present(others)[level - 1, inputs]
    alone = inputs[~here]
    price = np.array(costs.receive_s[level - 1])[items.owner[alone]]
    if level == 1:
        price = np.where(items.allowed[0, alone], np.minimum(price, costs.row_s[0]), price)
    return (inputs.size, int(here.sum()), alone.size), float(price.sum())


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.3g} us"
