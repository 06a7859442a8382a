# SPDX-License-Identifier: Apache-2.0
"""The weight of a rank's loss, applied where the gradient enters the model.

A script's loss is the mean over its own seeds and DDP averages gradients over ranks; that is not the global mean when
ranks have different numbers of seeds. Weighting gradients after backward would be wrong, since a rank's weight gradient
already holds what came home through its mirrors from other ranks' losses. So the gradient is multiplied before any
exchange runs backward: by P * n_j / sum(n) on rank j.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor

from dgl_hybrid.exchange.communicator import Communicator

Reduction = Literal["mean", "sum"]
REDUCTIONS: tuple[str, ...] = get_args(Reduction)


class _WeightGradient(torch.autograd.Function):
    """Identity; backward multiplies by a constant."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: float) -> Tensor:
        ctx.weight = weight
        return x.clone()  # not a view of it: a script may go on in place (`logits /= temperature`)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        if ctx.weight == 0.0:  # the loss of a borrowed seed may be NaN, as of a class that weighs nothing
            return torch.zeros_like(grads[0]), None
        return grads[0] * ctx.weight, None


def weight_gradient(x: Tensor, weight: float) -> Tensor:
    """Returns `x`, whose gradient will be multiplied by `weight`."""
    weighted: Tensor = _WeightGradient.apply(x, weight)
    return weighted


def is_weighting(node: Any) -> bool:
    """Whether an autograd node is the backward of `weight_gradient`."""
    return type(node).__name__ == _WeightGradient.__name__ + "Backward"


def check_reduction(reduction: str, denominator: float | None) -> None:
    """Checks what a script says of its loss.

    Raises:
        ValueError: Another reduction than those there are, or a denominator of a sum.
    """
    if reduction not in REDUCTIONS:
        raise ValueError(
            f"loss_reduction must be one of {', '.join(REDUCTIONS)} (got {reduction!r}): how the script reduces its "
            f"loss over the seeds, in whatever steps"
        )
    if reduction == "sum" and denominator is not None:
        raise ValueError(f"loss_denominator={denominator} has no meaning with loss_reduction='sum': leave it out")


def find_loss_weight(
    communicator: Communicator, num_seeds: int, *, reduction: Reduction = "mean", denominator: float | None = None
) -> float:
    """Returns this rank's weight. Collective.

    Args:
        num_seeds: Seeds this rank's loss is taken over, borrowed ones not counted.
        reduction: How the script reduces its loss over the seeds.
        denominator: What a "mean" divides by on this rank, if it is not the number of seeds (class weights,
            `ignore_index`). It must be that of the seeds that are yielded here, after those of other owners were moved
            to them and double ones dropped: nobody but the script knows its loss, so this cannot be checked. Of a rank
            without seeds of its own it is not looked at: the one it borrows counts with its owner.

    Raises:
        ValueError: On every rank, if the denominators do not sum to a positive number.
    """
    here = float(num_seeds) if denominator is None or num_seeds == 0 else float(denominator)
    total = sum(row[0] for row in communicator.gather_floats([here]))
    if reduction == "sum":
        return float(communicator.world_size) if num_seeds else 0.0
    if not total > 0:
        raise ValueError(f"loss denominators must sum to a positive number over ranks (got {total})")
    return communicator.world_size * here / total
