# SPDX-License-Identifier: Apache-2.0
"""The entries of compressed rows, as kernels see them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from dgl_hybrid.ops.cpu.ir import KernelBuilder, Kind, Pointer, Value, Variable
from dgl_hybrid.ops.cpu.lanes import add_to

PREFETCH_BYTES = 4096
"""How far ahead of the sums the operand's rows are asked for; in entries at least 4, at most 32. Half and twice as much
make no difference beyond noise; without it a power-law graph of 3 M edges takes 1.2 to 1.5 times as long."""


SUM_ENTRIES = 64
"""Entries that are added one after another. Adding the sums of such blocks bounds the rounding error in float32: 300
terms of either sign in one go can be off by more than 1e-6 of their sum."""


def prefetch_distance(row_bytes: int) -> int:
    """By how many entries to ask ahead for rows of that length."""
    return max(4, min(32, PREFETCH_BYTES // max(1, row_bytes)))


@dataclass(frozen=True)
class Entries:
    """Row r has the entries begins[r] to ends[r]; entry k has the neighbour columns[k] and the edge edges[k].

    Rows of more than `limit` entries are passed over: they are cut into parts and run as rows of another call.
    `last` is the last entry of the arrays. `edges` is read only by kernels made for rows with edge ids.
    """

    builder: KernelBuilder
    has_edge_ids: bool
    begins: Pointer
    ends: Pointer
    columns: Pointer
    edges: Pointer
    limit: Value
    last: Value

    @classmethod
    def declare(cls, k: KernelBuilder, index: Kind, has_edge_ids: bool) -> Entries:
        """Takes the arguments that `launch.Rows.arguments` passes."""
        begins, ends, columns, edges = (k.pointer(index) for _ in range(4))
        return cls(k, has_edge_ids, begins, ends, columns, edges, k.integer(), k.integer())

    @contextmanager
    def task_rows(self) -> Iterator[tuple[Value, Value, Value, Value]]:
        """Runs the body for each row: (its task, the row, its first entry, the entry behind its last)."""
        with self.builder.tasks() as (task, first, stop), self.rows_between(first, stop) as (row, begin, end):
            yield task, row, begin, end

    @contextmanager
    def rows_between(self, first: Value, stop: Value) -> Iterator[tuple[Value, Value, Value]]:
        """Runs the body for each of these rows: (the row, its first entry, the entry behind its last)."""
        with self.builder.loop(first, stop) as row:
            begin, end = self.begins.load(row).convert("i64"), self.ends.load(row).convert("i64")
            with self.builder.when((end - begin).compare("sle", self.limit)):
                yield row, begin, end

    @contextmanager
    def rows(self) -> Iterator[tuple[Value, Value, Value]]:
        """As `task_rows`, without the task."""
        with self.task_rows() as (_, row, begin, end):
            yield row, begin, end

    @contextmanager
    def sums(self, begin: Value, end: Value, totals: list[Variable]) -> Iterator[tuple[Value, list[Variable]]]:
        """Runs the body for each entry: (entry, variables to add to). What is added to them ends in `totals`.

        Sums of SUM_ENTRIES entries at a time: see there.
        """
        k = self.builder
        with k.loop(begin, end, SUM_ENTRIES) as first:
            stop = k.intrinsic("smin", end.type, first + SUM_ENTRIES, end)
            terms = [k.variable(k.constant(total.type.kind, 0.0, total.type.lanes)) for total in totals]
            with k.loop(first, stop) as entry:
                yield entry, terms
            add_to(totals, terms)

    def column(self, entry: Value) -> Value:
        """The entry's neighbour."""
        return self.columns.load(entry).convert("i64")

    def edge(self, entry: Value) -> Value:
        """The entry's edge: its row in edge tensors."""
        return self.edges.load(entry).convert("i64") if self.has_edge_ids else entry

    def ahead(self, entry: Value, distance: int) -> Value:
        """The entry that many further on, at most the last one."""
        return self.builder.intrinsic("smin", entry.type, entry + distance, self.last)
