# SPDX-License-Identifier: Apache-2.0
"""The global ids of a block's edges, which a script may ask for and most do not."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from dgl_hybrid.partition.narrow_ids import NarrowIds


class EdgeIds:
    """Made when first asked for. Blocks that are copies of each other on one device share it.

    Args:
        ids: Of the layer that has most edges; those of every layer are the first of them.
        num_edges: E, of this layer.
        on_made: Told of the tensor, by whose identity rows of edge fields can be read from then on.
    """

    def __init__(
        self, ids: NarrowIds, num_edges: int, device: torch.device, on_made: Callable[[Tensor], None] | None = None
    ) -> None:
        self._ids, self._num_edges, self._device, self._on_made = ids, num_edges, device, on_made
        self.made: Tensor | None = None
        """(E,) int64, once it was asked for."""
        self._elsewhere: dict[torch.device, EdgeIds] = {}
        self._moved_from: weakref.ref[EdgeIds] | None = None

    def get(self) -> Tensor:
        """Returns the (E,) int64 ids on the block's device; the same tensor at every call."""
        if self.made is None:
            with torch.inference_mode(False):  # later steps save it for their backward
                self.made = self._ids.wide()[: self._num_edges].to(self._device)
            if self._on_made is not None:
                self._on_made(self.made)
        return self.made

    def on(self, device: torch.device) -> EdgeIds:
        """Returns the same for a block on another device: the same object at every call, or whoever moves a block in
        every epoch would ask other ranks each time for the rows that its edge ids name.
        """
        if device == self._device:
            return self
        first = None if self._moved_from is None else self._moved_from()
        if first is not None:  # that knows them all: a block may be moved there and back
            return first.on(device)
        if device not in self._elsewhere:
            moved = self._elsewhere[device] = EdgeIds(self._ids, self._num_edges, device, self._on_made)
            moved._moved_from = weakref.ref(self)
        return self._elsewhere[device]

    def all_made(self) -> list[Tensor]:
        """Returns what was asked for on any device."""
        made = [ids.made for ids in (self, *self._elsewhere.values())]
        return [ids for ids in made if ids is not None]
