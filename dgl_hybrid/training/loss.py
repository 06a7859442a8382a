# SPDX-License-Identifier: Apache-2.0
"""The weight of a rank's loss, applied where the gradient enters the model.

A script's loss is the mean over its own seeds and DDP averages gradients over ranks; that is not the global mean when
ranks have different numbers of seeds. Weighting gradients after backward would be wrong, since a rank's weight gradient
already holds what came home through its mirrors from other ranks' losses. So the gradient is multiplied before any
exchange runs backward: by P * n_j / sum(n) on rank j.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from dgl_hybrid.exchange.communicator import Communicator

Reduction = Literal["mean", "sum"]


class _WeightGradient(torch.autograd.Function):
    """Identity; backward multiplies by a constant."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: float) -> Tensor:
        ctx.weight = weight
        return x.view_as(x)

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


def find_loss_weight(
    communicator: Communicator, num_seeds: int, *, reduction: Reduction = "mean", denominator: float | None = None
) -> float:
    """Returns this rank's weight. Collective.

    Args:
        num_seeds: Seeds this rank's loss is taken over, borrowed ones not counted.
        reduction: How the script reduces its loss over the seeds.
        denominator: What a "mean" divides by on this rank, if it is not the number of seeds (class weights,
            `ignore_index`).

    Raises:
        ValueError: On every rank, if the denominators do not sum to a positive number.
    """
    here = float(num_seeds) if denominator is None else float(denominator)
    total = sum(row[0] for row in communicator.gather_floats([here]))
    if reduction == "sum":
        return float(communicator.world_size) if num_seeds else 0.0
    if not total > 0:
        raise ValueError(f"loss denominators must sum to a positive number over ranks (got {total})")
    return communicator.world_size * here / total
