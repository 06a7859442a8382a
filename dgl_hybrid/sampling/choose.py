# SPDX-License-Identifier: Apache-2.0
"""Which of other machines' rows and in-edge lists to hold: the most expected saving per byte, within a budget."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LIST_SHARE = 0.25
"""Of a limited budget, for in-edge lists: a held row is one that no message carries, while a batch that still asks for
one neighbourhood sends its sampling request all the same."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteCosts:
    """What reading from another machine takes, beyond the message itself; measured."""

    row_s: float
    """Seconds for one more row in a message, of the field that was measured."""
    seed_s: float
    """Seconds for one more vertex in a sampling request."""
    latency_s: float
    """Seconds of a message with next to nothing in it."""


@dataclass(frozen=True, kw_only=True)
class HoldChoice:
    """What is held."""

    lists: Tensor
    """(n,) bool: hold its in-edge list."""
    rows: Tensor
    """(n,) bool: hold its rows."""
    saving_s: float
    """Expected, in an epoch."""


def choose_held(
    *,
    seed_reads: Tensor,
    row_reads: Tensor,
    list_bytes: Tensor,
    row_bytes: Tensor,
    costs: RemoteCosts,
    budget_bytes: float,
) -> HoldChoice:
    """Chooses by saving per byte until the budget is used up (the greedy for a knapsack of small items).

    The saving of a row is its expected reads times the measured cost of reading one, that of a list the expected draws
    times the measured cost of one. Lists get `LIST_SHARE` of a budget at most, and what rows leave over. Whatever is
    never read is never held, also without a limit.

    Args:
        seed_reads: (n,) expected draws from each vertex's list per epoch.
        row_reads: (n,) expected reads of its row per epoch.
        list_bytes, row_bytes: (n,) what holding them takes.
        costs: Measured.
        budget_bytes: May be infinite.
    """
    num_vertices = len(seed_reads)
    saving = torch.cat([seed_reads * costs.seed_s, row_reads * costs.row_s])
    num_bytes = torch.cat([list_bytes, row_bytes]).to(torch.float64)
    useful = saving > 0
    density = torch.where(useful, saving / num_bytes.clamp(min=1.0), -1.0)
    order = torch.argsort(density, descending=True, stable=True)
    order = order[useful[order]]
    is_list = order < num_vertices
    within_share = torch.cumsum(num_bytes[order] * is_list, 0) <= LIST_SHARE * budget_bytes
    first = order[~is_list | within_share]
    last = order[is_list & ~within_share]
    order = torch.cat([first, last])
    held = torch.zeros(len(saving), dtype=torch.bool)
    held[order[torch.cumsum(num_bytes[order], 0) <= budget_bytes]] = True
    return HoldChoice(lists=held[:num_vertices], rows=held[num_vertices:], saving_s=float(saving[held].sum()))
