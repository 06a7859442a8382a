# SPDX-License-Identifier: Apache-2.0
"""Optimised attention models on ranks: the whole graph's results, one exchange a layer, the same masks as without."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dgl_hybrid
from dgl_hybrid import FullGraphLoader, PartitionedGraph
from dgl_hybrid.datasets import PowerLawConfig, generate_powerlaw
from dgl_hybrid.graph.optimize import optimize, restore
from dgl_hybrid.ops.op_counts import op_counts, reset_op_counts
from dgl_hybrid.planner import uniform_topology
from dgl_hybrid.training import trainer
from dgl_hybrid.training.config import ModelConfig, StrategyConfig, TrainConfig, TrainJob
from dgl_hybrid.training.gradients import average_gradients
from dgl_hybrid.training.models import build_model
from tests.helpers.exactness import Case, assert_close, assert_same_step, reference_step, run_step
from tests.helpers.graphs import NAMED, NUM_CLASSES, NUM_FEATURES, power_law
from tests.helpers.partitions import PartitionStore
from tests.helpers.rates import assumed_rates
from tests.helpers.thinning import pairwise
from tests.helpers.world import run_ranks

KINDS = ("gat", "gatv2")
EPOCHS = 3


# ------------------------------------------------------------------------------------------ the whole graph's results


@pairwise(kind=KINDS, world_size=[1, 2, 3, 4], plan=["depcomm", "random:1:0.5", "planned:hybrid"])
def test_every_number_of_ranks(kind: str, world_size: int, plan: str, partitions: PartitionStore) -> None:
    case = Case(kind=kind, plan=plan, num_layers=3, epochs=2, optimized=True)
    folder = partitions.get("power_law", power_law(), world_size)
    assert_same_step(run_ranks(world_size, run_step, folder, case), reference_step(power_law(), case))


@pytest.mark.parametrize("name", sorted(NAMED))
@pytest.mark.parametrize("kind", KINDS)
def test_every_graph(kind: str, name: str, partitions: PartitionStore) -> None:
    graph = NAMED[name]()
    case = Case(kind=kind, plan="random:2:0.4", residual=True, batch_norm=True, row_order="locality", optimized=True)
    assert_same_step(run_ranks(3, run_step, partitions.get(name, graph, 3), case), reference_step(graph, case))


@pytest.mark.parametrize("kind", KINDS)
def test_float32(kind: str, partitions: PartitionStore) -> None:
    graph = power_law()
    graph.ndata["feat"], graph.edata["w"] = graph.ndata["feat"].float(), graph.edata["w"].float()
    case = Case(kind=kind, plan="random:3:0.5", dtype=torch.float32, optimized=True)
    results = run_ranks(3, run_step, partitions.get("power_law_32", graph, 3), case)
    assert_same_step(results, reference_step(graph, case), tolerance=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_one_exchange_a_layer_and_direction(kind: str, partitions: PartitionStore) -> None:
    case = Case(kind=kind, num_layers=3, optimized=True)
    for result in run_ranks(3, run_step, partitions.get("power_law", power_law(), 3), case):
        assert result.forward_exchanges == 3
        assert result.backward_exchanges == 3


# ------------------------------------------------------------------------------------------ dropout


class Checkpointed(nn.Module):
    """Runs the layers of a model again in backward."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, blocks: Any, x: Tensor) -> Tensor:
        return checkpoint(self.model, blocks, x, use_reentrant=False)


def train_with_dropout(
    rank: int,
    world_size: int,
    part_config: str,
    kind: str,
    optimized_ranks: tuple[int, ...],
    *,
    in_pieces: bool = False,
) -> dict[str, Any]:
    """A few epochs with dropout of features and attention, an evaluation after each."""
    g = PartitionedGraph.open(part_config)
    model = build_model(kind, NUM_FEATURES, 8, NUM_CLASSES, 3, dropout=0.4, heads=2, seed=1, dtype=torch.float64)
    if rank in optimized_ranks:
        optimize(model)
    module = Checkpointed(model) if in_pieces else model
    topology = uniform_topology(world_size)  # assumed, not probed: everything is communicated anyway
    seeds = g.owned_nodes("train_mask")
    # Layers in one piece: halves of split ones are not counted as fused calls.
    loader = FullGraphLoader(g, seeds, 3, strategy="depcomm", topology=topology, seed=5, overlap=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reset_op_counts()
    losses, evaluations = [], []
    for _ in range(EPOCHS):
        for input_nodes, seeds, blocks in loader:
            x, label = g.ndata["feat"][input_nodes], g.ndata["label"][seeds]
            module.train()
            optimizer.zero_grad()
            loss = F.cross_entropy(module(blocks, x), label)
            loss.backward()
            average_gradients(model, loader)
            optimizer.step()
            module.eval()
            with torch.no_grad():
                evaluations.append(module(blocks, x)[: loader.num_seeds])
        losses.append(loss.item() * loader.loss_weight / world_size)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return {"losses": losses, "weights": weights, "evaluations": evaluations, "counts": op_counts()}


@functools.cache
def train_optimized(world_size: int, folder: str, kind: str) -> list[dict[str, Any]]:
    """What several tests compare with: the same to the last bit, whoever runs it first."""
    return run_ranks(world_size, train_with_dropout, folder, kind, tuple(range(world_size)))


def curve(results: list[dict[str, Any]]) -> list[float]:
    return [sum(result["losses"][epoch] for result in results) for epoch in range(EPOCHS)]


def assert_same_training(results: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert curve(results) == pytest.approx(curve(expected), rel=1e-9, abs=0)
    for name, weight in expected[0]["weights"].items():
        assert_close(results[0]["weights"][name], weight, name)


@pytest.mark.parametrize("kind", KINDS)
def test_the_masks_are_those_of_the_unoptimised_model(kind: str, partitions: PartitionStore) -> None:
    graph = NAMED["duplicates"]()
    runs = {}
    for world_size in (1, 3):
        folder = partitions.get("duplicates", graph, world_size)
        as_is = run_ranks(world_size, train_with_dropout, folder, kind, ())
        fused = train_optimized(world_size, folder, kind)
        assert_same_training(fused, as_is)
        for one, other in zip(fused, as_is, strict=True):
            for actual, expected in zip(one["evaluations"], other["evaluations"], strict=True):
                assert_close(actual, expected, "evaluation")
            # Three layers, forward and evaluation; planning runs them too.
            assert one["counts"][f"{kind}/ours"] >= 2 * 3 * EPOCHS
            assert not any(name.startswith(f"{kind}/dgl") for name in one["counts"])
            assert f"{kind}/ours" not in other["counts"]
        runs[world_size] = fused
    assert curve(runs[3]) == pytest.approx(curve(runs[1]), rel=1e-9, abs=0)


@pytest.mark.parametrize("kind", KINDS)
def test_checkpointing_draws_the_masks_again(kind: str, partitions: PartitionStore) -> None:
    folder = partitions.get("duplicates", NAMED["duplicates"](), 3)
    plain = train_optimized(3, folder, kind)
    repeated = run_ranks(3, train_with_dropout, folder, kind, (0, 1, 2), in_pieces=True)
    assert_same_training(repeated, plain)


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_may_differ_in_which_forward_they_take(kind: str, partitions: PartitionStore) -> None:
    """What is exchanged is the same, so a rank that has to leave a call to DGL hangs nobody and changes nothing."""
    folder = partitions.get("duplicates", NAMED["duplicates"](), 3)
    alike = train_optimized(3, folder, kind)
    mixed = run_ranks(3, train_with_dropout, folder, kind, (1,))
    assert_same_training(mixed, alike)


# ------------------------------------------------------------------------------------------ the trainer


def train_job(rank: int, world_size: int, record: dict[str, Any], is_optimized: bool) -> dict[str, Any]:
    if not is_optimized:
        build = trainer.build
        trainer.build = lambda job, g: restore(build(job, g))  # type: ignore[assignment]
    reset_op_counts()
    try:
        with assumed_rates(world_size):
            report = trainer.train(TrainJob.from_json(record))
    finally:
        if not is_optimized:
            trainer.build = build  # type: ignore[assignment]
    return {"report": report.to_json(), "counts": op_counts()}


@pytest.mark.parametrize(
    ("kind", "strategy"),
    [
        *(("gat", "hybrid"), ("gatv2", "depcomm")),
        *(pytest.param(*slow, marks=pytest.mark.slow) for slow in (("gat", "depcomm"), ("gatv2", "hybrid"))),
    ],
)
def test_the_trainer_optimises_without_changing_a_loss(kind: str, strategy: str, tmp_path: Path) -> None:
    graph = generate_powerlaw(PowerLawConfig(nodes=200, degree=6.0, features=12, classes=4)).graph
    dgl_hybrid.partition_graph(graph, "g", 2, tmp_path)
    job = TrainJob(
        part_config=str(tmp_path / "g.json"),
        dataset="g",
        num_classes=4,
        model=ModelConfig(model=kind, num_layers=2, hidden=8, heads=2, dropout=0.5),
        strategy=StrategyConfig(strategy=strategy),
        training=TrainConfig(epochs=4, eval_every=2, dtype="float64", seed=5),
    )
    fused = run_ranks(2, train_job, job.to_json(), True)[0]
    as_is = run_ranks(2, train_job, job.to_json(), False)[0]
    losses = [[epoch["loss"] for epoch in run["report"]["epochs"]] for run in (fused, as_is)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-9, abs=0)
    assert fused["report"]["val_accuracy"] == as_is["report"]["val_accuracy"]
    assert fused["counts"][f"{kind}/ours"] > 0
    assert f"{kind}/ours" not in as_is["counts"]
