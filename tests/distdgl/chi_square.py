# SPDX-License-Identifier: Apache-2.0
"""Were edges drawn as they should be? Chi-square statistics of counts, summed over vertices.

A draw without replacement takes exactly k of d edges, so the counts of a vertex vary less than independent ones would:
R draws, each with probability p = k/d for an edge, have covariance R·p·(1-p)·d/(d-1)·(I - 1/d). Hence
sum (count - R·p)² / (R·p·(1-p)·d/(d-1)) is chi-square with d - 1 degrees of freedom.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

Counts = Sequence[int]
Statistic = tuple[float, int]
"""Its value and its degrees of freedom."""

WITHOUT_REPLACEMENT = ("loader", "uniform", "etype_loader", "etype_uniform")
BY_CHANCE = ("prob", "prob_replace", "etype_prob")


def against_uniform(counts: Counts, num_draws: int, fanout: int) -> Statistic:
    """Drawn `num_draws` times `fanout` of len(counts) edges, without replacement."""
    d = len(counts)
    p = fanout / d
    scale = num_draws * p * (1 - p) * d / (d - 1)
    return float(((np.array(counts) - num_draws * p) ** 2).sum() / scale), d - 1


def against_weights(counts: Counts, weights: Sequence[float]) -> Statistic:
    """Independent draws with probabilities in proportion to the weights; what has weight 0 must not be drawn."""
    kept = np.array(weights) > 0
    observed, share = np.array(counts)[kept], np.array(weights)[kept]
    if sum(counts) != observed.sum():
        return float("inf"), len(share) - 1
    expected = observed.sum() * share / share.sum()
    return float(((observed - expected) ** 2 / expected).sum()), len(share) - 1


def against_each_other(first: Counts, second: Counts, num_draws: int, fanout: int, *, replace: bool) -> Statistic:
    """Two sets of draws of the same size, whatever distribution both have."""
    a, b = np.array(first, dtype=float), np.array(second, dtype=float)
    d = len(a)
    if replace:
        drawn = (a + b) > 0
        return float(((a - b)[drawn] ** 2 / (a + b)[drawn]).sum()), int(drawn.sum()) - 1
    p = fanout / d
    return float(((a - b) ** 2).sum() / (2 * num_draws * p * (1 - p) * d / (d - 1))), d - 1


def p_value(statistics: Sequence[Statistic]) -> float:
    """How likely a sum of statistics at least this large is, if all is well."""
    from scipy.stats import chi2  # takes a second, which each process would need to collect tests

    return float(chi2.sf(sum(s for s, _ in statistics), sum(dof for _, dof in statistics)))


def statistic_of(draw: dict[str, Any]) -> Statistic:
    """Judges one vertex's counts, as `draw_all` of the checks notes them, by the kind of draw."""
    if draw["kind"] in WITHOUT_REPLACEMENT:
        return against_uniform(draw["counts"], draw["num_draws"], draw["fanout"])
    weights = draw["chance"] if draw["kind"] in BY_CHANCE else [1.0] * len(draw["counts"])
    return against_weights(draw["counts"], weights)


def difference_of(draw: dict[str, Any], other: dict[str, Any]) -> Statistic:
    """Judges one vertex's counts in two runs against each other."""
    same = {"kind", "fanout", "num_draws", "node", "owned"}
    if any(draw[k] != other[k] for k in same):
        raise ValueError(f"not the same draw: {[(draw[k], other[k]) for k in sorted(same)]}")
    replace = draw["kind"] not in WITHOUT_REPLACEMENT
    return against_each_other(draw["counts"], other["counts"], draw["num_draws"], draw["fanout"], replace=replace)
