# SPDX-License-Identifier: Apache-2.0
"""How the elements of a row lie in vectors: pieces of the machine's length, then shorter ones for what is left."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

from dgl_hybrid.ops.cpu.host import vector_unit
from dgl_hybrid.ops.cpu.ir import KernelBuilder, Kind, Pointer, Value, Variable

ELEMENT_BYTES: dict[Kind, int] = {"f32": 4, "f64": 8, "i32": 4, "i64": 8}


@dataclass(frozen=True)
class Block:
    """Columns that a kernel handles at once: `heads` heads of `width` elements each."""

    heads: int
    width: int

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.heads * self.width

    def pieces(self, kind: Kind) -> list[Piece]:
        """The vectors that cover the block."""
        lanes, pieces, begin = vector_unit().register_bytes // ELEMENT_BYTES[kind], [], 0
        while begin < self.size:
            while begin + lanes > self.size:
                lanes //= 2
            pieces.append(Piece(self, begin, lanes))
            begin += lanes
        return pieces

    def head_pieces(self, kind: Kind) -> list[list[Piece]]:
        """The vectors that cover each head; none reaches into the next head."""
        one = Block(1, self.width).pieces(kind)
        return [[Piece(self, head * self.width + p.begin, p.lanes) for p in one] for head in range(self.heads)]


@dataclass(frozen=True)
class Piece:
    """Elements `begin` to `begin + lanes` of a block."""

    block: Block
    begin: int
    lanes: int

    @cached_property
    def heads(self) -> range:
        """The heads that own the elements."""
        width = self.block.width
        return range(self.begin // width, (self.begin + self.lanes - 1) // width + 1)

    def spread(self, weights: Pointer) -> Value:
        """Loads one weight per head from `weights` and puts each at its head's elements."""
        first, count = self.heads[0], len(self.heads)
        lanes = [(self.begin + lane) // self.block.width - first for lane in range(self.lanes)]
        return weights.load(first, count).shuffle(lanes)


def load_pieces(pieces: list[Piece], row: Pointer) -> list[Value]:
    """The row's elements, in vectors."""
    return [row.load(piece.begin, piece.lanes) for piece in pieces]


def store_pieces(pieces: list[Piece], row: Pointer, values: list[Value], *, past_cache: bool = False) -> None:
    """Writes the row's elements."""
    for piece, value in zip(pieces, values):
        row.store(piece.begin, value, past_cache=past_cache)


def head_sums(k: KernelBuilder, block: Block, kind: Kind, term: Callable[[Piece], Value]) -> list[Value]:
    """Per head of the block the sum of `term` over its elements; `term` gives a vector per piece."""
    sums = []
    for pieces in block.head_pieces(kind):
        if not pieces:
            sums.append(k.constant(kind, 0.0))
            continue
        wide = [term(piece) for piece in pieces if piece.lanes == pieces[0].lanes]
        rest = [term(piece) for piece in pieces if piece.lanes < pieces[0].lanes]
        total = functools.reduce(operator.add, wide).sum()
        for value in rest:
            total = total + value.sum()
        sums.append(total)
    return sums


def store_head_sums(
    k: KernelBuilder, block: Block, kind: Kind, term: Callable[[Piece], Value], row: Pointer, *, add: bool = False
) -> None:
    """Writes the sums of the heads at `row`; with `add` adds them to what is there."""
    if block.width == 1:  # nothing to add up: the terms are the sums
        sums = [(piece.begin, term(piece)) for piece in block.pieces(kind)]
    else:
        sums = list(enumerate(head_sums(k, block, kind, term)))
    for begin, value in sums:
        row.store(begin, row.load(begin, value.type.lanes) + value if add else value)


def zero_variables(k: KernelBuilder, pieces: list[Piece], kind: Kind) -> list[Variable]:
    """One variable per piece, zero."""
    return [k.variable(k.constant(kind, 0, piece.lanes)) for piece in pieces]


def add_to(totals: list[Variable], terms: list[Variable]) -> None:
    """Adds each term to its total."""
    for total, term in zip(totals, terms):
        total.set(total.get() + term.get())


def get_all(variables: list[Variable]) -> list[Value]:
    """The variables' values here."""
    return [variable.get() for variable in variables]


def accumulator_elements(dtype: torch.dtype) -> int:
    """How many sums of that dtype a kernel keeps in registers."""
    return vector_unit().accumulator_bytes // dtype.itemsize


def column_blocks(heads: int, width: int, size: int) -> Iterator[tuple[int, Block]]:
    """Cuts heads × width columns into blocks of at most `size` elements: whole heads, or parts of one.

    Yields:
        The first column of each block, and the block. At most two kinds of blocks, so as few kernels.
    """
    if width == 0:
        return
    if width > size:
        for head in range(heads):
            for begin in range(0, width, size):
                yield head * width + begin, Block(1, min(size, width - begin))
    else:
        step = size // width
        for head in range(0, heads, step):
            yield head * width, Block(min(step, heads - head), width)
