# SPDX-License-Identifier: Apache-2.0
"""Times of rows and edges are found from operations at two sizes, on blocks with a rank's own structure."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import dgl
import dgl.nn as dglnn
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dgl_hybrid.exchange.closure import LevelSets
from dgl_hybrid.graph import model_timing
from dgl_hybrid.graph.call_template import CallTemplate, StaticFields
from dgl_hybrid.graph.model_timing import (
    BUDGET_S,
    MOST_ROUNDS,
    MOST_UNSURE_ROUNDS,
    PRECISION,
    ROUNDS,
    Measured,
    error_of_median,
    fit_times,
    measure_in_turns,
    time_model,
    wants_another_round,
)
from dgl_hybrid.graph.optimize import optimize
from dgl_hybrid.graph.tiny_blocks import _structure_of_one_rank, build_blocks_like
from dgl_hybrid.graph.trace import trace_model
from dgl_hybrid.ops.op_counts import op_counts, reset_op_counts
from dgl_hybrid.partition.narrow_ids import NarrowIds
from dgl_hybrid.planner import synthetic_trace

IN, HIDDEN, OUT = 5, 9, 3


class Field:
    """Stands for a graph's field: the template asks for its row shape and dtype only."""

    def __init__(self, width: int) -> None:
        self.local = torch.zeros(1, width)


class TwoLayers(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.second = dglnn.SAGEConv(IN, HIDDEN, "mean"), dglnn.SAGEConv(HIDDEN, OUT, "mean")
        self.dropout = dropout

    def forward(self, blocks: list[object], x: Tensor) -> Tensor:
        h = F.relu(self.first(blocks[0], x))
        return self.second(blocks[1], F.dropout(h, self.dropout))


def hand_sets() -> LevelSets:
    """Levels of 4, 3 and 2 rows; in layer 2 row 0 reads rows 1 and 2, row 1 reads the received row 3."""
    first = _structure_of_one_rank(1, 4, torch.tensor([0, 1, 3, 4]), torch.tensor([3, 0, 1, 2]))
    second = _structure_of_one_rank(2, 3, torch.tensor([0, 2, 3]), torch.tensor([1, 2, 3]))
    received = replace(second.exchange, recv_counts=(1,), recv_global=torch.tensor([7]))
    second = replace(second, exchange=received)
    return LevelSets(
        rows_global=torch.arange(4),
        sizes=(4, 3, 2),
        owned=torch.ones(4, dtype=torch.bool),
        layers=(first, second),
        edge_ids=(NarrowIds(torch.arange(4)),) * 2,
        num_borrowed=0,
    )


def in_lists(block: object) -> list[list[int]]:
    structure = block.structure  # type: ignore[attr-defined]
    return [part.tolist() for part in structure.indices.tensor_split(structure.indptr[1:-1])]


def test_blocks_read_what_the_rank_reads() -> None:
    blocks, sizes, edges = build_blocks_like(hand_sets(), 100.0, set())
    assert sizes == [402, 400, 200]
    assert edges == [533, 300]
    assert build_blocks_like(hand_sets(), 100.0, {300})[2][1] == 301, "more, where their number would tell of rows"
    lists = in_lists(blocks[1])
    # Row 2k + 1 stands for row 1, whose received source 3 becomes a held one; the k-th copy reads the k-th rows.
    assert lists[:4] == [[1, 2], [3], [5, 6], [7]]
    assert lists[-1] == [399]
    part, sizes, _ = build_blocks_like(hand_sets(), 0.1, {2, 4})
    assert sizes == [5, 3, 1]
    assert in_lists(part[1])[0][:2] == [1, 2]
    alone, _, edges = build_blocks_like(hand_sets(), 100.0, set(), without_edges=frozenset([2]))
    assert in_lists(alone[1])[:3] == [[0], [1], [2]]
    assert edges[1] not in (200, 300, 400)


class WithTables(TwoLayers):
    """Reads rows of its own by the ids of vertices and edges."""

    def __init__(self, num_nodes: int, num_edges: int, *, sparse: bool) -> None:
        super().__init__()
        self.of_nodes = nn.Embedding(num_nodes, IN, sparse=sparse)
        self.of_edges = nn.Embedding(num_edges, 1, sparse=sparse)

    def forward(self, blocks: list[object], x: Tensor) -> Tensor:
        weight = self.of_edges(blocks[0].edata[dgl.EID])  # type: ignore[attr-defined]
        h = self.first(blocks[0], x + self.of_nodes(blocks[0].srcdata[dgl.NID]), edge_weight=weight)  # type: ignore[attr-defined]
        return self.second(blocks[1], F.relu(h))


@pytest.mark.parametrize("sparse", [False, True])
def test_rows_and_edges_of_larger_blocks_have_ids_of_the_graph(sparse: bool) -> None:
    """Blocks of small graphs are larger than these. Ids went on to their end, beyond what a table by id has."""
    blocks, sizes, _ = build_blocks_like(hand_sets(), 100.0, set())
    assert sizes[0] > 100
    assert set(blocks[0].srcdata[dgl.NID].tolist()) == set(range(4))
    assert all(set(block.edata[dgl.EID].tolist()) <= set(range(4)) for block in blocks)
    sets = hand_sets()
    build_blocks_like(sets, 0.5, set())[0][0].edata[dgl.EID]
    assert all(ids._held.dtype == torch.int32 for ids in sets.edge_ids), "those of the graph take no more memory for it"
    template = CallTemplate.of_convention({"feat": Field(IN)}, StaticFields(source={}, destination={}, edge={}))  # type: ignore[dict-item]
    model = WithTables(200, 700, sparse=sparse)  # as many as the smallest blocks have
    assert time_model(model, template, hand_sets(), [synthetic_trace([IN, HIDDEN, OUT])], budget_s=0.01) is not None


def test_slopes_and_calls_by_hand() -> None:
    """Level 1 has an operation of 1 s + 0.5 s per row, layer 2 one of 2 s + 0.25 s per edge; the rest is 3 s."""
    trace = synthetic_trace([IN, HIDDEN, OUT])

    def measured(rows: list[int], edges: list[int], watched: float) -> Measured:
        ops = [1.0 + 0.5 * rows[1], 2.0 + 0.25 * edges[1], 3.0]
        return Measured(rows, edges, sum(ops), [watched * seconds for seconds in ops], [1, 4, -1])

    calls, large = [9, 6, 3], [900, 600, 300]
    times = fit_times(measured(calls, [20, 10], 1.0), measured(large, [2000, 1000], 1.0), trace)
    assert times.row_s == pytest.approx((0.0, 0.5, 0.0))
    assert times.edge_s == pytest.approx((0.0, 0.25))
    assert times.fixed_s == pytest.approx(6.0)
    assert times.epoch_s((9, 60, 3), (20, 100)) == pytest.approx(6.0 + 30 + 25)
    # Watching makes operations slower; the epoch that nobody watched counts.
    slower = fit_times(measured(calls, [20, 10], 1.5), measured(large, [2000, 1000], 1.5), trace)
    assert slower.row_s == pytest.approx(times.row_s)
    assert slower.edge_s == pytest.approx(times.edge_s)
    assert slower.fixed_s == pytest.approx(times.fixed_s)


def test_rows_have_zeros_where_the_vertices_they_stand_for_have() -> None:
    class Bags:
        local = torch.eye(6, 400)

    template = CallTemplate.of_convention({"feat": Bags()}, StaticFields(source={}, destination={}, edge={}))
    assert template.has_sparse_rows
    blocks, sizes, _ = build_blocks_like(hand_sets(), 10.0, set())
    generator = torch.Generator().manual_seed(0)
    own_rows = torch.tensor([5, 1, 0, 4])
    (_, x), _, static = template.bind(blocks, generator, own_rows)
    assert torch.equal(x != 0, Bags.local[own_rows.repeat(sizes[0])[: sizes[0]]] != 0)
    assert static[0] is x
    (_, some), _, _ = template.bind(blocks, generator)
    assert (some != 0).sum(1).max() == 1
    (_, others), _, _ = template.bind(blocks, generator, torch.tensor([9]))  # not rows that are known here
    assert (others != 0).sum(1).max() == 1
    Bags.local = torch.ones(6, 400)
    dense = CallTemplate.of_convention({"feat": Bags()}, StaticFields(source={}, destination={}, edge={}))
    assert not dense.has_sparse_rows
    (_, x), _, _ = dense.bind(blocks, generator, own_rows)
    assert (x != 0).all()


def test_a_model_is_timed_in_the_order_that_was_chosen_and_on_the_ranks_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    own_rows, given = torch.arange(4), []
    bind = CallTemplate.bind
    monkeypatch.setattr(CallTemplate, "bind", lambda self, *args: given.append(args[2:]) or bind(self, *args))
    template = CallTemplate.of_convention({"feat": Field(IN)}, StaticFields(source={}, destination={}, edge={}))
    model = optimize(TwoLayers())
    for sums_first, ran in ((False, "sageconv/ours: fewer passes"), (True, "sageconv/ours: sum first")):
        trace = trace_model(model, template, 2, sums_first=(False, sums_first)).trace
        given.clear()
        assert trace.sums_first == (False, sums_first)
        reset_op_counts()
        assert time_model(model, template, hand_sets(), [trace], own_rows=own_rows, budget_s=0.01) is not None
        assert given
        assert all(rows is own_rows for (rows,) in given)
        names = {name for name in op_counts() if name.startswith("sageconv")}
        assert names == {"sageconv/ours: kept aggregate", ran}
    orders = [trace_model(model, template, 2, sums_first=(False, last)).trace for last in (False, True)]
    times = time_model(model, template, hand_sets(), orders, budget_s=0.01)
    assert times is not None
    assert len(times) == 2
    assert op_counts()["sageconv/ours: fewer passes"] > 0


class FakeEpoch:
    """Takes its seconds on a machine that is three times as slow after the first second."""

    def __init__(self, name: str, seconds: float, machine: FakeMachine) -> None:
        self.name, self.seconds, self.machine = name, seconds, machine
        self.measured = Measured([1], [])

    def run(self) -> None:
        self.machine.now_s += self.seconds * (3.0 if self.machine.now_s > 1.0 else 1.0)
        self.machine.ran.append(self.name)

    def run_watched(self) -> None:
        self.machine.watched.append(self.name)


class FakeMachine:
    def __init__(self) -> None:
        self.now_s = 0.0
        self.ran: list[str] = []
        self.watched: list[str] = []

    def perf_counter(self) -> float:
        return self.now_s


def test_orders_take_turns_so_that_a_machine_that_gets_slower_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = FakeMachine()
    monkeypatch.setattr(model_timing, "time", machine)
    epochs = [FakeEpoch("a", 0.10, machine), FakeEpoch("b", 0.11, machine), FakeEpoch("c", 0.09, machine)]
    measured = measure_in_turns(epochs, budget_s=BUDGET_S)  # type: ignore[arg-type]
    assert machine.ran[:3] == ["a", "b", "c"], "before any is timed, each makes what it keeps"
    turns = machine.ran[3:]
    assert turns == ["a", "b", "c"] * (len(turns) // 3)
    assert len(turns) // 3 >= ROUNDS
    assert machine.watched == ["a", "b", "c"] * ROUNDS
    first_s, second_s, third_s = (one.elapsed_s for one in measured)
    assert second_s / first_s == pytest.approx(1.1)
    assert third_s / first_s == pytest.approx(0.9)
    assert first_s == pytest.approx(0.3), "most of its epochs were slow ones"


def test_of_rounds_that_differ_each_order_has_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine is slow for about half of the epochs: their medians say that the slower order is the faster one."""
    machine = FakeMachine()
    monkeypatch.setattr(model_timing, "time", machine)

    class Unsteady(FakeEpoch):
        def run(self) -> None:
            self.machine.now_s += self.seconds * (2.0 if len(self.machine.ran) % 28 < 13 else 1.0)
            self.machine.ran.append(self.name)

    epochs = [Unsteady("a", 0.010, machine), Unsteady("b", 0.011, machine)]
    monkeypatch.setattr(model_timing, "PRECISION", float("inf"))
    first, second = measure_in_turns(epochs, budget_s=BUDGET_S)  # type: ignore[arg-type]
    assert len(machine.ran) == 2 + 2 * MOST_ROUNDS
    assert second.elapsed_s / first.elapsed_s == pytest.approx(1.1, rel=0.01)


def test_no_rank_ends_while_others_have_another_order_to_time(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = FakeMachine()
    monkeypatch.setattr(model_timing, "time", machine)
    told: list[bool] = []

    def any_wants_more(wants_more: bool, last_s: float) -> bool:
        told.append(wants_more)
        return wants_more

    measure_in_turns(
        [FakeEpoch("a", 0.1, machine), FakeEpoch("b", 0.1, machine)],  # type: ignore[list-item]
        budget_s=1e-9,
        any_wants_more=any_wants_more,
    )
    assert told == [True] * (2 * ROUNDS) + [False]


def test_what_is_not_seen_is_spread_as_the_trace_counts() -> None:
    trace = synthetic_trace([IN, HIDDEN, OUT])
    calls, large = Measured([9, 6, 3], [20, 10], 1.0), Measured([900, 600, 300], [2000, 1000], 9.0)
    times = fit_times(calls, large, trace)
    assert times.epoch_s((900, 600, 300), (2000, 1000)) == pytest.approx(9.0)
    per_byte = [seconds / layer.edge_bytes for seconds, layer in zip(times.edge_s, trace.layers, strict=True)]
    assert per_byte[0] == pytest.approx(per_byte[1], rel=0.1)
    kept = dataclasses.replace(trace, layers=(dataclasses.replace(trace.layers[0], keeps_result=True), trace.layers[1]))
    assert fit_times(calls, large, kept).edge_s[0] == 0


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_a_model_is_timed_and_not_changed(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_timing, "FIRST_EDGES", 1 << 13)
    monkeypatch.setattr(model_timing, "ROUNDS", 1)
    model = TwoLayers(dropout=0.5).eval().to(device)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    template = CallTemplate.of_convention({"feat": Field(IN)}, StaticFields(source={}, destination={}, edge={}))
    dropped: list[int] = []
    seen: list[Measured] = []
    monkeypatch.setattr(model_timing, "fit_times", lambda *args: seen.extend(args[:2]) or fit_times(*args))

    def dropout(x: Tensor) -> Tensor:
        assert x.device == model.first.fc_neigh.weight.device
        dropped.append(len(x))
        return x * 2.0

    trace = synthetic_trace([IN, HIDDEN, OUT])
    times = time_model(model, template, hand_sets(), [trace], dropout=dropout, keep_static=False, budget_s=0.01)
    assert times is not None
    for measured in seen:
        # Levels 0 to 2 and layers 1 and 2; level 0 is not worked on, its rows are inputs.
        assert {1, 2, 3, 4} <= set(measured.charged_to) <= {-1, 0, 1, 2, 3, 4}
    assert sum(seen[1].edges) > 4 * sum(seen[0].edges)
    assert dropped, "training drops"
    assert not model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_every_operation_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU was given before is not taken for the time of an operation, nor the time of its launch."""
    steps: list[str] = []
    monkeypatch.setattr(model_timing, "wait_for_device", lambda device: steps.append(f"wait for {device}"))
    with model_timing._Stopwatch([4], [8], torch.device("cuda", 1)) as watch:
        torch.ones(4).add_(1.0)
    assert steps == ["wait for cuda:1"] * 4
    assert watch.charged_to == [0, 0]


def test_a_model_on_several_devices_is_not_timed() -> None:
    model = TwoLayers()
    model.second.to("meta")
    template = CallTemplate.of_convention({"feat": Field(IN)}, StaticFields(source={}, destination={}, edge={}))
    assert time_model(model, template, hand_sets(), [synthetic_trace([IN, HIDDEN, OUT])]) is None


@pytest.mark.cuda
def test_random_numbers_of_the_gpu_go_on_as_if_nothing_had_been_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks time as often as they have time for, and would draw different numbers from then on."""
    monkeypatch.setattr(model_timing, "ROUNDS", 1)

    class Noisy(TwoLayers):
        def forward(self, blocks: list[object], x: Tensor) -> Tensor:
            return super().forward(blocks, x + torch.rand_like(x))

    model = Noisy().to("cuda")
    template = CallTemplate.of_convention({"feat": Field(IN)}, StaticFields(source={}, destination={}, edge={}))
    torch.cuda.manual_seed(3)
    expected = torch.rand(4, device="cuda")
    torch.cuda.manual_seed(3)
    assert time_model(model, template, hand_sets(), [synthetic_trace([IN, HIDDEN, OUT])], budget_s=0.01) is not None
    assert torch.equal(torch.rand(4, device="cuda"), expected)


def test_gradients_are_of_ordinary_size_however_often_epochs_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits far apart, or a model that learned its made-up classes, would have vanishing ones: slow to multiply."""
    monkeypatch.setattr(model_timing, "FIRST_EDGES", 1 << 8)
    monkeypatch.setattr(model_timing, "MOST_ROUNDS", 100)
    sizes: list[float] = []

    class Steep(nn.Module):
        """Logits so far apart that float32 has no number for the likelihood of most classes."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = TwoLayers()

        def forward(self, blocks: list[object], x: Tensor) -> Tensor:
            h = 1e3 * self.inner(blocks, x)
            h.register_hook(lambda gradient: sizes.append(float(gradient.abs().min())))
            return h

    template = CallTemplate.of_convention({"feat": Field(IN)}, StaticFields(source={}, destination={}, edge={}))
    trace = synthetic_trace([IN, HIDDEN, OUT])
    # As long as a hundred rounds take, also on a loaded machine.
    assert time_model(Steep(), template, hand_sets(), [trace], budget_s=60.0) is not None
    assert len(sizes) > 50
    assert min(sizes) > 1e-9


@pytest.mark.parametrize(("budget_s", "expected"), [(60.0, 1.0), (1e-9, 4 / 8)])
def test_blocks_grow_to_the_ranks_own_size_within_the_budget(
    monkeypatch: pytest.MonkeyPatch, budget_s: float, expected: float
) -> None:
    monkeypatch.setattr(model_timing, "FIRST_EDGES", 4)
    asked: list[float] = []
    blocks_of, measure = model_timing._Timer.blocks_of, model_timing.measure_in_turns
    rounds: list[int | None] = []

    def note_size(self: model_timing._Timer, factor: float) -> object:
        asked.append(factor)
        return blocks_of(self, factor)

    def note_rounds(*args: object, **kwargs: int) -> list[Measured]:
        rounds.append(kwargs.get("rounds"))
        return measure(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(model_timing._Timer, "blocks_of", note_size)
    monkeypatch.setattr(model_timing, "measure_in_turns", note_rounds)
    template = CallTemplate.of_convention({"feat": Field(IN)}, StaticFields(source={}, destination={}, edge={}))
    sets = hand_sets()
    # A fourth row of level 1 is received, so layer 1 gets 4 / 3 of its four edges, rounded down; layer 2 three.
    assert sum(len(layer.indices) for layer in sets.layers) == 7
    assert time_model(TwoLayers(), template, sets, [synthetic_trace([IN, HIDDEN, OUT])], budget_s=budget_s) is not None
    assert asked == pytest.approx([4 / 8, expected])
    assert rounds == [None, 1, None], "what times are made of is never one epoch alone"


def test_the_error_of_a_median_is_that_of_medians_drawn_again_and_again() -> None:
    generator = torch.Generator().manual_seed(0)
    drawn = 0.1 + 0.02 * torch.randn(2000, 25, generator=generator, dtype=torch.float64)
    expected = float(drawn.median(1).values.std()) / 0.1
    told = sum(error_of_median(times) for times in drawn.tolist()) / len(drawn)
    assert told == pytest.approx(expected, rel=0.1)
    assert error_of_median([0.1]) == float("inf")
    disturbed = [0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 9.0]
    assert error_of_median(disturbed) < 1e-9, "one epoch of many says nothing of the others"


def rounds_of(times_s: list[float], budget_s: float = BUDGET_S) -> int:
    """How many epochs run that take these times, again and again."""
    elapsed_s: list[float] = []
    while wants_another_round(elapsed_s, budget_s):
        elapsed_s.append(times_s[len(elapsed_s) % len(times_s)])
    return len(elapsed_s)


def test_epochs_that_differ_are_timed_more_often() -> None:
    # Alike: as before, some, for half of the budget.
    assert rounds_of([0.001]) == MOST_ROUNDS
    assert rounds_of([0.1]) == 5
    assert rounds_of([0.9]) == ROUNDS
    # Four ranks on two cores: until the median is known, or for as long as the least rounds may take.
    differing = [0.010, 0.014, 0.012, 0.016, 0.013, 0.011, 0.015, 0.012]
    count = rounds_of(differing)
    assert MOST_ROUNDS < count < MOST_UNSURE_ROUNDS
    elapsed_s = [differing[i % len(differing)] for i in range(count)]
    assert error_of_median(elapsed_s) <= PRECISION < error_of_median(elapsed_s[:-1])
    assert rounds_of([1.0, 0.5, 2.0]) == ROUNDS, "3.5 s are more than three epochs of the budget"
    assert rounds_of([0.001, 0.009]) == MOST_UNSURE_ROUNDS
    assert rounds_of([0.1, 0.9], budget_s=0.01) == ROUNDS


@pytest.mark.parametrize("num_more", [0, 25])
def test_rounds_go_on_until_no_rank_wants_another(num_more: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other ranks want `num_more` rounds after this one has had its own; then none."""
    monkeypatch.setattr(model_timing, "PRECISION", float("inf"))  # whatever else this machine does
    epochs: list[int] = []
    told: list[bool] = []

    class Counting(TwoLayers):
        def forward(self, blocks: list[object], x: Tensor) -> Tensor:
            epochs.append(len(x))
            return super().forward(blocks, x)

    def any_wants_more(wants_more: bool, last_s: float) -> bool:
        assert (last_s > 0.0) == bool(told)
        told.append(wants_more)
        return wants_more or len(told) <= model_timing.MOST_ROUNDS + num_more

    template = CallTemplate.of_convention({"feat": Field(IN)}, StaticFields(source={}, destination={}, edge={}))
    sets = hand_sets()
    trace = synthetic_trace([IN, HIDDEN, OUT])
    assert time_model(Counting(), template, sets, [trace], any_wants_more=any_wants_more) is not None
    assert len(told) == model_timing.MOST_ROUNDS + num_more + 1
    assert not told[-1]
    on_large_blocks = epochs.count(epochs[-1])
    assert on_large_blocks >= model_timing.MOST_ROUNDS + num_more


@pytest.mark.parametrize(("most", "expected"), [(2, 4), (40, 40), (1 << 16, 30_000)])
def test_blocks_larger_than_the_ranks_own_have_few_rows(
    most: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hidden rows may be far wider than what the model is given: there were many times as many as the rank's own, for
    the sake of few edges.
    """
    monkeypatch.setattr(model_timing, "FIRST_ROWS", most)
    sizes: list[int] = []
    blocks_of = model_timing._Timer.blocks_of

    def note_size(self: model_timing._Timer, factor: float) -> object:
        found = blocks_of(self, factor)
        sizes.append(max(found[1]))
        return found

    monkeypatch.setattr(model_timing._Timer, "blocks_of", note_size)
    template = CallTemplate.of_convention({"feat": Field(IN)}, StaticFields(source={}, destination={}, edge={}))
    trace = synthetic_trace([IN, HIDDEN, OUT])
    assert time_model(TwoLayers(), template, hand_sets(), [trace], budget_s=0.01) is not None
    assert len(sizes) == 1
    assert expected <= sizes[0] <= 2 * expected


def test_many_rows_of_a_kept_layer_do_not_make_the_blocks_larger(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where only few edges are not kept, 2^16 of them would be those of thousands of copies of all rows."""
    monkeypatch.setattr(model_timing, "MAX_ELEMENTS", 40 * IN)
    sizes: list[int] = []
    blocks_of = model_timing._Timer.blocks_of

    def note_size(self: model_timing._Timer, factor: float) -> object:
        found = blocks_of(self, factor)
        sizes.append(found[1][0])
        return found

    monkeypatch.setattr(model_timing._Timer, "blocks_of", note_size)
    template = CallTemplate.of_convention({"feat": Field(IN)}, StaticFields(source={}, destination={}, edge={}))
    trace = synthetic_trace([IN, HIDDEN, OUT])
    assert time_model(TwoLayers(), template, hand_sets(), [trace], budget_s=0.01) is not None
    assert max(sizes) <= 50, "4 rows, ten times"
