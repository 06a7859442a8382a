# SPDX-License-Identifier: Apache-2.0
"""From tensors to the kernels of `product_kernels`: which products they take, how weights are packed, whose sums."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dgl_hybrid.ops.cpu import matrix_unit, matrix_unit_kernels
from dgl_hybrid.ops.cpu.host import vector_unit
from dgl_hybrid.ops.cpu.ir import Kind
from dgl_hybrid.ops.cpu.launch import KINDS, address, run
from dgl_hybrid.ops.cpu.memory import goes_past_cache, new_tensor
from dgl_hybrid.ops.cpu.product_kernels import (
    GradientSpec,
    Matrix,
    Panels,
    ProductSpec,
    emit_gradients,
    emit_products,
)
from dgl_hybrid.ops.cpu.tasks import cut_evenly, cut_for_sums
from dgl_hybrid.ops.row_blocks import is_turned

MAX_COLUMNS = 2048
"""Of an operand; wider ones are no rows of a layer, and PyTorch multiplies them as fast."""
_MIN_REGISTER_BYTES = 32
_MIN_FILLED = 0.7
"""Of what registers of the matrix unit hold, which multiply what fills them up, too."""
_ENTRIES_ON_VECTORS, _ENTRIES_ON_MATRIX_UNIT, _ENTRIES_ON_PYTORCH = (3.3, 90), (5.0, 120), (2.5, 0)
"""What a product of rows by their entries takes, forward and its gradient of the weight: of an entry, and of a row
besides (what a kernel does in its one pass takes passes of its own), in columns of a product of all entries
(`benchmarks/ops/entries.py`)."""
_NOTHING = torch.empty(0)
"""Parts that nobody asks for."""
_MIN_GRADIENT_COLUMNS = 96
"""Below that, cutting rows into parts takes longer than what is gained: 0.8 times as fast with 40 columns, 1.0 to 1.4
with 128, 1.5 with 256."""


def are_served(
    rows: Sequence[Tensor],
    weights: Sequence[Tensor],
    *,
    of_result: Sequence[Tensor | None] = (),
    factors: Tensor | None = None,
    bias: Tensor | None = None,
) -> bool:
    """Whether the kernels multiply these matrices: not where the machine has no wide vectors, nor what does not fit
    together, of which PyTorch says what is wrong.

    Args:
        of_result: Others that must have the shape of the result.
    """
    shape = (len(rows[0]), weights[0].shape[-1])
    fit = (
        all(x is None or x.is_cpu for x in (*rows, *weights, *of_result, factors, bias))
        and len(rows) == len(weights)
        and all(len(x) == shape[0] and x.shape[-1] == len(w) for x, w in zip(rows, weights))
        and all(w.shape[-1] == shape[1] for w in weights)
        and all(x is None or x.shape == shape for x in of_result)
        and (factors is None or factors.shape == (shape[0], 1))
        and (bias is None or bias.shape == shape[1:])
    )
    dtype, tensors = rows[0].dtype, (*rows, *weights)
    others = (*of_result, factors, bias)
    return (
        fit
        and dtype in (torch.float32, torch.float64)
        and vector_unit().register_bytes >= _MIN_REGISTER_BYTES
        and all(x.dim() == 2 and x.dtype == dtype and 0 < x.shape[1] <= MAX_COLUMNS for x in tensors)
        and all(x is None or x.dtype == dtype for x in others)
        and shape[0] > 0
    )


def most_entries(num_columns: int, dtype: torch.dtype) -> float:
    """Up to what share of entries that are not zero rows are multiplied faster by these (`SparseRows`) than by all.

    Says the same on one machine, so that results do not depend on what happened to be faster in a run.
    """
    on_unit = (
        dtype == torch.float32
        and num_columns <= MAX_COLUMNS
        and matrix_unit.has_matrix_unit()
        and matrix_unit_kernels.num_steps(num_columns) <= matrix_unit_kernels.MAX_STEPS
    )
    if on_unit:
        of_entry, of_row = _ENTRIES_ON_MATRIX_UNIT
    elif vector_unit().register_bytes >= _MIN_REGISTER_BYTES and num_columns <= MAX_COLUMNS:
        of_entry, of_row = _ENTRIES_ON_VECTORS
    else:
        of_entry, of_row = _ENTRIES_ON_PYTORCH
    return max(0.0, (num_columns - of_row) / (of_entry * max(num_columns, 1)))


def multiply(
    rows: list[Tensor],
    weights: list[Tensor],
    factors: Tensor | None,
    addend: Tensor | None,
    bias: Tensor | None,
    relu: bool,
) -> Tensor:
    """`Backend.row_products`, where `are_served`."""
    num_rows, num_columns = len(rows[0]), weights[0].shape[1]
    out = new_tensor((num_rows, num_columns), rows[0].dtype)
    kind = KINDS[out.dtype]
    panels = Panels(kind, num_columns)
    rows = [_readable(x) for x in rows]
    packed = [_pack(weight, panels) for weight in weights]
    factors, addend, bias = (None if x is None else x.contiguous() for x in (factors, addend, bias))
    spec = ProductSpec(
        kind,
        tuple(_matrix(x) for x in rows),
        num_columns,
        factors is not None,
        addend is not None,
        bias is not None,
        relu,
        goes_past_cache(out, 0, num_columns),
    )
    arguments: list[int | float] = [address(x) for x in (*rows, *packed, factors, addend, bias, out)]
    least = matrix_unit.least_bits(matrix_unit.LEAST_OPERAND)
    parts = _cut(weights, least) if _are_for_matrix_unit(weights) else None
    if parts is not None:
        run(matrix_unit_kernels.emit_products, (spec,), cut_evenly(num_rows), [*arguments, least, address(parts)])
    else:
        run(emit_products, (spec,), cut_evenly(num_rows), arguments)
    return out


def gradients(
    rows: list[Tensor],
    weights: list[Tensor],
    grad: Tensor,
    output: Tensor | None,
    factors: Tensor | None,
    needs_rows: Sequence[bool],
    needs_weights: Sequence[bool],
    needs_addend: bool,
) -> list[Tensor]:
    """`Backend.row_products_backward`, where `are_served`."""
    num_rows, num_columns = grad.shape
    kind: Kind = KINDS[grad.dtype]
    panels = Panels(kind, num_columns)
    rows, grad = [_readable(x) for x in rows], _readable(grad)
    output, factors = (None if x is None else x.contiguous() for x in (output, factors))
    bounds = cut_for_sums(num_rows, panels.padded)
    num_tasks = len(bounds) - 1
    d_rows = [new_tensor(tuple(x.shape), x.dtype) if needed else None for x, needed in zip(rows, needs_rows)]
    turned = [
        _pack(weight.t(), Panels(kind, weight.shape[0])) if needed else None
        for weight, needed in zip(weights, needs_rows)
    ]
    sums = [
        grad.new_zeros(num_tasks, x.shape[1], panels.padded) if needed else None
        for x, needed in zip(rows, needs_weights)
    ]
    d_bias = grad.new_empty(num_tasks, num_columns)
    d_addend = new_tensor((num_rows, num_columns), grad.dtype) if needs_addend else None
    spec = GradientSpec(
        kind,
        tuple(_matrix(x) for x in rows),
        _matrix(grad),
        output is not None,
        factors is not None,
        needs_addend,
        tuple(needs_rows),
        tuple(needs_weights),
        tuple(d_x is not None and goes_past_cache(d_x, 0, d_x.shape[1]) for d_x in d_rows),
    )
    operands = (*rows, grad, output, factors, d_addend, d_bias, *d_rows, *turned, *sums)
    arguments: list[int | float] = [address(x) for x in operands]
    least = [matrix_unit.least_bits(x) for x in (matrix_unit.LEAST_GRADIENT, matrix_unit.LEAST_OPERAND)]
    cut: list[Tensor | None] = [None]
    if _MIN_GRADIENT_COLUMNS <= num_columns <= matrix_unit_kernels.MAX_GRADIENT_COLUMNS and _are_for_matrix_unit(
        [w.t() for w in weights]
    ):
        cut = [_cut([w.t()], least[1]) if needed else _NOTHING for w, needed in zip(weights, needs_rows)]
    if all(parts is not None for parts in cut):
        arguments += [*least, *map(address, cut)]
        run(matrix_unit_kernels.emit_gradients, (spec,), bounds, arguments)
    else:
        run(emit_gradients, (spec,), bounds, arguments)
    found = [d_x for d_x in d_rows if d_x is not None]
    for weight, parts in zip(weights, sums):
        if parts is not None:
            total = (parts[0] if num_tasks == 1 else parts.sum(0))[:, :num_columns]
            found.append((total.t() if is_turned(weight) else total).contiguous())
    return [*found, d_bias[0] if num_tasks == 1 else d_bias.sum(0), *([] if d_addend is None else [d_addend])]


def _readable(x: Tensor) -> Tensor:
    """Rows whose elements lie side by side."""
    return x if x.stride(1) == 1 and x.stride(0) >= x.shape[1] else x.contiguous()


def _matrix(x: Tensor) -> Matrix:
    return Matrix(x.shape[1], x.stride(0) if len(x) > 1 else x.shape[1])


def _pack(weight: Tensor, panels: Panels) -> Tensor:
    """(A, O) to (panels, A, columns of a panel), zeros behind the last."""
    missing = panels.count * panels.width - weight.shape[1]
    padded = F.pad(weight, (0, missing)) if missing else weight
    return padded.reshape(len(weight), panels.count, panels.width).permute(1, 0, 2).contiguous()


def _are_for_matrix_unit(weights: Sequence[Tensor]) -> bool:
    """Whether the matrix unit multiplies rows by such weights, if their numbers may be cut."""
    return (
        weights[0].dtype == torch.float32
        and matrix_unit.has_matrix_unit()
        and sum(matrix_unit_kernels.num_steps(len(weight)) for weight in weights) <= matrix_unit_kernels.MAX_STEPS
        and all(matrix_unit_kernels.filled_share(*weight.shape) >= _MIN_FILLED for weight in weights)
    )


def _cut(weights: Sequence[Tensor], least: int) -> Tensor | None:
    """(A, O) of each to (registers of columns, steps of all, parts, rows of a register, its columns, 2): bfloat16.

    Args:
        least: From `matrix_unit.least_bits`.

    Returns:
        None if a number must not be cut.
    """
    steps = [matrix_unit_kernels.num_steps(len(weight)) for weight in weights]
    num_registers, of_step = matrix_unit_kernels.num_registers(weights[0].shape[1]), matrix_unit.STEP_PARTS
    parts = torch.empty(num_registers, sum(steps), of_step, dtype=torch.bfloat16)
    are_fit, first, bounds = ctypes.c_int32(1), 0, np.array([0, num_registers], dtype=np.int64)
    for weight, count in zip(weights, steps):
        rows = weight.contiguous()
        run(
            matrix_unit_kernels.emit_parts,
            tuple(weight.shape),
            bounds,
            [address(rows), least, address(parts, first * of_step), sum(steps), ctypes.addressof(are_fit)],
        )
        first += count
    return parts if are_fit.value else None
