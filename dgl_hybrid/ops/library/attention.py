# SPDX-License-Identifier: Apache-2.0
"""Fused attention, gat and gatv2, and how a dropout is passed to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dgl_hybrid.ops.backend import PositiveSums, choose_backend
from dgl_hybrid.ops.edge_dropout import EdgeDropout
from dgl_hybrid.ops.library.registration import (
    Grads,
    Structure,
    by_source,
    num_rows_of,
    packed,
    read_rows,
    register,
    registered,
)

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
    return EdgeDropout(p, (first % 2**64, second % 2**64), packed(edge_keys))


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
    for_backward: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    del out_rows
    dropout = _unpack_dropout(p, keys, edge_keys)
    x, el, er = x.contiguous(), el.contiguous(), er.contiguous()
    out, lse, positive = choose_backend(x).gat(read_rows(rows), x, el, er, slope, dropout, for_backward=for_backward)
    return out, lse, *(positive or (el.new_empty(0), el.new_empty(0)))


def _gat_meta(
    rows: list[Tensor],
    out_rows: list[Tensor],
    x: Tensor,
    el: Tensor,
    er: Tensor,
    slope: float,
    p: float,
    keys: Tensor | None,
    edge_keys: Tensor | None,
    for_backward: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    del out_rows, er, slope, p, keys, edge_keys
    shape = (num_rows_of(rows), x.shape[1], x.shape[2])
    has_positive = for_backward and choose_backend(x).keeps_positive_sums
    positive = (el.new_empty(shape), el.new_empty(shape[:2])) if has_positive else (el.new_empty(0), el.new_empty(0))
    return x.new_empty(shape), el.new_empty(shape[:2]), *positive


def _attention_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """For gat and gatv2: (rows, out_rows, three operands, slope, dropout) to `out` and what the backward needs."""
    rows, out_rows, first, second, third, ctx.slope, ctx.p, keys, edge_keys, *_ = inputs
    out, *notes = output
    ctx.mark_non_differentiable(*notes)
    ctx.set_materialize_grads(False)  # nobody asks for zeros of the size of the notes
    Structure.save(ctx, rows, out_rows, first, second, third, keys, edge_keys, out, *notes)


def _attention_backward(name: str) -> Callable[..., Grads]:
    def backward(ctx: Any, grad: Tensor | None, *_no_grads: None) -> Grads:
        if grad is None:  # of a result that somebody uses and does not differentiate
            return *Structure.no_grads(ctx), *[None] * (len(ctx.needs_input_grad) - 2)
        rows, out_rows, first, second, third, keys, edge_keys, out, *notes = Structure.load(ctx)
        out_rows = by_source(rows, out_rows, first.shape[0])
        dropout = (ctx.p, keys, edge_keys)
        grads = registered(name)(rows, out_rows, first, second, third, out, *notes, grad, ctx.slope, *dropout)
        needed = ctx.needs_input_grad[2:5]
        wanted = (d if need else None for d, need in zip(grads, needed, strict=True))
        others = len(ctx.needs_input_grad) - 5
        return *Structure.no_grads(ctx), *wanted, *[None] * others

    return backward


register(
    f"gat(Tensor[] rows, Tensor[] out_rows, Tensor x, Tensor el, Tensor er, float slope, {_DROPOUT}, "
    "bool for_backward) -> (Tensor, Tensor, Tensor, Tensor)",
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
    positive_rows: Tensor,
    positive_weights: Tensor,
    grad: Tensor,
    slope: float,
    p: float,
    keys: Tensor | None,
    edge_keys: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    x, el, er, out, lse, grad = (tensor.contiguous() for tensor in (x, el, er, out, lse, grad))
    structure = (read_rows(rows), read_rows(out_rows))
    dropout, backend = _unpack_dropout(p, keys, edge_keys), choose_backend(x)
    positive: PositiveSums | None = PositiveSums(positive_rows.contiguous(), positive_weights.contiguous())
    if positive_weights.shape != lse.shape:  # another backend ran the forward
        positive = None
        if backend.keeps_positive_sums:
            _, _, positive = backend.gat(structure[0], x, el, er, slope, dropout, for_backward=True)
    dx, d_el, d_er = backend.gat_backward(*structure, x, el, er, out, lse, positive, grad, slope, dropout)
    assert d_er is not None
    return dx, d_el, d_er


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


register(
    "gat_backward(Tensor[] rows, Tensor[] out_rows, Tensor x, Tensor el, Tensor er, Tensor out, Tensor lse, "
    f"Tensor positive_rows, Tensor positive_weights, Tensor grad, float slope, {_DROPOUT}) -> (Tensor, Tensor, Tensor)",
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
    return choose_backend(x_src).gatv2(read_rows(rows), *operands, slope, dropout)


def _gatv2_meta(rows: list[Tensor], out_rows: list[Tensor], x_src: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    num_rows = num_rows_of(rows)
    out = x_src.new_empty(num_rows, x_src.shape[1], x_src.shape[2])
    return out, x_src.new_empty((num_rows, x_src.shape[1]), dtype=_lse_dtype(x_src))


register(
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
    return backend.gatv2_backward(
        read_rows(rows), read_rows(out_rows), x_src, x_dst, attention, out, lse, grad, slope, dropout
    )


register(
    "gatv2_backward(Tensor[] rows, Tensor[] out_rows, Tensor x_src, Tensor x_dst, Tensor attention, Tensor out, "
    f"Tensor lse, Tensor grad, float slope, {_DROPOUT}) -> (Tensor, Tensor, Tensor)",
    _gatv2_backward,
    _three_like,
    _refuse_setup,
    _refuse_double_backward("gatv2", "sddmm, edge_softmax and spmm"),
)
