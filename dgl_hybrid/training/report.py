# SPDX-License-Identifier: Apache-2.0
"""What a training run reports: per epoch, per layer, per rank. Plain data that goes to JSON and back."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dgl_hybrid.exchange.approximate import describe_approximation

FEW = 5
"""Epochs that tell nothing reliable of a time."""
PLAIN_DGL = "plain DGL"
"""The strategy of runs that have nothing of ours."""
DISTDGL = "DistDGL"
"""The same, of several processes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochReport:
    """One epoch; times are of the slowest rank, the split is a mean over ranks."""

    loss: float
    """Global mean over the train nodes."""
    time_s: float
    """Forward, backward and optimizer step, from a barrier to the end of the slowest rank."""
    bytes_sent: int
    """Rows handed to other ranks, forward and backward, all ranks together."""
    compute_s: float
    """Time outside exchanges; the gradients' all-reduce is in here."""
    exchange_s: float
    """Time inside exchanges once the last rank had come."""
    wait_s: float
    """Time inside exchanges until the last rank had come."""
    plan: int = 0
    """Which of the plans that this run has had, from 0, in the order in which they first ran."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerReport:
    """One layer, all ranks together."""

    layer: int
    """From 1; it reads the rows of the level below."""
    cached: int
    """Rows read here that their reader computes (layer 1: holds) itself though another rank owns them."""
    communicated: int
    """Rows received each epoch; of layer 1 only in the first one, if its sums are kept."""
    forward_bytes: int
    """Bytes sent in one epoch's forward."""
    backward_bytes: int
    """Bytes sent in one epoch's backward."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Accuracy:
    """Shares of the nodes of each split that are predicted right."""

    epoch: int
    """Epochs done, from 1, when it was measured."""
    train: float
    val: float
    test: float
    """NaN for a split without nodes; null in JSON."""
    val_loss: float = math.nan
    """Mean cross-entropy over the validation nodes."""


@dataclass(frozen=True, kw_only=True)
class TrainReport:
    """One run."""

    strategy: str
    """Of the run; of one that followed saved plans, theirs."""
    ranks: int
    model: str
    dataset: str
    dtype: str
    epochs: tuple[EpochReport, ...]
    layers: tuple[LayerReport, ...]
    """By the plan that stayed, as of its last epoch; but for one that has run once alone, not of the first after a
    change to it."""
    best: Accuracy
    """At the least validation loss, the earliest of equals."""
    final: Accuracy
    """After the last epoch."""
    peak_rss_bytes: tuple[int, ...]
    """By rank: the most memory the process held, interpreter and libraries included."""
    base_rss_bytes: tuple[int, ...]
    """By rank: what it held before the graph was opened."""
    gradient_bytes: int
    """Bytes of weight gradients that each rank gives to the all-reduce of one epoch; not part of `bytes_sent`."""
    predicted_epoch_s: float | None
    chosen_plan: str
    """Which candidate was taken: "hybrid@1", "depcomm", …"""
    stayed_plan: int | None = None
    """Which of the plans in `epochs` that is; None: that of the last one."""
    trial_epochs: int = 0
    """The last of `epochs`, from 1, whose plan ran to be measured, not as the best one known; 0 if none did."""
    rows_by_locality: tuple[bool, ...] = ()
    """By rank: whether its rows are ordered by common in-neighbours, not by id."""
    first_epoch: int = 1
    """Number of the first of `epochs`: greater if the run went on from a checkpoint."""
    approximate: str | None = None
    """What training steps exchanged approximately: "int8", …; None: nothing."""
    chunk_rows: int | None = None
    """How many rows at a time were received by the plan that stayed, as no plan fits the memory budget otherwise; None:
    all of a layer at once, as approximate rows are in any case."""
    unsaved: str | None = None
    """Why the model of the last epoch could not be saved; None: it was, or was not to be."""

    @property
    def epoch_time_s(self) -> float:
        """Median of the steady epochs."""
        return statistics.median(epoch.time_s for epoch in self.steady_epochs())

    @property
    def exactness(self) -> str:
        """What the results are: "exact", or "approximate (int8 rows)", …; accuracies are of exact evaluations."""
        return describe_approximation(self.approximate)

    def steady_epochs(self) -> Sequence[EpochReport]:
        """Returns the epochs under the plan that stayed, but for the first after each change to it: that one also
        fetches features.

        Those after the last trial, if they are `FEW` at least; else all, as a candidate's turn may come near the end,
        where one epoch would be left. If there are none, the last epoch.
        """
        stayed = self.epochs[-1].plan if self.stayed_plan is None else self.stayed_plan
        steady = [
            number
            for number in range(1, len(self.epochs))
            if self.epochs[number].plan == self.epochs[number - 1].plan == stayed
        ]
        settled = [number for number in steady if number >= self.trial_epochs]
        return [self.epochs[number] for number in (settled if len(settled) >= FEW else steady)] or self.epochs[-1:]

    @property
    def steady_bytes_sent(self) -> int:
        """By the last of them."""
        return self.steady_epochs()[-1].bytes_sent

    def to_json(self) -> dict[str, Any]:
        """Returns the object that `--json` prints."""
        return {
            "strategy": self.strategy,
            "ranks": self.ranks,
            "model": self.model,
            "dataset": self.dataset,
            "dtype": self.dtype,
            "epochs": [asdict(epoch) | {"loss": _or_none(epoch.loss)} for epoch in self.epochs],
            "epoch_time_s": self.epoch_time_s,
            "steady_bytes_sent": self.steady_bytes_sent,
            "train_accuracy": _or_none(self.best.train),
            "val_accuracy": _or_none(self.best.val),
            "test_accuracy": _or_none(self.best.test),
            "val_loss": _or_none(self.best.val_loss),
            "best_epoch": self.best.epoch,
            "final_accuracy": {name: _or_none(value) for name, value in asdict(self.final).items()},
            "peak_rss_bytes": list(self.peak_rss_bytes),
            "base_rss_bytes": list(self.base_rss_bytes),
            "plan": [asdict(layer) for layer in self.layers],
            "chosen_plan": self.chosen_plan,
            "predicted_epoch_s": self.predicted_epoch_s,
            "gradient_bytes": self.gradient_bytes,
            "stayed_plan": self.stayed_plan,
            "trial_epochs": self.trial_epochs,
            "first_epoch": self.first_epoch,
            "rows_by_locality": list(self.rows_by_locality),
            "approximate": self.approximate,
            "exactness": self.exactness,
            "chunk_rows": self.chunk_rows,
            "unsaved": self.unsaved,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> TrainReport:
        """Reads what `to_json` wrote."""
        return cls(
            strategy=data["strategy"],
            ranks=data["ranks"],
            model=data["model"],
            dataset=data["dataset"],
            dtype=data["dtype"],
            epochs=tuple(EpochReport(**epoch | {"loss": _or_nan(epoch["loss"])}) for epoch in data["epochs"]),
            layers=tuple(LayerReport(**layer) for layer in data["plan"]),
            best=Accuracy(
                epoch=data["best_epoch"],
                train=_or_nan(data["train_accuracy"]),
                val=_or_nan(data["val_accuracy"]),
                test=_or_nan(data["test_accuracy"]),
                val_loss=_or_nan(data["val_loss"]),
            ),
            final=Accuracy(**{name: _or_nan(value) for name, value in data["final_accuracy"].items()}),
            peak_rss_bytes=tuple(data["peak_rss_bytes"]),
            base_rss_bytes=tuple(data["base_rss_bytes"]),
            gradient_bytes=data["gradient_bytes"],
            predicted_epoch_s=data["predicted_epoch_s"],
            chosen_plan=data["chosen_plan"],
            stayed_plan=data["stayed_plan"],
            trial_epochs=data["trial_epochs"],
            rows_by_locality=tuple(data["rows_by_locality"]),
            first_epoch=data["first_epoch"],
            approximate=data["approximate"],
            chunk_rows=data["chunk_rows"],
            unsaved=data["unsaved"],
        )


def _or_none(value: float) -> float | None:
    """JSON has neither NaN nor infinity, which a diverged loss is."""
    return value if math.isfinite(value) else None


def _or_nan(value: Any) -> Any:
    return math.nan if value is None else value
