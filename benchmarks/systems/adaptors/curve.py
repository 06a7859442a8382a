# SPDX-License-Identifier: Apache-2.0
"""Training that is interrupted to keep the weights, for time to accuracy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

from benchmarks.systems.adaptors.base import Stopwatch


def train(
    model: nn.Module, run_epoch: Callable[[], object], folder: Path, count: int, every: int, *, rank: int
) -> list[dict[str, Any]]:
    """Trains `count` epochs; returns the seconds trained and the file of the weights after each `every` of them.

    Keeping weights is not counted, nor is what happens before the first epoch. Collective.
    """
    folder.mkdir(parents=True, exist_ok=True)
    points: list[dict[str, Any]] = []
    elapsed_s = 0.0
    for epoch in range(1, count + 1):
        if dist.is_initialized():
            dist.barrier()
        with Stopwatch() as watch:
            run_epoch()
        elapsed_s += watch.elapsed_s
        if epoch % every == 0 or epoch == count:
            file = folder / f"epoch{epoch}.safetensors"
            if rank == 0:
                save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, str(file))
            points.append({"epoch": epoch, "elapsed_s": elapsed_s, "file": str(file)})
    return points
