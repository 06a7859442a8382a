# SPDX-License-Identifier: Apache-2.0
"""Runs the kernels of fused gat: some heads at a time, of which rows are packed where all of them leave the cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from dgl_hybrid.ops.backend import PositiveSums
from dgl_hybrid.ops.cpu.attention import (
    TOTAL_OF_NONE_IN_PART,
    TOTAL_OF_NONE_IN_ROW,
    Attended,
    fill_statistics,
    head_blocks,
    put_together,
    spec_of,
)
from dgl_hybrid.ops.cpu.gat_kernels import emit_backward_by_source, emit_forward
from dgl_hybrid.ops.cpu.ir import Kind
from dgl_hybrid.ops.cpu.lanes import holds_two_sums, summed_elements
from dgl_hybrid.ops.cpu.launch import RowPlan, Rows, address, dropout_arguments, run
from dgl_hybrid.ops.cpu.memory import goes_past_cache, new_tensor
from dgl_hybrid.ops.cpu.reductions import Columns, Operand, sum_rows
from dgl_hybrid.ops.edge_dropout import EdgeDropout

_LEAST_PACKED_READS = 100
"""Of each row on average, for heads to be packed and run over one after another: every row's maximum, exponentials and
sums are then made anew for each, which costs as much as some thirty entries. With 200 it is 1.4 times as fast as all
heads at once (50,000 rows of 4 heads), with 30 to 50 as fast or slower."""
_LEAST_EARLY_BYTES = 16 << 20
"""Of all rows, to be asked for before they are summed: 8 MB of them are near as it is, and it takes 1.15 times as
long."""
_MAX_KEPT_BYTES = 64
"""Of an entry, in each buffer between the two passes: with more heads at once these would leave the cache."""


def attend(
    plan: RowPlan,
    x: Tensor,
    el: Tensor,
    er: Tensor,
    slope: float,
    dropout: EdgeDropout | None,
    *,
    with_positive: bool,
) -> tuple[Tensor, Tensor, PositiveSums | None]:
    """`(out (N, H, D), lse (N, H), positive)`."""
    rows = Attended.room(plan.num_rows, x, with_positive=with_positive)
    parts, er_parts = None, er
    if plan.has_long_rows:
        parts = Attended.room(plan.kept_parts.num_rows, x, with_positive=with_positive)
        er_parts = er[plan.long_rows][plan.long_row_of_part]
    for head, columns in _columns(x, plan.ordinary.num_entries):
        terms = el[:, head : head + columns.block.heads].contiguous()  # in a nearer cache than those of all heads
        for run_over, fixed, result, total_of_none in (
            (plan.kept_ordinary, er, rows, TOTAL_OF_NONE_IN_ROW),
            (plan.kept_parts, er_parts, parts, TOTAL_OF_NONE_IN_PART),
        ):
            if result is not None:
                _forward(plan.index, run_over, head, columns, terms, fixed, slope, dropout, total_of_none, result)
    return put_together(plan, rows, parts)


def backward(
    out_plan: RowPlan,
    x: Tensor,
    el: Tensor,
    er: Tensor,
    out: Tensor,
    lse: Tensor,
    positive: PositiveSums | None,
    grad: Tensor,
    slope: float,
    dropout: EdgeDropout | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`(dx, d_el, d_er)`; d_er is None without `positive`."""
    d_er = None if positive is None else torch.empty_like(er)
    sides = [(out_plan.kept_ordinary, x, el)]
    if out_plan.has_long_rows:
        of_parts = out_plan.long_rows[out_plan.long_row_of_part]
        sides.append((out_plan.kept_parts, x[of_parts], el[of_parts]))
    grads = [(new_tensor(tuple(own.shape), x.dtype), new_tensor(tuple(term.shape), x.dtype)) for _, own, term in sides]
    for head, columns in _columns(grad, out_plan.ordinary.num_entries):
        statistics = new_tensor((len(er), 3, columns.block.heads), x.dtype)
        fill_statistics(statistics, head, columns.block, er, lse, grad, out, positive, d_er, slope)
        for (rows, own, term), (dx, d_el) in zip(sides, grads, strict=True):
            _backward(out_plan.index, rows, own, head, columns, statistics, term, slope, dropout, dx, d_el)
    (dx, d_el), *grads_of_parts = grads
    for dx_parts, d_el_parts in grads_of_parts:
        dx[out_plan.long_rows] = sum_rows(out_plan.merger, Operand(dx_parts, by_edge=True))
        merged = sum_rows(out_plan.merger, Operand(d_el_parts.unsqueeze(-1), by_edge=True))
        d_el[out_plan.long_rows] = merged.squeeze(-1)
    return dx, d_el, d_er


def _columns(gathered: Tensor, num_reads: int) -> Iterator[tuple[int, Columns]]:
    """Yields all columns of (., H, D), whole heads at a time, with the first head: see `Operand.columns`."""
    operand, (num_heads, width) = Operand(gathered), gathered.shape[1:]
    size, max_heads = operand.slice_bytes // gathered.element_size(), _MAX_KEPT_BYTES // gathered.element_size()
    slices = list(head_blocks(num_heads, width, size, max_heads))
    if len(slices) > 1 and operand.is_packed(num_reads) and num_reads >= _LEAST_PACKED_READS * len(gathered):
        memory = new_tensor((len(gathered) * slices[0][1].size,), gathered.dtype)
        for head, block in slices:
            yield head, operand.packed(head * width, block, memory)
        return
    for head, block in head_blocks(num_heads, width, summed_elements(gathered.dtype), max_heads):
        yield head, operand.in_place(head * width, block)


def _forward(
    index: Kind,
    rows: Rows,
    head: int,
    columns: Columns,
    terms: Tensor,
    er: Tensor,
    slope: float,
    dropout: EdgeDropout | None,
    total_of_none: float,
    result: Attended,
) -> None:
    num_heads, width = result.out.shape[1:]
    block = columns.block
    positive_rows, positive_weights = result.positive or (None, None)
    sums = [result.out] if positive_rows is None else [result.out, positive_rows]
    spec = replace(
        spec_of(rows, index, terms.dtype, block, dropout),
        positive=result.positive is not None,
        past_cache=all(goes_past_cache(out, columns.begin, block.size) for out in sums),
        asks_early=_are_far(columns),
    )
    drop, _keep = dropout_arguments(dropout, num_heads, head)
    arguments = [
        *rows.arguments(),
        *[address(er, head), num_heads, address(terms), block.heads, slope],
        *[address(columns.x, columns.offset), columns.stride, num_heads * width, num_heads],
        *[address(result.out, head * width), address(result.largest, head), address(result.total, head)],
        total_of_none,
        *[address(positive_rows, head * width), address(positive_weights, head)],
        *drop,
    ]
    run(emit_forward, (spec,), rows.bounds, arguments)


def _backward(
    index: Kind,
    rows: Rows,
    x: Tensor,
    head: int,
    columns: Columns,
    statistics: Tensor,
    el: Tensor,
    slope: float,
    dropout: EdgeDropout | None,
    dx: Tensor,
    d_el: Tensor,
) -> None:
    num_heads, width = x.shape[1:]
    block = columns.block
    drop, _keep = dropout_arguments(dropout, num_heads, head)
    arguments = [
        *rows.arguments(),
        *[address(el, head), num_heads, address(statistics), 3 * block.heads, slope],
        *[address(x, head * width), address(columns.x, columns.offset), columns.stride, num_heads * width, num_heads],
        *[address(dx, head * width), address(d_el, head)],
        *drop,
    ]
    past_cache = goes_past_cache(dx, columns.begin, block.size)
    dots_at_end = holds_two_sums(block.size, x.dtype)
    spec = spec_of(rows, index, x.dtype, block, dropout)
    spec = replace(spec, past_cache=past_cache, asks_early=_are_far(columns), dots_at_end=dots_at_end)
    run(emit_backward_by_source, (spec,), rows.bounds, arguments)


def _are_far(columns: Columns) -> bool:
    """Whether these columns of all rows leave the near caches."""
    return len(columns.x) * columns.block.size * columns.x.element_size() >= _LEAST_EARLY_BYTES
