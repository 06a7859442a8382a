# SPDX-License-Identifier: Apache-2.0
"""What kernels of both kinds of fused attention share.

Letters: u a source, v a destination, e an edge; per head a logit, alpha = exp(logit - lse[v]), w = drop(alpha),
out[v] = Σ w x[u]. Backward, with dot = grad[v] · x[u],

    dx[u] += w grad[v]       d_logit = w * dot - alpha * delta[v]       delta[v] = grad[v] · out[v] = Σ of w * dot

All kernels handle some whole heads; pointers to (rows, H) and (rows, H, D) arrays begin at the first of them.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from dgl_hybrid.ops.cpu.ir import KernelBuilder, Kind, Pointer, Value
from dgl_hybrid.ops.cpu.lanes import Block, Piece, load_pieces, store_head_sums, store_pieces

LEAST: dict[Kind, float] = {"f32": (2.0**-23 - 2.0) * 2.0**127, "f64": -sys.float_info.max}
"""The least finite numbers. What a maximum of logits begins with, not -inf: logits of -inf weigh 0, but less a maximum
of -inf they would be NaN."""


@dataclass(frozen=True)
class AttentionSpec:
    """What a kernel is compiled for.

    `block` are its heads; of gat, `positive`: with `backend.PositiveSums`, `past_cache`: how sums are written,
    `asks_early`: whether rows are asked for while weights are made, `dots_at_end`: whether products of x and gradients
    are made of sums, one for a source, and not one for an entry.
    """

    value: Kind
    index: Kind
    block: Block
    edge_ids: bool
    dropout: bool = False
    edge_keys: bool = False
    positive: bool = False
    past_cache: bool = False
    asks_early: bool = False
    dots_at_end: bool = False


def emit_statistics(kind: Kind, block: Block, with_er: bool, with_d_er: bool) -> str:
    """What the backward reads per destination, side by side: (er,) lse, delta, each per head; and d_er if asked for.

    One cache line per entry of the backward instead of three, `place` numbers for each of them. d_er as
    `backend.PositiveSums` has it.
    """
    k = KernelBuilder()
    er, lse, grad, out, statistics = (k.pointer(kind) for _ in range(5))
    stride, head_stride, place = k.integer(), k.integer(), k.integer()
    positive_rows, positive_weights, d_er, slope = k.pointer(kind), k.pointer(kind), k.pointer(kind), k.number(kind)
    pieces = Block(block.heads, 1).pieces(kind)
    with k.rows() as row:
        copied = [er, lse] if with_er else [lse]
        target = statistics.at(row * place * (len(copied) + 1))
        for number, source in enumerate(copied):
            values = load_pieces(pieces, source.at(row * head_stride))
            store_pieces(pieces, target.at(place * number), values)

        def store_dots(right: Pointer, target: Pointer, row: Value = row) -> None:
            left, right = grad.at(row * stride), right.at(row * stride)

            def term(piece: Piece) -> Value:
                return left.load(piece.begin, piece.lanes) * right.load(piece.begin, piece.lanes)

            store_head_sums(k, block, kind, term, target)

        delta = target.at(place * len(copied))
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
