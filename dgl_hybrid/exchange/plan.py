# SPDX-License-Identifier: Apache-2.0
"""`ExchangePlan`: which rows of one level go to which peer, and which arrive from it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from dgl_hybrid.errors import ExchangeError


@dataclass(frozen=True, kw_only=True)
class ExchangePlan:
    """The exchange of one layer, built once and never changed.

    As a linear map: forward selects the rows `send_index` and moves them; backward moves gradients back and *adds*
    them to the rows they came from. With C rows computed here, S sent, R received and P ranks:
    """

    rank: int
    world_size: int
    layer: int
    """The layer that reads these rows, from 1."""
    num_rows: int
    """C: rows of the level computed on this rank, replicas included."""
    send_index: Tensor
    """(S,) int64 positions among the C rows, by receiving rank, then by global id. A row may go to several peers."""
    send_counts: tuple[int, ...]
    """(P,) rows sent to each peer; 0 to this rank."""
    recv_counts: tuple[int, ...]
    """(P,) rows received from each peer; 0 from this rank."""
    recv_global: Tensor
    """(R,) int64 global ids of the received rows, by owner rank, then by global id."""
    is_idle: bool = False
    """No rank receives anything for this layer, as all ranks agreed: there is nothing to exchange."""

    @property
    def num_sent(self) -> int:
        return sum(self.send_counts)

    @property
    def num_received(self) -> int:
        return sum(self.recv_counts)

    @property
    def send_offsets(self) -> tuple[int, ...]:
        return (0, *accumulate(self.send_counts))

    @property
    def recv_offsets(self) -> tuple[int, ...]:
        return (0, *accumulate(self.recv_counts))

    def to(self, device: torch.device) -> ExchangePlan:
        """Returns the same plan with its index on `device`; ids stay where they are."""
        return ExchangePlan(
            rank=self.rank,
            world_size=self.world_size,
            layer=self.layer,
            num_rows=self.num_rows,
            send_index=self.send_index.to(device),
            send_counts=self.send_counts,
            recv_counts=self.recv_counts,
            recv_global=self.recv_global,
            is_idle=self.is_idle,
        )

    def validate(self) -> None:
        """Checks what one rank can check alone.

        Raises:
            ExchangeError: Naming the field, the rank and the layer.
        """
        where = f"rank {self.rank} of {self.world_size}, layer {self.layer}"
        for name, counts in (("send_counts", self.send_counts), ("recv_counts", self.recv_counts)):
            if len(counts) != self.world_size or min(counts, default=0) < 0:
                raise ExchangeError(f"{name} must be {self.world_size} counts >= 0 (got {counts}) on {where}")
            if counts[self.rank] != 0:
                raise ExchangeError(f"{name} must not exchange rows with itself (got {counts[self.rank]}) on {where}")
        if len(self.send_index) != self.num_sent:
            raise ExchangeError(f"send_index must have {self.num_sent} entries (got {len(self.send_index)}) on {where}")
        if len(self.recv_global) != self.num_received:
            raise ExchangeError(
                f"recv_global must have {self.num_received} entries (got {len(self.recv_global)}) on {where}"
            )
        if self.num_sent:
            low, high = int(self.send_index.min()), int(self.send_index.max())
            if low < 0 or high >= self.num_rows:
                raise ExchangeError(f"send_index must lie in [0, {self.num_rows}) (got {low}..{high}) on {where}")

    def __str__(self) -> str:
        return (
            f"ExchangePlan(layer {self.layer}, rank {self.rank}/{self.world_size}: {self.num_rows} rows computed, "
            f"sends {list(self.send_counts)}, receives {list(self.recv_counts)})"
        )


def check_symmetry(plans: list[ExchangePlan]) -> None:
    """Checks that the plans of all ranks fit together; needs no processes.

    Raises:
        ExchangeError: Naming both ranks and the counts.
    """
    for plan in plans:
        plan.validate()
        for peer in plans:
            sent, expected = peer.send_counts[plan.rank], plan.recv_counts[peer.rank]
            if sent != expected:
                raise ExchangeError(
                    f"recv_counts do not match: rank {plan.rank} of {plan.world_size} expects {expected} rows from "
                    f"peer {peer.rank} for layer {plan.layer}, which sends {sent}. Rebuild both plans from one "
                    f"partition."
                )
