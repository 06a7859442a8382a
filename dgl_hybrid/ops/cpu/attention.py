# SPDX-License-Identifier: Apache-2.0
"""Runs the fused attention kernels: heads in blocks, long rows in parts, statistics between the passes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dgl_hybrid.ops.backend import PositiveSums
from dgl_hybrid.ops.cpu import gat_kernels, gatv2_kernels
from dgl_hybrid.ops.cpu.attention_kernels import AttentionSpec, emit_statistics
from dgl_hybrid.ops.cpu.ir import Kind
from dgl_hybrid.ops.cpu.lanes import Block, accumulator_elements
from dgl_hybrid.ops.cpu.launch import KINDS, RowPlan, Rows, address, dropout_arguments, run
from dgl_hybrid.ops.cpu.memory import new_tensor
from dgl_hybrid.ops.cpu.reductions import Operand, select_rows, sum_rows
from dgl_hybrid.ops.cpu.tasks import cut_evenly
from dgl_hybrid.ops.edge_dropout import EdgeDropout

_TOTAL_OF_NONE_IN_ROW = float("nan")
"""What the sum of exp counts as where all logits of a row are -inf: its softmax is 0 / 0, as in the reference."""

_TOTAL_OF_NONE_IN_PART = 1.0
"""The same in a part of a long row, whose result is then 0 and its lse -inf: it weighs nothing beside parts that have
a finite logit, and if none has one, the merger divides 0 by 0."""


_MAX_KEPT_BYTES = 64
"""Of an entry, in each buffer between the two passes of gat: with more heads at once these would leave the cache."""


@dataclass(frozen=True)
class _Scores:
    """What gives the logits: z = fixed[row] + moving[neighbour], of (., H) numbers, or (., H, D) with `attention`."""

    fixed: Tensor
    moving: Tensor
    moving_stride: int
    attention: Tensor | None
    slope: float

    def arguments(self, head: int, width: int) -> list[int | float]:
        """The kernels' arguments for the heads from `head` on."""
        first = head if self.attention is None else head * width
        attention = [] if self.attention is None else [address(self.attention, first)]
        fixed = [address(self.fixed, first), self.fixed[0].numel() if len(self.fixed) else 0]
        return [*fixed, address(self.moving, first), self.moving_stride, *attention, self.slope]

    def blocks(self, x: Tensor) -> Iterator[tuple[int, Block]]:
        """The heads that kernels handle at once, of rows like those of `x`."""
        num_heads, width = x.shape[1:]
        most = num_heads if self.attention is not None else _MAX_KEPT_BYTES // x.element_size()
        return _head_blocks(num_heads, width, accumulator_elements(x.dtype), most)

    def rows_of(self, plan: RowPlan) -> Rows:
        """The ordinary rows, in tasks as kernels need them."""
        return plan.kept_ordinary if self.attention is None else plan.ordinary

    def parts_of(self, plan: RowPlan) -> Rows:
        """The parts of long rows, likewise."""
        return plan.kept_parts if self.attention is None else plan.parts


def attend(
    plan: RowPlan,
    x: Tensor,
    left: Tensor,
    right: Tensor,
    attention: Tensor | None,
    slope: float,
    dropout: EdgeDropout | None,
    *,
    with_positive: bool = False,
) -> tuple[Tensor, Tensor, PositiveSums | None]:
    """`(out (N, H, D), lse (N, H), positive)` of gat from el and er, or of gatv2 from x_src, x_dst and `attention`."""
    scores = _Scores(right, left, left[0].numel() if len(left) else 0, attention, slope)
    rows = scores.rows_of(plan)
    out, positive = _new_sums(rows, x, with_positive)
    largest, total = _run_forward(plan.index, rows, x, scores, dropout, _TOTAL_OF_NONE_IN_ROW, out, positive)
    lse = _log_sum_exp(largest, total)
    if plan.has_long_rows:
        merger, row_of_part, parts = plan.merger, plan.long_row_of_part, scores.parts_of(plan)
        part_scores = _Scores(right[plan.long_rows][row_of_part], left, scores.moving_stride, attention, slope)
        out_parts, positive_parts = _new_sums(parts, x, with_positive)
        largest, total = _run_forward(
            plan.index, parts, x, part_scores, dropout, _TOTAL_OF_NONE_IN_PART, out_parts, positive_parts
        )
        # float64 between the parts: an error of lse is a relative error of everything in the row.
        lse_parts = total.double().log_().add_(largest).unsqueeze(-1)
        row_largest, _ = select_rows(merger, Operand(lse_parts, by_edge=True), least=False)
        weights = lse_parts.sub_(row_largest[row_of_part]).exp_()
        row_total = sum_rows(merger, Operand(weights, by_edge=True))
        weights = weights.div_(row_total[row_of_part]).squeeze(-1).to(x.dtype)
        out[plan.long_rows] = sum_rows(merger, Operand(out_parts, weights=weights, by_edge=True))
        lse[plan.long_rows] = row_total.log_().add_(row_largest).squeeze(-1).to(x.dtype)
        if positive is not None and positive_parts is not None:
            merged = sum_rows(merger, Operand(positive_parts.rows, weights=weights, by_edge=True))
            positive.rows[plan.long_rows] = merged
            parts_of_row = positive_parts.weights.mul_(weights).unsqueeze(-1)
            positive.weights[plan.long_rows] = sum_rows(merger, Operand(parts_of_row, by_edge=True)).squeeze(-1)
    return out, lse, positive


def gat_backward(
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
    statistics, d_er = _statistics(er, lse, grad, out, positive, slope)
    scores = _Scores(el, statistics, 3 * x.shape[1], None, slope)
    dx, d_el = _backward_by_source(out_plan, x, grad, statistics, scores, None, dropout)
    return dx, d_el, d_er


def gatv2_backward(
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
    num_heads, width = x_src.shape[1:]
    stride = num_heads * width
    statistics, _ = _statistics(None, lse, grad, out)
    d_edges = new_tensor((plan.whole.num_entries, num_heads), x_src.dtype)
    scores = _Scores(x_src, x_dst, stride, attention, slope)
    dx_src, _ = _backward_by_source(out_plan, x_src, grad, statistics, scores, d_edges, dropout)

    scores = _Scores(x_dst, x_src, stride, attention, slope)
    dx_dst = new_tensor(tuple(x_dst.shape), x_dst.dtype)
    partial = _backward_by_destination(plan.index, plan.ordinary, scores, d_edges, dx_dst)
    if plan.has_long_rows:
        fixed = x_dst[plan.long_rows][plan.long_row_of_part]
        dx_parts = new_tensor(tuple(fixed.shape), fixed.dtype)
        part_scores = _Scores(fixed, x_src, stride, attention, slope)
        more = _backward_by_destination(plan.index, plan.parts, part_scores, d_edges, dx_parts)
        partial = torch.cat([partial, more])
        dx_dst[plan.long_rows] = sum_rows(plan.merger, Operand(dx_parts, by_edge=True))
    one_row = RowPlan(torch.tensor([0, len(partial)]))
    d_attention = sum_rows(one_row, Operand(partial, by_edge=True))[0]
    return dx_src, dx_dst, d_attention.to(attention.dtype)


def _log_sum_exp(largest: Tensor, total: Tensor) -> Tensor:
    """Rounded once: the backward takes exp of it, so its absolute error is a relative one of the whole row."""
    return total.double().log_().add_(largest).to(largest.dtype)


def _head_blocks(num_heads: int, width: int, max_elements: int, most: int) -> Iterator[tuple[int, Block]]:
    """Cuts heads into blocks of whole heads, of at most `most` and so many elements, or of one head."""
    step = max(1, min(most, max_elements // max(1, width)))
    for head in range(0, num_heads, step):
        yield head, Block(min(step, num_heads - head), width)


def _spec(
    rows: Rows,
    index: Kind,
    dtype: torch.dtype,
    block: Block,
    dropout: EdgeDropout | None,
    *,
    positive: bool = False,
) -> AttentionSpec:
    return AttentionSpec(
        KINDS[dtype],
        index,
        block,
        rows.has_edge_ids,
        dropout is not None,
        dropout is not None and dropout.edge_keys is not None,
        positive,
    )


def _new_sums(rows: Rows, x: Tensor, with_positive: bool) -> tuple[Tensor, PositiveSums | None]:
    """Room for `out` and what goes with it, of that many rows."""
    shape = (rows.num_rows, *x.shape[1:])
    positive = PositiveSums(new_tensor(shape, x.dtype), new_tensor(shape[:2], x.dtype)) if with_positive else None
    return new_tensor(shape, x.dtype), positive


def _run_forward(
    index: Kind,
    rows: Rows,
    x: Tensor,
    scores: _Scores,
    dropout: EdgeDropout | None,
    total_of_none: float,
    out: Tensor,
    positive: PositiveSums | None,
) -> tuple[Tensor, Tensor]:
    """Writes `out` and `positive`; returns each row's largest logit and the sum of exp of what logits are above it."""
    num_heads, width = x.shape[1:]
    positive_rows, positive_weights = positive or (None, None)

    def positives(head: int) -> list[int]:
        sums = [address(positive_rows, head * width), address(positive_weights, head)]
        return sums if scores.attention is None else []

    largest, total = (new_tensor((rows.num_rows, num_heads), x.dtype) for _ in range(2))
    kernels = gat_kernels if scores.attention is None else gatv2_kernels
    for head, block in scores.blocks(x):
        spec = _spec(rows, index, x.dtype, block, dropout, positive=positive is not None)
        drop, _keep = dropout_arguments(dropout, num_heads, head)
        arguments = [
            *rows.arguments(),
            *scores.arguments(head, width),
            *[address(x, head * width), num_heads * width, num_heads],
            *[address(out, head * width), address(largest, head), address(total, head)],
            total_of_none,
            *positives(head),
            *drop,
        ]
        run(kernels.emit_forward, (spec,), rows.bounds, arguments)
    return largest, total


def _statistics(
    er: Tensor | None,
    lse: Tensor,
    grad: Tensor,
    out: Tensor,
    positive: PositiveSums | None = None,
    slope: float = 1.0,
) -> tuple[Tensor, Tensor | None]:
    """(N, 3, H) of er, lse and delta, or (N, 2, H) without er; and d_er (N, H) if `positive` is given."""
    num_rows, num_heads, width = grad.shape
    positive_rows, positive_weights = positive or (None, None)
    d_er = None if positive is None else new_tensor((num_rows, num_heads), grad.dtype)
    statistics = new_tensor((num_rows, 2 if er is None else 3, num_heads), grad.dtype)
    for head, block in _head_blocks(num_heads, width, accumulator_elements(grad.dtype), num_heads):
        arguments: list[int | float] = [address(er, head), address(lse, head)]
        arguments += [address(grad, head * width), address(out, head * width), address(statistics, head)]
        arguments += [num_heads * width, num_heads]
        arguments += [address(positive_rows, head * width), address(positive_weights, head), address(d_er, head), slope]
        spec = (KINDS[grad.dtype], block, er is not None, d_er is not None)
        run(emit_statistics, spec, cut_evenly(num_rows), arguments)
    return statistics, d_er


def _backward_by_source(
    out_plan: RowPlan,
    x: Tensor,
    grad: Tensor,
    statistics: Tensor,
    scores: _Scores,
    d_edges: Tensor | None,
    dropout: EdgeDropout | None,
) -> tuple[Tensor, Tensor]:
    """`(dx, d_el)`; d_el has no content for gatv2, which writes `d_edges`."""
    dx, d_el = _run_by_source(out_plan.index, scores.rows_of(out_plan), x, grad, statistics, scores, d_edges, dropout)
    if out_plan.has_long_rows:
        rows = out_plan.long_rows[out_plan.long_row_of_part]
        part_scores = _Scores(scores.fixed[rows], scores.moving, scores.moving_stride, scores.attention, scores.slope)
        dx_parts, d_el_parts = _run_by_source(
            out_plan.index, scores.parts_of(out_plan), x[rows], grad, statistics, part_scores, d_edges, dropout
        )
        dx[out_plan.long_rows] = sum_rows(out_plan.merger, Operand(dx_parts, by_edge=True))
        if scores.attention is None:
            merged = sum_rows(out_plan.merger, Operand(d_el_parts.unsqueeze(-1), by_edge=True))
            d_el[out_plan.long_rows] = merged.squeeze(-1)
    return dx, d_el


def _run_by_source(
    index: Kind,
    rows: Rows,
    x: Tensor,
    grad: Tensor,
    statistics: Tensor,
    scores: _Scores,
    d_edges: Tensor | None,
    dropout: EdgeDropout | None,
) -> tuple[Tensor, Tensor]:
    num_heads, width = x.shape[1:]
    places = statistics.shape[1]
    dx = new_tensor(tuple(x.shape), x.dtype)
    d_el = new_tensor((rows.num_rows, num_heads if scores.attention is None else 0), x.dtype)
    kernels = gat_kernels if scores.attention is None else gatv2_kernels
    for head, block in scores.blocks(x):
        spec = _spec(rows, index, x.dtype, block, dropout)
        drop, _keep = dropout_arguments(dropout, num_heads, head)
        arguments = [
            *rows.arguments(),
            *scores.arguments(head, width),
            *[address(x, head * width), address(grad, head * width), num_heads * width, num_heads],
            address(statistics, (places - 2) * num_heads + head),
            address(statistics, (places - 1) * num_heads + head),
            places * num_heads,
            *[address(dx, head * width), address(d_el if d_edges is None else d_edges, head)],
            *drop,
        ]
        run(kernels.emit_backward_by_source, (spec,), rows.bounds, arguments)
    return dx, d_el


def _backward_by_destination(index: Kind, rows: Rows, scores: _Scores, d_edges: Tensor, dx: Tensor) -> Tensor:
    """Writes `dx`; returns (T, H, D) float64: what each task adds to the gradient of the attention vector."""
    num_heads, width = dx.shape[1:]
    partial = torch.zeros(rows.num_tasks, num_heads, width, dtype=torch.float64)
    for head, block in scores.blocks(dx):
        spec = _spec(rows, index, dx.dtype, block, None)
        arguments = [
            *rows.arguments(),
            *scores.arguments(head, width),
            *[address(d_edges, head), num_heads],
            *[address(dx, head * width), num_heads * width, address(partial, head * width)],
        ]
        run(gatv2_kernels.emit_backward_by_destination, (spec,), rows.bounds, arguments)
    return partial
