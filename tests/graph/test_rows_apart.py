# SPDX-License-Identifier: Apache-2.0
"""Which models mix rows of different vertices, or keep what is made of several, and which only seem to."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import dgl
import dgl.nn as dglnn
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dgl_hybrid.errors import BlockError
from dgl_hybrid.graph.call_template import CallTemplate, StaticFields, _RowsOf
from dgl_hybrid.graph.tiny_blocks import build_tiny_blocks
from dgl_hybrid.graph.trace import TraceResult, trace_model
from tests.graph.traced import HIDDEN, IN, OUT, Drawing, Field, Stack, trace


class _Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x - x.mean(0))


def test_a_mean_over_vertices_is_refused() -> None:
    with pytest.raises(BlockError, match="mixes rows of different vertices"):
        trace(Stack(dglnn.GraphConv(IN, HIDDEN), dglnn.GraphConv(HIDDEN, OUT), norm=_Mean()))


class _Scaled(nn.Module):
    """By the greatest number or the least one, of all rows or of each column of them."""

    def __init__(self, way: str, *, by_column: bool) -> None:
        super().__init__()
        self.way, self.dims = way, (0,) if by_column else (0, 1)

    def forward(self, x: Tensor) -> Tensor:
        reduce = torch.amax if self.way == "max" else torch.amin
        return x - reduce(x, self.dims)


class _ScaledInput(Stack):
    def forward(self, blocks: list[object], x: Tensor) -> Tensor:
        assert self.norm is not None
        h = self.norm(x)
        for block, layer in zip(blocks, self.layers, strict=True):
            h = layer(block, h)
        return h


@pytest.mark.parametrize("way", ["max", "min"])
@pytest.mark.parametrize("by_column", [True, False])
@pytest.mark.parametrize("width", [1, 5])
def test_an_extreme_over_vertices_is_refused(way: str, by_column: bool, width: int) -> None:
    """Most rows do not decide it: the one that is changed must become the greatest, and the least."""
    torch.manual_seed(0)
    scaled = _Scaled(way, by_column=by_column)
    for kind in (Stack, _ScaledInput):
        model = kind(dglnn.GraphConv(width, HIDDEN), dglnn.GraphConv(HIDDEN, OUT), norm=scaled)
        with pytest.raises(BlockError, match=r"mixes rows of different vertices .* a mean or a maximum over nodes"):
            trace(model, in_feats=width)


class _Apart(nn.Module):
    """Makes something of other rows: the last one, as of a vertex that stands for all, or which way all of them go."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "last":
            return x - x[-1:]
        return -x if x.mean() > 0 else x


@pytest.mark.parametrize("way", ["last", "mean's sign"])
@pytest.mark.parametrize("num_layers", [2, 4])
def test_mixing_by_the_last_row_or_by_a_branch_is_refused(way: str, num_layers: int) -> None:
    torch.manual_seed(0)
    layers = [dglnn.GraphConv(HIDDEN, HIDDEN) for _ in range(num_layers - 2)]
    for kind in (Stack, _ScaledInput):
        model = kind(dglnn.GraphConv(HIDDEN, HIDDEN), *layers, dglnn.GraphConv(HIDDEN, OUT), norm=_Apart(way))
        with pytest.raises(BlockError, match="mixes rows of different vertices"):
            trace(model, in_feats=HIDDEN, num_layers=num_layers)


class _Weighing(nn.Module):
    """Weighs edges, or scales rows, by what is made of all of them, or of each alone."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.layers = nn.ModuleList([dglnn.GraphConv(IN, HIDDEN, norm="none"), dglnn.GraphConv(HIDDEN, OUT)])
        self.gate = nn.Parameter(torch.zeros(1))
        self.mix = nn.Linear(HIDDEN, HIDDEN)

    def weigh(self, w: Tensor) -> Tensor:
        ways: dict[str, Callable[[Tensor], Tensor]] = {
            "by the greatest": lambda w: w / w.max(),
            "by the least": lambda w: w / w.min(),
            "by their mean": lambda w: w - w.mean(0),
            "by a softmax of all": lambda w: w.softmax(0),
            "each": lambda w: w.sqrt() / (1 + w),
        }
        return ways[self.way](w) if self.way in ways else w

    def forward(self, blocks: list[Any], x: Tensor, mask: Tensor | None = None) -> Tensor:
        h: Tensor = self.layers[0](blocks[0], x, edge_weight=self.weigh(blocks[0].edata["w"]))
        degrees = blocks[0].in_degrees().to(h).unsqueeze(1)
        if self.way == "degrees":
            h = h * (degrees / degrees.max())
        elif self.way == "the logarithm of each degree":
            h = h * (1 + degrees).log()
        elif self.way == "a closed gate":
            h = h + self.gate * self.mix(h.mean(0))
        elif self.way == "a closed gate of each row":
            h = h + self.gate * self.mix(h)
        elif self.way == "a mask":
            assert mask is not None
            h = h - x[mask].mean() * x[~mask].mean()
        elif self.way == "a mask of each row":
            assert mask is not None
            h = torch.where(mask[: len(h)].unsqueeze(1), h, 2 * h)
        out: Tensor = self.layers[1](blocks[1], h)
        return out[mask[: len(out)]] if self.way == "rows of a mask" and mask is not None else out


def trace_weighing(way: str) -> TraceResult:
    fields = StaticFields(source={}, destination={}, edge={"w": ((), torch.float32)})
    template = CallTemplate.of_convention({"feat": Field(IN)}, fields)
    if "mask" in way:
        rows = _RowsOf("level", 0, (), torch.bool, requires_grad=False, is_static=False)
        template = replace(template, args=(*template.args, rows))
    torch.manual_seed(0)
    return trace_model(_Weighing(way), template, 2)


@pytest.mark.parametrize(
    "way",
    [
        *("by the greatest", "by the least", "by their mean", "by a softmax of all"),
        *("a closed gate", "a mask"),
    ],
)
def test_what_is_made_of_all_edges_or_behind_a_gate_is_refused(way: str) -> None:
    """Each rank has others, and a model whose gate begins closed lets them through once it trains."""
    with pytest.raises(BlockError, match="mixes rows of different vertices"):
        trace_weighing(way)


def test_what_is_made_of_all_degrees_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    trace_weighing("degrees")
    assert "depends on how many edges another one has" in caplog.text


def test_degrees_may_be_lengths_of_segments(caplog: pytest.LogCaptureFixture) -> None:
    """Of the rows of edges, which lie by destination."""

    class Segments(_Weighing):
        def forward(self, blocks: list[Any], x: Tensor, mask: Tensor | None = None) -> Tensor:
            h = super().forward(blocks, x)
            rows = blocks[1].edata["w"].unsqueeze(1)
            return h + dgl.ops.segment_reduce(blocks[1].in_degrees(), rows, "sum")

    fields = StaticFields(source={}, destination={}, edge={"w": ((), torch.float32)})
    template = CallTemplate.of_convention({"feat": Field(IN)}, fields)
    assert trace_model(Segments("each"), template, 2).dense_below == 0


def test_rows_that_a_mask_chooses_may_be_returned(caplog: pytest.LogCaptureFixture) -> None:
    """There is one fewer, or more, where the mask is another one."""
    assert trace_weighing("rows of a mask").dense_below == 0
    assert "that is made of rows" in caplog.text


@pytest.mark.parametrize(
    "way", ["each", "the logarithm of each degree", "a closed gate of each row", "a mask of each row"]
)
def test_what_is_made_of_each_edge_degree_or_row_is_not(way: str, caplog: pytest.LogCaptureFixture) -> None:
    assert trace_weighing(way).dense_below == 0
    assert not caplog.records


class _WithScalar(nn.Module):
    """Returns rows, and a scalar made of the rows of a lower level, or of weights alone."""

    def __init__(self, *, of_rows: bool) -> None:
        super().__init__()
        self.first, self.second = dglnn.GraphConv(IN, HIDDEN), dglnn.GraphConv(HIDDEN, OUT)
        self.of_rows = of_rows

    def forward(self, blocks: list[object], x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.first(blocks[0], x)
        return self.second(blocks[1], h), (h if self.of_rows else self.first.weight).pow(2).mean()


@pytest.mark.parametrize("of_rows", [True, False])
def test_a_scalar_made_of_rows_is_warned_of(of_rows: bool, caplog: pytest.LogCaptureFixture) -> None:
    model = _WithScalar(of_rows=of_rows)
    trace(model)
    trace(model)  # as for every order of its products
    assert caplog.text.count("made of the rows held") == of_rows
    assert caplog.text.count("also where those are returned and reduced outside") == of_rows


class _WithRows(nn.Module):
    """Returns rows beside those of the seeds."""

    def __init__(self, which: str) -> None:
        super().__init__()
        self.first, self.second = dglnn.GraphConv(IN, HIDDEN), dglnn.GATConv(HIDDEN, OUT, 1)
        self.which = which

    def forward(self, blocks: list[Any], x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.first(blocks[0], x)
        out, weights = self.second(blocks[1], h, get_attention=True)
        out = out.flatten(1)
        return out, {
            "level": h,
            "edges": weights,
            "seeds": h[: len(out)],
            "without gradient": h.detach(),
        }[self.which]


@pytest.mark.parametrize(
    ("which", "what"),
    [
        ("level", "a row for each of the vertices of level 1,"),
        ("edges", "a row for each of the edges of a layer,"),
        ("seeds", ""),
        ("without gradient", ""),
    ],
)
def test_rows_that_are_not_those_of_the_seeds_are_warned_of(
    which: str, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A loss over them went by, silently: over replicas, too, and over nothing that no seed demands."""
    model = _WithRows(which)
    trace(model)
    trace(model)
    if what:
        assert caplog.text.count(what) == 1
        assert "h[:len(seeds)]" in caplog.text
    else:
        assert not caplog.records


class OwnInput(nn.Module):
    """Two layers that do not get their input as rows of numbers, normalised before the layer that is named, if any.

    From "feat" of the first block, from a table by ids that it is given or finds there, or one learned row for every
    vertex alike.
    """

    def __init__(self, source: str, *, mixes_before: int | None = None, num_rows: int | None = None) -> None:
        super().__init__()
        num_rows = num_rows or (400 if source == "ids of the block" else 7)  # those of an argument are made up as 0
        self.source, self.mixes_before = source, mixes_before
        self.table = nn.Embedding(num_rows, IN)
        # Wider rows are sent as they are given, neither multiplied nor scaled.
        self.first = dglnn.GraphConv(IN, HIDDEN, norm="right", allow_zero_in_degree=True)
        self.second = dglnn.GraphConv(HIDDEN, OUT, allow_zero_in_degree=True)

    def forward(self, blocks: list[Any], ids: Tensor) -> Tensor:
        if self.source == "block":
            x = blocks[0].srcdata["feat"]
        elif self.source == "table":
            x = self.table(ids)
        elif self.source == "ids of the block":
            x = self.table(blocks[0].srcdata[dgl.NID])
        else:
            x = self.table.weight[:1].expand(len(ids), -1)
        h = self.first(blocks[0], x - x.mean(0) if self.mixes_before == 1 else x)
        return self.second(blocks[1], h - h.mean(0) if self.mixes_before == 2 else h)


def trace_with_ids(model: nn.Module) -> TraceResult:
    """Called with ids, and with a field that was prefetched."""
    fields = StaticFields(source={"feat": ((IN,), torch.float32)}, destination={}, edge={})
    blocks, _, _ = build_tiny_blocks(2, set())
    ids = torch.arange(blocks[0].num_src_nodes())
    return trace_model(model, CallTemplate.of_call((blocks, ids), {}, blocks, fields), 2)


@pytest.mark.parametrize("mixes_before", [1, 2])
@pytest.mark.parametrize("source", ["block", "table", "ids of the block"])
def test_rows_are_not_mixed_unseen_behind_fields_and_tables(source: str, mixes_before: int) -> None:
    """No argument of such a model has numbers whose change could be followed: it seemed to keep rows apart."""
    with pytest.raises(BlockError, match="mixes rows of different vertices"):
        trace_with_ids(OwnInput(source, mixes_before=mixes_before))


@pytest.mark.parametrize("source", ["block", "table", "ids of the block", "one row"])
def test_fields_and_tables_alone_mix_nothing(source: str) -> None:
    """One row that is repeated shares its memory: to change it for one vertex in place is to change it for all."""
    model = OwnInput(source)
    before = model.table.weight.detach().clone()
    assert trace_with_ids(model).dense_below == 0
    assert torch.equal(model.table.weight, before)


def test_a_table_of_one_row_knows_no_other_id() -> None:
    assert trace_with_ids(OwnInput("table", num_rows=1)).dense_below == 0
    with pytest.raises(BlockError, match="mixes rows of different vertices"):
        trace_with_ids(OwnInput("table", num_rows=1, mixes_before=2))


class Keeping(nn.Module):
    """Keeps something in a buffer in every forward, which changes nothing of what it returns."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.layers = way, nn.ModuleList([dglnn.GraphConv(IN, HIDDEN), dglnn.GraphConv(HIDDEN, OUT)])
        self.norm = nn.BatchNorm1d(HIDDEN)
        is_table = way in ("a row of each vertex", "many centres")
        self.register_buffer("kept", torch.zeros(500, HIDDEN) if is_table else torch.zeros(HIDDEN))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, blocks: list[Any], x: Tensor) -> Tensor:
        h = self.layers[0](blocks[0], x)
        with torch.no_grad():
            if self.way == "running mean":
                self.kept.mul_(0.9).add_(0.1 * h.mean(0))
            elif self.way == "many centres":
                self.kept.add_(h.mean(0))
            elif self.way == "a greatest":
                self.kept = torch.maximum(self.kept, h.amax(0))
            elif self.way == "a count":
                self.seen += int((h > 3.0).sum())
            elif self.way == "a row of each vertex":
                self.kept[blocks[0].dstdata[dgl.NID] % 500] = h
            elif self.way == "the last rows":
                self.kept = h.clone()
            elif self.way == "a time of day":
                self.kept.fill_(float(time.perf_counter_ns() % 1_000_003))
            elif self.way == "a sparse one":
                self.kept = torch.eye(3).to_sparse()
            elif self.way == "a turned one":
                self.kept = torch.zeros(2, 3, HIDDEN).permute(2, 0, 1) + self.layers[0].weight.mean()
            elif self.way == "halves":
                self.kept = self.layers[0].weight.mean(0).half()
            elif self.way == "steps":
                self.seen += 1
            elif self.way == "weights":
                self.kept.mul_(0.9).add_(self.layers[0].weight.mean(0))
        if self.way == "batch norm":
            h = self.norm(h)
        return self.layers[1](blocks[1], torch.tanh(h))


@pytest.mark.parametrize("way", ["running mean", "many centres", "a greatest", "a count"])
def test_what_is_kept_of_several_rows_is_refused(way: str) -> None:
    """Each rank had that of its own rows, in silence: codebooks, centres, statistics for the evaluation alone."""
    with pytest.raises(BlockError, match=r"keeps in its buffer '(kept|seen)' what a forward makes of rows"):
        trace(Keeping(way))


@pytest.mark.parametrize(
    "way",
    [
        *("steps", "weights", "a row of each vertex", "the last rows", "batch norm", "a time of day", "halves"),
        *("a sparse one", "a turned one"),
    ],
)
def test_what_is_kept_of_no_row_or_of_each_may_be(way: str, caplog: pytest.LogCaptureFixture) -> None:
    model = Keeping(way)
    before = {name: x.clone() for name, x in model.named_buffers()}
    trace(model)
    assert all(torch.equal(x, before[name]) for name, x in model.named_buffers())
    assert "evaluation mode" not in caplog.text


class Evaluating(nn.Module):
    """Does something else in evaluation mode."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.layers = way, nn.ModuleList([dglnn.GraphConv(IN, HIDDEN), dglnn.GraphConv(HIDDEN, OUT)])

    def forward(self, blocks: list[Any], x: Tensor) -> Tensor:
        h = self.layers[0](blocks[0], x)
        if not self.training:
            if self.way == "fails":
                raise RuntimeError("this model only trains")
            h = h - h.mean(0) if self.way == "mixes" else h / h.norm(dim=1, keepdim=True)
        return self.layers[1](blocks[1], h)


@pytest.mark.parametrize("way", ["mixes", "apart", "fails"])
def test_rows_that_are_mixed_in_evaluation_alone_are_warned_of(way: str, caplog: pytest.LogCaptureFixture) -> None:
    """Training is exact, and `infer` looks for itself: a script's own evaluation was wrong without a word."""
    model = Evaluating(way)
    for _ in range(2):
        trace(model)
    said = caplog.text.count("in evaluation mode this holds, so that what the model evaluates to is not exact")
    assert said == (way == "mixes"), "once"
    assert model.training


WAYS = (
    *("dropout of torch", "noise of weights", "noise of rows", "a layer that is skipped", "spectral norm"),
    "schedule",
)


@pytest.mark.parametrize("way", WAYS)
def test_what_differs_from_forward_to_forward_mixes_no_rows(way: str, caplog: pytest.LogCaptureFixture) -> None:
    """Two runs were compared, and whatever made them differ was taken for rows that were mixed."""
    model = Drawing(way)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    before = torch.random.get_rng_state()
    assert trace(model, value=1.0).dense_below == 0
    assert not caplog.records
    assert torch.equal(torch.random.get_rng_state(), before)
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), name


def test_what_cannot_be_repeated_is_not_checked(caplog: pytest.LogCaptureFixture) -> None:
    assert trace(Drawing("the clock"), value=1.0).dense_below == 0
    assert "two forwards of the model from the same state differ" in caplog.text


def test_a_model_that_draws_and_mixes_rows_is_refused() -> None:
    class Mixing(Drawing):
        def forward(self, blocks: list[object], x: Tensor) -> Tensor:
            return super().forward(blocks, x - x.mean(0))

    with pytest.raises(BlockError, match="mixes rows of different vertices"):
        trace(Mixing("noise of weights"), value=1.0)
