# SPDX-License-Identifier: Apache-2.0
"""Which candidates take turns in real epochs, besides the one that is predicted fastest."""

from __future__ import annotations

from .estimate import EpochEstimate, RankEstimate

WIRE_FACTORS = (1.0, 0.5, 2.0)
"""What the predicted time of rows on the wire may be off by: which of them partial sums save depends on the plan, other
traffic slows them. The hybrid that is best under each is tried in real epochs, besides the pure plans."""


def find_worth_trying(by_rank: list[list[RankEstimate]], chosen: int) -> list[int]:
    """Returns positions of the candidates worth trying, the chosen one first. Pure, alike on ranks.

    Candidates that are one plan under several names count once, as the pure plan if it is one. The last two are the
    pure plans (`propose_plans`). Hybrids that differ little from each other would all be right or wrong together, so
    those are taken that would be best if rows travelled faster or slower than predicted, and NeutronStar's plan, which
    comes of another rule.

    Args:
        by_rank: (P, N) estimates of the candidates that `propose_plans` makes for strategy "hybrid", in their order.
        chosen: From `choose_plan`: one that fits the budget.
    """
    num_candidates = len(by_rank[0])
    pure, published = range(num_candidates - 2, num_candidates), num_candidates - 3
    fitting = [i for i in range(num_candidates) if all(estimates[i].fits for estimates in by_rank)]

    def what_it_does(index: int) -> tuple[object, ...]:
        return tuple((e.comm_s, e.held_s, e.rest_s, e.held_bytes) for e in (r[index] for r in by_rank))

    name_of: dict[tuple[object, ...], int] = {}
    for index in fitting:
        if index in pure or what_it_does(index) not in name_of:
            name_of[what_it_does(index)] = index

    def predicted_s(index: int, wire_factor: float) -> float:
        ranks = (estimates[index] for estimates in by_rank)
        return EpochEstimate(ranks=tuple(rank.with_wire(wire_factor) for rank in ranks)).epoch_s

    selected = [name_of[what_it_does(chosen)]]
    hybrids = [i for i in name_of.values() if i not in pure]
    for factor in WIRE_FACTORS if hybrids else ():
        index = min(hybrids, key=lambda i: (predicted_s(i, factor), i))
        if index not in selected:
            selected.append(index)
    if published in name_of.values() and published not in selected:
        selected.append(published)
    return selected + [i for i in pure if i in fitting and name_of[what_it_does(i)] == i and i not in selected]
