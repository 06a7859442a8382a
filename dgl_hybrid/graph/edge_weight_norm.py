# SPDX-License-Identifier: Apache-2.0
"""`dgl.nn.EdgeWeightNorm` on a `LayerBlock`, with full-graph weighted degrees instead of the block's own sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from dgl import DGLError
from dgl import function as fn
from torch import Tensor

from dgl_hybrid.errors import BlockError


def normalise_edge_weights(
    block: Any, edge_weight: Tensor, find_out_weights: Callable[[Tensor], Tensor], *, norm: str, eps: float
) -> Tensor:
    """Returns what `EdgeWeightNorm` gives for these edges on the whole graph.

    Collective at its first call for an edge field when `norm` is "both".

    Args:
        block: The DGL block of held and received sources.
        edge_weight: (E,) floating weights of the block's edges.
        find_out_weights: Answers with the (C + R,) full-graph weighted out-degrees of all sources, and raises if any
            weight of the graph is not positive.
        norm: "none", "right" (by in-weights) or "both" (by out- and in-weights).
        eps: Added to the weighted degrees.

    Raises:
        DGLError: As stock DGL does, for weights that are not scalar, or not positive with norm "both"; other ranks than
            those that own such a weight raise a HybridError with its words.
        BlockError: With norm "both", for weights that are not a static field of the graph.
    """
    if edge_weight.dim() > 1:
        raise DGLError(f"edge weights must be scalar, one for each edge (got shape {tuple(edge_weight.shape)})")
    if norm == "none":
        return edge_weight
    out_weight = None
    if norm == "both":
        if edge_weight.requires_grad:
            raise BlockError(
                "EdgeWeightNorm(norm='both') on a LayerBlock takes static weights; these require a gradient"
            )
        # All ranks check their weights there together: one that found a zero here would be missed in that collective.
        out_weight = find_out_weights(edge_weight).to(edge_weight) + eps
    with block.local_scope():
        block.edata["w"] = edge_weight
        block.update_all(fn.copy_e("w", "m"), fn.sum("m", "in_weight"))
        in_weight = block.dstdata["in_weight"] + eps
        if out_weight is None:
            block.dstdata["scale"] = 1.0 / in_weight
            block.apply_edges(fn.e_mul_v("w", "scale", "scaled"))
            scaled: Tensor = block.edata["scaled"]
            return scaled
        block.srcdata["scale"] = torch.pow(out_weight, -0.5)
        block.dstdata["scale"] = torch.pow(in_weight, -0.5)
        block.apply_edges(fn.u_mul_v("scale", "scale", "scaled"))
        factor: Tensor = block.edata["scaled"]
        return factor * edge_weight
