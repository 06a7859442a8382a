# SPDX-License-Identifier: Apache-2.0
"""What sources and destinations add to the logits of `GATConv`, without temporaries of the size of the features."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dgl_hybrid.ops.backend import choose_backend
from dgl_hybrid.ops.unseen import unseen


@unseen
def attention_terms(x: Tensor, attn_l: Tensor, attn_r: Tensor, *, num_dst: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns x, to be used from here on in its place, and what its rows add as sources and as destinations.

    Differentiable once, since gradients come from a fused op, which says so to who tries twice.

    Args:
        x: (S, ..., H, D) floating. Whoever reads the x that is returned must give each of its gradients a memory of its
            own, as the fused ops and exchanges do: the backward writes there.
        attn_l: (1, H, D).
        attn_r: (1, H, D).
        num_dst: N; destinations are the first rows.
    Returns:
        `(x, el, er)`: (S, ..., H, D), (S, ..., H, 1), (N, ..., H, 1).
    """
    out: tuple[Tensor, Tensor, Tensor] = _AttentionTerms.apply(x, attn_l, attn_r, num_dst)
    return out


class _AttentionTerms(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, attn_l: Tensor, attn_r: Tensor, num_dst: int) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(x, attn_l, attn_r)
        return x, *choose_backend(x).head_terms(x, attn_l, attn_r, num_dst)

    @staticmethod
    def backward(ctx: Any, dx: Tensor, d_el: Tensor, d_er: Tensor) -> tuple[Tensor | None, ...]:
        x, attn_l, attn_r = ctx.saved_tensors
        dx = dx.contiguous()
        needs_dx, *needs_attention = ctx.needs_input_grad[:3]
        found = choose_backend(x).head_terms_backward(x, attn_l, attn_r, d_el, d_er, dx if needs_dx else None)
        # The kernels leave no trace; only what they were given says that somebody may differentiate again.
        gradients = [
            _Refusal.apply(d, d_el) if needed else None for d, needed in zip(found, needs_attention, strict=True)
        ]
        return dx if needs_dx else None, *gradients, None


class _Refusal(torch.autograd.Function):
    """A gradient that would have another one, if it were not made by a kernel."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, made_of: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, again: Tensor) -> tuple[None, None]:
        raise RuntimeError(
            "the gradients of an optimized attention layer cannot be differentiated again (got a double backward): "
            "use the layer of DGL, `restore(layer)`"
        )
