# SPDX-License-Identifier: Apache-2.0
"""Tasks: which entries each group of threads works through. Pure functions of the structure; nothing is launched.

[Note: tasks]
A group of lanes works through the entries of one row. In a power-law graph one row may hold a tenth of all entries, so
rows are cut into tasks of at most `TASK_ENTRIES` entries. A row with one task writes its result. A row that is cut
writes one *partial* result per task into a slot of a buffer, and a second kernel merges the slots of each such row in
the order of its entries: the same sum in every run, without atomics.

    indptr = [0, 2, 2, 9], TASK_ENTRIES = 4        row 0: 2 entries, row 1: none, row 2: 7 entries
    begin  = [0, 2, 2, 6, 9]   row = [0, 1, 2, 2]   slot = [-1, -1, 0, 1]
    split_rows = [2]   split_offsets = [0, 2]

A row without entries keeps a task, as somebody must write its zeros.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

TASK_ENTRIES = 256
"""Entries per task: partials of cut rows then add at most 2/256 of the traffic in float32, and the longest task (256
dependent gathers, four in flight) still takes well under 0.1 ms."""


@dataclass(frozen=True, slots=True, eq=False)
class TaskList:
    """The rows of a structure, cut into tasks; see the note of this module."""

    num_tasks: int
    begin: Tensor | None
    """(T + 1,) of the index dtype: task t covers entries begin[t] to begin[t + 1]. None if every row is one task, and
    `indptr` says the same: a list that held `indptr` would keep alive what `TaskLists` waits to see dropped."""
    row: Tensor | None
    """(T,) of the index dtype: the row of task t; None as for `begin`."""
    slot: Tensor | None
    """(T,) int32: where task t writes its partial result, or -1 if it is its row's only task; None as for `begin`."""
    split_rows: Tensor
    """(R,) of the index dtype: the rows that are cut, ascending."""
    split_offsets: Tensor
    """(R + 1,) int32: split row r owns the slots split_offsets[r] to split_offsets[r + 1]."""
    slot_task: Tensor
    """(num_slots,) of the index dtype: the task that a slot belongs to."""
    slot_split: Tensor
    """(num_slots,) int32: which of the split rows a slot belongs to."""

    @property
    def num_slots(self) -> int:
        return self.slot_task.numel()

    @property
    def num_split(self) -> int:
        return self.split_rows.numel()


def cut_rows(indptr: Tensor, task_entries: int = TASK_ENTRIES) -> TaskList:
    """Cuts rows into tasks. Waits for the device once or twice, as the number of tasks must be known here.

    Args:
        indptr: (num_rows + 1,) int32 or int64, on any device.
        task_entries: The most entries a task may have; at least 1.
    """
    lengths = indptr[1:] - indptr[:-1]
    empty = indptr.new_empty(0)
    if lengths.numel() == 0 or int(lengths.max()) <= task_entries:
        none, offsets = (torch.zeros(length, dtype=torch.int32, device=indptr.device) for length in (0, 1))
        return TaskList(
            num_tasks=lengths.numel(),
            begin=None,
            row=None,
            slot=None,
            split_rows=empty,
            split_offsets=offsets,
            slot_task=empty,
            slot_split=none,
        )
    # Rows without entries count one task; `-(-n // c)` rounds up.
    num_tasks_of_row = torch.div(lengths.to(torch.int64) + (task_entries - 1), task_entries, rounding_mode="floor")
    num_tasks_of_row.clamp_(min=1)
    first_task = torch.cumsum(num_tasks_of_row, 0)
    num_tasks = int(first_task[-1])
    first_task -= num_tasks_of_row
    split_rows = (num_tasks_of_row > 1).nonzero().flatten()
    slots_of_split = num_tasks_of_row[split_rows]
    # Rows that are not cut add one task each, so the number of slots needs no further wait.
    num_slots = num_tasks - (lengths.numel() - split_rows.numel())
    split_offsets = torch.zeros(split_rows.numel() + 1, dtype=torch.int64, device=indptr.device)
    torch.cumsum(slots_of_split, 0, out=split_offsets[1:])

    row = torch.repeat_interleave(num_tasks_of_row, output_size=num_tasks)
    number_in_row = torch.arange(num_tasks, device=indptr.device) - first_task[row]
    begin = torch.empty(num_tasks + 1, dtype=indptr.dtype, device=indptr.device)
    begin[:-1] = indptr[row] + number_in_row * task_entries
    begin[-1] = indptr[-1]

    slot_base = torch.full((lengths.numel(),), -1, dtype=torch.int64, device=indptr.device)
    slot_base[split_rows] = split_offsets[:-1]
    slot = slot_base[row]
    slot = torch.where(slot >= 0, slot + number_in_row, slot)
    slot_split = torch.repeat_interleave(slots_of_split, output_size=num_slots)
    # Slots are numbered in the order of tasks.
    slot_task = first_task[split_rows][slot_split] + torch.arange(num_slots, device=indptr.device)
    slot_task -= split_offsets[slot_split]
    return TaskList(
        num_tasks=num_tasks,
        begin=begin,
        row=row.to(indptr.dtype),
        slot=slot.to(torch.int32),
        split_rows=split_rows.to(indptr.dtype),
        split_offsets=split_offsets.to(torch.int32),
        slot_task=slot_task.to(indptr.dtype),
        slot_split=slot_split.to(torch.int32),
    )


class TaskLists:
    """The task lists of structures in use: made once per structure, dropped with it.

    Structures are told apart by their `indptr` tensor, and by how often it was written to.
    """

    def __init__(self, task_entries: int = TASK_ENTRIES) -> None:
        self._task_entries = task_entries
        self._lists = WeakTensorKeyDictionary()

    def of_segments(self, offsets: Tensor) -> TaskList:
        """Returns the tasks of segments, made anew: their offsets are the caller's, who may write to them where
        PyTorch does not count it (by NumPy, in a collective).
        """
        return cut_rows(offsets, self._task_entries)

    def of(self, indptr: Tensor) -> TaskList:
        """Returns the tasks of the rows that `indptr` delimits."""
        if indptr.is_inference():  # nobody counts what is written into such a tensor
            return cut_rows(indptr, self._task_entries)
        version: int
        found: TaskList | None
        version, found = self._lists.get(indptr, (-1, None))
        if found is None or version != indptr._version:
            version, found = indptr._version, cut_rows(indptr, self._task_entries)
            if indptr.is_cuda:  # it may next be used on another stream, which nobody outside can make wait
                torch.cuda.current_stream(indptr.device).synchronize()
            self._lists[indptr] = version, found
        return found
