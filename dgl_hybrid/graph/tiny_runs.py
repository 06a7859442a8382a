# SPDX-License-Identifier: Apache-2.0
"""Where a copy of a model runs on tiny blocks: in host memory, or where it is."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn

from dgl_hybrid.errors import HybridError
from dgl_hybrid.graph.call_template import CallTemplate, flatten, shape_of
from dgl_hybrid.graph.layer_block import LayerBlock
from dgl_hybrid.graph.model_copy import copy_of
from dgl_hybrid.graph.tiny_blocks import build_tiny_blocks

ResultT = TypeVar("ResultT")

_logger = logging.getLogger(__name__)


def device_of(model: nn.Module) -> torch.device:
    """Returns where a model's parameters are: the first one's."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def in_memory_or_on(device: torch.device, run: Callable[[torch.device], ResultT]) -> ResultT:
    """Runs a copy of a model in host memory, where its numbers are the same for any GPU and cost no launches; on its
    device, if it cannot run elsewhere: it may hold tensors that are neither parameters nor buffers, or name the device.
    """
    try:
        return run(torch.device("cpu"))
    except HybridError:
        raise
    except Exception as error:
        if device.type == "cpu":
            raise
        _logger.debug("the model is traced on %s (in host memory: %s: %s)", device, type(error).__name__, error)
    return run(device)


def copy_on(where: torch.device, model: nn.Module) -> nn.Module:
    """Returns a copy in host memory, or one that stays where the model is."""
    return copy_of(model).cpu() if where.type == "cpu" else copy_of(model)


def tiny_blocks_on(
    where: torch.device, model: nn.Module, template: CallTemplate, num_layers: int
) -> tuple[list[LayerBlock], list[int], list[int]]:
    """Returns tiny blocks on a device whose sizes are no dimension of the model or of what it is given."""
    taken = {dimension for parameter in model.parameters() for dimension in parameter.shape}
    taken |= {dimension for value in flatten((template.args, template.kwargs)) for dimension in shape_of(value)}
    blocks, sizes, num_edges = build_tiny_blocks(num_layers, taken)
    return [block.to(where) for block in blocks], sizes, num_edges
