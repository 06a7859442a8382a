# SPDX-License-Identifier: Apache-2.0
"""Registers the ops with PyTorch as `torch.ops.dgl_hybrid.*`: CPU, CUDA and Meta implementations, and gradients.

[Note: the structure as lists]
A graph travels as two lists of tensors, `rows` by destination and `out_rows` by source, each `Adjacency.tensors()`.
`out_rows` may be empty: a gradient that needs it then builds it, so callers pass it when they expect gradients and
inference never pays for it. Operands are canonical (`backend.py`), in any strides.

[Note: gradients of gradients]
Each formula below is written with the registered ops themselves, so it can be differentiated again, without end:
spmm_sum and sddmm are each other's derivatives, spmm_take, spmm_select_backward and spmm_select_backward_edges are the
three derivatives of one trilinear form. Only the fused attention ops end after one: their backward refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from dgl_hybrid.ops.backend import EdgeOp, Reduce, Target, choose_backend
from dgl_hybrid.ops.edge_dropout import EdgeDropout
from dgl_hybrid.ops.sparse_graph import Adjacency, build_out_edges, edge_neighbours

_LIBRARY = torch.library.Library("dgl_hybrid", "DEF")

Grads = tuple[Any, ...]


def _register(
    schema: str,
    implementation: Callable[..., Any],
    meta: Callable[..., Any],
    setup_context: Callable[..., None] | None = None,
    backward: Callable[..., Grads] | None = None,
) -> None:
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    name = schema.split("(", 1)[0]
    for key in ("CPU", "CUDA"):
        _LIBRARY.impl(name, implementation, key)
    torch.library.register_fake(f"dgl_hybrid::{name}", meta, lib=_LIBRARY)  # the Meta implementation too
    if backward is not None:
        torch.library.register_autograd(f"dgl_hybrid::{name}", backward, setup_context=setup_context, lib=_LIBRARY)


def _op(name: str) -> Any:
    return getattr(torch.ops.dgl_hybrid, name).default


def _read(tensors: Sequence[Tensor]) -> Adjacency:
    return Adjacency.from_tensors(list(tensors))


def _packed(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _needs_grad(x: Tensor | None) -> bool:
    return x is not None and x.requires_grad


def _num_rows(rows: Sequence[Tensor]) -> Any:
    """As PyTorch counts it: symbolic under a trace."""
    return rows[0].shape[0] - 1


# The rows by source


def _out_edges(rows: list[Tensor], num_src: int) -> tuple[Tensor, Tensor, Tensor]:
    built = build_out_edges(_read(rows), num_src)
    assert built.edge_ids is not None
    return built.indptr, built.indices, built.edge_ids


def _out_edges_meta(rows: list[Tensor], num_src: int) -> tuple[Tensor, Tensor, Tensor]:
    indices = rows[1]
    return rows[0].new_empty(num_src + 1), torch.empty_like(indices), torch.empty_like(indices)


_register("out_edges(Tensor[] rows, SymInt num_src) -> (Tensor, Tensor, Tensor)", _out_edges, _out_edges_meta)


def _by_source(rows: Sequence[Tensor], out_rows: Sequence[Tensor], num_src: Any) -> list[Tensor]:
    """The given rows by source, built if none were given."""
    return list(out_rows) if len(out_rows) else list(_op("out_edges")(list(rows), num_src))


class _Structure:
    """Keeps both lists in an autograd context, beside other tensors."""

    @staticmethod
    def save(ctx: Any, rows: Sequence[Tensor], out_rows: Sequence[Tensor], *others: Tensor | None) -> None:
        ctx.num_rows, ctx.num_out_rows = len(rows), len(out_rows)
        ctx.save_for_backward(*rows, *out_rows, *others)

    @staticmethod
    def load(ctx: Any) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        end = ctx.num_rows + ctx.num_out_rows
        return list(saved[: ctx.num_rows]), list(saved[ctx.num_rows : end]), *saved[end:]

    @staticmethod
    def no_grads(ctx: Any) -> tuple[list[None], list[None]]:
        return [None] * ctx.num_rows, [None] * ctx.num_out_rows


# spmm, sum


def _spmm_sum(rows: list[Tensor], out_rows: list[Tensor], x: Tensor | None, w: Tensor | None) -> Tensor:
    del out_rows  # for the gradients only
    out, _ = choose_backend(_given(x, w)).spmm(_read(rows), _packed(x), _packed(w), "sum")
    return out


def _spmm_sum_meta(rows: list[Tensor], out_rows: list[Tensor], x: Tensor | None, w: Tensor | None) -> Tensor:
    return _spmm_shaped(rows, x, w)


def _spmm_shaped(rows: list[Tensor], x: Tensor | None, w: Tensor | None) -> Tensor:
    if x is not None:
        return x.new_empty(_num_rows(rows), x.shape[1], x.shape[2])
    edges = _given(x, w)
    return edges.new_empty(_num_rows(rows), edges.shape[1], 1)


def _given(x: Tensor | None, w: Tensor | None) -> Tensor:
    operand = w if x is None else x
    if operand is None:
        raise ValueError("spmm needs x, w or both (got neither)")
    return operand


def _spmm_sum_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, out_rows, x, w = inputs
    ctx.num_src, ctx.has_x = 0 if x is None else x.shape[0], x is not None
    # An operand that no gradient needs is not kept alive.
    _Structure.save(ctx, rows, out_rows, x if _needs_grad(w) else None, w if _needs_grad(x) else None)


def _spmm_sum_backward(ctx: Any, grad: Tensor) -> Grads:
    rows, out_rows, x, w = _Structure.load(ctx)
    dx = dw = None
    if ctx.needs_input_grad[2]:
        out_rows = _by_source(rows, out_rows, ctx.num_src)
        dx = _op("spmm_sum")(out_rows, rows, grad, w)
    if ctx.needs_input_grad[3]:
        if ctx.has_x:
            dw = _op("sddmm")(rows, out_rows, x, grad, "dot", "u", "v")
        else:
            dw = _op("sddmm")(rows, out_rows, grad.transpose(1, 2), None, "copy", "v", "e").squeeze(1)
    return *_Structure.no_grads(ctx), dx, dw


_register(
    "spmm_sum(Tensor[] rows, Tensor[] out_rows, Tensor? x, Tensor? w) -> Tensor",
    _spmm_sum,
    _spmm_sum_meta,
    _spmm_sum_setup,
    _spmm_sum_backward,
)


# spmm, max and min


def _spmm_select(
    rows: list[Tensor], out_rows: list[Tensor], x: Tensor | None, w: Tensor | None, reduce: str
) -> tuple[Tensor, Tensor]:
    del out_rows
    backend = choose_backend(_given(x, w))
    out, arg = backend.spmm(_read(rows), _packed(x), _packed(w), cast("Reduce", reduce))
    assert arg is not None
    return out, arg


def _spmm_select_meta(
    rows: list[Tensor], out_rows: list[Tensor], x: Tensor | None, w: Tensor | None, reduce: str
) -> tuple[Tensor, Tensor]:
    out = _spmm_shaped(rows, x, w)
    return out, torch.empty_like(out, dtype=rows[0].dtype)


def _spmm_select_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    rows, out_rows, x, w, _ = inputs
    ctx.mark_non_differentiable(output[1])
    _save_trilinear(ctx, rows, out_rows, x, w, output[1])


def _save_trilinear(
    ctx: Any, rows: list[Tensor], out_rows: list[Tensor], x: Tensor | None, w: Tensor | None, arg: Tensor
) -> None:
    ctx.num_src = 0 if x is None else x.shape[0]
    _Structure.save(ctx, rows, out_rows, x if _needs_grad(w) else None, w if _needs_grad(x) else None, arg)


def _spmm_select_backward_formula(ctx: Any, grad: Tensor, _arg_grad: None) -> Grads:
    return *_take_backward(ctx, grad), None


def _take_backward(ctx: Any, grad: Tensor) -> Grads:
    """Gradients of `spmm_take`, which is what max and min are while their arg stays the same."""
    rows, out_rows, x, w, arg = _Structure.load(ctx)
    dx = dw = None
    if ctx.needs_input_grad[2]:
        out_rows = _by_source(rows, out_rows, ctx.num_src)
        dx = _op("spmm_select_backward")(rows, out_rows, grad, w, arg)
    if ctx.needs_input_grad[3]:
        dw = _op("spmm_select_backward_edges")(rows, out_rows, grad, x, arg)
    return *_Structure.no_grads(ctx), dx, dw


_register(
    "spmm_select(Tensor[] rows, Tensor[] out_rows, Tensor? x, Tensor? w, str reduce) -> (Tensor, Tensor)",
    _spmm_select,
    _spmm_select_meta,
    _spmm_select_setup,
    _spmm_select_backward_formula,
)


def _spmm_take(rows: list[Tensor], out_rows: list[Tensor], x: Tensor | None, w: Tensor | None, arg: Tensor) -> Tensor:
    """x[u] * w[e] of the edge e = arg[v, h, d] of each output element; 0 where arg is -1.

    No backend has a kernel for it: it appears in second derivatives of max and min only.
    """
    del out_rows
    operand = _given(x, w)
    if operand.numel() == 0 or arg.numel() == 0:
        return operand.new_zeros(arg.shape)
    edges = arg.long().clamp(min=0)
    out = torch.where(arg < 0, torch.zeros((), dtype=operand.dtype, device=operand.device), 1)
    if x is not None:
        out = out * x.gather(0, edge_neighbours(_read(rows))[edges])
    if w is not None:
        heads = torch.arange(arg.shape[1], device=arg.device)[:, None]
        out = out * w[edges, heads]
    return out


def _spmm_take_meta(
    rows: list[Tensor], out_rows: list[Tensor], x: Tensor | None, w: Tensor | None, arg: Tensor
) -> Tensor:
    return _spmm_shaped(rows, x, w)


def _spmm_take_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, out_rows, x, w, arg = inputs
    _save_trilinear(ctx, rows, out_rows, x, w, arg)


def _spmm_take_backward(ctx: Any, grad: Tensor) -> Grads:
    return *_take_backward(ctx, grad), None


_register(
    "spmm_take(Tensor[] rows, Tensor[] out_rows, Tensor? x, Tensor? w, Tensor arg) -> Tensor",
    _spmm_take,
    _spmm_take_meta,
    _spmm_take_setup,
    _spmm_take_backward,
)


def _spmm_select_backward(
    rows: list[Tensor], out_rows: list[Tensor], grad: Tensor, w: Tensor | None, arg: Tensor
) -> Tensor:
    del rows
    return choose_backend(grad).spmm_select_backward(_read(out_rows), grad.contiguous(), arg.contiguous(), _packed(w))


def _spmm_select_backward_meta(
    rows: list[Tensor], out_rows: list[Tensor], grad: Tensor, w: Tensor | None, arg: Tensor
) -> Tensor:
    return grad.new_empty(_num_rows(out_rows), grad.shape[1], grad.shape[2])


def _spmm_select_backward_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, out_rows, grad, w, arg = inputs
    _Structure.save(ctx, rows, out_rows, grad, w, arg)


def _spmm_select_backward_backward(ctx: Any, ddx: Tensor) -> Grads:
    rows, out_rows, grad, w, arg = _Structure.load(ctx)
    d_grad = dw = None
    if ctx.needs_input_grad[2]:
        d_grad = _op("spmm_take")(rows, out_rows, ddx, w, arg)
    if ctx.needs_input_grad[3]:
        dw = _op("spmm_select_backward_edges")(rows, out_rows, grad, ddx, arg)
    return *_Structure.no_grads(ctx), d_grad, dw, None


_register(
    "spmm_select_backward(Tensor[] rows, Tensor[] out_rows, Tensor grad, Tensor? w, Tensor arg) -> Tensor",
    _spmm_select_backward,
    _spmm_select_backward_meta,
    _spmm_select_backward_setup,
    _spmm_select_backward_backward,
)


def _spmm_select_backward_edges(
    rows: list[Tensor], out_rows: list[Tensor], grad: Tensor, x: Tensor | None, arg: Tensor
) -> Tensor:
    del out_rows
    return choose_backend(grad).spmm_select_backward_edges(_read(rows), grad.contiguous(), arg.contiguous(), _packed(x))


def _spmm_select_backward_edges_meta(
    rows: list[Tensor], out_rows: list[Tensor], grad: Tensor, x: Tensor | None, arg: Tensor
) -> Tensor:
    return grad.new_empty(rows[1].shape[0], grad.shape[1])


def _spmm_select_backward_edges_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, out_rows, grad, x, arg = inputs
    ctx.num_src = 0 if x is None else x.shape[0]
    _Structure.save(ctx, rows, out_rows, grad, x, arg)


def _spmm_select_backward_edges_backward(ctx: Any, ddw: Tensor) -> Grads:
    rows, out_rows, grad, x, arg = _Structure.load(ctx)
    d_grad = dx = None
    if ctx.needs_input_grad[2]:
        d_grad = _op("spmm_take")(rows, out_rows, x, ddw, arg)
    if ctx.needs_input_grad[3]:
        out_rows = _by_source(rows, out_rows, ctx.num_src)
        dx = _op("spmm_select_backward")(rows, out_rows, grad, ddw, arg)
    return *_Structure.no_grads(ctx), d_grad, dx, None


_register(
    "spmm_select_backward_edges(Tensor[] rows, Tensor[] out_rows, Tensor grad, Tensor? x, Tensor arg) -> Tensor",
    _spmm_select_backward_edges,
    _spmm_select_backward_edges_meta,
    _spmm_select_backward_edges_setup,
    _spmm_select_backward_edges_backward,
)


# sddmm


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
        _read(rows),
        lhs.contiguous(),
        _packed(rhs),
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
    needs_lhs, needs_rhs = _needs_grad(lhs), _needs_grad(rhs)
    keeps_lhs = needs_rhs and ctx.op in ("mul", "dot", "div")
    keeps_rhs = (needs_lhs and ctx.op in ("mul", "dot", "div")) or (needs_rhs and ctx.op == "div")
    _Structure.save(ctx, rows, out_rows, lhs if keeps_lhs else None, rhs if keeps_rhs else None)


def _sddmm_backward(ctx: Any, grad: Tensor) -> Grads:
    rows, out_rows, lhs, rhs = _Structure.load(ctx)
    op, lhs_target, rhs_target = ctx.op, ctx.lhs_target, ctx.rhs_target
    needs_lhs, needs_rhs = ctx.needs_input_grad[2], ctx.needs_input_grad[3]
    if (needs_lhs and lhs_target == "u") or (needs_rhs and rhs_target == "u"):
        out_rows = _by_source(rows, out_rows, ctx.num_src)
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
    return *_Structure.no_grads(ctx), d_lhs, d_rhs, None, None, None


class _EdgeTerms:
    """Sums of terms along edges for the gradients of sddmm, by registered ops; `u` and `v` as in sddmm."""

    def __init__(self, rows: list[Tensor], out_rows: list[Tensor]) -> None:
        self.rows, self.out_rows = rows, out_rows

    def combine(self, lhs: Tensor, lhs_target: str, rhs: Tensor, rhs_target: str, op: str) -> Tensor:
        """(E, H, D); elementwise."""
        if lhs_target == rhs_target == "e":
            return lhs * rhs if op == "mul" else lhs / rhs
        out: Tensor = _op("sddmm")(self.rows, self.out_rows, lhs, rhs, op, lhs_target, rhs_target)
        return out

    def sum_to(self, target: str, terms: Tensor) -> Tensor:
        """(E, H, D) to (S | N | E, H, D)."""
        if target == "e":
            return terms
        rows, out_rows = self._sides(target)
        out: Tensor = _op("spmm_sum")(rows, out_rows, None, terms.flatten(1))
        return out.reshape(out.shape[0], *terms.shape[1:])

    def product_sum(self, target: str, grad: Tensor, other: Tensor, other_target: str) -> Tensor:
        """The gradient (E, H, D) times the other operand, elementwise, summed to `target`."""
        if {target, other_target} == {"u", "v"}:
            rows, out_rows = self._sides(target)
            out: Tensor = _op("spmm_sum")(rows, out_rows, other.flatten(1).unsqueeze(-1), grad.flatten(1))
            return out.reshape(out.shape[0], *other.shape[1:])
        return self.sum_to(target, self.combine(grad, "e", other, other_target, "mul"))

    def weighted_sum(self, target: str, grad: Tensor, other: Tensor, other_target: str) -> Tensor:
        """The gradient (E, H) times the other operand (·, H, D), summed to `target`."""
        if {target, other_target} == {"u", "v"}:
            rows, out_rows = self._sides(target)
            out: Tensor = _op("spmm_sum")(rows, out_rows, other, grad)
            return out
        wide = grad.unsqueeze(-1).expand(-1, -1, other.shape[2])
        return self.sum_to(target, self.combine(wide, "e", other, other_target, "mul"))

    def _sides(self, target: str) -> tuple[list[Tensor], list[Tensor]]:
        return (self.rows, self.out_rows) if target == "v" else (self.out_rows, self.rows)


_register(
    "sddmm(Tensor[] rows, Tensor[] out_rows, Tensor lhs, Tensor? rhs, str op, str lhs_target, str rhs_target) "
    "-> Tensor",
    _sddmm,
    _sddmm_meta,
    _sddmm_setup,
    _sddmm_backward,
)


# edge_softmax


def _edge_softmax(rows: list[Tensor], logits: Tensor) -> Tensor:
    return choose_backend(logits).edge_softmax(_read(rows), logits.contiguous())


def _edge_softmax_meta(rows: list[Tensor], logits: Tensor) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


def _edge_softmax_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _Structure.save(ctx, inputs[0], (), output)


def _edge_softmax_backward_formula(ctx: Any, grad: Tensor) -> Grads:
    rows, _, out = _Structure.load(ctx)
    return _Structure.no_grads(ctx)[0], _op("edge_softmax_backward")(rows, out, grad)


_register(
    "edge_softmax(Tensor[] rows, Tensor logits) -> Tensor",
    _edge_softmax,
    _edge_softmax_meta,
    _edge_softmax_setup,
    _edge_softmax_backward_formula,
)


def _edge_softmax_backward(rows: list[Tensor], out: Tensor, grad: Tensor) -> Tensor:
    return choose_backend(out).edge_softmax_backward(_read(rows), out.contiguous(), grad.contiguous())


def _edge_softmax_backward_meta(rows: list[Tensor], out: Tensor, grad: Tensor) -> Tensor:
    return torch.empty_like(out, memory_format=torch.contiguous_format)


def _edge_softmax_backward_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, out, grad = inputs
    _Structure.save(ctx, rows, (), out, grad)


def _edge_softmax_backward_backward(ctx: Any, upstream: Tensor) -> Grads:
    rows, _, out, grad = _Structure.load(ctx)
    d_out = d_grad = None
    if ctx.needs_input_grad[1]:
        along_grad, along_upstream = _row_totals(rows, out * grad), _row_totals(rows, out * upstream)
        d_out = upstream * (grad - along_grad) - grad * along_upstream
    if ctx.needs_input_grad[2]:
        d_grad = _op("edge_softmax_backward")(rows, out, upstream)
    return _Structure.no_grads(ctx)[0], d_out, d_grad


def _row_totals(rows: list[Tensor], terms: Tensor) -> Tensor:
    """(E, H) to (E, H): for each edge the sum of the terms of its row."""
    totals = _op("spmm_sum")(rows, [], None, terms)
    out: Tensor = _op("sddmm")(rows, [], totals, None, "copy", "v", "e").squeeze(2)
    return out


_register(
    "edge_softmax_backward(Tensor[] rows, Tensor out, Tensor grad) -> Tensor",
    _edge_softmax_backward,
    _edge_softmax_backward_meta,
    _edge_softmax_backward_setup,
    _edge_softmax_backward_backward,
)


# Fused attention

_DROPOUT = "float p, Tensor? keys, Tensor? edge_keys"


def pack_dropout(dropout: EdgeDropout | None) -> tuple[float, Tensor | None, Tensor | None]:
    """What the registered ops take for a dropout; p = 0 is none."""
    if dropout is None or dropout.p == 0.0:
        return 0.0, None, None
    return dropout.p, dropout.packed_keys, dropout.edge_keys


def _unpack_dropout(p: float, keys: Tensor | None, edge_keys: Tensor | None) -> EdgeDropout | None:
    if p == 0.0:
        return None
    assert keys is not None
    first, second = keys.tolist()
    return EdgeDropout(p, (first % 2**64, second % 2**64), _packed(edge_keys))


def _lse_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _gat(
    rows: list[Tensor],
    out_rows: list[Tensor],
    x: Tensor,
    el: Tensor,
    er: Tensor,
    slope: float,
    p: float,
    keys: Tensor | None,
    edge_keys: Tensor | None,
) -> tuple[Tensor, Tensor]:
    del out_rows
    dropout = _unpack_dropout(p, keys, edge_keys)
    return choose_backend(x).gat(_read(rows), x.contiguous(), el.contiguous(), er.contiguous(), slope, dropout)


def _gat_meta(
    rows: list[Tensor], out_rows: list[Tensor], x: Tensor, el: Tensor, er: Tensor, *_: Any
) -> tuple[Tensor, Tensor]:
    num_rows = _num_rows(rows)
    return x.new_empty(num_rows, x.shape[1], x.shape[2]), el.new_empty(num_rows, x.shape[1])


def _attention_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """For gat and gatv2: (rows, out_rows, three operands, slope, dropout)."""
    rows, out_rows, first, second, third, ctx.slope, ctx.p, keys, edge_keys = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    _Structure.save(ctx, rows, out_rows, first, second, third, out, lse, keys, edge_keys)


def _attention_backward(name: str) -> Callable[..., Grads]:
    def backward(ctx: Any, grad: Tensor, _lse_grad: None) -> Grads:
        rows, out_rows, first, second, third, out, lse, keys, edge_keys = _Structure.load(ctx)
        out_rows = _by_source(rows, out_rows, first.shape[0])
        dropout = (ctx.p, keys, edge_keys)
        grads = _op(name)(rows, out_rows, first, second, third, out, lse, grad, ctx.slope, *dropout)
        needed = ctx.needs_input_grad[2:5]
        wanted = (d if need else None for d, need in zip(grads, needed, strict=True))
        return *_Structure.no_grads(ctx), *wanted, None, None, None, None

    return backward


_register(
    f"gat(Tensor[] rows, Tensor[] out_rows, Tensor x, Tensor el, Tensor er, float slope, {_DROPOUT}) "
    "-> (Tensor, Tensor)",
    _gat,
    _gat_meta,
    _attention_setup,
    _attention_backward("gat_backward"),
)


def _gat_backward(
    rows: list[Tensor],
    out_rows: list[Tensor],
    x: Tensor,
    el: Tensor,
    er: Tensor,
    out: Tensor,
    lse: Tensor,
    grad: Tensor,
    slope: float,
    p: float,
    keys: Tensor | None,
    edge_keys: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    x, el, er, out, lse, grad = (tensor.contiguous() for tensor in (x, el, er, out, lse, grad))
    dropout = _unpack_dropout(p, keys, edge_keys)
    backend = choose_backend(x)
    return backend.gat_backward(_read(rows), _read(out_rows), x, el, er, out, lse, grad, slope, dropout)


def _three_like(rows: list[Tensor], out_rows: list[Tensor], *operands: Any) -> tuple[Tensor, Tensor, Tensor]:
    first, second, third = (
        torch.empty_like(operand, memory_format=torch.contiguous_format) for operand in operands[:3]
    )
    return first, second, third


def _refuse_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.num_inputs = len(inputs)


def _refuse_double_backward(name: str, parts: str) -> Callable[..., Grads]:
    def backward(ctx: Any, *grads: Tensor) -> Grads:
        raise RuntimeError(
            f"the gradient of the fused {name} cannot be differentiated again (got a double backward): compute the "
            f"layer from {parts}, whose gradients can"
        )

    return backward


_register(
    "gat_backward(Tensor[] rows, Tensor[] out_rows, Tensor x, Tensor el, Tensor er, Tensor out, Tensor lse, "
    f"Tensor grad, float slope, {_DROPOUT}) -> (Tensor, Tensor, Tensor)",
    _gat_backward,
    _three_like,
    _refuse_setup,
    _refuse_double_backward("gat", "sddmm, edge_softmax and spmm"),
)


def _gatv2(
    rows: list[Tensor],
    out_rows: list[Tensor],
    x_src: Tensor,
    x_dst: Tensor,
    attention: Tensor,
    slope: float,
    p: float,
    keys: Tensor | None,
    edge_keys: Tensor | None,
) -> tuple[Tensor, Tensor]:
    del out_rows
    operands = (x_src.contiguous(), x_dst.contiguous(), attention.contiguous())
    dropout = _unpack_dropout(p, keys, edge_keys)
    return choose_backend(x_src).gatv2(_read(rows), *operands, slope, dropout)


def _gatv2_meta(rows: list[Tensor], out_rows: list[Tensor], x_src: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    num_rows = _num_rows(rows)
    out = x_src.new_empty(num_rows, x_src.shape[1], x_src.shape[2])
    return out, x_src.new_empty((num_rows, x_src.shape[1]), dtype=_lse_dtype(x_src))


_register(
    "gatv2(Tensor[] rows, Tensor[] out_rows, Tensor x_src, Tensor x_dst, Tensor attention, float slope, "
    f"{_DROPOUT}) -> (Tensor, Tensor)",
    _gatv2,
    _gatv2_meta,
    _attention_setup,
    _attention_backward("gatv2_backward"),
)


def _gatv2_backward(
    rows: list[Tensor],
    out_rows: list[Tensor],
    x_src: Tensor,
    x_dst: Tensor,
    attention: Tensor,
    out: Tensor,
    lse: Tensor,
    grad: Tensor,
    slope: float,
    p: float,
    keys: Tensor | None,
    edge_keys: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    x_src, x_dst, attention = (tensor.contiguous() for tensor in (x_src, x_dst, attention))
    out, lse, grad = (tensor.contiguous() for tensor in (out, lse, grad))
    dropout = _unpack_dropout(p, keys, edge_keys)
    backend = choose_backend(x_src)
    return backend.gatv2_backward(_read(rows), _read(out_rows), x_src, x_dst, attention, out, lse, grad, slope, dropout)


_register(
    "gatv2_backward(Tensor[] rows, Tensor[] out_rows, Tensor x_src, Tensor x_dst, Tensor attention, Tensor out, "
    f"Tensor lse, Tensor grad, float slope, {_DROPOUT}) -> (Tensor, Tensor, Tensor)",
    _gatv2_backward,
    _three_like,
    _refuse_setup,
    _refuse_double_backward("gatv2", "sddmm, edge_softmax and spmm"),
)


# segment_reduce


def _segment_sum(offsets: Tensor, x: Tensor) -> Tensor:
    out, _ = choose_backend(x).segment_reduce(offsets.contiguous(), x.contiguous(), "sum")
    return out


def _segment_sum_meta(offsets: Tensor, x: Tensor) -> Tensor:
    return x.new_empty(offsets.shape[0] - 1, x.shape[1])


def _segment_sum_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    offsets, x = inputs
    ctx.num_rows = x.shape[0]
    ctx.save_for_backward(offsets)


def _segment_sum_backward(ctx: Any, grad: Tensor) -> Grads:
    (offsets,) = ctx.saved_tensors
    return None, _op("segment_expand")(offsets, grad, ctx.num_rows)


_register(
    "segment_sum(Tensor offsets, Tensor x) -> Tensor",
    _segment_sum,
    _segment_sum_meta,
    _segment_sum_setup,
    _segment_sum_backward,
)


def _segment_expand(offsets: Tensor, x: Tensor, num_rows: int) -> Tensor:
    """Row n of `x` for each row of segment n; the adjoint of `segment_sum`."""
    return torch.repeat_interleave(x, offsets.diff(), dim=0, output_size=num_rows)


def _segment_expand_meta(offsets: Tensor, x: Tensor, num_rows: int) -> Tensor:
    return x.new_empty(num_rows, x.shape[1])


def _segment_expand_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])


def _segment_expand_backward(ctx: Any, grad: Tensor) -> Grads:
    (offsets,) = ctx.saved_tensors
    return None, _op("segment_sum")(offsets, grad), None


_register(
    "segment_expand(Tensor offsets, Tensor x, SymInt num_rows) -> Tensor",
    _segment_expand,
    _segment_expand_meta,
    _segment_expand_setup,
    _segment_expand_backward,
)


def _segment_select(offsets: Tensor, x: Tensor, reduce: str) -> tuple[Tensor, Tensor]:
    out, arg = choose_backend(x).segment_reduce(offsets.contiguous(), x.contiguous(), cast("Reduce", reduce))
    assert arg is not None
    return out, arg


def _segment_select_meta(offsets: Tensor, x: Tensor, reduce: str) -> tuple[Tensor, Tensor]:
    out = x.new_empty(offsets.shape[0] - 1, x.shape[1])
    return out, torch.empty_like(out, dtype=offsets.dtype)


def _segment_select_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.num_rows = inputs[1].shape[0]
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(output[1])


def _segment_select_backward(ctx: Any, grad: Tensor, _arg_grad: None) -> Grads:
    (arg,) = ctx.saved_tensors
    # A row wins in its own segment only, so nothing is written twice; empty segments write to a row that is cut off.
    winners = torch.where(arg < 0, ctx.num_rows, arg).long()
    padded = grad.new_zeros(ctx.num_rows + 1, grad.shape[1]).scatter(0, winners, grad)
    return None, padded[: ctx.num_rows], None


_register(
    "segment_select(Tensor offsets, Tensor x, str reduce) -> (Tensor, Tensor)",
    _segment_select,
    _segment_select_meta,
    _segment_select_setup,
    _segment_select_backward,
)
