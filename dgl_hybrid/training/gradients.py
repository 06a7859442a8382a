# SPDX-License-Identifier: Apache-2.0
"""Averages gradients over ranks, for scripts without a process group for `DistributedDataParallel`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dgl_hybrid.training.loader import FullGraphLoader

_NONE, _DENSE, _SPARSE = range(3)
"""Kinds of gradients; that of all ranks together is the greatest."""


def average_gradients(model: nn.Module, loader: FullGraphLoader) -> None:
    """Replaces every gradient by its mean over the ranks of `loader`, as DDP does. Collective.

    Call it between `backward` and the optimizer's step; the loader has weighted each rank's loss so that this mean is
    the gradient of the whole graph's. A parameter that got no gradient on any rank keeps none.

    Args:
        model: The same on every rank; not wrapped in DDP.
        loader: Whose transport carries the sums.
    """
    communicator = loader.communicator
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    present = communicator.gather_ints(
        [_kind_of_gradient(parameter) for parameter in parameters], what="average_gradients"
    )
    kind_of = {parameter: max(row[k] for row in present) for k, parameter in enumerate(parameters)}
    used = [parameter for parameter, kind in kind_of.items() if kind != _NONE]
    rows_of = {parameter: _used_rows(parameter) for parameter, kind in kind_of.items() if kind == _SPARSE}
    by_kind: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    for parameter in used:
        by_kind.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    for alike in by_kind.values():  # in the order of the first of its kind: the same on every rank
        flat = torch.cat([_flat_gradient(parameter) for parameter in alike])
        if flat.dtype == torch.float16:
            # Divided first, as DDP divides: sums of scaled gradients may be more than fits where their mean is not.
            total = communicator.sum_(flat.div_(communicator.world_size))
        else:
            total = communicator.sum_(flat)
            total /= communicator.world_size
        for parameter, grad in zip(alike, total.split([parameter.numel() for parameter in alike]), strict=True):
            parameter.grad = grad.view_as(parameter).clone()
    # By rows, where it was on any rank: `torch.optim.SparseAdam` takes no other, and steps the rows that any rank used.
    for parameter, counts in rows_of.items():
        assert parameter.grad is not None
        rows = torch.nonzero(communicator.sum_(counts)).flatten()
        parameter.grad = torch.sparse_coo_tensor(
            rows[None], parameter.grad[rows], parameter.grad.shape, is_coalesced=True
        )


def _kind_of_gradient(parameter: nn.Parameter) -> int:
    if parameter.grad is None:
        return _NONE
    return _SPARSE if parameter.grad.is_sparse else _DENSE


def _used_rows(parameter: nn.Parameter) -> Tensor:
    """Returns (n,) how often each row is among those of a gradient: all of a dense one."""
    grad = parameter.grad
    counts = torch.zeros(len(parameter), dtype=torch.float32, device=parameter.device)
    if grad is None:
        return counts
    if not grad.is_sparse:
        return counts + 1
    rows = grad.coalesce().indices()[0]
    return counts.index_fill_(0, rows, 1.0)


def _flat_gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        return torch.zeros_like(parameter).flatten()
    grad = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
    return grad.flatten()
