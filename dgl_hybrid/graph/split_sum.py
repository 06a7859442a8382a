# SPDX-License-Identifier: Apache-2.0
"""Sums over in-edges of a layer that is split by source, with the exchange inside: one differentiable function.

    y = A_held x  +  Σ over messages: A_k (rows of message k)

Sources, or sums, may have a factor each: they are multiplied where they are read and written anyway, those that travel
before they leave.

No tensor of all sources is ever made: received rows are added to the sums from where they arrive. The gradient of a
sum does not need its operands, so nothing received is kept for backward. Both directions are each other's adjoint, so
derivatives of any order work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dgl_hybrid.exchange.communicator import Communicator
from dgl_hybrid.exchange.parts import SplitLayer
from dgl_hybrid.exchange.row_codecs import RowCodec, is_encoded
from dgl_hybrid.graph.split_exchange import Scale, SplitExchange, sum_rows
from dgl_hybrid.ops.backend import choose_backend
from dgl_hybrid.ops.operands import plan_weighted
from dgl_hybrid.ops.unseen import unseen


def _nothing() -> None:
    """Runs beside an exchange where nothing else does."""


class SplitSum:
    """What one layer's sums need, made once.

    Args:
        layer: The structure, on the device of the rows.
        number: Of the layer, from 1.
        codec: What rows and gradients of training travel as, approximately; None: everything is exact.
        seed: Of its random rounding.
    """

    def __init__(
        self,
        layer: SplitLayer,
        communicator: Communicator,
        *,
        number: int,
        codec: RowCodec | None = None,
        seed: int = 0,
    ) -> None:
        self.layer, self._codec = layer, codec
        self.exchange = SplitExchange(layer, communicator, number=number, seed=seed)

    @unseen
    def __call__(self, x: Tensor, weights: Tensor | None = None, *, scale: Scale | None = None) -> Tensor:
        """Sums sources, times constant weights of edges, over the in-edges of each destination. Collective.

        Args:
            x: (C, *f) float32 or float64: the rows held here.
            weights: (E, *g) of the same dtype, without gradient; features broadcast. None: one each.
            scale: Factors of sources or of sums; not with weights.

        Returns:
            (N, *f), with weights the broadcast features.
        """
        if weights is None:
            flat = x.reshape(len(x), 1, x.shape[1:].numel())
            summed: Tensor = _Sum.apply(self, None, scale, self.codec_for(flat.shape[2], x.dtype), flat)
            return summed.reshape(len(summed), *x.shape[1:])
        assert scale is None, "sums have weights or factors"
        plan = plan_weighted(tuple(x.shape[1:]), tuple(weights.shape[1:]))
        if plan is None:
            raise ValueError(
                f"features of sources and edge weights must broadcast after the rows (got {tuple(x.shape)} and "
                f"{tuple(weights.shape)})"
            )
        sources = plan.sources(x)
        codec = self.codec_for(sources.shape[1:].numel(), x.dtype)
        return plan.result(_Sum.apply(self, plan.weights(weights.detach()), None, codec, sources))

    def codec_for(self, num_columns: int, dtype: torch.dtype) -> RowCodec | None:
        """What such rows travel as now: only what is trained is approximated."""
        is_approximate = torch.is_grad_enabled() and is_encoded(self._codec, num_columns, dtype)
        return self._codec if is_approximate else None

    def forward(
        self,
        x_CHD: Tensor,
        weights_EH: Tensor | None,
        scale: Scale | None,
        codec: RowCodec | None,
        beside: Callable[[], None] = _nothing,
    ) -> Tensor:
        """(C, H, D) to (N, H, D); `beside` is called while the first message is in flight."""
        x_CHD = x_CHD.contiguous()
        shape = x_CHD.shape[1:]
        out = x_CHD.new_empty(0)

        def held() -> None:
            nonlocal out
            beside()
            out = sum_rows(self.layer.held.in_edges, x_CHD, self._weights_of_held(weights_EH), scale)

        def use(position: int, rows_RF: Tensor) -> None:
            part = self.layer.parts[position]
            rows = rows_RF.view(len(rows_RF), *shape)
            # Where they belong: sums of their own would be as many rows as the layer has, for each message.
            add_sums = choose_backend(rows).add_sums
            of_rows = None if row_factors is None else row_factors.index_select(0, part.dst_rows)
            weights = self._weights_of(position, weights_EH)
            add_sums(out, part.dst_rows, part.edges.in_edges, rows, weights, of_rows)

        row_factors = None if scale is None else scale.row_factors
        source_factors = None if scale is None else scale.source_factors
        self.exchange.forward([x_CHD.flatten(1)], held, use, codec, source_factors)
        return out

    def backward(
        self,
        grad_NHD: Tensor,
        weights_EH: Tensor | None,
        scale: Scale | None,
        codec: RowCodec | None,
        beside: Callable[[], None] = _nothing,
    ) -> Tensor:
        """(N, H, D) to (C, H, D); `beside` is called while the first message is in flight."""
        grad_NHD = grad_NHD.contiguous()
        # Sources are sums now, and sums sources. What comes home is not multiplied yet: it is that of rows that are.
        turned = None if scale is None else Scale(scale.factors, not scale.of_sources)
        of_received = None if turned is None or not turned.of_sources else turned

        def make(position: int) -> list[Tensor]:
            rows = self.layer.by_source(position, of_edges=weights_EH is not None)
            return [sum_rows(rows, grad_NHD, self._weights_of(position, weights_EH), of_received).flatten(1)]

        def held() -> list[Tensor]:
            beside()
            held = self.layer.held
            rows = held.out_neighbours if weights_EH is None else held.out_edges
            return [sum_rows(rows, grad_NHD, self._weights_of_held(weights_EH), turned).flatten(1)]

        (total,) = self.exchange.backward(make, held, codec, None if turned is None else turned.row_factors)
        return total.view(len(total), *grad_NHD.shape[1:])

    def adjoint(self, grad_NHD: Tensor, scale: Scale | None, codec: RowCodec | None) -> Tensor:
        """As `backward` without weights, for autograd."""
        grad: Tensor = _Adjoint.apply(self, None, scale, codec, grad_NHD)
        return grad

    def _weights_of_held(self, weights_EH: Tensor | None) -> Tensor | None:
        return None if weights_EH is None else weights_EH.index_select(0, self.layer.edge_positions.of_held())

    def _weights_of(self, position: int, weights_EH: Tensor | None) -> Tensor | None:
        if weights_EH is None:
            return None
        assert not self.layer.parts[position].are_sums, "partial sums are sums without weights"
        return weights_EH.index_select(0, self.layer.edge_positions.of_part(position))


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        split: SplitSum,
        weights_EH: Tensor | None,
        scale: Scale | None,
        codec: RowCodec | None,
        x_CHD: Tensor,
    ) -> Tensor:
        ctx.split, ctx.scale, ctx.codec = split, scale, codec
        ctx.save_for_backward(weights_EH)
        return split.forward(x_CHD, weights_EH, scale, codec)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (weights_EH,) = ctx.saved_tensors
        return None, None, None, None, _Adjoint.apply(ctx.split, weights_EH, ctx.scale, ctx.codec, *grads)


class _Adjoint(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        split: SplitSum,
        weights_EH: Tensor | None,
        scale: Scale | None,
        codec: RowCodec | None,
        grad_NHD: Tensor,
    ) -> Tensor:
        ctx.split, ctx.scale, ctx.codec = split, scale, codec
        ctx.save_for_backward(weights_EH)
        return split.backward(grad_NHD, weights_EH, scale, codec)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (weights_EH,) = ctx.saved_tensors
        return None, None, None, None, _Sum.apply(ctx.split, weights_EH, ctx.scale, ctx.codec, *grads)
