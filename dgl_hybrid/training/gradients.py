# SPDX-License-Identifier: Apache-2.0
"""Averages gradients over ranks, for scripts without a process group for `DistributedDataParallel`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dgl_hybrid.training.loader import FullGraphLoader


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
    present = communicator.gather_ints([int(parameter.grad is not None) for parameter in parameters])
    used = [parameter for k, parameter in enumerate(parameters) if any(row[k] for row in present)]
    by_kind: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    for parameter in used:
        by_kind.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    for alike in by_kind.values():  # in the order of the first of its kind: the same on every rank
        total = communicator.sum_(torch.cat([_flat_gradient(parameter) for parameter in alike]))
        total /= communicator.world_size
        for parameter, grad in zip(alike, total.split([parameter.numel() for parameter in alike]), strict=True):
            parameter.grad = grad.view_as(parameter).clone()


def _flat_gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        return torch.zeros_like(parameter).flatten()
    grad = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
    return grad.flatten()
