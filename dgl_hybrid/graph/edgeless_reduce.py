# SPDX-License-Identifier: Apache-2.0
"""What user-defined functions give on a rank without edges: zeros of the right shape that stay in the graph.

Stock DGL leaves the result of a reduce unset there. Here the other ranks may have edges in the same layer, and run an
exchange backward for every field that the functions used: this rank has to take part in those, and in no others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import dgl
import torch
from torch import Tensor

from dgl_hybrid.ops.device_index import move_graph


def reduce_of_nothing(
    message_func: Any,
    reduce_func: Any,
    *,
    sources: Mapping[str, Tensor],
    destinations: Mapping[str, Tensor],
    edges: Mapping[str, Tensor],
    num_dst: int,
) -> dict[str, Tensor]:
    """Runs the functions on one made-up edge, whose result nobody reads. Not collective.

    Args:
        message_func, reduce_func: The user's.
        sources, destinations, edges: The fields they may read; their rows are not looked at.
        num_dst: Rows of the results.

    Returns:
        Each field the reduce returns, (num_dst, ...) zeros. A backward from them reaches the fields and the parameters
        that the functions used.
    """
    results: dict[str, Tensor] = {}

    def reduce_and_note(nodes: Any) -> dict[str, Tensor]:
        results.update(reduce_func(nodes))
        return results

    edge = _MadeUpEdge(sources, destinations, edges)
    edge.graph.update_all(message_func, reduce_and_note)
    return {name: edge.zeros_like(value, num_dst) for name, value in results.items()}


def messages_of_nothing(
    message_func: Any, *, sources: Mapping[str, Tensor], destinations: Mapping[str, Tensor], edges: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Runs a message function on one made-up edge. Not collective.

    Args:
        message_func, sources, destinations, edges: As of `reduce_of_nothing`.

    Returns:
        Each field it returns, (0, ...). A backward from them reaches the fields and the parameters that it used.
    """
    results: dict[str, Tensor] = {}

    def note(edges: Any) -> dict[str, Tensor]:
        results.update(message_func(edges))
        return {}

    edge = _MadeUpEdge(sources, destinations, edges)
    edge.graph.apply_edges(note)
    return {name: edge.zeros_like(value, 0) for name, value in results.items()}


class _MadeUpEdge:
    """A graph of one edge, with one row of each field."""

    def __init__(
        self, sources: Mapping[str, Tensor], destinations: Mapping[str, Tensor], edges: Mapping[str, Tensor]
    ) -> None:
        device = next((rows.device for fields in (sources, destinations, edges) for rows in fields.values()), None)
        # Not `.to(device)`, which DGL's build for CPUs refuses where features are on a GPU.
        block = dgl.create_block(([0], [0]), num_src_nodes=1, num_dst_nodes=1)
        self.graph = move_graph(block, device or "cpu")
        # What needs a gradient, as it is here and as it is made up there.
        self._real: list[Tensor] = []
        self._leaves: list[Tensor] = []
        num_made_up = 0
        for data, fields in (
            (self.graph.srcdata, sources),
            (self.graph.dstdata, destinations),
            (self.graph.edata, edges),
        ):
            for name, value in fields.items():
                rows = _made_up(value, num_made_up)
                num_made_up += rows.numel()
                if value.requires_grad:
                    self._real.append(value)
                    self._leaves.append(rows.requires_grad_())
                    rows = rows.clone()  # functions may write into what they are given
                data[name] = rows

    def zeros_like(self, value: Tensor, num_rows: int) -> Tensor:
        """Returns so many zero rows like those that were made of this edge's, in the graph where these are."""
        zeros = torch.zeros((num_rows, *value.shape[1:]), dtype=value.dtype, device=value.device)
        if not value.requires_grad:
            return zeros
        reached = _leaves_of(value)
        used = [field for field, leaf in zip(self._real, self._leaves, strict=True) if id(leaf) in reached]
        anchored: Tensor = _Anchored.apply(zeros, value, *used)
        return anchored


def _made_up(value: Tensor, num_before: int) -> Tensor:
    """Returns one row; all differ, as the zero gradients of a function that is not defined there would be NaN, and a
    distance, say, has no direction between equal rows.
    """
    shape = (1, *value.shape[1:])
    if not (value.is_floating_point() or value.is_complex()):
        return torch.zeros(shape, dtype=value.dtype, device=value.device)  # may be a position in a table: 0 is in any
    # Between 0.25 and 0.75, where most functions are defined; spread by the golden ratio, which repeats nothing.
    positions = torch.arange(num_before, num_before + math.prod(shape), dtype=torch.float64)
    numbers = 0.25 + 0.5 * (positions * 0.6180339887498949 % 1.0)
    return numbers.reshape(shape).to(value.device, value.dtype)


class _Anchored(torch.autograd.Function):
    """Returns its first argument; its backward runs through the others with zero gradients."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, *anchors: Tensor) -> Tensor:
        ctx.save_for_backward(*anchors)
        return out.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (grads[0], *(torch.zeros_like(anchor) for anchor in ctx.saved_tensors))


def _leaves_of(value: Tensor) -> set[int]:
    """Returns the `id` of every leaf that a backward from here reaches.

    Found without running one: in the forward of a checkpoint that would run the layer again, on this rank alone.
    """
    reached: set[int] = set()
    seen: set[Any] = set()
    pending: list[Any] = [value.grad_fn]
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):  # where a backward ends, at a leaf
            reached.add(id(node.variable))
        pending += [following for following, _ in node.next_functions]
    return reached
