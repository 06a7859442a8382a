# SPDX-License-Identifier: Apache-2.0
"""Sums of products of rows and weights in plain PyTorch, on CPU some rows at a time: for what has no kernel.

MKL takes a quarter longer for all rows at once than for one block of them after the other (20,000 to 50,000 rows of 100
to 600 columns, into 128 or 256). What a block is multiplied by, what is added to it, and a ReLU, find it in the cache;
backward, so do the products of a block's gradient, which is never written to memory before the ReLU or the factors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

BLOCK_ROWS = 1024
"""Of one product, for each thread."""


def row_blocks(x: Tensor) -> Iterator[slice]:
    """Yields ranges of rows that stay in the cache while something is done to them; all rows on other devices."""
    size = BLOCK_ROWS * torch.get_num_threads() if x.device.type == "cpu" else max(len(x), 1)
    for begin in range(0, len(x), size):
        yield slice(begin, min(begin + size, len(x)))


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns what sums of many parts are made in: of 256 equal ones bfloat16 cannot add another."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def finish_rows(part: Tensor, addend: Tensor | None, bias: Tensor | None, relu: bool) -> None:
    """Adds to a block of rows in place, and takes its ReLU."""
    for other in (addend, bias):
        if other is not None:
            part.add_(other)
    if relu:
        part.relu_()


def multiply_in_blocks(
    rows: list[Tensor],
    weights: list[Tensor],
    factors: Tensor | None,
    addend: Tensor | None,
    bias: Tensor | None,
    relu: bool,
) -> Tensor:
    """`Backend.row_products`."""
    if rows[0].device.type != "cpu":
        is_first = bias is not None and factors is None and bias.dtype == rows[0].dtype
        result = _multiply_at_once(rows, weights, bias if is_first else None)
        if factors is not None:
            result.mul_(factors)
        finish_rows(result, addend, None if is_first else bias, relu)
        return result
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


def _multiply_at_once(rows: list[Tensor], weights: list[Tensor], bias: Tensor | None) -> Tensor:
    """On a GPU, where it is launches that cost: as few operations as there are."""
    result = torch.mm(rows[0], weights[0]) if bias is None else torch.addmm(bias, rows[0], weights[0])
    for x, weight in zip(rows[1:], weights[1:], strict=True):
        result.addmm_(x, weight)
    return result


def mask_of_relu(grad: Tensor, output: Tensor | None) -> Tensor:
    """Returns the gradient before a ReLU that gave `output`; None: there was none."""
    return grad if output is None else torch.ops.aten.threshold_backward(grad, output, 0)


def is_turned(weight: Tensor) -> bool:
    """Whether this matrix lies in memory as its transpose, as the weight of an `nn.Linear` does."""
    return not weight.is_contiguous()


def gradients_in_blocks(
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
    if grad.device.type != "cpu":
        masked = mask_of_relu(grad, output)
        found = _gradients_at_once(rows, weights, masked, factors, needs_rows, needs_weights)
        if needs_addend:  # an operation of PyTorch must not hand back what it was given
            found.append(masked.clone() if masked is grad else masked)
        return found
    d_rows = [x.new_empty(x.shape) if needs else None for x, needs in zip(rows, needs_rows, strict=True)]
    sums = [
        _WeightGradient(x, weight) if needs else None
        for x, weight, needs in zip(rows, weights, needs_weights, strict=True)
    ]
    turned = [weight.t().contiguous() if needs else None for weight, needs in zip(weights, needs_rows, strict=True)]
    d_bias = grad.new_zeros(grad.shape[1], dtype=sum_dtype(grad.dtype))
    d_addend = grad.new_empty(grad.shape) if needs_addend else None
    for block in row_blocks(grad):
        part = mask_of_relu(grad[block], None if output is None else output[block])
        if d_addend is not None:
            d_addend[block] = part
        d_bias.add_(part.sum(0, dtype=d_bias.dtype))
        if factors is not None:
            part = part * factors[block]
        for x, weight_OI, d_x, total in zip(rows, turned, d_rows, sums, strict=True):
            if total is not None:
                total.add(x[block], part)
            if d_x is not None and weight_OI is not None:
                torch.mm(part, weight_OI, out=d_x[block])
    found = [d_x for d_x in d_rows if d_x is not None]
    found += [total.result() for total in sums if total is not None]
    return [*found, d_bias.to(grad.dtype), *([] if d_addend is None else [d_addend])]


def _gradients_at_once(
    rows: list[Tensor],
    weights: list[Tensor],
    masked: Tensor,
    factors: Tensor | None,
    needs_rows: Sequence[bool],
    needs_weights: Sequence[bool],
) -> list[Tensor]:
    """As `_multiply_at_once`; of the gradient before the ReLU."""
    d_bias = masked.sum(0, dtype=sum_dtype(masked.dtype)).to(masked.dtype)
    scaled = masked if factors is None else masked * factors
    found = [torch.mm(scaled, weight.t()) for weight, needs in zip(weights, needs_rows, strict=True) if needs]
    for x, weight, needs in zip(rows, weights, needs_weights, strict=True):
        if needs:
            found.append(torch.mm(scaled.t(), x) if is_turned(weight) else torch.mm(x.t(), scaled))
    return [*found, d_bias]


class _WeightGradient:
    """`x.t() @ grad`, summed over blocks of rows, in the layout of the weight.

    MKL takes longer if the wider of the two is the transposed one: mostly 1.1 to 1.2 times up to 256 columns, 1.3 to 2
    times for 602 by 128 to 41. The product is then made the other way round, and turned at its end.
    """

    def __init__(self, x: Tensor, weight: Tensor) -> None:
        num_inputs, num_outputs = weight.shape
        self._is_turned = is_turned(weight)
        self._by_grad = num_inputs > num_outputs or (num_inputs == num_outputs and self._is_turned)
        shape = (num_outputs, num_inputs) if self._by_grad else (num_inputs, num_outputs)
        self._dtype = x.dtype
        self._sum = x.new_zeros(shape, dtype=sum_dtype(x.dtype))

    def add(self, x: Tensor, grad: Tensor) -> None:
        factors = (grad.t(), x) if self._by_grad else (x.t(), grad)
        if self._sum.dtype == self._dtype:
            self._sum.addmm_(*factors)
        else:
            self._sum += torch.mm(*factors)

    def result(self) -> Tensor:
        """(O, I) where the weight is turned, (I, O) else; contiguous."""
        total = self._sum.to(self._dtype)
        return total if self._by_grad == self._is_turned else total.t().contiguous()
