# SPDX-License-Identifier: Apache-2.0
"""row_products: sums of products of rows and weights, and what usually follows, in one pass over the rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from dgl_hybrid.ops.backend import choose_backend
from dgl_hybrid.ops.library.registration import Grads, register, registered
from dgl_hybrid.ops.row_blocks import is_turned, mask_of_relu


def _products(
    rows: list[Tensor],
    weights: list[Tensor],
    factors: Tensor | None,
    addend: Tensor | None,
    bias: Tensor | None,
    relu: bool,
) -> Tensor:
    return choose_backend(weights[0]).row_products(rows, weights, factors, addend, bias, relu)


def _products_meta(
    rows: list[Tensor],
    weights: list[Tensor],
    factors: Tensor | None,
    addend: Tensor | None,
    bias: Tensor | None,
    relu: bool,
) -> Tensor:
    return weights[0].new_empty(rows[0].shape[0], weights[0].shape[1])


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, weights, factors, _, _, relu = inputs
    ctx.count, ctx.relu, ctx.has_factors = len(rows), relu, factors is not None
    ctx.save_for_backward(*rows, *weights, *((factors,) if ctx.has_factors else ()), *((output,) if relu else ()))


def _backward(ctx: Any, grad: Tensor) -> Grads:
    saved = list(ctx.saved_tensors)
    rows, weights = saved[: ctx.count], saved[ctx.count : 2 * ctx.count]
    factors = saved[2 * ctx.count] if ctx.has_factors else None
    output = saved[-1] if ctx.relu else None
    needs_rows, needs_weights, needs_factors, needs_addend, needs_bias, _ = ctx.needs_input_grad
    if needs_factors:
        raise RuntimeError("row_products: factors of rows have no gradient: they are to be the same in every epoch")
    if torch.is_grad_enabled():
        return _differentiable_backward(ctx, grad, rows, weights, factors, output)
    found = registered("row_products_backward")(
        rows, weights, grad, output, factors, needs_rows, needs_weights, needs_addend and ctx.relu
    )
    given = iter(found)
    d_rows = [next(given) if needs else None for needs in needs_rows]
    # In the layout of the weights: optimizers work on both side by side.
    d_weights = [
        (next(given).t() if is_turned(weight) else next(given)) if needs else None
        for weight, needs in zip(weights, needs_weights, strict=True)
    ]
    d_bias = next(given)
    d_addend = (next(given) if ctx.relu else grad) if needs_addend else None
    return d_rows, d_weights, None, d_addend, d_bias if needs_bias else None, None


def _differentiable_backward(
    ctx: Any, grad: Tensor, rows: list[Tensor], weights: list[Tensor], factors: Tensor | None, output: Tensor | None
) -> Grads:
    needs_rows, needs_weights, _, needs_addend, needs_bias, _ = ctx.needs_input_grad
    grad = mask_of_relu(grad, output)
    of_products = grad if factors is None else grad * factors
    products = registered("row_products")
    return (
        [
            products([of_products], [weight.t()], None, None, None, False) if needs else None
            for weight, needs in zip(weights, needs_rows, strict=True)
        ],
        [x.t() @ of_products if needs else None for x, needs in zip(rows, needs_weights, strict=True)],
        None,
        grad if needs_addend else None,
        grad.sum(0) if needs_bias else None,
        None,
    )


def _products_backward(
    rows: list[Tensor],
    weights: list[Tensor],
    grad: Tensor,
    output: Tensor | None,
    factors: Tensor | None,
    needs_rows: Sequence[bool],
    needs_weights: Sequence[bool],
    needs_addend: bool,
) -> list[Tensor]:
    """Of the rows and weights that need one (of weights turned where they are), of the bias, of the addend."""
    return choose_backend(grad).row_products_backward(
        rows, weights, grad, output, factors, needs_rows, needs_weights, needs_addend
    )


def _products_backward_meta(
    rows: list[Tensor],
    weights: list[Tensor],
    grad: Tensor,
    output: Tensor | None,
    factors: Tensor | None,
    needs_rows: Sequence[bool],
    needs_weights: Sequence[bool],
    needs_addend: bool,
) -> list[Tensor]:
    found = [x.new_empty(x.shape) for x, needs in zip(rows, needs_rows, strict=True) if needs]
    for weight, needs in zip(weights, needs_weights, strict=True):
        if needs:
            found.append(grad.new_empty(weight.shape[::-1] if is_turned(weight) else weight.shape))
    return [*found, grad.new_empty(grad.shape[1]), *([grad.new_empty(grad.shape)] if needs_addend else [])]


register(
    "row_products(Tensor[] rows, Tensor[] weights, Tensor? factors, Tensor? addend, Tensor? bias, bool relu) -> Tensor",
    _products,
    _products_meta,
    _setup,
    _backward,
)
register(
    "row_products_backward(Tensor[] rows, Tensor[] weights, Tensor grad, Tensor? output, Tensor? factors, "
    "bool[] needs_rows, bool[] needs_weights, bool needs_addend) -> Tensor[]",
    _products_backward,
    _products_backward_meta,
)


@register_flop_formula(torch.ops.dgl_hybrid.row_products)
def _flops(rows: Any, weights: Any, *args: Any, out_shape: Any, **kwargs: Any) -> int:
    """Arguments come as shapes."""
    return sum(2 * shape[0] * shape[1] * weight[1] for shape, weight in zip(rows, weights, strict=True))


@register_flop_formula(torch.ops.dgl_hybrid.row_products_backward)
def _backward_flops(
    rows: Any,
    weights: Any,
    grad: Any,
    output: Any,
    factors: Any,
    needs_rows: Sequence[bool],
    needs_weights: Sequence[bool],
    *args: Any,
    out_shape: Any,
    **kwargs: Any,
) -> int:
    products = [int(of_x) + int(of_weight) for of_x, of_weight in zip(needs_rows, needs_weights, strict=True)]
    return sum(2 * count * shape[0] * shape[1] * grad[1] for shape, count in zip(rows, products, strict=True))
