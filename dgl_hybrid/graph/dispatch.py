# SPDX-License-Identifier: Apache-2.0
"""Lets DGL functions that bypass a graph's frames (`dgl.ops.*`, `EdgeWeightNorm`) work on a `LayerBlock`, and modules
that believe what held for the whole graph alone (`TypedLinear`).

`dgl.ops.gspmm(graph, ..., x)` takes the operand directly and hands `graph._graph` to the backend. A `LayerBlock`
answers `_graph` with a `DeferredIndex`; the routing of `dgl_hybrid.ops` gives it the call, it completes the source
operand by an exchange and goes on with the real index. Every other graph goes to the original function untouched.
`remove()` puts the originals back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from dgl_hybrid.compat.hook_set import Hook, HookSet
from dgl_hybrid.errors import BlockError, CompatError
from dgl_hybrid.graph.untraced import untraced
from dgl_hybrid.ops import routing

_TARGETS = {"src": "u", "edge": "e", "dst": "v"}


@untraced("gspmm", "gsddmm", "edge_softmax")
class DeferredIndex(routing.IndexStandIn):
    """Stands for the index of a block whose source operands still lack their received rows."""

    def __init__(
        self, index: Any, extend: Callable[[Tensor], Tensor], note_edge_result: Callable[[Tensor], None]
    ) -> None:
        self.index = index
        self.extend = extend
        self.note_edge_result = note_edge_result

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["index"], name)

    def gspmm(self, proceed: Callable[..., Tensor], op: str, reduce_op: str, lhs_data: Any, rhs_data: Any) -> Tensor:
        if op != "copy_rhs":
            lhs_data = self.extend(lhs_data)
        if reduce_op in ("max", "min") and self.index.num_edges(0) == 0:
            # What DGL answers for a vertex without in-edges; its own backward fails for messages without rows.
            empty = proceed(self.index, op, "sum", lhs_data, rhs_data)
            return empty + (float("-inf") if reduce_op == "max" else float("inf"))
        return proceed(self.index, op, reduce_op, lhs_data, rhs_data)

    def gsddmm(
        self, proceed: Callable[..., Tensor], op: str, lhs_data: Any, rhs_data: Any, lhs_target: str, rhs_target: str
    ) -> Tensor:
        # DGL knows them by two names each, but takes those of the longer kind for edges in its backward.
        lhs_target, rhs_target = (_TARGETS.get(target, target) for target in (lhs_target, rhs_target))
        if lhs_target == "u" and op != "copy_rhs":
            lhs_data = self.extend(lhs_data)
        if rhs_target == "u" and op != "copy_lhs":
            rhs_data = self.extend(rhs_data)
        result = proceed(self.index, op, lhs_data, rhs_data, lhs_target, rhs_target)
        self.note_edge_result(result)
        return result

    def edge_softmax(self, proceed: Callable[..., Tensor], logits: Any, eids: Any, norm_by: str) -> Tensor:
        if norm_by != "dst":
            raise BlockError(
                f"edge_softmax on a LayerBlock must have norm_by='dst' (got {norm_by!r}): the out-edges of a "
                f"source lie on several ranks."
            )
        result = proceed(self.index, logits, eids, norm_by)
        self.note_edge_result(result)
        return result


def _is_layer_block(graph: Any) -> bool:
    # Not by its `_graph`: who looks at that is about to read the block's edges.
    return hasattr(type(graph), "normalise_edge_weights")


def _edge_weight_norm(original: Callable[..., Tensor], self: Any, graph: Any, edge_weight: Tensor) -> Tensor:
    if _is_layer_block(graph):
        normalised: Tensor = graph.normalise_edge_weights(edge_weight, norm=self._norm, eps=self._eps)
        return normalised
    return original(self, graph, edge_weight)


def _typed_linear(
    original: Callable[..., Tensor], self: Any, x: Tensor, x_type: Tensor, sorted_by_type: bool = False
) -> Tensor:
    # Rows of a block are in the order of levels and edges in that of destinations, so types that are sorted on the
    # whole graph (`presorted=True` of RelGraphConv and HGTConv) are not here, and rows would go to the matrices of
    # other types. Sorting only saves time, so the word is taken where it is true. Ranks need not agree on that.
    is_sorted = sorted_by_type and bool((x_type[1:] >= x_type[:-1]).all())
    return original(self, x, x_type, is_sorted)


def _reject(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    if any(_is_layer_block(value) for value in (*args, *kwargs.values())):
        name = type(self).__name__
        why = _REASONS.get(
            name,
            "it treats sources and destinations as one set, or runs several hops on one graph. Use a layer that "
            "accepts blocks: SGConv, APPNP and TAGConv can be written as several one-hop layers such as "
            "GraphConv(weight=False), one block each",
        )
        raise BlockError(f"{name} does not work on blocks, in stock DGL neither: {why}.")
    return original(self, *args, **kwargs)


# Class -> parameters of its forward.
_NOT_ON_BLOCKS = {
    "APPNPConv": "self graph feat edge_weight",
    "AtomicConv": "self graph feat distances",
    "ChebConv": "self graph feat lambda_max",
    "DGNConv": "self graph node_feat edge_feat eig_vec",
    "EGNNConv": "self graph node_feat coord_feat edge_feat",
    "GCN2Conv": "self graph feat feat_0 edge_weight",
    "GatedGCNConv": "self graph feat edge_feat",
    "GatedGraphConv": "self graph feat etypes",
    "GroupRevRes": "self g x args",
    "PNAConv": "self graph node_feat edge_feat",
    "SGConv": "self graph feat edge_weight",
    "TAGConv": "self graph feat edge_weight",
    "TWIRLSConv": "self graph feat",
    "TWIRLSUnfoldingAndAttention": "self g X",
}

_REASONS = {
    "GroupRevRes": "it adds what its layers return, a row for each destination, to its input, a row for each source, "
    "and computes the input from the output again. Add the layer's result to `x[: block.num_dst_nodes()]` yourself, "
    "with torch.utils.checkpoint around the layer to save memory"
}
"""Why not, and what to use, where it is not what the others say."""

_CONVS = "dgl.nn.pytorch.conv"
_hooks = HookSet(
    (
        Hook(
            module=f"{_CONVS}.graphconv",
            name="EdgeWeightNorm.forward",
            parameters="self graph edge_weight",
            action=_edge_weight_norm,
        ),
        Hook(
            module="dgl.nn.pytorch.linear",
            name="TypedLinear.forward",
            parameters="self x x_type sorted_by_type",
            action=_typed_linear,
        ),
        *(
            Hook(module=_CONVS, name=f"{name}.forward", parameters=parameters, action=_reject)
            for name, parameters in _NOT_ON_BLOCKS.items()
        ),
    )
)


def install() -> None:
    """Puts hooks around DGL's functions; a second call does nothing.

    Raises:
        CompatError: A function of DGL is not as expected; nothing is installed then.
    """
    _hooks.install()
    try:
        routing.serve_blocks(True)
    except CompatError:
        _hooks.remove()
        raise


def remove() -> None:
    """Puts DGL's own functions back, those of `dgl.ops` too unless `route_ops("all")` was called."""
    _hooks.remove()
    routing.serve_blocks(False)
