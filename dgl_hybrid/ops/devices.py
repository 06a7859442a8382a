# SPDX-License-Identifier: Apache-2.0
"""Which device a name means."""

from __future__ import annotations

import torch


def device_of(name: torch.device | str) -> torch.device:
    """Returns the device that tensors made there say they lie on: for "cuda" the current one, with its number."""
    return torch.empty(0, device=name).device
