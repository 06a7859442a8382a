# SPDX-License-Identifier: Apache-2.0
"""`dgl.nn.EdgeWeightNorm` on a `LayerBlock`, with full-graph weighted degrees instead of the block's own sums."""

from __future__ import annotations

import torch
from dgl import DGLError
from dgl import function as fn
from torch import Tensor

from dgl_hybrid.errors import BlockError
from dgl_hybrid.graph.layer_block import LayerBlock


def normalise_edge_weights(block: LayerBlock, edge_weight: Tensor, *, norm: str, eps: float) -> Tensor:
    """Returns what `EdgeWeightNorm` gives for these edges on the whole graph.

    Collective at its first call for an edge field when `norm` is "both".

    Args:
        edge_weight: (E,) floating weights of the block's edges.
        norm: "none", "right" (by in-weights) or "both" (by out- and in-weights).
        eps: Added to the weighted degrees.

    Raises:
        DGLError: As stock DGL does, for weights that are not scalar, or not positive with norm "both".
        BlockError: With norm "both", for weights that are not a static field of the graph.
    """
    if edge_weight.dim() > 1:
        raise DGLError(f"edge weights must be scalar, one for each edge (got shape {tuple(edge_weight.shape)})")
    if norm == "both" and bool((edge_weight <= 0).any()):
        raise DGLError("edge weights must be positive with norm='both': their sums are taken to the power -1/2")
    if norm == "none":
        return edge_weight
    if norm == "both" and edge_weight.requires_grad:
        raise BlockError("EdgeWeightNorm(norm='both') on a LayerBlock takes static weights; these require a gradient")
    real = block._block
    with real.local_scope():
        real.edata["w"] = edge_weight
        real.update_all(fn.copy_e("w", "m"), fn.sum("m", "in_weight"))
        in_weight = real.dstdata["in_weight"] + eps
        if norm == "right":
            real.dstdata["scale"] = 1.0 / in_weight
            real.apply_edges(fn.e_mul_v("w", "scale", "scaled"))
            scaled: Tensor = real.edata["scaled"]
            return scaled
        out_weight = block.weighted_out_degrees(edge_weight).to(edge_weight) + eps
        real.srcdata["scale"] = torch.pow(out_weight, -0.5)
        real.dstdata["scale"] = torch.pow(in_weight, -0.5)
        real.apply_edges(fn.u_mul_v("scale", "scale", "scaled"))
        factor: Tensor = real.edata["scaled"]
        return factor * edge_weight
