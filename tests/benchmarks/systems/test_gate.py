# SPDX-License-Identifier: Apache-2.0
"""The check of results before anything is timed."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from benchmarks.systems import gate
from benchmarks.systems.adaptors import base

REFERENCE = {
    "losses": [2.0, 1.5],
    "logits": {3: [1.0, -4.0], 7: [0.5, 2.0]},
    "gradients": {"w": [2.0, -1.0], "b": [0.0, 0.0]},
    "why_no_gradients": None,
    "is_comparable": True,
}


def test_gate_lets_rounding_pass() -> None:
    gradients = {"w": [2.001, -1.0005], "b": [1e-6, -1e-6]}
    sample = {"losses": [2.00001], "logits": {3: [1.0, -4.0001], 7: [0.5, 2.0]}, "gradients": gradients}
    found = gate.compare(REFERENCE | sample, REFERENCE)
    assert found["losses"] == 1
    assert found["vertices"] == 2
    assert found["logit_error"] == pytest.approx(2.5e-5)
    assert found["gradient_error"] == pytest.approx(5e-4)
    why = "it steps by batches"
    found = gate.compare(REFERENCE | {"gradients": None, "why_no_gradients": why}, REFERENCE)
    assert found["no_gradients"] == why
    assert "gradient_error" not in found


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"losses": [2.0, 1.6]}, "losses"),
        ({"losses": [float("nan"), 1.5]}, "losses"),
        ({"losses": [2.0, float("nan")]}, "losses"),
        ({"logits": {3: [1.0, float("nan")], 7: [0.5, 2.0]}}, "logits must equal"),
        ({"logits": {3: [1.0, -4.0], 7: [0.5, 2.01]}}, "logits must equal"),
        ({"logits": {3: [1.0, -4.0]}}, "1 of 2 vertices are missing"),
        # Adam does not see a factor, nor do losses; the sketch sees what a norm does not.
        ({"gradients": {"w": [4.0, -2.0], "b": [0.0, 0.0]}}, "the gradient of w must equal"),
        ({"gradients": {"w": [2.0, 1.0], "b": [0.0, 0.0]}}, "the gradient of w must equal"),
        ({"gradients": {"w": [float("nan"), -1.0], "b": [0.0, 0.0]}}, "the gradient of w must equal"),
        ({"gradients": {"w": [2.0, -1.0]}}, r"gradients must be of \['b', 'w'\] \(got \['w'\]\)"),
        ({"gradients": None}, "must tell its gradients, or why it cannot"),
    ],
)
def test_gate_stops_what_is_wrong(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(gate.GateError, match=message):
        gate.compare(REFERENCE | changes, REFERENCE)


@pytest.mark.parametrize(
    ("quantity", "just_right", "just_wrong"),
    [
        ("losses", {"losses": [2.000199, 1.5]}, {"losses": [2.000201, 1.5]}),
        ("losses", {"losses": [2.0, 1.499851]}, {"losses": [2.0, 1.499849]}),
        # Of the largest logit, which is 4, whatever the one that differs is.
        ("logits", {"logits": {3: [1.0, -4.0], 7: [0.500399, 2.0]}}, {"logits": {3: [1.0, -4.0], 7: [0.500401, 2.0]}}),
        # Of the norm of the weight's gradient, which is 2, and 1e-5 of the norm of all.
        *(
            (
                "the gradient of w",
                {"gradients": {"w": just_right, "b": [0.0, 0.0]}},
                {"gradients": {"w": just_wrong, "b": [0.0, 0.0]}},
            )
            for just_right, just_wrong in (([2.002019, -1.0], [2.002021, -1.0]), ([2.0, -1.002019], [2.0, -1.002021]))
        ),
        (
            "the gradient of b",
            {"gradients": {"w": [2.0, -1.0], "b": [1.9e-5, 0.0]}},
            {"gradients": {"w": [2.0, -1.0], "b": [2.1e-5, 0.0]}},
        ),
    ],
)
def test_gate_lets_no_more_than_rounding_pass(
    quantity: str, just_right: dict[str, Any], just_wrong: dict[str, Any]
) -> None:
    """In numbers of its own: a tolerance that is loosened is a decision about what the figures mean."""
    gate.compare(REFERENCE | just_right, REFERENCE)
    with pytest.raises(gate.GateError, match=quantity):
        gate.compare(REFERENCE | just_wrong, REFERENCE)


def test_gradients_that_differ_have_other_sketches() -> None:
    gradient = torch.arange(1.0, 7.0).reshape(2, 3)
    ways = {"as it is": gradient, "negated": -gradient, "permuted": gradient.flip(1), "again": gradient.clone()}
    sketches = {way: base.sketch([("w", one)])["w"] for way, one in ways.items()}
    norms, products = zip(*sketches.values(), strict=True)
    assert norms == (pytest.approx(math.sqrt(91.0)),) * 4
    assert products[0] == products[3] == -products[1]
    assert len({abs(product) for product in (products[0], products[2], norms[0])}) == 3
    # Directions are those of names, in any order: the ranks of a system and plain DGL draw them each for itself.
    both = base.sketch([("v", gradient), ("w", gradient)])
    assert both["w"] == sketches["as it is"]
    assert both["v"][1] != both["w"][1]
    assert base.sketch([("w", None)]) == {"w": [0.0, 0.0]}


def test_gate_of_another_model_and_of_several_ranks() -> None:
    assert gate.compare({"is_comparable": False}, REFERENCE) == {"is_comparable": False}
    by_rank = [{"losses": [1.0], "logits": {"3": [1.0]}}, {"losses": [1.0], "logits": {"7": [2.0]}}]
    assert gate.merge(by_rank) == {"losses": [1.0], "logits": {3: [1.0], 7: [2.0]}}
    steps = [answer | {"gradients": {"w": [2.0, sketch]}} for answer, sketch in zip(by_rank, (-1.0, -1.00001))]
    assert gate.merge(steps)["gradients"] == {"w": [2.0, -1.0]}
    steps[1]["gradients"] = {"w": [1.0, -0.5]}
    with pytest.raises(gate.GateError, match="the gradient of w must equal rank 0's"):
        gate.merge(steps)
