# SPDX-License-Identifier: Apache-2.0
"""Puts functions of ours around functions of DGL, and takes them away again.

A hook is checked against the signature it was written for before anything is changed, and all hooks of a set are
installed or none. When a set is removed, every function is the original object again.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from dgl_hybrid.errors import CompatError


@dataclass(frozen=True, kw_only=True, slots=True)
class Hook:
    """One function of DGL to put `action` around."""

    module: str
    name: str
    """Within the module; `Class.method` for methods."""
    parameters: str
    """The names of its parameters, separated by blanks, as the action expects them."""
    action: Callable[..., Any]
    """Called as `action(original, *args, **kwargs)`."""


class HookSet:
    """Hooks that are installed and removed together."""

    def __init__(self, hooks: tuple[Hook, ...]) -> None:
        self._hooks = hooks
        self._installed: list[tuple[Any, str, Any, Any]] = []
        self._is_active = False

    @property
    def is_installed(self) -> bool:
        return self._is_active

    @property
    def originals(self) -> tuple[Callable[..., Any], ...]:
        """What the hooks are around, in their order; nothing while they are not installed."""
        return tuple(original for _, _, original, _ in self._installed)

    def install(self) -> None:
        """Installs all hooks; of a set that is installed, does nothing.

        Raises:
            CompatError: A function is missing or has another signature; nothing is installed then.
        """
        if self._is_active:
            return
        found = [_find(hook) for hook in self._hooks]
        self._is_active = True
        for hook, (owner, attribute, original) in zip(self._hooks, found, strict=True):
            replacement = self._around(original, hook.action)
            setattr(owner, attribute, replacement)
            self._installed.append((owner, attribute, original, replacement))

    def remove(self) -> None:
        """Puts the originals back. Where somebody hooked our hook, ours stays under theirs and does nothing."""
        self._is_active = False
        for owner, attribute, original, replacement in reversed(self._installed):
            if owner.__dict__.get(attribute) is replacement:
                setattr(owner, attribute, original)
        self._installed.clear()

    def _around(self, original: Callable[..., Any], action: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def hooked(*args: Any, **kwargs: Any) -> Any:
            if not self._is_active:
                return original(*args, **kwargs)
            return action(original, *args, **kwargs)

        return hooked


def _find(hook: Hook) -> tuple[Any, str, Callable[..., Any]]:
    owner: Any = import_module(hook.module)
    *classes, attribute = hook.name.split(".")
    for name in classes:
        owner = getattr(owner, name, None)
    function = None if owner is None else owner.__dict__.get(attribute)
    if function is None:
        raise CompatError(f"expected {hook.module}.{hook.name} in this DGL (got none). Is it a supported version?")
    parameters = " ".join(inspect.signature(function).parameters)
    if parameters != hook.parameters:
        raise CompatError(
            f"expected {hook.module}.{hook.name} to have the parameters {hook.parameters!r} (got {parameters!r}). "
            f"Another DGL than a supported one, or another tool replaced it: enable dgl_hybrid first."
        )
    return owner, attribute, function
