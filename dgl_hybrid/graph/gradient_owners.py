# SPDX-License-Identifier: Apache-2.0
"""Whether a gradient that autograd hands to a function is held by nobody else, and may be written to.

Adding something to a few rows of a gradient that others hold (a hook, a sum whose other operand has the same gradient,
a view) takes a copy of all of them. PyTorch's engine adds gradients where they lie by the same question: whether
anybody else refers to the tensor, or to its memory (`InputBuffer::accumulate`). What Python is told of that is not a
public interface, so the counts of a gradient that surely nobody else holds are measured once, and where that is not
possible nothing is ever taken for one's own.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_Counts = tuple[int, ...]


def is_nobody_elses(grads: tuple[Tensor, ...]) -> bool:
    """Whether the first of these gradients may be written to.

    Args:
        grads: The variadic arguments of a `backward(ctx, *grads)`, before that gives their elements further names.
    """
    if _may_be_recorded():
        return False
    counts, least = _count_owners(grads), _counts_without_owners(grads[0]._is_view())
    return counts is not None and least is not None and all(a <= b for a, b in zip(counts, least, strict=True))


def _may_be_recorded() -> bool:
    """Whether a dispatch mode sees every tensor: what it keeps would be in the counts that are measured."""
    try:
        return bool(torch._C._len_torch_dispatch_stack() > 0)
    except AttributeError:
        return True


def _count_owners(grads: tuple[Tensor, ...]) -> _Counts | None:
    """Returns who refers to the first: from Python, from PyTorch, to its memory; and, of a view, to what it is of.

    Gradients are views where a forward changed the shape of its rows; those keep what they are of as long as they live.
    """
    first = grads[0]
    try:
        in_memory = torch._C._storage_Use_Count(first.untyped_storage()._cdata)
        base = first._base
        of_base = () if base is None else (sys.getrefcount(base), base._use_count())  # type: ignore[attr-defined]
        return sys.getrefcount(first), first._use_count(), in_memory, *of_base  # type: ignore[attr-defined]
    except (AttributeError, NotImplementedError, RuntimeError):
        return None


@functools.cache
def _counts_without_owners(is_view: bool) -> _Counts | None:
    """Returns the counts of a gradient that only the function itself holds; None if they tell nothing."""
    alone = _counts_of(is_view, lambda made, grad: None)
    kept: list[Tensor] = []
    for keep in (lambda made, grad: kept.append(made), lambda made, grad: kept.append(grad)):
        held = _counts_of(is_view, keep)
        if alone is None or held is None or not any(a > b for a, b in zip(held, alone, strict=True)):
            return None
    return alone


def _counts_of(is_view: bool, see: Callable[[Tensor, Tensor], None]) -> _Counts | None:
    """Returns the counts of a new gradient, of which `see` is given what was made and what was handed on."""
    found: list[_Counts | None] = []

    class Seen(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            found.append(_count_owners(grads))
            return grads[0]

    class Made(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            made = grads[0] * 2.0
            grad = made.view_as(made) if is_view else made
            see(made, grad)
            return grad

    with torch.enable_grad(), torch._C.DisableTorchFunction():
        Made.apply(Seen.apply(torch.zeros(1, requires_grad=True))).backward()
    return found[0]
