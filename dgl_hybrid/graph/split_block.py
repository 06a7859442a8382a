# SPDX-License-Identifier: Apache-2.0
"""What a `LayerBlock` runs where exchange and aggregation go together: its layer, split by source when first needed."""

from __future__ import annotations

import weakref
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
    """What the blocks of one layer on several devices, and of layers that are alike, have in common."""

    partial_sums: PartialSums | None = None
    """None: not searched for yet."""
    layers: weakref.WeakValueDictionary[tuple[torch.device, bool], SplitLayer] = field(
        default_factory=weakref.WeakValueDictionary
    )
    """By device, and whether partial sums are sent; there as long as anybody sums or attends by it."""


class SplitBlock:
    """The sums and the attention of one layer, split by source.

    Args:
        messages: In which received rows come; as many on every rank.
        partial_sums: Whether sums without weights, that are trained, may be sent instead of their sources.
        codec: What rows of sums that are trained travel as, approximately; None: as they are.
        seed: Of its random rounding.
        alike: That of a layer with the same rows and edges on all ranks, and the same messages.
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
        alike: SplitBlock | None = None,
        _first: SplitBlock | None = None,
    ) -> None:
        self._structure, self._communicator, self._device = structure, communicator, device
        self._messages, self._may_send_sums = tuple(messages), partial_sums
        self._codec, self._seed = codec, seed
        other = alike if _first is None else _first
        self._shared: _Shared = _Shared() if other is None else other._shared
        self._first = weakref.ref(self if _first is None else _first)
        self._moved: dict[torch.device, SplitBlock] = {}
        """Of the first: those on other devices, which do not hold it, so that all go at once with it."""

    def on(self, device: torch.device) -> SplitBlock:
        """Returns the same for rows on another device; the same object at every call. Not collective."""
        first = self._first()
        if first is None or device == self._device:
            return self if device == self._device else self._on(device, None)
        if device == first._device:
            return first
        if device not in first._moved:
            first._moved[device] = self._on(device, first)
        return first._moved[device]

    def _on(self, device: torch.device, first: SplitBlock | None) -> SplitBlock:
        return SplitBlock(
            self._structure,
            self._communicator,
            self._messages,
            device=device,
            partial_sums=self._may_send_sums,
            codec=self._codec,
            seed=self._seed,
            _first=first,
        )

    def release(self) -> None:
        """Lets go of the structure, which is made anew where it is needed again, unless a layer like this has it."""
        for name in ("trained_sums", "plain_sums", "attention"):
            self.__dict__.pop(name, None)

    def retire(self) -> None:
        """Parts from those on other devices, which then last as long as somebody holds them."""
        self._moved.clear()

    @property
    def is_chunked(self) -> bool:
        """Whether received rows come in several messages, each used and dropped. Alike on every rank."""
        return len(self._messages) > 1

    @property
    def messages(self) -> tuple[Message, ...]:
        """In which received rows come."""
        return self._messages

    def _layer(self, sums: RowsPart | None = None) -> SplitLayer:
        """Returns the layer, with partial sums as its only part if they are given."""
        key = self._device, sums is not None
        layer = self._shared.layers.get(key)
        if layer is None:
            if sums is None:
                layer = _moved(split_layer(self._structure, self._messages), self._device)
            else:
                layer = replace(self._layer(), parts=(_part_on(sums, self._device),))
            self._shared.layers[key] = layer
        return layer

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
        if self._may_send_sums and not self.is_chunked:
            found = self._shared.partial_sums
            if found is None:
                found = self._shared.partial_sums = build_partial_sums(self._communicator, self._structure)
            if found.part is not None:
                return self._sums_of(self._layer(found.part))
        return self.plain_sums

    @cached_property
    def plain_sums(self) -> SplitSum:
        """Sums of sources, times constant weights of edges or not."""
        return self._sums_of(self._layer())

    def _sums_of(self, layer: SplitLayer) -> SplitSum:
        return SplitSum(layer, self._communicator, number=self._structure.layer, codec=self._codec, seed=self._seed)

    @cached_property
    def attention(self) -> SplitAttention:
        """Fused attention."""
        return SplitAttention(self._layer(), self._communicator, number=self._structure.layer)


def _moved(layer: SplitLayer, device: torch.device) -> SplitLayer:
    return SplitLayer(
        held=layer.held.to(device),
        parts=tuple(_part_on(part, device) for part in layer.parts),
        edge_positions=layer.edge_positions if device.type == "cpu" else layer.edge_positions.to(device),
    )


def _part_on(part: RowsPart, device: torch.device) -> RowsPart:
    return replace(
        part,
        pack=part.pack.to(device),
        dst_rows=part.dst_rows.to(device),
        edges=part.edges.to(device),
    )
