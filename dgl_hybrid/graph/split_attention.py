# SPDX-License-Identifier: Apache-2.0
"""Fused attention of a layer that is split by source: each message's rows are attended to on their own.

Softmax over parts of a row's entries is put together from each part's weighted sum and log-sum-exp, as online softmax
does (Milakov and Gimelshein, 2018) and as ring attention does across devices (Liu et al., 2023):

    lse = log(e^lse_1 + e^lse_2)        out = out_1 · e^(lse_1 - lse) + out_2 · e^(lse_2 - lse)

and `backend.PositiveSums` as `out` is. A part of a row all of whose logits are -inf has lse = -inf, and weighs nothing.
A row of which nothing weighs anything is NaN, as it is unsplit.

Backward, each part needs only the whole row's `out` and `lse`, its own sources and the gradient. Where there are
positive sums, the gradient of a destination is made from those of the whole row, with the held part. Received rows are
kept for it, or fetched again where they come in many messages, whose purpose is that they are never all here. What is
made for the rows that read such a message is made for as many of them at a time as the message brings, for the same
purpose: a few sources may be read by nearly all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from dgl_hybrid.exchange.communicator import Communicator
from dgl_hybrid.exchange.parts import RowsPart, SplitLayer
from dgl_hybrid.graph.split_exchange import SplitExchange
from dgl_hybrid.ops import EdgeDropout, SparseGraph
from dgl_hybrid.ops.backend import PositiveSums, choose_backend
from dgl_hybrid.ops.sparse_graph import Adjacency
from dgl_hybrid.ops.unseen import unseen

AttentionOp = Literal["gat", "gatv2"]

_MINUS_INF = float("-inf")
_LEAST_READERS = 1024
"""Of a message of few rows so many may read at a time: fewer would cost more in calls than they save."""

_PIECE_NUMBERS = 1 << 22
"""That are gathered for edges at a time where rows have no finite logit."""


@dataclass(frozen=True, slots=True)
class _Call:
    """What does not depend on rows: which op, its slope, the dropout of the layer's edges.

    And whether a backward will follow.
    """

    op: AttentionOp
    slope: float
    dropout: EdgeDropout | None
    for_backward: bool

    def dropout_of(self, positions: Callable[[], Tensor]) -> EdgeDropout | None:
        """Returns the dropout of some of the edges: made where it is used, as their keys are eight bytes each."""
        if self.dropout is None:
            return None
        assert self.dropout.edge_keys is not None, "a position among the edges says nothing of an edge here"
        return replace(self.dropout, edge_keys=self.dropout.edge_keys[positions()])


@dataclass(frozen=True, slots=True)
class _Sources:
    """Rows that are attended to: (S, H, D), and for GAT their (S, H) terms of the logits."""

    x: Tensor
    el: Tensor | None

    def fields(self) -> list[Tensor]:
        """(S, H) and (S, H D), or (S, H D) alone: what travels. The same memory: gradients are added to there."""
        return [field.view(len(field), field.shape[1:].numel()) for field in (self.el, self.x) if field is not None]

    def unpacked(self, wire: Tensor) -> _Sources:
        """Rows that came with all fields side by side, as copies: of the same heads and widths.

        Not by `contiguous`, which copies nothing of a single row: messages are written over by later ones.
        """
        heads, width = self.x.shape[1:]
        if self.el is None:
            return _Sources(_copy_of(wire).view(-1, heads, width), None)
        return _Sources(_copy_of(wire[:, heads:]).view(-1, heads, width), _copy_of(wire[:, :heads]))


@dataclass(frozen=True, slots=True)
class _Attended:
    """The result for some destinations: `out` (N, H, D), `lse` (N, H) and what is kept for their gradients."""

    out: Tensor
    lse: Tensor
    positive: PositiveSums | None

    def add(self, rows: Tensor, other: _Attended) -> None:
        """Takes further entries of the rows `rows` in, whose result `other` is, as the heading says."""
        before = self.lse.index_select(0, rows)
        after = torch.logaddexp(before, other.lse)
        largest = torch.maximum(before, other.lse)
        # Where nothing has weighed anything yet, -inf less -inf would be NaN: both are to stay at 0.
        largest.masked_fill_(largest == _MINUS_INF, 0.0)
        keeps, adds = (before - largest).exp_(), (other.lse - largest).exp_()
        # By their own sum, not by `after`: of logits of 1e5 that is off by 4e-3, and shares would not add up to 1.
        total = keeps + adds
        total.masked_fill_(total == 0.0, 1.0)
        keeps, adds = keeps.div_(total), adds.div_(total)
        sums = [(self.out, other.out)]
        if self.positive is not None and other.positive is not None:
            sums.append((self.positive.rows, other.positive.rows))
            sums.append((self.positive.weights.unsqueeze(-1), other.positive.weights.unsqueeze(-1)))
        backend = choose_backend(self.out)
        for mine, others in sums:
            backend.merge_rows(mine, rows, others, keeps, adds)
        self.lse.index_copy_(0, rows, after)


@dataclass(frozen=True, slots=True)
class _Readers:
    """Some of the rows that read a part, one after the other."""

    rows: Tensor
    """(n,) int64: which rows of the layer."""
    edges: SparseGraph
    """n x wire rows received."""
    entries: slice
    """Of the part's edges."""

    def dropout(self, of_part: EdgeDropout | None) -> EdgeDropout | None:
        if of_part is None or of_part.edge_keys is None:
            return of_part
        return replace(of_part, edge_keys=of_part.edge_keys[self.entries])


class SplitAttention:
    """What one layer's attention needs, made once.

    Args:
        layer: The structure, on the device of the rows.
        number: Of the layer, from 1.
    """

    def __init__(self, layer: SplitLayer, communicator: Communicator, *, number: int) -> None:
        self.layer = layer
        self.exchange = SplitExchange(layer, communicator, number=number)
        self.fetches_again = len(layer.parts) > 1
        most = max((sum(part.recv_counts) for part in layer.parts), default=0)
        self._readers = [
            _readers_of(part, max(most, _LEAST_READERS) if self.fetches_again else len(part.dst_rows))
            for part in layer.parts
        ]
        has_entries = layer.held.in_edges.indptr.diff() > 0
        self._without_held = (~has_entries).nonzero().flatten()
        for part in layer.parts:
            has_entries[part.dst_rows] = True
        self._without_entries = (~has_entries).nonzero().flatten()

    @unseen
    def gat(self, x: Tensor, el: Tensor, er: Tensor, *, negative_slope: float, dropout: EdgeDropout | None) -> Tensor:
        """As `ops.gat` over held and received sources. Collective; differentiable once.

        Args:
            x: (C, H, *f) float32 or float64: the rows held here.
            el: (C, H) or (C, H, 1), same dtype.
            er: (N, H) or (N, H, 1), same dtype.
            dropout: With a key for each of the layer's edges.

        Returns:
            (N, H, *f).
        """
        heads = x.shape[1]
        flat = x.reshape(len(x), heads, x.shape[2:].numel())
        call = _Call("gat", float(negative_slope), dropout, _is_recorded(x, el, er))
        out: Tensor = _Attention.apply(self, call, flat, el.reshape(len(x), heads), er.reshape(len(er), heads), None)
        return out.reshape(len(er), heads, *x.shape[2:])

    @unseen
    def gatv2(
        self, x_src: Tensor, x_dst: Tensor, attention: Tensor, *, negative_slope: float, dropout: EdgeDropout | None
    ) -> Tensor:
        """As `ops.gatv2` over held and received sources. Collective; differentiable once.

        Args:
            x_src: (C, H, D) float32 or float64.
            x_dst: (N, H, D), same dtype.
            attention: (1, H, D), same dtype.
            dropout: With a key for each of the layer's edges.

        Returns:
            (N, H, D).
        """
        recorded = _is_recorded(x_src, x_dst, attention)
        call = _Call("gatv2", float(negative_slope), dropout, recorded)
        out: Tensor = _Attention.apply(self, call, x_src, None, x_dst, attention.reshape(x_src.shape[1:]))
        return out

    def forward(
        self, call: _Call, sources: _Sources, dst: Tensor, attention: Tensor | None
    ) -> tuple[_Attended, list[_Sources]]:
        """Returns the result, and the sources of each part unless they are to be fetched again."""
        result = _Attended(dst.new_empty(0), dst.new_empty(0), None)
        received: list[_Sources] = []

        def held() -> None:
            nonlocal result
            dropout = call.dropout_of(self.layer.edge_positions.of_held)
            result = _attend(call, dropout, self.layer.held, sources, dst, attention)
            result.lse[self._without_held] = _MINUS_INF

        def use(position: int, wire: Tensor) -> None:
            rows = sources.unpacked(wire)
            if not self.fetches_again:
                received.append(rows)
            of_part = call.dropout_of(partial(self.layer.edge_positions.of_part, position))
            for readers in self._readers[position]:
                dropout = readers.dropout(of_part)
                its_dst = dst.index_select(0, readers.rows)
                result.add(readers.rows, _attend(call, dropout, readers.edges, rows, its_dst, attention))

        self.exchange.forward(sources.fields(), held, use)
        out, lse = result.out, result.lse
        lse[self._without_entries] = 0.0
        is_nothing = lse == _MINUS_INF
        if bool(is_nothing.any()):
            lse.masked_fill_(is_nothing, float("nan"))
            out.masked_fill_(is_nothing.unsqueeze(-1), float("nan"))
        return result, received

    def backward(
        self,
        call: _Call,
        sources: _Sources,
        received: list[_Sources],
        dst: Tensor,
        attention: Tensor | None,
        result: _Attended,
        grad: Tensor,
    ) -> tuple[_Sources, Tensor, Tensor | None]:
        """Returns gradients of the sources, of `dst` and of `attention`."""
        d_sources, d_dst = _Sources(dst.new_empty(0), None), dst.new_empty(0)
        d_attention = None if attention is None else torch.zeros_like(attention)
        waiting: list[tuple[Tensor, Tensor]] = []

        def note_attention(found: Tensor | None) -> None:
            if d_attention is not None and found is not None:
                d_attention.add_(found)

        def make(position: int) -> list[Tensor]:
            total: list[Tensor] = []
            of_part = call.dropout_of(partial(self.layer.edge_positions.of_part, position))
            for readers in self._readers[position]:
                its_dst, its_out, its_lse, its_grad = (
                    value.index_select(0, readers.rows) for value in (dst, result.out, result.lse, grad)
                )
                some, dropout = _Attended(its_out, its_lse, None), readers.dropout(of_part)
                d_rows, d_some, found = _attend_backward(
                    call, dropout, readers.edges, received[position], attention, its_dst, some, its_grad
                )
                if d_some is None:
                    pass  # it is in that of the held rows
                elif self.fetches_again:  # held rows were first
                    _add_to_rows(d_dst, readers.rows, d_some)
                else:
                    waiting.append((readers.rows, d_some))
                note_attention(found)
                for sum_so_far, more in zip(total, d_rows.fields()):
                    sum_so_far += more
                total = total or d_rows.fields()
            return total

        def held() -> list[Tensor]:
            nonlocal d_dst, d_sources
            dropout = call.dropout_of(self.layer.edge_positions.of_held)
            d_sources, d_held, found = _attend_backward(
                call, dropout, self.layer.held, sources, attention, dst, result, grad
            )
            assert d_held is not None
            d_dst = d_held
            note_attention(found)
            return d_sources.fields()

        if self.fetches_again:
            self._backward_fetching(sources, received, make, held)
        else:
            self.exchange.backward(make, held)
        for read_by, d_some in waiting:
            _add_to_rows(d_dst, read_by, d_some)
        return d_sources, d_dst, d_attention

    def _backward_fetching(
        self,
        sources: _Sources,
        received: list[_Sources],
        make: Callable[[int], list[Tensor]],
        held: Callable[[], list[Tensor]],
    ) -> None:
        """As `SplitExchange.backward`, part by part, each with its rows fetched before and dropped after."""
        totals: list[Tensor] = []

        def first() -> None:
            totals.extend(held())

        nothing = _Sources(sources.x[:0], None)
        for position in range(len(self.layer.parts)):
            rows = self.exchange.fetch(position, sources.fields(), first if position == 0 else _do_nothing)
            received[:] = [*[nothing] * position, sources.unpacked(rows)]
            del rows
            gradients = make(position)
            received.clear()
            self.exchange.return_gradients(position, gradients, totals)
            del gradients  # memory is short: not beside the next message


def _is_recorded(*operands: Tensor) -> bool:
    return torch.is_grad_enabled() and any(operand.requires_grad for operand in operands)


def _copy_of(rows: Tensor) -> Tensor:
    return rows.clone(memory_format=torch.contiguous_format)


def _add_to_rows(total: Tensor, rows: Tensor, some: Tensor) -> None:
    """Adds gradients of destinations, (N, H) or (N, H, D), to some rows of contiguous ones."""
    width = total.shape[1:].numel()
    choose_backend(total).add_rows(total.view(len(total), width), rows, some.view(len(some), width), None)


def _do_nothing() -> None:
    pass


def _readers_of(part: RowsPart, most: int) -> list[_Readers]:
    """Returns the rows that read a part, at most so many at a time; none at all are one lot."""
    num_rows = len(part.dst_rows)
    if num_rows <= most:
        return [_Readers(part.dst_rows, part.edges, slice(None))]
    rows, found = part.edges.in_edges, []
    for begin in range(0, num_rows, most):
        end = min(begin + most, num_rows)
        first, last = int(rows.indptr[begin]), int(rows.indptr[end])
        edges = SparseGraph.from_csc(
            rows.indptr[begin : end + 1] - first, rows.indices[first:last], num_src=part.edges.num_src
        )
        found.append(_Readers(part.dst_rows[begin:end], edges, slice(first, last)))
    return found


def _attend(
    call: _Call,
    dropout: EdgeDropout | None,
    edges: SparseGraph,
    sources: _Sources,
    dst: Tensor,
    attention: Tensor | None,
) -> _Attended:
    """Returns the result, whose `lse` is -inf where all logits of a row are. Syncs the host."""
    backend = choose_backend(sources.x)
    if attention is not None:
        result = _Attended(*backend.gatv2(edges.in_edges, sources.x, dst, attention, call.slope, dropout), None)
    else:
        assert sources.el is not None
        operands = (edges.in_edges, sources.x, sources.el, dst, call.slope, dropout)
        result = _Attended(*backend.gat(*operands, for_backward=call.for_backward))
    if not bool(result.lse.isfinite().all()):
        _settle_rows_of_minus_inf(call, edges, sources, dst, attention, result)
    return result


def _settle_rows_of_minus_inf(
    call: _Call, edges: SparseGraph, sources: _Sources, dst: Tensor, attention: Tensor | None, result: _Attended
) -> None:
    """Replaces, in place, the NaN of rows all of whose logits are -inf: `lse` by -inf, `out` by what 0 times x sums to.

    Positive sums by 0: none of those logits is positive.

    Kernels divide by a sum of exponentials there that is 0. That a logit is NaN or +inf gives NaN, too, and that stays:
    of a training that diverges all rows may be looked through here, a piece of their in-edges at a time.
    """
    rows, out, lse = edges.in_edges, result.out, result.lse
    unsure = (~lse.isfinite()).any(1).nonzero().flatten()
    num_heads, width = lse.shape[1], out[0].numel()
    others = torch.zeros_like(lse[unsure])
    for row, source in _in_pieces(rows, unsure, width if attention is not None else num_heads):
        read_by = dst[unsure[row]]
        if attention is not None:
            logits = (F.leaky_relu(sources.x[source] + read_by, call.slope) * attention).sum(-1)
        else:
            assert sources.el is not None
            logits = F.leaky_relu(sources.el[source] + read_by, call.slope)
        others.index_add_(0, row, (~logits.isneginf()).to(lse.dtype))
    is_nothing = (others == 0) & (rows.indptr.diff()[unsure] > 0).unsqueeze(-1)
    is_settled = is_nothing.any(1)
    settled, is_nothing = unsure[is_settled], is_nothing[is_settled]
    nothing = torch.zeros_like(out[settled])
    for row, source in _in_pieces(rows, settled, width):
        nothing.index_add_(0, row, 0.0 * sources.x[source])  # NaN where x is, or infinite
    lse[settled] = lse[settled].masked_fill(is_nothing, _MINUS_INF)
    out[settled] = torch.where(is_nothing.unsqueeze(-1), nothing, out[settled])
    if result.positive is not None:
        for sums, where in zip(result.positive, (is_nothing.unsqueeze(-1), is_nothing), strict=True):
            sums[settled] = sums[settled].masked_fill(where, 0.0)


def _in_pieces(rows: Adjacency, chosen: Tensor, width: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields in-edges of chosen rows (position in `chosen`, source), so many that `width` numbers of each fit."""
    counts = rows.indptr.diff()[chosen].long()
    ends = counts.cumsum(0)
    shift = rows.indptr[chosen].long() - (ends - counts)
    num_edges = int(counts.sum())
    for begin in range(0, num_edges, size := max(1, _PIECE_NUMBERS // width)):
        place = torch.arange(begin, min(begin + size, num_edges), device=chosen.device)
        row = torch.searchsorted(ends, place, right=True)
        yield row, rows.indices[shift[row] + place].long()


def _attend_backward(
    call: _Call,
    dropout: EdgeDropout | None,
    edges: SparseGraph,
    sources: _Sources,
    attention: Tensor | None,
    dst: Tensor,
    result: _Attended,
    grad: Tensor,
) -> tuple[_Sources, Tensor | None, Tensor | None]:
    """Returns gradients of the sources, of `dst` (None: see `Backend.gat_backward`) and of `attention`; contiguous."""
    backend = choose_backend(sources.x)
    out, lse = result.out, result.lse
    rows, out_rows = edges.in_edges, edges.out_edges
    if attention is not None:
        d_x, d_dst, d_attention = backend.gatv2_backward(
            rows, out_rows, sources.x, dst, attention, out, lse, grad, call.slope, dropout
        )
        return _Sources(d_x, None), d_dst, d_attention
    assert sources.el is not None
    d_x, d_el, d_er = backend.gat_backward(
        rows, out_rows, sources.x, sources.el, dst, out, lse, result.positive, grad, call.slope, dropout
    )
    return _Sources(d_x, d_el), d_er, None


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        split: SplitAttention,
        call: _Call,
        x: Tensor,
        el: Tensor | None,
        dst: Tensor,
        attention: Tensor | None,
    ) -> Tensor:
        x, dst = x.contiguous(), dst.contiguous()
        el = None if el is None else el.contiguous()
        attention = None if attention is None else attention.contiguous()
        result, received = split.forward(call, _Sources(x, el), dst, attention)
        ctx.split, ctx.call, ctx.num_received = split, call, len(received)
        kept = [tensor for rows in received for tensor in (rows.x, rows.el)]
        positive = result.positive or (None, None)
        ctx.save_for_backward(x, el, dst, attention, result.out, result.lse, *positive, *kept)
        return result.out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, el, dst, attention, out, lse, positive_rows, positive_weights, *kept = ctx.saved_tensors
        positive = None if positive_rows is None else PositiveSums(positive_rows, positive_weights)
        received = [_Sources(kept[2 * k], kept[2 * k + 1]) for k in range(ctx.num_received)]
        d_sources, d_dst, d_attention = ctx.split.backward(
            ctx.call, _Sources(x, el), received, dst, attention, _Attended(out, lse, positive), grad.contiguous()
        )
        return None, None, d_sources.x, d_sources.el, d_dst, d_attention
