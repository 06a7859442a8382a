# SPDX-License-Identifier: Apache-2.0
"""What a `LayerBlock` runs where exchange and aggregation go together: its layer, split by source when first needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import torch

from dgl_hybrid.exchange.closure import LayerStructure
from dgl_hybrid.exchange.communicator import Communicator
from dgl_hybrid.exchange.parts import Message, RowsPart, SplitLayer, split_layer
from dgl_hybrid.graph.split_attention import SplitAttention
from dgl_hybrid.graph.split_sum import SplitSum


class SplitBlock:
    """The sums and the attention of one layer, split by source.

    Args:
        messages: In which received rows come; as many on every rank.
        partial_sums: What replaces the one message of sums without weights, with rows or partial sums of them.
    """

    def __init__(
        self,
        structure: LayerStructure,
        communicator: Communicator,
        messages: Sequence[Message],
        *,
        device: torch.device,
        partial_sums: RowsPart | None = None,
    ) -> None:
        self._structure, self._communicator, self._device = structure, communicator, device
        self._messages, self._partial_sums = tuple(messages), partial_sums

    @cached_property
    def _layer(self) -> SplitLayer:
        return _moved(split_layer(self._structure, self._messages), self._device)

    @cached_property
    def sums(self) -> SplitSum:
        """Sums of sources over in-edges."""
        if self._partial_sums is None:
            return self.weighted_sums
        layer = replace(self._layer, parts=(_part_on(self._partial_sums, self._device),))
        return SplitSum(layer, self._communicator, number=self._structure.layer)

    @cached_property
    def weighted_sums(self) -> SplitSum:
        """Sums of sources times constant weights of edges."""
        return SplitSum(self._layer, self._communicator, number=self._structure.layer)

    @cached_property
    def attention(self) -> SplitAttention:
        """Fused attention."""
        return SplitAttention(self._layer, self._communicator, number=self._structure.layer)


def _moved(layer: SplitLayer, device: torch.device) -> SplitLayer:
    return SplitLayer(
        held=layer.held.to(device),
        held_edge_positions=layer.held_edge_positions.to(device),
        parts=tuple(_part_on(part, device) for part in layer.parts),
    )


def _part_on(part: RowsPart, device: torch.device) -> RowsPart:
    return replace(
        part,
        pack=part.pack.to(device),
        dst_rows=part.dst_rows.to(device),
        edges=part.edges.to(device),
        edge_positions=None if part.edge_positions is None else part.edge_positions.to(device),
    )
