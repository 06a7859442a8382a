# SPDX-License-Identifier: Apache-2.0
"""How much slower some operations are than the plain ones whose rates the planner has, on this machine.

The planner's gather rate is that of copying sources; DGL's CPU kernels for weighted messages are many times slower (no
vectorised form). Its row rate is that of a product; a dropout mask that is a function of ids costs several. A plan that
took them for plain ones would recompute what it should receive.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable

import dgl
import torch
from torch import Tensor

_NUM_NODES, _DEGREE = 4096, 16
_ROUNDS = 3


@functools.cache
def weighted_slowdown(num_heads: int, head_width: int) -> float:
    """Returns the time of `u_mul_e` + `sum` over that of `copy_u` + `sum`, forward and backward; at least 1.

    Args:
        num_heads: Weights per edge.
        head_width: Elements that share a weight.
    """
    generator = torch.Generator().manual_seed(0)
    src = torch.randint(_NUM_NODES, (_NUM_NODES * _DEGREE,), generator=generator)
    graph = dgl.graph((src, torch.arange(_NUM_NODES).repeat_interleave(_DEGREE)), num_nodes=_NUM_NODES)
    x = torch.randn(_NUM_NODES, num_heads, head_width, generator=generator)
    weight = torch.rand(graph.num_edges(), num_heads, 1, generator=generator)
    copied = _time(lambda: dgl.ops.copy_u_sum(graph, x.requires_grad_()))
    weighted = _time(lambda: dgl.ops.u_mul_e_sum(graph, x.requires_grad_(), weight.requires_grad_()))
    return max(1.0, weighted / copied)


class InEdgeSum:
    """The sum over in-edges as layers run it, by DGL's kernel: what the probe is to time, instead of a plain product.

    Its graph is built at the first call for an `indptr`, so that repeated calls time the sum alone.
    """

    def __init__(self) -> None:
        self._indptr: Tensor | None = None
        self._graph: dgl.DGLGraph | None = None

    def __call__(self, indptr: Tensor, sources: Tensor, rows: Tensor) -> Tensor:
        """Returns the (N, F) sums of (N, F) `rows` over the in-edges of a CSC structure, (N + 1,) and (E,) int64."""
        if self._indptr is not indptr:
            edge_ids = torch.arange(len(sources), device=sources.device)
            self._indptr = indptr
            self._graph = dgl.graph(("csc", (indptr, sources, edge_ids)), num_nodes=len(rows))
        summed: Tensor = dgl.ops.copy_u_sum(self._graph, rows)
        return summed


def row_slowdown(function: Callable[[Tensor], Tensor]) -> float:
    """Returns the time of a row-local function over that of a product, forward and backward; at least 1."""
    x = torch.randn(4 * _NUM_NODES, 64).requires_grad_()
    return max(1.0, _time(lambda: function(x)) / _time(lambda: x * 2.0))


def _time(run: Callable[[], Tensor]) -> float:
    elapsed = []
    for _ in range(_ROUNDS + 1):
        start = time.perf_counter()
        run().sum().backward()
        elapsed.append(time.perf_counter() - start)
    return statistics.median(elapsed[1:])
