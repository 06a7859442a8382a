# SPDX-License-Identifier: Apache-2.0
"""Degrees on the whole graph of the vertices of a block, and what layers make of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


class FullDegrees:
    """Of the sources held here and of the destinations, on the device where the block is.

    Args:
        of_sources: (|C_(l-1)|,) out-degrees.
        of_destinations: (|C_l|,) in-degrees; None: all in-edges are in the block, which counts them.
        block: The real block.
    """

    def __init__(self, of_sources: Tensor, of_destinations: Tensor | None, block: Any) -> None:
        self.of_sources = of_sources
        self.known_of_destinations = of_destinations
        self._block = block
        self._factors: dict[tuple[str, bool, torch.dtype], Tensor] = {}
        self._has_empty_rows: bool | None = None

    @property
    def of_destinations(self) -> Tensor:
        """(|C_l|,) in-degrees."""
        known = self.known_of_destinations
        degrees: Tensor = self._block.in_degrees() if known is None else known
        return degrees

    def factors(self, norm: str, dtype: torch.dtype, *, of_sources: bool) -> Tensor:
        """Returns the root of 1 / degree for the norm "both", else 1 / degree, of degrees that are at least 1.

        The same tensor at every call, made at the first: not to be written to.
        """
        key = norm, of_sources, dtype
        if key not in self._factors:
            with torch.inference_mode(False), torch.no_grad():  # training may come after an evaluation
                degrees = (self.of_sources if of_sources else self.of_destinations).to(dtype).clamp(min=1)
                self._factors[key] = torch.pow(degrees, -0.5) if norm == "both" else 1.0 / degrees
        return self._factors[key]

    @property
    def has_empty_rows(self) -> bool:
        """Whether some destination has no in-edges; looked up once, as that waits for a GPU."""
        if self._has_empty_rows is None:
            self._has_empty_rows = bool((self.of_destinations == 0).any())
        return self._has_empty_rows

    @contextlib.contextmanager
    def raised_of_first(self) -> Iterator[None]:
        """Says of row 0 that it has more edges than any other."""
        known = self.of_sources, self.known_of_destinations
        raised = [degrees.clone() for degrees in (self.of_sources, self.of_destinations)]
        for degrees in raised:
            degrees[0] = degrees.max() + 1
        self.of_sources, self.known_of_destinations = raised
        self._factors = {}
        try:
            yield
        finally:
            self.of_sources, self.known_of_destinations = known
            self._factors = {}
