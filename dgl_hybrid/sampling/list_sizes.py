# SPDX-License-Identifier: Apache-2.0
"""What in-edge lists take when they are held (`HaloTensors`), at most, before they are laid out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class ListSizes:
    """Bytes by what a list consists of."""

    list_bytes: int
    """A held vertex: its id, twice, and where its list begins."""
    entry_bytes: int
    """An in-edge: its source's position, its edge id, and the place of that where edges are of several types."""
    source_bytes: int
    """A source that is not held itself: its id, and an empty list."""
    end_bytes: int
    """Where the last list ends, once for all."""

    def alone(self, degrees: Tensor) -> Tensor:
        """Returns what each list takes at most, (n,) int64: every entry may have a source of its own."""
        return self.list_bytes + (self.entry_bytes + self.source_bytes) * degrees

    def ways(self, degrees: Tensor, num_sources: int) -> list[tuple[Tensor, int]]:
        """Returns two ways to count: what each list takes at most, (n,) int64, and what to set aside for all of them.

        Sources count with every entry, or are set aside once: which leaves more room depends on how many lists are
        worth holding, and how many entries of these share a source.

        Args:
            degrees: (n,) int64: of the lists that may be held.
            num_sources: They have no more different ones.
        """
        once = self.list_bytes + self.entry_bytes * degrees
        return [(self.alone(degrees), self.end_bytes), (once, self.end_bytes + self.source_bytes * num_sources)]


def fitting(num_bytes: Tensor, room_bytes: float) -> Tensor:
    """Returns the positions of what there is room for, in order: what no longer fits is passed over.

    Args:
        num_bytes: (n,) int64, positive; of the most wanted first.
    """
    chosen, left = [torch.empty(0, dtype=torch.int64)], torch.arange(len(num_bytes))
    while len(left := left[num_bytes[left] <= room_bytes]):
        total = torch.cumsum(num_bytes[left], 0)
        taken = int((total <= room_bytes).sum())
        chosen.append(left[:taken])
        room_bytes -= int(total[taken - 1])
        left = left[taken:]
    return torch.cat(chosen)


def list_sizes(partition_book: Any, budget_bytes: float) -> ListSizes:
    """Returns the sizes for a graph; no more than a budget (which may be infinite) is ever held of it."""
    num_nodes, num_edges = int(partition_book._num_nodes()), int(partition_book._num_edges())
    node_id, edge_id = (4 if num_ids <= 2**31 else 8 for num_ids in (num_nodes, num_edges))
    # Positions count what is held: an entry takes two words at least.
    position = 4 if min(max(num_nodes, num_edges), budget_bytes / 8) < 2**31 - 1 else 8
    orders = 1 if len(partition_book.canonical_etypes) > 1 else 0
    return ListSizes(
        list_bytes=torch.int64.itemsize + node_id + position,
        entry_bytes=position * (1 + orders) + edge_id,
        source_bytes=node_id + position,
        end_bytes=position,
    )
