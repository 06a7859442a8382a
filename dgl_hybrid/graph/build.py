# SPDX-License-Identifier: Apache-2.0
"""Turns the level sets of a rank into the blocks its model runs on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dgl_hybrid.exchange.approximate import ApproximateRows, Approximation
from dgl_hybrid.exchange.closure import LayerStructure, LevelSets
from dgl_hybrid.exchange.communicator import Communicator
from dgl_hybrid.exchange.parts import Message, ring_messages, whole_message
from dgl_hybrid.graph.edge_ids import EdgeIds
from dgl_hybrid.graph.layer_block import LayerBlock, WeightedOutDegrees
from dgl_hybrid.graph.split_block import SplitBlock
from dgl_hybrid.graph.static_results import IsStatic, StaticResults, nothing_is_static


def build_layer_blocks(
    sets: LevelSets,
    communicator: Communicator,
    *,
    out_degrees: Tensor,
    device: torch.device,
    weighted_out_degrees: WeightedOutDegrees | None = None,
    is_static: IsStatic = nothing_is_static,
    approximation: Approximation | None = None,
    seed: int = 0,
    overlap: bool = False,
    chunk_rows: int | None = None,
    partial_sums: bool = False,
    sums_first: Sequence[bool] = (),
    on_edge_ids: Callable[[Tensor], None] | None = None,
    in_degrees: Tensor | None = None,
) -> list[LayerBlock]:
    """Builds one `LayerBlock` a layer, first layer first.

    Args:
        sets: From `close_levels`.
        out_degrees: (|C_0|,) full-graph out-degrees of `sets.rows_global`.
        weighted_out_degrees: Answers `EdgeWeightNorm`: (block, weights) to (C + R,) sums, or None.
        is_static: Tells tensors that are the same in every epoch; what blocks make of them is kept.
        approximation: Of the rows that need a gradient; None exchanges them exactly.
        seed: Of its random rounding.
        overlap: Sums and fused attention over held rows run while received ones travel.
        chunk_rows: Received rows come in messages of so many at most, used and dropped one after the other; building is
            collective then. None: in one message.
        partial_sums: Where that is fewer rows, sums that are trained are sent instead of their sources.
        sums_first: (L,) which layers sum before they multiply although that makes rows narrower; empty: none.
        on_edge_ids: Told of the tensor of a block's global edge ids when somebody first asks for it.
        in_degrees: (|C_1|,) full-graph in-degrees, where owners aggregate for replicas, whose edges are not here.
    """
    blocks: list[LayerBlock] = []
    # Not always the first layer: that lacks the in-edges of replicas.
    largest = max(sets.layers, key=lambda structure: structure.num_edges)
    numbers = torch.arange(largest.num_edges, dtype=largest.indices.dtype)
    for structure in sets.layers:
        alike = blocks[-1] if structure.is_like_below else None
        blocks.append(
            LayerBlock(
                structure,
                communicator,
                rows_global=sets.rows_global,
                out_degrees=out_degrees,
                device=device,
                weighted_out_degrees=weighted_out_degrees,
                static_results=StaticResults(is_static),
                edge_numbers=numbers,
                edge_ids=EdgeIds(sets.edge_ids[structure.layer - 1], structure.num_edges, device, on_edge_ids),
                in_degrees=in_degrees if structure.replicas is not None else None,
                sums_first=bool(sums_first) and sums_first[structure.layer - 1],
                split=_split(structure, communicator, device, chunk_rows, partial_sums, approximation, seed, alike)
                if overlap or chunk_rows
                else None,
                approximation=None if approximation is None else ApproximateRows(approximation, seed=seed),
                alike=alike,
            )
        )
    return blocks


def _split(
    structure: LayerStructure,
    communicator: Communicator,
    device: torch.device,
    chunk_rows: int | None,
    partial_sums: bool,
    approximation: Approximation | None,
    seed: int,
    alike: LayerBlock | None,
) -> SplitBlock | None:
    plan = structure.exchange
    if plan.is_idle:
        return None
    like = None if alike is None else alike.split
    messages: Sequence[Message]
    if like is not None:
        messages = like.messages
    elif chunk_rows is None:
        messages = (whole_message(plan),)
    else:
        messages = ring_messages(plan, communicator, chunk_rows)
    codec = None if approximation is None else approximation.codec
    return SplitBlock(
        structure, communicator, messages, device=device, partial_sums=partial_sums, codec=codec, seed=seed, alike=like
    )
