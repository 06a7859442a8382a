# SPDX-License-Identifier: Apache-2.0
"""Functions over those of one KVStore client, which is the process's and outlives the graphs that are read through it.

They lie over each other, and come off in any order: a graph may be dropped before or after one that came later.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dgl.distributed import kvstore

from dgl_hybrid.sampling.hooks import PullAnswer, answer_pulls, withdraw

Action = Callable[..., Any]
"""Called with the function underneath and the arguments."""


class _Layer:
    """One function over another one; `below` is None over the method that the client's class has when it is called."""

    def __init__(self, client: Any, name: str, action: Action) -> None:
        self._client, self._name, self._action = client, name, action
        self.below: Callable[..., Any] | None = client.__dict__.get(name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._action(
            self.below or getattr(type(self._client), self._name).__get__(self._client), *args, **kwargs
        )


class ClientHooks:
    """What one owner has put over a client's functions."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._layers: list[tuple[str, _Layer]] = []
        self._answer: PullAnswer | None = None

    def put_over(self, name: str, action: Action) -> None:
        """Has `action(original, *args, **kwargs)` run in the place of a method of this client."""
        layer = _Layer(self._client, name, action)
        self._layers.append((name, layer))
        setattr(self._client, name, layer)

    def answer_pulls(self, answer: PullAnswer) -> None:
        """Lets `answer` answer reads, where the client is not DGL's own as well (its standalone mode)."""
        if isinstance(self._client, kvstore.KVClient):
            self._answer = answer
            answer_pulls(answer)
            return

        def pull(original: Callable[..., Any], name: str, id_tensor: Any) -> Any:
            rows = answer(self._client, name, id_tensor)
            return original(name=name, id_tensor=id_tensor) if rows is None else rows

        self.put_over("pull", pull)

    def give_back(self) -> None:
        """Takes all of it away. Under a function that somebody else has put over ours since, ours stays."""
        answer, self._answer = self._answer, None
        if answer is not None:
            withdraw(answer)
        while self._layers:
            name, ours = self._layers.pop()
            attributes = self._client.__dict__
            over = attributes.get(name)
            if over is ours:
                if ours.below is None:
                    del attributes[name]
                else:
                    attributes[name] = ours.below
                continue
            while isinstance(over, _Layer) and over.below is not ours:
                over = over.below
            if isinstance(over, _Layer):
                over.below = ours.below
