# SPDX-License-Identifier: Apache-2.0
"""Traces, topologies and the prices made from them."""

from __future__ import annotations

import dataclasses
import json

import pytest

from dgl_hybrid.errors import PlanError
from dgl_hybrid.planner import (
    ItemCosts,
    LayerTrace,
    LevelTrace,
    ModelTimes,
    ModelTrace,
    Topology,
    cost_model,
    synthetic_trace,
    uniform_topology,
)
from dgl_hybrid.planner.costs import AGREEMENTS


def test_prices_of_a_hand_made_trace() -> None:
    """One number per formula: 2 layers, 2 ranks, round rates."""
    trace = ModelTrace(
        levels=(
            LevelTrace(row_flops=0, row_bytes=0),
            LevelTrace(row_flops=100, row_bytes=50, held_bytes=7),
            LevelTrace(row_flops=300, row_bytes=0),
        ),
        layers=(
            LayerTrace(edge_flops=0, edge_bytes=40, operand_bytes_fwd=8, operand_bytes_bwd=0, operand_width=2),
            LayerTrace(
                edge_flops=20,
                edge_bytes=40,
                operand_bytes_fwd=16,
                operand_bytes_bwd=16,
                operand_width=4,
                edge_held_bytes=4,
            ),
        ),
        dtype="float32",
        num_parameters=5,
    )
    topology = Topology(
        dense_flops_per_s=100.0,
        row_bytes_per_s=10.0,
        gather_bytes_per_s=((8, 4.0), (16, 8.0)),
        latency_s=((0.0, 0.5), (0.25, 0.0)),
        bandwidth_bytes_per_s=((1.0, 2.0), (4.0, 1.0)),
        allreduce_latency_s=1.0,
        allreduce_bytes_per_s=10.0,
    )
    costs = cost_model(trace, topology, 0)
    assert costs.row_s == (0.0, 1.0 + 5.0)
    assert costs.edge_s == (0.0, 40 / 4.0)
    pack = (8 / 4 + 8 / 10, 32 / 8 + 32 / 10)
    assert costs.pack_s == pytest.approx(pack)
    # From rank 1 at 4 bytes/s; its gradient goes home at 2.
    assert costs.receive_s == ((0.0, pytest.approx(8 / 4 + pack[0])), (0.0, pytest.approx(16 / 4 + 16 / 2 + pack[1])))
    assert costs.wire_s == (), "the processor's own work"
    links = cost_model(trace, dataclasses.replace(topology, overlaps=True), 0, sent_shares=[[1.0, 1.0], [1.0, 0.5]])
    assert links.wire_s == (((0.0, 0.0), (8 / 4, 0.0)), ((0.0, 0.0), (0.5 * 16 / 4, 0.5 * 16 / 2)))
    assert costs.latency_s == (0.25, 0.5)
    assert costs.receive_bytes == (8, 32)
    assert costs.row_held_bytes == (8, 7)
    assert costs.edge_held_bytes == (0, 16)
    assert (costs.output_row_s, costs.output_edge_s) == (3.0, 40 / 8.0 + 0.2)
    assert costs.epoch_s == (1 + AGREEMENTS) * 1.0 + 20 / 10
    assert topology.gather_rate(4) == 4.0
    assert topology.gather_rate(8 * 2**0.5) == pytest.approx(6.0)
    assert topology.gather_rate(99) == 8.0


def test_what_may_run_beside_an_exchange_is_its_share_of_what_rows_cost() -> None:
    """By counts, of the counted time or of the measured one; never more than all of it."""
    trace = synthetic_trace([16, 32, 8])
    level = dataclasses.replace(trace.levels[2], row_flops=300.0, row_bytes=5.0)
    layers = tuple(dataclasses.replace(layer, beside_flops=flops) for layer, flops in zip(trace.layers, (0.0, 100.0)))
    trace = dataclasses.replace(trace, levels=(*trace.levels[:2], level), layers=layers)
    topology = dataclasses.replace(
        uniform_topology(2, bandwidth_bytes_per_s=1e8), dense_flops_per_s=100.0, row_bytes_per_s=5.0
    )
    assert cost_model(trace, topology, 0).beside_s == (0.0, pytest.approx(1.0))
    times = ModelTimes(row_s=(1.0, 2.0, 8.0), edge_s=(0.0, 1.0), fixed_s=0.0)
    assert cost_model(trace, topology, 0, times).beside_s == (0.0, pytest.approx(2.0))
    more = dataclasses.replace(trace, layers=(layers[0], dataclasses.replace(layers[1], beside_flops=1e6)))
    assert cost_model(more, topology, 0, times).beside_s == (0.0, 8.0)


def test_a_layer_that_keeps_its_result_costs_bytes_but_no_time() -> None:
    """Raw features aggregated once: the next epochs neither receive nor sum them. A cached row keeps what its owner
    hands out, so it has no in-edges here."""
    plain = synthetic_trace([16, 32, 8])
    assert plain.layers[0].static_operand
    kept = dataclasses.replace(
        plain, layers=(dataclasses.replace(plain.layers[0], keeps_result=True), *plain.layers[1:])
    )
    topology = uniform_topology(3, bandwidth_bytes_per_s=1e8)
    before, after = cost_model(plain, topology, 1), cost_model(kept, topology, 1)
    assert after.receive_s == ((0.0, 0.0, 0.0), before.receive_s[1])
    assert (after.pack_s[0], after.latency_s[0], after.edge_s[1]) == (0.0, 0.0, 0.0)
    assert before.edge_s[1] > 0
    assert after.row_s == before.row_s
    assert after.receive_bytes == before.receive_bytes
    assert after.row_held_bytes == (before.row_held_bytes[0], before.row_held_bytes[1] + 16 * 4)
    assert after.edge_held_bytes == (0.0, 0.0)
    assert after.output_edge_s == before.output_edge_s > 0
    assert ModelTrace.from_json(json.loads(json.dumps(kept.to_json()))) == kept


def test_sums_in_place_of_rows_make_the_wire_cheaper_and_nothing_else() -> None:
    trace, topology = synthetic_trace([16, 32, 8]), uniform_topology(3, bandwidth_bytes_per_s=1e8)
    plain = cost_model(trace, topology, 1)
    shared = cost_model(trace, topology, 1, sent_shares=[[1.0, 1.0, 1.0], [0.25, 1.0, 0.5]])
    assert shared.receive_s[0] == plain.receive_s[0]
    wire = plain.receive_s[1][0] - plain.pack_s[1]
    assert shared.receive_s[1] == pytest.approx((plain.pack_s[1] + wire / 4, 0.0, plain.pack_s[1] + wire / 2))
    assert plain.wire_bytes == ((16 * 4.0, 0.0, 16 * 4.0), (8 * 4.0, 0.0, 8 * 4.0))
    assert shared.wire_bytes == (plain.wire_bytes[0], (8.0, 0.0, 16.0)), "what a table tells of bytes"
    assert dataclasses.replace(shared, receive_s=plain.receive_s, wire_bytes=plain.wire_bytes) == plain


def test_dear_links_make_dear_rows() -> None:
    trace = synthetic_trace([64, 32, 32, 8])
    slow, fast = (cost_model(trace, uniform_topology(3, bandwidth_bytes_per_s=b), 1) for b in (1e8, 1e9))
    for level in range(3):
        assert slow.receive_s[level][0] > fast.receive_s[level][0] > 0
        assert slow.receive_s[level][1] == 0
    assert slow.row_s == fast.row_s


def test_synthetic_trace_transforms_first_where_that_is_narrower() -> None:
    trace = synthetic_trace([100, 16, 32])
    assert [layer.operand_width for layer in trace.layers] == [16, 16]
    assert trace.layers[0].static_operand is False
    assert trace.levels[0].row_flops > 0
    static = synthetic_trace([16, 100, 8])
    assert static.layers[0].static_operand
    assert static.layers[0].operand_bytes_bwd == 0
    assert synthetic_trace([8, 4], "float64").layers[0].operand_bytes_fwd == 32
    with pytest.raises(ValueError, match=r"at least two positive widths \(got \[3\]\)"):
        synthetic_trace([3])
    with pytest.raises(ValueError, match=r"dtype must be one of .* \(got 'int8'\)"):
        synthetic_trace([3, 3], "int8")


def test_json_round_trips() -> None:
    trace, topology = synthetic_trace([64, 32, 8]), uniform_topology(3)
    assert ModelTrace.from_json(json.loads(json.dumps(trace.to_json()))) == trace
    assert Topology.from_json(json.loads(json.dumps(topology.to_json()))) == topology
    assert trace.digest() != synthetic_trace([64, 32, 9]).digest()
    assert topology.digest() != uniform_topology(2).digest()
    with pytest.raises(PlanError, match=r"stored model trace cannot be read .* trace the model again"):
        ModelTrace.from_json({"levels": []})
    with pytest.raises(PlanError, match=r"stored topology cannot be read .* probe the cluster again"):
        Topology.from_json({"latency_s": 3})


def test_malformed_numbers() -> None:
    trace, topology = synthetic_trace([64, 32, 8]), uniform_topology(2)
    with pytest.raises(ValueError, match=r"L \+ 1 levels \(got 2 layers, 2 levels\)"):
        dataclasses.replace(trace, levels=trace.levels[:2])
    with pytest.raises(ValueError, match=r"must not be negative \(got levels\[0\].row_flops = -1"):
        dataclasses.replace(trace, levels=(LevelTrace(row_flops=-1, row_bytes=0), *trace.levels[1:]))
    with pytest.raises(ValueError, match=r"bandwidth_bytes_per_s must be 2 by 2"):
        dataclasses.replace(topology, bandwidth_bytes_per_s=((1.0,), (1.0,)))
    with pytest.raises(ValueError, match=r"ascending positive widths \(got \[8, 4\]\)"):
        dataclasses.replace(topology, gather_bytes_per_s=((8, 1.0), (4, 1.0)))
    with pytest.raises(ValueError, match=r"rates must be positive and finite"):
        dataclasses.replace(topology, row_bytes_per_s=0.0)
    with pytest.raises(ValueError, match=r"latencies must be finite"):
        dataclasses.replace(topology, latency_s=((0.0, -1.0), (0.0, 0.0)))
    with pytest.raises(ValueError, match=r"latencies must be finite"):
        dataclasses.replace(topology, allreduce_latency_s=float("nan"))
    with pytest.raises(PlanError, match=r"rank must lie in 0..1, the probed ranks \(got 2\)"):
        cost_model(trace, topology, 2)
    costs = cost_model(trace, topology, 0)
    with pytest.raises(ValueError, match=r"row_s must have 2 entries \(got 1\)"):
        dataclasses.replace(costs, row_s=(1.0,))
    with pytest.raises(ValueError, match=r"pack_s must have 2 entries or none \(got 1\)"):
        dataclasses.replace(costs, pack_s=(1.0,))
    with pytest.raises(ValueError, match=r"edge_s\[0\] and edge_held_bytes\[0\] must be 0"):
        dataclasses.replace(costs, edge_s=(1.0, 1.0))
    with pytest.raises(ValueError, match=r"finite and not negative"):
        dataclasses.replace(costs, row_s=(0.0, float("nan")))
    with pytest.raises(ValueError, match=r"receive_s must be \(L, P\)"):
        dataclasses.replace(costs, receive_s=((1.0, 1.0), (1.0,)))
    with pytest.raises(ValueError, match=r"at least one level"):
        ItemCosts(receive_s=(), row_s=(), edge_s=(), receive_bytes=(), row_held_bytes=(), edge_held_bytes=())
