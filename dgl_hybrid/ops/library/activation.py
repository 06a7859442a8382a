# SPDX-License-Identifier: Apache-2.0
"""biased_elu: what usually follows the sums of attention, in one pass over the rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dgl_hybrid.ops.backend import choose_backend
from dgl_hybrid.ops.library.registration import Grads, packed, register, registered


def _elu(x: Tensor, bias: Tensor | None) -> Tensor:
    return choose_backend(x).biased_elu(x.contiguous(), packed(bias))


def _elu_meta(x: Tensor, bias: Tensor | None) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(output)


def _backward(ctx: Any, grad: Tensor) -> Grads:
    try:
        (out,) = ctx.saved_tensors
    except RuntimeError as error:
        if "inplace operation" not in str(error):
            raise
        raise RuntimeError(
            "the result of an optimized attention layer with activation ELU was changed in place, but its gradient is "
            "computed from it: write `h = h + other` for `h += other`, or take the ELU outside of the layer"
        ) from error
    needs_x, needs_bias = ctx.needs_input_grad
    if torch.is_grad_enabled():
        dx = grad * torch.where(out <= 0, out + 1.0, 1.0)
        return dx if needs_x else None, dx.sum(0) if needs_bias else None
    dx, d_bias = registered("biased_elu_backward")(grad, out)
    return dx if needs_x else None, d_bias if needs_bias else None


def _elu_backward(grad: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    return choose_backend(out).biased_elu_backward(grad.contiguous(), out.contiguous())


def _elu_backward_meta(grad: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(grad, memory_format=torch.contiguous_format), grad.new_empty(grad.shape[1])


register("biased_elu(Tensor x, Tensor? bias) -> Tensor", _elu, _elu_meta, _setup, _backward)
register("biased_elu_backward(Tensor grad, Tensor out) -> (Tensor, Tensor)", _elu_backward, _elu_backward_meta)
