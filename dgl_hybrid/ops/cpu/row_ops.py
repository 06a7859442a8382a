# SPDX-License-Identifier: Apache-2.0
"""From tensors to the kernels of `row_kernels`: in columns that registers hold, and in plain PyTorch what has none."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dgl_hybrid.ops import plain_rows
from dgl_hybrid.ops.cpu.attention import head_blocks
from dgl_hybrid.ops.cpu.lanes import column_blocks, summed_elements
from dgl_hybrid.ops.cpu.launch import KINDS, address, dropout_arguments, run
from dgl_hybrid.ops.cpu.memory import goes_past_cache, new_tensor
from dgl_hybrid.ops.cpu.row_kernels import (
    EluSpec,
    RowDropoutSpec,
    emit_add_rows,
    emit_biased_elu,
    emit_biased_elu_backward,
    emit_head_terms,
    emit_head_terms_backward,
    emit_merge_rows,
    emit_row_dropout,
)
from dgl_hybrid.ops.cpu.tasks import cut_evenly, cut_for_sums
from dgl_hybrid.ops.edge_dropout import EdgeDropout
from dgl_hybrid.ops.row_mask import multiply_by_mask

_MAX_ELEMENTS = 512
"""Of a row that a kernel goes through in one go without accumulators: only code."""
_DTYPES = (torch.float32, torch.float64)


def drop(x: Tensor, ids: Tensor, keys: tuple[int, int], p: float) -> Tensor:
    """`Backend.drop_rows`."""
    if x.dtype not in _DTYPES or p == 1.0 or x.numel() == 0:
        return multiply_by_mask(x, ids, keys, p)
    out = new_tensor(tuple(x.shape), x.dtype)
    num_columns = x.shape[1]
    dropout = EdgeDropout(p, keys, ids)
    for column, block in column_blocks(1, num_columns, _MAX_ELEMENTS):
        packed, _keep = dropout_arguments(dropout, num_columns, column)
        arguments: list[int | float] = [address(x, column), address(out, column), num_columns, *packed]
        spec = RowDropoutSpec(KINDS[x.dtype], block, goes_past_cache(out, column, block.size))
        run(emit_row_dropout, (spec,), cut_evenly(len(x)), arguments)
    return out


def add_rows(out: Tensor, targets: Tensor, rows: Tensor, factors: Tensor | None) -> None:
    """`Backend.add_rows`, by one thread: rows of other threads might have the same target."""
    are_alike = all(t is None or t.dtype == out.dtype for t in (rows, factors))
    are_rows = rows.dim() == 2 and rows.stride(1) == 1 and out.is_contiguous()
    if out.dtype not in _DTYPES or not are_alike or not are_rows or rows.numel() == 0:
        plain_rows.add_rows(out, targets, rows, factors)
        return
    targets, factors = targets.contiguous(), None if factors is None else factors.contiguous()
    num_rows, num_columns = rows.shape
    stride = rows.stride(0) if num_rows > 1 else num_columns
    for column, block in column_blocks(1, num_columns, _MAX_ELEMENTS):
        arguments: list[int | float] = [address(rows, column), address(targets), address(factors), address(out, column)]
        arguments += [stride, num_columns, num_rows - 1]
        whole = np.array([0, num_rows], dtype=np.int64)
        run(emit_add_rows, (KINDS[out.dtype], KINDS[targets.dtype], block, factors is not None), whole, arguments)


def merge_rows(out: Tensor, targets: Tensor, rows: Tensor, keeps: Tensor, adds: Tensor) -> None:
    """`Backend.merge_rows`."""
    if not _have_kernels(rows, out, keeps, adds) or not out.is_contiguous():
        plain_rows.merge_rows(out, targets, rows, keeps, adds)
        return
    targets, rows, keeps, adds = (t.contiguous() for t in (targets, rows, keeps, adds))
    num_rows, heads, width = rows.shape
    for head, block in head_blocks(heads, width, _MAX_ELEMENTS, heads):
        arguments: list[int | float] = [address(rows, head * width), address(targets), address(out, head * width)]
        arguments += [address(keeps, head), address(adds, head), heads * width, heads, num_rows - 1]
        run(emit_merge_rows, (KINDS[out.dtype], KINDS[targets.dtype], block), cut_evenly(num_rows), arguments)


def biased_elu(x: Tensor, bias: Tensor | None) -> Tensor:
    """`Backend.biased_elu`."""
    if x.dtype not in _DTYPES or x.numel() == 0 or (bias is not None and bias.dtype != x.dtype):
        return plain_rows.biased_elu(x, bias)
    out = new_tensor(tuple(x.shape), x.dtype)
    for column, block in column_blocks(1, x.shape[1], _MAX_ELEMENTS):
        spec = EluSpec(KINDS[x.dtype], block, goes_past_cache(out, column, block.size), bias is not None)
        arguments: list[int | float] = [address(t, column) for t in (x, bias, out)]
        run(emit_biased_elu, (spec,), cut_evenly(len(x)), [*arguments, x.shape[1]])
    return out


def biased_elu_backward(grad: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    """`Backend.biased_elu_backward`."""
    if out.dtype not in _DTYPES or out.numel() == 0 or grad.dtype != out.dtype:
        return plain_rows.biased_elu_backward(grad, out)
    num_rows, num_columns = out.shape
    dx, bounds = new_tensor((num_rows, num_columns), out.dtype), cut_for_sums(num_rows, num_columns)
    sums = out.new_zeros(len(bounds) - 1, num_columns)
    for column, block in column_blocks(1, num_columns, summed_elements(out.dtype)):
        spec = EluSpec(KINDS[out.dtype], block, goes_past_cache(dx, column, block.size))
        arguments: list[int | float] = [address(t, column) for t in (grad, out, dx, sums)]
        run(emit_biased_elu_backward, (spec,), bounds, [*arguments, num_columns])
    return dx, _total(sums)


def head_terms(x: Tensor, attn_l: Tensor, attn_r: Tensor, num_dst: int) -> tuple[Tensor, Tensor]:
    """`Backend.head_terms`."""
    if not _have_kernels(x, attn_l, attn_r):
        return plain_rows.head_terms(x, attn_l, attn_r, num_dst)
    x, attn_l, attn_r = x.contiguous(), attn_l.contiguous(), attn_r.contiguous()
    num_rows, heads, width = x.shape
    el, er = x.new_empty(num_rows, heads, 1), x.new_empty(num_dst, heads, 1)
    for head, block in head_blocks(heads, width, _MAX_ELEMENTS, heads):
        arguments: list[int | float] = [address(t, head * width) for t in (x, attn_l, attn_r)]
        arguments += [address(el, head), address(er, head), heads * width, heads, num_dst]
        run(emit_head_terms, (KINDS[x.dtype], block), cut_evenly(num_rows), arguments)
    return el, er


def head_terms_backward(
    x: Tensor, attn_l: Tensor, attn_r: Tensor, d_el: Tensor, d_er: Tensor, dx: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`Backend.head_terms_backward`."""
    if not _have_kernels(x, attn_l, attn_r, d_el, d_er, *(() if dx is None else (dx,))):
        return plain_rows.head_terms_backward(x, attn_l, attn_r, d_el, d_er, dx)
    x, attn_l, attn_r, d_el, d_er = (t.contiguous() for t in (x, attn_l, attn_r, d_el, d_er))
    num_rows, heads, width = x.shape
    bounds = cut_for_sums(num_rows, heads * width)
    sums = x.new_zeros(2, len(bounds) - 1, heads * width)
    for column, block in column_blocks(heads, width, summed_elements(x.dtype)):
        head = column // width
        arguments: list[int | float] = [address(t, column) for t in (x, attn_l, attn_r)]
        arguments += [address(d_el, head), address(d_er, head)]
        arguments += [address(t, column) for t in (dx, sums[0], sums[1])]
        arguments += [heads * width, heads, len(d_er)]
        run(emit_head_terms_backward, (KINDS[x.dtype], block, dx is not None), bounds, arguments)
    return _total(sums[0]).view(attn_l.shape), _total(sums[1]).view(attn_r.shape)


def _have_kernels(x: Tensor, *others: Tensor) -> bool:
    """Whether these are rows (S, H, D) of a width and dtype for kernels, and all of one dtype."""
    return (
        x.dim() == 3
        and x.dtype in _DTYPES
        and x.numel() > 0
        and x.shape[2] <= _MAX_ELEMENTS
        and all(t.dtype == x.dtype for t in others)
    )


def _total(of_tasks: Tensor) -> Tensor:
    return of_tasks[0] if len(of_tasks) == 1 else of_tasks.sum(0)
