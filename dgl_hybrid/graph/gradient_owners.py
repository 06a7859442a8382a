# SPDX-License-Identifier: Apache-2.0
"""Whether a gradient that autograd hands to a function is held by nobody else, and may be written to.

Adding something to a few rows of a gradient that others hold (a hook, a sum whose other operand has the same gradient,
a view) takes a copy of all of them. PyTorch itself looks at how many hold a gradient before it keeps it as a leaf's
(`AccumulateGrad`); what Python tells of that is not a public interface, so the counts of a gradient that surely nobody
else holds are measured once, and without them nothing is ever taken for one's own.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import Tensor

_Counts = tuple[int, int, int]


def is_nobody_elses(grads: tuple[Tensor, ...]) -> bool:
    """Whether the first of these gradients may be written to.

    Args:
        grads: The variadic arguments of a `backward(ctx, *grads)`, before that gives their elements further names.
    """
    counts, least = _count_owners(grads), _counts_without_owners()
    return counts is not None and least is not None and all(a <= b for a, b in zip(counts, least, strict=True))


def _count_owners(grads: tuple[Tensor, ...]) -> _Counts | None:
    """Returns who refers to the first: from Python, from PyTorch, and to its memory."""
    first = grads[0]
    try:
        in_pytorch = first._use_count()  # type: ignore[attr-defined]
        of_memory = torch._C._storage_Use_Count(first.untyped_storage()._cdata)
    except (AttributeError, NotImplementedError, RuntimeError):
        return None
    return sys.getrefcount(first), in_pytorch, of_memory


@functools.cache
def _counts_without_owners() -> _Counts | None:
    """Returns the counts of a gradient that only the function itself holds; None if they tell nothing."""
    alone, held = _counts_of(keeps=False), _counts_of(keeps=True)
    return alone if alone is not None and held is not None and alone[0] < held[0] else None


def _counts_of(*, keeps: bool) -> _Counts | None:
    found: list[_Counts | None] = []
    kept: list[Tensor] = []

    class Seen(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            found.append(_count_owners(grads))
            return grads[0]

    class Fresh(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            made = grads[0] * 2.0
            if keeps:
                kept.append(made)
            return made

    with torch.enable_grad():
        seen = Seen.apply(torch.zeros(1, requires_grad=True))
        Fresh.apply(seen).backward()
    return found[0]
