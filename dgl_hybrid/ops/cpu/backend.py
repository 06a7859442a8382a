# SPDX-License-Identifier: Apache-2.0
"""`CpuBackend`: the ops on CPU tensors, by the kernels of this folder."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dgl_hybrid.ops.backend import EdgeOp, PositiveSums, Reduce, Target
from dgl_hybrid.ops.cpu import gat, gatv2, products, reductions, row_ops
from dgl_hybrid.ops.cpu.edge_kernels import (
    SddmmSpec,
    SoftmaxSpec,
    emit_edge_softmax,
    emit_edge_softmax_backward,
    emit_sddmm,
)
from dgl_hybrid.ops.cpu.lanes import column_blocks, summed_elements
from dgl_hybrid.ops.cpu.launch import KINDS, RowPlan, address, run
from dgl_hybrid.ops.cpu.memory import new_tensor
from dgl_hybrid.ops.cpu.reductions import Operand
from dgl_hybrid.ops.edge_dropout import EdgeDropout
from dgl_hybrid.ops.row_blocks import gradients_in_blocks, multiply_in_blocks
from dgl_hybrid.ops.sparse_graph import Adjacency

_MAX_DOT_ELEMENTS = 512
"""Elements of a row that a kernel multiplies in one go; they need no accumulators, only code."""


class CpuBackend:
    """Implements `backend.Backend` (see there) for float32 and float64; float16 and bfloat16 by float32 copies."""

    keeps_positive_sums = True

    def spmm(self, rows: Adjacency, x: Tensor | None, w: Tensor | None, reduce: Reduce) -> tuple[Tensor, Tensor | None]:
        plan = RowPlan.of(rows)
        if x is not None:
            operand = Operand(_wide(x), weights=None if w is None else _wide(w))
        elif w is not None:
            operand = Operand(_wide(w).unsqueeze(-1), by_edge=True)
        else:
            raise ValueError("spmm needs x, w or both (got neither)")
        dtype = w.dtype if x is None and w is not None else operand.x.dtype if x is None else x.dtype
        if reduce == "sum":
            return reductions.sum_rows(plan, operand).to(dtype), None
        out, arg = reductions.select_rows(plan, operand, least=reduce == "min")
        return out.to(dtype), arg

    def add_sums(
        self,
        out: Tensor,
        targets: Tensor,
        rows: Adjacency,
        x: Tensor,
        w: Tensor | None,
        row_factors: Tensor | None = None,
    ) -> None:
        if x.dtype not in KINDS or not out.is_contiguous():
            sums = self.scaled_sums(rows, x, None, row_factors) if w is None else self.spmm(rows, x, w, "sum")[0]
            out.index_add_(0, targets, sums)
        else:
            reductions.add_sums(RowPlan.of(rows), Operand(x, weights=w), out, targets.contiguous(), row_factors)

    def scaled_sums(
        self, rows: Adjacency, x: Tensor, source_factors: Tensor | None, row_factors: Tensor | None
    ) -> Tensor:
        wide, of_sources, of_rows = (None if t is None else _wide(t) for t in (x, source_factors, row_factors))
        assert wide is not None
        return reductions.sum_rows(RowPlan.of(rows), Operand(wide, factors=of_sources), of_rows).to(x.dtype)

    def spmm_select_backward(self, out_rows: Adjacency, grad: Tensor, arg: Tensor, w: Tensor | None) -> Tensor:
        operand = Operand(_wide(grad), weights=None if w is None else _wide(w))
        return reductions.select_backward(RowPlan.of(out_rows), operand, arg).to(grad.dtype)

    def spmm_select_backward_edges(self, rows: Adjacency, grad: Tensor, arg: Tensor, x: Tensor | None) -> Tensor:
        wide = None if x is None else _wide(x)
        return reductions.select_backward_edges(RowPlan.of(rows), _wide(grad), arg, wide).to(grad.dtype)

    def sddmm(
        self, rows: Adjacency, lhs: Tensor, rhs: Tensor | None, op: EdgeOp, lhs_target: Target, rhs_target: Target
    ) -> Tensor:
        if rhs is None and op != "copy":
            raise ValueError(f"sddmm {op!r} needs two operands (got rhs None)")
        dtype = lhs.dtype
        lhs, rhs = _wide(lhs), None if rhs is None else _wide(rhs)
        heads, width = lhs.shape[1:]
        is_dot = op == "dot"
        out = new_tensor((rows.num_edges, heads) if is_dot else (rows.num_edges, heads, width), lhs.dtype)
        if width == 0:
            return out.zero_().to(dtype)
        plan = RowPlan.of(rows)
        blocks = (
            column_blocks(heads, width, _MAX_DOT_ELEMENTS)
            if is_dot
            else column_blocks(1, heads * width, _MAX_DOT_ELEMENTS)
        )
        for column, block in blocks:
            spec = SddmmSpec(
                KINDS[lhs.dtype],
                plan.index,
                block,
                op,
                lhs_target,
                rhs_target,
                plan.whole.has_edge_ids,
                add=is_dot and column % width != 0,
            )
            arguments: list[int | float] = [
                *plan.whole.arguments(),
                address(lhs, column),
                address(rhs, column),
                heads * width,
                address(out, column // width if is_dot else column),
                heads if is_dot else heads * width,
            ]
            run(emit_sddmm, (spec,), plan.whole.bounds, arguments)
        return out.to(dtype)

    def edge_softmax(self, rows: Adjacency, logits: Tensor) -> Tensor:
        wide = _wide(logits)
        out = new_tensor(tuple(wide.shape), wide.dtype)
        plan = RowPlan.of(rows)
        heads = wide.shape[1]
        for first, block in column_blocks(heads, 1, summed_elements(wide.dtype)):
            spec = SoftmaxSpec(KINDS[wide.dtype], plan.index, block.heads, plan.whole.has_edge_ids)
            arguments: list[int | float] = [*plan.whole.arguments(), address(wide, first), address(out, first), heads]
            run(emit_edge_softmax, (spec,), plan.whole.bounds, arguments)
        return out.to(logits.dtype)

    def edge_softmax_backward(self, rows: Adjacency, out: Tensor, grad: Tensor) -> Tensor:
        wide, wide_grad = _wide(out), _wide(grad)
        d_logits = new_tensor(tuple(wide.shape), wide.dtype)
        plan = RowPlan.of(rows)
        heads = wide.shape[1]
        for first, block in column_blocks(heads, 1, summed_elements(wide.dtype)):
            spec = SoftmaxSpec(KINDS[wide.dtype], plan.index, block.heads, plan.whole.has_edge_ids)
            arguments: list[int | float] = [
                *plan.whole.arguments(),
                address(wide, first),
                address(wide_grad, first),
                address(d_logits, first),
                heads,
            ]
            run(emit_edge_softmax_backward, (spec,), plan.whole.bounds, arguments)
        return d_logits.to(grad.dtype)

    def gat(
        self,
        rows: Adjacency,
        x: Tensor,
        el: Tensor,
        er: Tensor,
        slope: float,
        dropout: EdgeDropout | None,
        *,
        for_backward: bool = False,
    ) -> tuple[Tensor, Tensor, PositiveSums | None]:
        plan = RowPlan.of(rows)
        out, lse, positive = gat.attend(plan, _wide(x), el, er, slope, dropout, with_positive=for_backward)
        return out.to(x.dtype), lse, positive

    def gat_backward(
        self,
        rows: Adjacency,
        out_rows: Adjacency,
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
        del rows
        dx, d_el, d_er = gat.backward(
            RowPlan.of(out_rows), _wide(x), el, er, _wide(out), lse, positive, _wide(grad), slope, dropout
        )
        return dx.to(x.dtype), d_el, d_er

    def gatv2(
        self,
        rows: Adjacency,
        x_src: Tensor,
        x_dst: Tensor,
        attention: Tensor,
        slope: float,
        dropout: EdgeDropout | None,
    ) -> tuple[Tensor, Tensor]:
        x = _wide(x_src)
        out, lse = gatv2.attend(RowPlan.of(rows), x, _wide(x_dst), _wide(attention), slope, dropout)
        return out.to(x_src.dtype), lse

    def gatv2_backward(
        self,
        rows: Adjacency,
        out_rows: Adjacency,
        x_src: Tensor,
        x_dst: Tensor,
        attention: Tensor,
        out: Tensor,
        lse: Tensor,
        grad: Tensor,
        slope: float,
        dropout: EdgeDropout | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dx_src, dx_dst, d_attention = gatv2.backward(
            RowPlan.of(rows),
            RowPlan.of(out_rows),
            _wide(x_src),
            _wide(x_dst),
            _wide(attention),
            _wide(out),
            lse,
            _wide(grad),
            slope,
            dropout,
        )
        return dx_src.to(x_src.dtype), dx_dst.to(x_dst.dtype), d_attention.to(attention.dtype)

    def segment_reduce(self, offsets: Tensor, x: Tensor, reduce: Reduce) -> tuple[Tensor, Tensor | None]:
        plan = RowPlan.of_segments(offsets)
        operand = Operand(_wide(x).unsqueeze(1), by_edge=True)
        if reduce == "sum":
            return reductions.sum_rows(plan, operand).squeeze(1).to(x.dtype), None
        out, arg = reductions.select_rows(plan, operand, least=reduce == "min")
        return out.squeeze(1).to(x.dtype), arg.squeeze(1)

    def drop_rows(self, x: Tensor, ids: Tensor, keys: tuple[int, int], p: float) -> Tensor:
        return row_ops.drop(x, ids, keys, p)

    def add_rows(self, out: Tensor, targets: Tensor, rows: Tensor, factors: Tensor | None) -> None:
        row_ops.add_rows(out, targets, rows, factors)

    def merge_rows(self, out: Tensor, targets: Tensor, rows: Tensor, keeps: Tensor, adds: Tensor) -> None:
        row_ops.merge_rows(out, targets, rows, keeps, adds)

    def biased_elu(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return row_ops.biased_elu(x, bias)

    def biased_elu_backward(self, grad: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
        return row_ops.biased_elu_backward(grad, out)

    def head_terms(self, x: Tensor, attn_l: Tensor, attn_r: Tensor, num_dst: int) -> tuple[Tensor, Tensor]:
        return row_ops.head_terms(x, attn_l, attn_r, num_dst)

    def head_terms_backward(
        self, x: Tensor, attn_l: Tensor, attn_r: Tensor, d_el: Tensor, d_er: Tensor, dx: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return row_ops.head_terms_backward(x, attn_l, attn_r, d_el, d_er, dx)

    def row_products(
        self,
        rows: list[Tensor],
        weights: list[Tensor],
        factors: Tensor | None,
        addend: Tensor | None,
        bias: Tensor | None,
        relu: bool,
    ) -> Tensor:
        if products.are_served(rows, weights, of_result=(addend,), factors=factors, bias=bias):
            return products.multiply(rows, weights, factors, addend, bias, relu)
        return multiply_in_blocks(rows, weights, factors, addend, bias, relu)

    def row_products_backward(
        self,
        rows: list[Tensor],
        weights: list[Tensor],
        grad: Tensor,
        output: Tensor | None,
        factors: Tensor | None,
        needs_rows: Sequence[bool],
        needs_weights: Sequence[bool],
        needs_addend: bool,
    ) -> list[Tensor]:
        if products.are_served(rows, weights, of_result=(grad, output), factors=factors):
            return products.gradients(rows, weights, grad, output, factors, needs_rows, needs_weights, needs_addend)
        return gradients_in_blocks(rows, weights, grad, output, factors, needs_rows, needs_weights, needs_addend)


def _wide(x: Tensor) -> Tensor:
    """In the dtype that the kernels compute in."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
