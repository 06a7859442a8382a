# SPDX-License-Identifier: Apache-2.0
"""How far two strategies are apart by their turns, and when that is known."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections import Counter
from typing import Any

import pytest

from benchmarks.systems.summary import better_pure, cell_summary, ratio_error
from benchmarks.systems.turns import are_known, balanced_orders, error_of_turns, ratio_of_turns
from tests.benchmarks.systems.measurements import TWO, make_line

SHAKEN = [0.95, 1.05] * 2
"""Turns of about a second."""


def test_ratios_are_formed_within_rounds() -> None:
    own = [[1.0, 2.0, 1.0], [4.0]]  # whatever slows the machine in a round slows both
    assert ratio_of_turns([[1.1, 2.2, 1.1], [4.4]], own) == pytest.approx(1.1)
    assert ratio_of_turns([[3.3, 1.1, 2.2]], [[3.0, 1.0, 2.0]]) == pytest.approx(1.1), "of the same round"
    of_both = [[1.0, 2.0], [8.0, 9.0], [1.0]]  # rounds that both have had: 1, 1 and 2
    assert ratio_of_turns(of_both, own) == pytest.approx(2**0.25), "between the means of pairs: 1, 1, 1, √2, √2, 2"


def test_disturbed_rounds_do_not_decide() -> None:
    assert ratio_of_turns([[1.01] * 8 + [3.0, 0.2]], [[1.0] * 10]) == pytest.approx(1.01)
    draw = random.Random(1)
    rounds = [[math.exp(draw.gauss(0.0, 0.04)) for _ in range(20)] for _ in range(300)]
    by_pairs = statistics.stdev(math.log(ratio_of_turns([one], [[1.0] * 20])) for one in rounds)
    by_median = statistics.stdev(math.log(statistics.median(one)) for one in rounds)
    assert by_pairs < 0.9 * by_median, "as well known by fewer rounds"


@pytest.mark.parametrize(("count", "spread"), [(1, 0), (2, 1), (3, 2), (4, 1)])
def test_each_comes_after_each_other_one_as_often(count: int, spread: int) -> None:
    """Hybrid came after everything cached every other time, the others every fourth."""
    rounds = balanced_orders(count, 21)
    assert rounds[:6] == balanced_orders(count, 6)
    assert all(sorted(order) == list(range(count)) for order in rounds)
    followed = Counter(itertools.pairwise(itertools.chain.from_iterable(rounds)))
    if count > 1:
        assert not [pair for pair in followed if pair[0] == pair[1]]
        assert len(followed) == count * (count - 1)
        assert max(followed.values()) - min(followed.values()) <= spread
    if count == 4:
        assert {order[0] for order in rounds[1:6]} == set(range(4)), "each comes after systems of others"


def test_the_error_is_how_the_ratio_of_so_many_rounds_differs() -> None:
    assert error_of_turns([1.0], [1.0]) == math.inf
    assert error_of_turns([1.1, 2.2], [1.0, 2.0]) == pytest.approx(0.0, abs=1e-12)
    draw = random.Random(0)
    rounds = [[draw.gauss(0.0, 0.04) for _ in range(25)] for _ in range(2000)]
    apart = statistics.stdev(math.log(ratio_of_turns([list(map(math.exp, one))], [[1.0] * 25])) for one in rounds)
    told = [error_of_turns([math.exp(value) for value in one], [1.0] * 25) for one in rounds]
    assert statistics.mean(told) == pytest.approx(apart, rel=0.05)


@pytest.mark.parametrize(
    ("turns", "is_known"),
    [
        ({"depcomm": [1.0] * 4}, True),
        ({"depcomm": SHAKEN}, False),
        ({"depcomm": [1.3, 1.1, 1.3, 1.1]}, True),  # who is ahead is
        ({"depcomm": [0.7, 0.9, 0.7, 0.9]}, True),
        ({"depcomm": SHAKEN, "depcache": [0.7] * 4}, True),  # the other pure plan is the better
        ({"depcomm": [1.05] * 4, "depcache": [1.06, 1.09] * 2}, True),
        ({"depcomm": SHAKEN, "depcache": [1.3] * 4}, False),
        ({"depcomm": [1.3] * 4, "neutronstar": SHAKEN}, False),
        ({"depcomm": SHAKEN, "neutronstar": [1.3] * 4}, False),
        ({"depcomm": [1.3] * 4, "neutronstar": [0.7, 0.8] * 2}, True),
        ({}, True),
    ],
)
def test_only_who_is_ahead_has_to_be_known(turns: dict[str, list[float]], is_known: bool) -> None:
    own = {"hybrid": [1.0, 1.001, 1.0, 1.001]}
    assert are_known(own | turns, 0.01) == is_known
    assert are_known(turns, 0.01), "without hybrid there is no ratio"


@pytest.fixture
def systems() -> dict[str, dict[str, Any]]:
    """Epochs that all count tell another order than rounds do."""
    rounds = {
        "hybrid": [[1.0, 1.0, 3.0], [1.0, 1.0, 1.0]],
        "depcomm": [[1.1, 1.1, 3.3], [1.1, 1.1, 1.1]],
        "depcache": [[1.2, 1.2, 3.6], [1.2, 1.2, 1.2]],
        "neutronstar": [[0.9, 0.9, 2.7], [0.9, 0.9, 0.9]],
    }
    seconds = {"hybrid": 1.0, "depcomm": 1.3, "depcache": 0.8, "neutronstar": 1.0}
    return {
        name: make_line(TWO, name, seconds[name], starts=[{"p50": 9.0, "turns": turns} for turns in of_system])
        for name, of_system in rounds.items()
    }


def test_ratios_between_ours_are_of_turns_where_these_are_known(systems: dict[str, dict[str, Any]]) -> None:
    assert better_pure(systems) == "depcomm"
    told = cell_summary(systems)
    assert told["vs_best_pure"] == pytest.approx(1.1)
    assert told["vs_neutronstar"] == pytest.approx(0.9)
    assert ratio_error(systems) == pytest.approx(0.0, abs=1e-12), "of starts by their turns, too"
    for start in systems["hybrid"]["starts"]:
        del start["turns"]  # a line of older code
    assert better_pure(systems) == "depcache"
    told = cell_summary(systems)
    assert (told["vs_best_pure"], told["vs_neutronstar"]) == (0.8, 1.0)


def test_the_plan_that_is_compared_is_the_better_by_turns(systems: dict[str, dict[str, Any]]) -> None:
    for name, line in systems.items():
        for start in line["starts"]:
            start["plan_digest"] = "b" if name == "depcache" else "a"
    assert cell_summary(systems)["same_plan"] == {"best_pure": True, "neutronstar": True}
