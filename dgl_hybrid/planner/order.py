# SPDX-License-Identifier: Apache-2.0
"""In which order a layer sums and multiplies, where both give the same result.

DGL multiplies first where a product makes rows narrower, since fewer numbers are gathered then. But there are as many
products as sources: a last layer of few seeds that read most of the graph multiplies every row for the sake of a few
sums. Summed first, the rows that are gathered (and exchanged) are wide and the products few. The cheaper order follows
from the numbers of rows and edges, which are known before there is a plan, and from a trace of each order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .costs import cost_model
from .model_trace import ModelTrace
from .topology import Topology

LEAST_GAIN = 0.05
"""Part of an epoch by which another order than DGL's must be cheaper: counts over rates are no better than that."""
UNSURE = 1.6
"""An order that costs less than so many times the cheapest may be the faster one. Rates are of rows that lie anywhere:
where many edges read the same rows, and backward the few rows of the seeds, sums before products cost 0.6 to 0.8 of
what is counted (`products`: 1.18 times as much, and 0.81 of the time)."""
LEAST_TIMED_S = 2e-3
"""Of work by counts: shorter epochs are mostly calls, alike in both orders, and timing takes a second or two."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkCounts:
    """What there is to do in an epoch with everything communicated, of all ranks together."""

    rows: tuple[int, ...]
    """(L + 1,) of each level."""
    edges: tuple[int, ...]
    """(L,) in-edges of each layer."""
    received: tuple[int, ...]
    """(L,) rows received for each layer."""


def propose_orders(
    trace: ModelTrace, trace_with: Callable[[Sequence[bool]], ModelTrace], topology: Topology, counts: WorkCounts
) -> tuple[ModelTrace, ...]:
    """Returns the trace with the cheapest order of each layer by what is counted, and with one that is nearly as cheap,
    if there is any: which of the two is faster is to be timed. Layers are decided for one by one, the last one first.

    Args:
        trace: With DGL's order in every layer.
        trace_with: Traces the model with (L,) `sums_first`.
        topology: Rates.
        counts: Of this graph and these seeds.
    """
    best, best_s = trace, work_s(trace, topology, counts)
    others: list[tuple[float, ModelTrace]] = []
    for layer in reversed(range(trace.num_layers)):
        if trace.layers[layer].keeps_result or not trace.layers[layer].can_sum_first:
            continue
        tried = trace_with([is_first or index == layer for index, is_first in enumerate(best.sums_first)])
        tried_s = work_s(tried, topology, counts)
        is_better = tried_s < (1.0 - LEAST_GAIN) * best_s
        others.append((best_s, best) if is_better else (tried_s, tried))
        if is_better:
            best, best_s = tried, tried_s
    other_s, other = min(others, key=lambda one: one[0], default=(0.0, best))
    is_unsure = bool(others) and best_s > LEAST_TIMED_S and other_s < UNSURE * best_s
    return (best, other) if is_unsure else (best,)


def work_s(trace: ModelTrace, topology: Topology, counts: WorkCounts) -> float:
    """Returns the seconds of an epoch's work and exchange, spread evenly over the ranks, nothing hidden."""
    world_size = topology.world_size
    costs = cost_model(trace, topology, 0)
    row_s, edge_s = (*costs.row_s, costs.output_row_s), (*costs.edge_s[1:], costs.output_edge_s)
    total_s = sum(count * s for count, s in zip(counts.rows, row_s, strict=True))
    total_s += sum(count * s for count, s in zip(counts.edges, edge_s, strict=True))
    if world_size > 1:
        receive_s = (sum(by_owner) / (world_size - 1) for by_owner in costs.receive_s)
        total_s += sum(count * s for count, s in zip(counts.received, receive_s, strict=True))
    return total_s / world_size
