# SPDX-License-Identifier: Apache-2.0
"""Reads of the KVStore have several answerers: the halo store, full-graph training's stable reads, and DGL itself."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from dgl.distributed import kvstore
from torch import Tensor

from dgl_hybrid.compat.hook_set import Hook, HookSet

PullAnswer = Callable[[Any, str, Tensor], Tensor | None]
"""(client, field name, ids) -> rows, or None to leave them to the next."""

_answers: list[PullAnswer] = []
_let_go: list[weakref.WeakMethod[Callable[[], None]]] = []
"""What is called when the plugin is switched off, in the order in which it came."""


def _pull(original: Callable[..., Any], client: Any, name: str, id_tensor: Tensor) -> Any:
    for answer in tuple(_answers):  # some end with their objects, at any time
        rows = answer(client, name, id_tensor)
        if rows is not None:
            return rows
    return original(client, name, id_tensor)


_pull_hook = HookSet(
    (Hook(module="dgl.distributed.kvstore", name="KVClient.pull", parameters="self name id_tensor", action=_pull),)
)


def answer_pulls(answer: PullAnswer, *, last: bool = False) -> None:
    """Lets `answer` answer reads of `DistTensor`s in this process, whether the plugin is on or not.

    Args:
        answer: Asked before those that came earlier, on every `KVClient.pull`.
        last: Ask it after all others.
    """
    if not _answers:
        _pull_hook.install()
    _answers.insert(len(_answers) if last else 0, answer)


def withdraw(answer: PullAnswer) -> None:
    """Ends what `answer_pulls` began; without answers, `KVClient.pull` is DGL's own again."""
    if answer in _answers:
        _answers.remove(answer)
        if not _answers:
            _pull_hook.remove()


def until_disabled(let_go: Callable[[], None]) -> None:
    """Has a method called, once, when the plugin is switched off, if its object is still there: it gives back what
    that object has hooked of DGL.
    """
    _let_go[:] = [method for method in _let_go if method() is not None]
    _let_go.append(weakref.WeakMethod(let_go))


def give_back() -> None:
    """Calls what `until_disabled` was given, the latest first: where hooks lie on hooks, that one's is outermost."""
    while _let_go:
        let_go = _let_go.pop()()
        if let_go is not None:
            let_go()


def unhooked_pull(client: Any, name: str, ids: Tensor) -> Tensor:
    """Reads rows as DGL does, asking none of the answerers.

    Not by looking what is under `KVClient.pull` now: somebody (a profiler) may have put a function around our hook.
    """
    originals = _pull_hook.originals
    pull = originals[0] if originals and isinstance(client, kvstore.KVClient) else type(client).pull
    rows: Tensor = pull(client, name, ids)
    return rows
