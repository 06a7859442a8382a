# SPDX-License-Identifier: Apache-2.0
"""`SparseRows`: constant rows most of whose entries are zero (bags of words, sums of few of them), for products."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dgl_hybrid.ops.sparse_graph import Adjacency

BLOCK_ROWS = 1024
"""Rows whose gradients, some hundred columns wide, stay in a core's cache while a column's entries are added up."""
LEAST_ENTRIES = 5
"""A column of a block has on average: with fewer, writing and adding up the blocks' sums costs more than it saves."""
_INT32_LIMIT = 2**31


@dataclass(frozen=True, slots=True, eq=False)
class SparseRows:
    """(N, F) rows by their entries that are not zero. Constant: no gradient reaches them."""

    num_columns: int
    rows: Adjacency
    """Row to columns."""
    values: Tensor
    """(E,) in the order of `rows`."""
    columns: Adjacency
    """Row b * F + f: the rows of block b that have an entry in column f."""
    column_values: Tensor
    """(E,) in the order of `columns`."""
    num_blocks: int

    @classmethod
    def from_dense(cls, x: Tensor, max_density: float = 1.0) -> SparseRows | None:
        """Takes the entries of dense rows; None if more than `max_density` of them are not zero.

        Args:
            x: (N, F) floating.
            max_density: In [0, 1].
        Raises:
            TypeError: Not floating.
            ValueError: Not two dimensions.
        """
        if not x.is_floating_point():
            raise TypeError(f"rows must be floating (got a tensor of {x.dtype})")
        if x.dim() != 2:
            raise ValueError(f"rows must have two dimensions (got a tensor of shape {tuple(x.shape)})")
        x = x.detach()
        num_rows, num_columns = x.shape
        num_entries = sum(int(torch.count_nonzero(x[i : i + BLOCK_ROWS])) for i in range(0, num_rows, BLOCK_ROWS))
        if num_entries > max_density * x.numel():
            return None
        density = num_entries / max(x.numel(), 1)
        block_rows = max(BLOCK_ROWS, math.ceil(LEAST_ENTRIES / density) if density else num_rows)
        num_blocks = max(1, math.ceil(num_rows / block_rows))
        dtype = torch.int32 if max(num_rows, num_entries, num_blocks * num_columns) < _INT32_LIMIT else torch.int64
        row_counts, row_columns, values = [], [], []
        column_counts, column_rows, column_values = [], [], []
        for begin in range(0, max(num_rows, 1), block_rows):
            block = x[begin : begin + block_rows]
            row, column = block.nonzero(as_tuple=True)
            entries = block[row, column]
            by_column = torch.argsort(column, stable=True)
            row_counts.append(torch.bincount(row, minlength=len(block)))
            row_columns.append(column.to(dtype))
            values.append(entries)
            column_counts.append(torch.bincount(column, minlength=num_columns))
            column_rows.append((row[by_column] + begin).to(dtype))
            column_values.append(entries[by_column])
        return cls(
            num_columns=num_columns,
            rows=Adjacency(_starts(row_counts, dtype), torch.cat(row_columns), None),
            values=torch.cat(values),
            columns=Adjacency(_starts(column_counts, dtype), torch.cat(column_rows), None),
            column_values=torch.cat(column_values),
            num_blocks=num_blocks,
        )

    @property
    def shape(self) -> tuple[int, int]:
        """(N, F)."""
        return self.rows.num_rows, self.num_columns

    @property
    def num_bytes(self) -> int:
        """Of everything held here."""
        tensors = (*self.rows.tensors(), *self.columns.tensors(), self.values, self.column_values)
        return sum(x.numel() * x.element_size() for x in tensors)

    def times(
        self, weight: Tensor, *, addend: Tensor | None = None, bias: Tensor | None = None, relu: bool = False
    ) -> Tensor:
        """Returns these rows times a weight, plus what else is given; differentiable in all of them.

        An infinite or NaN weight reaches those rows only that have an entry for it: a zero times it counts as zero.

        Args:
            weight: (F, H), of the rows' dtype and device.
            addend: (N, H), likewise.
            bias: (H,), likewise.
            relu: Take the ReLU of it all.
        Returns:
            (N, H).
        Raises:
            ValueError: Operands of another shape or dtype.
        """
        self._check("weight", weight, self.num_columns)
        num_columns = weight.shape[1]
        for name, operand, shape in (
            ("addend", addend, (self.rows.num_rows, num_columns)),
            ("bias", bias, (num_columns,)),
        ):
            if operand is not None and (operand.shape != shape or operand.dtype != self.values.dtype):
                raise ValueError(
                    f"{name} must be {shape} of {self.values.dtype} for rows of shape {self.shape} and a weight of "
                    f"{num_columns} columns (got {tuple(operand.shape)} of {operand.dtype})"
                )
        product: Tensor = torch.ops.dgl_hybrid.sparse_product(
            *self._operands, weight, self.num_blocks, addend, bias, relu
        )
        return product

    def transposed_times(self, x: Tensor) -> Tensor:
        """Returns the transpose of these rows times `x`: (N, H) to (F, H); differentiable in `x`.

        Raises:
            ValueError: Another number of rows than these.
        """
        self._check("x", x, self.rows.num_rows)
        product: Tensor = torch.ops.dgl_hybrid.sparse_product_transposed(*self._operands, x, self.num_blocks)
        return product

    @property
    def _operands(self) -> tuple[list[Tensor], list[Tensor], Tensor, Tensor]:
        return self.rows.tensors(), self.columns.tensors(), self.values, self.column_values

    def _check(self, name: str, operand: Tensor, num_rows: int) -> None:
        if operand.dim() != 2 or len(operand) != num_rows or operand.dtype != self.values.dtype:
            raise ValueError(
                f"{name} must be ({num_rows}, H) of {self.values.dtype} for rows of shape {self.shape} "
                f"(got {tuple(operand.shape)} of {operand.dtype})"
            )


def _starts(counts: list[Tensor], dtype: torch.dtype) -> Tensor:
    starts = torch.zeros(1 + sum(map(len, counts)), dtype=torch.int64, device=counts[0].device)
    torch.cumsum(torch.cat(counts), 0, out=starts[1:])
    return starts.to(dtype)
