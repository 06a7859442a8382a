# SPDX-License-Identifier: Apache-2.0
"""The kernels of `product_kernels` for the matrix unit: float32, the same results up to how sums are rounded.

Rows are cut into parts a block at a time, laid out as registers take them, and multiplied while they lie in the cache.
Small products are added up before large ones, so a sum is rounded no more often than one of whole numbers. A block with
numbers that must not be cut goes the way of vectors; see `matrix_unit`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dgl_hybrid.ops.cpu.ir import KernelBuilder, Pointer, Value
from dgl_hybrid.ops.cpu.matrix_unit import (
    DEPTH,
    NUM_PARTS,
    REGISTER_PARTS,
    SIZE,
    STEP_PARTS,
    Fitness,
    MatrixRegisters,
    cut,
    halves,
    pairs,
    turned,
)
from dgl_hybrid.ops.cpu.product_kernels import (
    Finish,
    GradientBlock,
    GradientSpec,
    Matrix,
    Panels,
    ProductSpec,
    emit_rows,
    pointers,
    product_finish,
)

BLOCK_ROWS = 2 * SIZE
"""Of a product: as many as registers hold sums of."""
GRADIENT_BLOCK_ROWS = 2 * DEPTH
MAX_STEPS = 48
"""Of DEPTH columns each, in a sum of products: parts of two blocks of rows take 12 KiB of a thread's stack for each."""
MAX_GRADIENT_COLUMNS = 512
"""What is held of a block of a gradient takes 1.5 KiB for each."""
_GROUP = 4
"""Registers of columns of an operand whose parts are made together for a gradient of weights: with those of the
gradient they lie in the second cache."""
_UNITS = SIZE + NUM_PARTS
"""What cutting 16 columns of 32 rows is divided into: pairs of rows, then parts."""
_SMALL_FIRST = ((0, 2), (0, 1), (1, 1), (1, 0), (2, 0))
"""Which part of a left operand is multiplied by which of a right one; each pair shares one with the pair before it."""
_LARGE = ((0, 0),)


def num_steps(num_columns: int) -> int:
    """How many times a register's depth so many columns are."""
    return -(-num_columns // DEPTH)


def filled_share(num_rows: int, num_columns: int) -> float:
    """How much of its registers a weight fills."""
    return num_rows * num_columns / (num_steps(num_rows) * DEPTH * num_registers(num_columns) * SIZE)


def num_registers(num_columns: int) -> int:
    """How many registers side by side hold so many columns."""
    return -(-num_columns // SIZE)


@dataclass(frozen=True)
class _Tiles:
    """Parts as registers take them: by rows of a left operand (columns of a right one), then by step, then by part."""

    memory: Pointer
    steps: int

    @classmethod
    def of_stack(cls, k: KernelBuilder, count: int, steps: int) -> _Tiles:
        """Room for `count` registers' rows or columns."""
        return cls(k.scratch("i16", count * steps * STEP_PARTS), steps)

    def __getitem__(self, number: Value | int) -> _Tiles:
        """Those from a register's rows or columns on."""
        size = self.steps * STEP_PARTS
        return _Tiles(self.memory.at(number * size), self.steps)

    def at(self, step: Value | int, part: int) -> Pointer:
        """What one register takes."""
        return self.memory.at(step * STEP_PARTS).at(part * REGISTER_PARTS)


def emit_parts(num_rows: int, num_columns: int) -> str:
    """Cuts a weight into parts, laid out as registers take a right operand, filled up with zeros to whole ones.

    Tasks are of registers of columns. Arguments: the weight (f32), row by row; `least_bits`; its parts (i16), and how
    many steps lie between those of one register and of the next; what becomes 0 (i32) if a number must not be cut.
    """
    k = KernelBuilder()
    weight, fitness = k.pointer("f32"), Fitness(k, k.integer().convert("i32"))
    parts, steps, are_fit = k.pointer("i16"), k.integer(), k.pointer("i32")
    none = k.constant("i64", 0)
    with k.rows() as register:
        column = register * SIZE
        left, target = k.constant("i64", num_columns) - column, parts.at(register * steps * STEP_PARTS)
        fitness.forget()
        with k.loop(0, k.constant("i64", num_steps(num_rows) * DEPTH // 2)) as pair:
            step, place = pair.divide(DEPTH // 2)
            vectors = []
            for row in (pair * 2, pair * 2 + 1):
                inside = row.compare("slt", num_rows).select(left, none)
                vectors.append(weight.at(row * num_columns + column).load_some(inside, SIZE))
                fitness.note(vectors[-1])
            upper, lower = map(cut, vectors)
            for part in range(NUM_PARTS):
                here = target.at(step * STEP_PARTS).at(place * DEPTH + part * REGISTER_PARTS)
                here.store(0, pairs(upper[part], lower[part]).halved())
        with k.when(fitness.are_fit() ^ 1):
            are_fit.store(0, k.constant("i32", 0))
    return k.finish()


def emit_products(spec: ProductSpec) -> str:
    """`product_kernels.emit_products`.

    Arguments: those of that kernel, and behind them `least_bits` and the parts of the weights (i16), one below the
    other, each filled up with zeros to whole steps.
    """
    k = KernelBuilder()
    sources, weights = pointers(k, spec.kind, spec.rows), pointers(k, spec.kind, spec.rows)
    finish = product_finish(k, spec)
    registers, fitness = MatrixRegisters(k), Fitness(k, k.integer().convert("i32"))
    rows = _CutRows(k, BLOCK_ROWS, list(zip(spec.rows, sources)), fitness)
    right = _Tiles(k.pointer("i16"), rows.steps)
    multiply = _Multiplication(k, registers, spec.num_columns)
    registers.configure()
    with k.tasks() as (_, first, end):
        rows.turn_to(first, _at_most(k, BLOCK_ROWS, end - first))
        rows.cut_rest()
        with k.loop(first, end, BLOCK_ROWS) as begin:
            left, are_fit = rows.left, fitness.are_fit()
            count = _at_most(k, BLOCK_ROWS, end - begin)
            rows.turn_to(begin + count, _at_most(k, BLOCK_ROWS, end - begin - count))
            with k.when(are_fit):
                multiply.emit(left, right, begin, count, finish, rows)
            with k.when(are_fit ^ 1):
                products = list(zip(spec.rows, sources, weights))
                emit_rows(k, Panels(spec.kind, spec.num_columns), products, begin, begin + count, finish)
            rows.cut_rest()
    registers.release()
    return k.finish()


def emit_gradients(spec: GradientSpec) -> str:
    """`product_kernels.emit_gradients`.

    Arguments: those of that kernel, and behind them `least_bits` of gradients and of operands and, by operand, the
    parts of its transposed weight (i16), filled up with zeros to whole steps.
    """
    k = KernelBuilder()
    # `GradientBlock` declares the first arguments, and these are behind them.
    block = GradientBlock(k, spec, GRADIENT_BLOCK_ROWS)
    block.notes, of_operands = (Fitness(k, k.integer().convert("i32")) for _ in range(2))
    registers = MatrixRegisters(k)
    num_columns, padded = spec.grad.num_columns, block.panels.padded
    weights = [_Tiles(k.pointer("i16"), num_steps(num_columns)) for _ in spec.rows]
    rows = _CutRows(k, GRADIENT_BLOCK_ROWS, [(Matrix(padded, padded), block.rows)])
    outer = _OuterProducts(k, registers, block, of_operands)
    registers.configure()
    with block.tasks():
        are_fit = block.notes.are_fit()
        if any(spec.needs_rows):
            rows.turn_to(k.constant("i64", 0), block.count)
            rows.cut_rest()
        outer.begin()
        for j, matrix in enumerate(spec.rows):
            if spec.needs_weights[j]:
                outer.emit(j, are_fit)
            if spec.needs_rows[j]:
                multiply = _Multiplication(k, registers, matrix.num_columns)
                with k.when(are_fit):
                    for first in range(0, GRADIENT_BLOCK_ROWS, BLOCK_ROWS):
                        count = _at_most(k, BLOCK_ROWS, block.count - first)
                        begin = k.constant("i64", first)
                        multiply.emit(rows.left[first // SIZE], weights[j], begin, count, block.finish(j))
                with k.when(are_fit ^ 1):
                    block.emit_rows(j)
    registers.release()
    return k.finish()


def _at_most(k: KernelBuilder, most: int, value: Value) -> Value:
    return value.compare("slt", most).select(value, k.constant("i64", most))


class _Piecemeal(ABC):
    """Cutting that is done a bit at a time, while the matrix unit is busy with what was cut before."""

    def __init__(self, k: KernelBuilder) -> None:
        self._builder = k
        self._done, self._all = (k.variable(k.constant("i64", 0)) for _ in range(2))

    def _begin(self, count: Value | int) -> None:
        """So many bits are to be cut."""
        self._done.set(0)
        self._all.set(count)

    @abstractmethod
    def _cut(self, number: Value) -> None:
        """One of them."""

    def cut_some(self) -> None:
        """The next one, if any is left."""
        done = self._done.get()
        with self._builder.when(done.compare("slt", self._all.get())):
            self._cut(done)
            self._done.set(done + 1)

    def cut_until(self, end: Value) -> None:
        """All that are left of those before `end`."""
        with self._builder.loop(self._done.get(), end) as number:
            self._cut(number)
        self._done.set(self._done.get().maximum(end))

    def cut_rest(self) -> None:
        """All that are left."""
        self.cut_until(self._all.get())


class _CutRows(_Piecemeal):
    """Cuts blocks of rows into parts and lays them where a left operand has them: a bit is a step of a row.

    Args:
        num_rows: Of a block.
        operands: Side by side in a row of the left operand, each from a new step on.
        fitness: Sees their numbers.
    """

    def __init__(
        self,
        k: KernelBuilder,
        num_rows: int,
        operands: Sequence[tuple[Matrix, Pointer]],
        fitness: Fitness | None = None,
    ) -> None:
        super().__init__(k)
        self._fitness, self._num_rows, self._operands = fitness, num_rows, operands
        self.steps = sum(num_steps(matrix.num_columns) for matrix, _ in operands)
        self._rooms = _Tiles.of_stack(k, 2 * num_rows // SIZE, self.steps)
        zero = k.constant("i64", 0)
        self._room, self._first = k.variable(zero), k.variable(zero)

    @property
    def left(self) -> _Tiles:
        """The block that is cut, or was last."""
        return self._rooms[self._room.get() * (self._num_rows // SIZE)]

    def turn_to(self, first: Value, count: Value) -> None:
        """From now on cuts `count` rows from `first` on, into other room than those before, which are forgotten."""
        self._room.set(self._room.get() ^ 1)
        self._first.set(first)
        self._begin(count * self.steps)
        if self._fitness is not None:
            self._fitness.forget()

    def _cut(self, number: Value) -> None:
        k = self._builder
        r, step = number.divide(self.steps)
        row = self._first.get() + r
        first_step, place, left = 0, self._operands[0][1], k.constant("i64", DEPTH)
        ahead = place
        for matrix, source in self._operands:
            column = (step - first_step) * DEPTH
            of_row = source.at(row * matrix.stride + column)
            of_next = of_row.at(self._num_rows * matrix.stride)
            inside = k.constant("i64", matrix.num_columns) - column
            if first_step:
                is_here = step.compare("sge", first_step)
                place, ahead = k.choose(is_here, of_row, place), k.choose(is_here, of_next, ahead)
                left = is_here.select(inside, left)
            else:
                place, ahead, left = of_row, of_next, inside
            first_step += num_steps(matrix.num_columns)
        ahead.prefetch(0, DEPTH, level=2)
        if all(matrix.num_columns % DEPTH == 0 for matrix, _ in self._operands):
            vectors = [place.load(0, SIZE), place.load(SIZE, SIZE)]
        else:
            vectors = [place.load_some(left, SIZE), place.at(SIZE).load_some(left - SIZE, SIZE)]
        if self._fitness is not None:
            for vector in vectors:
                self._fitness.note(vector)
        first, second = map(cut, vectors)
        of_register = self.left[r >> 4]
        for part in range(NUM_PARTS):
            target = of_register.at(step, part).at((r & (SIZE - 1)) * DEPTH)
            target.store(0, halves(first[part], second[part]))


class _Squares:
    """Multiplies as many rows and columns as the registers hold sums of: two by two registers of each."""

    def __init__(self, k: KernelBuilder, registers: MatrixRegisters) -> None:
        self._builder, self._registers = k, registers
        self.sums = k.scratch("f32", BLOCK_ROWS * 2 * SIZE)
        """(2 * SIZE, 2 * SIZE)."""

    def multiply(
        self, left: _Tiles, right: _Tiles, num_right: int, meanwhile: Callable[[], None] = lambda: None
    ) -> None:
        """Puts the sums of products of two registers of rows by one or two of columns into `sums`.

        Args:
            meanwhile: Emits what is done between products: vectors have nothing to do for most of the time.
        """
        k, registers = self._builder, self._registers
        for total in range(4):
            registers.zero(total)
        for chosen in (_SMALL_FIRST, _LARGE):
            with k.loop(0, k.constant("i64", left.steps)) as step:
                self._step(left, right, num_right, step, chosen, meanwhile)
        for i in range(2):
            for j in range(num_right):
                registers.store(2 * i + j, self.sums.at(i * SIZE * 2 * SIZE + j * SIZE), 2 * SIZE * 4)

    def _step(
        self,
        left: _Tiles,
        right: _Tiles,
        num_right: int,
        step: Value,
        chosen: tuple[tuple[int, int], ...],
        meanwhile: Callable[[], None],
    ) -> None:
        registers, before = self._registers, (-1, -1)
        for of_left, of_right in chosen:
            for i in range(2) if of_left != before[0] else ():
                registers.load(4 + i, left[i].at(step, of_left))
            for j in range(num_right) if of_right != before[1] else ():
                registers.load(6 + j, right[j].at(step, of_right))
            for i in range(2):
                for j in range(num_right):
                    registers.multiply_add(2 * i + j, 4 + i, 6 + j)
            before = (of_left, of_right)
            meanwhile()


class _Multiplication:
    """A block of rows by all columns of a right operand."""

    def __init__(self, k: KernelBuilder, registers: MatrixRegisters, num_columns: int) -> None:
        self._builder, self._num_columns = k, num_columns
        self._squares = _Squares(k, registers)

    def emit(
        self,
        left: _Tiles,
        right: _Tiles,
        first: Value,
        count: Value,
        finish: Finish,
        following: _CutRows | None = None,
    ) -> None:
        """Rows `first` to `first + count`, BLOCK_ROWS at most; cuts most of the rows that follow meanwhile."""
        k, width = self._builder, 2 * SIZE
        whole, rest = divmod(self._num_columns, width)
        pauses = len(_SMALL_FIRST + _LARGE) * (whole + bool(rest))
        self._at_once = -(-BLOCK_ROWS // pauses)
        self._following = following
        if whole:
            with k.loop(0, k.constant("i64", whole)) as panel:
                self._panel(left, right[panel * 2], first, count, panel * width, width, finish)
        if rest:
            column = k.constant("i64", whole * width)
            self._panel(left, right[whole * 2], first, count, column, rest, finish)

    def _meanwhile(self) -> None:
        if self._following is not None:
            k = self._builder
            with k.loop(0, k.constant("i64", self._at_once)):
                self._following.cut_some()

    def _panel(
        self, left: _Tiles, right: _Tiles, first: Value, count: Value, column: Value, width: int, finish: Finish
    ) -> None:
        self._squares.multiply(left, right, num_registers(width), self._meanwhile)
        pieces = Panels("f32", width).pieces(width)
        with self._builder.loop(0, count) as r:
            for begin, lanes in pieces:
                finish(first + r, column, begin, self._squares.sums.at(r * (2 * SIZE)).load(begin, lanes))


class _CutColumns(_Piecemeal):
    """Cuts groups of columns of a whole block's rows into parts and lays them where a left operand has them, columns as
    rows: a bit is a pair of rows, or a part of columns.

    Args:
        has_rest: Groups may have fewer columns than registers have rows.
    """

    def __init__(self, k: KernelBuilder, num_rows: int, fitness: Fitness, *, has_rest: bool) -> None:
        super().__init__(k)
        self._fitness, self._num_rows, self._has_rest = fitness, num_rows, has_rest
        self._steps = num_steps(num_rows)
        self._rooms = _Tiles.of_stack(k, 2 * _GROUP, self._steps)
        self._turning = k.scratch("i32", NUM_PARTS * SIZE * SIZE)
        zero = k.constant("i64", 0)
        self._room, self._address, self._stride, self._width = (k.variable(zero) for _ in range(4))

    @property
    def left(self) -> _Tiles:
        """The group that is cut, or was last."""
        return self._rooms[self._room.get() * _GROUP]

    def turn_to(self, where: Pointer, stride: int, width: Value) -> None:
        """From now on cuts `width` columns from `where` on, which may be none, into other room than those before,
        which are forgotten.
        """
        self._room.set(self._room.get() ^ 1)
        self._address.set(where.address())
        self._stride.set(stride)
        self._width.set(width)
        registers, _ = (width + (SIZE - 1)).divide(SIZE)
        self._begin(registers * (self._steps * _UNITS))
        self._fitness.forget()

    def _cut(self, number: Value) -> None:
        """Of 16 columns and 32 rows first pairs of rows, then, part by part, pairs become columns."""
        k = self._builder
        register, unit = number.divide(_UNITS)
        column, step = register.divide(self._steps)
        is_pair = unit.compare("slt", SIZE)
        with k.when(is_pair):
            self._cut_pair(column * SIZE, step * DEPTH + unit * 2, unit)
        with k.when(is_pair ^ 1):
            self._turn(self.left[column], step, unit - SIZE)

    def _cut_pair(self, column: Value, row: Value, pair: Value) -> None:
        k, stride = self._builder, self._stride.get()
        upper = k.pointer_to("f32", self._address.get()).at(row * stride + column)
        lower, left = upper.at(stride), self._width.get() - column
        for here in (upper, lower):
            here.at(stride * self._num_rows).prefetch(0, SIZE, level=2)
        vectors = [here.load_some(left, SIZE) if self._has_rest else here.load(0, SIZE) for here in (upper, lower)]
        for vector in vectors:
            self._fitness.note(vector)
        first, second = map(cut, vectors)
        for part in range(NUM_PARTS):
            self._turning.at(part * SIZE * SIZE).at(pair * SIZE).store(0, pairs(first[part], second[part]))

    def _turn(self, of_column: _Tiles, step: Value, part: Value) -> None:
        place = self._turning.at(part * (SIZE * SIZE))
        target = of_column.at(step, 0).at(part * REGISTER_PARTS)
        for i, of_row in enumerate(turned([place.load(i * SIZE, SIZE) for i in range(SIZE)])):
            target.at(i * DEPTH).store(0, of_row.halved())


class _CutGradient(_Piecemeal):
    """Cuts a block's gradient into parts and lays them where a right operand has them, register by register: a bit is a
    pair of rows.
    """

    def __init__(self, k: KernelBuilder, block: GradientBlock) -> None:
        super().__init__(k)
        self._block = block
        self.num_registers = num_registers(block.spec.grad.num_columns)
        self.right = _Tiles.of_stack(k, self.num_registers, num_steps(block.num_rows))
        self._pairs = block.num_rows // 2

    def begin(self) -> None:
        """At the begin of a block."""
        self._begin(self.num_registers * self._pairs)
        self._ahead = self._block.rows_ahead()

    def cut_before(self, register: Value | int) -> None:
        """All that is left before that register."""
        end = register * self._pairs
        self.cut_until(end if isinstance(end, Value) else self._builder.constant("i64", end))

    def _cut(self, number: Value) -> None:
        block = self._block
        column, pair = number.divide(self._pairs)
        row, first = pair * 2, column * SIZE
        for rows, stride in self._ahead:
            for odd in range(2):
                rows.at((row + odd) * stride + first).prefetch(0, SIZE, level=2)
        place = block.rows.at(row * block.panels.padded + first)
        upper, lower = (cut(place.load(n * block.panels.padded, SIZE)) for n in range(2))
        for part in range(NUM_PARTS):
            target = self.right[column].at(row >> 5, part).at((row & (DEPTH - 1)) * SIZE)
            target.store(0, pairs(upper[part], lower[part]).halved())


class _OuterProducts:
    """Gradients of weights: columns of operands by columns of the gradient, over the rows of a block. While a group of
    columns is multiplied, the next columns of the gradient are cut, and the group that follows.
    """

    def __init__(
        self, k: KernelBuilder, registers: MatrixRegisters, block: GradientBlock, of_operands: Fitness
    ) -> None:
        self._builder, self._block, self._fitness = k, block, of_operands
        self._squares = _Squares(k, registers)
        has_rest = any(matrix.num_columns % SIZE for matrix in block.spec.rows)
        self._columns = _CutColumns(k, block.num_rows, of_operands, has_rest=has_rest)
        self._gradient = _CutGradient(k, block)
        needed = [j for j, is_needed in enumerate(block.spec.needs_weights) if is_needed]
        self._following = dict(zip(needed, [*needed[1:], needed[0]])) if needed else {}

    def begin(self) -> None:
        """At the begin of a block: the first one of a task has nobody before it."""
        if not self._following:
            return
        k, block = self._builder, self._block
        self._gradient.begin()
        with k.when(block.begin.compare("eq", block.first)):
            self._turn_to_operand(next(iter(self._following)), block.begin)
            self._columns.cut_rest()

    def emit(self, j: int, are_fit: Value) -> None:
        """Adds the block's share to the gradient of a weight.

        Args:
            are_fit: All numbers of the block's gradient; else vectors do it all, as where the block is not whole.
        """
        k, size = self._builder, _GROUP * SIZE
        is_ready = are_fit & self._block.count.compare("eq", self._block.num_rows)
        whole, rest = divmod(self._block.spec.rows[j].num_columns, size)
        if whole:
            with k.loop(0, k.constant("i64", whole)) as group:
                self._group(j, group * size, size, is_ready)
        if rest:
            self._group(j, k.constant("i64", whole * size), rest, is_ready)

    def _turn_to_operand(self, j: int, begin: Value) -> None:
        """To its first columns in the block that begins there, if that is a whole one."""
        k, block = self._builder, self._block
        matrix = block.spec.rows[j]
        is_whole = (block.end - begin).compare("sge", block.num_rows)
        width = is_whole.select(min(matrix.num_columns, _GROUP * SIZE), k.constant("i64", 0))
        self._columns.turn_to(block.source(j, begin), matrix.stride, width)

    def _turn_to_next(self, j: int, behind: Value) -> None:
        """To the columns of this operand from there on, or to the next operand."""
        k, block = self._builder, self._block
        matrix, following = block.spec.rows[j], self._following[j]
        left = k.constant("i64", matrix.num_columns) - behind
        is_more = left.compare("sgt", 0)
        with k.when(is_more):
            width = is_more.select(_at_most(k, _GROUP * SIZE, left), k.constant("i64", 0))
            width = block.count.compare("eq", block.num_rows).select(width, k.constant("i64", 0))
            self._columns.turn_to(block.source(j).at(behind), matrix.stride, width)
        with k.when(is_more ^ 1):
            self._turn_to_operand(following, block.begin if following > j else block.begin + block.num_rows)

    def _group(self, j: int, first: Value, width: int, is_ready: Value) -> None:
        """The same for columns `first` to `first + width` of the operand."""
        k = self._builder
        left, is_fit = self._columns.left, is_ready & self._fitness.are_fit()
        self._turn_to_next(j, first + width)
        with k.when(is_fit):
            self._multiply(left, j, first, width)
        with k.when(is_fit ^ 1):
            self._block.emit_outer(j, first=first, width=width)
        self._columns.cut_rest()

    def _multiply(self, left: _Tiles, j: int, first: Value, width: int) -> None:
        k = self._builder
        target = self._block.d_weight(j).at(first * self._block.panels.padded)
        whole, rest = divmod(self._gradient.num_registers, 2)
        if whole:
            with k.loop(0, k.constant("i64", whole)) as panel:
                self._panel(left, panel * 2, 2, target.at(panel * (2 * SIZE)), width)
        if rest:
            self._panel(left, whole * 2, 1, target.at(whole * 2 * SIZE), width)

    def _panel(self, left: _Tiles, panel: Value | int, num_right: int, target: Pointer, width: int) -> None:
        k, rows = self._builder, 2 * SIZE
        self._gradient.cut_before(panel + num_right)
        with k.loop(0, k.constant("i64", -(-width // rows))) as two:
            count = _at_most(k, rows, k.constant("i64", width) - two * rows)
            here = target.at(two * (rows * self._block.panels.padded))
            self._square(left[two * 2], panel, num_right, here, count)

    def _square(self, left: _Tiles, panel: Value | int, num_right: int, target: Pointer, count: Value) -> None:
        self._squares.multiply(left, self._gradient.right[panel], num_right, self._meanwhile)
        with self._builder.loop(0, count) as r:
            row, sums = target.at(r * self._block.panels.padded), self._squares.sums.at(r * (2 * SIZE))
            for column in range(0, num_right * SIZE, SIZE):
                row.store(column, row.load(column, SIZE) + sums.load(column, SIZE))

    def _meanwhile(self) -> None:
        k, of_gradient = self._builder, -(-2 * GRADIENT_BLOCK_ROWS // 2 // (_GROUP // 2 * self._pauses))
        with k.loop(0, k.constant("i64", of_gradient)):
            self._gradient.cut_some()
        of_group = _GROUP * num_steps(self._block.num_rows) * _UNITS
        num_squares = _GROUP // 2 * -(-self._gradient.num_registers // 2)
        with k.loop(0, k.constant("i64", -(-of_group // (num_squares * self._pauses)))):
            self._columns.cut_some()

    @property
    def _pauses(self) -> int:
        """Between the products of a square, for which so much is cut that all is, of the next columns and group."""
        return num_steps(self._block.num_rows) * len(_SMALL_FIRST + _LARGE)
