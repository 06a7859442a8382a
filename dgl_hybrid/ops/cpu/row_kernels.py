# SPDX-License-Identifier: Apache-2.0
"""Kernels that work on rows one by one, without a graph."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from dgl_hybrid.ops.cpu.elementary import DropoutArguments, exp_less_1
from dgl_hybrid.ops.cpu.entries import SUM_ENTRIES
from dgl_hybrid.ops.cpu.ir import KernelBuilder, Kind, Pointer, Value, Variable
from dgl_hybrid.ops.cpu.lanes import Block, Piece, get_all, grouped_head_sums, load_pieces, store_pieces, zero_variables


@dataclass(frozen=True)
class RowDropoutSpec:
    """What a dropout of rows is compiled for; `past_cache`: its result goes straight to memory."""

    value: Kind
    block: Block
    past_cache: bool


def emit_row_dropout(spec: RowDropoutSpec) -> str:
    """out[n] = x[n] times the factors that the key of row n gives its columns."""
    k = KernelBuilder()
    x, out, stride = k.pointer(spec.value), k.pointer(spec.value), k.integer()
    dropout = DropoutArguments.declare(k, spec.value, has_edge_keys=True)
    pieces = spec.block.pieces(spec.value)
    with k.rows() as row:
        source, target = x.at(row * stride), out.at(row * stride)
        words = dropout.words_of(row)
        for piece in pieces:
            factors = dropout.factors_of(words, piece.begin, piece.lanes)
            value = source.load(piece.begin, piece.lanes) * factors
            target.store(piece.begin, value, past_cache=spec.past_cache)
    return k.finish()


_TARGETS_AHEAD = 8
"""Rows further on, to whose place the processor is pointed."""


def emit_add_rows(kind: Kind, index: Kind, block: Block, has_factors: bool) -> str:
    """out[targets[n]] += rows[n], times factors[targets[n]], in the order of the rows."""
    k = KernelBuilder()
    rows, targets, factors, out = k.pointer(kind), k.pointer(index), k.pointer(kind), k.pointer(kind)
    row_stride, out_stride, last = k.integer(), k.integer(), k.integer()
    pieces = block.pieces(kind)
    with k.rows() as row:
        ahead = k.intrinsic("smin", row.type, row + _TARGETS_AHEAD, last)
        out.at(targets.load(ahead).convert("i64") * out_stride).prefetch(0, block.size)
        target = targets.load(row).convert("i64")
        place, values = out.at(target * out_stride), load_pieces(pieces, rows.at(row * row_stride))
        if has_factors:
            values = [value * factors.load(target) for value in values]
        store_pieces(pieces, place, [there + value for there, value in zip(load_pieces(pieces, place), values)])
    return k.finish()


def emit_merge_rows(kind: Kind, index: Kind, block: Block) -> str:
    """out[targets[n], h] = out[targets[n], h] * keeps[n, h] + rows[n, h] * adds[n, h]; for some whole heads."""
    k = KernelBuilder()
    rows, targets, out, keeps, adds = k.pointer(kind), k.pointer(index), *(k.pointer(kind) for _ in range(3))
    stride, head_stride, last = k.integer(), k.integer(), k.integer()
    with k.rows() as row:
        ahead = k.intrinsic("smin", row.type, row + _TARGETS_AHEAD, last)
        out.at(targets.load(ahead).convert("i64") * stride).prefetch(0, block.size)
        target, given = out.at(targets.load(row).convert("i64") * stride), rows.at(row * stride)
        kept, added = keeps.at(row * head_stride), adds.at(row * head_stride)
        for piece in block.pieces(kind):
            value = target.load(piece.begin, piece.lanes) * piece.spread(kept)
            value = given.load(piece.begin, piece.lanes).multiply_add(piece.spread(added), value)
            target.store(piece.begin, value)
    return k.finish()


@dataclass(frozen=True)
class EluSpec:
    """What an ELU of some columns, or its gradient, is compiled for.

    `past_cache`: its result goes straight to memory. `has_bias`: of the ELU, whether something is added before.
    """

    value: Kind
    block: Block
    past_cache: bool
    has_bias: bool = False


def emit_biased_elu(spec: EluSpec) -> str:
    """out[n] = x[n] + bias where that is positive, exp of it less 1 elsewhere."""
    k = KernelBuilder()
    x, bias, out, stride = k.pointer(spec.value), k.pointer(spec.value), k.pointer(spec.value), k.integer()
    pieces = spec.block.pieces(spec.value)
    with k.rows() as row:
        values = load_pieces(pieces, x.at(row * stride))
        if spec.has_bias:
            values = [value + bias.load(piece.begin, piece.lanes) for piece, value in zip(pieces, values)]
        values = [value.compare("ogt", 0.0).select(value, exp_less_1(value)) for value in values]
        store_pieces(pieces, out.at(row * stride), values, past_cache=spec.past_cache)
    return k.finish()


def emit_biased_elu_backward(spec: EluSpec) -> str:
    """dx[n] = grad[n], times out[n] + 1 where out[n] is at most 0; adds each task's sums of its rows to its own.

    NaN passes the gradient; in PyTorch it depends on the place of the element whether it does or makes it NaN.
    """
    k = KernelBuilder()
    grad, out, dx, sums = (k.pointer(spec.value) for _ in range(4))
    stride = k.integer()
    pieces = spec.block.pieces(spec.value)
    with k.tasks() as (task, first, end):
        own = sums.at(task * stride)
        with _added_by_blocks(k, first, end, pieces, [own]) as (row, (terms,)):
            found = []
            for piece, term in zip(pieces, terms):
                value, passed = (rows.at(row * stride).load(piece.begin, piece.lanes) for rows in (grad, out))
                value = passed.compare("ole", 0.0).select(value * (passed + 1.0), value)
                term.set(term.get() + value)
                found.append(value)
            store_pieces(pieces, dx.at(row * stride), found, past_cache=spec.past_cache)
    return k.finish()


def emit_head_terms(kind: Kind, block: Block) -> str:
    """el[u, h] = attn_l[h] · x[u, h], and er[v, h] = attn_r[h] · x[v, h] of the first rows; for some whole heads."""
    k = KernelBuilder()
    x, attn_l, attn_r, el, er = (k.pointer(kind) for _ in range(5))
    stride, head_stride, num_dst = k.integer(), k.integer(), k.integer()

    def dots(own: Pointer, attention: Pointer) -> list[tuple[range, Value]]:
        def term(piece: Piece) -> Value:
            return own.load(piece.begin, piece.lanes) * attention.load(piece.begin, piece.lanes)

        return list(grouped_head_sums(k, block, kind, term))

    with k.tasks() as (_, first, end):
        for begin, stop, is_dst in _cut_behind(k, first, end, num_dst):
            with k.loop(begin, stop) as row:
                own = x.at(row * stride)
                # Both before either is written: the compiler does not know that this leaves x as it is.
                found = [(el, dots(own, attn_l)), *([(er, dots(own, attn_r))] if is_dst else [])]
                for target, sums in found:
                    for heads, value in sums:
                        target.at(row * head_stride).store(heads[0], value)
    return k.finish()


def emit_head_terms_backward(kind: Kind, block: Block, has_dx: bool) -> str:
    """dx[u] += d_el[u] * attn_l + d_er[u] * attn_r; adds each task's sums of d_el[u] * x[u] and d_er[u] * x[u]."""
    k = KernelBuilder()
    x, attn_l, attn_r, d_el, d_er, dx, sums_l, sums_r = (k.pointer(kind) for _ in range(8))
    stride, head_stride, num_dst = k.integer(), k.integer(), k.integer()
    pieces = block.pieces(kind)
    with k.tasks() as (task, first, end):
        own_l, own_r = sums_l.at(task * stride), sums_r.at(task * stride)
        for begin, stop, is_dst in _cut_behind(k, first, end, num_dst):
            given = [(d_el, attn_l), *([(d_er, attn_r)] if is_dst else [])]
            with _added_by_blocks(k, begin, stop, pieces, [own_l, own_r][: len(given)]) as (row, sums):
                target = dx.at(row * stride)
                for number, piece in enumerate(pieces):
                    own = x.at(row * stride).load(piece.begin, piece.lanes)
                    value = target.load(piece.begin, piece.lanes) if has_dx else None
                    for (d_term, attention), terms in zip(given, sums, strict=True):
                        d = piece.spread(d_term.at(row * head_stride))
                        terms[number].set(own.multiply_add(d, terms[number].get()))
                        if value is not None:
                            value = attention.load(piece.begin, piece.lanes).multiply_add(d, value)
                    if value is not None:
                        target.store(piece.begin, value)
    return k.finish()


@contextmanager
def _added_by_blocks(
    k: KernelBuilder, begin: Value, end: Value, pieces: list[Piece], targets: list[Pointer]
) -> Iterator[tuple[Value, list[list[Variable]]]]:
    """Runs the body for each row: (row, variables to add to, for each target). Sums of blocks are added to the targets.

    Why of blocks: see `entries.SUM_ENTRIES`. In memory, where registers are needed for the terms.
    """
    with k.loop(begin, end, SUM_ENTRIES) as first:
        stop = k.intrinsic("smin", end.type, first + SUM_ENTRIES, end)
        terms = [zero_variables(k, pieces, target.kind) for target in targets]
        with k.loop(first, stop) as row:
            yield row, terms
        for target, sums in zip(targets, terms, strict=True):
            before = load_pieces(pieces, target)
            store_pieces(pieces, target, [there + term for there, term in zip(before, get_all(sums))])


def _cut_behind(k: KernelBuilder, first: Value, end: Value, count: Value) -> list[tuple[Value, Value, bool]]:
    """(first, end) of a task's rows among the first `count` of all, and of the others; which they are."""
    among = k.intrinsic("smin", end.type, end, count)
    return [(first, among, True), (k.intrinsic("smax", end.type, first, count), end, False)]
