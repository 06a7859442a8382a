# SPDX-License-Identifier: Apache-2.0
"""sddmm: two operands combined along each edge."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor

from dgl_hybrid.ops.backend import EdgeOp, Target, choose_backend
from dgl_hybrid.ops.library.registration import (
    Grads,
    Structure,
    by_source,
    needs_grad,
    packed,
    read_rows,
    register,
    registered,
)


def _sddmm(
    rows: list[Tensor],
    out_rows: list[Tensor],
    lhs: Tensor,
    rhs: Tensor | None,
    op: str,
    lhs_target: str,
    rhs_target: str,
) -> Tensor:
    del out_rows
    return choose_backend(lhs).sddmm(
        read_rows(rows),
        lhs.contiguous(),
        packed(rhs),
        cast("EdgeOp", op),
        cast("Target", lhs_target),
        cast("Target", rhs_target),
    )


def _sddmm_meta(
    rows: list[Tensor],
    out_rows: list[Tensor],
    lhs: Tensor,
    rhs: Tensor | None,
    op: str,
    lhs_target: str,
    rhs_target: str,
) -> Tensor:
    num_edges = rows[1].shape[0]
    if op == "dot":
        return lhs.new_empty(num_edges, lhs.shape[1])
    return lhs.new_empty(num_edges, lhs.shape[1], lhs.shape[2])


def _sddmm_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, out_rows, lhs, rhs, ctx.op, ctx.lhs_target, ctx.rhs_target = inputs
    ctx.num_src = lhs.shape[0] if ctx.lhs_target == "u" else 0
    if rhs is not None and ctx.rhs_target == "u":
        ctx.num_src = rhs.shape[0]
    needs_lhs, needs_rhs = needs_grad(lhs), needs_grad(rhs)
    keeps_lhs = needs_rhs and ctx.op in ("mul", "dot", "div")
    keeps_rhs = (needs_lhs and ctx.op in ("mul", "dot", "div")) or (needs_rhs and ctx.op == "div")
    Structure.save(ctx, rows, out_rows, lhs if keeps_lhs else None, rhs if keeps_rhs else None)


def _sddmm_backward(ctx: Any, grad: Tensor) -> Grads:
    rows, out_rows, lhs, rhs = Structure.load(ctx)
    op, lhs_target, rhs_target = ctx.op, ctx.lhs_target, ctx.rhs_target
    needs_lhs, needs_rhs = ctx.needs_input_grad[2], ctx.needs_input_grad[3]
    if (needs_lhs and lhs_target == "u") or (needs_rhs and rhs_target == "u"):
        out_rows = by_source(rows, out_rows, ctx.num_src)
    edges = _EdgeTerms(rows, out_rows)
    d_lhs = d_rhs = None
    if op == "dot":
        if needs_lhs:
            d_lhs = edges.weighted_sum(lhs_target, grad, rhs, rhs_target)
        if needs_rhs:
            d_rhs = edges.weighted_sum(rhs_target, grad, lhs, lhs_target)
    elif op == "mul":
        if needs_lhs:
            d_lhs = edges.product_sum(lhs_target, grad, rhs, rhs_target)
        if needs_rhs:
            d_rhs = edges.product_sum(rhs_target, grad, lhs, lhs_target)
    elif op == "div":
        ratio = edges.combine(grad, "e", rhs, rhs_target, "div")
        if needs_lhs:
            d_lhs = edges.sum_to(lhs_target, ratio)
        if needs_rhs:
            quotient = edges.combine(lhs, lhs_target, rhs, rhs_target, "div")
            d_rhs = edges.sum_to(rhs_target, -(ratio * quotient))
    else:
        if needs_lhs:
            d_lhs = edges.sum_to(lhs_target, grad)
        if needs_rhs:
            d_rhs = edges.sum_to(rhs_target, -grad if op == "sub" else grad)
    return *Structure.no_grads(ctx), d_lhs, d_rhs, None, None, None


class _EdgeTerms:
    """Sums of terms along edges for the gradients of sddmm, by registered ops; `u` and `v` as in sddmm."""

    def __init__(self, rows: list[Tensor], out_rows: list[Tensor]) -> None:
        self.rows, self.out_rows = rows, out_rows

    def combine(self, lhs: Tensor, lhs_target: str, rhs: Tensor, rhs_target: str, op: str) -> Tensor:
        """(E, H, D); elementwise."""
        if lhs_target == rhs_target == "e":
            return lhs * rhs if op == "mul" else lhs / rhs
        out: Tensor = registered("sddmm")(self.rows, self.out_rows, lhs, rhs, op, lhs_target, rhs_target)
        return out

    def sum_to(self, target: str, terms: Tensor) -> Tensor:
        """(E, H, D) to (S | N | E, H, D)."""
        if target == "e":
            return terms
        rows, out_rows = self._sides(target)
        out: Tensor = registered("spmm_sum")(rows, out_rows, None, terms.flatten(1))
        return out.reshape(out.shape[0], *terms.shape[1:])

    def product_sum(self, target: str, grad: Tensor, other: Tensor, other_target: str) -> Tensor:
        """The gradient (E, H, D) times the other operand, elementwise, summed to `target`."""
        if {target, other_target} == {"u", "v"}:
            rows, out_rows = self._sides(target)
            out: Tensor = registered("spmm_sum")(rows, out_rows, other.flatten(1).unsqueeze(-1), grad.flatten(1))
            return out.reshape(out.shape[0], *other.shape[1:])
        return self.sum_to(target, self.combine(grad, "e", other, other_target, "mul"))

    def weighted_sum(self, target: str, grad: Tensor, other: Tensor, other_target: str) -> Tensor:
        """The gradient (E, H) times the other operand (·, H, D), summed to `target`."""
        if {target, other_target} == {"u", "v"}:
            rows, out_rows = self._sides(target)
            out: Tensor = registered("spmm_sum")(rows, out_rows, other, grad)
            return out
        wide = grad.unsqueeze(-1).expand(-1, -1, other.shape[2])
        return self.sum_to(target, self.combine(wide, "e", other, other_target, "mul"))

    def _sides(self, target: str) -> tuple[list[Tensor], list[Tensor]]:
        return (self.rows, self.out_rows) if target == "v" else (self.out_rows, self.rows)


register(
    "sddmm(Tensor[] rows, Tensor[] out_rows, Tensor lhs, Tensor? rhs, str op, str lhs_target, str rhs_target) "
    "-> Tensor",
    _sddmm,
    _sddmm_meta,
    _sddmm_setup,
    _sddmm_backward,
)
