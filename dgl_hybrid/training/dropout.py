# SPDX-License-Identifier: Apache-2.0
"""Dropout whose mask belongs to the vertex, not to the process: a master and its replicas drop the same elements.

An element is kept or dropped by a counter-based function of (seed, step, call index, global id of the row, column).
No generator state is involved, so row order, number of ranks and chunking cannot change a mask, and the backward
draws the mask again instead of storing it, which costs less than writing and reading one (measured on CPU).

The mask function and why it is what it is: `ops/random_words.py`. Most time goes into the words of the elements, so
they are drawn in chunks of rows whose buffers stay in cache.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from dgl_hybrid.ops.random_words import call_keys, column_words, element_words, keep_threshold, row_words

_CHUNK_ELEMENTS_PER_THREAD = 1 << 19
"""On CPU: two int32 buffers and one of the rows' dtype, 6 MiB per thread for float32. A quarter takes 20 % longer. Each
operation on a chunk ends in a barrier of the threads, which is dear when they are more than the cores: not smaller."""

_CHUNK_ELEMENTS_CUDA = 1 << 25
"""On CUDA: bounds the temporaries to 384 MiB without making the kernels small."""


def replicated_dropout(
    x: Tensor, p: float, keys_global: Tensor, *, seed: int, step: int, call_index: int, training: bool = True
) -> Tensor:
    """Zeroes elements of `x` with probability `p` and scales the others by `1/(1-p)`; the mask depends on ids alone.

    Not collective. Differentiable any number of times; `x` is not modified. With `training=False` or `p=0` it is `x`.

    Args:
        x: (n, ...) floating: one row per vertex (or per edge, for attention dropout), in any order, repeats allowed.
        p: Probability of dropping, 0 to 1.
        keys_global: (n,) int64, on the device of `x`: global id of each row's vertex (or edge).
        seed: The run's seed; the same on every rank.
        step: Counts the optimizer steps; the same on every rank.
        call_index: Counts the dropout calls within one forward, so that layers draw different masks.
    Returns:
        Shape, dtype and device of `x`.
    Raises:
        ValueError: `p` outside 0..1, or not one key per row.
        TypeError: `x` not floating or `keys_global` not int64.
    """
    if not 0.0 <= p <= 1.0:  # also catches NaN
        raise ValueError(f"dropout probability must be 0 to 1 (got {p})")
    if not x.is_floating_point():
        raise TypeError(f"dropout takes floating rows (got {x.dtype})")
    if keys_global.dtype != torch.int64:
        raise TypeError(f"dropout keys must be int64 global ids (got {keys_global.dtype})")
    if x.dim() == 0 or keys_global.shape != x.shape[:1]:
        raise ValueError(f"dropout needs one key per row: x {tuple(x.shape)}, keys {tuple(keys_global.shape)}")
    if not training or p == 0.0 or x.numel() == 0:
        return x
    out: Tensor = _ReplicatedDropout.apply(x, p, keys_global, call_keys(seed, step, call_index))
    return out


class _ReplicatedDropout(torch.autograd.Function):
    """Multiplication by a mask: linear and self-adjoint, so its backward is itself with the same keys."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float, keys_global: Tensor, keys: tuple[int, int]) -> Tensor:
        ctx.save_for_backward(keys_global)
        ctx.p, ctx.keys = p, keys
        return _apply_mask(x, p, keys_global, keys)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (keys_global,) = ctx.saved_tensors
        dx: Tensor = _ReplicatedDropout.apply(grads[0], ctx.p, keys_global, ctx.keys)
        return dx, None, None, None


def _apply_mask(x: Tensor, p: float, keys_global: Tensor, keys: tuple[int, int]) -> Tensor:
    num_rows = x.shape[0]
    x_NF = x.reshape(num_rows, math.prod(x.shape[1:]))
    if p == 1.0:
        return torch.zeros_like(x)
    num_columns = x_NF.shape[1]
    out_NF = torch.empty_like(x_NF, memory_format=torch.contiguous_format)
    columns = column_words(num_columns, x.device)
    threshold = keep_threshold(p)
    scale = 1.0 / (1.0 - p)

    chunk = _CHUNK_ELEMENTS_CUDA if x.is_cuda else _CHUNK_ELEMENTS_PER_THREAD * torch.get_num_threads()
    chunk_rows = min(num_rows, max(1, chunk // num_columns))
    words = torch.empty(chunk_rows, num_columns, dtype=torch.int32, device=x.device)
    shifted = torch.empty_like(words)
    keep = torch.empty(chunk_rows, num_columns, dtype=x.dtype, device=x.device)
    for begin in range(0, num_rows, chunk_rows):
        end = min(begin + chunk_rows, num_rows)
        rows = end - begin
        element_words(row_words(keys_global[begin:end], keys), columns, out=words[:rows], scratch=shifted[:rows])
        # Written as 0.0 and 1.0 in the rows' dtype: multiplying by a bool tensor takes five times as long on CPU.
        torch.ge(words[:rows], threshold, out=keep[:rows])
        out = out_NF[begin:end]
        torch.mul(x_NF[begin:end], keep[:rows], out=out).mul_(scale)
    return out_NF.view(x.shape)
