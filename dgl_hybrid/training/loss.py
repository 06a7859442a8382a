# SPDX-License-Identifier: Apache-2.0
"""The weight of a rank's loss, applied where the gradient enters the model.

A script's loss is the mean over its own seeds and DDP averages gradients over ranks; that is not the global mean when
ranks have different numbers of seeds. Weighting gradients after backward would be wrong, since a rank's weight gradient
already holds what came home through its mirrors from other ranks' losses. So the gradient is multiplied before any
exchange runs backward: by P * n_j / sum(n) on rank j.

Of a gradient that is differentiated again only the script knows which parts have the weight already: those of its first
derivatives have it, a term that is added to them has not. Where weights are not 1 this is refused, on every rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from dgl_hybrid.errors import BlockError
from dgl_hybrid.exchange.communicator import Communicator

Reduction = Literal["mean", "sum", "weighted"]
REDUCTIONS: tuple[str, ...] = get_args(Reduction)

_ROUNDING = 1e-12


@dataclass(frozen=True, slots=True)
class LossWeight:
    """What the gradient of a rank's loss is multiplied by."""

    value: float
    is_one: bool
    """On every rank, but for rounding."""
    of_ranks: tuple[float, ...] = field(default=(), compare=False)
    """(P,) values of all ranks, the same on each of them."""

    def is_alike(self, other: LossWeight) -> bool:
        """Whether every rank weighs by both of them alike, but for rounding; the same on all ranks."""
        ours, theirs = (weight.of_ranks or (weight.value,) for weight in (self, other))
        return len(ours) == len(theirs) and all(
            math.isclose(x, y, rel_tol=_ROUNDING) for x, y in zip(ours, theirs, strict=True)
        )


class _WeightGradient(torch.autograd.Function):
    """Identity; backward multiplies by a constant."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: LossWeight) -> Tensor:
        ctx.weight = weight
        return x.clone()  # not a view of it: a script may go on in place (`logits /= temperature`)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        if torch.is_grad_enabled() and not ctx.weight.is_one:  # create_graph=True
            raise BlockError(
                "second derivatives of the loss: first ones have this rank's loss weight, which would enter a second "
                "time. Weight the loss yourself, which is exact: FullGraphLoader(..., loss_reduction='weighted'), and "
                "multiply the mean over this rank's seeds by the number of ranks times this rank's share of all seeds."
            )
        if ctx.weight.value == 0.0:  # the loss of a borrowed seed may be NaN, as of a class that weighs nothing
            # Of the gradient all the same: where that is differentiated again, this rank takes part in exchanges, too.
            nowhere = torch.zeros((), dtype=torch.bool, device=grads[0].device)
            return torch.where(nowhere, grads[0], torch.zeros_like(grads[0])), None
        return grads[0] * ctx.weight.value, None


def weight_gradient(x: Tensor, weight: LossWeight) -> Tensor:
    """Returns `x`, whose gradient will be multiplied by `weight`; by BlockError, if a graph of that is asked for."""
    weighted: Tensor = _WeightGradient.apply(x, weight)
    return weighted


def is_weighting(node: Any) -> bool:
    """Whether an autograd node is the backward of `weight_gradient`."""
    return type(node).__name__ == _WeightGradient.__name__ + "Backward"


def check_reduction(reduction: str, denominator: float | None) -> None:
    """Checks what a script says of its loss.

    Raises:
        ValueError: Another reduction than those there are, a denominator of a sum, or one that is no number.
    """
    try:
        float(0.0 if denominator is None else denominator)
    except (TypeError, ValueError, RuntimeError) as error:
        kind = f"a tensor of shape {tuple(denominator.shape)}" if isinstance(denominator, Tensor) else repr(denominator)
        raise ValueError(
            f"loss_denominator must be a number, what the mean divides by on this rank: class_weights[labels].sum(), "
            f"say (got {kind})"
        ) from error
    if reduction not in REDUCTIONS:
        raise ValueError(
            f"loss_reduction must be one of {', '.join(REDUCTIONS)} (got {reduction!r}): how the script reduces its "
            f"loss over the seeds, in whatever steps"
        )
    if reduction != "mean" and denominator is not None:
        raise ValueError(
            f"loss_denominator={denominator} has no meaning with loss_reduction={reduction!r}: leave it out"
        )


def find_loss_weight(
    communicator: Communicator, num_seeds: int, *, reduction: Reduction = "mean", denominator: float | None = None
) -> LossWeight:
    """Returns this rank's weight. Collective.

    Args:
        num_seeds: Seeds this rank's loss is taken over, borrowed ones not counted.
        reduction: How the script reduces its loss over the seeds: to their "mean", their "sum", or to what is
            "weighted" already, so that the mean over ranks of their losses is that of the whole graph. Then the weight
            is 1, and 0 on a rank without seeds of its own, whatever the loss of the one that it borrows.
        denominator: What a "mean" divides by on this rank, if it is not the number of seeds (class weights,
            `ignore_index`). It must be that of the seeds that are yielded here, after those of other owners were moved
            to them and double ones dropped: nobody but the script knows its loss, so this cannot be checked. Of a rank
            without seeds of its own it is not looked at: the one it borrows counts with its owner.

    Raises:
        ValueError: On every rank, if a denominator is negative or not finite, or all are 0.
    """
    here = float(num_seeds) if denominator is None or num_seeds == 0 else float(denominator)
    told = communicator.gather_floats([here, float(num_seeds > 0)])
    of_ranks, have_seeds = [row[0] for row in told], [bool(row[1]) for row in told]
    rank, world_size = communicator.rank, communicator.world_size
    if reduction != "mean":
        factor = float(world_size) if reduction == "sum" else 1.0
        weights = tuple(factor if has_seeds else 0.0 for has_seeds in have_seeds)
        # Of "weighted": one where it matters, as what is multiplied by 0 twice is 0 as well.
        return LossWeight(weights[rank], is_one=factor == 1.0, of_ranks=weights)
    total = sum(of_ranks)
    if not all(0.0 <= of_rank < math.inf for of_rank in of_ranks) or not 0.0 < total < math.inf:
        raise ValueError(
            f"loss denominators of ranks must be finite and not negative, and not all 0 (got {of_ranks} by rank)"
        )
    weights = tuple(world_size * of_rank / total for of_rank in of_ranks)
    return LossWeight(weights[rank], is_one=len(set(of_ranks)) == 1, of_ranks=weights)
