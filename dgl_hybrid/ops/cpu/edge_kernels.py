# SPDX-License-Identifier: Apache-2.0
"""Kernels that write a row per edge: combinations of two operands, and the softmax over a destination's edges."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dgl_hybrid.ops.cpu.entries import Entries, prefetch_distance
from dgl_hybrid.ops.cpu.ir import KernelBuilder, Kind, Pointer, Value
from dgl_hybrid.ops.cpu.lanes import ELEMENT_BYTES, Block, Piece, get_all, store_head_sums, zero_variables
from dgl_hybrid.ops.cpu.logits import LogitChunk

EdgeOp = Literal["add", "sub", "mul", "div", "dot", "copy"]
Target = Literal["u", "v", "e"]


@dataclass(frozen=True)
class SddmmSpec:
    """What a kernel is compiled for; `add`: sums are added to what is there, for a head of several blocks."""

    value: Kind
    index: Kind
    block: Block
    op: EdgeOp
    lhs_target: Target
    rhs_target: Target
    edge_ids: bool
    add: bool = False


def emit_sddmm(spec: SddmmSpec) -> str:
    """out[e] = lhs op rhs, each at the edge's source ("u"), destination ("v": the row) or itself ("e")."""
    k = KernelBuilder()
    entries = Entries.declare(k, spec.index, spec.edge_ids)
    lhs, rhs, stride = k.pointer(spec.value), k.pointer(spec.value), k.integer()
    out, out_stride = k.pointer(spec.value), k.integer()
    operands: list[tuple[Pointer, Target]] = [(lhs, spec.lhs_target)]
    if spec.op != "copy":
        operands.append((rhs, spec.rhs_target))
    distance = prefetch_distance(spec.block.size * ELEMENT_BYTES[spec.value])

    def at(operand: Pointer, target: Target, row: Value, entry: Value) -> Pointer:
        index = {"u": entries.column, "v": lambda _: row, "e": entries.edge}[target](entry)
        return operand.at(index * stride)

    with entries.rows() as (row, begin, end), k.loop(begin, end) as entry:
        ahead = entries.ahead(entry, distance)
        for operand, target in operands:
            if target == "u" or (target == "e" and spec.edge_ids):
                at(operand, target, row, ahead).prefetch(0, spec.block.size)
        sides = [at(operand, target, row, entry) for operand, target in operands]

        def term(piece: Piece) -> Value:
            left, *right = (side.load(piece.begin, piece.lanes) for side in sides)
            if spec.op == "copy":
                return left
            if spec.op == "add":
                return left + right[0]
            if spec.op == "sub":
                return left - right[0]
            if spec.op == "div":
                return left / right[0]
            return left * right[0]

        target_row = out.at(entries.edge(entry) * out_stride)
        if spec.op == "dot":
            store_head_sums(k, spec.block, spec.value, term, target_row, add=spec.add)
        else:
            for piece in spec.block.pieces(spec.value):
                target_row.store(piece.begin, term(piece))
    return k.finish()


@dataclass(frozen=True)
class SoftmaxSpec:
    """What a softmax kernel is compiled for: `heads` columns of the edges' rows."""

    value: Kind
    index: Kind
    heads: int
    edge_ids: bool


def emit_edge_softmax(spec: SoftmaxSpec) -> str:
    """out[e] = exp(logits[e] - max) / Σ exp(logits - max) over the edges of e's row."""
    k = KernelBuilder()
    entries = Entries.declare(k, spec.index, spec.edge_ids)
    logits, out, stride = k.pointer(spec.value), k.pointer(spec.value), k.integer()
    chunk = LogitChunk(k, spec.value, spec.heads)

    with entries.rows() as (_, begin, end):
        largest = k.variable(chunk.constant(float("-inf")))
        total = k.variable(chunk.constant(0.0))

        def stage(first: Value, count: Value) -> None:
            chunk.clear_last(count)
            with k.loop(0, count) as j:
                chunk.put(j, logits.load(entries.edge(first + j) * stride, spec.heads))

        with chunk.chunks(begin, end) as (first, count):
            stage(first, count)
            largest.set(largest.get().maximum(chunk.maximum(count)))
        with chunk.chunks(begin, end) as (first, count):
            stage(first, count)
            total.set(total.get() + chunk.exponentiate(count, largest.get()))
            with k.loop(0, count) as j:
                out.store(entries.edge(first + j) * stride, chunk.get(j))
        inverse = chunk.heads_of(chunk.constant(1.0) / total.get())
        with k.loop(begin, end) as entry:
            row = out.at(entries.edge(entry) * stride)
            row.store(0, row.load(0, spec.heads) * inverse)
    return k.finish()


def emit_edge_softmax_backward(spec: SoftmaxSpec) -> str:
    """d_logits[e] = out[e] * (grad[e] - Σ out * grad over the edges of e's row)."""
    k = KernelBuilder()
    entries = Entries.declare(k, spec.index, spec.edge_ids)
    out, grad, d_logits, stride = k.pointer(spec.value), k.pointer(spec.value), k.pointer(spec.value), k.integer()
    pieces = Block(spec.heads, 1).pieces(spec.value)
    with entries.rows() as (_, begin, end):
        totals = zero_variables(k, pieces, spec.value)
        with entries.sums(begin, end, totals) as (entry, sums):
            at = entries.edge(entry) * stride
            for piece, total in zip(pieces, sums):
                left, right = (p.at(at).load(piece.begin, piece.lanes) for p in (out, grad))
                total.set(left.multiply_add(right, total.get()))
        row_totals = get_all(totals)
        with k.loop(begin, end) as entry:
            at = entries.edge(entry) * stride
            for piece, value in zip(pieces, row_totals):
                left, right = (p.at(at).load(piece.begin, piece.lanes) for p in (out, grad))
                d_logits.at(at).store(piece.begin, left * (right - value))
    return k.finish()
