# SPDX-License-Identifier: Apache-2.0
"""Kernels that reduce the entries of each row: sums, maxima and minima, and the gradients of the latter."""

from __future__ import annotations

from dataclasses import dataclass

from dgl_hybrid.ops.cpu.entries import Entries, prefetch_distance
from dgl_hybrid.ops.cpu.ir import KernelBuilder, Kind, Pointer, Value
from dgl_hybrid.ops.cpu.lanes import (
    ELEMENT_BYTES,
    Block,
    Piece,
    get_all,
    load_pieces,
    store_head_sums,
    store_pieces,
    zero_variables,
)

TARGETS_AHEAD = 8
"""Rows further on, to whose place in `out` the processor is pointed; `targets` must be longer by so many."""


@dataclass(frozen=True)
class SpmmSpec:
    """What a kernel of this file is compiled for.

    `block` are its columns. `by_edge`: the operand's rows are those of the entries' edges, not of their neighbours.
    `edge_ids`: entry k is not edge k. `weighted`: each edge has a factor per head. `least`: minimum, not maximum.
    `adds`: sums are added to rows that are there. `scaled_sources`, `scaled_rows`: the operand's rows, and the
    sums, have a factor each. `past_cache`: sums go straight to memory.
    """

    value: Kind
    index: Kind
    block: Block
    by_edge: bool = False
    edge_ids: bool = False
    weighted: bool = False
    least: bool = False
    adds: bool = False
    scaled_sources: bool = False
    scaled_rows: bool = False
    past_cache: bool = False


@dataclass(frozen=True)
class _Operand:
    """The rows that are reduced, times the weights of their edges."""

    spec: SpmmSpec
    entries: Entries
    x: Pointer
    x_stride: Value
    weights: Pointer
    weight_stride: Value

    @classmethod
    def declare(cls, k: KernelBuilder, spec: SpmmSpec) -> _Operand:
        entries = Entries.declare(k, spec.index, spec.edge_ids)
        return cls(spec, entries, k.pointer(spec.value), k.integer(), k.pointer(spec.value), k.integer())

    def row(self, entry: Value) -> Pointer:
        """The operand's row of that entry."""
        row = self.entries.edge(entry) if self.spec.by_edge else self.entries.column(entry)
        return self.x.at(row * self.x_stride)

    def weight_row(self, entry: Value) -> Pointer:
        """The weights of that entry's edge."""
        return self.weights.at(self.entries.edge(entry) * self.weight_stride)

    def prefetch(self, entry: Value) -> None:
        """Asks for rows further on, where the processor cannot guess them: not those that follow one another."""
        spec = self.spec
        distance = prefetch_distance(spec.block.size * ELEMENT_BYTES[spec.value])
        ahead = self.entries.ahead(entry, distance)
        if spec.edge_ids or not spec.by_edge:
            self.row(ahead).prefetch(0, spec.block.size)
        if spec.weighted and spec.edge_ids:
            self.weight_row(ahead).prefetch(0, spec.block.heads)


def emit_sum(spec: SpmmSpec) -> str:
    """out[r] = Σ over the entries of row r of x (times the edge's weight); 0 for a row without entries.

    With `adds`: out[targets[r]] += that sum. Factors come before the targets; neither goes with weights.
    """
    k = KernelBuilder()
    operand = _Operand.declare(k, spec)
    out, out_stride = k.pointer(spec.value), k.integer()
    of_sources, of_rows = (k.pointer(spec.value) if has else None for has in (spec.scaled_sources, spec.scaled_rows))
    targets = k.pointer("i64") if spec.adds else None
    pieces = spec.block.pieces(spec.value)
    with operand.entries.rows() as (row, begin, end):
        if targets is not None:
            out.at(targets.load(row + TARGETS_AHEAD) * out_stride).prefetch(0, spec.block.size)
        totals = zero_variables(k, pieces, spec.value)
        with operand.entries.sums(begin, end, totals) as (entry, sums):
            operand.prefetch(entry)
            x = load_pieces(pieces, operand.row(entry))
            weights = operand.weight_row(entry) if spec.weighted else None
            factor = None if of_sources is None else of_sources.load(operand.entries.column(entry))
            for piece, total, value in zip(pieces, sums, x):
                if factor is not None:
                    total.set(value.multiply_add(factor, total.get()))
                elif weights is None:
                    total.set(total.get() + value)
                else:
                    total.set(value.multiply_add(piece.spread(weights), total.get()))
        place, values = out.at((row if targets is None else targets.load(row)) * out_stride), get_all(totals)
        if of_rows is not None:
            values = [value * of_rows.load(row) for value in values]
        if targets is not None:
            values = [before + value for before, value in zip(load_pieces(pieces, place), values)]
        store_pieces(pieces, place, values, past_cache=spec.past_cache)
    return k.finish()


def emit_select(spec: SpmmSpec) -> str:
    """The largest (least) value of each row and column, and the edge it came from.

    The first of equal values wins, and NaN wins over everything. A row without entries gets 0 and edge -1.
    """
    k = KernelBuilder()
    operand = _Operand.declare(k, spec)
    out, out_stride, arg = k.pointer(spec.value), k.integer(), k.pointer(spec.index)
    pieces = spec.block.pieces(spec.value)

    def load(entry: Value) -> list[Value]:
        x = load_pieces(pieces, operand.row(entry))
        if spec.weighted:
            weights = operand.weight_row(entry)
            x = [value * piece.spread(weights) for piece, value in zip(pieces, x)]
        return x

    def edge(entry: Value, lanes: int) -> Value:
        return operand.entries.edge(entry).convert(spec.index).shuffle([0] * lanes)

    with operand.entries.rows() as (row, begin, end):
        best = zero_variables(k, pieces, spec.value)
        chosen = [k.variable(k.constant(spec.index, -1, piece.lanes)) for piece in pieces]
        with k.when(begin.compare("slt", end)):
            for piece, value, winner, where in zip(pieces, load(begin), best, chosen):
                winner.set(value)
                where.set(edge(begin, piece.lanes))
        with k.loop(begin + 1, end) as entry:
            operand.prefetch(entry)
            for piece, value, winner, where in zip(pieces, load(entry), best, chosen):
                old = winner.get()
                beats = value.compare("ult" if spec.least else "ugt", old) & old.compare("ord", old)
                winner.set(beats.select(value, old))
                where.set(beats.select(edge(entry, piece.lanes), where.get()))
        store_pieces(pieces, out.at(row * out_stride), get_all(best))
        store_pieces(pieces, arg.at(row * out_stride), get_all(chosen))
    return k.finish()


def emit_select_backward(spec: SpmmSpec) -> str:
    """dx[u] = Σ over u's out-edges of grad (times the edge's weight) where that edge was chosen.

    Here `columns` are destinations: the rows of `grad` and `arg`, which are the operand's rows.
    """
    k = KernelBuilder()
    operand = _Operand.declare(k, spec)
    arg, out, out_stride = k.pointer(spec.index), k.pointer(spec.value), k.integer()
    pieces = spec.block.pieces(spec.value)
    with operand.entries.rows() as (row, begin, end):
        totals = zero_variables(k, pieces, spec.value)
        with operand.entries.sums(begin, end, totals) as (entry, sums):
            operand.prefetch(entry)
            edge = operand.entries.edge(entry).convert(spec.index)
            chosen = load_pieces(pieces, arg.at(operand.entries.column(entry) * operand.x_stride))
            grads = load_pieces(pieces, operand.row(entry))
            weights = operand.weight_row(entry) if spec.weighted else None
            for piece, total, grad, where in zip(pieces, sums, grads, chosen):
                if weights is not None:
                    grad = grad * piece.spread(weights)
                old = total.get()
                total.set(where.compare("eq", edge).select(old + grad, old))
        store_pieces(pieces, out.at(row * out_stride), get_all(totals))
    return k.finish()


def emit_select_backward_edges(spec: SpmmSpec, add: bool) -> str:
    """dw[e, h] = Σ over the head's columns of grad[r] (times x of the neighbour) where edge e was chosen.

    `weighted` says here that there is an x: the operand. With `add` the sums are added to what is there, for a head of
    several blocks.
    """
    k = KernelBuilder()
    operand = _Operand.declare(k, spec)
    grad, arg, row_stride, out, out_stride = (
        k.pointer(spec.value),
        k.pointer(spec.index),
        k.integer(),
        k.pointer(spec.value),
        k.integer(),
    )
    entries = operand.entries
    with entries.rows() as (row, begin, end), k.loop(begin, end) as entry:
        edge = entries.edge(entry)
        where, grads = arg.at(row * row_stride), grad.at(row * row_stride)

        def term(piece: Piece) -> Value:
            won = where.load(piece.begin, piece.lanes).compare("eq", edge.convert(spec.index))
            value = grads.load(piece.begin, piece.lanes)
            if spec.weighted:
                value = value * operand.row(entry).load(piece.begin, piece.lanes)
            # Last: a row that lost may be infinite, which is how scripts mask rows.
            return won.select(value, k.constant(spec.value, 0, piece.lanes))

        store_head_sums(k, spec.block, spec.value, term, out.at(edge * out_stride), add=add)
    return k.finish()
