# SPDX-License-Identifier: Apache-2.0
"""Runs the kernels of fused gatv2."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dgl_hybrid.ops.cpu.attention import (
    TOTAL_OF_NONE_IN_PART,
    TOTAL_OF_NONE_IN_ROW,
    Attended,
    fill_statistics,
    head_blocks,
    put_together,
    spec_of,
)
from dgl_hybrid.ops.cpu.gatv2_kernels import (
    emit_backward_by_destination,
    emit_backward_by_source,
    emit_forward,
)
from dgl_hybrid.ops.cpu.ir import Kind
from dgl_hybrid.ops.cpu.lanes import Block, summed_elements
from dgl_hybrid.ops.cpu.launch import RowPlan, Rows, address, dropout_arguments, run
from dgl_hybrid.ops.cpu.memory import new_tensor
from dgl_hybrid.ops.cpu.reductions import Operand, sum_rows
from dgl_hybrid.ops.edge_dropout import EdgeDropout


@dataclass(frozen=True)
class _Scores:
    """What gives the logits: attention (H, D) · leaky_relu(fixed[row] + moving[neighbour]), of (., H, D) both."""

    fixed: Tensor
    moving: Tensor
    attention: Tensor
    slope: float

    def arguments(self, head: int) -> list[int | float]:
        """The kernels' arguments for the heads from `head` on."""
        num_heads, width = self.moving.shape[1:]
        first, stride = head * width, num_heads * width
        fixed, moving, attention = (address(rows, first) for rows in (self.fixed, self.moving, self.attention))
        return [fixed, stride, moving, stride, attention, self.slope]

    def blocks(self) -> list[tuple[int, Block]]:
        """The heads that kernels handle at once."""
        num_heads, width = self.moving.shape[1:]
        return list(head_blocks(num_heads, width, summed_elements(self.moving.dtype), num_heads))


def attend(
    plan: RowPlan,
    x_src: Tensor,
    x_dst: Tensor,
    attention: Tensor,
    slope: float,
    dropout: EdgeDropout | None,
) -> tuple[Tensor, Tensor]:
    """`(out (N, H, D), lse (N, H))`."""
    scores = _Scores(x_dst, x_src, attention, slope)
    rows = _forward(plan.index, plan.ordinary, scores, dropout, TOTAL_OF_NONE_IN_ROW)
    parts = None
    if plan.has_long_rows:
        scores = replace(scores, fixed=x_dst[plan.long_rows][plan.long_row_of_part])
        parts = _forward(plan.index, plan.parts, scores, dropout, TOTAL_OF_NONE_IN_PART)
    out, lse, _ = put_together(plan, rows, parts)
    return out, lse


def backward(
    plan: RowPlan,
    out_plan: RowPlan,
    x_src: Tensor,
    x_dst: Tensor,
    attention: Tensor,
    out: Tensor,
    lse: Tensor,
    grad: Tensor,
    slope: float,
    dropout: EdgeDropout | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`(dx_src, dx_dst, d_attention)`."""
    scores = _Scores(x_src, x_dst, attention, slope)
    statistics = new_tensor((len(x_dst), 2, x_src.shape[1]), x_src.dtype)
    for head, block in scores.blocks():
        fill_statistics(statistics, head, block, None, lse, grad, out)
    d_edges = new_tensor((plan.whole.num_entries, x_src.shape[1]), x_src.dtype)
    dx_src = _backward_by_source(out_plan.index, out_plan.ordinary, grad, statistics, scores, d_edges, dropout)
    if out_plan.has_long_rows:
        part_scores = replace(scores, fixed=x_src[out_plan.long_rows[out_plan.long_row_of_part]])
        dx_parts = _backward_by_source(out_plan.index, out_plan.parts, grad, statistics, part_scores, d_edges, dropout)
        dx_src[out_plan.long_rows] = sum_rows(out_plan.merger, Operand(dx_parts, by_edge=True))

    scores = _Scores(x_dst, x_src, attention, slope)
    dx_dst = new_tensor(tuple(x_dst.shape), x_dst.dtype)
    partial = _backward_by_destination(plan.index, plan.ordinary, scores, d_edges, dx_dst)
    if plan.has_long_rows:
        part_scores = replace(scores, fixed=x_dst[plan.long_rows][plan.long_row_of_part])
        dx_parts = new_tensor(tuple(part_scores.fixed.shape), x_dst.dtype)
        more = _backward_by_destination(plan.index, plan.parts, part_scores, d_edges, dx_parts)
        partial = torch.cat([partial, more])
        dx_dst[plan.long_rows] = sum_rows(plan.merger, Operand(dx_parts, by_edge=True))
    one_row = RowPlan(torch.tensor([0, len(partial)]))
    d_attention = sum_rows(one_row, Operand(partial, by_edge=True))[0]
    return dx_src, dx_dst, d_attention.to(attention.dtype)


def _forward(index: Kind, rows: Rows, scores: _Scores, dropout: EdgeDropout | None, total_of_none: float) -> Attended:
    x, (num_heads, width) = scores.moving, scores.moving.shape[1:]
    result = Attended.room(rows.num_rows, x)
    for head, block in scores.blocks():
        drop, _keep = dropout_arguments(dropout, num_heads, head)
        arguments = [
            *rows.arguments(),
            *scores.arguments(head),
            *[address(x, head * width), num_heads * width, num_heads],
            *[address(result.out, head * width), address(result.largest, head), address(result.total, head)],
            total_of_none,
            *drop,
        ]
        run(emit_forward, (spec_of(rows, index, x.dtype, block, dropout),), rows.bounds, arguments)
    return result


def _backward_by_source(
    index: Kind,
    rows: Rows,
    grad: Tensor,
    statistics: Tensor,
    scores: _Scores,
    d_edges: Tensor,
    dropout: EdgeDropout | None,
) -> Tensor:
    """Dx of the rows, which are `scores.fixed`; writes `d_edges`."""
    x, (num_heads, width) = scores.fixed, scores.fixed.shape[1:]
    dx = new_tensor(tuple(x.shape), x.dtype)
    for head, block in scores.blocks():
        drop, _keep = dropout_arguments(dropout, num_heads, head)
        arguments = [
            *rows.arguments(),
            *scores.arguments(head),
            *[address(x, head * width), address(grad, head * width), num_heads * width, num_heads],
            *[address(statistics, head), address(statistics, num_heads + head), 2 * num_heads],
            *[address(dx, head * width), address(d_edges, head)],
            *drop,
        ]
        run(emit_backward_by_source, (spec_of(rows, index, x.dtype, block, dropout),), rows.bounds, arguments)
    return dx


def _backward_by_destination(index: Kind, rows: Rows, scores: _Scores, d_edges: Tensor, dx: Tensor) -> Tensor:
    """Writes `dx`; returns (T, H, D) float64: what each task adds to the gradient of the attention vector."""
    num_heads, width = dx.shape[1:]
    partial = torch.zeros(rows.num_tasks, num_heads, width, dtype=torch.float64)
    for head, block in scores.blocks():
        arguments = [
            *rows.arguments(),
            *scores.arguments(head),
            *[address(d_edges, head), num_heads],
            *[address(dx, head * width), num_heads * width, address(partial, head * width)],
        ]
        run(emit_backward_by_destination, (spec_of(rows, index, dx.dtype, block, None),), rows.bounds, arguments)
    return partial
