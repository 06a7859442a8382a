# SPDX-License-Identifier: Apache-2.0
"""Kernels of products of rows and weights: many rows, some hundred columns, and what usually follows in one pass.

A tile of rows and columns of the result stays in registers while the columns of its rows are gone through: a number of
each row, in all lanes, times a vector of the weight's row. The weight is packed into panels as wide as a tile, so it is
read in order from the cache. Rows are read once, in order, and those of the next tile are asked for meanwhile: products
of this shape are as much a matter of reading and writing rows as of multiplying (Goto and van de Geijn, "Anatomy of
High-Performance Matrix Multiplication", ACM TOMS 2008, is about the case where all operands are large).

Every element is a sum over the columns in their order, whatever rows go together, so no result depends on tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from dgl_hybrid.ops.cpu.host import vector_unit
from dgl_hybrid.ops.cpu.ir import KernelBuilder, Kind, Pointer, Value, Variable
from dgl_hybrid.ops.cpu.lanes import ELEMENT_BYTES

_MAX_ROWS = 24
_SCRATCH_BYTES = 128 << 10
_BLOCK_ROWS, _SHORT_BLOCK_ROWS = 64, 32
"""With a panel of a gradient, their columns for one tile fit in the first cache. Where registers are few, panels are
narrow and many: lines are read for each, so they must stay there. Rows whose stride is 512 bytes all fall into an
eighth of it, and 32 KiB with eight ways hold as many as the second of two operands. On Zen 3 most gradients are 1.1 to
1.3 times as fast so."""
_MAX_SHORT_SUMS_BYTES = 256 << 10
"""Of a weight's gradient, which every block reads and writes: larger ones do not stay in the second cache."""
_MANY_PANELS = 4
"""From so many on, each asks for a share of the next block's lines; with fewer, one at every step costs nothing."""

Finish = Callable[[Value, Value, int, Value], None]
"""Takes a row, the first column of a panel, a column within it, and the elements from there on."""


@dataclass(frozen=True)
class Panels:
    """How the columns of a product lie in vectors: in panels as wide as a tile, the last maybe of fewer."""

    kind: Kind
    num_columns: int

    @property
    def lanes(self) -> int:
        """Elements of a vector."""
        return vector_unit().register_bytes // ELEMENT_BYTES[self.kind]

    @property
    def num_vectors(self) -> int:
        """Of a row."""
        return -(-self.num_columns // self.lanes)

    @property
    def count(self) -> int:
        """How many panels."""
        return -(-self.num_vectors // (4 if vector_unit().num_registers >= 32 else 2))

    @property
    def vectors(self) -> int:
        """Of a panel: as even as can be."""
        return -(-self.num_vectors // self.count)

    @property
    def width(self) -> int:
        """Elements of a panel."""
        return self.vectors * self.lanes

    @property
    def num_full(self) -> int:
        """Panels that have all of their columns."""
        return self.num_columns // self.width

    @property
    def rest(self) -> int:
        """Columns of the panel behind those; 0: there is none."""
        return self.num_columns % self.width

    @property
    def tile_rows(self) -> int:
        """As many rows as registers are left for, after the weight's vectors and a number of a row."""
        return min(_MAX_ROWS, (vector_unit().num_registers - self.vectors - 1) // self.vectors)

    @property
    def padded(self) -> int:
        """Columns, with those that fill the last vector."""
        return self.num_vectors * self.lanes

    def pieces(self, width: int) -> list[tuple[int, int]]:
        """(first column, lanes) of the vectors that cover so many columns: whole ones, then ever shorter ones."""
        found, begin, lanes = [], 0, self.lanes
        while begin < width:
            while begin + lanes > width:
                lanes //= 2
            found.append((begin, lanes))
            begin += lanes
        return found


@dataclass(frozen=True)
class Matrix:
    """Rows in memory."""

    num_columns: int
    stride: int


@dataclass(frozen=True)
class ProductSpec:
    """What a sum of products is compiled for."""

    kind: Kind
    rows: tuple[Matrix, ...]
    num_columns: int
    factors: bool
    addend: bool
    bias: bool
    relu: bool
    past_cache: bool
    """Whether the result goes straight to memory."""


def emit_products(spec: ProductSpec) -> str:
    """out[n] = factors[n] * sum of rows[n] @ weight over the products, + addend[n] + bias, or the ReLU of that."""
    k = KernelBuilder()
    sources, weights = pointers(k, spec.kind, spec.rows), pointers(k, spec.kind, spec.rows)
    finish = product_finish(k, spec)
    panels = Panels(spec.kind, spec.num_columns)
    with k.tasks() as (_, first, end):
        emit_rows(k, panels, list(zip(spec.rows, sources, weights)), first, end, finish)
    return k.finish()


def product_finish(k: KernelBuilder, spec: ProductSpec) -> Finish:
    """Declares the other operands and the result; returns what takes sums of products there."""
    factors, addend, bias, out = (k.pointer(spec.kind) for _ in range(4))

    def finish(row: Value, panel: Value, begin: int, value: Value) -> None:
        lanes = value.type.lanes
        where = row * spec.num_columns + panel
        if spec.factors:
            value = value * factors.load(row)
        if spec.addend:
            value = value + addend.at(where).load(begin, lanes)
        if spec.bias:
            value = value + bias.at(panel).load(begin, lanes)
        if spec.relu:
            value = value.maximum(0.0)
        out.at(where).store(begin, value, past_cache=spec.past_cache)

    return finish


@dataclass(frozen=True)
class GradientSpec:
    """What the gradients of a sum of products are compiled for."""

    kind: Kind
    rows: tuple[Matrix, ...]
    grad: Matrix
    relu: bool
    factors: bool
    needs_addend: bool
    needs_rows: tuple[bool, ...]
    needs_weights: tuple[bool, ...]
    past_cache: tuple[bool, ...]
    """Whether the gradient of the rows goes straight to memory."""


def emit_gradients(spec: GradientSpec) -> str:
    """The gradients of `emit_products`, a block of rows after the other, each while it lies in the cache.

    Those of weights and bias are sums over all rows: each task adds up its own, in d_weights[task] (columns of rows ×
    padded columns of the gradient) and d_bias[task].
    """
    k = KernelBuilder()
    block = GradientBlock(k, spec, _block_rows(spec))
    with block.tasks():
        # Of the next block: what is read as it begins is asked for while the first matrix is multiplied.
        rows_ahead = block.rows_ahead()
        for j, needs_weight in enumerate(spec.needs_weights):
            if needs_weight:
                block.emit_outer(j, rows_ahead)
                rows_ahead = []
            if spec.needs_rows[j]:
                block.emit_rows(j)
    return k.finish()


class Notes(Protocol):
    """Sees all numbers of a block."""

    def forget(self) -> None:
        """A block begins."""

    def note(self, value: Value) -> None:
        """A vector of it."""


class GradientBlock:
    """The blocks of rows of a gradient, in a kernel: what is read and written for one, and how vectors multiply it.

    Attributes:
        notes: Sees what is in `rows`, if anything does.
        rows: The gradient of the products of one block (rows × padded columns), zeros behind the last column.
        first, end: Rows of the current task.
        begin, count: Rows of the current block.
    """

    def __init__(self, k: KernelBuilder, spec: GradientSpec, num_rows: int) -> None:
        self._builder, self.spec, self.num_rows = k, spec, num_rows
        self.notes: Notes | None = None
        kind = spec.kind
        self.panels = Panels(kind, spec.grad.num_columns)
        self._sources = pointers(k, kind, spec.rows)
        self._grad, self._output, self._factors, self._d_addend, self._d_bias = (k.pointer(kind) for _ in range(5))
        self._d_rows, self._turned, self._d_weights = (pointers(k, kind, spec.rows) for _ in range(3))
        self.rows = k.scratch(kind, num_rows * self.panels.padded)
        self._task = self.first = self.end = self.begin = self.count = k.constant("i64", 0)

    @contextmanager
    def tasks(self) -> Iterator[None]:
        """Runs the body for each block of the tasks that this thread draws, with its rows made."""
        k, spec, padded = self._builder, self.spec, self.panels.padded
        num_columns, lanes = spec.grad.num_columns, self.panels.lanes
        pieces = self.panels.pieces(num_columns)
        with k.tasks() as (self._task, self.first, self.end):
            zeros = [k.constant(spec.kind, 0, lanes) for _, lanes in pieces]
            totals = [k.variable(zero) for zero in zeros]
            sums = [k.variable(zero) for zero in zeros]  # of a block: one long chain of rows would lose digits
            if padded > num_columns:
                with k.loop(0, k.constant("i64", self.num_rows)) as r:
                    self.rows.store(r * padded + (padded - lanes), k.constant(spec.kind, 0, lanes))
            with k.loop(self.first, self.end, self.num_rows) as self.begin:
                left = self.end - self.begin
                self.count = left.compare("slt", self.num_rows).select(left, k.constant("i64", self.num_rows))
                if self.notes is not None:
                    self.notes.forget()
                with k.loop(0, self.count) as r:
                    self._make_row(r, pieces, sums)
                for total, of_block, zero in zip(totals, sums, zeros):
                    total.set(total.get() + of_block.get())
                    of_block.set(zero)
                yield
            for (column, _), total in zip(pieces, totals):
                self._d_bias.at(self._task * num_columns).store(column, total.get())

    def _make_row(self, r: Value, pieces: Sequence[tuple[int, int]], sums: Sequence[Variable]) -> None:
        spec, row = self.spec, self.begin + r
        num_columns = spec.grad.num_columns
        for (column, lanes), total in zip(pieces, sums):
            value = self._grad.at(row * spec.grad.stride).load(column, lanes)
            if spec.relu:
                passed = self._output.at(row * num_columns).load(column, lanes)
                value = passed.compare("ole", 0.0).select(0.0, value)
            if spec.needs_addend:
                self._d_addend.at(row * num_columns).store(column, value)
            total.set(total.get() + value)
            if spec.factors:
                value = value * self._factors.load(row)
            self.rows.at(r * self.panels.padded).store(column, value)
            if self.notes is not None:
                self.notes.note(value)

    def rows_ahead(self) -> list[tuple[Pointer, int]]:
        """What the next block reads to make its rows, with strides."""
        spec, following = self.spec, self.begin + self.count
        found = [(self._grad.at(following * spec.grad.stride), spec.grad.stride)]
        if spec.relu:
            found.append((self._output.at(following * spec.grad.num_columns), spec.grad.num_columns))
        return found

    def source(self, j: int, begin: Value | None = None) -> Pointer:
        """The block's rows of an operand, or those of one that begins elsewhere."""
        return self._sources[j].at((self.begin if begin is None else begin) * self.spec.rows[j].stride)

    def d_weight(self, j: int) -> Pointer:
        """Where the task adds up the gradient of a weight."""
        return self._d_weights[j].at(self._task * (self.spec.rows[j].num_columns * self.panels.padded))

    def finish(self, j: int) -> Finish:
        """Takes gradients of an operand's rows, counted within the block, to where they belong."""
        stride = self.spec.rows[j].num_columns
        target = self._d_rows[j].at(self.begin * stride)

        def store(r: Value, panel: Value, column: int, value: Value) -> None:
            target.at(r * stride + panel).store(column, value, past_cache=self.spec.past_cache[j])

        return store

    def emit_outer(
        self,
        j: int,
        rows_ahead: Sequence[tuple[Pointer, int]] = (),
        *,
        first: Value | int = 0,
        width: int | None = None,
    ) -> None:
        """Adds the block's share to the gradient of a weight; asks for the next block's rows meanwhile.

        Args:
            rows_ahead: What else the next block reads, with strides.
            first: Of the columns of the operand's rows that are gone through.
            width: How many; None: all.
        """
        matrix = self.spec.rows[j]
        columns = Matrix(matrix.num_columns if width is None else width, matrix.stride)
        source, target = self.source(j).at(first), self.d_weight(j).at(first * self.panels.padded)
        _emit_outer(
            self._builder, self.panels, columns, source, self.rows, self.num_rows, self.count, target, rows_ahead
        )

    def emit_rows(self, j: int) -> None:
        """Makes the gradient of an operand's rows."""
        k, spec = self._builder, self.spec
        block = (Matrix(spec.grad.num_columns, self.panels.padded), self.rows, self._turned[j])
        panels = Panels(spec.kind, spec.rows[j].num_columns)
        emit_rows(k, panels, [block], k.constant("i64", 0), self.count, self.finish(j))


def pointers(k: KernelBuilder, kind: Kind, rows: Sequence[Matrix]) -> list[Pointer]:
    """Declares an argument for each."""
    return [k.pointer(kind) for _ in rows]


def _block_rows(spec: GradientSpec) -> int:
    """Rows of a gradient that lie on the stack at once: whole tiles of those they are multiplied into."""
    panels = Panels(spec.kind, spec.grad.num_columns)
    row_bytes = panels.padded * ELEMENT_BYTES[spec.kind]
    widest = max((x.num_columns for x, needed in zip(spec.rows, spec.needs_weights) if needed), default=0)
    is_short = vector_unit().num_registers < 32 and widest * row_bytes <= _MAX_SHORT_SUMS_BYTES
    fitting = min(_SHORT_BLOCK_ROWS if is_short else _BLOCK_ROWS, _SCRATCH_BYTES // row_bytes)
    sizes = [Panels(spec.kind, x.num_columns).tile_rows for x, needed in zip(spec.rows, spec.needs_rows) if needed]
    return fitting - fitting % sizes[0] if sizes and fitting > sizes[0] else max(1, fitting)


def emit_rows(
    k: KernelBuilder,
    panels: Panels,
    products: Sequence[tuple[Matrix, Pointer, Pointer]],
    first: Value,
    end: Value,
    finish: Finish,
) -> None:
    """Multiplies the rows `first` to `end`: whole tiles, then what is left row by row."""
    size = panels.tile_rows
    behind = first + ((end - first) - _remainder(k, end - first, size))
    for num_rows, begin, stop in ((size, first, behind), (1, behind, end)):
        with k.loop(begin, stop, num_rows) as row:
            with k.loop(0, k.constant("i64", panels.num_full)) as panel:
                _emit_tile(k, panels, products, row, num_rows, panel, panels.width, finish)
            if panels.rest:
                _emit_tile(k, panels, products, row, num_rows, k.constant("i64", panels.num_full), panels.rest, finish)


def _remainder(k: KernelBuilder, value: Value, divisor: int) -> Value:
    return k.emit(value.type, f"srem {value.type} {value.ref}, {divisor}")


def _ask_for_next_tile(
    panels: Panels, matrix: Matrix, source: Pointer, row: Value, num_rows: int, panel: Value, column: Value
) -> None:
    """Every step of every panel asks for a few numbers, in order, so that all of the tile has been asked for in time.

    All at once, as a panel begins, they would be more lines than can be on their way, and the products would wait for
    them: on Zen 4, 100,000 rows of 128 columns take 1.07 (128 columns of the result) to 1.8 times (32) as long so.
    """
    if matrix.stride != matrix.num_columns:
        return
    share = -(-num_rows // panels.count)
    step = panel * matrix.num_columns + column
    source.at((row + num_rows) * matrix.stride + step * share).prefetch(0, share)


def _emit_tile(
    k: KernelBuilder,
    panels: Panels,
    products: Sequence[tuple[Matrix, Pointer, Pointer]],
    row: Value,
    num_rows: int,
    panel: Value,
    width: int,
    finish: Finish,
) -> None:
    kind, lanes = panels.kind, panels.lanes
    num_vectors = -(-width // lanes)
    sums = [[k.variable(k.constant(kind, 0, lanes)) for _ in range(num_vectors)] for _ in range(num_rows)]
    for matrix, source, weight in products:
        rows, packed = source.at(row * matrix.stride), weight.at(panel * (matrix.num_columns * panels.width))
        with k.loop(0, k.constant("i64", matrix.num_columns)) as i:
            if num_rows > 1:
                _ask_for_next_tile(panels, matrix, source, row, num_rows, panel, i)
            vectors = [packed.load(i * panels.width + v * lanes, lanes) for v in range(num_vectors)]
            for r, row_sums in enumerate(sums):
                _multiply_add(rows.load(i + r * matrix.stride), vectors, row_sums)
    for r, row_sums in enumerate(sums):
        values = [total.get() for total in row_sums]
        for begin, length in panels.pieces(width):
            vector, lane = divmod(begin, lanes)
            finish(row + r, panel * panels.width, begin, values[vector].shuffle(range(lane, lane + length)))


def _multiply_add(number: Value, vectors: Sequence[Value], sums: Sequence[Variable]) -> None:
    spread = number.broadcast(vectors[0].type.lanes)
    for vector, total in zip(vectors, sums):
        total.set(spread.multiply_add(vector, total.get()))


def _emit_outer(
    k: KernelBuilder,
    panels: Panels,
    matrix: Matrix,
    source: Pointer,
    block: Pointer,
    block_rows: int,
    count: Value,
    target: Pointer,
    rows_ahead: Sequence[tuple[Pointer, int]],
) -> None:
    """Target += rowsᵀ @ block over `count` rows; asks for the next block's rows meanwhile.

    Args:
        block_rows: The most that `count` can be.
        rows_ahead: Others that the next block will read, with their strides, as wide as the block.
    """
    size, lanes, padded = panels.tile_rows, panels.lanes, panels.padded
    whole = matrix.num_columns // size
    share = -(-block_rows // -(-matrix.num_columns // size))
    # The same line serves all panels: each asks for some rows before it multiplies, or few ask as they go.
    rows_of_panel = -(-block_rows // panels.num_full) if panels.num_full >= _MANY_PANELS else 0

    def ask(column: Value, num_rows: int, row: Value) -> None:
        source.at((row + count) * matrix.stride + column).prefetch(0, num_rows, level=2)

    def tile(column: Value, num_rows: int, panel: Value, num_vectors: int) -> None:
        where = [target.at((column + r) * padded + panel * panels.width) for r in range(num_rows)]
        # From zero on, not from what is there: one long chain of rows would lose digits.
        zero = k.constant(panels.kind, 0, lanes)
        sums = [[k.variable(zero) for _ in range(num_vectors)] for _ in where]
        with k.loop(0, count) as n:
            numbers, row = source.at(n * matrix.stride + column), block.at(n * padded + panel * panels.width)
            vectors = [row.load(v * lanes, lanes) for v in range(num_vectors)]
            for r, row_sums in enumerate(sums):
                _multiply_add(numbers.load(r), vectors, row_sums)
            if not rows_of_panel:
                ask(column, num_rows, n)
        for row, row_sums in zip(where, sums):
            for v, total in enumerate(row_sums):
                row.store(v * lanes, row.load(v * lanes, lanes) + total.get())

    def columns(number: Value, num_rows: int) -> None:
        column = number * size
        for ahead, stride in rows_ahead:
            for r in range(share):
                ahead.at((number * share + r) * stride).prefetch(0, panels.num_columns, level=2)
        with k.loop(0, k.constant("i64", panels.num_full)) as panel:
            for r in range(rows_of_panel):
                ask(column, num_rows, panel * rows_of_panel + r)
            tile(column, num_rows, panel, panels.vectors)
        if panels.rest:
            tile(column, num_rows, k.constant("i64", panels.num_full), -(-panels.rest // lanes))

    with k.loop(0, k.constant("i64", whole)) as number:
        columns(number, size)
    if rest := matrix.num_columns % size:
        columns(k.constant("i64", whole), rest)
