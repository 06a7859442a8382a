# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch

import dgl_hybrid  # noqa: F401
from dgl_hybrid.training.config import MODELS, ModelConfig, StrategyConfig, TrainConfig, TrainJob
from dgl_hybrid.training.models import build_model
from tests.helpers.graphs import NUM_CLASSES, NUM_FEATURES, power_law


@pytest.mark.parametrize("num_layers", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_runs_on_a_plain_graph_with_isolated_vertices(name: str, num_layers: int) -> None:
    graph = power_law()
    model = build_model(name, NUM_FEATURES, 8, NUM_CLASSES, num_layers, heads=2, seed=1).double()
    logits = model([graph] * num_layers, graph.ndata["feat"])
    assert logits.shape == (graph.num_nodes(), NUM_CLASSES)
    assert bool(torch.isfinite(logits).all())


@pytest.mark.parametrize("name", MODELS)
def test_initial_weights_follow_from_the_seed_alone(name: str) -> None:
    first = build_model(name, 5, 8, 3, 2, seed=7)
    torch.rand(3)
    again = build_model(name, 5, 8, 3, 2, seed=7, dropout=0.5)
    other = build_model(name, 5, 8, 3, 2, seed=8)
    double = build_model(name, 5, 8, 3, 2, seed=7, dtype=torch.float64)
    for key, value in first.state_dict().items():
        assert torch.equal(value, again.state_dict()[key])
        assert torch.equal(value.double(), double.state_dict()[key].double())
    assert any(not torch.equal(value, other.state_dict()[key]) for key, value in first.state_dict().items())


def test_a_job_survives_the_way_to_the_ranks() -> None:
    job = TrainJob(
        part_config="/a/b.json",
        dataset="b",
        model=ModelConfig(model="gat", hidden=16, heads=2),
        strategy=StrategyConfig(strategy="ratio", cache_ratio=0.25, memory_budget=1e6),
        training=TrainConfig(epochs=3, dtype="float64", seed=9),
    )
    assert TrainJob.from_json(job.to_json()) == job


@pytest.mark.parametrize(
    ("config", "values", "message"),
    [
        (ModelConfig, {"model": "mlp"}, r"unknown model \(got 'mlp'\); choose one of gcn, sage, gat"),
        (ModelConfig, {"num_layers": 0}, r"num_layers must be at least 1 \(got 0\)"),
        (ModelConfig, {"dropout": 1.0}, r"dropout must lie in 0..1, 1 excluded \(got 1.0\)"),
        (ModelConfig, {"model": "gat", "hidden": 6, "heads": 4}, r"hidden must be a multiple of heads=4 .* \(got 6\)"),
        (StrategyConfig, {"strategy": "foo"}, r"unknown strategy \(got 'foo'\); choose one of hybrid"),
        (StrategyConfig, {"cache_ratio": 2.0}, r"cache_ratio must lie in 0..1 \(got 2.0\)"),
        (StrategyConfig, {"cache_ratio": 0.3}, r"is of strategy ratio alone \(got 0.3 with strategy hybrid\)"),
        (TrainConfig, {"epochs": 0}, r"epochs must be at least 1 \(got 0\)"),
        (TrainConfig, {"eval_every": -1}, r"eval_every must not be negative \(got -1\)"),
        (TrainConfig, {"lr": 0.0}, r"lr must be positive and weight_decay not negative \(got 0.0 and"),
        (TrainConfig, {"lr": float("inf")}, r"\(got inf and 0.0005\), both finite"),
        (TrainConfig, {"weight_decay": float("inf")}, r"\(got 0.01 and inf\), both finite"),
        (
            TrainConfig,
            {"exchange_timeout_s": 1e18},
            r"timeout_s must lie in 0.01..1e\+08 seconds \(got 1e\+18\)",
        ),
        (
            TrainConfig,
            {"exchange_timeout_s": 1e-6},
            r"timeout_s must lie in 0.01..1e\+08 seconds \(got 1e-06\)",
        ),
        (TrainConfig, {"dtype": "int8"}, r"unknown dtype \(got 'int8'\); choose one of float32, float64"),
        (TrainConfig, {"seed": -1}, r"seed must lie in 0..2\*\*32-1 \(got -1\)"),
        (TrainConfig, {"seed": 2**32}, r"seed must lie in 0..2\*\*32-1 \(got 4294967296\)"),
    ],
)
def test_wrong_options(config: type, values: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**values)
