# SPDX-License-Identifier: Apache-2.0
"""Attention dropout inside the fused ops: which (edge, head) is dropped is a function of keys, never stored."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from dgl_hybrid.ops.random_words import call_keys, column_words, element_words, keep_threshold, row_words, signed


@dataclass(frozen=True, slots=True, eq=False)
class EdgeDropout:
    """Drops attention weights with probability `p` and scales the kept ones by `1/(1-p)`.

    Weight (edge, head) shares its fate with element (key of the edge, column = head) of `replicated_dropout` under the
    same keys, so the fused ops drop what the module would have dropped on the materialised weights.

    Make it outside of compiled code and hand it in: `torch.compile` cannot trace the 64-bit arithmetic of keys that
    change from step to step, and need not compile again when only they change.
    """

    p: float
    """Probability of dropping, 0 to 1."""
    keys: tuple[int, int]
    """The two unsigned 64-bit keys of this call: `random_words.call_keys(seed, step, call_index)`."""
    edge_keys: Tensor | None = None
    """(E,) int64: global id of each edge, by edge row; None: the edge row itself."""
    packed_keys: Tensor = field(init=False, repr=False)
    """(2,) int64 on CPU: the bits of `keys`. The registered ops take a tensor, whose values a compiled graph does not
    depend on."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.p <= 1.0:  # also catches NaN
            raise ValueError(f"dropout probability must be 0 to 1 (got {self.p})")
        if len(self.keys) != 2 or not all(0 <= key < 2**64 for key in self.keys):
            raise ValueError(f"dropout keys must be two unsigned 64-bit integers (got {self.keys}): see `from_call`")
        if self.edge_keys is not None and (self.edge_keys.dtype != torch.int64 or self.edge_keys.dim() != 1):
            raise TypeError(
                f"edge_keys must be (E,) int64 (got {tuple(self.edge_keys.shape)} {self.edge_keys.dtype}): one global "
                f"id per edge"
            )
        object.__setattr__(self, "packed_keys", torch.tensor([signed(key, 64) for key in self.keys]))

    @classmethod
    def from_call(
        cls, p: float, *, seed: int, step: int, call_index: int, edge_keys: Tensor | None = None
    ) -> EdgeDropout:
        """The dropout that `replicated_dropout(..., seed=, step=, call_index=)` applies."""
        return cls(p, call_keys(seed, step, call_index), edge_keys)

    @property
    def scale(self) -> float:
        """What kept weights are multiplied by; 0 where everything is dropped."""
        return 1.0 / (1.0 - self.p) if self.p < 1.0 else 0.0

    def factors(self, num_edges: int, num_heads: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The materialised mask, (E, H) in `dtype` by edge row: `scale` where kept, 0 where dropped."""
        if self.p == 1.0:
            return torch.zeros(num_edges, num_heads, dtype=dtype, device=device)
        ids = self.edge_keys if self.edge_keys is not None else torch.arange(num_edges, device=device)
        words = torch.empty(num_edges, num_heads, dtype=torch.int32, device=device)
        columns = column_words(num_heads, device)
        element_words(row_words(ids, self.keys), columns, out=words, scratch=torch.empty_like(words))
        return (words >= keep_threshold(self.p)).to(dtype) * self.scale
