# SPDX-License-Identifier: Apache-2.0
"""What a `LayerBlock` runs where exchange and aggregation go together: its layer, split by source when first needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from dgl_hybrid.exchange.closure import LayerStructure
from dgl_hybrid.exchange.communicator import Communicator
from dgl_hybrid.exchange.partial_sums import build_partial_sums
from dgl_hybrid.exchange.parts import Message, RowsPart, SplitLayer, split_layer
from dgl_hybrid.graph.split_attention import SplitAttention
from dgl_hybrid.graph.split_sum import SplitSum


class SplitBlock:
    """The sums and the attention of one layer, split by source.

    Args:
        messages: In which received rows come; as many on every rank.
        partial_sums: Whether sums without weights, that are trained, may be sent instead of their sources.
    """

    def __init__(
        self,
        structure: LayerStructure,
        communicator: Communicator,
        messages: Sequence[Message],
        *,
        device: torch.device,
        partial_sums: bool = False,
    ) -> None:
        self._structure, self._communicator, self._device = structure, communicator, device
        self._messages, self._may_send_sums = tuple(messages), partial_sums

    @cached_property
    def _layer(self) -> SplitLayer:
        return _moved(split_layer(self._structure, self._messages), self._device)

    def sum(self, x: Tensor) -> Tensor:
        """Sums sources over in-edges, as `SplitSum` does. Collective.

        Which rows travel is settled when a sum is first trained: finding it out does not pay for a sum that is made
        once or evaluated now and then.
        """
        summed: Tensor = (self.trained_sums if x.requires_grad else self.plain_sums)(x)
        return summed

    @cached_property
    def trained_sums(self) -> SplitSum:
        """Sums that are worth a search for the fewest rows to send. Collective at its first use."""
        if self._may_send_sums and len(self._messages) == 1:
            found = build_partial_sums(self._communicator, self._structure)
            if found.part is not None:
                layer = replace(self._layer, parts=(_part_on(found.part, self._device),))
                return SplitSum(layer, self._communicator, number=self._structure.layer)
        return self.plain_sums

    @cached_property
    def plain_sums(self) -> SplitSum:
        """Sums of sources, times constant weights of edges or not."""
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
