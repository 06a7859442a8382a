# SPDX-License-Identifier: Apache-2.0
"""Forwards of `GraphConv` and `SAGEConv` that aggregate before they transform, where the aggregate can be kept.

DGL's layers multiply by the weight first where that makes rows narrower, since fewer numbers are then gathered. On the
first layer of a loader's blocks, what is gathered are raw features: their (normalised) sum is the same in every epoch.
Aggregated first it is made once, and from then on the layer is one product: no exchange, no pass over the edges. Sums
and means are linear, so the order makes no difference but in rounding.

Everything else, and all of plain DGL's graphs, goes to DGL's own forward.
"""

from __future__ import annotations

from typing import Any

import dgl.nn as dglnn
import torch
from dgl import function as fn
from torch import Tensor, nn

from dgl_hybrid.graph.layer_block import LayerBlock
from dgl_hybrid.ops.op_counts import count


def forward_graphconv(
    self: Any, graph: Any, feat: Any, weight: Tensor | None = None, edge_weight: Tensor | None = None
) -> Any:
    """`dgl.nn.GraphConv.forward`: same arguments, same result."""
    operands = _static_operands(graph, feat, edge_weight)
    both_weights = weight is not None and self.weight is not None
    zero_degree = operands and not self._allow_zero_in_degree and bool((graph.in_degrees() == 0).any())
    if not operands or both_weights or zero_degree:
        return dglnn.GraphConv.forward(self, graph, feat, weight, edge_weight)

    def aggregate() -> Tensor:
        x = feat
        if self._norm in ("left", "both"):
            x = x * _degree_factors(graph.out_degrees(), x, self._norm)
        x = _sum(graph, x, edge_weight)
        if self._norm in ("right", "both"):
            x = x * _degree_factors(graph.in_degrees(), x, self._norm)
        return x

    rst = graph.keep(("graphconv", self._norm, edge_weight is not None), operands, aggregate)
    count("graphconv", "ours: kept aggregate")
    weight = self.weight if weight is None else weight
    if weight is not None:
        rst = torch.matmul(rst, weight)
    if self.bias is not None:
        rst = rst + self.bias
    return self._activation(rst) if self._activation is not None else rst


def forward_sageconv(self: Any, graph: Any, feat: Any, edge_weight: Tensor | None = None) -> Any:
    """`dgl.nn.SAGEConv.forward`: same arguments, same result."""
    operands: tuple[Tensor, ...] = ()
    # With p = 0, or while evaluating, dropout hands back the very tensor.
    is_plain = type(self.feat_drop) is nn.Dropout and not (self.training and self.feat_drop.p > 0)
    if self._aggre_type in ("mean", "gcn") and is_plain:
        operands = _static_operands(graph, feat, edge_weight)
    if not operands:
        return dglnn.SAGEConv.forward(self, graph, feat, edge_weight)
    num_dst = graph.num_dst_nodes()

    def aggregate() -> Tensor:
        summed = _sum(graph, feat, edge_weight)
        degrees: Tensor = graph.in_degrees().to(summed).reshape(-1, *(1,) * (summed.dim() - 1))
        is_gcn = self._aggre_type == "gcn"
        mean: Tensor = (summed + feat[:num_dst]) / (degrees + 1) if is_gcn else summed / degrees.clamp(min=1)
        return mean

    kept = graph.keep(("sageconv", self._aggre_type, edge_weight is not None), operands, aggregate)
    count("sageconv", "ours: kept aggregate")
    rst = self.fc_neigh(kept)
    if self._aggre_type == "mean":
        rst = self.fc_self(feat[:num_dst]) + rst
    elif self.bias is not None:
        rst = rst + self.bias
    if self.activation is not None:
        rst = self.activation(rst)
    return self.norm(rst) if self.norm is not None else rst


def _static_operands(graph: Any, feat: Any, edge_weight: Tensor | None) -> tuple[Tensor, ...]:
    """Returns what the aggregate is made of, if that is the same in every epoch; else nothing."""
    if not isinstance(graph, LayerBlock) or not isinstance(feat, Tensor):
        return ()
    operands = (feat,) if edge_weight is None else (feat, edge_weight)
    return operands if graph.static_results.are_static(operands) else ()


def _degree_factors(degrees: Tensor, x: Tensor, norm: str) -> Tensor:
    degrees = degrees.to(x).clamp(min=1)
    factors: Tensor = torch.pow(degrees, -0.5) if norm == "both" else 1.0 / degrees
    return factors.reshape(-1, *(1,) * (x.dim() - 1))


def _sum(graph: LayerBlock, x: Tensor, edge_weight: Tensor | None) -> Tensor:
    """(C, ...) to the sums over in-edges of the destinations. Collective."""
    with graph.local_scope():
        graph.srcdata["h"] = x
        message = fn.copy_u("h", "m")
        if edge_weight is not None:
            graph.edata["_edge_weight"] = edge_weight
            message = fn.u_mul_e("h", "_edge_weight", "m")
        graph.update_all(message, fn.sum("m", "h"))
        summed: Tensor = graph.dstdata["h"]
    return summed
