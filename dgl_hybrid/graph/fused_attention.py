# SPDX-License-Identifier: Apache-2.0
"""Forwards of `GATConv` and `GATv2Conv` on the fused ops: logits, softmax, dropout and sum in one pass over the edges.

DGL's layers write three to five tensors of edges × heads (GATv2: of edges × heads × width), and read them again
backward. Here the only rows that exist are those of vertices. On a `LayerBlock` the same source fields travel in the
same single exchange as with DGL's own forwards, so ranks may differ in which of the two they take.

What these cannot do they leave to DGL's own forward, before any random number is drawn or any row is exchanged.
"""

from __future__ import annotations

from typing import Any

import dgl.nn as dglnn
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dgl_hybrid.graph.attention_terms import attention_terms
from dgl_hybrid.graph.layer_block import FusedOp, LayerBlock
from dgl_hybrid.graph.row_products import is_elu, linear
from dgl_hybrid.graph.split_block import SplitBlock
from dgl_hybrid.graph.watched_modules import is_watched
from dgl_hybrid.ops import EdgeDropout, SparseGraph, gat, gatv2
from dgl_hybrid.ops.dgl_index import sparse_graph_of
from dgl_hybrid.ops.op_counts import count

_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def forward_gat(
    self: Any, graph: Any, feat: Any, edge_weight: Tensor | None = None, get_attention: bool = False
) -> Any:
    """`dgl.nn.GATConv.forward`: same arguments, same result."""
    edges = "edge_weight" if edge_weight is not None else _find_edges(self, graph, feat, get_attention)
    if isinstance(edges, str):
        count("gat", f"dgl: {edges}")
        return dglnn.GATConv.forward(self, graph, feat, edge_weight, get_attention)
    heads, width = self._num_heads, self._out_feats
    with graph.local_scope():
        h_src, h_dst = _drop_inputs(self, graph, feat)
        if isinstance(feat, tuple):
            fc_src, fc_dst = (self.fc_src, self.fc_dst) if hasattr(self, "fc_src") else (self.fc, self.fc)
            feat_src = fc_src(h_src).view(*h_src.shape[:-1], heads, width)
            feat_dst = fc_dst(h_dst).view(*h_dst.shape[:-1], heads, width)
            el, er = _attend(feat_src, self.attn_l), _attend(feat_dst, self.attn_r)
        else:
            feat_src = linear(graph, self.fc, h_src, len(h_src)).view(*h_src.shape[:-1], heads, width)
            feat_src, el, er = attention_terms(feat_src, self.attn_l, self.attn_r, num_dst=len(h_dst))
        graph.srcdata.update({"ft": feat_src, "el": el})
        graph.dstdata.update({"er": er})
        er, slope = graph.dstdata["er"], self.leaky_relu.negative_slope
        split = _split_of(graph, ("el", "ft"))
        # Dimensions between the vertex and the head (time steps, say) are more heads.
        if split is not None:
            dropout = _draw_dropout(self.attn_drop, graph)
            x, el = feat_src.flatten(1, -2), el.flatten(1)
            rst = split.attention.gat(x, el, er.flatten(1), negative_slope=slope, dropout=dropout)
        else:
            # In the order in which DGL's own forward causes them to be exchanged.
            el, feat_src = _read_sources(graph, ("el", "ft"))
            dropout = _draw_dropout(self.attn_drop, graph)
            _observe(graph, "gat", feat_src, dropout=self.attn_drop)
            x, el = feat_src.flatten(1, -2), el.flatten(1)
            rst = gat(edges, x, el, er.flatten(1), negative_slope=slope, dropout=dropout)
        rst = rst.view(len(h_dst), *feat_src.shape[1:])
    count("gat", "ours" if split is None else "ours: split by source")
    if self.res_fc is not None:
        rst = rst + self.res_fc(h_dst).view(*h_dst.shape[:-1], -1, width)
    bias = self.bias.view(heads, width) if self.has_explicit_bias else None
    return _finish(rst, bias, self.activation, is_new=self.res_fc is not None)


def forward_gatv2(self: Any, graph: Any, feat: Any, get_attention: bool = False) -> Any:
    """`dgl.nn.GATv2Conv.forward`: same arguments, same result."""
    edges = _find_edges(self, graph, feat, get_attention, max_dim=2)
    if isinstance(edges, str):
        count("gatv2", f"dgl: {edges}")
        return dglnn.GATv2Conv.forward(self, graph, feat, get_attention)
    heads, width = self._num_heads, self._out_feats
    with graph.local_scope():
        h_src, h_dst = _drop_inputs(self, graph, feat)
        feat_src = linear(graph, self.fc_src, h_src, len(h_src)).view(-1, heads, width)
        if self.share_weights and not isinstance(feat, tuple):
            feat_dst = feat_src[: len(h_dst)]
        elif isinstance(feat, tuple):
            feat_dst = self.fc_dst(h_dst).view(-1, heads, width)
        else:
            feat_dst = linear(graph, self.fc_dst, h_src, len(h_dst)).view(-1, heads, width)
        graph.srcdata.update({"el": feat_src})
        graph.dstdata.update({"er": feat_dst})
        er, slope = graph.dstdata["er"], self.leaky_relu.negative_slope
        split = _split_of(graph, ("el",))
        attn = self.attn  # once: a parametrized one is made by reading it
        if split is not None and attn.dtype == feat_src.dtype:
            dropout = _draw_dropout(self.attn_drop, graph)
            rst = split.attention.gatv2(feat_src, er, attn, negative_slope=slope, dropout=dropout)
        else:
            (x,) = _read_sources(graph, ("el",))
            dropout = _draw_dropout(self.attn_drop, graph)
            _observe(graph, "gatv2", x, dropout=self.attn_drop)
            rst = gatv2(edges, x, er, attn, negative_slope=slope, dropout=dropout)
    count("gatv2", "ours" if split is None else "ours: split by source")
    if self.res_fc is not None:
        rst = rst + self.res_fc(h_dst).view(len(h_dst), -1, width)
    return _finish(rst, None, self.activation, is_new=self.res_fc is not None)


def _finish(rst: Tensor, bias: Tensor | None, activation: Any, *, is_new: bool) -> Any:
    """Adds the bias (H, D) to (N, ..., H, D) and takes the activation: an ELU, as models of attention have, in one.

    Args:
        is_new: `rst` is no longer what attention has returned.
    """
    if is_elu(activation) and (bias is None or (rst.dim() == 3 and bias.dtype == rst.dtype)):
        flat = torch.ops.dgl_hybrid.biased_elu(rst.flatten(1), None if bias is None else bias.flatten())
        return flat.view(rst.shape)
    if bias is not None:
        rst = rst + bias
    elif not is_new and rst.requires_grad and not _returns_new_rows(activation):
        rst = rst.clone()  # the backward of attention reads its result, and scripts may go on in place
    return activation(rst) if activation else rst


_PURE = (
    *(F.elu, F.gelu, F.leaky_relu, F.relu, F.selu, F.sigmoid, F.silu, F.softplus, F.tanh),
    *(torch.relu, torch.selu, torch.sigmoid, torch.tanh),
)


def _returns_new_rows(activation: Any) -> bool:
    """Whether this is known to write into memory of its own. An identity returns what it is given."""
    if isinstance(activation, nn.Module):
        is_of_pytorch = type(activation).__module__ == nn.ReLU.__module__
        return is_of_pytorch and not getattr(activation, "inplace", False)
    return any(activation is function for function in _PURE)


def _find_edges(
    layer: Any, graph: Any, feat: Any, get_attention: bool, max_dim: int | None = None
) -> SparseGraph | str:
    """Returns the edges to run on, or why this call goes to DGL's own forward (sometimes to raise its own error)."""
    inputs = feat if isinstance(feat, tuple) else (feat,)
    if get_attention:
        return "get_attention"
    if not all(isinstance(x, Tensor) and 2 <= x.dim() <= (max_dim or x.dim()) for x in inputs):
        return "shape of the features"
    if len({x.shape[1:-1] for x in inputs}) > 1:
        return "shape of the features"
    if any(x.dtype not in _DTYPES for x in inputs):
        return "dtype of the features"
    for part, expected in ((layer.attn_drop, nn.Dropout), (layer.leaky_relu, nn.LeakyReLU)):
        # Fused, these modules do not run.
        if type(part) is not expected or is_watched(part):
            return f"{expected.__name__} replaced or hooked"
    is_drawn = layer.attn_drop.training and layer.attn_drop.p > 0.0
    if is_drawn and inputs[0].is_cuda and torch.cuda.is_current_stream_capturing():
        return "dropout in a CUDA graph"  # its keys come from the host: each replay would drop the same edges
    index = graph.real_index if isinstance(graph, LayerBlock) else graph._graph
    edges = sparse_graph_of(index, inputs[0].device)
    if edges is None:
        return "several edge types"
    if not layer._allow_zero_in_degree and _has_empty_rows(graph):
        return "zero in-degree"
    return edges


def _has_empty_rows(graph: Any) -> bool:
    return graph.has_empty_rows if isinstance(graph, LayerBlock) else bool((graph.in_degrees() == 0).any())


def _drop_inputs(layer: Any, graph: Any, feat: Any) -> tuple[Tensor, Tensor]:
    """Returns the inputs of sources and of destinations after feature dropout, drawn as DGL's own forward does."""
    if isinstance(feat, tuple):
        return layer.feat_drop(feat[0]), layer.feat_drop(feat[1])
    h = layer.feat_drop(feat)
    return h, h[: graph.num_dst_nodes()] if graph.is_block else h


def _attend(x: Tensor, attention: Tensor) -> Tensor:
    """(n, ..., H, D) and (1, H, D) to (n, ..., H, 1)."""
    return (x * attention).sum(dim=-1, keepdim=True)


def _read_sources(graph: Any, names: tuple[str, ...]) -> list[Tensor]:
    """Returns the fields for all sources of the edges. Collective on a `LayerBlock`."""
    if isinstance(graph, LayerBlock):
        return graph.complete_sources(names)
    return [graph.srcdata[name] for name in names]


def _split_of(graph: Any, names: tuple[str, ...]) -> SplitBlock | None:
    return graph.split_of(names) if isinstance(graph, LayerBlock) else None


def _draw_dropout(module: nn.Dropout, graph: Any) -> EdgeDropout | None:
    if not module.training or module.p == 0.0:
        return None
    if isinstance(graph, LayerBlock) and graph.on_edge_dropout is not None:
        return graph.on_edge_dropout(graph, module.p)
    # As of any dropout in PyTorch: it follows `torch.manual_seed`, and checkpointing puts the generator back.
    first, second = torch.randint(2**63 - 1, (2,)).tolist()
    return EdgeDropout(module.p, (first, second))


def _observe(graph: Any, op: FusedOp, x: Tensor, *, dropout: nn.Dropout) -> None:
    if isinstance(graph, LayerBlock) and graph.observer is not None:
        graph.observer.on_attention(graph.layer, op, x, has_dropout=dropout.training and dropout.p > 0.0)
