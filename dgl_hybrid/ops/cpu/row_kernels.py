# SPDX-License-Identifier: Apache-2.0
"""Kernels that work on rows one by one, without a graph."""

from __future__ import annotations

from dataclasses import dataclass

from dgl_hybrid.ops.cpu.elementary import DropoutArguments
from dgl_hybrid.ops.cpu.ir import KernelBuilder, Kind
from dgl_hybrid.ops.cpu.lanes import Block


@dataclass(frozen=True)
class RowDropoutSpec:
    """What a dropout of rows is compiled for."""

    value: Kind
    block: Block


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
            target.store(piece.begin, source.load(piece.begin, piece.lanes) * factors)
    return k.finish()
