# SPDX-License-Identifier: Apache-2.0
"""DGL's three message-passing functions through our ops, or the reason why DGL's own must run.

What DGL promises is kept: the result's dtype and shape, broadcasting, -inf (inf) of max (min) for vertices without
in-edges, which `update_all` replaces by zero, the gradient of equal largest values to the first of them, and PyTorch's
autocast. Whatever DGL would complain about is declined, so that its message stays the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from dgl.base import is_all
from torch import Tensor

from dgl_hybrid.ops.backend import EdgeOp, Reduce, Target
from dgl_hybrid.ops.device_index import DeviceIndex
from dgl_hybrid.ops.dgl_index import destinations_without_edges, sparse_graph_of
from dgl_hybrid.ops.functions import edge_softmax, sddmm, spmm
from dgl_hybrid.ops.operands import broadcast_features, dot_features
from dgl_hybrid.ops.sparse_graph import SparseGraph

_Operand = TypeVar("_Operand", Tensor, Tensor | None)

_FLOATING = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_TARGETS: dict[str, Target] = {"u": "u", "v": "v", "e": "e", "src": "u", "dst": "v", "edge": "e"}
_REDUCES: dict[str, Reduce] = {"sum": "sum", "max": "max", "min": "min"}
_EDGE_OPS: dict[str, EdgeOp] = {"add": "add", "sub": "sub", "mul": "mul", "div": "div", "dot": "dot"}


@dataclass(frozen=True, slots=True)
class Declined:
    """Our ops do not do this, or not as DGL does."""

    reason: str
    """A few words, for the counter."""


def routed_spmm(
    index: Any, op: str, reduce_op: str, lhs_data: Tensor | None, rhs_data: Tensor | None
) -> Tensor | Declined:
    """Messages by `op` of sources (lhs) and edges (rhs), reduced into destinations.

    Args:
        index: DGL's index of a graph, or its stand-in.
        op: "copy_lhs", "copy_rhs", "mul" or "div"; anything else is declined, unless DGL cannot run at all.
        reduce_op: "sum", "max" or "min".
        lhs_data: (S, ...), not read by "copy_rhs".
        rhs_data: (E, ...), not read by "copy_lhs".
    """
    reduce = _REDUCES.get(reduce_op)
    if reduce is None:
        return Declined("reducer")
    lhs = None if op == "copy_rhs" else lhs_data
    rhs = None if op == "copy_lhs" else rhs_data
    if op in ("add", "sub"):
        if not isinstance(index, DeviceIndex):
            return Declined("operator")
        messages = routed_sddmm(index, op, lhs, rhs, "u", "e")
        return messages if isinstance(messages, Declined) else routed_spmm(index, "copy_rhs", reduce_op, None, messages)
    if op not in ("copy_lhs", "copy_rhs", "mul", "div"):
        return Declined("operator")
    lhs, rhs = _autocast(lhs), _autocast(rhs)
    graph = _graph_for(index, ((lhs, "u"), (rhs, "e")))
    if isinstance(graph, Declined):
        return graph
    if lhs is not None and rhs is not None:
        if broadcast_features(lhs.shape[1:], rhs.shape[1:]) is None:
            return Declined("shapes do not broadcast")
        if op == "div":
            rhs = rhs.reciprocal()  # as DGL does
    out = spmm(graph, lhs, rhs, reduce)
    if reduce != "sum" and graph.num_edges > 0:  # DGL leaves zeros if there is no edge at all
        rows = destinations_without_edges(index, out.device)
        if rows is not None:
            with torch.no_grad():  # nothing flows back from these rows either way
                out.index_fill_(0, rows, float("-inf") if reduce == "max" else float("inf"))
    return out


def routed_sddmm(
    index: Any, op: str, lhs_data: Tensor | None, rhs_data: Tensor | None, lhs_target: str, rhs_target: str
) -> Tensor | Declined:
    """A row for each edge from the rows of its source ("u"), destination ("v") or itself ("e").

    Args:
        index: DGL's index of a graph, or its stand-in.
        op: "add", "sub", "mul", "div", "dot", "copy_lhs" or "copy_rhs".
        lhs_data: (S | N | E, ...), as `lhs_target` says; not read by "copy_rhs".
        rhs_data: Likewise; not read by "copy_lhs".
        lhs_target: Where the rows of `lhs_data` belong.
        rhs_target: Likewise.
    """
    if lhs_target not in _TARGETS or rhs_target not in _TARGETS:
        return Declined("target")
    left, right = _TARGETS[lhs_target], _TARGETS[rhs_target]
    lhs = None if op == "copy_rhs" else _autocast(lhs_data)
    rhs = None if op == "copy_lhs" else _autocast(rhs_data)
    graph = _graph_for(index, ((lhs, left), (rhs, right)))
    if isinstance(graph, Declined):
        return graph
    if op == "copy_lhs" and lhs is not None:
        return sddmm(graph, "copy", lhs, lhs_target=left)
    if op == "copy_rhs" and rhs is not None:
        return sddmm(graph, "copy", rhs, lhs_target=right)
    if op not in _EDGE_OPS or lhs is None or rhs is None:
        return Declined("operator")
    features = (dot_features if op == "dot" else broadcast_features)(lhs.shape[1:], rhs.shape[1:])
    if features is None:
        return Declined("shapes do not broadcast")
    return sddmm(graph, _EDGE_OPS[op], lhs, rhs, left, right)


def routed_edge_softmax(index: Any, logits: Tensor, eids: Any, norm_by: str) -> Tensor | Declined:
    """Softmax of (E, ...) over the in-edges of each destination, or the out-edges of each source."""
    if not is_all(eids):
        return Declined("some edges only")
    if norm_by not in ("dst", "src"):
        return Declined("norm_by")
    cast = _autocast(logits)
    graph = _graph_for(index, ((cast, "e"),))
    if isinstance(graph, Declined):
        return graph
    return edge_softmax(graph if norm_by == "dst" else graph.reverse(), cast)


def _graph_for(index: Any, operands: Sequence[tuple[Tensor | None, Target]]) -> SparseGraph | Declined:
    """The structure, if our ops can take these operands on it."""
    given = [(tensor, target) for tensor, target in operands if tensor is not None]
    if not given or not all(isinstance(tensor, Tensor) for tensor, _ in given):
        return Declined("no tensor")
    first = given[0][0]
    for tensor, _ in given:
        if tensor.dtype not in _FLOATING:
            return Declined(str(tensor.dtype).removeprefix("torch."))
        if tensor.dtype != first.dtype:
            return Declined("operands of two dtypes")
        if tensor.device != first.device:
            return Declined("operands on two devices")
    graph = sparse_graph_of(index)
    if graph is None:
        return Declined("several edge types")
    if graph.device != first.device:
        return Declined("graph and operands on two devices")
    num_rows = {"u": graph.num_src, "v": graph.num_dst, "e": graph.num_edges}
    if any(tensor.dim() == 0 or tensor.shape[0] != num_rows[target] for tensor, target in given):
        return Declined("number of rows")
    return graph


def _autocast(tensor: _Operand) -> _Operand:
    """Under autocast of its device DGL (`patches/0007`) computes in autocast's dtype: all but float64 is cast."""
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor  # also what is no tensor, of which DGL says that it is none
    kind = tensor.device.type
    if kind not in ("cpu", "cuda") or not torch.is_autocast_enabled(kind):
        return tensor
    return tensor.to(torch.get_autocast_dtype(kind))
