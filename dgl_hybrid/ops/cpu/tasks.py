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

MAX_TASKS = 256
"""So many tasks of entries at most (and of rows): enough for balance on 64 threads."""


@dataclass(frozen=True)
class RowTasks:
    """Tasks, and the long rows that they leave out.

    Attributes:
        bounds: (T + 1,) int64: task t has the rows bounds[t] to bounds[t + 1].
        long_rows: (K,) int64: the rows of more than `LONG_ROW_ENTRIES` entries, ascending.
        part_offsets: (K + 1,) in the dtype of the offsets: long row i has the parts part_offsets[i] to
            part_offsets[i + 1].
        part_begins: (P,) in the dtype of the offsets: the first entry of each part.
        part_ends: (P,) the same: the entry behind its last.
    """

    bounds: npt.NDArray[np.int64]
    long_rows: npt.NDArray[np.int64]
    part_offsets: npt.NDArray[Any]
    part_begins: npt.NDArray[Any]
    part_ends: npt.NDArray[Any]


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
    long_rows = np.flatnonzero(np.diff(indptr) > LONG_ROW_ENTRIES)
    cuts = [
        np.linspace(first, end, -(-(end - first) // PART_ENTRIES) + 1).astype(indptr.dtype)
        for first, end in zip(indptr[long_rows].tolist(), indptr[long_rows + 1].tolist())
    ]
    return RowTasks(
        np.unique(bounds),
        long_rows,
        np.cumsum([0, *(len(cut) - 1 for cut in cuts)], dtype=indptr.dtype),
        np.concatenate([indptr[:0], *(cut[:-1] for cut in cuts)]),
        np.concatenate([indptr[:0], *(cut[1:] for cut in cuts)]),
    )


def cut_evenly(num_rows: int) -> npt.NDArray[np.int64]:
    """(T + 1,) int64 bounds of tasks for rows that all take the same time."""
    step = max(MIN_TASK_ROWS, -(-num_rows // MAX_TASKS))
    return np.array([*range(0, num_rows, step), num_rows], dtype=np.int64)
