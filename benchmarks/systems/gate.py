# SPDX-License-Identifier: Apache-2.0
"""Whether a system computes what plain DGL computes from the same weights. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

LOSS_TOLERANCE = 1e-4
"""Relative, in each of the first epochs: float32 sums of millions of terms in another order, and Adam on top."""
LOGIT_TOLERANCE = 1e-4
"""Of the largest absolute logit in the sample, at the initial weights."""


class GateError(RuntimeError):
    """A system's results are not those of plain DGL: its times mean nothing."""


def merge(answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns one sample of what the ranks have answered; JSON has made the ids text."""
    logits = {int(vertex): row for answer in answers for vertex, row in answer["logits"].items()}
    return {**answers[0], "logits": logits}


def compare(sample: Mapping[str, Any], reference: Mapping[str, Any]) -> dict[str, Any]:
    """Compares losses and logits, element by element.

    Returns:
        What is recorded: the largest differences.
    Raises:
        GateError: They differ by more than float32 explains, or vertices are missing.
    """
    if not sample["is_comparable"]:
        return {"is_comparable": False}
    pairs = list(zip(sample["losses"], reference["losses"], strict=False))
    loss_error = max(abs(ours - theirs) / abs(theirs) for ours, theirs in pairs)
    missing = sorted(set(reference["logits"]) - set(sample["logits"]))
    if missing:
        raise GateError(f"logits of {len(missing)} of {len(reference['logits'])} vertices are missing: {missing[:5]}")
    largest = max(abs(value) for row in reference["logits"].values() for value in row)
    logit_error = max(
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
    return {
        "is_comparable": True,
        "losses": len(pairs),
        "vertices": len(reference["logits"]),
        "loss_error": loss_error,
        "logit_error": logit_error / largest,
    }
