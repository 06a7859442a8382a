# SPDX-License-Identifier: Apache-2.0
"""How often a tensor was written to, as PyTorch counts: what is kept beside a tensor holds until that has changed."""

from __future__ import annotations

from torch import Tensor


def version_of(tensor: Tensor) -> int:
    """Returns the number of writes; 0 for tensors of inference mode, whose writes PyTorch does not count."""
    return 0 if tensor.is_inference() else tensor._version
