# SPDX-License-Identifier: Apache-2.0
"""In which order layers sum and multiply: what the counts of rows and edges make cheaper."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import pytest

from dgl_hybrid.planner import LayerTrace, LevelTrace, ModelTrace, WorkCounts, propose_orders, uniform_topology
from dgl_hybrid.planner.order import work_s

IN, OUT = 128, 47


def traced(sums_first: Sequence[bool], *, kept: bool = False) -> ModelTrace:
    """Two layers of 128 to 128 to 47, float32, the first of which has one order only."""
    first, last = sums_first
    assert not first or not kept
    width = IN if last else OUT
    products = 6.0 * IN * OUT
    layers = [
        LayerTrace(
            edge_flops=2.0 * w,
            edge_bytes=8.0 * w,
            operand_bytes_fwd=4.0 * w,
            operand_bytes_bwd=4.0 * w,
            operand_width=w,
            sums_first=is_first,
        )
        for w, is_first in ((IN, first), (width, last))
    ]
    if kept:
        layers[0] = replace(layers[0], keeps_result=True)
    rows = [0.0, 6.0 * IN * IN + (0.0 if last else products), products if last else 0.0]
    return ModelTrace(
        levels=tuple(LevelTrace(row_flops=flops, row_bytes=0.0) for flops in rows),
        layers=tuple(layers),
        dtype="float32",
        num_parameters=IN * IN + IN * OUT,
    )


def order(rows: tuple[int, int, int], edges: tuple[int, int], received: int = 0, **rates: float) -> tuple[bool, ...]:
    topology = uniform_topology(2, dense_flops_per_s=5e10, gather_bytes_per_s=1e10, **rates)
    counts = WorkCounts(rows=rows, edges=edges, received=(0, received))
    trace_with = functools.partial(traced, kept=True)
    return propose_orders(trace_with((False, False)), trace_with, topology, counts)[0].sums_first


def test_few_seeds_that_read_most_of_the_graph_sum_first() -> None:
    assert order((20_000, 19_000, 1_600), (1_000_000, 80_000)) == (False, True)


def test_as_many_seeds_as_sources_multiply_first() -> None:
    assert order((20_000, 20_000, 20_000), (1_000_000, 1_000_000)) == (False, False)


def test_many_edges_gather_narrow_rows() -> None:
    assert order((20_000, 19_000, 1_600), (1_000_000, 4_000_000)) == (False, False)


def test_a_slow_network_carries_narrow_rows() -> None:
    rows, edges = (20_000, 19_000, 1_600), (1_000_000, 80_000)
    assert order(rows, edges, received=5_000, bandwidth_bytes_per_s=1e10) == (False, True)
    assert order(rows, edges, received=5_000, bandwidth_bytes_per_s=1e8) == (False, False)


def test_an_order_that_is_nearly_as_cheap_is_to_be_timed_too() -> None:
    topology = uniform_topology(2, dense_flops_per_s=5e10, gather_bytes_per_s=1e10)

    def orders(num_edges: int) -> list[tuple[bool, ...]]:
        counts = WorkCounts(rows=(20_000, 19_000, 1_600), edges=(1_000_000, num_edges), received=(0, 0))
        trace_with = functools.partial(traced, kept=True)
        found = propose_orders(trace_with((False, False)), trace_with, topology, counts)
        return [trace.sums_first for trace in found]

    costs = {}
    for num_edges in (80_000, 800_000, 8_000_000):
        counts = WorkCounts(rows=(20_000, 19_000, 1_600), edges=(1_000_000, num_edges), received=(0, 0))
        narrow_s, wide_s = (
            work_s(traced((False, is_first), kept=True), topology, counts) for is_first in (False, True)
        )
        costs[num_edges] = wide_s / narrow_s
    assert costs[80_000] < 0.95 < 1.0 < costs[800_000] < 1.6 < costs[8_000_000]
    assert orders(80_000) == [(False, True), (False, False)]
    assert orders(800_000) == [(False, False), (False, True)]
    assert orders(8_000_000) == [(False, False)]
    short = WorkCounts(rows=(200, 190, 16), edges=(10_000, 8_000), received=(0, 0))
    found = propose_orders(traced((False, False), kept=True), functools.partial(traced, kept=True), topology, short)
    assert [trace.sums_first for trace in found] == [(False, False)], "calls take longer than what is counted"


def test_an_order_that_changes_nothing_stays_dgls() -> None:
    """The first layer's traces are alike; a lead within the error of the counts is none either."""
    assert order((20_000, 19_000, 18_300), (1_000_000, 100_000))[0] is False
    asked: list[tuple[bool, ...]] = []

    def trace_with(sums_first: Sequence[bool]) -> ModelTrace:
        asked.append(tuple(sums_first))
        return traced(sums_first, kept=True)

    counts = WorkCounts(rows=(9, 9, 1), edges=(9, 9), received=(0, 0))
    propose_orders(traced((False, False), kept=True), trace_with, uniform_topology(1), counts)
    assert asked == [(False, True)], "a kept result costs nothing in any order"


def test_no_order_is_tried_where_there_is_one_only() -> None:
    trace = traced((False, False))
    trace = replace(trace, layers=tuple(replace(layer, can_sum_first=False) for layer in trace.layers))

    def trace_with(sums_first: Sequence[bool]) -> ModelTrace:
        raise AssertionError(f"traced with {sums_first}")

    counts = WorkCounts(rows=(9, 9, 1), edges=(9, 9), received=(0, 0))
    assert propose_orders(trace, trace_with, uniform_topology(1), counts) == (trace,)


def test_traces_on_disk_know_the_order() -> None:
    trace = traced((False, True))
    assert ModelTrace.from_json(trace.to_json()).sums_first == (False, True)
    old = trace.to_json()
    for layer in old["layers"]:  # type: ignore[attr-defined]
        del layer["sums_first"]
    assert ModelTrace.from_json(old).sums_first == (False, False)
    with pytest.raises(ValueError, match="a trace of L layers has L \\+ 1 levels"):
        replace(trace, layers=())
