# SPDX-License-Identifier: Apache-2.0
"""The rows of other ranks that are at a rank when a plan runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .items import Bools
from .problem import PlanProblem


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RunRows:
    """What level sets that were closed for a plan hold of other ranks' vertices, for each level 0..L-1.

    A problem takes what owned vertices read with everything communicated. Some of those are computed only because other
    ranks ask for them: where these compute instead, nobody does, and what they would have read is not there either. So
    a plan may list rows, and be priced for rows, that nothing needs once it runs; how many is known when all ranks'
    plans are.
    """

    computed: tuple[Tensor, ...]
    """Global ids, in any order; not of borrowed seeds, which their rank computes whatever the plan."""
    received: tuple[Tensor, ...]
    """Likewise."""


def masks_of(problem: PlanProblem, ids: Sequence[Tensor]) -> Bools:
    """Returns (L, H) bool: where these ids of each level are among the halo vertices."""
    return torch.stack([torch.isin(problem.halo_global, of_level) for of_level in ids]).numpy()
