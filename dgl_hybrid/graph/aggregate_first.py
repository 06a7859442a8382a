# SPDX-License-Identifier: Apache-2.0
"""Forwards of `GraphConv`, `SAGEConv` and `GINConv` that aggregate before they transform, where that can be kept.

DGL's layers multiply by the weight first where that makes rows narrower, since fewer numbers are then gathered. On the
first layer of a loader's blocks, what is gathered are raw features: their (normalised) sum is the same in every epoch.
Aggregated first it is made once, and from then on the layer is one product: no exchange, no pass over the edges. Sums
and means are linear, so the order makes no difference but in rounding.

Every other layer, on a loader's block, does its products in fewer passes: first where they make rows narrower (DGL's
order, but for `GINConv`, whose function is not known to begin with a product) or, where the plan says that this is
cheaper (`planner/order.py`), after the sum.

Everything else, and all of plain DGL's graphs, goes to DGL's own forward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any

import dgl.nn as dglnn
import torch
import torch.nn.functional as F
from dgl import function as fn
from torch import Tensor, nn
from torch.nn.utils import parametrize

from dgl_hybrid.graph.layer_block import LayerBlock
from dgl_hybrid.graph.products_beside import ProductsBeside
from dgl_hybrid.graph.row_products import (
    are_plain,
    is_relu,
    narrowed_rows,
    product,
    rows_and_first,
    sum_of_products,
    vector_columns,
)
from dgl_hybrid.graph.split_exchange import Scale
from dgl_hybrid.graph.static_results import Rows, sparse_or_dense
from dgl_hybrid.graph.watched_modules import is_watched
from dgl_hybrid.ops import SparseRows
from dgl_hybrid.ops.op_counts import count

_REDUCES: Mapping[str, Callable[..., Any]] = MappingProxyType({"sum": fn.sum, "mean": fn.mean})
"""Of `GINConv`, where the sum of products is the product of the sum."""

_EXACT = (torch.float32, torch.float64)
"""Of whose sums nothing is lost if they are rounded before they are divided."""


def forward_graphconv(
    self: Any, graph: Any, feat: Any, weight: Tensor | None = None, edge_weight: Tensor | None = None
) -> Any:
    """`dgl.nn.GraphConv.forward`: same arguments, same result."""
    if not isinstance(graph, LayerBlock):
        return dglnn.GraphConv.forward(self, graph, feat, weight, edge_weight)
    # Each time that a parametrized weight is read it is made: once a forward, as in DGL's.
    with parametrize.cached() if parametrize.is_parametrized(self) else nullcontext():
        return _forward_graphconv_on(self, graph, feat, weight, edge_weight)


def _forward_graphconv_on(
    self: Any, graph: LayerBlock, feat: Any, weight: Tensor | None, edge_weight: Tensor | None
) -> Any:
    operands = _static_operands(graph, feat, edge_weight)
    both_weights = weight is not None and self.weight is not None
    matrix = self.weight if weight is None else weight
    is_plain = not operands and _multiplies(matrix, graph, feat, edge_weight)
    is_ours = (operands or is_plain) and not both_weights
    if not is_ours or (not self._allow_zero_in_degree and graph.has_empty_rows):
        return dglnn.GraphConv.forward(self, graph, feat, weight, edge_weight)
    if is_plain:
        return _forward_plain_graphconv(self, graph, feat, matrix)

    is_product = matrix is not None and matrix.dtype == feat.dtype

    def aggregate() -> Rows:
        x = feat
        if self._norm in ("left", "both"):
            x = x * _degree_factors(graph, x, self._norm, of_sources=True)
        x = _sum(graph, x, edge_weight)
        if self._norm in ("right", "both"):
            x = x * _degree_factors(graph, x, self._norm, of_sources=False)
        return sparse_or_dense(x) if is_product else x

    rst: Any = graph.keep(("graphconv", self._norm, edge_weight is not None, is_product), operands, aggregate)
    count("graphconv", "ours: kept aggregate")
    if matrix is not None:
        return _multiply(self, rst, matrix)
    # Not the kept rows themselves: an activation or the model may write into what a layer returns.
    rst = rst.clone() if self.bias is None else rst + self.bias
    return self._activation(rst) if self._activation is not None else rst


def _multiply(self: Any, rows: Rows, weight: Tensor, factors: Tensor | None = None) -> Any:
    """Ends a `GraphConv`: product, times what the sums are divided by, bias, activation."""
    if is_relu(self._activation):
        return product(rows, weight, self.bias, factors=factors, relu=True)
    rst = product(rows, weight, self.bias, factors=factors)
    return self._activation(rst) if self._activation is not None else rst


def _multiplies(weight: Tensor | None, graph: Any, feat: Any, edge_weight: Tensor | None) -> bool:
    """Whether these are rows of a loader's block that are summed without weights and multiplied."""
    return (
        isinstance(graph, LayerBlock)
        and isinstance(feat, Tensor)
        and weight is not None
        and edge_weight is None
        and feat.dim() == weight.dim() == 2
        and weight.dtype == feat.dtype
        and not torch.is_autocast_enabled(feat.device.type)
    )


def _forward_plain_graphconv(self: Any, graph: LayerBlock, feat: Tensor, weight: Tensor) -> Any:
    num_columns = weight.shape[1]
    if graph.sums_before_product(is_narrower=num_columns < weight.shape[0]):
        # DGL scales these rows, too.
        is_source_scaled = self._norm in ("left", "both")
        of_sources = _degree_factors(graph, feat, self._norm, of_sources=True) if is_source_scaled else None
        count("graphconv", "ours: sum first")  # of narrower rows that is DGL's own order
        # DGL scales the sums; their products are multiplied where they lie in the cache.
        is_scaled = self._norm in ("right", "both")
        factors = _degree_factors(graph, feat, self._norm, of_sources=False) if is_scaled else None
        rst = _product_of_sum(self, graph, feat, weight, of_sources, factors)
        if rst is not None:
            return rst
        rst = _sum(graph, feat, None) if of_sources is None else _scaled_sum(graph, feat, of_sources, of_sources=True)
        return _multiply(self, rst, weight, factors)
    # DGL scales the wide rows, before the product.
    is_scaled = self._norm in ("left", "both")
    factors = _degree_factors(graph, feat, self._norm, of_sources=True) if is_scaled else None
    rows = _narrowed(feat, weight, factors)
    if self._norm not in ("right", "both"):
        rst = _sum(graph, rows, None)[:, :num_columns]
    elif rows.dtype in _EXACT:
        of_sums = _degree_factors(graph, rows, self._norm, of_sources=False)
        rst = _scaled_sum(graph, rows, of_sums, of_sources=False)[:, :num_columns]
    else:
        rst = _sum(graph, rows, None)[:, :num_columns]
        rst = rst * _degree_factors(graph, rst, self._norm, of_sources=False)
    count("graphconv", "ours: fewer passes")
    rst = rst + self.bias if self.bias is not None else rst
    rst = self._activation(rst) if self._activation is not None else rst
    return rst.contiguous()  # of columns without those that were added to them; scripts `view` it


def _product_of_sum(
    self: Any, graph: LayerBlock, x: Tensor, weight: Tensor, of_sources: Tensor | None, of_sums: Tensor | None
) -> Tensor | None:
    """Sums, multiplies and ends a `GraphConv`, with the gradient of the weight beside the exchange; None: not here."""
    if not x.requires_grad or not torch.is_grad_enabled():
        return None
    sums = graph.sums_beside_work(x, flops=2.0 * graph.num_dst_nodes() * weight.numel())
    if sums is None:
        return None
    scale = None if of_sources is None else Scale(of_sources.reshape(-1), of_sources=True)
    relu = is_relu(self._activation)
    rst = ProductsBeside(sums, scale).product(x, weight, self.bias, factors=of_sums, relu=relu)
    return rst if relu or self._activation is None else self._activation(rst)


def forward_sageconv(self: Any, graph: Any, feat: Any, edge_weight: Tensor | None = None) -> Any:
    """`dgl.nn.SAGEConv.forward`: same arguments, same result."""
    operands: tuple[Tensor, ...] = ()
    # With p = 0, or while evaluating, dropout hands back the very tensor.
    drop = self.feat_drop
    is_plain = type(drop) is nn.Dropout and not (drop.training and drop.p > 0) and not is_watched(drop)
    if self._aggre_type in ("mean", "gcn") and is_plain and _is_any_order(self):
        operands = _static_operands(graph, feat, edge_weight)
    if not operands:
        if self._aggre_type in ("mean", "gcn") and _is_plain_sageconv(self, graph, feat, edge_weight):
            forward = _forward_plain_mean if self._aggre_type == "mean" else _forward_plain_gcn
            return forward(self, graph, feat)
        return dglnn.SAGEConv.forward(self, graph, feat, edge_weight)
    num_dst = graph.num_dst_nodes()
    is_mean = self._aggre_type == "mean"
    are_products = _are_products(self, feat)

    def aggregate() -> Rows:
        summed = _sum(graph, feat, edge_weight)
        degrees: Tensor = graph.in_degrees().to(summed).reshape(-1, *(1,) * (summed.dim() - 1))
        mean: Tensor = summed / degrees.clamp(min=1) if is_mean else (summed + feat[:num_dst]) / (degrees + 1)
        return sparse_or_dense(mean) if are_products else mean

    kept: Any = graph.keep(("sageconv", self._aggre_type, edge_weight is not None, are_products), operands, aggregate)
    count("sageconv", "ours: kept aggregate")
    if is_mean and are_products:
        rows = graph.static_results.rows_of(feat, num_dst)
        relu = is_relu(self.activation)
        rst = sum_of_products(rows, self.fc_self, kept, self.fc_neigh, relu=relu)
        return _finish(self, rst, is_activated=relu)
    if is_mean:
        rst = self.fc_self(feat[:num_dst]) + self.fc_neigh(kept)
    else:
        rst = product(kept, self.fc_neigh.weight.t(), None) if are_products else self.fc_neigh(kept)
        rst = rst + self.bias if self.bias is not None else rst
    return _finish(self, rst)


def _is_any_order(self: Any) -> bool:
    """Whether rows may be summed before `fc_neigh` although DGL would sum what it makes of them: a product, no more."""
    layer = self.fc_neigh
    is_product = isinstance(layer, nn.Linear) and type(layer).forward is nn.Linear.forward and layer.bias is None
    is_own = "forward" in vars(layer) or is_watched(layer)
    return self._in_src_feats <= self._out_feats or (is_product and not is_own)


def _are_products(self: Any, feat: Tensor) -> bool:
    """Whether a `SAGEConv` multiplies these rows, or sums of them, by its weights and does nothing else to them."""
    layers = (self.fc_self, self.fc_neigh) if self._aggre_type == "mean" else (self.fc_neigh,)
    return are_plain(layers, feat) and self.fc_neigh.bias is None


def _is_plain_sageconv(self: Any, graph: Any, feat: Any, edge_weight: Tensor | None) -> bool:
    """Whether this is a layer on a loader's block that does nothing but sum and multiply."""
    is_plain = isinstance(graph, LayerBlock) and isinstance(feat, Tensor) and edge_weight is None
    return is_plain and _are_products(self, feat)


def _forward_plain_mean(self: Any, graph: LayerBlock, feat: Tensor) -> Any:
    with graph.local_scope():
        x, num_dst = self.feat_drop(feat), graph.num_dst_nodes()
        is_sum_first = graph.sums_before_product(is_narrower=self._out_feats < self._in_src_feats)
        count("sageconv", "ours: sum first" if is_sum_first else "ours: fewer passes")
        relu = is_sum_first and is_relu(self.activation)
        weight = self.fc_neigh.weight
        # Own rows; where gradients travel theirs, too, and where sums are multiplied that of the weight.
        num_products = 1 + (3 if is_sum_first else 2) * x.requires_grad
        flops = 2.0 * num_products * num_dst * x.shape[1] * self._out_feats
        sums = graph.sums_beside_work(x, *([] if is_sum_first else [weight]), flops=flops)
        if sums is not None:
            scale = Scale(_degree_factors(graph, x, "right", of_sources=False).reshape(-1), of_sources=False)
            layer = ProductsBeside(sums, scale)
            if is_sum_first:
                rst = layer.own_and_product(x, self.fc_neigh, self.fc_self, num_dst, relu=relu)
            else:
                rst = layer.own_and_sum(x, self.fc_neigh, self.fc_self, num_dst)
        elif is_sum_first:
            rows, first = rows_and_first(x, num_dst)
            rst = sum_of_products(first, self.fc_self, _mean(graph, rows), self.fc_neigh, relu=relu)
        else:
            rows, own = narrowed_rows(x, self.fc_neigh, self.fc_self, num_dst)
            rst = own + _mean(graph, rows)[:, : len(weight)]  # which a script may have replaced by a wider one
        return _finish(self, rst, is_activated=relu)


def _mean(graph: LayerBlock, rows: Tensor) -> Tensor:
    """(C, F) to the means over in-edges of the destinations. Collective."""
    if rows.dtype not in _EXACT:
        return _sum(graph, rows, None, fn.mean)
    return _scaled_sum(graph, rows, _degree_factors(graph, rows, "right", of_sources=False), of_sources=False)


def _forward_plain_gcn(self: Any, graph: LayerBlock, feat: Tensor) -> Any:
    x, weight, num_dst = self.feat_drop(feat), self.fc_neigh.weight.t(), graph.num_dst_nodes()
    factors = 1.0 / (graph.in_degrees().to(feat).reshape(-1, 1) + 1)
    if graph.sums_before_product(is_narrower=self._out_feats < self._in_src_feats):
        relu = is_relu(self.activation)
        count("sageconv", "ours: sum first")
        rst = product(_sum(graph, x, None) + x[:num_dst], weight, self.bias, factors=factors, relu=relu)
        return _finish(self, rst, is_activated=relu)
    own, summed = _sum_of_narrowed(graph, x, weight)
    count("sageconv", "ours: fewer passes")
    rst = (summed + own) * factors
    return _finish(self, rst if self.bias is None else rst + self.bias)


def _finish(self: Any, rst: Tensor, *, is_activated: bool = False) -> Any:
    if self.activation is not None and not is_activated:
        rst = self.activation(rst)
    return self.norm(rst) if self.norm is not None else rst


def forward_ginconv(self: Any, graph: Any, feat: Any, edge_weight: Tensor | None = None) -> Any:
    """`dgl.nn.GINConv.forward`: same arguments, same result."""
    is_linear = self._aggregator_type in _REDUCES
    operands = _static_operands(graph, feat, edge_weight) if is_linear else ()
    first, rest = _first_product(self.apply_func)
    first = first if first is not None and isinstance(feat, Tensor) and are_plain((first,), feat) else None
    if operands:
        return _forward_static_ginconv(self, graph, feat, edge_weight, operands, first, rest)
    is_plain = is_linear and isinstance(graph, LayerBlock) and edge_weight is None
    if not is_plain or first is None or graph.sums_before_product(is_narrower=first.out_features < first.in_features):
        return dglnn.GINConv.forward(self, graph, feat, edge_weight)
    own, neigh = _sum_of_narrowed(graph, feat, first.weight.t(), _REDUCES[self._aggregator_type])
    count("ginconv", "ours: fewer passes")
    rst = (1 + self.eps) * own + neigh
    return _finish_ginconv(self, rst if first.bias is None else rst + first.bias, rest)


def _forward_static_ginconv(
    self: Any,
    graph: LayerBlock,
    feat: Tensor,
    edge_weight: Tensor | None,
    operands: tuple[Tensor, ...],
    first: nn.Linear | None,
    rest: Sequence[nn.Module],
) -> Any:
    num_dst = graph.num_dst_nodes()

    def aggregate() -> Rows:
        neigh = _sum(graph, feat, edge_weight, _REDUCES[self._aggregator_type])
        return neigh if first is None else sparse_or_dense(neigh)

    # Without the rows' own part, whose factor may be learned, or set anew, in any epoch.
    key = ("ginconv", self._aggregator_type, edge_weight is not None, first is not None)
    kept: Any = graph.keep(key, operands, aggregate)
    count("ginconv", "ours: kept aggregate")
    if first is None:
        rst = (1 + self.eps) * feat[:num_dst] + kept
        return _finish_ginconv(self, rst if self.apply_func is None else self.apply_func(rst), ())
    weight = first.weight.t()
    if isinstance(kept, SparseRows):
        own = product(graph.static_results.rows_of(feat, num_dst), weight, None)
        return _finish_ginconv(self, product(kept, weight, first.bias, addend=(1 + self.eps) * own), rest)
    relu = bool(rest) and is_relu(rest[0])
    rst = product((1 + self.eps) * feat[:num_dst] + kept, weight, first.bias, relu=relu)
    return _finish_ginconv(self, rst, rest[1:] if relu else rest)


def _first_product(apply_func: Any) -> tuple[nn.Linear | None, tuple[nn.Module, ...]]:
    """Returns the product that a layer's function begins with, if it can be seen, and what comes after it."""
    if type(apply_func) is nn.Linear:
        return apply_func, ()
    if type(apply_func) is nn.Sequential and not is_watched(apply_func) and len(apply_func):
        first, *rest = apply_func
        return (first if type(first) is nn.Linear else None), tuple(rest)
    return None, ()


def _finish_ginconv(self: Any, rst: Tensor, rest: Sequence[nn.Module]) -> Any:
    for module in rest:
        rst = module(rst)
    return rst if self.activation is None else self.activation(rst)


def _static_operands(graph: Any, feat: Any, edge_weight: Tensor | None) -> tuple[Tensor, ...]:
    """Returns what the aggregate is made of, if that is the same in every epoch; else nothing.

    Weights of several numbers an edge are as wide as the rows that DGL's layer sums, which may be those of a product.
    """
    if not isinstance(graph, LayerBlock) or not isinstance(feat, Tensor):
        return ()
    if edge_weight is not None and edge_weight.shape[1:].numel() != 1:
        return ()
    operands = (feat,) if edge_weight is None else (feat, edge_weight)
    return operands if graph.static_results.are_static(operands) else ()


def _degree_factors(graph: LayerBlock, x: Tensor, norm: str, *, of_sources: bool) -> Tensor:
    return graph.degree_factors(norm, x.dtype, of_sources=of_sources).reshape(-1, *(1,) * (x.dim() - 1))


def _narrowed(x: Tensor, weight: Tensor, factors: Tensor | None = None) -> Tensor:
    """Returns `factors * (x @ weight)`, (C, W >= O) with columns of zeros behind where that is faster."""
    padding = vector_columns(weight.shape[1], x.device) - weight.shape[1]
    return product(x, F.pad(weight, (0, padding)) if padding else weight, None, factors=factors)


def _sum_of_narrowed(
    graph: LayerBlock, x: Tensor, weight: Tensor, reduce: Callable[..., Any] = fn.sum
) -> tuple[Tensor, Tensor]:
    """Returns (N, O) of the destinations: their own products, and the sums of their in-neighbours'. Collective."""
    num_columns = weight.shape[1]
    rows = _narrowed(x, weight)
    return rows[: graph.num_dst_nodes(), :num_columns], _sum(graph, rows, None, reduce)[:, :num_columns]


def _scaled_sum(graph: LayerBlock, x: Tensor, factors: Tensor, *, of_sources: bool) -> Tensor:
    """As `_sum`, of rows times a factor each, or times a factor for each sum. Collective."""
    with graph.local_scope():
        graph.srcdata["h"] = x
        return graph.scaled_sum("h", factors, of_sources=of_sources)


def _sum(graph: LayerBlock, x: Tensor, edge_weight: Tensor | None, reduce: Callable[..., Any] = fn.sum) -> Tensor:
    """(C, ...) to the sums (or means) over in-edges of the destinations. Collective."""
    with graph.local_scope():
        graph.srcdata["h"] = x
        message = fn.copy_u("h", "m")
        if edge_weight is not None:
            graph.edata["_edge_weight"] = edge_weight
            message = fn.u_mul_e("h", "_edge_weight", "m")
        graph.update_all(message, reduce("m", "h"))
        summed: Tensor = graph.dstdata["h"]
    return summed
