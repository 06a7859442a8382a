# SPDX-License-Identifier: Apache-2.0
"""Products of parameters, thinned: the default run sees every pair of values, `-m slow` the other combinations.

```python
@pairwise(kind=("gcn", "gat"), world_size=(1, 2, 3, 4), plan=("depcomm", "depcache", "hybrid"))
def test_exactness(kind: str, world_size: int, plan: str) -> None: ...      # 12 of 24 combinations run by default
```

A mistake that shows only where three parameters have certain values is left to the slow run; one that needs two of
them, or one, is found by default. Names are those of the full product either way.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Iterable, Mapping, Sequence

import pytest

MOST_SLOW = 1000
"""Combinations that the slow run has of one test; of more, so many are drawn, the same in every run."""

Position = tuple[int, ...]
"""Which value of each axis."""


def pairwise(**axes: Sequence[object]) -> pytest.MarkDecorator:
    """Parametrises over the product of the axes; what `covering` leaves out is marked slow."""
    return _parametrize(axes, covering([len(values) for values in axes.values()]))


def each_value(**axes: Sequence[object]) -> pytest.MarkDecorator:
    """Parametrises over the product of the axes; by default each value has a turn, with whichever of the others.

    For what other tests run in pairs.
    """
    sizes = [len(values) for values in axes.values()]
    return _parametrize(axes, [tuple(turn % size for size in sizes) for turn in range(max(sizes))])


def _parametrize(axes: Mapping[str, Sequence[object]], kept: Collection[Position]) -> pytest.MarkDecorator:
    by_default = set(kept)
    others = [at for at in itertools.product(*(range(len(values)) for values in axes.values())) if at not in by_default]
    if len(others) > MOST_SLOW:
        others = random.Random(0).sample(others, MOST_SLOW)
    params = [
        pytest.param(*(values[i] for values, i in zip(axes.values(), at)), marks=marks_of(at in by_default))
        for at in sorted([*by_default, *others])
    ]
    return pytest.mark.parametrize(tuple(axes), params)


def marks_of(is_kept: bool) -> tuple[pytest.MarkDecorator, ...]:
    """Returns what to give `pytest.param` as marks."""
    return () if is_kept else (pytest.mark.slow,)


def covering(sizes: Sequence[int]) -> list[Position]:
    """Returns few combinations of positions, `0 <= combination[i] < sizes[i]`, that hold every pair of positions.

    Greedy, one axis after another, and the same at every call: each combination begins with a pair that was in none
    before, and takes for each other axis, longest first, the position that makes most such pairs with those it has
    (Cohen et al., "The AETG system", IEEE TSE 1997, without its random candidates).
    """
    if len(sizes) < 2:
        return list(itertools.product(*map(range, sizes)))
    missing = {
        ((i, a), (j, b))
        for (i, first), (j, second) in itertools.combinations(enumerate(sizes), 2)
        for a, b in itertools.product(range(first), range(second))
    }
    longest_first = sorted(range(len(sizes)), key=lambda axis: -sizes[axis])
    chosen: list[Position] = []
    while missing:
        taken = dict(min(missing))
        for axis in longest_first:
            if axis in taken:
                continue
            # Of equally good ones not always the same: later combinations find more left to gain.
            ranks = [
                (
                    sum(tuple(sorted([(axis, at), other])) in missing for other in taken.items()),
                    (at - len(chosen)) % sizes[axis],
                )
                for at in range(sizes[axis])
            ]
            taken[axis] = ranks.index(max(ranks))
        chosen.append(tuple(taken[axis] for axis in range(len(sizes))))
        missing.difference_update(_pairs(chosen[-1]))
    return chosen


def _pairs(combination: Position) -> Iterable[tuple[tuple[int, int], tuple[int, int]]]:
    return itertools.combinations(enumerate(combination), 2)
