# SPDX-License-Identifier: Apache-2.0
"""row_products: sums of products of rows and weights, and what usually follows, some rows at a time.

MKL takes a quarter longer for all rows at once than for one block of them after the other (20,000 to 50,000 rows of 100
to 600 columns, into 128 or 256). What is added to a block, and a ReLU, find it in the cache; backward, so do the
products of a block's masked gradient, which is never written to memory where nothing but weights needs a gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from dgl_hybrid.ops.library.registration import Grads, register, registered

BLOCK_ROWS = 1024
"""Of one product, for each thread."""


def row_blocks(x: Tensor) -> Iterator[slice]:
    """Yields ranges of rows that stay in the cache while something is done to them; all rows on other devices."""
    size = BLOCK_ROWS * torch.get_num_threads() if x.device.type == "cpu" else max(len(x), 1)
    for begin in range(0, len(x), size):
        yield slice(begin, min(begin + size, len(x)))


def finish_rows(part: Tensor, addend: Tensor | None, bias: Tensor | None, relu: bool) -> None:
    """Adds to a block of rows in place, and takes its ReLU."""
    for other in (addend, bias):
        if other is not None:
            part.add_(other)
    if relu:
        part.relu_()


def _products(
    rows: list[Tensor], weights: list[Tensor], addend: Tensor | None, bias: Tensor | None, relu: bool
) -> Tensor:
    result = weights[0].new_empty(len(rows[0]), weights[0].shape[1])
    for block in row_blocks(result):
        part = result[block]
        torch.mm(rows[0][block], weights[0], out=part)
        for x, weight in zip(rows[1:], weights[1:], strict=True):
            part.addmm_(x[block], weight)
        finish_rows(part, None if addend is None else addend[block], bias, relu)
    return result


def _products_meta(
    rows: list[Tensor], weights: list[Tensor], addend: Tensor | None, bias: Tensor | None, relu: bool
) -> Tensor:
    return weights[0].new_empty(rows[0].shape[0], weights[0].shape[1])


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, weights, _, _, relu = inputs
    ctx.count, ctx.relu = len(rows), relu
    ctx.save_for_backward(*rows, *weights, *((output,) if relu else ()))


def _backward(ctx: Any, grad: Tensor) -> Grads:
    rows, weights = list(ctx.saved_tensors[: ctx.count]), list(ctx.saved_tensors[ctx.count : 2 * ctx.count])
    output = ctx.saved_tensors[-1] if ctx.relu else None
    needs_rows, needs_weights, needs_addend, needs_bias, _ = ctx.needs_input_grad
    is_for_weights_alone = not (any(needs_rows) or needs_addend) and all(needs_weights)
    if is_for_weights_alone and not torch.is_grad_enabled():
        # In the layout of the weights: optimizers work on both side by side.
        is_turned = [not weight.is_contiguous() for weight in weights]
        *d_weights, d_bias = registered("row_products_backward")(rows, grad, output, is_turned)
        turned = [d.t() if turn else d for d, turn in zip(d_weights, is_turned, strict=True)]
        return [None] * ctx.count, turned, None, d_bias if needs_bias else None, None
    grad = mask_of_relu(grad, output)
    products = registered("row_products")
    pairs = list(zip(rows, weights, strict=True))
    return (
        [
            products([grad], [weight.t()], None, None, False) if needs else None
            for weight, needs in zip(weights, needs_rows, strict=True)
        ],
        [_weight_gradient(*pair, grad) if needs else None for pair, needs in zip(pairs, needs_weights, strict=True)],
        grad if needs_addend else None,
        grad.sum(0) if needs_bias else None,
        None,
    )


def mask_of_relu(grad: Tensor, output: Tensor | None) -> Tensor:
    """Returns the gradient before a ReLU that gave `output`; None: there was none."""
    return grad if output is None else torch.ops.aten.threshold_backward(grad, output, 0)


def _weight_gradient(x: Tensor, weight: Tensor, grad: Tensor) -> Tensor:
    return x.t() @ grad if weight.is_contiguous() else (grad.t() @ x).t()


def _products_backward(
    rows: list[Tensor], grad: Tensor, output: Tensor | None, is_turned: Sequence[bool]
) -> list[Tensor]:
    """Gradients of the weights, turned where the weights are, and of the bias."""
    d_weights = [grad.new_zeros(shape) for shape in _weight_shapes(rows, grad, is_turned)]
    d_bias = grad.new_zeros(grad.shape[1])
    for block in row_blocks(grad):
        part = mask_of_relu(grad[block], None if output is None else output[block])
        for x, d_weight, turn in zip(rows, d_weights, is_turned, strict=True):
            d_weight.addmm_(*((part.t(), x[block]) if turn else (x[block].t(), part)))
        d_bias.add_(part.sum(0))
    return [*d_weights, d_bias]


def _products_backward_meta(
    rows: list[Tensor], grad: Tensor, output: Tensor | None, is_turned: Sequence[bool]
) -> list[Tensor]:
    shapes = _weight_shapes(rows, grad, is_turned)
    return [*(grad.new_empty(shape) for shape in shapes), grad.new_empty(grad.shape[1])]


def _weight_shapes(rows: list[Tensor], grad: Tensor, is_turned: Sequence[bool]) -> list[tuple[int, int]]:
    width = grad.shape[1]
    return [(width, x.shape[1]) if turn else (x.shape[1], width) for x, turn in zip(rows, is_turned, strict=True)]


register(
    "row_products(Tensor[] rows, Tensor[] weights, Tensor? addend, Tensor? bias, bool relu) -> Tensor",
    _products,
    _products_meta,
    _setup,
    _backward,
)
register(
    "row_products_backward(Tensor[] rows, Tensor grad, Tensor? output, bool[] is_turned) -> Tensor[]",
    _products_backward,
    _products_backward_meta,
)


@register_flop_formula(torch.ops.dgl_hybrid.row_products)
def _flops(rows: Any, weights: Any, *args: Any, out_shape: Any, **kwargs: Any) -> int:
    """Arguments come as shapes."""
    return sum(2 * shape[0] * shape[1] * weight[1] for shape, weight in zip(rows, weights, strict=True))


@register_flop_formula(torch.ops.dgl_hybrid.row_products_backward)
def _backward_flops(rows: Any, grad: Any, *args: Any, out_shape: Any, **kwargs: Any) -> int:
    return sum(2 * shape[0] * shape[1] * grad[1] for shape in rows)
