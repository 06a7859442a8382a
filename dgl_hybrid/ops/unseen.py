# SPDX-License-Identifier: Apache-2.0
"""Functions into which modes of PyTorch's functions do not look.

While a model runs, a `TorchFunctionMode` answers its dropout and batch norm. PyTorch asks it about every call and every
attribute of a tensor, some two microseconds each, and a layer of attention on our ops had 140 of them: a twentieth of
an epoch on a small graph. None of those is anybody's dropout.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def unseen(function: Callable[P, R]) -> Callable[P, R]:
    """Decorates a function that calls nothing of a user's. Operations inside reach dispatch modes as ever."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch._C.DisableTorchFunction():
            return function(*args, **kwargs)

    return call
