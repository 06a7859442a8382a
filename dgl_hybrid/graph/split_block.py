# SPDX-License-Identifier: Apache-2.0
"""What a `LayerBlock` runs where exchange and aggregation go together: its layer, split by source when first needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from dgl_hybrid.exchange.closure import LayerStructure
from dgl_hybrid.exchange.communicator import Communicator
from dgl_hybrid.exchange.partial_sums import PartialSums, build_partial_sums
from dgl_hybrid.exchange.parts import Message, RowsPart, SplitLayer, split_layer
from dgl_hybrid.exchange.row_codecs import RowCodec
from dgl_hybrid.graph.split_attention import SplitAttention
from dgl_hybrid.graph.split_exchange import Scale
from dgl_hybrid.graph.split_sum import SplitSum


@dataclass
class _Shared:
    """What the blocks of one layer on several devices have in common."""

    by_device: dict[torch.device, SplitBlock] = field(default_factory=dict)
    partial_sums: PartialSums | None = None
    """None: not searched for yet."""


class SplitBlock:
    """The sums and the attention of one layer, split by source.

    Args:
        messages: In which received rows come; as many on every rank.
        partial_sums: Whether sums without weights, that are trained, may be sent instead of their sources.
        codec: What rows of sums that are trained travel as, approximately; None: as they are.
        seed: Of its random rounding.
    """

    def __init__(
        self,
        structure: LayerStructure,
        communicator: Communicator,
        messages: Sequence[Message],
        *,
        device: torch.device,
        partial_sums: bool = False,
        codec: RowCodec | None = None,
        seed: int = 0,
        _shared: _Shared | None = None,
    ) -> None:
        self._structure, self._communicator, self._device = structure, communicator, device
        self._messages, self._may_send_sums = tuple(messages), partial_sums
        self._codec, self._seed = codec, seed
        self._shared = _Shared() if _shared is None else _shared
        self._shared.by_device[device] = self

    def on(self, device: torch.device) -> SplitBlock:
        """Returns the same for rows on another device; the same object at every call. Not collective."""
        known = self._shared.by_device.get(device)
        if known is not None:
            return known
        return SplitBlock(
            self._structure,
            self._communicator,
            self._messages,
            device=device,
            partial_sums=self._may_send_sums,
            codec=self._codec,
            seed=self._seed,
            _shared=self._shared,
        )

    def release(self) -> None:
        """Lets go of the structure, which is made anew where it is needed again."""
        for name in ("_layer", "trained_sums", "plain_sums", "attention"):
            self.__dict__.pop(name, None)

    def retire(self) -> None:
        """Parts from those on other devices, which hold each other: with the last block all of it is gone, at once."""
        self._shared.by_device.clear()

    @cached_property
    def _layer(self) -> SplitLayer:
        return _moved(split_layer(self._structure, self._messages), self._device)

    def sum(self, x: Tensor, scale: Scale | None = None) -> Tensor:
        """Sums sources over in-edges, as `SplitSum` does. Collective."""
        summed: Tensor = self.sums(is_trained=x.requires_grad)(x, scale=scale)
        return summed

    def sums(self, *, is_trained: bool) -> SplitSum:
        """Returns what sums rows, with or without a gradient. Collective.

        Which rows travel is settled when a sum is first trained: finding it out does not pay for a sum that is made
        once or evaluated now and then.
        """
        return self.trained_sums if is_trained else self.plain_sums

    @cached_property
    def trained_sums(self) -> SplitSum:
        """Sums that are worth a search for the fewest rows to send. Collective at its first use."""
        if self._may_send_sums and len(self._messages) == 1:
            found = self._shared.partial_sums
            if found is None:
                found = self._shared.partial_sums = build_partial_sums(self._communicator, self._structure)
            if found.part is not None:
                layer = replace(self._layer, parts=(_part_on(found.part, self._device),))
                return self._sums_of(layer)
        return self.plain_sums

    @cached_property
    def plain_sums(self) -> SplitSum:
        """Sums of sources, times constant weights of edges or not."""
        return self._sums_of(self._layer)

    def _sums_of(self, layer: SplitLayer) -> SplitSum:
        return SplitSum(layer, self._communicator, number=self._structure.layer, codec=self._codec, seed=self._seed)

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
