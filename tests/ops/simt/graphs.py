# SPDX-License-Identifier: Apache-2.0
"""Small graphs with every kind of row, and the task lists that the kernels read."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

NUM_SRC, NUM_DST = 41, 37
TASK_ENTRIES = 16
HUB_ENTRIES = 150


@dataclass(frozen=True)
class Rows:
    """Compressed rows: an adjacency in plain tensors, int64 (the launches convert)."""

    indptr: Tensor
    indices: Tensor
    edge_ids: Tensor | None

    @property
    def num_rows(self) -> int:
        return len(self.indptr) - 1

    @property
    def row_of_entry(self) -> Tensor:
        return torch.repeat_interleave(torch.arange(self.num_rows), self.indptr.diff())

    @property
    def edge_of_entry(self) -> Tensor:
        return torch.arange(len(self.indices)) if self.edge_ids is None else self.edge_ids


@dataclass(frozen=True)
class TaskList:
    begin: Tensor
    row: Tensor | None
    slot: Tensor | None
    split_row: Tensor
    split_slots: Tensor
    slot_task: Tensor
    slot_split: Tensor

    @property
    def num_tasks(self) -> int:
        return len(self.begin) - 1

    @property
    def num_slots(self) -> int:
        return len(self.slot_task)


def make_graph(*, edge_ids: bool) -> tuple[Rows, Rows]:
    """In-edges and out-edges of a graph with a hub on both sides, rows of 0, 1, C - 1, C, C + 1 and 2 C entries.

    The first source and the first and last destination have no edges. With edge_ids, edge rows are in random order.
    """
    generator = torch.Generator().manual_seed(0)
    degrees = torch.randint(0, 12, (NUM_DST,), generator=generator)
    special = [0, 1, HUB_ENTRIES, TASK_ENTRIES - 1, TASK_ENTRIES, TASK_ENTRIES + 1, 2 * TASK_ENTRIES, 0, 3, 5]
    degrees[: len(special)] = torch.tensor(special)
    degrees[-1] = 0
    num_edges = int(degrees.sum())
    src = torch.randint(1, NUM_SRC, (num_edges,), generator=generator)
    src[torch.rand(num_edges, generator=generator) < 0.3] = 7  # a hub among the sources, and parallel edges
    indptr = torch.cat([torch.zeros(1, dtype=torch.long), degrees.cumsum(0)])
    ids = torch.randperm(num_edges, generator=generator) if edge_ids else None
    in_edges = Rows(indptr, src, ids)
    return in_edges, transpose(in_edges, NUM_SRC)


def transpose(rows: Rows, num_columns: int) -> Rows:
    order = torch.argsort(rows.indices, stable=True)
    counts = torch.bincount(rows.indices, minlength=num_columns)
    indptr = torch.cat([torch.zeros(1, dtype=torch.long), counts.cumsum(0)])
    return Rows(indptr, rows.row_of_entry[order], rows.edge_of_entry[order])


def cut_rows(rows: Rows, task_entries: int | None) -> TaskList:
    """Tasks of at most `task_entries` entries; None: a task per row, given by indptr alone."""
    degrees = rows.indptr.diff()
    empty = torch.zeros(0, dtype=torch.long)
    if task_entries is None:
        return TaskList(rows.indptr, None, None, empty, torch.zeros(1, dtype=torch.int32), empty, empty.int())
    begin, row, slot, split_row, split_slots, slot_task, slot_split = [], [], [], [], [0], [], []
    for r, (start, degree) in enumerate(zip(rows.indptr.tolist(), degrees.tolist())):
        pieces = max(1, -(-degree // task_entries))
        if pieces > 1:
            split_row.append(r)
            split_slots.append(split_slots[-1] + pieces)
        for piece in range(pieces):
            if pieces > 1:
                slot_task.append(len(begin))
                slot_split.append(len(split_row) - 1)
            slot.append(len(slot_task) - 1 if pieces > 1 else -1)
            begin.append(start + piece * task_entries)
            row.append(r)
    begin.append(int(rows.indptr[-1]))
    integer = [torch.tensor(values, dtype=torch.long) for values in (begin, row, slot, split_row, split_slots)]
    begins, task_rows, slots, split_rows, offsets = integer
    return TaskList(
        begins, task_rows, slots.int(), split_rows, offsets.int(),
        torch.tensor(slot_task, dtype=torch.long), torch.tensor(slot_split, dtype=torch.int32),
    )  # fmt: skip
