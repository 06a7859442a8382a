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


def head_sums(
    k: KernelBuilder, block: Block, kind: Kind, term: Callable[[Piece], Value], heads: range | None = None
) -> list[Value]:
    """Per head of the block (or of those given) the sum of `term` over its elements; it gives a vector per piece."""
    sums, by_head = [], block.head_pieces(kind)
    for pieces in by_head if heads is None else [by_head[head] for head in heads]:
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


_TRANSPOSED_BYTES = 16
"""Vectors are turned in parts of this size, of which processors move the lanes fastest."""


def head_groups(block: Block, kind: Kind) -> list[range]:
    """The heads whose sums `grouped_head_sums` gives in one vector."""
    together = _TRANSPOSED_BYTES // ELEMENT_BYTES[kind]
    if block.heads == 1 or block.width < together:
        return [range(head, head + 1) for head in range(block.heads)]
    return [range(first, min(first + together, block.heads)) for first in range(0, block.heads, together)]


def grouped_head_sums(
    k: KernelBuilder, block: Block, kind: Kind, term: Callable[[Piece], Value]
) -> Iterator[tuple[range, Value]]:
    """What `head_sums` gives, in vectors: (heads, their sums).

    Several vectors are added up together, since that halves how many there are where each alone would halve how many of
    its lanes are of use: (a0 + a1, a2 + a3, b0 + b1, b2 + b3), and so on.
    """
    pieces = block.head_pieces(kind)
    for heads in head_groups(block, kind):
        if len(heads) == 1:
            yield heads, head_sums(k, block, kind, term, heads)[0]
            continue
        together = _TRANSPOSED_BYTES // ELEMENT_BYTES[kind]
        sums = [_narrowed([term(piece) for piece in pieces[head]], together) for head in heads]
        lanes = min(value.type.lanes for value in sums)
        sums = [value.fold_sum(lanes) for value in sums]
        sums += [k.constant(kind, 0.0, lanes)] * (together - len(heads))
        while len(sums) > 1:
            sums = [_pairs_added(left, right, together) for left, right in zip(sums[::2], sums[1::2])]
        yield heads, sums[0].fold_sum(together).shuffle(range(len(heads)))


def _narrowed(terms: list[Value], least: int) -> Value:
    """The sum of vectors of falling length, of which those below `least` lanes are added to the first of its lanes."""
    total = terms[0]
    for value in terms[1:]:
        if value.type.lanes < least:
            value = value.pad(least, 0.0)
        total = total.fold_sum(value.type.lanes) + value
    return total


def _pairs_added(left: Value, right: Value, together: int) -> Value:
    """In each part of `together` lanes the sums of neighbours, first of `left`, then of `right`."""
    lanes = left.type.lanes
    half = range(together // 2)
    firsts = [part + base + 2 * i for part in range(0, lanes, together) for base in (0, lanes) for i in half]
    return left.join(right, firsts) + left.join(right, [lane + 1 for lane in firsts])


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


def summed_elements(dtype: torch.dtype) -> int:
    """How many columns of that dtype a kernel adds up at once."""
    return vector_unit().summed_bytes // dtype.itemsize


def compared_elements(dtype: torch.dtype) -> int:
    """Of how many columns of that dtype a kernel finds the largest at once."""
    return vector_unit().compared_bytes // dtype.itemsize


def holds_two_sums(num_columns: int, dtype: torch.dtype) -> bool:
    """Whether a kernel may keep two sums of each of so many columns."""
    return num_columns * dtype.itemsize <= vector_unit().paired_bytes


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
