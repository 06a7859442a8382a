# SPDX-License-Identifier: Apache-2.0
"""Products of parameters, thinned: the default run sees every pair of values, `-m slow` the other combinations.

```python
@pairwise(kind=("gcn", "gat"), world_size=(1, 2, 3, 4), plan=("depcomm", "depcache", "hybrid"))
def test_exactness(kind: str, world_size: int, plan: str) -> None: ...      # 12 of 24 combinations run by default
```

A mistake that shows only where three parameters have certain values is left to the slow run; one that needs two of
them, or one, is found by default. Names and number of combinations are those of the full product either way.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import pytest


def pairwise(**axes: Sequence[object]) -> pytest.MarkDecorator:
    """Parametrises over the product of the axes; what `covering` leaves out is marked slow."""
    kept = set(covering([len(values) for values in axes.values()]))
    params = [
        pytest.param(
            *(values[at] for values, at in zip(axes.values(), combination)), marks=marks_of(combination in kept)
        )
        for combination in itertools.product(*(range(len(values)) for values in axes.values()))
    ]
    return pytest.mark.parametrize(tuple(axes), params)


def each_value(**axes: Sequence[object]) -> pytest.MarkDecorator:
    """Parametrises over the product of the axes; by default each value has a turn, with whichever of the others.

    For what other tests run in pairs.
    """
    sizes = [len(values) for values in axes.values()]
    kept = {tuple(turn % size for size in sizes) for turn in range(max(sizes))}
    params = [
        pytest.param(
            *(values[at] for values, at in zip(axes.values(), combination)), marks=marks_of(combination in kept)
        )
        for combination in itertools.product(*map(range, sizes))
    ]
    return pytest.mark.parametrize(tuple(axes), params)


def marks_of(is_kept: bool) -> tuple[pytest.MarkDecorator, ...]:
    """Returns what to give `pytest.param` as marks."""
    return () if is_kept else (pytest.mark.slow,)


def covering(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Returns few combinations of positions, `0 <= combination[i] < sizes[i]`, that hold every pair of positions.

    Greedy and the same at every call: each combination is the one, of all, with most pairs that were in none before.
    """
    everything = list(itertools.product(*map(range, sizes)))
    if len(sizes) < 2:
        return everything
    missing = {pair for combination in everything for pair in _pairs(combination)}
    chosen = []
    while missing:
        best = max(everything, key=lambda combination: sum(pair in missing for pair in _pairs(combination)))
        missing.difference_update(_pairs(best))
        chosen.append(best)
    return chosen


def _pairs(combination: Sequence[int]) -> Iterable[tuple[tuple[int, int], tuple[int, int]]]:
    return itertools.combinations(enumerate(combination), 2)
