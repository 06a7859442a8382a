# SPDX-License-Identifier: Apache-2.0
"""What `torch.compile` calls as it is, rather than look into it.

Dynamo follows Python code into the hooks that accompany a forward and into what blocks do: threads, weak references,
kernels that are compiled, exchanges with other ranks. None of that fits into a graph, so it breaks its graph there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

_TypeT = TypeVar("_TypeT", bound=type)

_waiting: list[tuple[type, str]] = []
_watched: list[Callable[..., Any]] = []


def untraced(*names: str) -> Callable[[_TypeT], _TypeT]:
    """Decorates a class: dynamo looks into none of these methods, from the next `settle_untraced` on."""

    def note(owner: _TypeT) -> _TypeT:
        _waiting.extend((owner, name) for name in names)
        return owner

    return note


def keep_out_of_graphs(functions: Iterable[Callable[..., Any]]) -> None:
    """Has dynamo call these functions of PyTorch one by one, where a `TorchFunctionMode` sees them.

    It asks modes about most functions, but not about all: lowered into a graph, these would run unseen.
    """
    _watched.extend(functions)


def settle_untraced() -> bool:
    """Hides the methods from dynamo, once somebody has imported it: nobody waits seconds here for what he may not need.

    Whoever compiles has imported it, and so has whoever made an optimizer.

    Returns:
        Whether some were hidden now: bound methods that are held elsewhere are the old ones.
    """
    dynamo: Any = sys.modules.get("torch._dynamo")
    disable = getattr(dynamo, "disable", None)  # another thread may be importing it
    if not _waiting or disable is None:
        return False
    while _watched:
        dynamo.disallow_in_graph(_watched.pop())
    while _waiting:
        owner, name = _waiting.pop()
        setattr(owner, name, disable(vars(owner)[name]))
    return True
