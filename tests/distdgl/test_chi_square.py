# SPDX-License-Identifier: Apache-2.0
"""The statistics tell a fair sampler from unfair ones, with as many draws as the conformance jobs make."""

from __future__ import annotations

import numpy as np
import pytest

from tests.distdgl.chi_square import against_each_other, against_uniform, against_weights, p_value
from tests.distdgl.sampling_checks import NUM_DRAWS

DEGREES = (9, 14, 20, 40)
FANOUT = 4


def draw(kind: str, degree: int, rng: np.random.Generator) -> list[int]:
    """Counts of `NUM_DRAWS` draws of `FANOUT` of `degree` edges."""
    if kind == "first ones":
        return [NUM_DRAWS] * FANOUT + [0] * (degree - FANOUT)
    weights = np.ones(degree)
    if kind == "every other is likelier by half":
        weights[::2] = 1.5
    elif kind == "first is never drawn":
        weights[0] = 1e-9
    arrival = rng.exponential(size=(NUM_DRAWS, degree)) / weights
    picked = np.argpartition(arrival, FANOUT, axis=1)[:, :FANOUT]
    counts: list[int] = np.bincount(picked.ravel(), minlength=degree).tolist()
    return counts


def test_fair_draws_pass_and_their_p_values_are_uniform() -> None:
    values = []
    for seed in range(60):
        rng = np.random.default_rng(seed)
        values.append(p_value([against_uniform(draw("fair", d, rng), NUM_DRAWS, FANOUT) for d in DEGREES]))
    assert min(values) > 1e-3
    assert 0.3 < np.mean(values) < 0.7  # with the statistic of independent draws it is 0.9 and no bias shows
    assert np.mean(np.array(values) < 0.2) > 0.07


@pytest.mark.parametrize("kind", ["first ones", "first is never drawn", "every other is likelier by half"])
def test_unfair_draws_fail(kind: str) -> None:
    for seed in range(10):
        rng = np.random.default_rng(seed)
        counts = [draw(kind, d, rng) for d in DEGREES]
        assert p_value([against_uniform(c, NUM_DRAWS, FANOUT) for c in counts]) < 1e-3
        fair = [draw("fair", d, rng) for d in DEGREES]
        both = zip(counts, fair, strict=True)
        differ = p_value([against_each_other(a, b, NUM_DRAWS, FANOUT, replace=False) for a, b in both])
        assert differ < 1e-3 or kind == "every other is likelier by half"  # a half shows against the truth only


def test_fair_runs_do_not_differ() -> None:
    values = []
    for seed in range(40):
        rng = np.random.default_rng(seed)
        pairs = [(draw("fair", d, rng), draw("fair", d, rng)) for d in DEGREES]
        values.append(p_value([against_each_other(a, b, NUM_DRAWS, FANOUT, replace=False) for a, b in pairs]))
    assert min(values) > 1e-3
    assert 0.3 < np.mean(values) < 0.7


def test_weighted_draws() -> None:
    rng = np.random.default_rng(0)
    weights = np.array([0.0, 0.3, 1.0, 1.2, 0.5, 0.0, 2.0])
    picked = rng.choice(7, size=900, p=weights / weights.sum())
    counts = np.bincount(picked, minlength=7)
    assert p_value([against_weights(counts.tolist(), weights.tolist())]) > 1e-3
    uniform = np.bincount(rng.choice(7, size=900), minlength=7)
    assert p_value([against_weights(uniform.tolist(), [1.0] * 7)]) > 1e-3
    assert p_value([against_weights(uniform.tolist(), weights.tolist())]) == 0.0, "an edge of weight 0 was drawn"
    kept = np.bincount(rng.choice([1, 2, 3, 4, 6], size=900), minlength=7)
    assert p_value([against_weights(kept.tolist(), weights.tolist())]) < 1e-3
