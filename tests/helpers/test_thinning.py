# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import itertools

import pytest

from tests.helpers.thinning import MOST_SLOW, covering, each_value, pairwise


@pytest.mark.parametrize(
    "sizes", [(1,), (5,), (3, 4), (17, 4, 3), (6, 5, 3), (4, 4, 3), (2, 2, 2, 2), (5, 1, 3), (7, 5, *[2] * 8)]
)
def test_every_pair_of_positions_is_covered(sizes: tuple[int, ...]) -> None:
    chosen = covering(sizes)
    assert len(set(chosen)) == len(chosen)
    for (i, first), (j, second) in itertools.combinations(enumerate(sizes), 2):
        assert {(c[i], c[j]) for c in chosen} == set(itertools.product(range(first), range(second)))
    assert {c[0] for c in chosen} == set(range(sizes[0]))
    if len(sizes) == 3 and min(sizes) > 1:
        a, b, _ = sorted(sizes, reverse=True)
        assert len(chosen) <= 1.25 * a * b, "a product of the two longest axes is the least that can do"


def test_the_whole_product_is_there_and_the_rest_is_slow() -> None:
    (names, params) = pairwise(a="xy", b=(1, 2, 3), c=(True, False)).args
    assert names == ("a", "b", "c")
    assert [param.values for param in params] == list(itertools.product("xy", (1, 2, 3), (True, False)))
    quick = [param for param in params if not param.marks]
    assert len(quick) == 6
    assert all(param.marks[0].name == "slow" for param in params if param not in quick)


def test_each_value_has_a_turn_and_the_rest_is_slow() -> None:
    (names, params) = each_value(a="xy", b=(1, 2, 3)).args
    assert names == ("a", "b")
    assert [param.values for param in params] == list(itertools.product("xy", (1, 2, 3)))
    assert [param.values for param in params if not param.marks] == [("x", 1), ("x", 3), ("y", 2)]
    assert all(param.marks[0].name == "slow" for param in params if param.marks)


def test_of_a_large_product_some_of_the_rest_are_drawn() -> None:
    axes = {name: range(6) for name in "abcde"}
    (_, params), (_, again) = pairwise(**axes).args, pairwise(**axes).args
    values = [param.values for param in params]
    slow = [param.values for param in params if param.marks]
    assert len(slow) == MOST_SLOW
    assert values == sorted(set(values)) == [param.values for param in again]
    for at in range(5):
        assert {one[at] for one in slow} == set(range(6))
