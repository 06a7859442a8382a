# SPDX-License-Identifier: Apache-2.0
"""Dropout of rows whose mask is a function of their ids."""

from __future__ import annotations

import torch
from torch import Tensor

from dgl_hybrid.ops.library.registration import registered
from dgl_hybrid.ops.random_words import signed


def drop_rows(x: Tensor, ids: Tensor, keys: tuple[int, int], p: float) -> Tensor:
    """Returns `x` with elements zeroed with probability `p`, the others times `1/(1-p)`.

    Differentiable any number of times: linear and its own adjoint, so each derivative draws the mask again.

    Args:
        x: (N, F) floating, any strides.
        ids: (N,) int64, on its device: what the mask of each row is drawn from.
        keys: Of this call, from `random_words.call_keys`.
        p: 0 to 1.

    Returns:
        (N, F), contiguous.
    """
    out: Tensor = registered("drop_rows")(x, ids, torch.tensor([signed(key, 64) for key in keys]), p)
    return out
