# SPDX-License-Identifier: Apache-2.0
"""Turns the level sets of a rank into the blocks its model runs on."""

from __future__ import annotations

import torch
from torch import Tensor

from dgl_hybrid.exchange.closure import LevelSets
from dgl_hybrid.exchange.communicator import Communicator
from dgl_hybrid.graph.layer_block import LayerBlock, WeightedOutDegrees
from dgl_hybrid.graph.static_results import IsStatic, StaticResults, nothing_is_static


def build_layer_blocks(
    sets: LevelSets,
    communicator: Communicator,
    *,
    out_degrees: Tensor,
    device: torch.device,
    weighted_out_degrees: WeightedOutDegrees | None = None,
    is_static: IsStatic = nothing_is_static,
) -> list[LayerBlock]:
    """Builds one `LayerBlock` a layer, first layer first.

    Args:
        sets: From `close_levels`.
        out_degrees: (|C_0|,) full-graph out-degrees of `sets.rows_global`.
        weighted_out_degrees: Answers `EdgeWeightNorm`: (block, weights) to (C + R,) sums, or None.
        is_static: Tells tensors that are the same in every epoch; what blocks make of them is kept.
    """
    blocks = []
    for structure in sets.layers:
        blocks.append(
            LayerBlock(
                structure,
                communicator,
                rows_global=sets.rows_global,
                out_degrees=out_degrees,
                device=device,
                weighted_out_degrees=weighted_out_degrees,
                static_results=StaticResults(is_static),
            )
        )
    return blocks
