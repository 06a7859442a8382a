# SPDX-License-Identifier: Apache-2.0
"""Fused gatv2: z = x_src[u] + x_dst[v] is a row, and logit = attention · leaky_relu(z). Letters: `attention_kernels`.

The weights exist in a small buffer for a chunk of a row's entries, no longer, since the rows that give them are those
that are summed. Forward, rows = destinations: chunk by chunk the logits, their maximum (the sums so far are rescaled to
it), their exp, and then out += exp * x_src[u]. Backward, rows = sources, writes d_logit per edge, from which a pass
over destinations computes dx_dst and d_attention.
"""

from __future__ import annotations

from dataclasses import dataclass

from dgl_hybrid.ops.cpu.attention_kernels import LEAST, AttentionSpec
from dgl_hybrid.ops.cpu.elementary import DropoutArguments, exp, leaky_relu, leaky_relu_slope
from dgl_hybrid.ops.cpu.entries import Entries, prefetch_distance
from dgl_hybrid.ops.cpu.ir import KernelBuilder, Pointer, Value
from dgl_hybrid.ops.cpu.lanes import (
    ELEMENT_BYTES,
    Piece,
    add_to,
    get_all,
    head_sums,
    load_pieces,
    zero_variables,
)
from dgl_hybrid.ops.cpu.logits import LogitChunk


@dataclass(frozen=True)
class _Scores:
    """The logits of a row with its neighbours: z = fixed[row] + moving[column]."""

    spec: AttentionSpec
    fixed: Pointer
    fixed_stride: Value
    moving: Pointer
    moving_stride: Value
    attention: Pointer
    slope: Value

    @classmethod
    def declare(cls, k: KernelBuilder, spec: AttentionSpec) -> _Scores:
        kind = spec.value
        fixed, fixed_stride, moving, moving_stride = k.pointer(kind), k.integer(), k.pointer(kind), k.integer()
        return cls(spec, fixed, fixed_stride, moving, moving_stride, k.pointer(kind), k.number(kind))

    def of_row(self, row: Value) -> _RowScores:
        """The scores of one row, whose own part is loaded here."""
        fixed = self.fixed.at(row * self.fixed_stride)
        pieces = [piece for head in self.spec.block.head_pieces(self.spec.value) for piece in head]
        return _RowScores(
            self,
            {piece.begin: fixed.load(piece.begin, piece.lanes) for piece in pieces},
            {piece.begin: self.attention.load(piece.begin, piece.lanes) for piece in pieces},
        )


@dataclass(frozen=True)
class _RowScores:
    scores: _Scores
    fixed: dict[int, Value]
    attention: dict[int, Value]

    def moving_row(self, column: Value) -> Pointer:
        """The neighbour's row."""
        return self.scores.moving.at(column * self.scores.moving_stride)

    def put(self, chunk: LogitChunk, j: Value, column: Value, less: Pointer | None = None) -> None:
        """Puts the logits at entry j of the chunk, less what is at `less` per head."""
        scores, moving = self.scores, self.moving_row(column)

        def term(piece: Piece) -> Value:
            z = self.fixed[piece.begin] + moving.load(piece.begin, piece.lanes)
            return leaky_relu(z, scores.slope) * self.attention[piece.begin]

        sums = head_sums(column.builder, scores.spec.block, scores.spec.value, term)
        chunk.put_heads(j, sums if less is None else [value - less.load(head) for head, value in enumerate(sums)])


def emit_forward(spec: AttentionSpec) -> str:
    """out[v] = Σ w x_src[u]; with each row's largest logit m and the sum l of exp(logit - m), so that lse = m + log l.

    A row without entries gets 0, and m = 0, l = 1. If all logits are -inf, m is -inf and l is `total_of_none`.
    """
    k = KernelBuilder()
    kind, block = spec.value, spec.block
    entries = Entries.declare(k, spec.index, spec.edge_ids)
    scores = _Scores.declare(k, spec)
    x, stride, head_stride = k.pointer(kind), k.integer(), k.integer()
    out, out_maximum, out_total = k.pointer(kind), k.pointer(kind), k.pointer(kind)
    total_of_none = k.number(kind)
    dropout = DropoutArguments.declare(k, kind, spec.edge_keys) if spec.dropout else None
    chunk = LogitChunk(k, kind, block.heads)
    factors = k.scratch(kind, chunk.padded)
    pieces = block.pieces(kind)
    distance = prefetch_distance(block.size * ELEMENT_BYTES[kind])

    with entries.rows() as (row, begin, end):
        largest = k.variable(chunk.constant(LEAST[kind]))
        total = k.variable(chunk.constant(0.0))
        totals = zero_variables(k, pieces, kind)
        row_scores = scores.of_row(row)
        with chunk.chunks(begin, end) as (first, count):
            chunk.clear_last(count)
            with k.loop(0, count) as j:
                ahead = entries.column(entries.ahead(first + j, distance))
                row_scores.moving_row(ahead).prefetch(0, block.size)
                row_scores.put(chunk, j, entries.column(first + j))
            old = largest.get()
            new = old.maximum(chunk.maximum(count))
            largest.set(new)
            rescale = exp(old - new)
            factors.store(0, rescale)
            total.set(total.get().multiply_add(rescale, chunk.exponentiate(count, new)))
            if dropout is not None:
                with k.loop(0, count) as j:
                    chunk.put(j, chunk.get(j) * dropout.factors(entries.edge(first + j), block.heads))
            sums = zero_variables(k, pieces, kind)
            with k.loop(0, count) as j:
                values = load_pieces(pieces, x.at(entries.column(first + j) * stride))
                for piece, so_far, value in zip(pieces, sums, values):
                    so_far.set(value.multiply_add(piece.spread(chunk.row(j)), so_far.get()))
            for piece, so_far, term in zip(pieces, totals, sums):
                so_far.set(so_far.get().multiply_add(piece.spread(factors), term.get()))
        is_empty = begin.compare("eq", end)
        # The largest finite logit adds 1, so the sum is 0 only where there is none.
        is_none = total.get().compare("oeq", 0.0)
        sum_of_exp = is_none.select(is_empty.select(1.0, total_of_none), total.get())
        maximum = is_none.select(is_empty.select(0.0, k.constant(kind, float("-inf"))), largest.get())
        factors.store(0, chunk.constant(1.0) / sum_of_exp)
        for piece, value in zip(pieces, get_all(totals)):
            out.at(row * stride).store(piece.begin, value * piece.spread(factors))
        out_total.store(row * head_stride, chunk.heads_of(sum_of_exp))
        out_maximum.store(row * head_stride, chunk.heads_of(maximum))
    return k.finish()


def emit_backward_by_source(spec: AttentionSpec) -> str:
    """dx_src[u], and per edge d_logit; rows are sources."""
    k = KernelBuilder()
    kind, block = spec.value, spec.block
    entries = Entries.declare(k, spec.index, spec.edge_ids)
    scores = _Scores.declare(k, spec)
    x, grad, stride, head_stride = k.pointer(kind), k.pointer(kind), k.integer(), k.integer()
    lse, delta, statistics_stride = k.pointer(kind), k.pointer(kind), k.integer()
    dx, d_edges = k.pointer(kind), k.pointer(kind)
    dropout = DropoutArguments.declare(k, kind, spec.edge_keys) if spec.dropout else None
    alphas = LogitChunk(k, kind, block.heads)
    weights = LogitChunk(k, kind, block.heads) if dropout is not None else alphas
    dots = LogitChunk(k, kind, block.heads)
    pieces, head_pieces = block.pieces(kind), block.head_pieces(kind)
    distance = prefetch_distance(block.size * ELEMENT_BYTES[kind])

    with entries.rows() as (row, begin, end):
        row_scores = scores.of_row(row)
        own = {piece.begin: x.at(row * stride).load(piece.begin, piece.lanes) for h in head_pieces for piece in h}
        totals, slope_totals = zero_variables(k, pieces, kind), zero_variables(k, pieces, kind)
        with alphas.chunks(begin, end) as (first, count):
            sums, slope_sums = zero_variables(k, pieces, kind), zero_variables(k, pieces, kind)
            alphas.clear_last(count)
            with k.loop(0, count) as j:
                ahead = entries.column(entries.ahead(first + j, distance))
                row_scores.moving_row(ahead).prefetch(0, block.size)
                column = entries.column(first + j)
                row_scores.put(alphas, j, column, less=lse.at(column * statistics_stride))
            alphas.exponentiate(count)
            if dropout is not None:
                with k.loop(0, count) as j:
                    weights.put(j, alphas.get(j) * dropout.factors(entries.edge(first + j), block.heads))
            with k.loop(0, count) as j:
                ahead = entries.column(entries.ahead(first + j, distance))
                grad.at(ahead * stride).prefetch(0, block.size)
                lse.at(ahead * statistics_stride).prefetch(0, block.heads)
                grad_row = grad.at(entries.column(first + j) * stride)

                def product(piece: Piece, grad_row: Pointer = grad_row) -> Value:
                    return grad_row.load(piece.begin, piece.lanes) * own[piece.begin]

                dots.put_heads(j, head_sums(k, block, kind, product))
                for piece, total in zip(pieces, sums):
                    value = grad_row.load(piece.begin, piece.lanes)
                    total.set(value.multiply_add(piece.spread(weights.row(j)), total.get()))
            with k.loop(0, count) as j:
                less = alphas.get(j) * delta.load(entries.column(first + j) * statistics_stride, block.heads)
                d_logit = weights.get(j) * dots.get(j) - less
                dots.put(j, d_logit)
                d_edges.store(entries.edge(first + j) * head_stride, d_logit)
            with k.loop(0, count) as j:
                column = entries.column(first + j)
                for piece, slope_sum in zip(pieces, slope_sums):
                    slopes = leaky_relu_slope(_load_z(scores, row, column, piece), scores.slope)
                    slope_sum.set(slopes.multiply_add(piece.spread(dots.row(j)), slope_sum.get()))
            add_to([*totals, *slope_totals], [*sums, *slope_sums])
        for piece, total, slope_total in zip(pieces, totals, slope_totals):
            attention = scores.attention.load(piece.begin, piece.lanes)
            dx.at(row * stride).store(piece.begin, slope_total.get().multiply_add(attention, total.get()))
    return k.finish()


def emit_backward_by_destination(spec: AttentionSpec) -> str:
    """dx_dst[v] = attention * Σ d_logit leaky_relu'(z) and d_attention = Σ d_logit leaky_relu(z), from d_logit.

    Rows are destinations. Each task adds its part of d_attention, in float64, to a row of `partial`.
    """
    k = KernelBuilder()
    kind, block = spec.value, spec.block
    entries = Entries.declare(k, spec.index, spec.edge_ids)
    scores = _Scores.declare(k, spec)
    d_edges, head_stride = k.pointer(kind), k.integer()
    dx, stride, partial = k.pointer(kind), k.integer(), k.pointer("f64")
    pieces = block.pieces(kind)
    distance = prefetch_distance(block.size * ELEMENT_BYTES[kind])

    with entries.task_rows() as (task, row, begin, end):
        totals = zero_variables(k, [*pieces, *pieces], kind)
        with entries.sums(begin, end, totals) as (entry, sums):
            ahead = entries.ahead(entry, distance)
            scores.moving.at(entries.column(ahead) * scores.moving_stride).prefetch(0, block.size)
            if spec.edge_ids:
                d_edges.at(entries.edge(ahead) * head_stride).prefetch(0, block.heads)
            d_logits = d_edges.at(entries.edge(entry) * head_stride)
            column = entries.column(entry)
            for piece, total, attention_total in zip(pieces, sums, sums[len(pieces) :]):
                z = _load_z(scores, row, column, piece)
                d_z = leaky_relu_slope(z, scores.slope) * piece.spread(d_logits)
                total.set(total.get() + d_z)
                attention_total.set(d_z.multiply_add(z, attention_total.get()))
        for piece, total, attention_total in zip(pieces, totals, totals[len(pieces) :]):
            attention = scores.attention.load(piece.begin, piece.lanes)
            dx.at(row * stride).store(piece.begin, total.get() * attention)
            at = partial.at(task * stride)
            at.store(piece.begin, at.load(piece.begin, piece.lanes) + attention_total.get().convert("f64"))
    return k.finish()


def _load_z(scores: _Scores, row: Value, column: Value, piece: Piece) -> Value:
    fixed = scores.fixed.at(row * scores.fixed_stride).load(piece.begin, piece.lanes)
    return fixed + scores.moving.at(column * scores.moving_stride).load(piece.begin, piece.lanes)
