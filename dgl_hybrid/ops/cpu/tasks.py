# SPDX-License-Identifier: Apache-2.0
"""Cuts the rows of a graph into tasks of about equal work, and long rows into parts.

The cuts depend on the graph alone, never on the number of threads, so no sum does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

MIN_TASK_ENTRIES = 8192
"""Fewer are not worth drawing a task for: at 64 columns they take 0.2 ms."""

MIN_TASK_ROWS = 4096
"""The same for rows, which cost something even without entries."""

PART_ENTRIES = 1024
"""Entries of a part of a long row: enough that adding up the parts costs nothing, few enough to share among threads."""

LONG_ROW_ENTRIES = 2 * PART_ENTRIES
"""Rows of more entries are run in parts."""

PARTS_PER_TASK = 8

KEPT_ENTRIES = 512
"""Entries of a task whose kernel keeps a few numbers of each between two passes over them: enough that the change from
one pass to the other costs nothing, few enough that the numbers, and rows that the second pass reads, stay in the first
two caches. 1024 take 3 % longer where rows are far, and 5 % less where they are near."""

MAX_KEPT_ENTRIES = KEPT_ENTRIES + LONG_ROW_ENTRIES
"""The most that such a task has: its last row is not cut."""

MAX_TASKS = 256
"""So many tasks of entries at most (and of rows): enough for balance on 64 threads."""

_MIN_SUMMED_ROWS = 8192
_MAX_SUMS = 64


@dataclass(frozen=True)
class RowTasks:
    """Tasks, and the long rows that they leave out.

    Attributes:
        bounds: (T + 1,) int64: task t has the rows bounds[t] to bounds[t + 1].
        kept_bounds: (K + 1,) int64: the same for tasks of at most `MAX_KEPT_ENTRIES` entries, long rows not counted.
        long_rows: (K,) int64: the rows of more than `LONG_ROW_ENTRIES` entries, ascending.
        part_offsets: (K + 1,) in the dtype of the offsets: long row i has the parts part_offsets[i] to
            part_offsets[i + 1].
        part_begins: (P,) in the dtype of the offsets: the first entry of each part.
        part_ends: (P,) the same: the entry behind its last.
        kept_part_bounds: (K + 1,) int64: as `kept_bounds`, of parts.
    """

    bounds: npt.NDArray[np.int64]
    kept_bounds: npt.NDArray[np.int64]
    long_rows: npt.NDArray[np.int64]
    part_offsets: npt.NDArray[Any]
    part_begins: npt.NDArray[Any]
    part_ends: npt.NDArray[Any]
    kept_part_bounds: npt.NDArray[np.int64]


def cut_rows(indptr: npt.NDArray[Any]) -> RowTasks:
    """Cuts rows into tasks.

    Args:
        indptr: (N + 1,) int32 or int64, from 0: row r has the entries indptr[r] to indptr[r + 1].
    """
    num_rows, num_entries = len(indptr) - 1, int(indptr[-1])
    entry_step = max(MIN_TASK_ENTRIES, -(-num_entries // MAX_TASKS))
    row_step = max(MIN_TASK_ROWS, -(-num_rows // MAX_TASKS))
    marks = np.arange(entry_step, num_entries, entry_step, dtype=indptr.dtype)
    bounds = np.concatenate(
        [[0, num_rows], np.searchsorted(indptr, marks), np.arange(row_step, num_rows, row_step)], dtype=np.int64
    )
    lengths = np.diff(indptr)
    is_long = lengths > LONG_ROW_ENTRIES
    long_rows = np.flatnonzero(is_long)
    cuts = [
        np.linspace(first, end, -(-(end - first) // PART_ENTRIES) + 1).astype(indptr.dtype)
        for first, end in zip(indptr[long_rows].tolist(), indptr[long_rows + 1].tolist())
    ]
    begins, ends = (np.concatenate([indptr[:0], *(cut[side] for cut in cuts)]) for side in (np.s_[:-1], np.s_[1:]))
    return RowTasks(
        np.unique(bounds),
        _cut_for_keeping(np.where(is_long, 0, lengths)),
        long_rows,
        np.cumsum([0, *(len(cut) - 1 for cut in cuts)], dtype=indptr.dtype),
        begins,
        ends,
        _cut_for_keeping(ends - begins),
    )


def _cut_for_keeping(lengths: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Bounds of tasks that begin wherever another `KEPT_ENTRIES` entries are full."""
    num_rows = len(lengths)
    number = (np.cumsum(lengths, dtype=np.int64) - lengths) // KEPT_ENTRIES
    cuts = np.flatnonzero(np.diff(number)) + 1
    return np.unique(np.concatenate([[0, num_rows], cuts, np.arange(MIN_TASK_ROWS, num_rows, MIN_TASK_ROWS)]))


def cut_evenly(num_rows: int) -> npt.NDArray[np.int64]:
    """(T + 1,) int64 bounds of tasks for rows that all take the same time."""
    step = max(MIN_TASK_ROWS, -(-num_rows // MAX_TASKS))
    return np.array([*range(0, num_rows, step), num_rows], dtype=np.int64)


def cut_for_sums(num_rows: int, num_columns: int) -> npt.NDArray[np.int64]:
    """The same for sums over all rows: few, as each task has sums of its own, of so many columns."""
    step = max(_MIN_SUMMED_ROWS, 8 * num_columns, -(-num_rows // _MAX_SUMS))
    return np.array([*range(0, num_rows, step), num_rows], dtype=np.int64)
