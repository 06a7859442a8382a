# SPDX-License-Identifier: Apache-2.0
"""The reference: every op in plain PyTorch, on any device and dtype. It defines what the kernels must answer.

Written to be read, not to be fast: messages of size edges * heads * width are materialised. float32 is computed in
float64 and rounded once at the end; float16 and bfloat16 in float32. No scatter that adds is used, so results repeat
bit by bit on CUDA too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from dgl_hybrid.ops.backend import EdgeOp, PositiveSums, Reduce, Target
from dgl_hybrid.ops.edge_dropout import EdgeDropout
from dgl_hybrid.ops.plain_rows import PlainRows
from dgl_hybrid.ops.row_blocks import gradients_in_blocks, multiply_in_blocks
from dgl_hybrid.ops.row_mask import multiply_by_mask
from dgl_hybrid.ops.sparse_graph import Adjacency, edge_neighbours, edge_rows, entry_rows

_HALVES = (torch.float16, torch.bfloat16)


class NaiveBackend(PlainRows):
    """Implements `backend.Backend`; see there for shapes."""

    keeps_positive_sums = False

    def spmm(self, rows: Adjacency, x: Tensor | None, w: Tensor | None, reduce: Reduce) -> tuple[Tensor, Tensor | None]:
        dtype = _dtype_of(x, w)
        # Nothing is added up for max and min: products are compared as the kernels round them.
        wide = torch.float32 if dtype in _HALVES else torch.float64 if reduce == "sum" else dtype
        messages = _messages(rows, None if x is None else x.to(wide), None if w is None else w.to(wide))
        if reduce == "sum":
            return _sum_rows(rows.indptr, messages).to(dtype), None
        out, entry = _select_rows(rows.indptr, messages, reduce)
        return out.to(dtype), _edge_of_entry(rows, entry)

    def add_sums(
        self,
        out: Tensor,
        targets: Tensor,
        rows: Adjacency,
        x: Tensor,
        w: Tensor | None,
        row_factors: Tensor | None = None,
    ) -> None:
        sums, _ = self.spmm(rows, x, w, "sum")
        out.index_add_(0, targets, sums if row_factors is None else sums * row_factors.view(-1, 1, 1))

    def scaled_sums(
        self, rows: Adjacency, x: Tensor, source_factors: Tensor | None, row_factors: Tensor | None
    ) -> Tensor:
        scaled = x if source_factors is None else x * source_factors.view(-1, 1, 1)
        sums, _ = self.spmm(rows, scaled, None, "sum")
        return sums if row_factors is None else sums * row_factors.view(-1, 1, 1)

    def spmm_select_backward(self, out_rows: Adjacency, grad: Tensor, arg: Tensor, w: Tensor | None) -> Tensor:
        edges = _edge_ids(out_rows)
        destinations = out_rows.indices.long()
        won = torch.eq(arg[destinations], edges[:, None, None])
        terms = _wide(grad)[destinations]
        if w is not None:
            terms = terms * _wide(w)[edges].unsqueeze(-1)
        # Last: what lost may be infinite.
        return _sum_rows(out_rows.indptr, torch.where(won, terms, 0.0)).to(grad.dtype)

    def spmm_select_backward_edges(self, rows: Adjacency, grad: Tensor, arg: Tensor, x: Tensor | None) -> Tensor:
        destinations = edge_rows(rows)
        edges = torch.arange(rows.num_edges, device=arg.device)
        won = torch.eq(arg[destinations], edges[:, None, None])
        terms = _wide(grad)[destinations]
        if x is not None:
            terms = terms * _wide(x)[edge_neighbours(rows)]
        return torch.where(won, terms, 0.0).sum(-1).to(grad.dtype)

    def sddmm(
        self, rows: Adjacency, lhs: Tensor, rhs: Tensor | None, op: EdgeOp, lhs_target: Target, rhs_target: Target
    ) -> Tensor:
        left = _at_edges(rows, lhs, lhs_target)
        if op == "copy":
            return left.clone() if left is lhs else left
        if rhs is None:
            raise ValueError(f"sddmm {op!r} needs two operands (got rhs None)")
        left, right = _wide(left), _wide(_at_edges(rows, rhs, rhs_target))
        if op == "add":
            out = left + right
        elif op == "sub":
            out = left - right
        elif op == "mul":
            out = left * right
        elif op == "div":
            out = left / right
        else:
            out = (left * right).sum(-1)
        return out.to(lhs.dtype)

    def edge_softmax(self, rows: Adjacency, logits: Tensor) -> Tensor:
        alpha, _ = _softmax(rows, _wide(logits)[_edge_ids(rows)])
        return _by_edge(rows, alpha).to(logits.dtype)

    def edge_softmax_backward(self, rows: Adjacency, out: Tensor, grad: Tensor) -> Tensor:
        out, wide_grad = _wide(out), _wide(grad)
        total = _sum_rows(rows.indptr, (out * wide_grad)[_edge_ids(rows)])
        return (out * (wide_grad - total[edge_rows(rows)])).to(grad.dtype)

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
        del for_backward
        logits = F.leaky_relu(_attention_sums(rows, el, er), slope)
        return *self._attend(rows, x, logits, dropout, lse_dtype=el.dtype), None

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
        del positive
        sums = _attention_sums(rows, el, er)
        weights, d_logits = _attention_gradients(rows, x, F.leaky_relu(sums, slope), out, lse, grad, dropout)
        d_sums = d_logits * _leaky_slope(sums, slope)
        dx = _sum_to_sources(rows, out_rows, weights.unsqueeze(-1) * _wide(grad)[entry_rows(rows)])
        d_el = _sum_to_sources(rows, out_rows, d_sums)
        d_er = _sum_rows(rows.indptr, d_sums)
        return dx.to(x.dtype), d_el.to(el.dtype), d_er.to(er.dtype)

    def gatv2(
        self,
        rows: Adjacency,
        x_src: Tensor,
        x_dst: Tensor,
        attention: Tensor,
        slope: float,
        dropout: EdgeDropout | None,
    ) -> tuple[Tensor, Tensor]:
        sums = _attention_sums(rows, x_src, x_dst)
        logits = (F.leaky_relu(sums, slope) * _wide(attention)).sum(-1)
        lse_dtype = torch.float64 if x_src.dtype == torch.float64 else torch.float32
        return self._attend(rows, x_src, logits, dropout, lse_dtype=lse_dtype)

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
        sums = _attention_sums(rows, x_src, x_dst)
        activated = F.leaky_relu(sums, slope)
        logits = (activated * _wide(attention)).sum(-1)
        weights, d_logits = _attention_gradients(rows, x_src, logits, out, lse, grad, dropout)
        d_sums = d_logits.unsqueeze(-1) * _wide(attention) * _leaky_slope(sums, slope)
        values = weights.unsqueeze(-1) * _wide(grad)[entry_rows(rows)]
        dx_src = _sum_to_sources(rows, out_rows, values + d_sums)
        dx_dst = _sum_rows(rows.indptr, d_sums)
        d_attention = (d_logits.unsqueeze(-1) * activated).sum(0)
        return dx_src.to(x_src.dtype), dx_dst.to(x_dst.dtype), d_attention.to(attention.dtype)

    def segment_reduce(self, offsets: Tensor, x: Tensor, reduce: Reduce) -> tuple[Tensor, Tensor | None]:
        if reduce == "sum":
            return _sum_rows(offsets, _wide(x)).to(x.dtype), None
        out, row = _select_rows(offsets, x, reduce)
        return out, row.to(offsets.dtype)

    def drop_rows(self, x: Tensor, ids: Tensor, keys: tuple[int, int], p: float) -> Tensor:
        return multiply_by_mask(x, ids, keys, p)

    def row_products(
        self,
        rows: list[Tensor],
        weights: list[Tensor],
        factors: Tensor | None,
        addend: Tensor | None,
        bias: Tensor | None,
        relu: bool,
    ) -> Tensor:
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
        return gradients_in_blocks(rows, weights, grad, output, factors, needs_rows, needs_weights, needs_addend)

    @staticmethod
    def _attend(
        rows: Adjacency, x: Tensor, logits: Tensor, dropout: EdgeDropout | None, *, lse_dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        alpha, lse = _softmax(rows, logits)
        weights = alpha * _dropout_factors(rows, alpha, dropout)
        out = _sum_rows(rows.indptr, weights.unsqueeze(-1) * _wide(x)[rows.indices.long()])
        return out.to(x.dtype), lse.to(lse_dtype)


def _wide(x: Tensor) -> Tensor:
    """In the dtype that sums are taken in."""
    return x.float() if x.dtype in _HALVES else x.double()


def _dtype_of(x: Tensor | None, w: Tensor | None) -> torch.dtype:
    operand = w if x is None else x
    if operand is None:
        raise ValueError("spmm needs x, w or both (got neither)")
    return operand.dtype


def _edge_ids(rows: Adjacency) -> Tensor:
    """(E,) int64: the edge row of each entry."""
    return torch.arange(rows.num_edges, device=rows.indptr.device) if rows.edge_ids is None else rows.edge_ids.long()


def _by_edge(rows: Adjacency, by_entry: Tensor) -> Tensor:
    """Brings (E, ...) from the order of entries to that of edge tensors."""
    out = torch.empty_like(by_entry)
    out[_edge_ids(rows)] = by_entry
    return out


def _edge_of_entry(rows: Adjacency, entry: Tensor) -> Tensor:
    """Edge rows in the index dtype; -1 stays -1."""
    if rows.edge_ids is None or rows.num_edges == 0:
        return entry.to(rows.indptr.dtype)
    return torch.where(entry < 0, -1, rows.edge_ids[entry.clamp(min=0)]).to(rows.indptr.dtype)


def _at_edges(rows: Adjacency, operand: Tensor, target: Target) -> Tensor:
    if target == "e":
        return operand
    return operand[edge_neighbours(rows) if target == "u" else edge_rows(rows)]


def _messages(rows: Adjacency, x: Tensor | None, w: Tensor | None) -> Tensor:
    """(E, H, D) in the order of entries."""
    if x is None:
        assert w is not None
        return w[_edge_ids(rows)].unsqueeze(-1)
    messages = x[rows.indices.long()]
    return messages if w is None else messages * w[_edge_ids(rows)].unsqueeze(-1)


def _sum_rows(indptr: Tensor, terms: Tensor) -> Tensor:
    """(E, ...) to (num_rows, ...): sums of consecutive terms."""
    return _reduce_rows(indptr, terms, "sum", 0.0)


def _reduce_rows(indptr: Tensor, terms: Tensor, reduce: Literal["sum", "max", "min"], empty: float) -> Tensor:
    shape = (len(indptr) - 1, *terms.shape[1:])
    if terms.numel() == 0 or len(indptr) == 1:
        return terms.new_full(shape, empty)
    # Unlike index_add, the same order of additions in every call on every device.
    return torch.segment_reduce(
        terms.reshape(len(terms), -1), reduce, offsets=indptr, axis=0, unsafe=True, initial=empty
    ).view(shape)


def _select_rows(indptr: Tensor, values: Tensor, reduce: Reduce) -> tuple[Tensor, Tensor]:
    """Largest (smallest) value of each row and its entry: the first of equal ones, the first NaN if there is one.

    Returns:
        `(out, entry)`: (num_rows, ...) in the dtype of `values`; int64, -1 and 0.0 for rows without entries.
    """
    counts = indptr.diff()
    row = torch.repeat_interleave(torch.arange(len(counts), device=values.device), counts, output_size=len(values))
    signed = values if reduce == "max" else -values
    is_nan = signed.isnan()
    best = _reduce_rows(indptr, torch.where(is_nan, float("-inf"), signed), "max", float("-inf"))
    has_nan = _reduce_rows(indptr, is_nan.double(), "max", 0.0) > 0
    wins = torch.where(has_nan[row], is_nan, torch.eq(signed, best[row]))
    # float64 holds positions exactly up to 2**53.
    position = torch.arange(len(values), device=values.device, dtype=torch.float64)
    position = position.view(-1, *[1] * (values.dim() - 1))
    first = _reduce_rows(indptr, torch.where(wins, position, float("inf")), "min", float("inf"))
    is_empty = first.isinf()
    entry = torch.where(is_empty, 0.0, first).long()
    if values.numel() == 0:
        return values.new_zeros(entry.shape), torch.full_like(entry, -1)
    out = torch.where(is_empty, torch.zeros((), dtype=values.dtype, device=values.device), values.gather(0, entry))
    return out, torch.where(is_empty, -1, entry)


def _attention_sums(rows: Adjacency, left: Tensor, right: Tensor) -> Tensor:
    """left[u] + right[v] in the order of entries."""
    return _wide(left)[rows.indices.long()] + _wide(right)[entry_rows(rows)]


def _softmax(rows: Adjacency, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax over each row of (E, H) logits in the order of entries, and the logarithm of its denominators (N, H)."""
    row = entry_rows(rows)
    largest, _ = _select_rows(rows.indptr, logits, "max")
    exps = torch.exp(logits - largest[row])
    total = _sum_rows(rows.indptr, exps)
    has_entries = (rows.indptr.diff() > 0)[:, None]
    lse = torch.where(has_entries, largest + torch.log(total), torch.zeros_like(total))
    return exps / total[row], lse


def _dropout_factors(rows: Adjacency, alpha: Tensor, dropout: EdgeDropout | None) -> Tensor:
    """(E, H) in the order of entries: what each attention weight is multiplied by."""
    if dropout is None:
        return torch.ones_like(alpha)
    return dropout.factors(rows.num_edges, alpha.shape[1], alpha.dtype, alpha.device)[_edge_ids(rows)]


def _attention_gradients(
    rows: Adjacency,
    x: Tensor,
    logits: Tensor,
    out: Tensor,
    lse: Tensor,
    grad: Tensor,
    dropout: EdgeDropout | None,
) -> tuple[Tensor, Tensor]:
    """`(weights, d_logits)`, (E, H) in the order of entries: the dropped attention and the gradient of the logits."""
    row = entry_rows(rows)
    alpha = torch.exp(logits - _wide(lse)[row])
    factors = _dropout_factors(rows, alpha, dropout)
    d_weights = (_wide(grad)[row] * _wide(x)[rows.indices.long()]).sum(-1)
    # Sum over the row of alpha * d_alpha, with the dropout inside; no second pass over the edges is needed for it.
    delta = (_wide(grad) * _wide(out)).sum(-1)
    return alpha * factors, alpha * (factors * d_weights - delta[row])


def _leaky_slope(x: Tensor, slope: float) -> Tensor:
    return torch.where(x > 0, torch.ones_like(x), torch.full_like(x, slope))


def _sum_to_sources(rows: Adjacency, out_rows: Adjacency, by_entry: Tensor) -> Tensor:
    """(E, ...) in the order of `rows` to (S, ...)."""
    return _sum_rows(out_rows.indptr, _by_edge(rows, by_entry)[_edge_ids(out_rows)])
