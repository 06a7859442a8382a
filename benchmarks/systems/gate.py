# SPDX-License-Identifier: Apache-2.0
"""Whether a system computes what plain DGL computes from the same weights. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

LOSS_TOLERANCE = 1e-4
"""Relative, in each of the first epochs: float32 sums of millions of terms in another order, and Adam on top."""
LOGIT_TOLERANCE = 1e-4
"""Of the largest absolute logit in the sample, at the initial weights."""
GRADIENT_TOLERANCE = 1e-3
"""Of the norm of a weight's gradient, at the initial weights: float32, and terms that cancel."""
CANCELLED = 1e-5
"""Of the norm of all gradients, besides: some weights' are nearly 0 (attention's for the destination)."""
REFERENCE_FORM = 2
"""Of what is kept of plain DGL, to be counted up when more is compared. 2: gradients."""


class GateError(RuntimeError):
    """A system's results are not those of plain DGL: its times mean nothing."""


def merge(answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns one sample of what the ranks have answered; JSON has made the ids text.

    Raises:
        GateError: Their gradients differ: each steps by its own.
    """
    logits = {int(vertex): row for answer in answers for vertex, row in answer["logits"].items()}
    first = answers[0].get("gradients")
    if first is not None:
        for answer in answers[1:]:
            compare_gradients(answer["gradients"], first, theirs="rank 0's")
    return {**answers[0], "logits": logits}


def _largest(errors: Iterable[float]) -> float:
    """Returns the largest, NaN if there is one, which `max` passes over."""
    found = list(errors)
    return math.nan if any(math.isnan(error) for error in found) else max(found)


def compare(sample: Mapping[str, Any], reference: Mapping[str, Any]) -> dict[str, Any]:
    """Compares losses and logits, element by element, and gradients of weights, by their sketches.

    Returns:
        What is recorded: the largest differences.
    Raises:
        GateError: They differ by more than float32 explains, or vertices or gradients are missing.
    """
    if not sample["is_comparable"]:
        return {"is_comparable": False}
    pairs = list(zip(sample["losses"], reference["losses"], strict=False))
    loss_error = _largest(abs(ours - theirs) / abs(theirs) for ours, theirs in pairs)
    missing = sorted(set(reference["logits"]) - set(sample["logits"]))
    if missing:
        raise GateError(f"logits of {len(missing)} of {len(reference['logits'])} vertices are missing: {missing[:5]}")
    largest = max(abs(value) for row in reference["logits"].values() for value in row)
    logit_error = _largest(
        abs(ours - theirs)
        for vertex, row in reference["logits"].items()
        for ours, theirs in zip(sample["logits"][vertex], row, strict=True)
    )
    # Written so that NaN fails.
    if not loss_error <= LOSS_TOLERANCE:
        raise GateError(
            f"losses {sample['losses']} must equal plain DGL's {reference['losses']} to {LOSS_TOLERANCE:g} "
            f"(got {loss_error:.3g})"
        )
    if not logit_error <= LOGIT_TOLERANCE * largest:
        raise GateError(
            f"logits must equal plain DGL's to {LOGIT_TOLERANCE:g} of the largest, {largest:.3g} (got "
            f"{logit_error:.3g})"
        )
    if sample["gradients"] is None:
        if not sample["why_no_gradients"]:
            raise GateError("a system must tell its gradients, or why it cannot")
        gradients = {"no_gradients": sample["why_no_gradients"]}
    else:
        gradients = {"gradient_error": compare_gradients(sample["gradients"], reference["gradients"])}
    return {
        **gradients,
        "is_comparable": True,
        "losses": len(pairs),
        "vertices": len(reference["logits"]),
        "loss_error": loss_error,
        "logit_error": logit_error / largest,
    }


def compare_gradients(
    found: Mapping[str, Sequence[float]], expected: Mapping[str, Sequence[float]], *, theirs: str = "plain DGL's"
) -> float:
    """Compares what `sketch` made of each weight's gradient; returns the largest difference, of the norm of a weight's.

    Raises:
        GateError: One differs, or is missing.
    """
    if found.keys() != expected.keys():
        raise GateError(f"gradients must be of {sorted(expected)} (got {sorted(found)})")
    whole = math.hypot(*(norm for norm, _ in expected.values()))
    worst = 0.0
    for name, (norm, *_) in expected.items():
        error = max(abs(a - b) for a, b in zip(found[name], expected[name], strict=True))
        # Written so that NaN fails.
        if not error <= GRADIENT_TOLERANCE * norm + CANCELLED * whole:
            raise GateError(
                f"the gradient of {name} must equal {theirs}, of norm and sketch {expected[name]}, to "
                f"{GRADIENT_TOLERANCE:g} (got {found[name]})"
            )
        worst = max(worst, error / max(norm, whole * CANCELLED / GRADIENT_TOLERANCE))
    return worst
