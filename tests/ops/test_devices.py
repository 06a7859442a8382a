# SPDX-License-Identifier: Apache-2.0
"""A device by its name."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dgl_hybrid.ops.devices import device_of


def test_a_gpu_without_a_number_is_the_current_one() -> None:
    """What is kept for "cuda" is not made again for "cuda:0", which tensors there say they lie on."""
    with FakeTensorMode():  # a GPU that need not be there
        assert device_of("cuda") == device_of(torch.device("cuda", 0)) == torch.device("cuda", 0)
    assert device_of("cpu") == torch.device("cpu")
