# SPDX-License-Identifier: Apache-2.0
"""What a model's calls change outside of the model: attributes of its classes, what its functions close over, globals.

Copies of a model share all that with it. Ranks run copies as often as they have time for, and some of it (whether rows
are mixed) rank 0 alone: a temperature that is lowered in every forward, kept on the class, would be another one on
every rank from then on.
"""

from __future__ import annotations

import contextlib
import dis
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from types import CodeType, FunctionType
from typing import Any

from torch import Tensor, nn

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_MOST_NUMBERS = 4096
"""Of a tensor or container that is looked at: state has few, data many."""
_LIBRARIES = frozenset({"torch", "dgl", "dgl_hybrid", "numpy", "scipy", "pandas", "sympy"}) | sys.stdlib_module_names


@contextlib.contextmanager
def outside_state_kept(model: nn.Module) -> Iterator[None]:
    """Puts numbers, text, small tensors, and lists, sets and dicts of them back to what they were before.

    They are looked for where the script's own code reaches them: in attributes of the classes of the model's modules,
    in what their methods, and functions that modules hold, close over, and in globals that those, or functions of the
    script that they call by name, assign or have in a container, a tensor or an object of the script's.
    """
    places = _places(model)
    try:
        yield
    finally:
        for place in places:
            place.put_back()


@dataclass
class _Place:
    """A name somewhere, and what it stood for."""

    read: Callable[[], Any]
    write: Callable[[Any], None]
    value: Any
    content: Any
    """Of a container or tensor: a copy."""

    def put_back(self) -> None:
        with contextlib.suppress(Exception):  # a name that is no longer there, a class that refuses
            if self.read() is not self.value:
                self.write(self.value)
            if isinstance(self.value, Tensor):
                if not bool((self.value == self.content).all()):
                    self.value.detach().copy_(self.content)
            elif self.content is not None and self.value != self.content:
                self.value.clear()
                (self.value.extend if isinstance(self.value, list) else self.value.update)(self.content)


def _place(read: Callable[[], Any], write: Callable[[Any], None]) -> Iterator[_Place]:
    """Yields the place, if what is there is of a kind that is kept."""
    try:
        value = read()
    except (KeyError, ValueError):  # ValueError: an empty cell
        return
    if isinstance(value, _PLAIN):
        yield _Place(read, write, value, None)
    elif isinstance(value, Tensor):
        if not isinstance(value, nn.Parameter) and not value.requires_grad and value.numel() <= _MOST_NUMBERS:
            yield _Place(read, write, value, value.clone())
    elif type(value) in (list, dict, set) and len(value) <= _MOST_NUMBERS:
        inside = [*value, *value.values()] if isinstance(value, dict) else value
        if all(isinstance(item, _PLAIN) for item in inside):
            yield _Place(read, write, value, value.copy())
    elif not isinstance(value, (type, nn.Module)) and _is_of_script(type(value)):
        for name in [*vars(value)] if hasattr(value, "__dict__") else ():  # a schedule, say
            if isinstance(vars(value)[name], _PLAIN):
                yield _Place(partial(getattr, value, name), partial(setattr, value, name), vars(value)[name], None)


def _places(model: nn.Module) -> list[_Place]:
    places: list[_Place] = []
    functions: list[Any] = []
    for kind in dict.fromkeys(base for module in model.modules() for base in type(module).__mro__):
        if _is_of_script(kind):
            functions += [inspect.unwrap(held) for held in vars(kind).values() if isinstance(held, FunctionType)]
            for name in [name for name in vars(kind) if not name.startswith("__")]:
                places += _place(partial(vars(kind).__getitem__, name), partial(setattr, kind, name))
    for module in model.modules():
        functions += vars(module).values()
    seen: set[FunctionType] = set()
    while functions:
        function = functions.pop()
        if not isinstance(function, FunctionType) or function in seen or not _is_of_script(function):
            continue
        seen.add(function)
        for cell in function.__closure__ or ():
            places += _place(partial(getattr, cell, "cell_contents"), partial(setattr, cell, "cell_contents"))
            with contextlib.suppress(ValueError):
                functions.append(cell.cell_contents)
        known = function.__globals__
        for name, is_assigned in _global_names(function.__code__):
            functions.append(known.get(name))
            # A number that nobody assigns there stays what it is.
            if is_assigned or not isinstance(known.get(name), _PLAIN):
                places += _place(partial(known.__getitem__, name), partial(known.__setitem__, name))
    return places


def _is_of_script(what: type | FunctionType) -> bool:
    return (what.__module__ or "").partition(".")[0] not in _LIBRARIES


@lru_cache(maxsize=1024)  # asked for before each run of a copy, and slow to find
def _global_names(code: CodeType) -> frozenset[tuple[str, bool]]:
    """Returns which names of its module a function reads, and assigns; so do functions that are made in it."""
    steps = {(step.opname, step.argval) for step in dis.get_instructions(code)}
    found = frozenset((name, operation == "STORE_GLOBAL") for operation, name in steps if operation.endswith("_GLOBAL"))
    return found.union(*(_global_names(inner) for inner in code.co_consts if isinstance(inner, CodeType)))
