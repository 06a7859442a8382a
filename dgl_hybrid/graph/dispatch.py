# SPDX-License-Identifier: Apache-2.0
"""Lets DGL functions that bypass a graph's frames (`dgl.ops.*`, `EdgeWeightNorm`) work on a `LayerBlock`.

`dgl.ops.gspmm(graph, ..., x)` takes the operand directly and hands `graph._graph` to the backend. A `LayerBlock`
answers `_graph` with a `DeferredIndex`; the wrappers here see it, complete the source operand by an exchange and go on
with the real index. Every other graph goes to the original function untouched. `remove()` puts the originals back.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import dgl.nn.pytorch.conv
import dgl.nn.pytorch.conv.graphconv as graphconv
import dgl.ops
from torch import Tensor

from dgl_hybrid.errors import BlockError


class DeferredIndex:
    """Stands for the index of a block whose source operands still lack their received rows."""

    def __init__(
        self, index: Any, extend: Callable[[Tensor], Tensor], note_edge_result: Callable[[Tensor], None]
    ) -> None:
        self.index = index
        self.extend = extend
        self.note_edge_result = note_edge_result

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["index"], name)


def _is_layer_block(graph: Any) -> bool:
    return isinstance(getattr(graph, "_graph", None), DeferredIndex)


def _wrap_gspmm(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(original)
    def gspmm_internal(gidx: Any, op: str, reduce_op: str, lhs_data: Any, rhs_data: Any) -> Tensor:
        if isinstance(gidx, DeferredIndex):
            if op != "copy_rhs":
                lhs_data = gidx.extend(lhs_data)
            gidx = gidx.index
            if reduce_op in ("max", "min") and gidx.num_edges(0) == 0:
                # What DGL answers for a vertex without in-edges; its own backward fails for messages without rows.
                empty = original(gidx, op, "sum", lhs_data, rhs_data)
                return empty + (float("-inf") if reduce_op == "max" else float("inf"))
        return original(gidx, op, reduce_op, lhs_data, rhs_data)

    return gspmm_internal


def _wrap_gsddmm(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(original)
    def gsddmm_internal(
        gidx: Any, op: str, lhs_data: Any, rhs_data: Any, lhs_target: str = "u", rhs_target: str = "v"
    ) -> Tensor:
        if isinstance(gidx, DeferredIndex):
            if lhs_target == "u" and op != "copy_rhs":
                lhs_data = gidx.extend(lhs_data)
            if rhs_target == "u" and op != "copy_lhs":
                rhs_data = gidx.extend(rhs_data)
            result = original(gidx.index, op, lhs_data, rhs_data, lhs_target, rhs_target)
            gidx.note_edge_result(result)
            return result
        return original(gidx, op, lhs_data, rhs_data, lhs_target, rhs_target)

    return gsddmm_internal


def _wrap_edge_softmax(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(original)
    def edge_softmax_internal(gidx: Any, logits: Any, eids: Any = "__ALL__", norm_by: str = "dst") -> Tensor:
        if isinstance(gidx, DeferredIndex):
            if norm_by != "dst":
                raise BlockError(
                    f"edge_softmax on a LayerBlock must have norm_by='dst' (got {norm_by!r}): the out-edges of a "
                    f"source lie on several ranks."
                )
            result = original(gidx.index, logits, eids, norm_by)
            gidx.note_edge_result(result)
            return result
        return original(gidx, logits, eids, norm_by)

    return edge_softmax_internal


def _wrap_edge_weight_norm(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(original)
    def forward(self: Any, graph: Any, edge_weight: Tensor) -> Tensor:
        if _is_layer_block(graph):
            normalised: Tensor = graph.normalise_edge_weights(edge_weight, norm=self._norm, eps=self._eps)
            return normalised
        return original(self, graph, edge_weight)

    return forward


def _reject(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward(self: Any, graph: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_layer_block(graph):
            raise BlockError(
                f"{type(self).__name__} does not work on blocks, in stock DGL neither: it treats sources and "
                f"destinations as one set, or runs several hops on one graph. Use a layer that accepts blocks: SGConv, "
                f"APPNP and TAGConv can be written as several one-hop layers such as GraphConv(weight=False), one "
                f"block each."
            )
        return original(self, graph, *args, **kwargs)

    return forward


_NOT_ON_BLOCKS = (
    "APPNPConv",
    "AtomicConv",
    "ChebConv",
    "DGNConv",
    "EGNNConv",
    "GCN2Conv",
    "GatedGCNConv",
    "GatedGraphConv",
    "PNAConv",
    "SGConv",
    "TAGConv",
    "TWIRLSConv",
    "TWIRLSUnfoldingAndAttention",
)

# (module or class, attribute, wrapper). The modules of `dgl.ops` are shadowed by functions of the same names.
_TARGETS: tuple[tuple[Any, str, Callable[[Any], Any]], ...] = (
    (sys.modules["dgl.ops.spmm"], "gspmm_internal", _wrap_gspmm),
    (sys.modules["dgl.ops.sddmm"], "gsddmm_internal", _wrap_gsddmm),
    (sys.modules["dgl.ops.edge_softmax"], "edge_softmax_internal", _wrap_edge_softmax),
    (graphconv.EdgeWeightNorm, "forward", _wrap_edge_weight_norm),
    *((getattr(dgl.nn.pytorch.conv, name), "forward", _reject) for name in _NOT_ON_BLOCKS),
)
_originals: list[Any] = []


def install() -> None:
    """Wraps DGL's functions; a second call does nothing."""
    if not _originals:
        for owner, name, wrap in _TARGETS:
            original = getattr(owner, name)
            _originals.append(original)
            setattr(owner, name, wrap(original))


def remove() -> None:
    """Puts DGL's own functions back."""
    for (owner, name, _), original in zip(_TARGETS, _originals, strict=False):
        setattr(owner, name, original)
    _originals.clear()
