# SPDX-License-Identifier: Apache-2.0
"""Evaluations leave the model as it was: each of its modules in its own mode, whatever becomes of the evaluation."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from dgl_hybrid import FullGraphLoader, PartitionedGraph, infer
from dgl_hybrid.errors import BlockError
from dgl_hybrid.exchange import locality
from dgl_hybrid.exchange.communicator import Communicator
from dgl_hybrid.partition import local_order
from dgl_hybrid.training import inference, planning
from dgl_hybrid.training.trainer import Evaluator
from tests.helpers.exactness import Case
from tests.helpers.graphs import NUM_CLASSES, NUM_FEATURES, power_law
from tests.helpers.partitions import PartitionStore
from tests.helpers.world import run_ranks, run_ranks_expect_errors


class FineTuned(nn.Module):
    """Its input's statistics are frozen, as a script does by `model.norm.eval()`; the rest trains."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(NUM_FEATURES).double()
        self.model = Case(kind="gcn_both", dropout=0.5).build(NUM_FEATURES)
        self.modes: list[set[bool]] = []
        self.is_broken = False

    def forward(self, blocks: Sequence[Any], x: Tensor) -> Tensor:
        self.modes.append({module.training for module in self.modules()})
        if self.is_broken:
            raise ArithmeticError("a broken model")
        out: Tensor = self.model(blocks, self.norm(x))
        return out


@dataclass(kw_only=True)
class Modes:
    before: dict[str, bool]
    """Whether each module trains."""
    during: list[set[bool]]
    after: dict[str, bool]
    after_error: dict[str, bool]
    error: str


def modes_of(model: nn.Module) -> dict[str, bool]:
    return {name: module.training for name, module in model.named_modules()}


def evaluate(rank: int, world_size: int, part_config: str, way: str) -> Modes:
    g = PartitionedGraph.open(part_config)
    masks = g.ndata["train_mask"].local.bool()
    g.ndata["val_mask"], g.ndata["test_mask"] = ~masks, ~masks
    evaluator = Evaluator(g, 2)
    model = FineTuned()
    model.norm.eval()

    def call() -> None:
        if way == "infer":
            infer(model, g, 2)
        else:
            evaluator.measure(model, 1)

    before, error = modes_of(model), ""
    call()
    after = modes_of(model)
    model.is_broken = True
    try:
        call()
    except ArithmeticError as caught:
        error = str(caught)
    return Modes(before=before, during=model.modes, after=after, after_error=modes_of(model), error=error)


@pytest.mark.parametrize("way", ["infer", "evaluator"])
def test_each_module_is_in_its_own_mode_again(way: str, partitions: PartitionStore) -> None:
    """`model.train()` put the frozen ones into training, too; after an error all of them went on evaluating."""
    for modes in run_ranks(2, evaluate, partitions.get("power_law", power_law(), 2), way):
        assert modes.before["model"]
        assert not modes.before["norm"]
        assert modes.during == [{False}, {False}], "nothing trains while it is evaluated"
        assert modes.after == modes.before
        assert modes.error == "a broken model"
        assert modes.after_error == modes.before


class Mixing(nn.Module):
    """Does something with all the rows between two layers."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.model = Case(kind="gcn_both", dropout=0.5).build(NUM_FEATURES)
        self.norm = nn.BatchNorm1d(NUM_FEATURES).double()
        self.last_norm = nn.BatchNorm1d(NUM_CLASSES).double()
        self.way = way

    def forward(self, blocks: Sequence[Any], x: Tensor) -> Tensor:
        if self.way == "mean":
            x = x - x.mean(0)
        elif self.way == "maximum":
            x = x / x.max()
        elif self.way == "softmax":
            x = x.softmax(0)
        elif self.way == "evaluated batch norms":
            x = self.norm(x)
        elif self.way == "mean when it trains" and self.training:
            x = x - x.mean(0)
        elif self.way == "the data at hand":
            assert (x.shape[0] < 61) or torch.is_grad_enabled(), "no made-up rows"
        out: Tensor = self.model(blocks, x)
        return self.last_norm(out) if self.way == "evaluated batch norms" else out


def infer_with(rank: int, world_size: int, part_config: str, way: str) -> tuple[str, int, list[str]]:
    """Returns what an error says, how often the model was looked at in three calls, and what was logged."""
    g = PartitionedGraph.open(part_config)
    model, messages = Mixing(way), list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(inference.__name__).addHandler(handler)
    error = ""
    with mock.patch.object(inference, "check_rows_apart", wraps=inference.check_rows_apart) as looks:
        for _ in range(3):
            try:
                infer(model, g, 2)
            except BlockError as caught:
                error = str(caught)
    logging.getLogger(inference.__name__).removeHandler(handler)
    return error, looks.call_count, messages


@pytest.mark.parametrize("way", ["mean", "softmax", "maximum"])
def test_a_model_that_mixes_rows_is_refused_by_inference(way: str, partitions: PartitionStore) -> None:
    """It was looked at only by training, in its second epoch."""
    for error, _, messages in run_ranks(2, infer_with, partitions.get("power_law", power_law(), 2), way):
        assert "mixes rows of different vertices outside message passing" in error
        assert not messages


@pytest.mark.parametrize("way", ["", "evaluated batch norms", "mean when it trains"])
def test_a_model_that_keeps_rows_apart_is_looked_at_once(way: str, partitions: PartitionStore) -> None:
    """As it evaluates: what it does in training is none of inference's concern."""
    outcomes = run_ranks(2, infer_with, partitions.get("power_law", power_law(), 2), way)
    assert [outcome[:2] for outcome in outcomes] == [("", 1), ("", 0)]
    assert not outcomes[0][2]


def test_a_model_that_cannot_be_looked_at_is_warned_of(partitions: PartitionStore) -> None:
    outcomes = run_ranks(2, infer_with, partitions.get("power_law", power_law(), 2), "the data at hand")
    assert [outcome[:2] for outcome in outcomes] == [("", 1), ("", 0)]
    (message,) = outcomes[0][2]
    assert "could not be run on the small blocks" in message


def infer_twice(rank: int, world_size: int, part_config: str) -> list[tuple[bool, bool]]:
    """Whether a row order was looked for, and used, by one pass on a fresh graph and by one after training."""
    facts = []
    with mock.patch.object(locality, "MIN_EDGES", 1), mock.patch.object(local_order, "_GAIN", 2.0):
        g = PartitionedGraph.open(part_config)
        model = Case(kind="gcn_both").build(NUM_FEATURES)
        made: list[FullGraphLoader] = []

        def make(*args: Any, **options: Any) -> FullGraphLoader:
            made.append(FullGraphLoader(*args, **options))
            return made[-1]

        with mock.patch.object(inference, "FullGraphLoader", make):
            first = infer(model, g, 2)
            facts.append((g.places.are_known, made[-1].sets.by_locality))
            FullGraphLoader(g, g.owned_nodes("train_mask"), 2, strategy="depcomm")
            second = infer(model, g, 2)
            facts.append((g.places.are_known, made[-1].sets.by_locality))
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    return facts


def test_one_pass_looks_for_no_row_order_but_takes_that_of_training(partitions: PartitionStore) -> None:
    facts = run_ranks(3, infer_twice, partitions.get("power_law", power_law(), 3))
    assert facts == [[(False, False), (True, True)]] * 3


class Several(nn.Module):
    """Returns more than the rows of the seeds' logits."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.model, self.way = Case(kind="gcn_both").build(NUM_FEATURES), way

    def forward(self, blocks: Sequence[Any], x: Tensor) -> Any:
        logits = self.model(blocks, x)
        if self.way == "tuple":
            return logits, logits.argmax(1), "as it was"
        if self.way == "dictionary":
            return {"logits": logits, "more": [logits.exp(), None]}
        if self.way == "a row less":
            return logits[1:]
        return logits, logits.mean() if self.way == "scalar" else x


def infer_several(rank: int, world_size: int, part_config: str, way: str) -> tuple[Tensor, Any]:
    """One rank asks for one node, and the last one for none."""
    g = PartitionedGraph.open(part_config)
    count = {0: len(g.owned_nodes()), 1: 1}.get(rank, 0)
    return infer(Several(way), g, 2, nids=g.owned_nodes()[:count])


def test_a_model_may_return_several_tensors(partitions: PartitionStore) -> None:
    folder = partitions.get("power_law", power_law(), 3)
    plain = [infer_by_rank[1]["logits"] for infer_by_rank in run_ranks(3, infer_several, folder, "dictionary")]
    assert [len(rows) for rows in plain] == [len(ids) for ids, _ in run_ranks(3, infer_several, folder, "tuple")]
    assert len(plain[1]) == 1
    assert len(plain[2]) == 0
    for rows, (_, (logits, classes, word)) in zip(plain, run_ranks(3, infer_several, folder, "tuple"), strict=True):
        assert torch.equal(logits, rows)
        assert torch.equal(classes, rows.argmax(1))
        assert word == "as it was"
    for rows, (_, found) in zip(plain, run_ranks(3, infer_several, folder, "dictionary"), strict=True):
        assert torch.equal(found["more"][0], rows.exp())
        assert found["more"][1] is None


@pytest.mark.parametrize("way", ["a row less", "scalar", "rows of a lower level"])
def test_what_has_no_row_for_each_seed_is_refused_on_all_ranks(way: str, partitions: PartitionStore) -> None:
    folder = partitions.get("power_law", power_law(), 3)
    for error in run_ranks_expect_errors(3, infer_several, folder, way):
        assert error.type_name == "ValueError"
        assert "whose tensors have one row for each of the seeds" in error.message


def infer_unlike(rank: int, world_size: int, part_config: str, what: str) -> None:
    """Rank 1 is given something else."""
    g = PartitionedGraph.open(part_config)
    model: Any = Case(kind="sage_mean").build(NUM_FEATURES)
    if what == "no module" and rank == 1:
        model = model.forward
    has_loader = {"a loader": rank == 1, "no loader": rank != 1}.get(what, False)
    # Who has none would make one, which is collective.
    loaders = [FullGraphLoader(g, g.owned_nodes(), 2, strategy="depcomm")]
    infer(model, g, 2, loader=loaders[0] if has_loader else None)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("no module", "infer needs a torch.nn.Module, called as model(blocks, x) (got method)"),
        ("a loader", "(got one on rank 1 and none on rank 0)"),
        ("no loader", "(got one on rank 0 and none on rank 1)"),
    ],
)
def test_what_one_rank_is_given_otherwise_is_refused_on_all(what: str, words: str, partitions: PartitionStore) -> None:
    """The others waited for it, or took its messages for those of their own pass."""
    for error in run_ranks_expect_errors(3, infer_unlike, partitions.get("power_law", power_law(), 3), what):
        assert error.type_name == ("TypeError" if what == "no module" else "ValueError")
        assert words in error.message


def evaluate_by_one_loader(rank: int, world_size: int, part_config: str, strategy: str) -> tuple[int, list[Tensor]]:
    """Returns how often models were timed, and what three evaluations by one loader give."""
    g = PartitionedGraph.open(part_config)
    model = Case(kind="sage_mean").build(NUM_FEATURES)
    loader = FullGraphLoader(g, g.owned_nodes(), 2, strategy=strategy, autotune=False)
    with mock.patch.object(planning, "time_model", wraps=planning.time_model) as timing:
        found = [infer(model, g, 2, loader=loader)[1] for _ in range(3)]
    assert loader.outcome is not None
    return timing.call_count, found


@pytest.mark.parametrize(("strategy", "num_timings"), [("depcomm", 0), ("depcache", 0), ("hybrid", 1)])
def test_who_only_evaluates_by_a_pure_plan_is_not_timed(
    strategy: str, num_timings: int, partitions: PartitionStore
) -> None:
    """No time changes what it does, and an evaluation is shorter than the timing."""
    graph = power_law()
    for count, found in run_ranks(2, evaluate_by_one_loader, partitions.get("power_law", graph, 2), strategy):
        assert (count > 0) == (num_timings > 0)
        for output in found[1:]:
            torch.testing.assert_close(output, found[0], rtol=1e-9, atol=1e-12)


class Noted(nn.Module):
    """Notes its calls; copies of it, too."""

    events: ClassVar[list[str]] = []

    def __init__(self) -> None:
        super().__init__()
        self.model = Case(kind="gcn_both").build(NUM_FEATURES)

    def forward(self, blocks: Sequence[Any], x: Tensor) -> Tensor:
        self.events.append("call")
        out: Tensor = self.model(blocks, x)
        return out


@pytest.mark.parametrize("is_scarce", [False, True])
def test_memory_of_an_evaluations_exchanges_goes_with_it(
    is_scarce: bool, monkeypatch: pytest.MonkeyPatch, partitions: PartitionStore
) -> None:
    """It stayed in nobody's use. Where evaluations come again it may, unless memory is scarce."""
    monkeypatch.setattr(Communicator, "drop_free_memory", lambda communicator: Noted.events.append("drop"))
    g = PartitionedGraph.open(partitions.get("power_law", power_law(), 1))
    masks = g.ndata["train_mask"].local.bool()
    g.ndata["val_mask"], g.ndata["test_mask"] = ~masks, ~masks
    monkeypatch.setattr(PartitionedGraph, "is_memory_scarce", is_scarce)
    model, evaluator = Noted(), Evaluator(g, 2)
    loader = FullGraphLoader(g, g.owned_nodes(), 2, strategy="depcomm")
    calls: dict[str, Callable[[], object]] = {
        "infer": lambda: infer(model, g, 2),
        "infer with a loader": lambda: infer(model, g, 2, loader=loader),
        "measure": lambda: evaluator.measure(model, 1),
    }
    for name, call in calls.items():
        call()  # the first time, loaders give back what building took
        Noted.events.clear()
        call()
        assert "call" in Noted.events
        assert (Noted.events[-1] == "drop") is (is_scarce or name == "infer"), name
