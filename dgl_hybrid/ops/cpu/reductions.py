# SPDX-License-Identifier: Apache-2.0
"""Sums, maxima and minima over rows, long rows in parts, and the gradients of maxima and minima."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dgl_hybrid.ops.cpu.ir import Kind
from dgl_hybrid.ops.cpu.lanes import Block, column_blocks, compared_elements, summed_elements
from dgl_hybrid.ops.cpu.launch import KINDS, RowPlan, Rows, address, run
from dgl_hybrid.ops.cpu.memory import goes_past_cache, new_tensor
from dgl_hybrid.ops.cpu.spmm_kernels import (
    TARGETS_AHEAD,
    SpmmSpec,
    emit_select,
    emit_select_backward,
    emit_select_backward_edges,
    emit_sum,
)

SLICE_BYTES = (128, 64)
"""Of each row, where columns are packed: two cache lines, which processors fetch together, or one if there are more
rows than fit the last cache by two."""
LEAST_PACKED_BYTES = 16 << 20
"""Of all rows. What is smaller mostly stays in the last cache as it is."""
LEAST_PACKED_READS = 8
"""Of each row on average: packing reads and writes it once."""


@dataclass(frozen=True)
class Columns:
    """Some columns of an operand, and where they lie."""

    begin: int
    block: Block
    x: Tensor
    offset: int
    stride: int
    """Between rows, in elements."""


@dataclass(frozen=True)
class Operand:
    """What is reduced: x (., H, D), by neighbour or `by_edge`, times weights (E, H) of edges or factors of rows."""

    x: Tensor
    weights: Tensor | None = None
    by_edge: bool = False
    factors: Tensor | None = None
    """(S,) of x's dtype; for sums without weights by neighbour."""

    @property
    def shape(self) -> tuple[int, int]:
        """Heads and width, as far as the kernels must tell heads apart."""
        heads, width = self.x.shape[1:]
        return (1, heads * width) if self.weights is None else (heads, width)

    @property
    def num_columns(self) -> int:
        """Elements of a row."""
        return self.x.shape[1] * self.x.shape[2]

    def spec(self, rows: Rows, index: Kind, block: Block, *, least: bool = False) -> SpmmSpec:
        """What a kernel for these columns is compiled for."""
        return SpmmSpec(
            KINDS[self.x.dtype], index, block, self.by_edge, rows.has_edge_ids, self.weights is not None, least
        )

    def is_packed(self, num_reads: int) -> bool:
        """Whether rows are packed some columns at a time before so many entries read them."""
        row_bytes = self.num_columns * self.x.element_size()
        return (
            not self.by_edge
            and row_bytes >= 2 * self.slice_bytes
            and len(self.x) * row_bytes >= LEAST_PACKED_BYTES
            and num_reads >= LEAST_PACKED_READS * len(self.x)
        )

    @property
    def slice_bytes(self) -> int:
        """How much of each row is packed at a time."""
        wide, narrow = SLICE_BYTES
        return wide if len(self.x) * wide <= LEAST_PACKED_BYTES else narrow

    def columns(self, num_reads: int) -> Iterator[Columns]:
        """Yields all columns, as many at once as registers hold sums of.

        Rows that do not fit the last cache, and that many entries read, are packed some columns at a time: those fit.
        `benchmarks.ops.packing` shows what that gains.

        Args:
            num_reads: How many entries there are in all.
        """
        if not self.is_packed(num_reads):
            for begin, block in column_blocks(*self.shape, summed_elements(self.x.dtype)):
                yield self.in_place(begin, block)
            return
        size = self.slice_bytes // self.x.element_size()
        memory = new_tensor((len(self.x) * size,), self.x.dtype)
        for begin, block in column_blocks(*self.shape, size):
            yield self.packed(begin, block, memory)

    def arguments(self, columns: Columns) -> list[int]:
        """The kernels' arguments for these columns."""
        heads, width = self.shape
        first = address(columns.x, columns.offset)
        return [first, columns.stride, address(self.weights, columns.begin // width), heads]

    def packed(self, begin: int, block: Block, memory: Tensor) -> Columns:
        """Columns, multiplied by the factors, in memory for as many."""
        packed = memory[: len(self.x) * block.size].view(len(self.x), block.size)
        taken = self.x.view(len(self.x), self.num_columns)[:, begin : begin + block.size]
        if self.factors is None:
            packed.copy_(taken)
        else:
            torch.mul(taken, self.factors.unsqueeze(-1), out=packed)
        return Columns(begin, block, packed, 0, block.size)

    def in_place(self, begin: int, block: Block) -> Columns:
        """Columns where they are."""
        return Columns(begin, block, self.x, begin, self.num_columns)


def sum_rows(plan: RowPlan, operand: Operand, row_factors: Tensor | None = None) -> Tensor:
    """(N, H, D): the sums over each row's entries, times (N,) factors of the rows."""
    runs = [plan.ordinary, *([plan.parts] if plan.has_long_rows else ())]
    sums = [new_tensor((rows.num_rows, *operand.x.shape[1:]), operand.x.dtype) for rows in runs]
    for columns in operand.columns(plan.ordinary.num_entries):
        for rows, out in zip(runs, sums, strict=True):
            _run_sum(plan, rows, operand, columns, out, row_factors if rows is plan.ordinary else None)
    if plan.has_long_rows:
        of_long_rows = None if row_factors is None else row_factors[plan.long_rows]
        sums[0][plan.long_rows] = sum_rows(plan.merger, Operand(sums[1], by_edge=True), of_long_rows)
    return sums[0]


def _run_sum(
    plan: RowPlan,
    rows: Rows,
    operand: Operand,
    columns: Columns,
    out: Tensor,
    row_factors: Tensor | None,
    targets: Tensor | None = None,
) -> None:
    """Runs the kernel for some columns, those of `out`; with `targets` sums are added to its rows."""
    factors = operand.factors if columns.x is operand.x else None  # packed rows have been multiplied
    spec = replace(
        operand.spec(rows, plan.index, columns.block),
        adds=targets is not None,
        scaled_sources=factors is not None,
        scaled_rows=row_factors is not None,
        past_cache=targets is None and goes_past_cache(out, columns.begin, columns.block.size),
    )
    into = (address(out, columns.begin), operand.num_columns)
    given = [address(tensor) for tensor in (factors, row_factors, targets) if tensor is not None]
    run(emit_sum, (spec,), rows.bounds, [*rows.arguments(), *operand.arguments(columns), *into, *given])


def add_sums(plan: RowPlan, operand: Operand, out: Tensor, targets: Tensor, row_factors: Tensor | None = None) -> None:
    """out[targets[r]] += the sum over row r's entries, times (N,) factors of the rows.

    Args:
        out: (M, H, D) contiguous, of the operand's dtype.
        targets: (N,) int64, no two alike.
    """
    if not len(targets):
        return
    padded = torch.cat([targets, targets[-1:].expand(TARGETS_AHEAD)])
    parts = plan.parts if plan.has_long_rows else None
    sums = None if parts is None else new_tensor((parts.num_rows, *operand.x.shape[1:]), operand.x.dtype)
    for columns in operand.columns(plan.ordinary.num_entries):
        for rows, into in ((plan.ordinary, out), (parts, sums)):
            if rows is None or into is None:
                continue
            added = (row_factors, padded) if into is out else (None, None)
            _run_sum(plan, rows, operand, columns, into, *added)
    if sums is not None:
        of_long_rows = None if row_factors is None else row_factors[plan.long_rows]
        merged = sum_rows(plan.merger, Operand(sums, by_edge=True), of_long_rows)
        out.index_add_(0, targets[plan.long_rows], merged)


def select_rows(plan: RowPlan, operand: Operand, *, least: bool) -> tuple[Tensor, Tensor]:
    """(N, H, D) the largest (least) values, and the edges (index dtype) they came from."""
    out, arg = _run_select(plan, plan.ordinary, operand, least)
    if plan.has_long_rows:
        parts, part_args = _run_select(plan, plan.parts, operand, least)
        merged, winners = select_rows(plan.merger, Operand(parts, by_edge=True), least=least)
        out[plan.long_rows] = merged
        arg[plan.long_rows] = part_args.gather(0, winners.long())
    return out, arg


def select_backward(plan: RowPlan, operand: Operand, arg: Tensor) -> Tensor:
    """(S, H, D) from the gradients of the destinations (the operand) and what they chose; rows are sources."""
    out = new_tensor((plan.num_rows, *operand.x.shape[1:]), operand.x.dtype)
    _run_select_backward(plan.index, plan.ordinary, operand, arg, out)
    if plan.has_long_rows:
        parts = new_tensor((plan.parts.num_rows, *operand.x.shape[1:]), operand.x.dtype)
        _run_select_backward(plan.index, plan.parts, operand, arg, parts)
        out[plan.long_rows] = sum_rows(plan.merger, Operand(parts, by_edge=True))
    return out


def select_backward_edges(plan: RowPlan, grad: Tensor, arg: Tensor, x: Tensor | None) -> Tensor:
    """(E, H): the gradient of each edge's weight, or of the edge's row if there is no x."""
    heads, width = grad.shape[1:]
    rows = plan.whole
    out = new_tensor((rows.num_entries, heads), grad.dtype)
    if width == 0:
        return out.zero_()
    for column, block in column_blocks(heads, width, summed_elements(grad.dtype)):
        spec = SpmmSpec(KINDS[grad.dtype], plan.index, block, False, rows.has_edge_ids, x is not None)
        arguments: list[int | float] = [
            *rows.arguments(),
            *[address(x, column), heads * width, 0, 0],
            *[address(grad, column), address(arg, column), heads * width],
            *[address(out, column // width), heads],
        ]
        run(emit_select_backward_edges, (spec, column % width != 0), rows.bounds, arguments)
    return out


def _run_select(plan: RowPlan, rows: Rows, operand: Operand, least: bool) -> tuple[Tensor, Tensor]:
    shape = (rows.num_rows, *operand.x.shape[1:])
    out = new_tensor(shape, operand.x.dtype)
    arg = new_tensor(shape, torch.int32 if plan.index == "i32" else torch.int64)
    for column, block in column_blocks(*operand.shape, compared_elements(out.dtype)):
        spec = operand.spec(rows, plan.index, block, least=least)
        arguments: list[int | float] = [*rows.arguments(), *operand.arguments(operand.in_place(column, block))]
        arguments += [address(out, column), operand.num_columns, address(arg, column)]
        run(emit_select, (spec,), rows.bounds, arguments)
    return out, arg


def _run_select_backward(index: Kind, rows: Rows, operand: Operand, arg: Tensor, out: Tensor) -> None:
    for column, block in column_blocks(*operand.shape, summed_elements(out.dtype)):
        spec = operand.spec(rows, index, block)
        arguments: list[int | float] = [*rows.arguments(), *operand.arguments(operand.in_place(column, block))]
        arguments += [address(arg, column), address(out, column), operand.num_columns]
        run(emit_select_backward, (spec,), rows.bounds, arguments)
