# SPDX-License-Identifier: Apache-2.0
"""Fused gat: z = el[u] + er[v] and logit = leaky_relu(z) are numbers per edge and head. Letters: `attention_kernels`.

A task's rows are run over twice, first for the weights of all their entries, then for the sums, with the weights in
between in a buffer that stays in cache: taking turns row by row, rows that the sums read are asked for too late. The
first pass asks for the rows of the second, which memory would else wait for (`AttentionSpec.asks_early`): forward 1.13
to 1.2 times as fast, backward 1.02 to 1.1 (1.5 and 4.9 M edges, rows of 36 and 72 MB, two processes).

d_logit * leaky_relu' is summed by source here; by destination it is made from `backend.PositiveSums`, which the forward
makes on the way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dgl_hybrid.ops.cpu.attention_kernels import LEAST, AttentionSpec
from dgl_hybrid.ops.cpu.elementary import DropoutArguments, leaky_relu, leaky_relu_slope
from dgl_hybrid.ops.cpu.entries import Entries, prefetch_distance
from dgl_hybrid.ops.cpu.ir import KernelBuilder, Pointer, Value, Variable
from dgl_hybrid.ops.cpu.lanes import (
    ELEMENT_BYTES,
    Piece,
    get_all,
    grouped_head_sums,
    head_groups,
    load_pieces,
    store_pieces,
    zero_variables,
)
from dgl_hybrid.ops.cpu.logits import CHUNK_ENTRIES, LogitChunk
from dgl_hybrid.ops.cpu.tasks import MAX_KEPT_ENTRIES

_TERMS_AHEAD = 16
"""How many entries ahead the neighbours' terms of the logits are asked for: a cache line each."""


@dataclass(frozen=True)
class _Logits:
    """z = fixed[row] + moving[column], of numbers per head."""

    spec: AttentionSpec
    entries: Entries
    fixed: Pointer
    fixed_stride: Value
    moving: Pointer
    moving_stride: Value
    slope: Value

    @classmethod
    def declare(cls, k: KernelBuilder, spec: AttentionSpec, entries: Entries) -> _Logits:
        kind = spec.value
        arguments = k.pointer(kind), k.integer(), k.pointer(kind), k.integer(), k.number(kind)
        return cls(spec, entries, *arguments)

    def own(self, row: Value) -> Value:
        """The part of the row."""
        return self.fixed.at(row * self.fixed_stride).load(0, self.spec.block.heads)

    def z(self, own: Value, entry: Value) -> Value:
        """The sums of that entry; asks for those further on."""
        ahead = self.entries.column(self.entries.ahead(entry, _TERMS_AHEAD))
        self.moving.at(ahead * self.moving_stride).prefetch(0, self.spec.block.heads)
        return own + self.moving.at(self.entries.column(entry) * self.moving_stride).load(0, self.spec.block.heads)


_Body = Callable[[Value, Value, Value], None]
"""Given a row, its first entry and the one behind its last."""


def _run_twice(k: KernelBuilder, entries: Entries, filled: Variable, weigh: _Body, add_up: _Body) -> None:
    """Runs both over each task's rows, one after the other; `filled` is how many entries the rows before have."""
    with k.tasks() as (_, first, stop):
        for body in (weigh, add_up):
            filled.set(0)
            with entries.rows_between(first, stop) as (row, begin, end):
                body(row, begin, end)
                filled.set(filled.get() + (end - begin))


def emit_forward(spec: AttentionSpec) -> str:
    """out[v] = Σ w x[u]; with each row's largest logit m and the sum l of exp(logit - m), so that lse = m + log l.

    A row without entries gets 0, and m = 0, l = 1. If all logits are -inf, m is -inf and l is `total_of_none`.
    Rows are destinations.
    """
    k = KernelBuilder()
    kind, block = spec.value, spec.block
    entries = Entries.declare(k, spec.index, spec.edge_ids)
    logits = _Logits.declare(k, spec, entries)
    x, x_stride, stride, head_stride = k.pointer(kind), k.integer(), k.integer(), k.integer()
    out, out_maximum, out_total = k.pointer(kind), k.pointer(kind), k.pointer(kind)
    total_of_none = k.number(kind)
    positive_rows, positive_weights = k.pointer(kind), k.pointer(kind)
    dropout = DropoutArguments.declare(k, kind, spec.edge_keys) if spec.dropout else None
    weights = LogitChunk(k, kind, block.heads, MAX_KEPT_ENTRIES)
    chosen = LogitChunk(k, kind, block.heads, MAX_KEPT_ENTRIES) if spec.positive else None
    factors = k.scratch(kind, weights.padded)
    filled = k.variable(k.constant("i64", 0))

    def weigh(row: Value, begin: Value, end: Value) -> None:
        """Puts the weights of a row, not divided by their sum, into the buffers behind those of the rows before."""
        count = end - begin
        largest, total = k.variable(weights.constant(LEAST[kind])), k.variable(weights.constant(0.0))
        chosen_total = k.variable(weights.constant(0.0))
        here = weights.at(filled.get())
        chosen_here = None if chosen is None else chosen.at(filled.get())
        with k.when(count.compare("sgt", 0)):
            own = logits.own(row)
            here.clear_last(count)
            if chosen_here is not None:
                chosen_here.clear_last(count)
            with k.loop(0, count) as j:
                if spec.asks_early:
                    x.at(entries.column(begin + j) * x_stride).prefetch(0, block.size, level=2)
                z = logits.z(own, begin + j)
                here.put(j, leaky_relu(z, logits.slope))
                if chosen_here is not None:
                    chosen_here.put(j, z)
            largest.set(largest.get().maximum(here.maximum(count)))
            with k.loop(0, count, CHUNK_ENTRIES) as first:
                some = k.intrinsic("smin", count.type, count - first, k.constant("i64", CHUNK_ENTRIES))
                total.set(total.get() + here.at(first).exponentiate(some, largest.get()))
                if chosen_here is not None:
                    share = chosen_here.at(first).select_where_positive(some, here.at(first))
                    chosen_total.set(chosen_total.get() + share)
            if dropout is not None:
                with k.loop(0, count) as j:
                    kept = dropout.factors(entries.edge(begin + j), block.heads)
                    for chunk in (here, chosen_here):
                        if chunk is not None:
                            chunk.put(j, chunk.get(j) * kept)
        is_empty = count.compare("eq", 0)
        # The largest finite logit adds 1, so the sum is 0 only where there is none.
        is_none = total.get().compare("oeq", 0.0)
        sum_of_exp = is_none.select(is_empty.select(1.0, total_of_none), total.get())
        maximum = is_none.select(is_empty.select(0.0, k.constant(kind, float("-inf"))), largest.get())
        if chosen is not None:
            positive_weights.store(row * head_stride, weights.heads_of(chosen_total.get() / sum_of_exp))
        out_total.store(row * head_stride, weights.heads_of(sum_of_exp))
        out_maximum.store(row * head_stride, weights.heads_of(maximum))

    pieces = block.pieces(kind)
    chosen_pieces = [] if chosen is None else pieces
    distance = prefetch_distance(block.size * ELEMENT_BYTES[kind])

    def add_up(row: Value, begin: Value, end: Value) -> None:
        """Sums the row's neighbours by the weights that are in the buffers."""
        totals, chosen_totals = zero_variables(k, pieces, kind), zero_variables(k, chosen_pieces, kind)
        with entries.sums(begin, end, [*totals, *chosen_totals]) as (entry, sums):
            x.at(entries.column(entries.ahead(entry, distance)) * x_stride).prefetch(0, block.size)
            values = load_pieces(pieces, x.at(entries.column(entry) * x_stride))
            j = entry - begin + filled.get()
            for chunk, terms in ((weights, sums[: len(pieces)]), (chosen, sums[len(pieces) :])):
                for piece, term, value in zip(pieces, terms, values):
                    assert chunk is not None
                    term.set(value.multiply_add(piece.spread(chunk.row(j)), term.get()))
        total = out_total.load(row * head_stride, block.heads)
        factors.store(0, k.constant(kind, 1.0, block.heads) / total)
        for target, sums in ((out, totals), (positive_rows, chosen_totals)):
            values = [value * piece.spread(factors) for piece, value in zip(pieces, get_all(sums))]
            store_pieces(pieces, target.at(row * stride), values, past_cache=spec.past_cache)

    _run_twice(k, entries, filled, weigh, add_up)
    return k.finish()


def emit_backward_by_source(spec: AttentionSpec) -> str:
    """dx[u] = Σ w grad[v] and d_el[u] = Σ d_logit * leaky_relu'(z), as Σ dot * (w * leaky_relu') less the rest.

    Where registers are many (`dots_at_end`), that first sum is x[u] · Σ (w * leaky_relu') grad[v]: a second sum of the
    same rows takes less than a product with x[u] for each of them. 0.95 to 1.24 times as fast, median 1.06 (AVX-512,
    Zen 4; fifteen runs, 0.6 to 5 M edges, rows of 40 to 400 floats).

    Rows are sources.
    """
    k = KernelBuilder()
    kind, block = spec.value, spec.block
    entries = Entries.declare(k, spec.index, spec.edge_ids)
    logits = _Logits.declare(k, spec, entries)
    x, grad, grad_stride, stride, head_stride = k.pointer(kind), k.pointer(kind), k.integer(), k.integer(), k.integer()
    lse, delta = logits.moving.at(block.heads), logits.moving.at(2 * block.heads)  # beside er
    dx, d_el = k.pointer(kind), k.pointer(kind)
    dropout = DropoutArguments.declare(k, kind, spec.edge_keys) if spec.dropout else None
    weights, slopes, deltas = (LogitChunk(k, kind, block.heads, MAX_KEPT_ENTRIES) for _ in range(3))
    filled = k.variable(k.constant("i64", 0))

    def weigh(row: Value, begin: Value, end: Value) -> None:
        """Puts w and w * leaky_relu' of a row into the buffers; d_el = - Σ alpha * delta * leaky_relu'."""
        count = end - begin
        rest = k.variable(weights.constant(0.0))
        here, slopes_here, deltas_here = (chunk.at(filled.get()) for chunk in (weights, slopes, deltas))
        with k.when(count.compare("sgt", 0)):
            own = logits.own(row)
            here.clear_last(count)
            for chunk in (slopes_here, deltas_here):
                chunk.clear_last(count, 0.0)
            with k.loop(0, count) as j:
                if spec.asks_early:
                    grad.at(entries.column(begin + j) * grad_stride).prefetch(0, block.size, level=2)
                z, at = logits.z(own, begin + j), entries.column(begin + j) * logits.moving_stride
                slope = leaky_relu_slope(z, logits.slope)
                here.put(j, leaky_relu(z, logits.slope) - lse.load(at, block.heads))
                slopes_here.put(j, slope)
                deltas_here.put(j, slope * delta.load(at, block.heads))
            with k.loop(0, count, CHUNK_ENTRIES) as first:
                some = k.intrinsic("smin", count.type, count - first, k.constant("i64", CHUNK_ENTRIES))
                here.at(first).exponentiate(some)
                rest.set(rest.get() - here.at(first).weighted_sum(some, deltas_here.at(first)))
                slopes_here.at(first).multiply(some, here.at(first))
            if dropout is not None:
                with k.loop(0, count) as j:
                    kept = dropout.factors(entries.edge(begin + j), block.heads)
                    for chunk in (here, slopes_here):
                        chunk.put(j, chunk.get(j) * kept)
        d_el.store(row * head_stride, weights.heads_of(rest.get()))

    pieces, head_pieces = block.pieces(kind), block.head_pieces(kind)
    groups = head_groups(block, kind)
    distance = prefetch_distance(block.size * ELEMENT_BYTES[kind])
    summed = k.scratch(kind, block.size) if spec.dots_at_end else None

    def add_up_and_dot(row: Value, begin: Value, end: Value) -> None:
        """Sums the row's neighbours by both kinds of weights that are in the buffers, and adds to d_el."""
        assert summed is not None
        totals, slope_totals = zero_variables(k, pieces, kind), zero_variables(k, pieces, kind)
        with entries.sums(begin, end, [*totals, *slope_totals]) as (entry, sums):
            grad.at(entries.column(entries.ahead(entry, distance)) * grad_stride).prefetch(0, block.size)
            values = load_pieces(pieces, grad.at(entries.column(entry) * grad_stride))
            j = entry - begin + filled.get()
            for chunk, terms in ((weights, sums[: len(pieces)]), (slopes, sums[len(pieces) :])):
                for piece, term, value in zip(pieces, terms, values, strict=True):
                    term.set(value.multiply_add(piece.spread(chunk.row(j)), term.get()))
        store_pieces(pieces, dx.at(row * stride), get_all(totals), past_cache=spec.past_cache)
        store_pieces(pieces, summed, get_all(slope_totals))
        own = x.at(row * stride)

        def product(piece: Piece) -> Value:
            return own.load(piece.begin, piece.lanes) * summed.load(piece.begin, piece.lanes)

        with k.when((end - begin).compare("sgt", 0)):  # else what is not finite in x, times nothing, would be NaN
            for heads, dot in grouped_head_sums(k, block, kind, product):
                at = row * head_stride + heads[0]
                d_el.store(at, d_el.load(at, len(heads)) + dot)

    def add_up(row: Value, begin: Value, end: Value) -> None:
        """Sums the row's neighbours by the weights that are in the buffers, and adds to d_el."""
        own = {piece.begin: x.at(row * stride).load(piece.begin, piece.lanes) for h in head_pieces for piece in h}
        totals = zero_variables(k, pieces, kind)
        d_el_totals = [k.variable(k.constant(kind, 0.0, len(heads))) for heads in groups]
        with entries.sums(begin, end, [*totals, *d_el_totals]) as (entry, sums):
            grad.at(entries.column(entries.ahead(entry, distance)) * grad_stride).prefetch(0, block.size)
            grad_row = grad.at(entries.column(entry) * grad_stride)
            j = entry - begin + filled.get()

            def product(piece: Piece, grad_row: Pointer = grad_row) -> Value:
                return grad_row.load(piece.begin, piece.lanes) * own[piece.begin]

            dots = grouped_head_sums(k, block, kind, product)
            for (heads, dot), term in zip(dots, sums[len(pieces) :], strict=True):
                factor = slopes.row(j).load(heads[0], len(heads))
                term.set(dot.multiply_add(factor, term.get()))
            for piece, term in zip(pieces, sums):
                value = grad_row.load(piece.begin, piece.lanes)
                term.set(value.multiply_add(piece.spread(weights.row(j)), term.get()))
        store_pieces(pieces, dx.at(row * stride), get_all(totals), past_cache=spec.past_cache)
        for heads, total in zip(groups, get_all(d_el_totals)):
            at = row * head_stride + heads[0]
            d_el.store(at, d_el.load(at, len(heads)) + total)

    _run_twice(k, entries, filled, weigh, add_up_and_dot if spec.dots_at_end else add_up)
    return k.finish()
