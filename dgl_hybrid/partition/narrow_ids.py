# SPDX-License-Identifier: Apache-2.0
"""Ids in four bytes where they fit: a rank holds one for each edge, several times over."""

from __future__ import annotations

import torch
from torch import Tensor

_LIMIT = 2**31


def narrow_dtype(bound: int) -> torch.dtype:
    """Returns the dtype of ids in [0, bound): int32 where that suffices."""
    return torch.int32 if bound <= _LIMIT else torch.int64


def narrow(ids: Tensor, bound: int) -> Tensor:
    """Returns (n,) ids, which lie in [0, bound), as int32 where that suffices; else as they are."""
    return ids.to(torch.int32) if bound <= _LIMIT else ids


class NarrowIds:
    """Ids that are seldom looked at: held as int32 where they fit, spelled out when somebody asks.

    Args:
        ids: (n,) int64, any values.
    """

    def __init__(self, ids: Tensor) -> None:
        fits = not len(ids) or (int(ids.min()) >= -_LIMIT and int(ids.max()) < _LIMIT)
        self._held = ids.to(torch.int32) if fits else ids

    def __len__(self) -> int:
        return len(self._held)

    def wide(self) -> Tensor:
        """Returns the (n,) int64 ids; the same tensor at every call, kept from the first on."""
        with torch.inference_mode(False):  # asked for in an evaluation, perhaps, and kept for training
            self._held = self.peek()
        return self._held

    def peek(self, positions: Tensor | None = None) -> Tensor:
        """Returns the (n,) int64 ids, or those at some positions, for once."""
        return (self._held if positions is None else self._held[positions]).to(torch.int64)

    def repeated(self, count: int) -> NarrowIds:
        """Returns so many of them, from the first on again when all are taken; in their memory where they suffice."""
        return NarrowIds(repeated(self._held, count))


def repeated(ids: Tensor, count: int) -> Tensor:
    """Returns (count,) of these ids, from the first on again when all are taken, and zeros where there are none."""
    if count <= len(ids):
        return ids[:count]
    return ids[torch.arange(count) % len(ids)] if len(ids) else ids.new_zeros(count)
