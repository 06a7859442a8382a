# SPDX-License-Identifier: Apache-2.0
"""spmm: sums of products along edges, and the largest or smallest of them."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from dgl_hybrid.ops.backend import Reduce, choose_backend
from dgl_hybrid.ops.library.registration import (
    Grads,
    Structure,
    by_source,
    needs_grad,
    num_rows_of,
    packed,
    read_rows,
    register,
    registered,
)
from dgl_hybrid.ops.sparse_graph import edge_neighbours

# spmm, sum


def _spmm_sum(rows: list[Tensor], out_rows: list[Tensor], x: Tensor | None, w: Tensor | None) -> Tensor:
    del out_rows  # for the gradients only
    out, _ = choose_backend(_given(x, w)).spmm(read_rows(rows), packed(x), packed(w), "sum")
    return out


def _spmm_sum_meta(rows: list[Tensor], out_rows: list[Tensor], x: Tensor | None, w: Tensor | None) -> Tensor:
    return _spmm_shaped(rows, x, w)


def _spmm_shaped(rows: list[Tensor], x: Tensor | None, w: Tensor | None) -> Tensor:
    if x is not None:
        return x.new_empty(num_rows_of(rows), x.shape[1], x.shape[2])
    edges = _given(x, w)
    return edges.new_empty(num_rows_of(rows), edges.shape[1], 1)


def _given(x: Tensor | None, w: Tensor | None) -> Tensor:
    operand = w if x is None else x
    if operand is None:
        raise ValueError("spmm needs x, w or both (got neither)")
    return operand


def _spmm_sum_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, out_rows, x, w = inputs
    ctx.num_src, ctx.has_x = 0 if x is None else x.shape[0], x is not None
    # An operand that no gradient needs is not kept alive.
    Structure.save(ctx, rows, out_rows, x if needs_grad(w) else None, w if needs_grad(x) else None)


def _spmm_sum_backward(ctx: Any, grad: Tensor) -> Grads:
    rows, out_rows, x, w = Structure.load(ctx)
    dx = dw = None
    if ctx.needs_input_grad[2]:
        out_rows = by_source(rows, out_rows, ctx.num_src)
        dx = registered("spmm_sum")(out_rows, rows, grad, w)
    if ctx.needs_input_grad[3]:
        if ctx.has_x:
            dw = registered("sddmm")(rows, out_rows, x, grad, "dot", "u", "v")
        else:
            dw = registered("sddmm")(rows, out_rows, grad.transpose(1, 2), None, "copy", "v", "e").squeeze(1)
    return *Structure.no_grads(ctx), dx, dw


register(
    "spmm_sum(Tensor[] rows, Tensor[] out_rows, Tensor? x, Tensor? w) -> Tensor",
    _spmm_sum,
    _spmm_sum_meta,
    _spmm_sum_setup,
    _spmm_sum_backward,
)


# spmm, sum, of rows that have a factor each, or with a factor for each sum: each is the other's adjoint


def _scaled_sum(rows: list[Tensor], out_rows: list[Tensor], x: Tensor, factors: Tensor, of_sources: bool) -> Tensor:
    del out_rows
    both = (factors.contiguous(), None) if of_sources else (None, factors.contiguous())
    return choose_backend(x).scaled_sums(read_rows(rows), x.contiguous(), *both)


def _scaled_sum_meta(
    rows: list[Tensor], out_rows: list[Tensor], x: Tensor, factors: Tensor, of_sources: bool
) -> Tensor:
    return _spmm_shaped(rows, x, None)


def _scaled_sum_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, out_rows, x, factors, ctx.of_sources = inputs
    ctx.num_src = x.shape[0]
    Structure.save(ctx, rows, out_rows, factors)


def _scaled_sum_backward(ctx: Any, grad: Tensor) -> Grads:
    rows, out_rows, factors = Structure.load(ctx)
    *_, needs_x, needs_factors, _ = ctx.needs_input_grad
    if needs_factors:
        raise RuntimeError("scaled_sum: factors of rows have no gradient: they are to be the same in every epoch")
    dx = None
    if needs_x:
        out_rows = by_source(rows, out_rows, ctx.num_src)
        dx = registered("scaled_sum")(out_rows, rows, grad, factors, not ctx.of_sources)
    return *Structure.no_grads(ctx), dx, None, None


register(
    "scaled_sum(Tensor[] rows, Tensor[] out_rows, Tensor x, Tensor factors, bool of_sources) -> Tensor",
    _scaled_sum,
    _scaled_sum_meta,
    _scaled_sum_setup,
    _scaled_sum_backward,
)


# spmm, max and min


def _spmm_select(
    rows: list[Tensor], out_rows: list[Tensor], x: Tensor | None, w: Tensor | None, reduce: str
) -> tuple[Tensor, Tensor]:
    del out_rows
    backend = choose_backend(_given(x, w))
    out, arg = backend.spmm(read_rows(rows), packed(x), packed(w), cast("Reduce", reduce))
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
    Structure.save(ctx, rows, out_rows, x if needs_grad(w) else None, w if needs_grad(x) else None, arg)


def _spmm_select_backward_formula(ctx: Any, grad: Tensor, _arg_grad: None) -> Grads:
    return *_take_backward(ctx, grad), None


def _take_backward(ctx: Any, grad: Tensor) -> Grads:
    """Gradients of `spmm_take`, which is what max and min are while their arg stays the same."""
    rows, out_rows, x, w, arg = Structure.load(ctx)
    dx = dw = None
    if ctx.needs_input_grad[2]:
        out_rows = by_source(rows, out_rows, ctx.num_src)
        dx = registered("spmm_select_backward")(rows, out_rows, grad, w, arg)
    if ctx.needs_input_grad[3]:
        dw = registered("spmm_select_backward_edges")(rows, out_rows, grad, x, arg)
    return *Structure.no_grads(ctx), dx, dw


register(
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
    if operand.numel() == 0 or arg.numel() == 0 or read_rows(rows).indices.numel() == 0:
        return operand.new_zeros(arg.shape)
    edges = arg.long().clamp(min=0)
    out = operand.new_ones(())
    if x is not None:
        out = out * x.gather(0, edge_neighbours(read_rows(rows))[edges])
    if w is not None:
        heads = torch.arange(arg.shape[1], device=arg.device)[:, None]
        out = out * w[edges, heads]
    return torch.where(arg < 0, operand.new_zeros(()), out)


def _spmm_take_meta(
    rows: list[Tensor], out_rows: list[Tensor], x: Tensor | None, w: Tensor | None, arg: Tensor
) -> Tensor:
    return _spmm_shaped(rows, x, w)


def _spmm_take_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, out_rows, x, w, arg = inputs
    _save_trilinear(ctx, rows, out_rows, x, w, arg)


def _spmm_take_backward(ctx: Any, grad: Tensor) -> Grads:
    return *_take_backward(ctx, grad), None


register(
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
    return choose_backend(grad).spmm_select_backward(
        read_rows(out_rows), grad.contiguous(), arg.contiguous(), packed(w)
    )


def _spmm_select_backward_meta(
    rows: list[Tensor], out_rows: list[Tensor], grad: Tensor, w: Tensor | None, arg: Tensor
) -> Tensor:
    return grad.new_empty(num_rows_of(out_rows), grad.shape[1], grad.shape[2])


def _spmm_select_backward_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, out_rows, grad, w, arg = inputs
    Structure.save(ctx, rows, out_rows, grad, w, arg)


def _spmm_select_backward_backward(ctx: Any, ddx: Tensor) -> Grads:
    rows, out_rows, grad, w, arg = Structure.load(ctx)
    d_grad = dw = None
    if ctx.needs_input_grad[2]:
        d_grad = registered("spmm_take")(rows, out_rows, ddx, w, arg)
    if ctx.needs_input_grad[3]:
        dw = registered("spmm_select_backward_edges")(rows, out_rows, grad, ddx, arg)
    return *Structure.no_grads(ctx), d_grad, dw, None


register(
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
    return choose_backend(grad).spmm_select_backward_edges(
        read_rows(rows), grad.contiguous(), arg.contiguous(), packed(x)
    )


def _spmm_select_backward_edges_meta(
    rows: list[Tensor], out_rows: list[Tensor], grad: Tensor, x: Tensor | None, arg: Tensor
) -> Tensor:
    return grad.new_empty(rows[1].shape[0], grad.shape[1])


def _spmm_select_backward_edges_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, out_rows, grad, x, arg = inputs
    ctx.num_src = 0 if x is None else x.shape[0]
    Structure.save(ctx, rows, out_rows, grad, x, arg)


def _spmm_select_backward_edges_backward(ctx: Any, ddw: Tensor) -> Grads:
    rows, out_rows, grad, x, arg = Structure.load(ctx)
    d_grad = dx = None
    if ctx.needs_input_grad[2]:
        d_grad = registered("spmm_take")(rows, out_rows, x, ddw, arg)
    if ctx.needs_input_grad[3]:
        out_rows = by_source(rows, out_rows, ctx.num_src)
        dx = registered("spmm_select_backward")(rows, out_rows, grad, ddw, arg)
    return *Structure.no_grads(ctx), d_grad, dx, None


register(
    "spmm_select_backward_edges(Tensor[] rows, Tensor[] out_rows, Tensor grad, Tensor? x, Tensor arg) -> Tensor",
    _spmm_select_backward_edges,
    _spmm_select_backward_edges_meta,
    _spmm_select_backward_edges_setup,
    _spmm_select_backward_edges_backward,
)
