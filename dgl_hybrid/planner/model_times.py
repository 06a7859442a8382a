# SPDX-License-Identifier: Apache-2.0
"""What one epoch of the user's model takes on one rank, as timed there: seconds per row, per edge, and per epoch.

The timing itself lives in `dgl_hybrid.graph` (it needs blocks to run the model on); here are the numbers it yields.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelTimes:
    """Seconds of an L-layer model, forward, loss, backward and optimizer step together."""

    row_s: tuple[float, ...]
    """(L + 1,) per row of each level."""
    edge_s: tuple[float, ...]
    """(L,) per in-edge of layers 1..L."""
    fixed_s: float
    """Per epoch, however many rows there are: the calls themselves, work on parameters."""

    def __post_init__(self) -> None:
        if len(self.row_s) != len(self.edge_s) + 1:
            raise ValueError(f"times of L layers have L + 1 levels (got {len(self.edge_s)} and {len(self.row_s)})")
        if not all(math.isfinite(x) and x >= 0 for x in (*self.row_s, *self.edge_s, self.fixed_s)):
            raise ValueError(f"times must be finite and not negative (got {self})")

    @property
    def num_layers(self) -> int:
        """L."""
        return len(self.edge_s)

    def scaled(self, factor: float) -> ModelTimes:
        """Returns the times of an epoch that takes `factor` times as long."""
        return ModelTimes(
            row_s=tuple(factor * x for x in self.row_s),
            edge_s=tuple(factor * x for x in self.edge_s),
            fixed_s=factor * self.fixed_s,
        )

    def epoch_s(self, rows: tuple[int, ...], edges: tuple[int, ...]) -> float:
        """Returns the seconds of an epoch of so many (L + 1,) rows and (L,) in-edges."""
        parts = [*zip(self.row_s, rows, strict=True), *zip(self.edge_s, edges, strict=True)]
        return self.fixed_s + math.fsum(seconds * count for seconds, count in parts)
