# SPDX-License-Identifier: Apache-2.0
"""What no plan can undercut, for problems whose minimum cut is too large to solve."""

from __future__ import annotations

import numpy as np

from .greedy import Prices
from .items import Floats, Items


def lower_bound(items: Items, prices: Prices) -> float:
    """Returns a cost that no choice is below, in one pass over the edges per level.

    A row that owned vertices read costs at least the cheaper of receiving it and of computing it with what its inputs
    cost. An input serves several readers, so each is charged an equal share of the input's own least cost: a reader
    that is computed pays its share, and all shares together are at most what the input costs. (A feasible point of the
    linear program dual to the minimum cut.)
    """
    num_readers = np.bincount(items.source, minlength=items.num_halo)
    least: Floats = np.zeros(items.num_halo)
    total = 0.0
    for level in range(items.num_layers):
        compute = prices.compute[level].copy()
        if level > items.lowest:
            # Rows that are needed anyway are paid for by owned vertices, not by readers.
            share = np.where(items.demand[level - 1], 0.0, least / np.maximum(num_readers, 1))
            compute += np.bincount(items.reader, weights=share[items.source], minlength=items.num_halo)
        compute[~items.allowed[level]] = np.inf
        least = np.minimum(prices.receive[level], compute)
        total += float(least[items.demand[level]].sum())
    return total
