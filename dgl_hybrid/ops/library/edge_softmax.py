# SPDX-License-Identifier: Apache-2.0
"""edge_softmax over the entries of each row."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dgl_hybrid.ops.backend import choose_backend
from dgl_hybrid.ops.library.registration import Grads, Structure, read_rows, register, registered


def _edge_softmax(rows: list[Tensor], logits: Tensor) -> Tensor:
    return choose_backend(logits).edge_softmax(read_rows(rows), logits.contiguous())


def _edge_softmax_meta(rows: list[Tensor], logits: Tensor) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


def _edge_softmax_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    Structure.save(ctx, inputs[0], (), output)


def _edge_softmax_backward_formula(ctx: Any, grad: Tensor) -> Grads:
    rows, _, out = Structure.load(ctx)
    return Structure.no_grads(ctx)[0], registered("edge_softmax_backward")(rows, out, grad)


register(
    "edge_softmax(Tensor[] rows, Tensor logits) -> Tensor",
    _edge_softmax,
    _edge_softmax_meta,
    _edge_softmax_setup,
    _edge_softmax_backward_formula,
)


def _edge_softmax_backward(rows: list[Tensor], out: Tensor, grad: Tensor) -> Tensor:
    return choose_backend(out).edge_softmax_backward(read_rows(rows), out.contiguous(), grad.contiguous())


def _edge_softmax_backward_meta(rows: list[Tensor], out: Tensor, grad: Tensor) -> Tensor:
    return torch.empty_like(out, memory_format=torch.contiguous_format)


def _edge_softmax_backward_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, out, grad = inputs
    Structure.save(ctx, rows, (), out, grad)


def _edge_softmax_backward_backward(ctx: Any, upstream: Tensor) -> Grads:
    rows, _, out, grad = Structure.load(ctx)
    d_out = d_grad = None
    if ctx.needs_input_grad[1]:
        along_grad, along_upstream = _row_totals(rows, out * grad), _row_totals(rows, out * upstream)
        d_out = upstream * (grad - along_grad) - grad * along_upstream
    if ctx.needs_input_grad[2]:
        d_grad = registered("edge_softmax_backward")(rows, out, upstream)
    return Structure.no_grads(ctx)[0], d_out, d_grad


def _row_totals(rows: list[Tensor], terms: Tensor) -> Tensor:
    """(E, H) to (E, H): for each edge the sum of the terms of its row."""
    totals = registered("spmm_sum")(rows, [], None, terms)
    out: Tensor = registered("sddmm")(rows, [], totals, None, "copy", "v", "e").squeeze(2)
    return out


register(
    "edge_softmax_backward(Tensor[] rows, Tensor out, Tensor grad) -> Tensor",
    _edge_softmax_backward,
    _edge_softmax_backward_meta,
    _edge_softmax_backward_setup,
    _edge_softmax_backward_backward,
)
