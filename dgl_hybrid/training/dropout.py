# SPDX-License-Identifier: Apache-2.0
"""Dropout whose mask belongs to the vertex, not to the process: a master and its replicas drop the same elements.

An element is kept or dropped by a counter-based function of (seed, step, call index, global id of the row, column).
No generator state is involved, so row order, number of ranks and chunking cannot change a mask, and the backward
draws the mask again instead of storing it, which costs less than writing and reading one (measured on CPU).

The mask function and why it is what it is: `ops/random_words.py`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dgl_hybrid.ops.random_words import call_keys
from dgl_hybrid.ops.row_dropout import drop_rows


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
    rows = x.reshape(len(x), math.prod(x.shape[1:]))
    return drop_rows(rows, keys_global, call_keys(seed, step, call_index), p).view(x.shape)
