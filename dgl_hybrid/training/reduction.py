# SPDX-License-Identifier: Apache-2.0
"""Small sums and gathers over the ranks of a group, for statistics and metrics (rows travel through `exchange/`)."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def sum_over_ranks(values: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Adds the tensors of all ranks. Collective over `group` (one all-reduce); without a process group it is `values`.

    Every rank gets the same bits. Not differentiable.

    Args:
        values: Any shape and dtype that the backend adds, the same on every rank; not modified.
    Returns:
        Shape, dtype and device of `values`.
    """
    if world_size_of(group) == 1:
        return values
    total = values.detach().to(_device_for(values, group), copy=True)
    dist.all_reduce(total, group=group)
    return total.to(values.device)


def gather_rows(rows_NF: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Puts the rows of all ranks one below the other, by rank.

    Collective over `group`: two gathers, whatever the sizes. Not differentiable. Every rank receives all rows, and
    for a moment holds `world_size` times the longest rank's rows.

    Args:
        rows_NF: (n, F), F and dtype the same on every rank; n may differ and be 0.
    Returns:
        (sum of n, F), dtype and device of `rows_NF`.
    """
    world_size = world_size_of(group)
    if world_size == 1:
        return rows_NF
    device = _device_for(rows_NF, group)
    counts = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(world_size)]
    dist.all_gather(counts, torch.tensor([len(rows_NF)], device=device), group=group)
    sizes = [int(count) for count in counts]
    padded = torch.zeros(max(sizes), rows_NF.shape[1], dtype=rows_NF.dtype, device=device)
    padded[: len(rows_NF)] = rows_NF.detach()
    parts = [torch.empty_like(padded) for _ in range(world_size)]
    dist.all_gather(parts, padded, group=group)  # gloo's takes one size only
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)]).to(rows_NF.device)


def world_size_of(group: dist.ProcessGroup | None) -> int:
    """The number of ranks; 1 when `torch.distributed` is not in use."""
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


def _device_for(tensor: Tensor, group: dist.ProcessGroup | None) -> torch.device:
    """Where the collective runs: on the tensor's device, except that CUDA tensors go through the host without NCCL."""
    if tensor.is_cuda and "nccl" not in str(dist.get_backend(group)):
        return torch.device("cpu")
    return tensor.device
