# SPDX-License-Identifier: Apache-2.0
"""Dropout of rows by a mask that is a function of ids, in plain PyTorch: for what has no kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from dgl_hybrid.ops.random_words import column_words, element_words, keep_threshold, row_words

_CHUNK_ELEMENTS_PER_THREAD = 1 << 19
"""On CPU: two int32 buffers and one of the rows' dtype, 6 MiB per thread for float32. A quarter takes 20 % longer. Each
operation on a chunk ends in a barrier of the threads, which is dear when they are more than the cores: not smaller."""
_CHUNK_ELEMENTS_CUDA = 1 << 25
"""On CUDA: bounds the temporaries to 384 MiB without making the kernels small."""


def multiply_by_mask(x: Tensor, ids: Tensor, keys: tuple[int, int], p: float) -> Tensor:
    """Zeroes elements with probability `p` and multiplies the others by `1/(1-p)`; without gradients.

    Most time goes into words, so they are drawn in chunks of rows that stay in cache.

    Args:
        x: (N, F) floating, any strides.
        ids: (N,) int64, on its device.
        keys: Two unsigned 64-bit integers, from `random_words.call_keys`.
        p: 0 to 1.

    Returns:
        (N, F), contiguous.
    """
    num_rows, num_columns = x.shape
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if p == 1.0 or x.numel() == 0:
        return out.zero_()
    columns = column_words(num_columns, x.device)
    threshold, scale = keep_threshold(p), 1.0 / (1.0 - p)
    chunk = _CHUNK_ELEMENTS_CUDA if x.is_cuda else _CHUNK_ELEMENTS_PER_THREAD * torch.get_num_threads()
    chunk_rows = min(num_rows, max(1, chunk // num_columns))
    words = torch.empty(chunk_rows, num_columns, dtype=torch.int32, device=x.device)
    shifted = torch.empty_like(words)
    keep = torch.empty(chunk_rows, num_columns, dtype=x.dtype, device=x.device)
    for begin in range(0, num_rows, chunk_rows):
        end = min(begin + chunk_rows, num_rows)
        rows = end - begin
        element_words(row_words(ids[begin:end], keys), columns, out=words[:rows], scratch=shifted[:rows])
        # Written as 0.0 and 1.0 in the rows' dtype: multiplying by a bool tensor takes five times as long on CPU.
        torch.ge(words[:rows], threshold, out=keep[:rows])
        torch.mul(x[begin:end], keep[:rows], out=out[begin:end]).mul_(scale)
    return out
