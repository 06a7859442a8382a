# SPDX-License-Identifier: Apache-2.0
"""row_products: sums of products of rows and weights, and what usually follows, some rows at a time.

MKL takes a quarter longer for all rows at once than for one block of them after the other (20,000 to 50,000 rows of 100
to 600 columns, into 128 or 256). What a block is multiplied by, what is added to it, and a ReLU, find it in the cache;
backward, so do the products of a block's gradient, which is never written to memory before the ReLU or the factors.
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
    rows: list[Tensor],
    weights: list[Tensor],
    factors: Tensor | None,
    addend: Tensor | None,
    bias: Tensor | None,
    relu: bool,
) -> Tensor:
    result = weights[0].new_empty(len(rows[0]), weights[0].shape[1])
    weights = [weight.contiguous() for weight in weights]  # MKL takes 2 to 10 % longer for one that lies turned
    for block in row_blocks(result):
        part = result[block]
        torch.mm(rows[0][block], weights[0], out=part)
        for x, weight in zip(rows[1:], weights[1:], strict=True):
            part.addmm_(x[block], weight)
        if factors is not None:
            part.mul_(factors[block])
        finish_rows(part, None if addend is None else addend[block], bias, relu)
    return result


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


def mask_of_relu(grad: Tensor, output: Tensor | None) -> Tensor:
    """Returns the gradient before a ReLU that gave `output`; None: there was none."""
    return grad if output is None else torch.ops.aten.threshold_backward(grad, output, 0)


def is_turned(weight: Tensor) -> bool:
    """Whether this matrix lies in memory as its transpose, as the weight of an `nn.Linear` does."""
    return not weight.is_contiguous()


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
    """Gradients of the rows and weights that need one (of weights turned where they are), of the bias, of the addend.

    What a block of the gradient goes through it goes through in the cache.
    """
    d_rows = [torch.empty_like(x) if needs else None for x, needs in zip(rows, needs_rows, strict=True)]
    sums = [
        _WeightGradient(x, weight) if needs else None
        for x, weight, needs in zip(rows, weights, needs_weights, strict=True)
    ]
    turned = [weight.t().contiguous() if needs else None for weight, needs in zip(weights, needs_rows, strict=True)]
    d_bias = grad.new_zeros(grad.shape[1])
    d_addend = torch.empty_like(grad) if needs_addend else None
    for block in row_blocks(grad):
        part = mask_of_relu(grad[block], None if output is None else output[block])
        if d_addend is not None:
            d_addend[block] = part
        d_bias.add_(part.sum(0))
        if factors is not None:
            part = part * factors[block]
        for x, weight_OI, d_x, total in zip(rows, turned, d_rows, sums, strict=True):
            if total is not None:
                total.add(x[block], part)
            if d_x is not None and weight_OI is not None:
                torch.mm(part, weight_OI, out=d_x[block])
    found = [d_x for d_x in d_rows if d_x is not None]
    found += [total.result() for total in sums if total is not None]
    return [*found, d_bias, *([] if d_addend is None else [d_addend])]


class _WeightGradient:
    """`x.t() @ grad`, summed over blocks of rows, in the layout of the weight.

    MKL takes longer if the wider of the two is the transposed one: mostly 1.1 to 1.2 times up to 256 columns, 1.3 to 2
    times for 602 by 128 to 41. The product is then made the other way round, and turned at its end.
    """

    def __init__(self, x: Tensor, weight: Tensor) -> None:
        num_inputs, num_outputs = weight.shape
        self._is_turned = is_turned(weight)
        self._by_grad = num_inputs > num_outputs or (num_inputs == num_outputs and self._is_turned)
        self._sum = x.new_zeros((num_outputs, num_inputs) if self._by_grad else (num_inputs, num_outputs))

    def add(self, x: Tensor, grad: Tensor) -> None:
        self._sum.addmm_(*((grad.t(), x) if self._by_grad else (x.t(), grad)))

    def result(self) -> Tensor:
        """(O, I) where the weight is turned, (I, O) else; contiguous."""
        return self._sum if self._by_grad == self._is_turned else self._sum.t().contiguous()


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
    found = [torch.empty_like(x) for x, needs in zip(rows, needs_rows, strict=True) if needs]
    for weight, needs in zip(weights, needs_weights, strict=True):
        if needs:
            found.append(grad.new_empty(weight.shape[::-1] if is_turned(weight) else weight.shape))
    return [*found, grad.new_empty(grad.shape[1]), *([torch.empty_like(grad)] if needs_addend else [])]


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
