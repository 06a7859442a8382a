# SPDX-License-Identifier: Apache-2.0
"""Prices of the planner's items on one rank: what receiving a row costs and what computing it here costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import PlanError
from .model_times import ModelTimes
from .model_trace import BYTES_PER_ELEMENT, ModelTrace
from .topology import Topology

STRUCTURE_BYTES_PER_EDGE = 16.0
"""Of a held in-edge, four each: source, position, global id and key of dropout; layers above share these with the first
one and add eight for the edge by source. What layers that are alike share of that, too, is not reckoned with."""
AGREEMENTS = 1
"""Small collectives before each epoch: what happened in the last one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ItemCosts:
    """Seconds and bytes per item, by level l = 0..L-1.

    Receiving costs `receive_s[l][owner]`; computing costs `row_s[l] + edge_s[l] * in_degree`, own row only: what its
    inputs cost is the plan's matter. Sending is charged to the receiver.
    """

    receive_s: tuple[tuple[float, ...], ...]
    """(L, P) by owner: wire and pack, forward and backward."""
    row_s: tuple[float, ...]
    """(L,) seconds per computed row; level 0: per input row held here."""
    edge_s: tuple[float, ...]
    """(L,) seconds per in-edge of layer l; `edge_s[0]` is 0."""
    receive_bytes: tuple[float, ...]
    """(L,) bytes held per received row."""
    row_held_bytes: tuple[float, ...]
    """(L,) bytes held per computed row."""
    edge_held_bytes: tuple[float, ...]
    """(L,) bytes held per in-edge of a computed row; `edge_held_bytes[0]` is 0."""
    pack_s: tuple[float, ...] = ()
    """(L,) the part of `receive_s` that is packing and unpacking, so device work; empty means 0."""
    wire_s: tuple[tuple[tuple[float, float], ...], ...] = ()
    """(L, P, 2) by owner, forward and backward: the part of `receive_s` for which an owner's link is taken, too; empty
    where there are no links, as rows of one host's memory take the time of who copies them."""
    wire_bytes: tuple[tuple[float, ...], ...] = ()
    """(L, P) by owner: bytes that travel forward for a received row in every epoch, on average over rows that sums
    stand for; empty means 0."""
    latency_s: tuple[float, ...] = ()
    """(L,) seconds per exchange of level l, whatever it carries; empty means 0."""
    widths: tuple[float, ...] = ()
    """(L,) elements per exchanged row, for NeutronStar's cost form; empty means 1."""
    copy_s: tuple[float, ...] = ()
    """(L,) seconds per row held here in layers that copy held and received rows together; empty means 0."""
    overlaps: tuple[bool, ...] = ()
    """(L,) whether edges from rows held here are aggregated while the others travel; empty means not."""
    beside_s: tuple[float, ...] = ()
    """(L,) seconds per row that layer l + 1 makes, of those the row costs, which may run while its rows travel; empty
    means 0."""
    output_row_s: float = 0.0
    """Seconds per row of level L (never an item; for the epoch estimate)."""
    output_edge_s: float = 0.0
    """Seconds per in-edge of layer L."""
    epoch_s: float = 0.0
    """Seconds per epoch that no plan changes: calls, the optimizer's step, the gradients' all-reduce, agreements."""

    def __post_init__(self) -> None:
        num_layers = len(self.receive_s)
        if num_layers < 1:
            raise ValueError("costs must have at least one level (got 0)")
        world_size = len(self.receive_s[0])
        if any(len(row) != world_size for row in self.receive_s):
            raise ValueError(f"receive_s must be (L, P) (got rows of {[len(row) for row in self.receive_s]})")
        for name in ("row_s", "edge_s", "receive_bytes", "row_held_bytes", "edge_held_bytes"):
            if len(getattr(self, name)) != num_layers:
                raise ValueError(f"{name} must have {num_layers} entries (got {len(getattr(self, name))})")
        defaults = (
            ("pack_s", 0.0),
            ("latency_s", 0.0),
            ("widths", 1.0),
            ("copy_s", 0.0),
            ("overlaps", False),
            ("beside_s", 0.0),
        )
        for name, default in defaults:
            value = getattr(self, name)
            if not value:
                object.__setattr__(self, name, (default,) * num_layers)
            elif len(value) != num_layers:
                raise ValueError(f"{name} must have {num_layers} entries or none (got {len(value)})")
        if self.edge_s[0] != 0 or self.edge_held_bytes[0] != 0:
            raise ValueError("edge_s[0] and edge_held_bytes[0] must be 0: an input row has no in-edges to pay")
        if self.wire_s and (len(self.wire_s), {len(row) for row in self.wire_s}) != (num_layers, {world_size}):
            raise ValueError(f"wire_s must be (L, P) pairs (got {len(self.wire_s)} layers)")
        if not self.wire_bytes:
            object.__setattr__(self, "wire_bytes", ((0.0,) * world_size,) * num_layers)
        if (len(self.wire_bytes), {len(row) for row in self.wire_bytes}) != (num_layers, {world_size}):
            raise ValueError(f"wire_bytes must be (L, P) (got {len(self.wire_bytes)} layers)")
        numbers = [x for row in (*self.receive_s, *self.wire_bytes) for x in row]
        numbers += [x for row in self.wire_s for pair in row for x in pair]
        for name in self.__slots__:
            value = getattr(self, name)
            if name not in ("receive_s", "wire_s", "wire_bytes"):
                numbers += [value] if isinstance(value, float | int) else list(value)
        if not all(math.isfinite(x) and x >= 0 for x in numbers):
            raise ValueError("costs must be finite and not negative")

    @property
    def num_layers(self) -> int:
        """L."""
        return len(self.receive_s)

    @property
    def world_size(self) -> int:
        """P."""
        return len(self.receive_s[0])


def cost_model(
    trace: ModelTrace,
    topology: Topology,
    rank: int,
    times: ModelTimes | None = None,
    sent_shares: Sequence[Sequence[float]] | None = None,
) -> ItemCosts:
    """Turns a model's trace and a cluster's rates into prices for the items of one rank. Pure.

    Args:
        trace: of the user's model.
        topology: measured or assumed.
        rank: the receiving rank.
        times: of the model on this rank, if it was timed; None: from the trace's counts and the topology's rates.
        sent_shares: (L, P) by layer and owner, how many rows travel for each that is received: fewer than one where
            sums travel in place of more rows. None: 1.

    Raises:
        PlanError: `rank` is not one of the topology's ranks, or the times are of another number of layers.
    """
    if times is not None and times.num_layers != trace.num_layers:
        raise PlanError(f"the trace is of {trace.num_layers} layers, the times of {times.num_layers}; time this model")
    if not 0 <= rank < topology.world_size:
        raise PlanError(f"rank must lie in 0..{topology.world_size - 1}, the probed ranks (got {rank}); probe again")
    counted_row_s = [
        x.row_flops / topology.dense_flops_per_s + x.row_bytes / topology.row_bytes_per_s for x in trace.levels
    ]
    row_s = counted_row_s if times is None else list(times.row_s)
    edge_s = [0.0]
    receive_s, pack_s, latency_s, copy_s, receive_bytes = [], [], [], [], []
    wire_s: list[tuple[tuple[float, float], ...]] = []
    wire_bytes: list[tuple[float, ...]] = []
    for index, layer in enumerate(trace.layers):
        fwd, bwd = layer.operand_bytes_fwd, layer.operand_bytes_bwd
        receive_bytes.append(fwd + bwd)
        if layer.keeps_result:
            edge_s.append(0.0)
            receive_s.append((0.0,) * topology.world_size)
            wire_s.append(((0.0, 0.0),) * topology.world_size)
            wire_bytes.append((0.0,) * topology.world_size)
            pack_s.append(0.0)
            latency_s.append(0.0)
            copy_s.append(0.0)
            continue
        gather = topology.gather_rate(max(fwd, 1.0))
        counted_s = layer.edge_bytes / gather + layer.edge_flops / topology.dense_flops_per_s
        edge_s.append(counted_s if times is None else times.edge_s[index])
        # Forward: gathered into the send buffer at the owner, written here. Backward: read here, added at the owner.
        pack = (fwd + bwd) / gather + (fwd + bwd) / topology.row_bytes_per_s
        shares = [0.0 if owner == rank else 1.0 for owner in range(topology.world_size)]
        if sent_shares is not None:
            shares = [x * share for x, share in zip(shares, sent_shares[index], strict=True)]
        wire_bytes.append(tuple(share * fwd for share in shares))
        bandwidth = topology.bandwidth_bytes_per_s
        wire = tuple(
            (share * fwd / bandwidth[owner][rank], share * bwd / bandwidth[rank][owner])
            for owner, share in enumerate(shares)
        )
        wire_s.append(wire)
        receive_s.append(tuple(0.0 if owner == rank else sum(wire[owner]) + pack for owner in range(len(wire))))
        pack_s.append(pack)
        # Split by source, received rows are read where they lie; else held ones are copied beside them, and back.
        copy_s.append(0.0 if layer.can_split else 2.0 * (fwd + bwd) / topology.row_bytes_per_s)
        exchanges = 2 if bwd else 1
        latency_s.append(exchanges * max(topology.latency_s[q][rank] for q in range(topology.world_size)))
    num_layers = trace.num_layers
    # Of a row's time as large a part as of its counts.
    beside_s = [
        row_s[k + 1] * min(layer.beside_flops / topology.dense_flops_per_s / (counted_row_s[k + 1] or 1.0), 1.0)
        for k, layer in enumerate(trace.layers)
    ]
    held = [
        level.held_bytes or layer.operand_bytes_fwd
        for level, layer in zip(trace.levels[:-1], trace.layers, strict=True)
    ]
    # Level k's edges belong to layer k, `trace.layers[k - 1]`.
    edge_held = [0.0] + [STRUCTURE_BYTES_PER_EDGE + layer.edge_held_bytes for layer in trace.layers[:-1]]
    if trace.layers[0].keeps_result and num_layers > 1:
        # Owners hand out what the first layer aggregates: a cached row needs no in-edges here, only that to keep.
        held[1] += trace.layers[0].operand_bytes_fwd
        edge_held[1] = 0.0
    parameter_bytes = trace.num_parameters * BYTES_PER_ELEMENT[trace.dtype]
    reduce_s = (1 + AGREEMENTS) * topology.allreduce_latency_s + parameter_bytes / topology.allreduce_bytes_per_s
    return ItemCosts(
        receive_s=tuple(receive_s),
        row_s=tuple(row_s[:num_layers]),
        edge_s=tuple(edge_s[:num_layers]),
        receive_bytes=tuple(receive_bytes),
        row_held_bytes=tuple(held),
        edge_held_bytes=tuple(edge_held),
        pack_s=tuple(pack_s),
        wire_s=tuple(wire_s) if topology.overlaps else (),
        wire_bytes=tuple(wire_bytes),
        latency_s=tuple(latency_s),
        widths=tuple(float(layer.operand_width) for layer in trace.layers),
        copy_s=tuple(copy_s),
        overlaps=tuple(layer.can_split and not layer.keeps_result and topology.overlaps for layer in trace.layers),
        beside_s=tuple(beside_s),
        output_row_s=row_s[num_layers],
        output_edge_s=edge_s[num_layers],
        epoch_s=(reduce_s if topology.world_size > 1 else 0.0) + (times.fixed_s if times is not None else 0.0),
    )
