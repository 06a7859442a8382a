# SPDX-License-Identifier: Apache-2.0
"""Metrics over the rows of all ranks: the same number on every rank, whatever the partition.

Each `global_*` function is collective over its communicator, which must be given where there are several ranks, and
runs as many collectives on every rank, rows or none; shapes that do not fit on one rank raise on all. A row counts with
its `weight`; a row a rank merely borrowed (to have something to compute) has weight 0, and a row without label (-1 in
integer labels, NaN in floating ones) never counts. Where nothing counts on any rank, the result is NaN.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from dgl.distributed import role
from torch import Tensor

from dgl_hybrid.exchange.communicator import Communicator


@dataclass(frozen=True, kw_only=True)
class F1Scores:
    """`micro` from the counts of all classes together; `macro` the mean over classes that are labelled or predicted."""

    micro: float
    macro: float


def count_correct(logits: Tensor, labels: Tensor, weight: Tensor | None = None) -> Tensor:
    """Counts rows whose largest logit is their label. Not collective; counts of ranks and batches may be added.

    Args:
        logits: (n, C) floating; with C = 1, or (n,), the class is 1 where the logit is positive.
        labels: (n,) integer, -1 for none.
        weight: (n,) or None.
    Returns:
        (2,) float64: weight of the correct rows, weight of all labelled rows.
    """
    _check_rows(logits, labels, weight, labels_dim=1)
    weight_N = _effective_weight(labels, weight)
    correct = (_predicted_class(logits) == labels).double()
    return torch.stack([(correct * weight_N).sum(), weight_N.sum()])


def global_accuracy(
    logits: Tensor, labels: Tensor, weight: Tensor | None = None, *, communicator: Communicator | None = None
) -> float:
    """The share of labelled rows that are classified correctly over all ranks; see `count_correct`. Two collectives."""
    with _agreed(communicator):
        counts = count_correct(logits, labels, weight)
    correct, total = _sum(counts, communicator).tolist()
    return correct / total if total else math.nan


def global_mean(values: Tensor, weight: Tensor | None = None, *, communicator: Communicator | None = None) -> float:
    """The mean over the rows of all ranks, for instance of a loss with `reduction="none"`. Two collectives.

    Args:
        values: (n,) floating. What has weight 0 may be NaN.
        weight: (n,) or None.
    """
    with _agreed(communicator):
        if values.dim() != 1:
            raise ValueError(f"the mean takes one value per row (got shape {tuple(values.shape)})")
        if weight is not None and weight.shape != values.shape:
            raise ValueError(f"weight must be ({len(values)},) (got {tuple(weight.shape)})")
    weight_N = torch.ones_like(values, dtype=torch.float64) if weight is None else weight.double()
    products = torch.where(weight_N != 0, values.detach().double() * weight_N, 0.0)
    total, weights = _sum(torch.stack([products.sum(), weight_N.sum()]), communicator).tolist()
    return total / weights if weights else math.nan


def global_f1(
    logits: Tensor, labels: Tensor, weight: Tensor | None = None, *, communicator: Communicator | None = None
) -> F1Scores:
    """F1 over the rows of all ranks. Three collectives; five where rows are labelled with a class that has no logit.

    Args:
        logits: (n, C) floating, C the same on every rank; with C = 1, class 1 is where the logit is positive.
        labels: (n,) integer class, -1 for none, one without a logit (from C on, of which training has seen nothing)
            for a class that is always missed; or (n, C) of 0 and 1, several classes per row: a class is then
            predicted where its logit is positive, and NaN or -1 leaves out one class of one row.
        weight: (n,) or None.
    """
    with _agreed(communicator):
        _check_rows(logits, labels, weight, labels_dim=labels.dim())
        if logits.dim() != 2 or (labels.dim() == 2 and labels.shape != logits.shape):
            raise ValueError(f"F1 needs (n, C) logits (got {tuple(logits.shape)}, labels {tuple(labels.shape)})")
    _check_alike({"columns of logits": logits.shape[1], "dimensions of labels": labels.dim()}, communicator)
    if labels.dim() == 1:
        num_classes = max(logits.shape[1], 2)
        weight_NC = _effective_weight(labels, weight).unsqueeze(1)
        classes = torch.arange(num_classes, device=logits.device)
        actual_NC, predicted_NC = labels.unsqueeze(1) == classes, _predicted_class(logits).unsqueeze(1) == classes
        has_no_logit_N = (labels >= num_classes) & (weight_NC[:, 0] != 0)
    else:
        weight_NC = _effective_weight(labels, None if weight is None else weight.unsqueeze(1))
        actual_NC, predicted_NC = labels > 0, logits > 0
        has_no_logit_N = torch.zeros(len(labels), dtype=torch.bool, device=labels.device)
    counts = [
        (pairs.double() * weight_NC).sum(0)
        for pairs in (actual_NC & predicted_NC, ~actual_NC & predicted_NC, actual_NC & ~predicted_NC)
    ]
    without_logit = torch.stack([weight_NC[has_no_logit_N].sum(), has_no_logit_N.sum().double()])
    sums = _sum(torch.cat([*counts, without_logit]), communicator)
    hits, false_alarms, misses = sums[:-2].view(3, -1)
    missed, num_missed = sums[-2:].tolist()
    # Alike on all ranks.
    num_others = _count_distinct(labels[has_no_logit_N], communicator) if num_missed else 0
    denominators = 2 * hits + false_alarms + misses
    seen = denominators > 0
    if not bool(seen.any()) and not num_others:
        return F1Scores(micro=math.nan, macro=math.nan)
    return F1Scores(
        micro=float(2 * hits.sum() / (denominators.sum() + missed)),
        macro=float((2 * hits[seen] / denominators[seen]).sum() / (int(seen.sum()) + num_others)),
    )


def _count_distinct(values: Tensor, communicator: Communicator | None) -> int:
    """Returns how many different integers the ranks hold. Two collectives."""
    own = [int(value) for value in values.unique().tolist()]
    checked = _of_all_ranks(communicator)
    by_rank = [own] if checked is None else checked.gather_json(own, what="a metric")
    return len(set().union(*by_rank))


def global_roc_auc(
    scores: Tensor, labels: Tensor, weight: Tensor | None = None, *, communicator: Communicator | None = None
) -> float:
    """The area under the ROC curve over the rows of all ranks, exact: all scores are gathered. Five collectives.

    With several columns, the mean over those that have both positive and negative rows.

    Args:
        scores: (n,) or (n, C) floating; with (n,) labels also (n, 2), class logits, whose difference is the score.
        labels: 0 or 1, -1 or NaN for none; (n,), or (n, C) for several binary tasks, C the same on every rank.
        weight: (n,) or None.
    Raises:
        ValueError: on every rank, if any score that counts is NaN.
    """
    with _agreed(communicator):
        _check_rows(scores, labels, weight, labels_dim=labels.dim())
        if labels.dim() == 1:
            labels = labels.unsqueeze(1)
            if scores.dim() == 2 and scores.shape[1] == 2:
                # Of a narrower type the difference is rounded, and what it told apart is tied.
                scores = scores[:, 1].double() - scores[:, 0].double()
        if scores.numel() != labels.numel():
            raise ValueError(
                f"ROC AUC needs one score for each label (got scores {tuple(scores.shape)}, labels "
                f"{tuple(labels.shape)})"
            )
        scores_NC = scores.detach().double().reshape(len(scores), labels.shape[1])
    _check_alike({"columns of labels": labels.shape[1]}, communicator)
    weight_NC = _effective_weight(labels, None if weight is None else weight.unsqueeze(1))
    packed = torch.cat([scores_NC, labels.double(), weight_NC], dim=1)
    checked = _of_all_ranks(communicator)
    packed = packed if checked is None else checked.gather_rows(packed)
    packed = packed.cpu()  # where ranks add up in one order: a GPU would in any
    scores_NC, labels_NC, weight_NC = packed.chunk(3, dim=1)
    if bool((scores_NC.isnan() & (weight_NC > 0)).any()):
        raise ValueError("ROC AUC needs comparable scores (got NaN)")
    areas = [_roc_auc(*columns) for columns in zip(scores_NC.T, labels_NC.T, weight_NC.T, strict=True)]
    defined = [area for area in areas if not math.isnan(area)]
    return sum(defined) / len(defined) if defined else math.nan


def _roc_auc(scores: Tensor, labels: Tensor, weight: Tensor) -> float:
    """The chance that a positive row scores higher than a negative one, a tie counting one half; (n,) each."""
    counts = weight > 0
    scores, labels, weight = scores[counts], labels[counts], weight[counts]
    levels, level_of_row = torch.unique(scores, return_inverse=True)
    zeros = torch.zeros(len(levels), dtype=torch.float64, device=scores.device)
    positive = zeros.index_add(0, level_of_row, weight * (labels > 0))
    negative = zeros.index_add(0, level_of_row, weight * (labels <= 0))
    pairs = positive.sum() * negative.sum()
    if not float(pairs):
        return math.nan
    below = negative.cumsum(0) - negative / 2
    return float((positive * below).sum() / pairs)


def _predicted_class(logits: Tensor) -> Tensor:
    if logits.dim() == 2 and logits.shape[1] > 1:
        return logits.argmax(1)
    return (logits.reshape(len(logits)) > 0).long()


def _effective_weight(labels: Tensor, weight: Tensor | None) -> Tensor:
    """The weight of each label as float64, 0 where there is none; `weight` must broadcast to `labels`."""
    labelled = (labels >= 0).double()  # False for -1 and for NaN
    return labelled if weight is None else labelled * weight.double()


def _check_rows(logits: Tensor, labels: Tensor, weight: Tensor | None, *, labels_dim: int) -> None:
    rows = labels.shape[:1]
    if labels.dim() != labels_dim or labels.dim() not in (1, 2) or logits.shape[:1] != rows:
        raise ValueError(f"expected one label per row (got rows {tuple(logits.shape)}, labels {tuple(labels.shape)})")
    if weight is not None and weight.shape != rows:
        raise ValueError(f"weight must be ({len(labels)},) (got {tuple(weight.shape)})")


def _check_alike(sizes: Mapping[str, int], communicator: Communicator | None) -> None:
    """Checks sizes that ranks have to have in common. One collective.

    Raises:
        ValueError: On all ranks, if one differs.
    """
    checked = _of_all_ranks(communicator)
    by_rank = [] if checked is None else checked.gather_ints(list(sizes.values()), what="a metric")
    for rank, found in enumerate(by_rank):
        for what, expected, size in zip(sizes, by_rank[0], found, strict=True):
            if size != expected:
                raise ValueError(
                    f"a metric needs as many {what} on every rank, also where that has no rows (got {expected} on rank "
                    f"0 and {size} on rank {rank})"
                )


def _agreed(communicator: Communicator | None) -> contextlib.AbstractContextManager[None]:
    """Checks of shapes go in here: a rank with rows of another number must not leave the others waiting for its own."""
    checked = _of_all_ranks(communicator)
    return contextlib.nullcontext() if checked is None else checked.agreed("a metric")


def _sum(values: Tensor, communicator: Communicator | None) -> Tensor:
    checked = _of_all_ranks(communicator)
    return values if checked is None else checked.sum_(values.clone())


def _of_all_ranks(communicator: Communicator | None) -> Communicator | None:
    """Returns it; None, if rows of this process are all there are.

    Raises:
        ValueError: It is not given, and there are other ranks, which would each get another number, and perhaps stop at
            another epoch.
    """
    if communicator is None and (world_size := _world_size()) > 1:
        raise ValueError(
            f"a metric over {world_size} ranks needs communicator= (of the PartitionedGraph or the loader): without "
            f"it, each would count its own rows alone"
        )
    return communicator


def _world_size() -> int:
    """How many ranks there are, or trainers of DistDGL without a process group."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return len(role.PER_ROLE_RANK.get("default", ()))
