# SPDX-License-Identifier: Apache-2.0
"""From tensors to kernel arguments: the rows of a call, and addresses of what it reads and writes."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from dgl_hybrid.ops.cpu.compiler import compile_kernel
from dgl_hybrid.ops.cpu.ir import Kind
from dgl_hybrid.ops.cpu.tasks import LONG_ROW_ENTRIES, PARTS_PER_TASK, RowTasks, cut_rows
from dgl_hybrid.ops.cpu.threads import run_tasks
from dgl_hybrid.ops.edge_dropout import EdgeDropout
from dgl_hybrid.ops.random_words import column_words, keep_threshold, signed
from dgl_hybrid.ops.sparse_graph import Adjacency

KINDS: dict[torch.dtype, Kind] = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.int32: "i32",
    torch.int64: "i64",
}

_NO_LIMIT = 2**62
_NO_WORDS = torch.empty(0, dtype=torch.int32)


@dataclass(frozen=True)
class Rows:
    """Rows that one call runs over.

    Attributes:
        bounds: (T + 1,) int64: the tasks.
        begins: (N,) int32 or int64: the first entry of each row.
        ends: (N,), same dtype: the entry behind its last; may be a view of the same memory.
        columns: Neighbour of each entry, same dtype; None where the kernel does not ask.
        edge_ids: Edge of each entry, same dtype; None: entry k is edge k.
        limit: Rows of more entries are passed over.
        num_entries: Of all rows of the graph.
    """

    bounds: npt.NDArray[np.int64]
    begins: npt.NDArray[Any]
    ends: npt.NDArray[Any]
    columns: Tensor | None
    edge_ids: Tensor | None
    limit: int
    num_entries: int

    @property
    def num_rows(self) -> int:
        """How many rows."""
        return len(self.begins)

    @property
    def num_tasks(self) -> int:
        """How many tasks."""
        return len(self.bounds) - 1

    @property
    def has_edge_ids(self) -> bool:
        """Whether entry k is another edge than k."""
        return self.edge_ids is not None

    def arguments(self) -> list[int]:
        """What `entries.Entries.declare` takes."""
        return [
            self.begins.ctypes.data,
            self.ends.ctypes.data,
            address(self.columns),
            address(self.edge_ids),
            self.limit,
            self.num_entries - 1,
        ]


class RowPlan:
    """How the rows of a graph are run: the ordinary ones, then the parts of the long ones, then their merger."""

    def __init__(
        self,
        indptr: Tensor,
        columns: Tensor | None = None,
        edge_ids: Tensor | None = None,
        tasks: RowTasks | None = None,
    ) -> None:
        self.index: Kind = KINDS[indptr.dtype]
        self._indptr: npt.NDArray[Any] = indptr.numpy()
        self._columns, self._edge_ids = columns, edge_ids
        self._tasks = _tasks_of(indptr) if tasks is None else tasks

    @classmethod
    def of(cls, rows: Adjacency) -> RowPlan:
        """The plan of a graph's rows."""
        return cls(rows.indptr, rows.indices, rows.edge_ids)

    @classmethod
    def of_segments(cls, offsets: Tensor) -> RowPlan:
        """The plan of segments: their offsets are the caller's, whose NumPy may write to them uncounted by PyTorch."""
        return cls(offsets, tasks=cut_rows(offsets.numpy()))

    @property
    def num_rows(self) -> int:
        """All rows, long ones included."""
        return len(self._indptr) - 1

    @cached_property
    def ordinary(self) -> Rows:
        """All rows but the long ones, each in its place."""
        return replace(self.whole, limit=LONG_ROW_ENTRIES)

    @property
    def kept_ordinary(self) -> Rows:
        """The same in tasks for kernels that keep numbers of entries: see `tasks.KEPT_ENTRIES`."""
        return replace(self.ordinary, bounds=self._tasks.kept_bounds)

    @cached_property
    def whole(self) -> Rows:
        """All rows, for kernels whose rows cannot be cut or need not be."""
        begins, ends = self._indptr[:-1], self._indptr[1:]
        num_entries = int(self._indptr[-1])
        return Rows(self._tasks.bounds, begins, ends, self._columns, self._edge_ids, _NO_LIMIT, num_entries)

    @property
    def has_long_rows(self) -> bool:
        """Whether any row is run in parts."""
        return len(self._tasks.long_rows) > 0

    @cached_property
    def long_rows(self) -> Tensor:
        """(K,) int64: the rows that are run in parts."""
        return torch.from_numpy(self._tasks.long_rows)

    @cached_property
    def parts(self) -> Rows:
        """The parts of the long rows, each as a row of its own."""
        tasks = self._tasks
        count = len(tasks.part_begins)
        bounds = np.array([*range(0, count, PARTS_PER_TASK), count], dtype=np.int64)
        return replace(self.ordinary, bounds=bounds, begins=tasks.part_begins, ends=tasks.part_ends)

    @property
    def kept_parts(self) -> Rows:
        """The same in tasks as those of `kept_ordinary`."""
        return replace(self.parts, bounds=self._tasks.kept_part_bounds)

    @cached_property
    def long_row_of_part(self) -> Tensor:
        """(P,) int64: which of `long_rows` each part belongs to."""
        return torch.from_numpy(np.repeat(np.arange(len(self._tasks.long_rows)), np.diff(self._tasks.part_offsets)))

    @cached_property
    def merger(self) -> RowPlan:
        """The long rows, with their parts as entries."""
        return RowPlan(torch.from_numpy(self._tasks.part_offsets))


_tasks_by_indptr = WeakTensorKeyDictionary()
"""By row starts: (version, tasks). Cutting is half of a small call, and a graph's row starts do not change."""


def _tasks_of(indptr: Tensor) -> RowTasks:
    if indptr.is_inference():  # nobody counts what is written into such a tensor
        return cut_rows(indptr.numpy())
    version, tasks = _tasks_by_indptr.get(indptr, (-1, None))
    if tasks is None or version != indptr._version:
        tasks = cut_rows(indptr.numpy())
        _tasks_by_indptr[indptr] = (indptr._version, tasks)
    return cast("RowTasks", tasks)


def address(tensor: Tensor | None, offset: int = 0) -> int:
    """Where the tensor's element `offset` lies; 0 for None.

    Raises:
        ValueError: Of a tensor that a CPU kernel cannot read.
    """
    if tensor is not None and not tensor.is_cpu:
        raise ValueError(f"expected all tensors on the CPU, as the first is (got one on {tensor.device})")
    return 0 if tensor is None else tensor.data_ptr() + offset * tensor.element_size()


def run(
    emit: Callable[..., str], spec: tuple[Hashable, ...], bounds: npt.NDArray[np.int64], arguments: list[int | float]
) -> None:
    """Runs the kernel that `emit(*spec)` writes over tasks."""
    if len(bounds) > 1:
        run_tasks(compile_kernel((emit, *spec), lambda: emit(*spec)), bounds, arguments)


def dropout_arguments(dropout: EdgeDropout | None, num_heads: int, first_head: int) -> tuple[list[int | float], Tensor]:
    """What `elementary.DropoutArguments.declare` takes, and a tensor to be kept until the kernel has run."""
    if dropout is None:
        return [], _NO_WORDS
    words = column_words(num_heads, torch.device("cpu"))
    return [
        signed(dropout.keys[0], 64),
        signed(dropout.keys[1], 64),
        keep_threshold(dropout.p),
        dropout.scale,
        address(dropout.edge_keys),
        address(words, first_head),
    ], words
