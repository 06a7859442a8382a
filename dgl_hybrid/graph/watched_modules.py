# SPDX-License-Identifier: Apache-2.0
"""Which modules must really run, since somebody is told of their calls: else layers do their work elsewhere."""

from __future__ import annotations

from torch import nn
from torch.nn.modules import module as hooks_of_all

OWN_HOOKS: set[int] = set()
"""Numbers of hooks of all modules that are this package's, and need not hear of what it leaves out."""


def is_watched(module: nn.Module) -> bool:
    """Whether somebody is told of this module's calls, or has given it a forward of its own."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in vars(module)
        or hooks_of_all._global_backward_hooks
        or hooks_of_all._global_backward_pre_hooks
        or hooks_of_all._global_forward_hooks.keys() - OWN_HOOKS
        or hooks_of_all._global_forward_pre_hooks.keys() - OWN_HOOKS
    )
