# SPDX-License-Identifier: Apache-2.0
"""Results of message passing that are the same in every epoch: made once, kept with what they were made of.

Raw features do not change and need no gradient, so what a layer aggregates from them is the same in every epoch. It is
recognised by identity: every operand must be a tensor that a loader handed out and that nobody wrote into since. A
script that copies, drops or transforms its features first gives another tensor, and everything is computed as ever.
Rows that are mostly zeros are kept by their other entries (`SparseRows`), for the products that layers make of them.

PyTorch does not count every write into a tensor (`tensor_versions`): a sample of each operand and of each result is
compared before each epoch, too.

Making a result exchanges rows, so all ranks must find the same results kept. Which operands a program uses is alike on
every rank, unless a script copies its features on some only; that, and whether somebody wrote into one, is agreed on
before each epoch (`FullGraphLoader`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TypeVar, cast

import torch
from torch import Tensor

from dgl_hybrid.graph.tensor_versions import sample_of, version_of
from dgl_hybrid.ops import SparseRows
from dgl_hybrid.ops.cpu.products import most_entries

RowsT = TypeVar("RowsT", Tensor, Tensor | SparseRows)
KeptT = TypeVar("KeptT", bound=Tensor | SparseRows | None)
IsStatic = Callable[[Tensor], bool]
"""Whether a tensor is what a loader's graph returned for its id tensors, so the same in every epoch until written."""

Rows = Tensor | SparseRows
"""What a layer multiplies by its weight."""


@dataclass(frozen=True, slots=True, eq=False)
class _Operand:
    tensor: weakref.ref[Tensor]
    version: int
    sample: Tensor

    @staticmethod
    def of(tensor: Tensor) -> _Operand:
        return _Operand(weakref.ref(tensor), tensor._version, sample_of(tensor))

    def holds(self, tensor: Tensor) -> bool:
        return self.tensor() is tensor and self.version == tensor._version

    @property
    def was_changed(self) -> bool:
        tensor = self.tensor()
        if tensor is None or tensor._version != self.version or tensor.requires_grad:
            return True
        return not torch.equal(sample_of(tensor), self.sample)


@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
    operands: tuple[_Operand, ...]
    result: Rows | None
    """None: the first operand itself is best."""
    result_version: int
    result_sample: Tensor | None

    @staticmethod
    def of(operands: tuple[Tensor, ...], result: Rows | None) -> _Kept:
        sample = sample_of(result) if isinstance(result, Tensor) else None
        return _Kept(tuple(map(_Operand.of, operands)), result, _version_of(result), sample)

    @property
    def has_ended(self) -> bool:
        """Nobody has an operand any more, so nobody can ask for it."""
        return any(operand.tensor() is None for operand in self.operands)

    def is_made_of(self, holds: IsStatic) -> bool:
        """Whether this is true of all operands, which are still there."""
        return all((tensor := operand.tensor()) is not None and holds(tensor) for operand in self.operands)

    @property
    def is_written(self) -> bool:
        """Also if it was made a leaf, whose gradients would add up from epoch to epoch."""
        is_leaf = isinstance(self.result, Tensor) and self.result.requires_grad
        return is_leaf or self.result_version != _version_of(self.result)

    @property
    def was_changed(self) -> bool:
        return self.is_written or self._is_sampled_otherwise or any(operand.was_changed for operand in self.operands)

    @property
    def _is_sampled_otherwise(self) -> bool:
        """A layer's own sum, which a script may divide through `.data`, in every epoch once more."""
        known = self.result_sample
        return known is not None and isinstance(self.result, Tensor) and not torch.equal(sample_of(self.result), known)


def _version_of(result: Rows | None) -> int:
    return version_of(result) if isinstance(result, Tensor) else 0  # nobody else has the tensors of sparse rows


def sparse_or_dense(x: Tensor) -> Rows:
    """Returns (N, F) rows by their entries if most are zero and products gain by it here, else as they are."""
    most = most_entries_of(x)
    return x if most == 0.0 else SparseRows.from_dense(x, most) or x


def most_entries_of(x: Tensor) -> float:
    """Returns up to what share of entries that are not zero such rows go by these; 0: never."""
    if x.device.type != "cpu" or x.dim() != 2 or x.dtype not in (torch.float32, torch.float64):
        return 0.0
    return most_entries(x.shape[1], x.dtype)


class StaticResults:
    """The results one block keeps.

    Args:
        is_static: Tells the loader's tensors from others.
    """

    def __init__(self, is_static: IsStatic) -> None:
        self._is_static = is_static
        self._kept: dict[Hashable, _Kept] = {}
        self._is_making = False
        self._asked: set[Hashable] = set()
        self.are_not_all = False
        """Whether the block, or a copy of it, was also read by an operation whose result cannot be kept, and which
        needs the in-edges of every vertex held here."""

    @property
    def keeps(self) -> bool:
        """Whether anything is kept here at all; alike on every rank."""
        return self._is_static is not nothing_is_static

    def are_static(self, operands: tuple[Tensor, ...]) -> bool:
        """Whether a result of these operands may be kept. Alike on every rank, as it follows from the program."""
        if self._is_making:
            return False  # what a kept result is made from in between would be kept beside it, for nothing
        if not operands or any(x.requires_grad or x.is_inference() for x in operands):
            return False
        if torch.is_autocast_enabled(operands[0].device.type):
            return False  # the dtype of the result would depend on the caller's context
        return all(self._is_static(x) for x in operands)

    def rows_of(self, x: Tensor, num_rows: int) -> Rows:
        """Returns the first rows of a tensor for which `are_static` holds, by their entries if most of them are zero.

        Not collective: ranks may differ in what they multiply by.
        """
        kept = self._get(("rows", num_rows), (x,), lambda: _sparse(x[:num_rows]))
        return x[:num_rows] if kept is None else kept

    def get(self, key: Hashable, operands: tuple[Tensor, ...], make: Callable[[], RowsT]) -> RowsT:
        """Returns the kept result for `key`, or makes it and keeps it.

        Collective where `make` is. The result is shared between epochs: who writes into it causes it to be made anew.

        Args:
            key: Says what is computed from the operands.
            operands: For which `are_static` holds.
            make: Called without gradients.
        """
        self._asked.add((key, tuple(map(id, operands))))
        return self._get(key, operands, make)

    def take_num_asked(self) -> int:
        """Returns how many different results `get` was asked for since the last call: if not as many as on other ranks,
        some of them exchange rows where others have what these make.
        """
        asked, self._asked = self._asked, set()
        return len(asked)

    def stop(self) -> None:
        """Drops everything, and keeps nothing from now on; every rank does so at the same point of its program."""
        self.clear()
        self._is_static = nothing_is_static

    def _get(self, key: Hashable, operands: tuple[Tensor, ...], make: Callable[[], KeptT]) -> KeptT:
        key = (key, tuple(map(id, operands)))  # the operands' objects are compared below
        kept = self._kept.get(key)
        is_current = (
            kept is not None
            and len(kept.operands) == len(operands)
            and not kept.is_written
            and all(operand.holds(x) for operand, x in zip(kept.operands, operands, strict=True))
        )
        if kept is None or not is_current:
            # An ordinary tensor even if an evaluation in inference mode comes first.
            self._is_making = True
            try:
                with torch.inference_mode(False), torch.no_grad():
                    result = make()
            finally:
                self._is_making = False
            self._kept = {other: result for other, result in self._kept.items() if not result.has_ended}
            kept = self._kept[key] = _Kept.of(operands, result)
        return cast("KeptT", kept.result)

    @property
    def was_changed(self) -> bool:
        """Whether somebody wrote into a kept result or into what one was made of."""
        return any(kept.was_changed for kept in self._kept.values())

    def resting_operands(self) -> list[Tensor]:
        """Returns what results were made of and nothing of this block reads any more: the results are read instead."""
        found: dict[int, Tensor] = {}
        read: set[int] = set()
        for kept in self._kept.values():
            operands = [tensor for operand in kept.operands if (tensor := operand.tensor()) is not None]
            if kept.result is None:
                read.update(map(id, operands))
            found.update({id(tensor): tensor for tensor in operands})
        return [tensor for name, tensor in found.items() if name not in read]

    def clear(self) -> None:
        """Drops everything; every rank does so at the same point of its program."""
        self._kept.clear()

    def drop_all_but(self, is_static: IsStatic) -> None:
        """Drops what is not made of such tensors alone, which must be alike on every rank."""
        self._kept = {key: kept for key, kept in self._kept.items() if kept.is_made_of(is_static)}

    @property
    def num_bytes(self) -> int:
        """Bytes of the kept results."""
        return sum(_bytes_of(kept.result) for kept in self._kept.values())


def _sparse(x: Tensor) -> SparseRows | None:
    rows = sparse_or_dense(x)
    return None if isinstance(rows, Tensor) else rows


def _bytes_of(result: Rows | None) -> int:
    if isinstance(result, Tensor):
        return result.numel() * result.element_size()
    return 0 if result is None else result.num_bytes


def nothing_is_static(tensor: Tensor) -> bool:
    """The predicate of a block that keeps nothing."""
    return False
