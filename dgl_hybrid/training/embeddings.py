# SPDX-License-Identifier: Apache-2.0
"""Stands by while a `DistEmbedding` hands out rows: what it returns is the leaf whose gradient its optimizer takes.

That leaf is what was read from the KVStore only where rows are asked for on the device that they were read to. Else it
is a copy that nobody but the embedding and the script ever hold.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from dgl_hybrid.compat.hook_set import Hook, HookSet


class Bystander(Protocol):
    """Whoever answers reads of a KVStore client."""

    def stand_by(self, hand_out: Callable[[], Tensor], name: str, ids: Tensor) -> Tensor:
        """Returns what `hand_out` does, a `DistEmbedding`'s rows, which it calls once.

        Args:
            name: What the KVStore calls the embedding.
            ids: Of the rows that are asked for.
        """


_bystanders: weakref.WeakSet[Bystander] = weakref.WeakSet()
_at_its_end: weakref.WeakKeyDictionary[Bystander, weakref.finalize[..., Bystander]] = weakref.WeakKeyDictionary()


def _call(original: Callable[..., Tensor], embedding: Any, idx: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    hand_out = functools.partial(original, embedding, idx, *args, **kwargs)
    for bystander in list(_bystanders):
        hand_out = functools.partial(bystander.stand_by, hand_out, embedding._tensor.kvstore_key, idx)
    return hand_out()


_hook = HookSet(
    (
        Hook(
            module="dgl.distributed.nn.pytorch.sparse_emb",
            name="DistEmbedding.__call__",
            parameters="self idx device",
            action=_call,
        ),
    )
)


def stand_by_embeddings(bystander: Bystander) -> None:
    """Lets it stand by from now on, for as long as it lives; after the last one the method is DGL's own again."""
    _hook.install()
    _bystanders.add(bystander)
    _at_its_end[bystander] = weakref.finalize(bystander, _remove_if_alone)


def stand_aside(bystander: Bystander) -> None:
    """Ends what `stand_by_embeddings` began."""
    _bystanders.discard(bystander)
    if (at_its_end := _at_its_end.pop(bystander, None)) is not None:
        at_its_end.detach()
    _remove_if_alone()


def _remove_if_alone() -> None:
    if not list(_bystanders):  # its length still counts one that is just gone
        _hook.remove()
