# SPDX-License-Identifier: Apache-2.0
"""The ops as functions: natural shapes in, checked, brought to canonical ones, and results brought back.

All are differentiable, run on CPU and CUDA (and under `torch.compile` without graph breaks), work with empty graphs
and empty features, take non-contiguous operands and modify nothing. Two calls with the same operands agree bit by bit.
Shape letters: S sources, N destinations, E edges, `*f`, `*g` any feature shapes; features broadcast as in NumPy.

[Note: dtypes]
float16, bfloat16, float32 and float64; sums of the first two are taken in float32. Operands of two dtypes are promoted
as PyTorch does. Inside `torch.autocast` they are brought to its dtype instead, as for a matrix product: these ops too
multiply and add, and accumulate in float32 anyway; an operand that comes alone keeps its dtype.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from dgl_hybrid.ops import library
from dgl_hybrid.ops.backend import EdgeOp, Target
from dgl_hybrid.ops.edge_dropout import EdgeDropout
from dgl_hybrid.ops.operands import broadcast_features, dot_features, expanded, plan_weighted
from dgl_hybrid.ops.sparse_graph import SparseGraph
from dgl_hybrid.ops.unseen import unseen

Reduction = Literal["sum", "mean", "max", "min"]

_HALVES = (torch.float16, torch.bfloat16)
_DTYPES = (torch.float32, torch.float64, *_HALVES)


@unseen
def spmm(graph: SparseGraph, x: Tensor | None = None, w: Tensor | None = None, reduce: Reduction = "sum") -> Tensor:
    """Reduces over the in-edges (u, v) of each destination the products x[u] * w[e], or one of the two alone.

    Args:
        graph: Structure of S sources, N destinations and E edges, on the device of the operands.
        x: (S, *f) floating: rows of the sources; None: the edge rows `w` themselves are reduced.
        w: (E, *g), whose features broadcast with `*f`: edge weights; None: each source row counts as it is.
        reduce: "mean" divides the sum by the number of in-edges. Of equal largest (smallest) products the first
            in-edge gets the gradient; a NaN wins.
    Returns:
        (N, *out), `*out` the broadcast features; destinations without in-edges get 0.
    Raises:
        ValueError: Neither operand, rows or features that do not fit, another device, an unknown reduction.
        TypeError: Operands that are not floating.
    """
    _check_choice("reduce", reduce, Reduction)
    if x is not None:
        _check_operand("x", x, graph, "u")
    if w is not None:
        _check_operand("w", w, graph, "e")
    if x is None and w is None:
        raise ValueError("spmm needs x, w or both (got neither)")
    if reduce == "mean":
        return _mean(graph, x, w)

    if x is None:
        assert w is not None
        out = _spmm(graph, None, w.reshape(w.shape[0], w.shape[1:].numel()), reduce)
        return out.reshape(graph.num_dst, *w.shape[1:])
    if w is None:
        out = _spmm(graph, x.reshape(x.shape[0], 1, x.shape[1:].numel()), None, reduce)
        return out.reshape(graph.num_dst, *x.shape[1:])
    plan = plan_weighted(tuple(x.shape[1:]), tuple(w.shape[1:]))
    if plan is None:
        raise ValueError(_no_broadcast("x", x, "w", w))
    x, w = _same_dtype(x, w)
    return plan.result(_spmm(graph, plan.sources(x), plan.weights(w), reduce))


@unseen
def sddmm(
    graph: SparseGraph,
    op: EdgeOp,
    lhs: Tensor,
    rhs: Tensor | None = None,
    lhs_target: Target = "u",
    rhs_target: Target = "v",
) -> Tensor:
    """Combines two operands along each edge (u, v).

    Args:
        graph: Structure of S sources, N destinations and E edges, on the device of the operands.
        op: "add", "sub", "mul", "div" elementwise; "dot": products summed over the last feature dimension; "copy":
            `lhs` alone, `rhs` None.
        lhs: (S, *f), (N, *f) or (E, *f) floating, as `lhs_target` says.
        rhs: Likewise with features `*g` that broadcast with `*f`; for "dot" the last sizes are equal.
        lhs_target: Whose rows `lhs` has: sources "u", destinations "v" or edges "e".
        rhs_target: Likewise of `rhs`.
    Returns:
        (E, *out): the broadcast features; for "dot" the last is 1.
    Raises:
        ValueError: Rows or features that do not fit, a missing or spare operand, another device, an unknown op.
        TypeError: Operands that are not floating.
    """
    _check_choice("op", op, EdgeOp)
    _check_choice("lhs_target", lhs_target, Target)
    _check_choice("rhs_target", rhs_target, Target)
    if (rhs is None) != (op == "copy"):
        raise ValueError(
            f"sddmm {op!r} takes {'one operand' if op == 'copy' else 'two operands'} (got rhs {_shape(rhs)})"
        )
    _check_operand("lhs", lhs, graph, lhs_target)
    if rhs is None:
        features = tuple(lhs.shape[1:])
        out = _sddmm(graph, op, lhs.reshape(lhs.shape[0], 1, lhs.shape[1:].numel()), None, lhs_target, rhs_target)
        return out.reshape(graph.num_edges, *features)
    _check_operand("rhs", rhs, graph, rhs_target)
    lhs_features, rhs_features = tuple(lhs.shape[1:]), tuple(rhs.shape[1:])
    if op == "dot":
        found = dot_features(lhs_features, rhs_features)
        width = (*lhs_features, 1)[-2 if lhs_features else -1]
    else:
        found, width = broadcast_features(lhs_features, rhs_features), 1
    if found is None:
        raise ValueError(_no_broadcast("lhs", lhs, "rhs", rhs))
    full = (*found[:-1], width) if op == "dot" else found
    lhs, rhs = (expanded(operand, full) for operand in _same_dtype(lhs, rhs))
    # A dot keeps its leading dimensions as heads; elementwise ops know one head only.
    shape = (math.prod(full[:-1]), width) if op == "dot" else (1, math.prod(full))
    lhs, rhs = lhs.reshape(lhs.shape[0], *shape), rhs.reshape(rhs.shape[0], *shape)
    out = _sddmm(graph, op, lhs, rhs, lhs_target, rhs_target)
    return out.reshape(graph.num_edges, *found)


@unseen
def edge_softmax(graph: SparseGraph, logits: Tensor) -> Tensor:
    """Softmax over the in-edges of each destination, separately for every feature.

    Args:
        graph: Structure of S sources, N destinations and E edges, on the device of the operands.
        logits: (E, *f) floating.
    Returns:
        (E, *f), same dtype.
    Raises:
        ValueError: Not one row per edge, or another device.
        TypeError: Not floating.
    """
    _check_operand("logits", logits, graph, "e")
    flat = logits.reshape(logits.shape[0], logits.shape[1:].numel())
    out: Tensor = torch.ops.dgl_hybrid.edge_softmax(graph.in_edges.tensors(), flat)
    return out.reshape(logits.shape)


@unseen
def gat(
    graph: SparseGraph,
    x: Tensor,
    el: Tensor,
    er: Tensor,
    *,
    negative_slope: float = 0.2,
    dropout: EdgeDropout | None = None,
) -> Tensor:
    """One graph-attention layer without its linear map: weighted sums of source rows, nothing per edge kept.

    The weight of edge (u, v) in head h is the softmax over the in-edges of v of leaky_relu(el[u, h] + er[v, h]).
    Differentiable once: a second derivative raises RuntimeError.

    Args:
        graph: Structure of S sources, N destinations and E edges, on the device of the operands.
        x: (S, H, *f) floating.
        el: (S, H) or (S, H, 1) floating: what a source adds to the logits.
        er: (N, H) or (N, H, 1) floating: what a destination adds.
        negative_slope: Of the leaky ReLU.
        dropout: Drops weights after the softmax; None in evaluation.
    Returns:
        (N, H, *f) in the dtype of `x`; the weights are computed in float32 or better.
    Raises:
        ValueError: Rows, heads or dropout keys that do not fit, or another device.
        TypeError: Operands that are not floating.
    """
    _check_heads("x", x, graph, "u")
    num_heads = x.shape[1]
    _check_operand("el", el, graph, "u")
    _check_operand("er", er, graph, "v")
    for name, part in (("el", el), ("er", er)):
        if part.dim() not in (2, 3) or part.shape[1] != num_heads or part.shape[2:].numel() != 1:
            raise ValueError(
                f"{name} must be ({part.shape[0]}, {num_heads}) for x of shape {tuple(x.shape)}: one number per row "
                f"and head (got {tuple(part.shape)})"
            )
    sum_dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    el, er = (part.reshape(part.shape[0], num_heads).to(sum_dtype) for part in (el, er))
    flat = x.reshape(x.shape[0], num_heads, x.shape[2:].numel())
    is_recorded = torch.is_grad_enabled() and any(operand.requires_grad for operand in (flat, el, er))
    out: Tensor
    out, *_ = torch.ops.dgl_hybrid.gat(
        graph.in_edges.tensors(),
        _out_edges_for(graph, x, el, er),
        flat,
        el,
        er,
        float(negative_slope),
        *_dropout_for(graph, dropout),
        is_recorded,
    )
    return out.reshape(graph.num_dst, num_heads, *x.shape[2:])


@unseen
def gatv2(
    graph: SparseGraph,
    x_src: Tensor,
    x_dst: Tensor,
    attention: Tensor,
    *,
    negative_slope: float = 0.2,
    dropout: EdgeDropout | None = None,
) -> Tensor:
    """One GATv2 layer without its linear maps: weighted sums of source rows, nothing of size E * H * D kept.

    The weight of edge (u, v) in head h is the softmax over the in-edges of v of the sum over d of
    attention[h, d] * leaky_relu(x_src[u, h, d] + x_dst[v, h, d]). Differentiable once, as `gat`.

    Args:
        graph: Structure of S sources, N destinations and E edges, on the device of the operands.
        x_src: (S, H, D) floating.
        x_dst: (N, H, D) floating.
        attention: (H, D) or (1, H, D) floating.
        negative_slope: Of the leaky ReLU.
        dropout: Drops weights after the softmax; None in evaluation.
    Returns:
        (N, H, D).
    Raises:
        ValueError: Rows, features or dropout keys that do not fit, or another device.
        TypeError: Operands that are not floating.
    """
    _check_heads("x_src", x_src, graph, "u")
    _check_operand("x_dst", x_dst, graph, "v")
    _check_floating("attention", attention, graph)
    if x_src.dim() != 3 or x_dst.shape[1:] != x_src.shape[1:]:
        raise ValueError(
            f"x_src and x_dst must be (S, H, D) and (N, H, D) (got {tuple(x_src.shape)} and {tuple(x_dst.shape)})"
        )
    if attention.shape not in (x_src.shape[1:], (1, *x_src.shape[1:])):
        raise ValueError(
            f"attention must be {tuple(x_src.shape[1:])} for x_src of shape {tuple(x_src.shape)} "
            f"(got {tuple(attention.shape)})"
        )
    x_src, x_dst, attention = _same_dtype(x_src, x_dst, attention)
    out: Tensor
    out, _ = torch.ops.dgl_hybrid.gatv2(
        graph.in_edges.tensors(),
        _out_edges_for(graph, x_src, x_dst, attention),
        x_src,
        x_dst,
        attention.reshape(x_src.shape[1:]),
        float(negative_slope),
        *_dropout_for(graph, dropout),
    )
    return out


@unseen
def segment_reduce(offsets: Tensor, x: Tensor, reduce: Reduction = "sum") -> Tensor:
    """Reduces consecutive rows: segment n holds the rows offsets[n] to offsets[n + 1].

    Args:
        offsets: (N + 1,) int32 or int64 from 0 to M, never falling (the ends are checked on CPU only).
        x: (M, *f) floating, on the same device.
        reduce: As in `spmm`.
    Returns:
        (N, *f); empty segments get 0.
    Raises:
        ValueError: Offsets that do not cover the rows, another device, an unknown reduction.
        TypeError: Offsets that are not integers, rows that are not floating.
    """
    _check_choice("reduce", reduce, Reduction)
    if offsets.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"offsets must be int32 or int64 (got {offsets.dtype})")
    if offsets.dim() != 1 or len(offsets) == 0:
        raise ValueError(f"offsets must be (number of segments + 1,) (got shape {tuple(offsets.shape)})")
    if x.dtype not in _DTYPES:
        raise TypeError(f"x must be floating (got {x.dtype})")
    if x.dim() == 0 or x.device != offsets.device:
        raise ValueError(
            f"x must have rows, on the device of offsets, {offsets.device} (got shape {tuple(x.shape)} on {x.device})"
        )
    # Reading values would stop a GPU, and cannot be traced.
    if offsets.device.type == "cpu" and not torch.compiler.is_compiling():
        first, last = int(offsets[0]), int(offsets[-1])
        if first != 0 or last != x.shape[0]:
            raise ValueError(f"offsets must go from 0 to the number of rows, {x.shape[0]} (got {first} to {last})")
    num_segments, features = offsets.shape[0] - 1, x.shape[1:]
    flat = x.reshape(x.shape[0], features.numel())
    out: Tensor
    if reduce in ("max", "min"):
        out, _ = torch.ops.dgl_hybrid.segment_select(offsets, flat, reduce)
    elif reduce == "mean":
        wide = flat.float() if x.dtype == torch.float16 else flat
        out = _divided(torch.ops.dgl_hybrid.segment_sum(offsets, wide), offsets, x.dtype)
    else:
        out = torch.ops.dgl_hybrid.segment_sum(offsets, flat)
    return out.reshape(num_segments, *features)


def _mean(graph: SparseGraph, x: Tensor | None, w: Tensor | None) -> Tensor:
    operands = [operand for operand in (x, w) if operand is not None]
    dtype = _common_dtype(*operands)
    # A sum of many float16 rows may be out of its range although their mean is not.
    wide = torch.float32 if dtype == torch.float16 else dtype
    total = spmm(graph, None if x is None else x.to(wide), None if w is None else w.to(wide), "sum")
    return _divided(total, graph.in_edges.indptr, dtype)


def _divided(total: Tensor, indptr: Tensor, dtype: torch.dtype) -> Tensor:
    """Divides each row by its number of entries; counts up to 2**24 are exact also for the half precisions."""
    counts = indptr.diff().clamp(min=1).to(torch.float32 if dtype in _HALVES else dtype)
    return (total / counts.view(-1, *[1] * (total.dim() - 1))).to(dtype)


def _spmm(graph: SparseGraph, x: Tensor | None, w: Tensor | None, reduce: Reduction) -> Tensor:
    out: Tensor
    rows, out_rows = graph.in_edges.tensors(), _out_edges_for(graph, x, of_edges=w is not None or reduce != "sum")
    if reduce == "sum":
        out = torch.ops.dgl_hybrid.spmm_sum(rows, out_rows, x, w)
    else:
        out, _ = torch.ops.dgl_hybrid.spmm_select(rows, out_rows, x, w, reduce)
    return out


def _sddmm(
    graph: SparseGraph, op: EdgeOp, lhs: Tensor, rhs: Tensor | None, lhs_target: Target, rhs_target: Target
) -> Tensor:
    sources = [operand for operand, target in ((lhs, lhs_target), (rhs, rhs_target)) if target == "u"]
    out: Tensor = torch.ops.dgl_hybrid.sddmm(
        graph.in_edges.tensors(), _out_edges_for(graph, *sources), lhs, rhs, op, lhs_target, rhs_target
    )
    return out


@unseen
def scaled_sum(graph: SparseGraph, x: Tensor, factors: Tensor, *, of_sources: bool) -> Tensor:
    """Sums sources over the in-edges of each destination, sources or sums times a factor each, in one pass.

    Args:
        graph: Structure of S sources, N destinations and E edges, on the device of the operands.
        x: (S, *f) floating.
        factors: (S,) or (S, 1) of x's dtype where they are the sources', (N,) or (N, 1) where they are the sums';
            without gradients.
        of_sources: Which of the two.
    Returns:
        (N, *f).
    Raises:
        ValueError: Rows or factors that do not fit, or another device.
        TypeError: Operands that are not floating.
    """
    _check_operand("x", x, graph, "u")
    _check_operand("factors", factors, graph, "u" if of_sources else "v")
    if factors.shape[1:].numel() != 1 or factors.dtype != x.dtype:
        raise ValueError(
            f"factors must be one {x.dtype} for each row (got {tuple(factors.shape)} {factors.dtype}): scale rows by "
            f"anything else before or after `spmm`"
        )
    flat = x.reshape(len(x), 1, x.shape[1:].numel())
    summed: Tensor = torch.ops.dgl_hybrid.scaled_sum(
        graph.in_edges.tensors(), _out_edges_for(graph, x, of_edges=False), flat, factors.reshape(-1), of_sources
    )
    return summed.reshape(graph.num_dst, *x.shape[1:])


def _out_edges_for(graph: SparseGraph, *operands: Tensor | None, of_edges: bool = True) -> list[Tensor]:
    """The edges by source if a gradient of these operands, which it sums over them, will be asked for; else none.

    Args:
        of_edges: The gradient has a term or a choice of each edge, so it must know which is which.
    """
    needed = torch.is_grad_enabled() and any(operand is not None and operand.requires_grad for operand in operands)
    if not needed:
        return []
    if of_edges:
        return graph.out_edges.tensors()
    # Never the edge of each entry, whether it is known or not: a checkpoint that repeats the forward once it is must
    # save as many tensors as before.
    return graph.out_neighbours.tensors()[:2]


def _dropout_for(graph: SparseGraph, dropout: EdgeDropout | None) -> tuple[float, Tensor | None, Tensor | None]:
    if dropout is not None and dropout.edge_keys is not None:
        if len(dropout.edge_keys) != graph.num_edges:
            raise ValueError(
                f"dropout needs one key per edge, {graph.num_edges} (got {len(dropout.edge_keys)} edge_keys)"
            )
        _check_device("edge_keys", dropout.edge_keys, graph)
    return library.pack_dropout(dropout)


def _common_dtype(*operands: Tensor) -> torch.dtype:
    """The note's rule."""
    dtype = operands[0].dtype
    for operand in operands[1:]:
        dtype = torch.promote_types(dtype, operand.dtype)
    if any(operand.dtype != dtype for operand in operands) and dtype != torch.float64:
        device_type = operands[0].device.type
        if torch.is_autocast_enabled(device_type):
            return torch.get_autocast_dtype(device_type)
    return dtype


def _same_dtype(*operands: Tensor) -> list[Tensor]:
    dtype = _common_dtype(*operands)
    return [operand.to(dtype) for operand in operands]


def _check_operand(name: str, operand: Tensor, graph: SparseGraph, target: Target) -> None:
    _check_floating(name, operand, graph)
    counts = {"u": graph.num_src, "v": graph.num_dst, "e": graph.num_edges}
    if operand.dim() == 0 or operand.shape[0] != counts[target]:
        role = {"u": "source", "v": "destination", "e": "edge"}[target]
        raise ValueError(f"{name} must have one row per {role}, {counts[target]} (got shape {tuple(operand.shape)})")


def _check_heads(name: str, x: Tensor, graph: SparseGraph, target: Target) -> None:
    _check_operand(name, x, graph, target)
    if x.dim() < 3:
        raise ValueError(f"{name} must be (rows, heads, features) (got shape {tuple(x.shape)})")


def _check_floating(name: str, operand: Tensor, graph: SparseGraph) -> None:
    if operand.dtype not in _DTYPES:
        raise TypeError(f"{name} must be float16, bfloat16, float32 or float64 (got {operand.dtype})")
    _check_device(name, operand, graph)


def _check_device(name: str, operand: Tensor, graph: SparseGraph) -> None:
    if operand.device != graph.device:
        raise ValueError(
            f"{name} must lie on the device of the graph, {graph.device} (got {operand.device}): move one of them with "
            f".to()"
        )


def _check_choice(name: str, value: str, choices: object) -> None:
    allowed = get_args(choices)
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)} (got {value!r})")


def _no_broadcast(left_name: str, left: Tensor, right_name: str, right: Tensor) -> str:
    return (
        f"features of {left_name} and {right_name} must broadcast after the rows (got {left_name} {tuple(left.shape)} "
        f"and {right_name} {tuple(right.shape)})"
    )


def _shape(operand: Tensor | None) -> str:
    return "None" if operand is None else str(tuple(operand.shape))
