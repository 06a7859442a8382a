# SPDX-License-Identifier: Apache-2.0
"""Work on rows without a graph in plain PyTorch: for what has no kernel.

Products are made in pieces that stay in cache. Written as `(x * a).sum(-1)`, twice, autograd makes seven tensors as
large as the features for numbers of one per vertex and head; on a CPU their page faults alone take as long as attention
does.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from dgl_hybrid.ops.row_blocks import sum_dtype

_PIECE_ELEMENTS = 1 << 17
"""On CPU: half a MiB of float32."""


def head_terms(x: Tensor, attn_l: Tensor, attn_r: Tensor, num_dst: int) -> tuple[Tensor, Tensor]:
    """`Backend.head_terms`."""
    dtype = torch.result_type(x, attn_l)
    el = x.new_empty((*x.shape[:-1], 1), dtype=dtype)
    er = x.new_empty((num_dst, *el.shape[1:]), dtype=dtype)
    for term, attention in ((el, attn_l), (er, attn_r)):
        for rows in _pieces(x, len(term)):
            torch.sum(x[rows] * attention, dim=-1, keepdim=True, out=term[rows])
    return el, er


def head_terms_backward(
    x: Tensor, attn_l: Tensor, attn_r: Tensor, d_el: Tensor, d_er: Tensor, dx: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`Backend.head_terms_backward`."""
    gradients: list[Tensor] = []
    for d_term, attention in ((d_el, attn_l), (d_er, attn_r)):
        total = torch.zeros(attention.shape, dtype=sum_dtype(d_term.dtype), device=x.device)
        for rows in _pieces(x, len(d_term)):
            if dx is not None:
                dx[rows].addcmul_(d_term[rows], attention)
            total += (x[rows] * d_term[rows]).flatten(0, -3).sum(0, dtype=total.dtype)
        gradients.append(total.to(attention.dtype))
    return gradients[0], gradients[1]


def add_rows(out: Tensor, targets: Tensor, rows: Tensor, factors: Tensor | None) -> None:
    """`Backend.add_rows`."""
    if factors is not None:
        rows = rows * factors.index_select(0, targets).unsqueeze(-1)
    # Of columns beside others it would be several times as slow as the copy.
    out.index_add_(0, targets, rows.contiguous())


def merge_rows(out: Tensor, targets: Tensor, rows: Tensor, keeps: Tensor, adds: Tensor) -> None:
    """`Backend.merge_rows`."""
    kept = out.index_select(0, targets).mul_(keeps.unsqueeze(-1))
    out.index_copy_(0, targets.long(), kept.addcmul_(rows, adds.unsqueeze(-1)))


def biased_elu(x: Tensor, bias: Tensor | None) -> Tensor:
    """`Backend.biased_elu`."""
    return F.elu(x) if bias is None else F.elu_(x + bias)


def biased_elu_backward(grad: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    """`Backend.biased_elu_backward`."""
    dx = grad * torch.where(out <= 0, out + 1.0, 1.0)
    return dx, dx.sum(0)


def _pieces(x: Tensor, num_rows: int) -> Iterator[slice]:
    """Cuts the first rows into pieces whose products stay in cache; on CUDA, where launches cost more, into one."""
    step = num_rows if x.is_cuda else max(1, _PIECE_ELEMENTS * torch.get_num_threads() // max(1, x[:1].numel()))
    for begin in range(0, num_rows, max(1, step)):
        yield slice(begin, min(begin + step, num_rows))


class PlainRows:
    """This work as methods of `backend.Backend`, for backends that have no kernels for it."""

    def add_rows(self, out: Tensor, targets: Tensor, rows: Tensor, factors: Tensor | None) -> None:
        add_rows(out, targets, rows, factors)

    def merge_rows(self, out: Tensor, targets: Tensor, rows: Tensor, keeps: Tensor, adds: Tensor) -> None:
        merge_rows(out, targets, rows, keeps, adds)

    def biased_elu(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return biased_elu(x, bias)

    def biased_elu_backward(self, grad: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
        return biased_elu_backward(grad, out)

    def head_terms(self, x: Tensor, attn_l: Tensor, attn_r: Tensor, num_dst: int) -> tuple[Tensor, Tensor]:
        return head_terms(x, attn_l, attn_r, num_dst)

    def head_terms_backward(
        self, x: Tensor, attn_l: Tensor, attn_r: Tensor, d_el: Tensor, d_er: Tensor, dx: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return head_terms_backward(x, attn_l, attn_r, d_el, d_er, dx)
