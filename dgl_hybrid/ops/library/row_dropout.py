# SPDX-License-Identifier: Apache-2.0
"""drop_rows: dropout whose mask belongs to the ids of rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dgl_hybrid.ops.backend import choose_backend
from dgl_hybrid.ops.library.registration import Grads, register, registered

_M64 = (1 << 64) - 1


def _drop_rows(x: Tensor, ids: Tensor, keys: Tensor, p: float) -> Tensor:
    first, second = (int(key) & _M64 for key in keys.tolist())
    return choose_backend(x).drop_rows(x.contiguous(), ids.contiguous(), (first, second), p)


def _drop_rows_meta(x: Tensor, ids: Tensor, keys: Tensor, p: float) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ids, keys, ctx.p = inputs
    ctx.save_for_backward(ids, keys)


def _backward(ctx: Any, grad: Tensor) -> Grads:
    ids, keys = ctx.saved_tensors
    return registered("drop_rows")(grad, ids, keys, ctx.p), None, None, None


register(
    "drop_rows(Tensor x, Tensor ids, Tensor keys, float p) -> Tensor", _drop_rows, _drop_rows_meta, _setup, _backward
)
