# SPDX-License-Identifier: Apache-2.0
"""What an epoch cannot take less than: bytes and FLOPs over this machine's measured rates."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.systems.graphs import PreparedGraph
from benchmarks.systems.grid import Cell


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineRates:
    """Of one thread."""

    copy_bytes_per_s: float
    """Read and written, into a buffer that is reused."""
    flops: float
    """Of a product of matrices."""


def measure_rates(*, seconds: float = 0.3) -> MachineRates:
    """Measures in this process, with one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        source = torch.zeros(16 * 2**20)
        target = torch.zeros_like(source)
        a, b, product = torch.ones(512, 512), torch.ones(512, 512), torch.empty(512, 512)
        copy_s = _best(lambda: target.copy_(source), seconds)
        multiply_s = _best(lambda: torch.mm(a, b, out=product), seconds)
        return MachineRates(copy_bytes_per_s=2 * 4 * source.numel() / copy_s, flops=2 * 512**3 / multiply_s)
    finally:
        torch.set_num_threads(threads)


def _best(step: Callable[[], object], seconds: float) -> float:
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        step()
        best = min(best, time.perf_counter() - start)
    return best


def epoch_floor_s(cell: Cell, graph: PreparedGraph, rates: MachineRates, *, cores: int) -> float:
    """Returns a floor of the compute of an epoch, spread evenly over ranks, or over cores where these are fewer.

    Counted: what the products of the layers take at the GEMM rate, forward and backward, and what aggregations gather
    at the copy rate, where the model needs them. The first layer's of GCN and GraphSAGE is the same every epoch, so it
    counts as nothing, and so do its input gradients; the last layer computes the train vertices only. Of the features,
    and of their sums, those count that are not zero in the former.
    Exchange is not in it.
    """
    widths = [graph.feat_dim, *[cell.hidden] * (cell.num_layers - 1), graph.num_classes]
    flops = gathered = 0.0
    for layer in range(cell.num_layers):
        is_first, is_last = layer == 0, layer == cell.num_layers - 1
        share = graph.num_train / graph.num_nodes if is_last else 1.0
        products = 2 if cell.model == "sage" else 1
        passes = 2 if is_first else 3
        density = graph.feat_density if is_first else 1.0
        flops += passes * products * 2 * density * share * graph.num_nodes * widths[layer] * widths[layer + 1]
        if not is_first or cell.model == "gat":
            operand = min(widths[layer], widths[layer + 1]) if cell.model != "gat" else widths[layer + 1]
            rows = share * (graph.num_edges + graph.num_nodes)
            gathered += 2 * (rows * operand * 4 + rows * 4)
    return (flops / rates.flops + gathered / rates.copy_bytes_per_s) / max(1, min(cell.ranks, cores))
