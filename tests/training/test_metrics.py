# SPDX-License-Identifier: Apache-2.0
"""Metrics equal those of all rows in one place, borrowed and unlabelled rows left out, ranks without rows included."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from dgl.distributed import role
from torch import Tensor

from dgl_hybrid.exchange.connect import create_communicator
from dgl_hybrid.training.metrics import (
    F1Scores,
    count_correct,
    global_accuracy,
    global_f1,
    global_mean,
    global_roc_auc,
)
from tests.helpers.world import run_ranks, run_ranks_expect_errors

NUM_CLASSES = 4


def make_rows(count: int = 90) -> dict[str, Tensor]:
    """Rows whose last ten are unlabelled; scores are rounded, so that many are tied."""
    generator = torch.Generator().manual_seed(5)
    labels = torch.randint(NUM_CLASSES, (count,), generator=generator)
    labels[-10:] = -1
    return {
        "logits": torch.randn(count, NUM_CLASSES, generator=generator)
        + 1.5 * F.one_hot(labels.clamp(min=0), NUM_CLASSES),
        "labels": labels,
        "scores": (torch.randn(count, generator=generator) + labels).round(decimals=1),
        "tasks": torch.randint(2, (count, 3), generator=generator).float().masked_fill(labels[:, None] < 0, math.nan),
        "task_logits": torch.randn(count, 3, generator=generator),
        "part": torch.randint(1000, (count,), generator=generator),
    }


def run_all(rank: int, world_size: int) -> list[object]:
    """Every metric on this rank's rows, plus one borrowed row of weight 0 that would spoil each of them."""
    rows = make_rows()
    mine = rows["part"] % max(1, world_size - 1) == rank  # the last of several ranks has no rows of its own
    own = {name: torch.cat([value[:1], value[mine]]) for name, value in rows.items()}
    weight = torch.ones(len(own["labels"]))
    weight[0] = 0.0
    losses = F.cross_entropy(own["logits"], own["labels"].clamp(min=0), reduction="none")
    losses[0] = math.nan
    binary = torch.where(own["labels"] < 0, -1, own["labels"] % 2)
    communicator = create_communicator()
    return [
        global_accuracy(own["logits"], own["labels"], weight, communicator=communicator),
        global_mean(losses, weight, communicator=communicator),
        global_f1(own["logits"], own["labels"], weight, communicator=communicator),
        global_f1(own["task_logits"], own["tasks"], weight, communicator=communicator),
        global_roc_auc(own["scores"], binary, weight, communicator=communicator),
        global_roc_auc(own["task_logits"], own["tasks"], weight, communicator=communicator),
    ]


def f1_by_definition(pairs: list[tuple[set[int], set[int]]], num_classes: int) -> F1Scores:
    """From (labelled classes, predicted classes) of every row."""
    tallies = []
    for c in range(num_classes):
        hits = sum(c in actual and c in predicted for actual, predicted in pairs)
        wrong = sum((c in actual) != (c in predicted) for actual, predicted in pairs)
        tallies.append((2 * hits, 2 * hits + wrong))
    numerator, denominator = map(sum, zip(*tallies, strict=True))
    ratios = [a / b for a, b in tallies if b]
    return F1Scores(micro=numerator / denominator, macro=sum(ratios) / len(ratios))


def auc_by_definition(scores: list[float], labels: list[int]) -> float:
    positive = [s for s, label in zip(scores, labels, strict=True) if label == 1]
    negative = [s for s, label in zip(scores, labels, strict=True) if label == 0]
    wins = sum((p > n) + (p == n) / 2 for p in positive for n in negative)
    return wins / (len(positive) * len(negative))


@pytest.fixture(scope="module")
def expected() -> list[object]:
    rows = make_rows()
    labelled = rows["labels"] >= 0
    logits, labels, tasks = rows["logits"][labelled], rows["labels"][labelled], rows["tasks"][labelled]
    single = [({int(a)}, {int(b)}) for a, b in zip(labels, logits.argmax(1), strict=True)]
    several = [
        ({c for c in range(3) if a[c] > 0}, {c for c in range(3) if b[c] > 0})
        for a, b in zip(tasks, rows["task_logits"][labelled], strict=True)
    ]
    areas = [
        auc_by_definition(rows["task_logits"][labelled][:, c].tolist(), tasks[:, c].int().tolist()) for c in range(3)
    ]
    return [
        float((logits.argmax(1) == labels).double().mean()),
        float(F.cross_entropy(rows["logits"], rows["labels"].clamp(min=0), reduction="none").double().mean()),
        f1_by_definition(single, NUM_CLASSES),
        f1_by_definition(several, 3),
        auc_by_definition(rows["scores"][labelled].tolist(), (labels % 2).tolist()),
        sum(areas) / 3,
    ]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_metrics_equal_those_of_all_rows(world_size: int, expected: list[object]) -> None:
    results = run_ranks(world_size, run_all)
    for result in results:
        assert result == results[0]
        for ours, theirs in zip(result, expected, strict=True):
            if isinstance(ours, F1Scores) and isinstance(theirs, F1Scores):
                assert (ours.micro, ours.macro) == pytest.approx((theirs.micro, theirs.macro), rel=1e-12)
            else:
                assert ours == pytest.approx(theirs, rel=1e-12)


def test_counts_can_be_added() -> None:
    rows = make_rows()
    whole = count_correct(rows["logits"], rows["labels"])
    halves = count_correct(rows["logits"][:40], rows["labels"][:40]) + count_correct(
        rows["logits"][40:], rows["labels"][40:]
    )
    assert torch.equal(whole, halves)
    assert float(whole[1]) == 80


def test_a_small_case_by_hand() -> None:
    logits = torch.tensor([[2.0, 1.0], [0.0, 3.0], [1.0, 0.0], [0.0, 1.0]])
    labels = torch.tensor([0, 1, 1, -1])
    assert global_accuracy(logits, labels) == pytest.approx(2 / 3)
    assert global_accuracy(logits, labels, torch.tensor([1.0, 1.0, 2.0, 5.0])) == pytest.approx(2 / 4)
    f1 = global_f1(logits, labels)
    assert (f1.micro, f1.macro) == pytest.approx((2 / 3, 2 / 3))
    # Scores -1, 3, -1 for classes 0, 1, 1: one positive is above the negative, one is level with it.
    assert global_roc_auc(logits, labels) == pytest.approx(0.75)
    assert global_roc_auc(logits, labels, torch.tensor([1.0, 3.0, 1.0, 1.0])) == pytest.approx(3.5 / 4)


def f1_of_classes_without_logits(rank: int, world_size: int) -> list[F1Scores]:
    """Rows predicted 0 and 1, then one of weight 0 and one without label; the last of several ranks has none."""
    rows = [row for row in range(4) if row % max(1, world_size - 1) == rank]
    logits = torch.tensor([[2.0, 1.0], [0.0, 3.0], [1.0, 0.0], [1.0, 0.0]])[rows]
    weight = torch.tensor([1.0, 1.0, 0.0, 1.0])[rows]
    communicator = create_communicator()
    return [
        global_f1(logits, torch.tensor(labels)[rows], weight, communicator=communicator)
        for labels in ([0, 5, 7, -1], [5, 5, 7, -1], [5, 6, 7, -1], [0, 1, 7, -1])
    ]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_classes_that_training_has_not_seen_are_missed(world_size: int) -> None:
    """A row whose class has no column of logits was no miss of any class: half right was micro 2/3, macro 1/2."""
    for found in run_ranks(world_size, f1_of_classes_without_logits):
        # By hand: of class 0 a hit, of class 1 a false alarm, of class 5 a miss.
        assert [(scores.micro, scores.macro) for scores in found] == [
            (pytest.approx(1 / 2), pytest.approx(1 / 3)),
            (0.0, 0.0),
            (0.0, 0.0),
            (1.0, 1.0),
        ]


def test_several_classes_without_logits_each_count_in_the_mean() -> None:
    logits = torch.tensor([[2.0, 1.0], [2.0, 1.0], [2.0, 1.0], [0.0, 3.0]])
    two = global_f1(logits, torch.tensor([0, 4, 5, 5]))
    # Class 0: a hit, two false alarms; class 1: a false alarm; classes 4 and 5: misses.
    assert (two.micro, two.macro) == (pytest.approx(2 / 8), pytest.approx((2 / 4) / 4))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_two_logits_that_differ_are_no_tie(dtype: torch.dtype) -> None:
    """Their difference was taken in their own type, in which both rows came out alike."""
    little = 0.01 if dtype != torch.float32 else 1e-6
    logits = torch.tensor([[little, 100.5], [0.0, 100.5]], dtype=dtype)
    assert global_roc_auc(logits, torch.tensor([0, 1])) == 1.0
    assert global_roc_auc(logits, torch.tensor([1, 0])) == 0.0


@pytest.mark.parametrize("shape", [(3,), (3, 1)])
def test_a_single_logit_is_a_binary_class(shape: tuple[int, ...]) -> None:
    logits = torch.tensor([2.0, -1.0, 0.5]).reshape(shape)
    assert global_accuracy(logits, torch.tensor([1, 0, 0])) == pytest.approx(2 / 3)
    assert global_roc_auc(logits, torch.tensor([1, 0, 0])) == 1.0
    if logits.dim() == 2:
        f1 = global_f1(logits, torch.tensor([1, 0, 0]))
        assert (f1.micro, f1.macro) == (pytest.approx(2 / 3), pytest.approx(2 / 3))
        only = global_f1(logits.abs(), torch.tensor([1, 1, 1]))
        assert (only.micro, only.macro) == (1.0, 1.0)


def test_nothing_to_count_is_nan() -> None:
    logits, none = torch.zeros(3, 2), torch.full((3,), -1)
    scores = [
        global_accuracy(logits, none),
        global_mean(torch.ones(3), torch.zeros(3)),
        global_f1(logits, none).micro,
        global_f1(logits, none).macro,
        global_roc_auc(logits, none),
        global_roc_auc(logits, torch.ones(3)),  # one class only: no pair to compare
        global_accuracy(logits[:0], none[:0]),
        global_roc_auc(logits[:0], none[:0]),
    ]
    assert all(math.isnan(score) for score in scores)


def run_gather(rank: int, world_size: int) -> Tensor:
    return create_communicator().gather_rows(torch.full((2 * (world_size - 1 - rank), 2), float(rank)))


def test_gathered_rows_come_by_rank() -> None:
    for rows in run_ranks(3, run_gather):
        assert rows.tolist() == [[0, 0]] * 4 + [[1, 1]] * 2


def run_nan_score(rank: int, world_size: int) -> None:
    score = torch.tensor([math.nan if rank == 1 else 0.0])
    global_roc_auc(score, torch.tensor([1]), communicator=create_communicator())


def test_a_nan_score_raises_on_every_rank() -> None:
    for error in run_ranks_expect_errors(3, run_nan_score):
        assert (error.type_name, error.message) == ("ValueError", "ROC AUC needs comparable scores (got NaN)")


def count_alone(rank: int, world_size: int) -> list[str]:
    told = []
    for metric in (global_accuracy, global_f1, global_roc_auc):
        with pytest.raises(ValueError, match="a metric over 2 ranks needs communicator=") as error:
            metric(torch.zeros(3, 2), torch.tensor([0, 1, 1]))
        told.append(str(error.value))
    with pytest.raises(ValueError, match="a metric over 2 ranks needs communicator="):
        global_mean(torch.ones(3))
    return told


def test_trainers_without_a_process_group_do_not_either(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who exchanges over DistDGL's servers needs no group."""
    monkeypatch.setattr(role, "PER_ROLE_RANK", {"default": {5: 0, 6: 1}})
    with pytest.raises(ValueError, match="a metric over 2 ranks needs communicator="):
        global_mean(torch.ones(3))
    monkeypatch.setattr(role, "PER_ROLE_RANK", {})
    assert global_mean(torch.ones(3)) == 1.0


def test_several_ranks_do_not_count_each_for_itself() -> None:
    """Each got another number, and one of them stopped early."""
    for told in run_ranks(2, count_alone):
        assert len(told) == 3


def test_mistakes_are_named() -> None:
    logits, labels = torch.zeros(3, 2), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"one label per row \(got rows \(3, 2\), labels \(2,\)\)"):
        global_accuracy(logits, labels[:2])
    with pytest.raises(ValueError, match=r"weight must be \(3,\) \(got \(2,\)\)"):
        global_f1(logits, labels, torch.ones(2))
    with pytest.raises(ValueError, match=r"weight must be \(3,\) \(got \(3, 1\)\)"):
        global_mean(torch.ones(3), torch.ones(3, 1))
    with pytest.raises(ValueError, match=r"one value per row \(got shape \(3, 2\)\)"):
        global_mean(logits)
    with pytest.raises(ValueError, match=r"F1 needs \(n, C\) logits \(got \(3,\), labels \(3,\)\)"):
        global_f1(logits[:, 0], labels)
