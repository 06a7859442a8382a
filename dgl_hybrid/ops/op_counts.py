# SPDX-License-Identifier: Apache-2.0
"""Counts which way operations went: through our ops, or through DGL's own and why."""

from __future__ import annotations

from collections import Counter

_counts: Counter[str] = Counter()


def count(op: str, route: str) -> None:
    """Adds one forward of `op`, for example `count("spmm.copy_u.sum", "ours")`."""
    _counts[f"{op}/{route}"] += 1


def op_counts() -> dict[str, int]:
    """Returns how often each operation ran since the start or `reset_op_counts`, by route.

    Returns:
        For example `{"spmm.copy_u.sum/ours": 12, "spmm.u_add_e.sum/dgl: operator": 2}`. Forwards are counted; a
        backward goes the way of its forward. What DGL's own functions do on graphs that are not routed (`route_ops`)
        does not appear; layers that `optimize` has changed count wherever they run.
    """
    return dict(sorted(_counts.items()))


def reset_op_counts() -> None:
    """Begins counting anew."""
    _counts.clear()
