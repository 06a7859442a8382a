# SPDX-License-Identifier: Apache-2.0
"""segment_reduce over consecutive rows."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from dgl_hybrid.ops.backend import Reduce, choose_backend
from dgl_hybrid.ops.library.registration import Grads, register, registered


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
    return None, registered("segment_expand")(offsets, grad, ctx.num_rows)


register(
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
    return None, registered("segment_sum")(offsets, grad), None


register(
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


register(
    "segment_select(Tensor offsets, Tensor x, str reduce) -> (Tensor, Tensor)",
    _segment_select,
    _segment_select_meta,
    _segment_select_setup,
    _segment_select_backward,
)
