# SPDX-License-Identifier: Apache-2.0
"""Whether a tensor was written to: what is kept beside one holds until then.

PyTorch counts writes, but not those through `.data`, NumPy or DLPack, nor those of `torch.distributed`'s collectives.
A sample that is compared finds tensors that were filled, scaled or shuffled in such a way, not one row that was.
"""

from __future__ import annotations

import functools
import random

import torch
from torch import Tensor

NUM_SAMPLES, SAMPLED_ELEMENTS = 16, 256
"""Of a tensor that is compared: so many runs of so many elements, on as many pages. Rows may lie on disk."""


def version_of(tensor: Tensor) -> int:
    """Returns the number of writes; 0 for tensors of inference mode, whose writes PyTorch does not count."""
    return 0 if tensor.is_inference() else tensor._version


def sample_of(tensor: Tensor) -> Tensor:
    """Returns uint8 bytes of short runs of elements, the same of every tensor of this size; NaN equals itself there."""
    flat = tensor.detach().reshape(-1)
    if len(flat) <= NUM_SAMPLES * SAMPLED_ELEMENTS:
        return flat.clone().view(torch.uint8)
    return flat.index_select(0, _sampled_places(len(flat), flat.device)).view(torch.uint8)


@functools.lru_cache(32)
def _sampled_places(count: int, device: torch.device) -> Tensor:
    """Odd ones, as columns come again at even distances."""
    generator = random.Random(count)
    starts = [generator.randrange(count - SAMPLED_ELEMENTS) for _ in range(NUM_SAMPLES)]
    with torch.inference_mode(False):
        places = torch.tensor(starts).unsqueeze(1) + torch.arange(SAMPLED_ELEMENTS)
        return places.flatten().to(device)
