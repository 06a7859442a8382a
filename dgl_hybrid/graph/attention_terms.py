# SPDX-License-Identifier: Apache-2.0
"""What sources and destinations add to the logits of `GATConv`, without temporaries of the size of the features.

Written as `(x * a).sum(-1)`, twice, autograd makes seven tensors as large as the features for numbers of one per vertex
and head; on a CPU the page faults alone take as long as the fused op itself. Here products are made in pieces that stay
in cache, and the backward adds into the gradient that arrives.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

_PIECE_ELEMENTS = 1 << 17
"""On CPU: half a MiB of float32."""


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
        dtype = torch.result_type(x, attn_l)
        el = x.new_empty((*x.shape[:-1], 1), dtype=dtype)
        er = x.new_empty((num_dst, *el.shape[1:]), dtype=dtype)
        for term, attention in ((el, attn_l), (er, attn_r)):
            for rows in _pieces(x, len(term)):
                torch.sum(x[rows] * attention, dim=-1, keepdim=True, out=term[rows])
        return x, el, er

    @staticmethod
    def backward(ctx: Any, dx: Tensor, del_: Tensor, der: Tensor) -> tuple[Tensor | None, ...]:
        x, attn_l, attn_r = ctx.saved_tensors
        needs_dx, *needs_attention = ctx.needs_input_grad[:3]
        dx = dx.contiguous()
        gradients: list[Tensor | None] = [None, None]
        for k, (dterm, attention) in enumerate(((del_, attn_l), (der, attn_r))):
            total = torch.zeros(attention.shape, dtype=dterm.dtype, device=x.device)
            for rows in _pieces(x, len(dterm)):
                if needs_dx:
                    dx[rows].addcmul_(dterm[rows], attention)
                if needs_attention[k]:
                    total += (x[rows] * dterm[rows]).flatten(0, -3).sum(0)
            gradients[k] = total.to(attention.dtype) if needs_attention[k] else None
        return dx if needs_dx else None, *gradients, None


def _pieces(x: Tensor, num_rows: int) -> Iterator[slice]:
    """Cuts the first rows into pieces whose products stay in cache; on CUDA, where launches cost more, into one."""
    step = num_rows if x.is_cuda else max(1, _PIECE_ELEMENTS * torch.get_num_threads() // max(1, x[:1].numel()))
    for begin in range(0, num_rows, max(1, step)):
        yield slice(begin, min(begin + step, num_rows))
