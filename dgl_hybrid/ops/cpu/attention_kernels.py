# SPDX-License-Identifier: Apache-2.0
"""Fused graph attention: the attention weights exist in a small buffer for a chunk of a row's entries, no longer.

Letters: u a source, v a destination, e an edge; per head z = el[u] + er[v] (gat) or the row z = x_src[u] + x_dst[v]
(gatv2), logit = leaky_relu(z) or attention · leaky_relu(z), alpha = exp(logit - lse[v]), w = drop(alpha).

Forward, rows = destinations: chunk by chunk the logits, their maximum (the sums so far are rescaled to it), their exp,
and then out += exp * x[u]. Backward, rows = sources: alpha again from lse, dot = grad[v] · x[u], dx[u] += w grad[v] and

    d_logit = w * dot - alpha * delta[v]     with delta[v] = grad[v] · out[v] = Σ over the row of w * dot

gat needs d_logit * leaky_relu' summed by source (here) and by destination: see `backend.PositiveSums`, which its
forward makes on the way. gatv2 writes d_logit per edge, from which a pass over destinations computes dx_dst and
d_attention.

All kernels handle some whole heads; pointers to (rows, H) and (rows, H, D) arrays begin at the first of them.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from dgl_hybrid.ops.cpu.elementary import DropoutArguments, exp, leaky_relu, leaky_relu_slope
from dgl_hybrid.ops.cpu.entries import Entries, prefetch_distance
from dgl_hybrid.ops.cpu.ir import KernelBuilder, Kind, Pointer, Value
from dgl_hybrid.ops.cpu.lanes import (
    ELEMENT_BYTES,
    Block,
    Piece,
    add_to,
    get_all,
    head_sums,
    load_pieces,
    store_head_sums,
    store_pieces,
    zero_variables,
)
from dgl_hybrid.ops.cpu.logits import LogitChunk

_LEAST: dict[Kind, float] = {"f32": (2.0**-23 - 2.0) * 2.0**127, "f64": -sys.float_info.max}
"""The least finite numbers."""


@dataclass(frozen=True)
class AttentionSpec:
    """What a kernel is compiled for.

    `block` are its heads; `v2`: logits from a row, not from two numbers; `positive`: gat, with `backend.PositiveSums`.
    """

    value: Kind
    index: Kind
    block: Block
    v2: bool
    edge_ids: bool
    dropout: bool = False
    edge_keys: bool = False
    positive: bool = False


@dataclass(frozen=True)
class _Scores:
    """The logits of a row with its neighbours: z = fixed[row] + moving[column], of numbers (gat) or rows (gatv2)."""

    spec: AttentionSpec
    fixed: Pointer
    fixed_stride: Value
    moving: Pointer
    moving_stride: Value
    slope: Value
    attention: Pointer | None

    @classmethod
    def declare(cls, k: KernelBuilder, spec: AttentionSpec) -> _Scores:
        kind = spec.value
        fixed, fixed_stride, moving, moving_stride = k.pointer(kind), k.integer(), k.pointer(kind), k.integer()
        attention = k.pointer(kind)
        return cls(spec, fixed, fixed_stride, moving, moving_stride, k.number(kind), attention if spec.v2 else None)

    def of_row(self, row: Value) -> _RowScores:
        """The scores of one row, whose own part is loaded here."""
        fixed = self.fixed.at(row * self.fixed_stride)
        if self.attention is None:
            return _RowScores(self, {0: fixed.load(0, self.spec.block.heads)}, {})
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
        """The neighbour's part."""
        return self.scores.moving.at(column * self.scores.moving_stride)

    def z(self, column: Value) -> Value:
        """gat: one number per head."""
        return self.fixed[0] + self.moving_row(column).load(0, self.scores.spec.block.heads)

    def z_piece(self, column: Value, piece: Piece) -> Value:
        """gatv2: part of the row."""
        return self.fixed[piece.begin] + self.moving_row(column).load(piece.begin, piece.lanes)

    def put(self, chunk: LogitChunk, j: Value, column: Value, less: Pointer | None = None) -> None:
        """Puts the logits at entry j of the chunk, less what is at `less` per head."""
        scores, block = self.scores, self.scores.spec.block
        if scores.attention is None:
            logits = leaky_relu(self.z(column), scores.slope)
            chunk.put(j, logits if less is None else logits - less.load(0, block.heads))
            return

        def term(piece: Piece) -> Value:
            return leaky_relu(self.z_piece(column, piece), scores.slope) * self.attention[piece.begin]

        sums = head_sums(column.builder, block, scores.spec.value, term)
        chunk.put_heads(j, sums if less is None else [value - less.load(head) for head, value in enumerate(sums)])


def emit_forward(spec: AttentionSpec) -> str:
    """out[v] = Σ w x[u]; with each row's largest logit m and the sum l of exp(logit - m), so that lse = m + log l.

    A row without entries gets 0, and m = 0, l = 1. If all logits are -inf, m is -inf and l is `total_of_none`.
    """
    k = KernelBuilder()
    kind, block = spec.value, spec.block
    entries = Entries.declare(k, spec.index, spec.edge_ids)
    scores = _Scores.declare(k, spec)
    x, stride, head_stride = k.pointer(kind), k.integer(), k.integer()
    out, out_maximum, out_total = k.pointer(kind), k.pointer(kind), k.pointer(kind)
    total_of_none = k.number(kind)
    positive_rows, positive_weights = k.pointer(kind), k.pointer(kind)
    dropout = DropoutArguments.declare(k, kind, spec.edge_keys) if spec.dropout else None
    chunk = LogitChunk(k, kind, block.heads)
    chosen = LogitChunk(k, kind, block.heads) if spec.positive else None
    factors = k.scratch(kind, chunk.padded)
    pieces = block.pieces(kind)
    distance = prefetch_distance(block.size * ELEMENT_BYTES[kind])

    with entries.rows() as (row, begin, end):
        # Not -inf: logits of -inf before the first finite one weigh 0, but less a maximum of -inf they would be NaN.
        largest = k.variable(chunk.constant(_LEAST[kind]))
        total = k.variable(chunk.constant(0.0))
        totals = zero_variables(k, pieces, kind)
        chosen_pieces = [] if chosen is None else pieces
        chosen_total, chosen_totals = k.variable(chunk.constant(0.0)), zero_variables(k, chosen_pieces, kind)
        row_scores = scores.of_row(row)
        with chunk.chunks(begin, end) as (first, count):
            chunk.clear_last(count)
            if chosen is not None:
                chosen.clear_last(count)
            with k.loop(0, count) as j:
                if spec.v2:
                    ahead = entries.column(entries.ahead(first + j, distance))
                    row_scores.moving_row(ahead).prefetch(0, block.size)
                row_scores.put(chunk, j, entries.column(first + j))
                if chosen is not None:
                    chosen.put(j, row_scores.z(entries.column(first + j)))
            old = largest.get()
            new = old.maximum(chunk.maximum(count))
            largest.set(new)
            rescale = exp(old - new)
            factors.store(0, rescale)
            total.set(total.get().multiply_add(rescale, chunk.exponentiate(count, new)))
            if chosen is not None:
                share = chosen.select_where_positive(count, chunk)
                chosen_total.set(chosen_total.get().multiply_add(rescale, share))
            if dropout is not None:
                with k.loop(0, count) as j:
                    kept = dropout.factors(entries.edge(first + j), block.heads)
                    for weights in (chunk, chosen):
                        if weights is not None:
                            weights.put(j, weights.get(j) * kept)
            sums, chosen_sums = zero_variables(k, pieces, kind), zero_variables(k, chosen_pieces, kind)
            with k.loop(0, count) as j:
                entry = first + j
                if not spec.v2:
                    ahead = entries.column(entries.ahead(entry, distance))
                    x.at(ahead * stride).prefetch(0, block.size)
                    row_scores.moving_row(ahead).prefetch(0, block.heads)
                values = load_pieces(pieces, x.at(entries.column(entry) * stride))
                for weights, terms in ((chunk, sums), (chosen, chosen_sums)):
                    for piece, so_far, value in zip(pieces, terms, values):
                        assert weights is not None
                        so_far.set(value.multiply_add(piece.spread(weights.row(j)), so_far.get()))
            for piece, so_far, term in zip([*pieces, *chosen_pieces], totals + chosen_totals, sums + chosen_sums):
                so_far.set(so_far.get().multiply_add(piece.spread(factors), term.get()))
        is_empty = begin.compare("eq", end)
        # The largest finite logit adds 1, so the sum is 0 only where there is none.
        is_none = total.get().compare("oeq", 0.0)
        sum_of_exp = is_none.select(is_empty.select(1.0, total_of_none), total.get())
        maximum = is_none.select(is_empty.select(0.0, k.constant(kind, float("-inf"))), largest.get())
        factors.store(0, chunk.constant(1.0) / sum_of_exp)
        for target, sums in ((out, totals), (positive_rows, chosen_totals)):
            for piece, sum_ in zip(pieces, sums):
                target.at(row * stride).store(piece.begin, sum_.get() * piece.spread(factors))
        if chosen is not None:
            share = chosen_total.get() / sum_of_exp
            positive_weights.store(row * head_stride, chunk.heads_of(share))
        out_total.store(row * head_stride, chunk.heads_of(sum_of_exp))
        out_maximum.store(row * head_stride, chunk.heads_of(maximum))
    return k.finish()


def emit_statistics(kind: Kind, block: Block, with_er: bool, with_d_er: bool) -> str:
    """What the backward reads per destination, side by side: (er,) lse, delta, each per head; and d_er if asked for.

    One cache line per entry of the backward instead of three. d_er as `backend.PositiveSums` has it.
    """
    k = KernelBuilder()
    er, lse, grad, out, statistics = (k.pointer(kind) for _ in range(5))
    stride, head_stride = k.integer(), k.integer()
    positive_rows, positive_weights, d_er, slope = k.pointer(kind), k.pointer(kind), k.pointer(kind), k.number(kind)
    pieces = Block(block.heads, 1).pieces(kind)
    with k.rows() as row:
        copied = [er, lse] if with_er else [lse]
        target = statistics.at(row * head_stride * (len(copied) + 1))
        for place, source in enumerate(copied):
            values = load_pieces(pieces, source.at(row * head_stride))
            store_pieces(pieces, target.at(head_stride * place), values)

        def store_dots(right: Pointer, target: Pointer, row: Value = row) -> None:
            left, right = grad.at(row * stride), right.at(row * stride)

            def term(piece: Piece) -> Value:
                return left.load(piece.begin, piece.lanes) * right.load(piece.begin, piece.lanes)

            store_head_sums(k, block, kind, term, target)

        delta = target.at(head_stride * len(copied))
        store_dots(out, delta)
        if with_d_er:
            own = d_er.at(row * head_stride)
            store_dots(positive_rows, own)
            for piece in pieces:
                deltas, dots = delta.load(piece.begin, piece.lanes), own.load(piece.begin, piece.lanes)
                weights = positive_weights.at(row * head_stride).load(piece.begin, piece.lanes)
                rest = k.constant(kind, 1.0, piece.lanes) - slope.shuffle([0] * piece.lanes)
                own.store(piece.begin, (dots - deltas * weights) * rest)
    return k.finish()


def emit_backward_by_source(spec: AttentionSpec) -> str:
    """dx[u], and d_el[u] (gat) or per edge d_logit (gatv2); rows are sources."""
    k = KernelBuilder()
    kind, block = spec.value, spec.block
    entries = Entries.declare(k, spec.index, spec.edge_ids)
    scores = _Scores.declare(k, spec)
    x, grad, stride, head_stride = k.pointer(kind), k.pointer(kind), k.integer(), k.integer()
    lse, delta, statistics_stride = k.pointer(kind), k.pointer(kind), k.integer()
    dx, d_el, d_edges = k.pointer(kind), k.pointer(kind), k.pointer(kind)
    dropout = DropoutArguments.declare(k, kind, spec.edge_keys) if spec.dropout else None
    alphas = LogitChunk(k, kind, block.heads)
    weights = LogitChunk(k, kind, block.heads) if dropout is not None else alphas
    dots = LogitChunk(k, kind, block.heads)
    pieces, head_pieces = block.pieces(kind), block.head_pieces(kind)
    slope_pieces = pieces if spec.v2 else []
    distance = prefetch_distance(block.size * ELEMENT_BYTES[kind])

    with entries.rows() as (row, begin, end):
        row_scores = scores.of_row(row)
        own = {piece.begin: x.at(row * stride).load(piece.begin, piece.lanes) for h in head_pieces for piece in h}
        totals, slope_totals = zero_variables(k, pieces, kind), zero_variables(k, slope_pieces, kind)
        d_el_total = k.variable(k.constant(kind, 0.0, block.heads))
        with alphas.chunks(begin, end) as (first, count):
            sums, slope_sums = zero_variables(k, pieces, kind), zero_variables(k, slope_pieces, kind)
            d_el_sum = k.variable(k.constant(kind, 0.0, block.heads))
            alphas.clear_last(count)
            with k.loop(0, count) as j:
                ahead = entries.column(entries.ahead(first + j, distance))
                if spec.v2:
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
                column = entries.column(first + j)
                less = alphas.get(j) * delta.load(column * statistics_stride, block.heads)
                d_edge = weights.get(j) * dots.get(j) - less
                if spec.v2:
                    dots.put(j, d_edge)
                    d_edges.store(entries.edge(first + j) * head_stride, d_edge)
                else:
                    slopes = leaky_relu_slope(row_scores.z(column), scores.slope)
                    d_el_sum.set(d_edge.multiply_add(slopes, d_el_sum.get()))
            if spec.v2:
                with k.loop(0, count) as j:
                    column = entries.column(first + j)
                    for piece, slope_sum in zip(pieces, slope_sums):
                        slopes = leaky_relu_slope(_load_z(scores, row, column, piece), scores.slope)
                        slope_sum.set(slopes.multiply_add(piece.spread(dots.row(j)), slope_sum.get()))
            add_to([*totals, *slope_totals, d_el_total], [*sums, *slope_sums, d_el_sum])
        out = dx.at(row * stride)
        if scores.attention is None:
            store_pieces(pieces, out, get_all(totals))
            d_el.store(row * head_stride, d_el_total.get())
        else:
            for piece, total, slope_total in zip(pieces, totals, slope_totals):
                attention = scores.attention.load(piece.begin, piece.lanes)
                out.store(piece.begin, slope_total.get().multiply_add(attention, total.get()))
    return k.finish()


def emit_backward_by_destination(spec: AttentionSpec) -> str:
    """gatv2: dx_dst[v] = attention * Σ d_logit leaky_relu'(z) and d_attention = Σ d_logit leaky_relu(z), from d_logit.

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
    assert scores.attention is not None

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
