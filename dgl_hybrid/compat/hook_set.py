# SPDX-License-Identifier: Apache-2.0
"""Puts functions of ours around functions of DGL, and takes them away again.

A hook is checked against the signature it was written for before anything is changed, and all hooks of a set are
installed or none. When a set is removed, every function is the original object again. Where somebody put a function of
theirs around ours, ours stays below it for good and does nothing, however often its set is installed again.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

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


@dataclass(eq=False, slots=True)
class _Activation:
    """What the hooks of one installation ask before they act; the next installation has another."""

    is_over: bool = False


_ours: WeakKeyDictionary[Callable[..., Any], tuple[_Activation, Callable[..., Any]]] = WeakKeyDictionary()
"""The functions that were put around others, in what installation, and around what.

Not an attribute of them: `functools.wraps` would copy it to functions of other people.
"""


class HookSet:
    """Hooks that are installed and removed together."""

    def __init__(self, hooks: tuple[Hook, ...]) -> None:
        self._hooks = hooks
        self._installed: list[tuple[Any, str, Callable[..., Any]]] = []
        self._activation: _Activation | None = None

    @property
    def is_installed(self) -> bool:
        return self._activation is not None

    @property
    def originals(self) -> tuple[Callable[..., Any], ...]:
        """What the hooks are around, in their order; nothing while they are not installed."""
        return tuple(original for _, _, original in self._installed)

    def install(self) -> None:
        """Installs all hooks; of a set that is installed, does nothing.

        Raises:
            CompatError: A function is missing or has another signature; nothing is installed then.
        """
        if self._activation is not None:
            return
        found = [_find(hook) for hook in self._hooks]
        self._activation = _Activation()
        made: dict[tuple[Callable[..., Any], Callable[..., Any]], Callable[..., Any]] = {}
        for hook, (owner, attribute, original) in zip(self._hooks, found, strict=True):
            # One object where DGL has one under two names: pickle looks a function up by its own.
            key = original, hook.action
            made[key] = made.get(key) or _around(original, hook.action, self._activation)
            setattr(owner, attribute, made[key])
            self._installed.append((owner, attribute, original))

    def remove(self) -> None:
        """Puts the originals back. Where somebody hooked our hook, ours stays under theirs and does nothing."""
        if self._activation is None:
            return
        self._activation.is_over = True
        self._activation = None
        for owner, attribute, _ in reversed(self._installed):
            function = owner.__dict__.get(attribute)
            below = _below_leftovers(function)
            if below is not function:
                setattr(owner, attribute, below)
        self._installed.clear()


def _around(original: Callable[..., Any], action: Callable[..., Any], activation: _Activation) -> Callable[..., Any]:
    @functools.wraps(original)
    def hooked(*args: Any, **kwargs: Any) -> Any:
        # Not what the set says now: under somebody's function this one may outlive its installation, and acting in the
        # next one it would act twice, or be what that one takes for DGL's own.
        if activation.is_over:
            return original(*args, **kwargs)
        return action(original, *args, **kwargs)

    _ours[hooked] = (activation, original)
    return hooked


def _below_leftovers(function: Any) -> Any:
    """Returns what stands below hooks of installations that are over; `function` itself where it is none of them."""
    while isinstance(function, FunctionType) and function in _ours:
        activation, original = _ours[function]
        if not activation.is_over:
            break
        function = original
    return function


def _find(hook: Hook) -> tuple[Any, str, Callable[..., Any]]:
    owner: Any = import_module(hook.module)
    *classes, attribute = hook.name.split(".")
    for name in classes:
        owner = getattr(owner, name, None)
    function = None if owner is None else _below_leftovers(owner.__dict__.get(attribute))
    if function is None:
        raise CompatError(f"expected {hook.module}.{hook.name} in this DGL (got none). Is it a supported version?")
    parameters = " ".join(inspect.signature(function).parameters)
    if parameters != hook.parameters:
        raise CompatError(
            f"expected {hook.module}.{hook.name} to have the parameters {hook.parameters!r} (got {parameters!r}). "
            f"Another DGL than a supported one, or another tool replaced it: enable dgl_hybrid first."
        )
    return owner, attribute, function
