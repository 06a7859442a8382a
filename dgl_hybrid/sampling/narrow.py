# SPDX-License-Identifier: Apache-2.0
"""Finds a smaller type that holds values bit for bit: counts stored as floats, features that once were halves.

Nothing is rounded. A type counts as sufficient for some rows if converting them there and back gives the same bits,
signed zeros included, however many of them are converted at once. So rows with a NaN among floats stay as they are:
which bits a NaN has after a conversion depends on whether vector instructions made it, or those for the rest.
"""

from __future__ import annotations

import torch
from torch import Tensor

_FLOATS = (torch.uint8, torch.float16, torch.bfloat16, torch.float32)
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32)
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def holds_exactly(rows: Tensor, dtype: torch.dtype) -> bool:
    """Whether `rows` survive the way to `dtype` and back, bit for bit."""
    if dtype == rows.dtype:
        return True
    if rows.is_floating_point() and bool(rows.isnan().any()):
        return False
    back = rows.to(dtype).to(rows.dtype)
    bits = _BITS[rows.element_size()]
    return torch.equal(back.contiguous().view(bits), rows.contiguous().view(bits))


def narrowest_dtype(rows: Tensor) -> torch.dtype:
    """Returns the smallest type that holds these rows exactly; their own if there is no smaller one."""
    if rows.element_size() == 1 or rows.is_complex():
        return rows.dtype
    candidates = _FLOATS if rows.is_floating_point() else _INTEGERS
    for dtype in candidates:
        if dtype.itemsize < rows.element_size() and holds_exactly(rows, dtype):
            return dtype
    return rows.dtype
