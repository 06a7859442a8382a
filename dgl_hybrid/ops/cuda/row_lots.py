# SPDX-License-Identifier: Apache-2.0
"""Rows some at a time, where a result for all of them would be larger than what it is made from."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from dgl_hybrid.ops.sparse_graph import Adjacency


@dataclass(frozen=True, slots=True)
class RowLot:
    """Consecutive rows of an adjacency."""

    rows: slice
    entries: slice
    adjacency: Adjacency
    """Of these rows alone: entries without ids count from 0."""


class RowLots:
    """The lots of structures in use: made once per structure and size, dropped with it. As `TaskLists`."""

    def __init__(self) -> None:
        self._lots = WeakTensorKeyDictionary()

    def of(self, rows: Adjacency, most: int) -> list[RowLot]:
        """Returns all rows in lots of at most `most`. Waits for the device when they are made."""
        if any(x is not None and x.is_inference() for x in (rows.indptr, rows.indices, rows.edge_ids)):
            # Nobody counts what is written into such a tensor.
            return _cut(rows, most)
        # Lots hold slices of entries, too, and structures that differ in these alone share where rows begin.
        of_entries = [x for x in (rows.indices, rows.edge_ids) if x is not None]
        key = (most, *(x._version for x in (rows.indptr, *of_entries)))
        found: list[RowLot]
        known, refs, found = self._lots.get(rows.indptr, (None, [], []))
        if known != key or any(ref() is not x for ref, x in zip(refs, of_entries, strict=True)):
            found = _cut(rows, most)
            if rows.indptr.is_cuda:  # they may next be used on another stream
                torch.cuda.current_stream(rows.indptr.device).synchronize()
            self._lots[rows.indptr] = key, [weakref.ref(x) for x in of_entries], found
        return found


def _cut(rows: Adjacency, most: int) -> list[RowLot]:
    begins = range(0, rows.num_rows, most)
    firsts = rows.indptr[:-1:most].tolist()
    return [
        RowLot(
            slice(begin, begin + most),
            slice(first, last),
            Adjacency(
                rows.indptr[begin : begin + most + 1] - first,
                rows.indices[first:last],
                None if rows.edge_ids is None else rows.edge_ids[first:last],
            ),
        )
        for begin, first, last in zip(begins, firsts, [*firsts[1:], rows.num_edges], strict=True)
    ]


def chosen(values: Tensor | None, which: slice) -> Tensor | None:
    """Returns those values, if there are any."""
    return None if values is None else values[which]
