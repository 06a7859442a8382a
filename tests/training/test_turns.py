# SPDX-License-Identifier: Apache-2.0
"""Times in turns: who trains when, and that everybody is told the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dgl
import pytest
import torch

import dgl_hybrid
from dgl_hybrid.datasets import PowerLawConfig, generate_powerlaw
from dgl_hybrid.planner import uniform_topology
from dgl_hybrid.training import planning, turns
from dgl_hybrid.training.config import ModelConfig, StrategyConfig, TrainConfig, TrainJob
from dgl_hybrid.training.reference import ReferenceRun
from dgl_hybrid.training.report import EpochReport
from dgl_hybrid.training.trainer import TrainingRun, train
from tests.helpers.world import run_ranks

CONFIG = PowerLawConfig(nodes=200, degree=5.0, features=6, classes=3)
NUM_TURNS = 3


def run_turns(rank: int, world_size: int, records: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Returns times, and which run trained when, with how many threads of PyTorch and DGL."""
    trained: list[tuple[str, int, int]] = []
    jobs = {name: TrainJob.from_json(record) for name, record in records.items()}

    def watched(cls: Any, name_of: Any) -> Any:
        original = cls.run_epoch

        def run_epoch(run: Any) -> EpochReport:
            trained.append((name_of(run), torch.get_num_threads(), dgl.utils.get_num_threads()))
            report: EpochReport = original(run)
            return report

        return run_epoch

    names = {job.strategy: name for name, job in jobs.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "probe", lambda *args, **kwargs: uniform_topology(world_size))
        patch.setattr(turns, "TURN_S", 0.0)
        patch.setattr(TrainingRun, "run_epoch", watched(TrainingRun, lambda run: names[run.job.strategy]))
        patch.setattr(ReferenceRun, "run_epoch", watched(ReferenceRun, lambda run: "plain DGL"))
        torch.set_num_threads(1)
        dgl.utils.set_num_threads(1)
        dataset = generate_powerlaw(CONFIG) if rank == 0 else None
        times_s = turns.time_in_turns(jobs, dataset, threads=2, num_turns=NUM_TURNS)
    return {"times_s": times_s, "trained": trained, "after": (torch.get_num_threads(), dgl.utils.get_num_threads())}


def train_and_save(rank: int, world_size: int, record: dict[str, Any], folder: str) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "probe", lambda *args, **kwargs: uniform_topology(world_size))
        return train(TrainJob.from_json(record), save_plan_in=folder).chosen_plan


@pytest.mark.parametrize("world_size", [1, 3])
def test_turns(world_size: int, tmp_path: Path) -> None:
    dgl_hybrid.partition_graph(generate_powerlaw(CONFIG).graph, "g", world_size, tmp_path)
    job = TrainJob(
        part_config=str(tmp_path / "g.json"),
        dataset="g",
        model=ModelConfig(hidden=4, dropout=0.0),
        strategy=StrategyConfig(strategy="depcomm"),
        training=TrainConfig(epochs=2, eval_every=0),
    )
    saved = str(tmp_path / "plans")
    assert set(run_ranks(world_size, train_and_save, job.to_json(), saved)) == {"depcomm"}
    records = {
        name: {**job.to_json(), "strategy": {"strategy": name, "plan": plan}}
        for name, plan in (("depcache", None), ("hybrid", saved))
    }
    results = run_ranks(world_size, run_turns, records)
    names = ["plain DGL", "depcache", "hybrid"]
    for rank, result in enumerate(results):
        assert result["times_s"] == results[0]["times_s"], "ranks tell each other how long an epoch took"
        assert list(result["times_s"]) == names
        assert all(len(times) == 2 * NUM_TURNS for times in result["times_s"].values()), "two epochs of a turn count"
        assert all(time_s > 0.0 for times in result["times_s"].values() for time_s in times)
        order = [name for name in names for _ in range(3)]  # one before those that count
        twice = [name for name in names for _ in range(2)]
        expected = [*twice, *order, *order[::-1], *order]
        here = [name for name in expected if rank == 0 or name != "plain DGL"]
        assert [name for name, *_ in result["trained"]] == here
        threads = {name: set(counts) for name, *counts in result["trained"]}
        assert threads == {name: {2} if name == "plain DGL" else {1} for name in here}
        assert tuple(result["after"]) == (1, 1)
