# SPDX-License-Identifier: Apache-2.0
"""What a traced model did: sums of costs by level and by layer, and what blocks saw of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from dgl_hybrid.graph.layer_block import FusedOp, LayerBlock
from dgl_hybrid.graph.op_rates import attention_slowdown, weighted_slowdown


@dataclass
class TraceRecord:
    """Sums over one forward and backward; per level or per layer, all rows or edges together."""

    level_flops: list[float]
    level_bytes: list[float]
    level_held: list[float]
    edge_flops: list[float]
    edge_bytes: list[float]
    edge_held: list[float]
    fields: list[list[tuple[int, int, bool]]]
    reached: set[int] = field(default_factory=set)
    """Layers that do something along edges, with rows of sources or without (weights of edges, say)."""
    exchanged: set[int] = field(default_factory=set)
    """Layers that exchange in every epoch."""
    kept: set[int] = field(default_factory=set)
    """Layers that keep what they aggregate."""
    summed: set[int] = field(default_factory=set)
    """Layers that do something along edges which can be split by source."""
    attended: set[int] = field(default_factory=set)
    """Those of them whose every edge counts by itself."""
    unsplit: set[int] = field(default_factory=set)
    """Layers that do something along edges which cannot."""
    ordered: set[int] = field(default_factory=set)
    """Layers that asked in which order to sum and multiply."""
    beside_flops: dict[int, float] = field(default_factory=dict)
    """By layer, of all its rows together: of the level it makes, what may run while its rows travel."""
    batch_norm_levels: set[int] = field(default_factory=set)
    output_rows: set[int] = field(default_factory=set)
    """How many rows the outputs have that need a gradient."""
    blocks: list[LayerBlock] = field(default_factory=list)
    """What the model runs on."""

    def scale(self, factor: float) -> None:
        """Multiplies all costs."""
        for costs in (self.level_flops, self.level_bytes, self.edge_flops, self.edge_bytes):
            costs[:] = [cost * factor for cost in costs]

    def unused(self) -> list[int]:
        """The layers whose blocks were not used."""
        return [index + 1 for index, fields in enumerate(self.fields) if not fields and index + 1 not in self.reached]

    def add_unused(self, other: TraceRecord) -> None:
        """Takes what another draw of the model did in layers that were not used here, and what it did besides."""
        for index in range(len(self.fields)):
            self.fields[index] = self.fields[index] or other.fields[index]
        for name in ("level_flops", "level_bytes", "level_held", "edge_flops", "edge_bytes", "edge_held"):
            ours, theirs = getattr(self, name), getattr(other, name)
            ours[:] = [max(pair) for pair in zip(ours, theirs, strict=True)]
        for name in ("reached", "exchanged", "kept", "summed", "attended", "unsplit", "ordered", "batch_norm_levels"):
            getattr(self, name).update(getattr(other, name))
        self.beside_flops = other.beside_flops | self.beside_flops

    @staticmethod
    def empty(num_layers: int) -> TraceRecord:
        levels, layers = num_layers + 1, num_layers
        return TraceRecord(
            [0.0] * levels,
            [0.0] * levels,
            [0.0] * levels,
            [0.0] * layers,
            [0.0] * layers,
            [0.0] * layers,
            [[] for _ in range(layers)],
        )


class TraceObserver:
    """Notes in a record what blocks exchange and keep, and charges what they pass along edges.

    Args:
        record: Of the trace.
        num_edges: (L,) of each layer's block.
        device: Where the model will train, whose slow operations are charged.
    """

    def __init__(self, record: TraceRecord, num_edges: list[int], device: torch.device) -> None:
        self.record, self.num_edges, self.device = record, num_edges, device
        self.passed: list[tuple[int, Tensor, Callable[[int, int], float]]] = []

    def on_exchange(self, layer: int, fields: list[Tensor]) -> None:
        self.record.exchanged.add(layer)
        for x in fields:
            self.record.fields[layer - 1].append((_row_numel(x), x.element_size(), x.requires_grad))

    def on_kept_result(self, layer: int, operands: tuple[Tensor, ...]) -> None:
        self.record.kept.add(layer)
        for x in operands:
            self.record.fields[layer - 1].append((_row_numel(x), x.element_size(), False))

    def on_choice_of_order(self, layer: int) -> None:
        self.record.ordered.add(layer)

    def on_work_beside(self, layer: int, flops: float) -> None:
        self.record.beside_flops[layer] = self.record.beside_flops.get(layer, 0.0) + flops

    def on_message_passing(self, layer: int, fields: list[Tensor], *, is_weighted: bool) -> None:
        self.record.reached.add(layer)
        slowdown = partial(weighted_slowdown, device=self.device) if is_weighted else lambda heads, width: 1.0
        self.passed.extend((layer, x, slowdown) for x in fields)

    def on_attention(self, layer: int, op: FusedOp, x: Tensor, *, has_dropout: bool) -> None:
        self.passed.append((layer, x, partial(attention_slowdown, op, device=self.device, has_dropout=has_dropout)))

    def charge(self) -> None:
        """Adds what was passed to the record, timed and not counted: kernels read each source once for each edge."""
        for layer, x, slowdown in self.passed:
            # Gathered once forward, and once backward if there is one.
            passes = 2 if x.requires_grad else 1
            elements = passes * _row_numel(x) * self.num_edges[layer - 1]
            heads = _row_numel(x) // x.shape[-1] if x.dim() > 2 else 1
            factor = slowdown(heads, _row_numel(x) // heads)
            self.record.edge_flops[layer - 1] += elements
            self.record.edge_bytes[layer - 1] += factor * elements * x.element_size()


def _row_numel(x: Tensor) -> int:
    return int(torch.Size(x.shape[1:]).numel())
