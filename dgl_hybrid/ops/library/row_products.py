# SPDX-License-Identifier: Apache-2.0
"""row_products: sums of products of rows and weights, some rows at a time.

MKL takes a quarter longer for all rows at once than for one block of them after the other (20,000 to 50,000 rows of 100
to 600 columns, into 128 or 256), and what is added to a block finds it in the cache.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from dgl_hybrid.ops.library.registration import Grads, register, registered

BLOCK_ROWS = 1024
"""Of one product, for each thread."""


def _products(rows: list[Tensor], weights: list[Tensor], bias: Tensor | None) -> Tensor:
    num_rows = len(rows[0])
    result = weights[0].new_empty(num_rows, weights[0].shape[1])
    size = BLOCK_ROWS * torch.get_num_threads() if result.device.type == "cpu" else max(num_rows, 1)
    for begin in range(0, num_rows, size):
        block = slice(begin, min(begin + size, num_rows))
        part = result[block]
        torch.mm(rows[0][block], weights[0], out=part)
        for x, weight in zip(rows[1:], weights[1:], strict=True):
            part.addmm_(x[block], weight)
        if bias is not None:
            part.add_(bias)
    return result


def _products_meta(rows: list[Tensor], weights: list[Tensor], bias: Tensor | None) -> Tensor:
    return weights[0].new_empty(rows[0].shape[0], weights[0].shape[1])


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, weights, _ = inputs
    ctx.count = len(rows)
    ctx.save_for_backward(*rows, *weights)


def _backward(ctx: Any, grad: Tensor) -> Grads:
    rows, weights = ctx.saved_tensors[: ctx.count], ctx.saved_tensors[ctx.count :]
    needs_rows, needs_weights, needs_bias = ctx.needs_input_grad
    products = registered("row_products")
    return (
        [products([grad], [w.t()], None) if needs else None for w, needs in zip(weights, needs_rows, strict=True)],
        # In the layout of the weight: optimizers work on both side by side.
        [
            _weight_gradient(x, w, grad) if needs else None
            for x, w, needs in zip(rows, weights, needs_weights, strict=True)
        ],
        grad.sum(0) if needs_bias else None,
    )


def _weight_gradient(x: Tensor, weight: Tensor, grad: Tensor) -> Tensor:
    return x.t() @ grad if weight.is_contiguous() else (grad.t() @ x).t()


register(
    "row_products(Tensor[] rows, Tensor[] weights, Tensor? bias) -> Tensor",
    _products,
    _products_meta,
    _setup,
    _backward,
)


@register_flop_formula(torch.ops.dgl_hybrid.row_products)
def _flops(rows: Any, weights: Any, bias: Any, *args: Any, out_shape: Any, **kwargs: Any) -> int:
    """Arguments come as shapes."""
    return sum(2 * shape[0] * shape[1] * weight[1] for shape, weight in zip(rows, weights, strict=True))
