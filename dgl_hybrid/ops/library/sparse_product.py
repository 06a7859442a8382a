# SPDX-License-Identifier: Apache-2.0
"""sparse_product: constant rows, most of whose entries are zero, times a dense weight; kernels are those of spmm.

The rows come twice: by row, for the product, and by block of rows and column, for the gradient of the weight. Taken by
column alone, the gradient would read its operand's rows in no order over all of memory; within a block they stay in
the cache, and the blocks' sums are added up at the end.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from dgl_hybrid.ops.backend import choose_backend
from dgl_hybrid.ops.library.registration import Grads, num_rows_of, read_rows, register, registered
from dgl_hybrid.ops.row_blocks import finish_rows, mask_of_relu, row_blocks


def _product(
    rows: list[Tensor],
    columns: list[Tensor],
    values: Tensor,
    column_values: Tensor,
    weight: Tensor,
    num_blocks: int,
    addend: Tensor | None,
    bias: Tensor | None,
    relu: bool,
) -> Tensor:
    del columns, column_values, num_blocks  # for the gradients only
    backend = choose_backend(weight)
    out, _ = backend.spmm(read_rows(rows), weight.contiguous().unsqueeze(1), values.unsqueeze(1), "sum")
    out = out.squeeze(1)
    if addend is not None or bias is not None or relu:
        for block in row_blocks(out):
            finish_rows(out[block], None if addend is None else addend[block], bias, relu)
    return out


def _product_meta(
    rows: list[Tensor], columns: list[Tensor], values: Tensor, column_values: Tensor, weight: Tensor, *others: Any
) -> Tensor:
    return weight.new_empty(num_rows_of(rows), weight.shape[1])


def _transposed(
    rows: list[Tensor], columns: list[Tensor], values: Tensor, column_values: Tensor, x: Tensor, num_blocks: int
) -> Tensor:
    del rows, values
    backend = choose_backend(x)
    out, _ = backend.spmm(read_rows(columns), x.contiguous().unsqueeze(1), column_values.unsqueeze(1), "sum")
    out = out.squeeze(1)
    return out if num_blocks == 1 else out.view(num_blocks, len(out) // num_blocks, x.shape[1]).sum(0)


def _transposed_meta(
    rows: list[Tensor], columns: list[Tensor], values: Tensor, column_values: Tensor, x: Tensor, num_blocks: int
) -> Tensor:
    return x.new_empty(num_rows_of(columns) // num_blocks, x.shape[1])


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, columns, values, column_values, _, ctx.num_blocks, *others = inputs
    has_relu = bool(others) and others[-1]
    ctx.save_for_backward(*rows, *columns, values, column_values, output if has_relu else None)


def _saved(ctx: Any) -> tuple[list[Tensor], list[Tensor], Tensor, Tensor]:
    indptr, indices, column_indptr, column_indices, values, column_values, _ = ctx.saved_tensors
    return [indptr, indices], [column_indptr, column_indices], values, column_values


def _product_backward(ctx: Any, grad: Tensor) -> Grads:
    *_, needs_weight, _, needs_addend, needs_bias, _ = ctx.needs_input_grad
    grad = mask_of_relu(grad, ctx.saved_tensors[-1])
    d_weight = registered("sparse_product_transposed")(*_saved(ctx), grad, ctx.num_blocks) if needs_weight else None
    d_bias = grad.sum(0) if needs_bias else None
    return [None, None], [None, None], None, None, d_weight, None, grad if needs_addend else None, d_bias, None


def _transposed_backward(ctx: Any, grad: Tensor) -> Grads:
    d_x = registered("sparse_product")(*_saved(ctx), grad, ctx.num_blocks, None, None, False)
    return [None, None], [None, None], None, None, d_x, None


_OPERANDS = "Tensor[] rows, Tensor[] columns, Tensor values, Tensor column_values"

register(
    f"sparse_product({_OPERANDS}, Tensor weight, int num_blocks, Tensor? addend, Tensor? bias, bool relu) -> Tensor",
    _product,
    _product_meta,
    _setup,
    _product_backward,
)
register(
    f"sparse_product_transposed({_OPERANDS}, Tensor x, int num_blocks) -> Tensor",
    _transposed,
    _transposed_meta,
    _setup,
    _transposed_backward,
)


@register_flop_formula([torch.ops.dgl_hybrid.sparse_product, torch.ops.dgl_hybrid.sparse_product_transposed])
def _flops(
    rows: Any, columns: Any, values: Any, column_values: Any, operand: Any, *args: Any, out_shape: Any, **kwargs: Any
) -> int:
    """Multiplications and additions with entries that are there; arguments come as shapes."""
    return int(2 * values[0] * operand[1])
