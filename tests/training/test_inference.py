# SPDX-License-Identifier: Apache-2.0
"""Evaluations leave the model as it was: each of its modules in its own mode, whatever becomes of the evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from torch import Tensor, nn

from dgl_hybrid import PartitionedGraph, infer
from dgl_hybrid.training.trainer import Evaluator
from tests.helpers.exactness import Case
from tests.helpers.graphs import NUM_FEATURES, power_law
from tests.helpers.partitions import PartitionStore
from tests.helpers.world import run_ranks


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
