# SPDX-License-Identifier: Apache-2.0
"""How much slower some operations are than the plain ones whose rates the planner has, on this machine.

The planner's gather rate is that of copying sources; weighted messages and attention take longer, by how much depends
on heads, widths and kernels. Its row rate is that of a product; a dropout mask that is a function of ids costs several.
A plan that took them for plain ones would recompute what it should receive. Messages are timed on a `LayerBlock`, hence
by the kernels that layers run, whichever those are, and on the device that trains.
"""

from __future__ import annotations

import functools
import logging
import statistics
import time
from collections.abc import Callable

import dgl
import torch
from torch import Tensor

from dgl_hybrid.graph.layer_block import FusedOp, LayerBlock
from dgl_hybrid.graph.tiny_blocks import build_block_of
from dgl_hybrid.ops import EdgeDropout, gat, gatv2
from dgl_hybrid.ops.dgl_index import sparse_graph_of
from dgl_hybrid.planner.probe import wait_for_device

_logger = logging.getLogger(__name__)

_CPU = torch.device("cpu")
_NUM_NODES, _GPU_NODES, _DEGREE = 1 << 12, 1 << 17, 16
"""On a GPU, enough that launches take little of the time."""
_NODE_BYTES = 512
"""That a node takes for each column, at most: attention by the reference's operations, float64 for each edge."""
_ROUNDS = 5


@functools.cache
def weighted_slowdown(num_heads: int, head_width: int, device: torch.device = _CPU) -> float:
    """Returns the time of `u_mul_e` + `sum` over that of `copy_u` + `sum`, forward and backward; at least 1.

    Args:
        num_heads: Weights per edge.
        head_width: Elements that share a weight.
        device: Where.
    """

    def measure(block: LayerBlock) -> float:
        x = _random_rows(block.num_src_nodes(), num_heads, head_width, device=device)
        weight = _random_rows(block.num_edges(), num_heads, 1, device=device)
        copying = _copying(block, num_heads * head_width, device)
        return _slowdown(lambda: dgl.ops.u_mul_e_sum(block, x, weight), copying, device)

    return _measured(measure, num_heads * head_width, device)


@functools.cache
def attention_slowdown(
    op: FusedOp, num_heads: int, head_width: int, device: torch.device = _CPU, *, has_dropout: bool
) -> float:
    """Returns the time of a fused attention op over that of `copy_u` + `sum`, forward and backward; at least 1.

    Args:
        op: Which.
        num_heads: Attention heads.
        head_width: Elements of one head.
        device: Where.
        has_dropout: Whether it drops attention weights.
    """

    def measure(block: LayerBlock) -> float:
        edges, num_nodes = sparse_graph_of(block.real_index, device), block.num_src_nodes()
        assert edges is not None
        x, el, er = (_random_rows(num_nodes, num_heads, width, device=device) for width in (head_width, 1, 1))
        dropout = EdgeDropout.from_call(0.5, seed=0, step=0, call_index=0) if has_dropout else None
        copying = _copying(block, num_heads * head_width, device)
        if op == "gat":
            return _slowdown(lambda: gat(edges, x, el, er, dropout=dropout), copying, device)
        x_dst = _random_rows(num_nodes, num_heads, head_width, device=device)
        attention = _random_rows(num_heads, head_width, device=device)
        return _slowdown(lambda: gatv2(edges, x, x_dst, attention, dropout=dropout), copying, device)

    return _measured(measure, num_heads * head_width, device)


class InEdgeSum:
    """The sum over in-edges as layers run it: what the probe is to time, instead of a plain product.

    Its block is built at the first call for an `indptr`, so that repeated calls time the sum alone.
    """

    def __init__(self) -> None:
        self._indptr: Tensor | None = None
        self._block: LayerBlock | None = None

    def __call__(self, indptr: Tensor, sources: Tensor, rows: Tensor) -> Tensor:
        """Returns the (N, F) sums of (N, F) `rows` over the in-edges of a CSC structure, (N + 1,) and (E,) int64."""
        if self._indptr is not indptr:
            self._indptr = indptr
            self._block = build_block_of(indptr.cpu(), sources.cpu()).to(rows.device)
        summed: Tensor = dgl.ops.copy_u_sum(self._block, rows)
        return summed


@functools.cache
def row_slowdown(function: Callable[[Tensor], Tensor], device: torch.device = _CPU) -> float:
    """Returns the time of a row-local function over that of a product, forward and backward; at least 1."""
    x = _random_rows(4 * _num_nodes(device), 64, device=device)
    return _slowdown(lambda: function(x), lambda: x * 2.0, device)


def _num_nodes(device: torch.device) -> int:
    return _GPU_NODES if device.type == "cuda" else _NUM_NODES


def _measured(measure: Callable[[LayerBlock], float], num_columns: int, device: torch.device) -> float:
    """Returns what `measure` finds on as large a block as there is room for; 1 where there is none for any. It is a
    price, for the lack of which no model is to be left without a plan.
    """
    num_nodes = _num_nodes(device)
    if device.type == "cuda":
        free_bytes, _ = torch.cuda.mem_get_info(device)
        while num_nodes > _NUM_NODES and num_nodes * _NODE_BYTES * num_columns > free_bytes:
            num_nodes //= 2
    try:
        return measure(_sample_block(device, num_nodes))
    except torch.OutOfMemoryError as error:
        _logger.warning("an operation is priced as a plain sum, as there is no memory to time it: %s", error)
        return 1.0


def _sample_block(device: torch.device, num_nodes: int) -> LayerBlock:
    indptr = _DEGREE * torch.arange(num_nodes + 1)
    sources = torch.randint(num_nodes, (num_nodes * _DEGREE,), generator=torch.Generator().manual_seed(0))
    return build_block_of(indptr, sources).to(device)


def _copying(block: LayerBlock, width: int, device: torch.device) -> Callable[[], Tensor]:
    x = _random_rows(block.num_src_nodes(), width, device=device)
    return lambda: dgl.ops.copy_u_sum(block, x)


def _random_rows(*shape: int, device: torch.device) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(0)).to(device).requires_grad_()


def _slowdown(run: Callable[[], Tensor], plain: Callable[[], Tensor], device: torch.device) -> float:
    """Times both by turns, so that whatever else the machine does falls on either; the first round warms up."""
    ratios = [_elapsed_s(run, device) / _elapsed_s(plain, device) for _ in range(_ROUNDS + 1)]
    return max(1.0, statistics.median(ratios[1:]))


def _elapsed_s(run: Callable[[], Tensor], device: torch.device) -> float:
    wait_for_device(device)
    start = time.perf_counter()
    run().sum().backward()
    wait_for_device(device)
    return time.perf_counter() - start
