# SPDX-License-Identifier: Apache-2.0
"""Gradients of rows that a `DistEmbedding` learns: of the whole graph's loss on every rank that holds the row.

A row's gradient is spread over its owner and the ranks that hold a replica of it, and DGL's sparse optimizers take the
mean over all who push one. So each rank gets the sum of all parts, divided by the number of ranks as DDP does it for
weights: the mean of equal numbers is that number.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dgl_hybrid.exchange.communicator import Communicator
from dgl_hybrid.exchange.ids import Ownership, request_ids


def settle_gradient(grad_CF: Tensor, ids_global: Tensor, ownership: Ownership, communicator: Communicator) -> Tensor:
    """Sums a gradient over all ranks that hold the row and divides it by their number in all. Collective.

    Args:
        grad_CF: (C, F), the part of it that arises on this rank.
        ids_global: (C,) int64, distinct: what the rows are.
    Returns:
        (C, F): equal on all ranks that hold a row.
    """
    mine = ownership.is_owned(ids_global)
    foreign_ids, order = torch.sort(ids_global[~mine])
    foreign_rows = torch.nonzero(~mine).flatten()[order].to(grad_CF.device)
    own_rows = torch.nonzero(mine).flatten().to(grad_CF.device)
    routing = request_ids(communicator, ownership, foreign_ids)
    arrived = communicator.exchange(grad_CF[foreign_rows], routing.recv_counts, routing.send_counts, backward=True)
    # The owner of a row need not hold it: nobody may have asked for more than replicas of it.
    held = torch.cat([ids_global[mine] - ownership.start, routing.send_local])
    unique, position = torch.unique(held, return_inverse=True)
    position = position.to(grad_CF.device)
    total = grad_CF.new_zeros(len(unique), *grad_CF.shape[1:])
    # One rank's after the other's, each of which has a row once: a GPU adds what meets in one row in any order.
    counts = [len(own_rows), *routing.send_counts]
    for rows, at in zip((grad_CF[own_rows], *arrived.split(counts[1:])), position.split(counts), strict=True):
        total.index_add_(0, at, rows)
    total = (total / communicator.world_size)[position]
    settled = torch.empty_like(grad_CF)
    settled[own_rows] = total[: len(own_rows)]
    settled[foreign_rows] = communicator.exchange(
        total[len(own_rows) :], routing.send_counts, routing.recv_counts, backward=True
    )
    return settled
