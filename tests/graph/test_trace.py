# SPDX-License-Identifier: Apache-2.0
"""What tracing a model on small blocks finds out: operands, costs by level, and which rows depend on each other."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import dgl.function as fn
import dgl.nn as dglnn
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from dgl_hybrid.errors import BlockError
from dgl_hybrid.graph import tiny_runs, trace_record
from dgl_hybrid.graph.call_template import CallTemplate, StaticFields, flatten, map_leaves, shape_of
from dgl_hybrid.graph.layer_block import LayerBlock
from dgl_hybrid.graph.optimize import optimize
from dgl_hybrid.graph.trace import trace_model
from dgl_hybrid.ops.routing import route_ops
from tests.graph.traced import HIDDEN, IN, OUT, Drawing, Field, Stack, trace


def test_the_operand_is_the_narrower_side_of_the_product() -> None:
    result = trace(Stack(dglnn.GraphConv(IN, HIDDEN), dglnn.GraphConv(HIDDEN, OUT)))
    first, second = result.trace.layers
    # GraphConv multiplies after aggregating where that is narrower: 5 -> 9 sends 5, 9 -> 3 sends 3.
    assert (first.operand_width, second.operand_width) == (IN, OUT)
    assert first.operand_bytes_fwd == 4 * IN
    assert first.static_operand
    assert first.operand_bytes_bwd == 0
    assert second.operand_bytes_bwd == 4 * OUT
    assert result.dense_below == 0


@pytest.mark.parametrize("kind", ["mean", "gcn"])
@pytest.mark.parametrize("width", [16, 32])
def test_an_optimised_model_does_not_seem_to_mix_rows(kind: str, width: int) -> None:
    """Kept sums of raw features are added in another order than others; rounding is not taken for mixing."""
    sage = Stack(dglnn.SAGEConv(128, width, kind), dglnn.SAGEConv(width, OUT, kind))
    gcn = Stack(dglnn.GraphConv(128, width), dglnn.GraphConv(width, OUT))
    for model in (sage, gcn):
        layers = trace(optimize(model), in_feats=128).trace.layers
        assert [layer.keeps_result for layer in layers] == [True, False]


def test_sums_and_fused_attention_can_be_split_by_source() -> None:
    def can_split(model: nn.Module) -> list[bool]:
        return [layer.can_split for layer in trace(model).trace.layers]

    def gat() -> Stack:
        return Stack(dglnn.GATConv(IN, HIDDEN // 3, 3), dglnn.GATConv(HIDDEN, OUT, 1))

    assert can_split(Stack(dglnn.GraphConv(IN, HIDDEN), dglnn.GraphConv(HIDDEN, OUT))) == [True, True]
    assert can_split(Stack(dglnn.SAGEConv(IN, HIDDEN, "gcn"), dglnn.SAGEConv(HIDDEN, OUT, "mean")))[1]
    assert not can_split(Stack(dglnn.SAGEConv(IN, HIDDEN, "gcn"), dglnn.SAGEConv(HIDDEN, OUT, "pool")))[1]
    assert can_split(gat()) == [False, False]  # scores of all edges are normalised together
    assert can_split(optimize(gat())) == [True, True]
    for num_layers in (6, 10, 17):  # of the first of six, lengths of a structure passed for the last one's edges
        deep = [dglnn.GraphConv(HIDDEN, HIDDEN) for _ in range(num_layers - 2)]
        model = Stack(dglnn.GraphConv(IN, HIDDEN), *deep, dglnn.GraphConv(HIDDEN, OUT))
        layers = trace(model, num_layers=num_layers).trace.layers
        assert [layer.can_split for layer in layers] == [True] * num_layers
        assert [layer.can_sum_apart for layer in layers[1:]] == [True] * (num_layers - 1)
    # What is kept is made once, all the same from rows that come in chunks or at once.
    kept = [dglnn.GINConv(nn.Linear(IN, HIDDEN), aggregator) for aggregator in ("sum", "max")]
    layers = [trace(Stack(layer, dglnn.GraphConv(HIDDEN, OUT))).trace.layers[0] for layer in kept]
    assert [layer.keeps_result for layer in layers] == [True, True]
    assert [layer.can_split for layer in layers] == [True, False]


class WeightedSum(nn.Module):
    """Sums rows times a weight of their edge, which is a constant or learnt."""

    def __init__(self, out_feats: int, *, is_learnt: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(IN, out_feats)
        self.weight = nn.Parameter(torch.ones(()), requires_grad=is_learnt)

    def forward(self, block: LayerBlock, x: Tensor) -> Tensor:
        with block.local_scope():
            block.srcdata["h"] = self.linear(x)
            block.edata["w"] = self.weight * torch.ones(block.num_edges(), 1)
            block.update_all(fn.u_mul_e("h", "w", "m"), fn.sum("m", "h"))
            return block.dstdata["h"]


def test_sums_of_rows_times_constants_can_be_split_and_not_summed_apart() -> None:
    for is_learnt in (False, True):
        model = Stack(WeightedSum(HIDDEN, is_learnt=is_learnt), dglnn.GraphConv(HIDDEN, OUT))
        layers = trace(model).trace.layers
        assert [layer.can_split for layer in layers] == [not is_learnt, True]
        assert [layer.can_sum_apart for layer in layers] == [False, True]


def test_only_plain_sums_can_be_summed_apart() -> None:
    def can_sum_apart(*layers: nn.Module) -> list[bool]:
        return [layer.can_sum_apart for layer in trace(optimize(Stack(*layers))).trace.layers]

    assert can_sum_apart(dglnn.GraphConv(IN, HIDDEN), dglnn.SAGEConv(HIDDEN, OUT, "mean")) == [True, True]
    assert can_sum_apart(dglnn.GATConv(IN, HIDDEN // 3, 3), dglnn.GATv2Conv(HIDDEN, OUT, 1)) == [False, False]
    assert can_sum_apart(dglnn.GraphConv(IN, HIDDEN), dglnn.SAGEConv(HIDDEN, OUT, "pool")) == [True, False]


def test_optimised_layers_whose_products_narrow_have_two_orders() -> None:
    """Others would be traced again, for each layer, to find what was found before."""

    def can_sum_first(*layers: nn.Module, optimized: bool = True) -> list[bool]:
        model = Stack(*layers)
        return [layer.can_sum_first for layer in trace(optimize(model) if optimized else model).trace.layers]

    for narrow in (
        dglnn.GraphConv(HIDDEN, OUT),
        dglnn.SAGEConv(HIDDEN, OUT, "mean"),
        dglnn.SAGEConv(HIDDEN, OUT, "gcn"),
        dglnn.GINConv(nn.Linear(HIDDEN, OUT), "sum"),
    ):
        assert can_sum_first(dglnn.GraphConv(IN, HIDDEN), narrow, optimized=False) == [False, False]
        # The first layer widens.
        assert can_sum_first(dglnn.GraphConv(IN, HIDDEN), narrow) == [False, True]
    for other in (dglnn.GATConv(HIDDEN, OUT, 1), dglnn.GINConv(None, "sum"), dglnn.SAGEConv(HIDDEN, OUT, "pool")):
        assert can_sum_first(dglnn.GraphConv(IN, HIDDEN), other) == [False, False]


def test_products_of_own_rows_may_run_beside_an_exchange() -> None:
    """Of an optimised mean layer: forward, and both gradients; of a product of sums also the gradient of its weight."""

    def beside(*layers: nn.Module, sums_first: bool = False, dropout: float = 0.0) -> list[float]:
        fields = StaticFields(source={}, destination={}, edge={})
        template = CallTemplate.of_convention({"feat": Field(IN)}, fields)
        model = optimize(Stack(*layers, dropout=dropout))
        traced = trace_model(model, template, 2, sums_first=(False, sums_first)).trace
        for level, layer in zip(traced.levels[1:], traced.layers, strict=True):
            assert layer.beside_flops <= level.row_flops
        return [layer.beside_flops for layer in traced.layers]

    first = dglnn.GraphConv(IN, HIDDEN)
    narrow, wide = (dglnn.SAGEConv(HIDDEN, width, "mean") for width in (OUT, 2 * HIDDEN))
    assert beside(first, narrow) == [0, 3 * 2 * HIDDEN * OUT]
    assert beside(first, narrow, sums_first=True) == [0, 4 * 2 * HIDDEN * OUT]
    assert beside(first, wide) == [0, 4 * 2 * HIDDEN * 2 * HIDDEN]
    # Features that are dropped out travel, but no gradient of theirs.
    assert beside(dglnn.SAGEConv(IN, HIDDEN, "mean"), narrow, dropout=0.5)[0] == 2 * IN * HIDDEN
    assert beside(first, dglnn.SAGEConv(HIDDEN, OUT, "gcn")) == beside(first, dglnn.GATConv(HIDDEN, OUT, 1)) == [0, 0]


class Halving(nn.Module):
    """A product of rows with a number."""

    def forward(self, h: Tensor) -> Tensor:
        return h * 0.5


def test_an_operation_on_rows_costs_what_it_reads_and_writes() -> None:
    """In its forward, and as much in its backward."""
    layers = (dglnn.SAGEConv(IN, HIDDEN, "mean"), dglnn.SAGEConv(HIDDEN, OUT, "mean"))
    plain, halved = (trace(Stack(*layers, norm=norm)).trace.levels[1] for norm in (None, Halving()))
    assert halved.row_bytes - plain.row_bytes == 2 * 2 * 4 * HIDDEN
    assert halved.held_bytes - plain.held_bytes == 4 * HIDDEN


def test_raw_features_cost_nothing_to_hold() -> None:
    levels = trace(Stack(dglnn.SAGEConv(IN, HIDDEN, "mean"), dglnn.SAGEConv(HIDDEN, OUT, "mean"))).trace.levels
    assert levels[0].row_flops == 0
    assert levels[0].row_bytes == 0


def test_flops_of_a_level_are_its_products() -> None:
    levels = trace(Stack(dglnn.GraphConv(IN, HIDDEN), dglnn.GraphConv(HIDDEN, OUT))).trace.levels
    # Level 1 rows are made by 5 x 9 (weight gradient too; features need none) and read through 9 x 3 (all three).
    assert levels[1].row_flops == pytest.approx(2 * (2 * IN * HIDDEN + 3 * HIDDEN * OUT))
    assert levels[2].row_flops == 0


def test_attention_travels_with_its_features_and_is_dearer_by_the_edge() -> None:
    gat = trace(Stack(dglnn.GATConv(IN, HIDDEN // 3, 3), dglnn.GATConv(HIDDEN, OUT, 1))).trace.layers[0]
    gcn = trace(Stack(dglnn.GraphConv(IN, HIDDEN), dglnn.GraphConv(HIDDEN, OUT))).trace.layers[0]
    assert gat.operand_width == HIDDEN + 3
    assert gat.edge_bytes > gcn.edge_bytes
    assert gat.edge_held_bytes > 0


@pytest.mark.parametrize("kind", [dglnn.GATConv, dglnn.GATv2Conv])
def test_fused_attention_sends_what_the_layer_sends_and_keeps_no_edges(kind: type[nn.Module]) -> None:
    def build() -> Stack:
        options = {"attn_drop": 0.5, "allow_zero_in_degree": True}
        return Stack(kind(IN, HIDDEN // 3, 3, **options), kind(HIDDEN, OUT, 1, **options))

    as_is, fused = trace(build()).trace, trace(optimize(build())).trace
    for one, other in zip(as_is.layers, fused.layers, strict=True):
        assert other.operand_width == one.operand_width
        assert (other.operand_bytes_fwd, other.operand_bytes_bwd) == (one.operand_bytes_fwd, one.operand_bytes_bwd)
        assert one.edge_held_bytes > 0
        assert other.edge_held_bytes == 0


def test_a_fused_layer_is_priced_by_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def attention_slowdown(
        op: str, num_heads: int, head_width: int, device: torch.device, *, has_dropout: bool
    ) -> float:
        asked.append((op, num_heads, head_width, device.type, has_dropout))
        return 10.0

    monkeypatch.setattr(trace_record, "attention_slowdown", attention_slowdown)
    model = Stack(dglnn.GATConv(IN, HIDDEN // 3, 3, attn_drop=0.5), dglnn.GATv2Conv(HIDDEN, OUT, 1))
    first, second = trace(optimize(model)).trace.layers
    assert asked == [("gat", 3, HIDDEN // 3, "cpu", True), ("gatv2", 1, OUT, "cpu", False)]
    assert first.edge_bytes == pytest.approx(10.0 * 2 * 4 * HIDDEN)
    assert second.edge_bytes == pytest.approx(10.0 * 2 * 4 * OUT)


@pytest.mark.parametrize("kind", [dglnn.GraphConv, dglnn.SAGEConv, dglnn.GATConv])
def test_ops_of_ours_are_not_charged_twice(kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    """They are visible to the dispatcher, which DGL's kernels are not; softmax over edges is charged only there."""
    monkeypatch.setattr(trace_record, "weighted_slowdown", lambda heads, width, device: 3.0)
    more = {dglnn.SAGEConv: ("mean",), dglnn.GATConv: (1,)}.get(kind, ())
    ours = trace(Stack(kind(IN, HIDDEN, *more), kind(HIDDEN, OUT, *more))).trace
    route_ops("none")
    try:
        dgls = trace(Stack(kind(IN, HIDDEN, *more), kind(HIDDEN, OUT, *more))).trace
    finally:
        route_ops("layer_blocks")
    for one, other in zip(ours.levels, dgls.levels, strict=True):
        assert one.row_flops == other.row_flops
        assert one.row_bytes == pytest.approx(other.row_bytes, rel=0.2)
    for layer, plain in zip(ours.layers, dgls.layers, strict=True):
        # DGL's softmax has a backward in PyTorch, which is visible, too.
        assert layer.edge_bytes == pytest.approx(plain.edge_bytes, rel=0.1 if kind is dglnn.GATConv else 1e-9)


def test_dropout_costs_rows() -> None:
    plain = trace(Stack(dglnn.GraphConv(IN, HIDDEN), dglnn.GraphConv(HIDDEN, OUT))).trace.levels[0]
    dropped = trace(Stack(dglnn.GraphConv(IN, HIDDEN), dglnn.GraphConv(HIDDEN, OUT), dropout=0.5)).trace.levels[0]
    assert dropped.row_bytes > plain.row_bytes


def test_batch_norm_needs_every_vertex_of_its_level() -> None:
    norm = nn.BatchNorm1d(HIDDEN)
    model = Stack(dglnn.GraphConv(IN, HIDDEN), dglnn.GraphConv(HIDDEN, OUT), norm=norm)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert trace(model).dense_below == 2
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items()), "the model was changed"
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("dimension", [61, 98, 135, 247])
def test_a_width_equal_to_a_number_of_rows_confuses_nothing(dimension: int) -> None:
    result = trace(Stack(dglnn.GraphConv(IN, dimension), dglnn.GraphConv(dimension, OUT)))
    assert result.trace.levels[2].row_flops == 0
    assert result.trace.levels[1].row_flops == pytest.approx(2 * (2 * IN * dimension + 3 * dimension * OUT))


def test_a_model_of_fewer_layers_is_refused() -> None:
    with pytest.raises(BlockError, match=r"does not use the blocks of layers \[3\].*the model has 2"):
        trace(Stack(dglnn.GraphConv(IN, HIDDEN), dglnn.GraphConv(HIDDEN, OUT)), num_layers=3)


class OfEdges(nn.Module):
    """Its last layer sums what edges have, and reads no row of a source."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.first, self.second = way, dglnn.GraphConv(IN, OUT), nn.Linear(1, OUT)

    def forward(self, blocks: list[Any], x: Tensor) -> Tensor:
        h, block = self.first(blocks[0], x), blocks[1]
        with block.local_scope():
            block.edata["k"] = torch.ones(block.num_edges(), 1)
            block.dstdata["d"] = torch.ones(block.num_dst_nodes(), 1)
            message = {
                "builtin": fn.copy_e("k", "m"),
                "edges": lambda edges: {"m": edges.data["k"] * 2},
                "destinations": lambda edges: {"m": edges.dst["d"] * 3},
            }[self.way]
            block.update_all(message, fn.sum("m", "out"))
            return self.second(block.dstdata["out"]) + h[: block.num_dst_nodes()]


@pytest.mark.parametrize("way", ["builtin", "edges", "destinations"])
def test_a_layer_that_reads_no_source_uses_its_block(way: str) -> None:
    """It was said to use none, and that the model had one layer less."""
    first, second = trace(OfEdges(way)).trace.layers
    assert first.operand_width > 0
    assert second.operand_bytes_fwd == 0.0


@pytest.mark.parametrize("norm", ["right", "both"])
def test_weights_that_are_normalised_do_not_keep_sums_from_being_split(norm: str) -> None:
    """They are made without rows of other ranks; whether they are constants is what counts."""

    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = dglnn.EdgeWeightNorm(norm=norm)
            self.layers = nn.ModuleList(
                [dglnn.GraphConv(IN, HIDDEN, norm="none"), dglnn.GraphConv(HIDDEN, OUT, norm="none")]
            )

        def forward(self, blocks: Any, x: Tensor) -> Tensor:
            for layer, block in zip(self.layers, blocks, strict=True):
                x = layer(block, x, edge_weight=self.norm(block, block.edata["w"]))
            return x

    fields = StaticFields(source={}, destination={}, edge={"w": ((), torch.float32)})
    template = CallTemplate.of_convention({"feat": Field(IN)}, fields)
    layers = trace_model(Weighted(), template, 2).trace.layers
    assert [layer.can_split for layer in layers] == [True, True]
    assert not any(layer.can_sum_apart for layer in layers)


def test_under_autocast_nothing_is_split() -> None:
    fields = StaticFields(source={}, destination={}, edge={})
    with torch.autocast("cpu", dtype=torch.bfloat16):
        template = CallTemplate.of_convention({"feat": Field(IN)}, fields)
    model = optimize(
        Stack(dglnn.SAGEConv(IN, HIDDEN, "mean"), dglnn.SAGEConv(HIDDEN, OUT, "mean"), norm=nn.BatchNorm1d(HIDDEN))
    )
    layers = trace_model(model, template, 2).trace.layers
    assert not any(layer.can_split or layer.can_sum_apart or layer.keeps_result for layer in layers)
    assert layers[1].operand_bytes_fwd == 2 * OUT


class _Skipping(nn.Module):
    """Skips its middle layers at random when it trains, as with stochastic depth, and maybe one of them always."""

    def __init__(self, p: float, draw: Callable[[_Skipping], float], num_left_out: int = 0) -> None:
        super().__init__()
        layers = [dglnn.GraphConv(IN, HIDDEN), *(dglnn.GraphConv(HIDDEN, HIDDEN) for _ in range(2))]
        self.layers = nn.ModuleList([*layers, dglnn.GraphConv(HIDDEN, OUT)])
        self.p, self.draw, self.num_left_out, self.own = p, draw, num_left_out, random.Random(1)

    def forward(self, blocks: list[Any], x: Tensor) -> Tensor:
        h = self.layers[0](blocks[0], x)
        for index in (1, 2):
            is_skipped = self.training and self.draw(self) < self.p
            if is_skipped or index <= self.num_left_out:
                h = h[: blocks[index].num_dst_nodes()]
            else:
                h = self.layers[index](blocks[index], h)
        return self.layers[3](blocks[3], h)


DRAWS: dict[str, Callable[[_Skipping], float]] = {
    "torch": lambda model: float(torch.rand(())),
    "random": lambda model: random.random(),
    "numpy": lambda model: float(np.random.rand()),
    "a generator of its own": lambda model: model.own.random(),
}


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("seed", range(4))
def test_layers_that_are_skipped_at_random_are_used(draw: str, seed: int) -> None:
    """One forward was looked at, by whatever the script's generators would give next."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    layers = trace(_Skipping(0.7, DRAWS[draw]), num_layers=4, value=1.0).trace.layers
    assert [layer.operand_width for layer in layers[1:]] == [HIDDEN, HIDDEN, OUT]


def test_a_layer_that_is_skipped_in_every_draw_is_not_used() -> None:
    with pytest.raises(BlockError, match=r"does not use the blocks of layers \[2\]"):
        trace(_Skipping(0.5, DRAWS["torch"], num_left_out=1), num_layers=4)


def test_generators_of_gpus_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """They were seeded anew on the rank that traces alone, and not put back."""
    seeded: list[int] = []
    for name in ("manual_seed_all", "manual_seed"):
        monkeypatch.setattr(torch.cuda, name, seeded.append)
    trace(Drawing("noise of rows"), value=1.0)
    assert not seeded


@dataclass
class _Node:
    value: Tensor
    parent: _Node | None = None
    late: Tensor = field(init=False)


def test_records_may_lack_fields_and_hold_themselves() -> None:
    """Arguments of any module are looked at, also of those that have nothing to do with a graph."""
    node = _Node(torch.ones(2))
    node.parent = node
    assert [leaf.tolist() for leaf in flatten([node, node])] == [[1.0, 1.0]]
    (mapped, again) = map_leaves((node, node), lambda leaf: leaf + 1)
    assert mapped is again is mapped.parent
    assert mapped is not node


def test_namespaces_are_looked_into() -> None:
    inner = SimpleNamespace(value=torch.ones(2), rest=[torch.zeros(1)])
    inner.itself = inner
    assert [leaf.tolist() for leaf in flatten({"inner": inner})] == [[1.0, 1.0], [0.0]]
    mapped = map_leaves(inner, lambda leaf: leaf + 1)
    assert (mapped.value.tolist(), mapped.rest[0].tolist()) == ([2.0, 2.0], [1.0])
    assert mapped.itself is mapped is not inner
    assert inner.value.tolist() == [1.0, 1.0]
    assert mapped.value.tolist() == [2.0, 2.0]


def _stand_in_block(device: str) -> Any:
    """What `CallTemplate` asks of a block of three rows."""
    return SimpleNamespace(
        device=torch.device(device),
        srcdata={},
        dstdata={},
        edata={},
        **dict.fromkeys(("num_src_nodes", "num_dst_nodes", "num_edges"), lambda: 3),
    )


def test_tensors_that_are_no_rows_go_where_they_were() -> None:
    """Those of a GPU (a temperature, class weights) were given to copies of the model in host memory, and those of host
    memory alone to one on a GPU, beside blocks there: it could not be traced, or not be timed."""
    block, lengths = _stand_in_block("cpu"), torch.arange(5)
    fields = StaticFields(source={}, destination={}, edge={})
    with FakeTensorMode():  # a GPU that need not be there
        given = (torch.empty((), device="cuda"), torch.empty(5, device="cuda"))
        template = CallTemplate.of_call(given, {}, [block], fields)
    template = replace(template, kwargs=CallTemplate.of_call((), {"lengths": lengths}, [block], fields).kwargs)
    assert [shape_of(value) for value in template.args] == [(), (5,)], "tiny blocks avoid these sizes"
    (scale, weights), _, _ = template.bind([block], torch.Generator())
    assert (scale.device.type, weights.device.type) == ("cpu", "cpu")
    real = replace(template, args=tuple(replace(value, value=torch.ones(shape_of(value))) for value in template.args))
    (scale, weights), kwargs, _ = real.bind([_stand_in_block("meta")], torch.Generator())
    assert (scale.device.type, weights.device.type) == ("meta", "meta")
    assert kwargs["lengths"].device.type == "cpu"
    assert torch.equal(kwargs["lengths"], lengths)


def test_a_model_that_cannot_run_in_host_memory_runs_where_it_is() -> None:
    """It may hold a plain tensor, or name its device: it was refused, or trained without a plan."""
    ran: list[str] = []

    def run(where: torch.device) -> str:
        ran.append(where.type)
        if where.type == "cpu":
            raise RuntimeError("Expected all tensors to be on the same device")
        return "traced"

    assert tiny_runs.in_memory_or_on(torch.device("cuda", 0), run) == "traced"
    assert ran == ["cpu", "cuda"]
    with pytest.raises(RuntimeError, match="on the same device"):
        tiny_runs.in_memory_or_on(torch.device("cpu"), run)

    def refuse(where: torch.device) -> None:
        ran.append(where.type)
        raise BlockError("mixes rows")

    ran.clear()
    with pytest.raises(BlockError):
        tiny_runs.in_memory_or_on(torch.device("cuda", 0), refuse)
    assert ran == ["cpu"], "what is wrong with the model is wrong anywhere"
