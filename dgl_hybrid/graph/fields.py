# SPDX-License-Identifier: Apache-2.0
"""Source fields of a block: stored as the model gives them, completed with received rows at their first use."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dgl_hybrid.errors import BlockError
from dgl_hybrid.graph.tensor_versions import version_of

ExtendFields = Callable[[list[Tensor]], list[Tensor]]


@dataclass(slots=True)
class _Calls:
    """Of models that use a block or its copies."""

    number: int = 0


@dataclass(frozen=True, slots=True)
class _Extended:
    """A field with its received rows."""

    rows: Tensor
    """(C + R, ...)"""
    version: int
    """Of the field that it was made from."""
    is_exact: bool = True


class SourceFields(MutableMapping[str, Tensor]):
    """What `block.srcdata` is: a mapping of (C, ...) tensors, the rows computed on this rank.

    `complete` exchanges the fields an operation names and remembers the result until the field is set again or the
    scope ends. Fields set in the same `local_scope` travel with the first of them: a layer that sets two (attention
    terms and features) then costs one message, not two. Fields set outside any scope travel only when named.

    Args:
        num_rows: C.
        where: For messages.
        is_approximate: What is received where gradients are taken is approximate, and serves nothing else.
    """

    def __init__(self, num_rows: int, where: str, *, is_approximate: bool = False) -> None:
        self._num_rows = num_rows
        self._where = where
        self._is_approximate = is_approximate
        self._held: dict[str, Tensor] = {}
        self._extended: dict[str, _Extended] = {}
        self._complete: dict[str, tuple[Tensor, _Extended]] = {}
        self._set_in_scope: list[str] = []
        self._calls = _Calls()
        self._set_in_call: dict[str, int] = {}
        """In which call of a model."""
        self._scopes: list[tuple[dict[str, Tensor], dict[str, _Extended], list[str]]] = []

    def __getitem__(self, key: str) -> Tensor:
        return self._held[key]

    def __setitem__(self, key: str, value: Tensor) -> None:
        if not isinstance(value, Tensor):
            raise TypeError(f"source field {key!r} must be a tensor (got {type(value).__name__})")
        if value.dim() == 0 or len(value) != self._num_rows:
            raise BlockError(
                f"source field {key!r} must have {self._num_rows} rows, one for each row computed on this rank (got "
                f"shape {tuple(value.shape)}) on {self._where}. Use the tensors that belong to this block: the output "
                f"of the layer before it, or `srcdata` of this block."
            )
        self._held[key], self._set_in_call[key] = value, self._calls.number
        self._extended.pop(key, None)
        if self._scopes and key not in self._set_in_scope:
            self._set_in_scope.append(key)

    def __delitem__(self, key: str) -> None:
        del self._held[key]
        self._extended.pop(key, None)
        if key in self._set_in_scope:
            self._set_in_scope.remove(key)

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)

    def set_complete(self, key: str, held: Tensor, extended: Tensor) -> None:
        """Stores a static field whose received rows are known already."""
        self._complete[key] = held, _Extended(extended, version_of(held))
        self._held[key], self._extended[key] = self._complete[key]

    def put_complete_back(self) -> None:
        """Where a script has written another tensor into such a field, or dropped it."""
        for name, (held, extended) in self._complete.items():
            if self._held.get(name) is not held:
                self._held[name], self._extended[name] = held, extended

    def reset(self, known: Mapping[str, Tensor], *, keeps_received: bool) -> None:
        """Leaves these fields alone, and those whose received rows were known from the beginning.

        Args:
            known: May be there already; the same tensor stays with what was received for it if `keeps_received`.
        """
        for name in [name for name in self._held if name not in known and name not in self._complete]:
            del self[name]
        for name, tensor in known.items():
            if self._held.get(name) is not tensor or not keeps_received:
                self[name] = tensor

    def begin_call(self) -> None:
        """A model is called, on all ranks."""
        self._calls.number += 1

    def complete(self, names: Sequence[str], extend: ExtendFields) -> dict[str, Tensor]:
        """Exchanges those of the named fields that lack received rows, in one call of `extend`, and in another those
        that a model has set which was called before. Of these a function of one's own may get some that it does not
        read, and a backward through rows that travelled along would come to that model's graph, which may be freed.

        Returns:
            Every named field as (C + R, ...).

        Raises:
            BlockError: If a field was never set.
        """
        unknown = [name for name in names if name not in self._held]
        if unknown:
            raise BlockError(
                f"source field {unknown[0]!r} is not set on {self._where}; set are {sorted(self._held) or 'none'}"
            )
        pending = [name for name in names if not self._is_extended(name)]
        if pending:
            pending += [name for name in self._set_in_scope if self._is_due(name) and name not in pending]
            is_exact = not (self._is_approximate and torch.is_grad_enabled())
            now, before = (
                [name for name in pending if self._is_of_this_call(name) is is_of_this_call]
                for is_of_this_call in (True, False)
            )
            for group in filter(None, (now, before)):
                for name, tensor in zip(group, extend([self._held[name] for name in group]), strict=True):
                    self._extended[name] = _Extended(tensor, version_of(self._held[name]), is_exact)
        return {name: self._extended[name].rows for name in names}

    def would_travel(self, name: str) -> list[str]:
        """Returns the fields that a `complete` of this one would exchange: none if its received rows are at hand."""
        if name not in self._held or self._is_extended(name):
            return []
        return [name, *(other for other in self._set_in_scope if other != name and self._is_due(other))]

    def _is_due(self, name: str) -> bool:
        """Whether a field is to travel along with another one. Of inference mode: not again before it is used."""
        is_there = name in self._extended and self._held[name].is_inference()
        return not is_there and not self._is_extended(name)

    def _is_extended(self, name: str) -> bool:
        """Whether the received rows are at hand. Decided by what the program did, hence alike on every rank.

        Of a tensor made in inference mode nobody counts the writes, so it is exchanged at every use. A field that was
        written in place since, or was exchanged under `no_grad` and now needs its gradient (an evaluation or a
        reentrant checkpoint before this), is exchanged again. So are rows that were received in inference mode, which
        a backward could not keep, and approximate ones where no gradient is taken.
        """
        if name not in self._extended or self._held[name].is_inference():
            return False
        held, extended = self._held[name], self._extended[name]
        takes_gradients = torch.is_grad_enabled()
        lacks_gradient = held.requires_grad and takes_gradients and not extended.rows.requires_grad
        is_of_inference = extended.rows.is_inference() and not torch.is_inference_mode_enabled()
        serves = extended.is_exact or takes_gradients
        return extended.version == version_of(held) and serves and not lacks_gradient and not is_of_inference

    def adopt(self, other: SourceFields) -> None:
        """Takes over another block's fields, the same tensors, with what was received for them."""
        self._held, self._extended, self._complete = dict(other._held), dict(other._extended), dict(other._complete)
        self.adopt_calls(other)

    def adopt_calls(self, other: SourceFields) -> None:
        """Hears of calls of models when the other block does, and knows in which of them its fields were set."""
        self._calls, self._set_in_call = other._calls, dict(other._set_in_call)

    def _is_of_this_call(self, name: str) -> bool:
        return self._set_in_call.get(name, self._calls.number) == self._calls.number

    @property
    def is_in_scope(self) -> bool:
        return bool(self._scopes)

    def push_scope(self) -> None:
        self._scopes.append((dict(self._held), dict(self._extended), self._set_in_scope))
        self._set_in_scope = []

    def pop_scope(self) -> None:
        self._held, self._extended, self._set_in_scope = self._scopes.pop()
