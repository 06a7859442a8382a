# SPDX-License-Identifier: Apache-2.0
"""Systems as the benchmark runs them."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from benchmarks.systems import measure
from benchmarks.systems import team as team_of_ranks
from benchmarks.systems.adaptors import base, distdgl, ours, plain_dgl
from benchmarks.systems.adaptors.ours import _digest
from benchmarks.systems.team import Team
from dgl_hybrid.planner import DependencyPlan
from tests.benchmarks.systems.measurements import (
    tiny_job,
)


def test_plans_of_all_ranks_are_in_one_digest() -> None:
    first, second = ({"plan": "hybrid", "plan_digest": digest} for digest in ("a", "b"))
    assert measure._of_all_ranks([first, second])["plan"] == "hybrid"
    assert measure._of_all_ranks([first, second]) != measure._of_all_ranks([first, first])
    assert measure._of_all_ranks([first, second]) == measure._of_all_ranks([first, second])
    assert measure._of_all_ranks([{"plan": None}, second]) == {"plan": None}, "none is made yet"


def test_a_digest_is_of_what_a_plan_does() -> None:
    plan = DependencyPlan(
        strategy="hybrid",
        rank=0,
        world_size=2,
        num_layers=2,
        cached=(torch.tensor([3, 5]), torch.tensor([5])),
        communicated=(1, 2),
        objective_s=0.5,
    )
    assert _digest(plan) == _digest(replace(plan, strategy="neutronstar", objective_s=0.25))
    others = [
        replace(plan, cached=(torch.tensor([3, 7]), torch.tensor([5]))),
        replace(plan, cached=(torch.tensor([3]), torch.tensor([5]))),
        replace(plan, chunk_rows=100),
        replace(plan, trace=cast(Any, SimpleNamespace(sums_first=(False, True)))),
        replace(plan, trace=cast(Any, SimpleNamespace(sums_first=(False, False)))),
    ]
    assert len({_digest(one) for one in (plan, *others)}) == 1 + len(others)


def test_distdgl_runs_without_the_plugin_whatever_the_caller_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DGL_HYBRID_ENABLE", "1")
    jobs = list[Any]()
    monkeypatch.setattr(team_of_ranks, "run_cluster", lambda job, on_line: jobs.append(job))
    team = Team(job=tiny_job("distdgl_full"), folder=tmp_path, is_cluster=True)
    team._start_cluster(10.0)
    assert team._cluster is not None
    team._cluster.join()
    assert [job.environment["DGL_HYBRID_ENABLE"] for job in jobs] == ["0"]


@pytest.mark.parametrize(
    ("shares", "options", "tried"),
    [
        ((1025, 1024), {}, [1025]),
        ((9000, 8999), {}, [9000, 8192, 1024]),
        ((9000, 8999), {"skips_largest": True}, [8192, 1024]),
    ],
)
def test_distdgl_is_tried_by_batches_of_which_every_rank_has_as_many(
    shares: tuple[int, int], options: dict[str, bool], tried: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else one rank would wait for the others in its last batch."""
    monkeypatch.setattr(distdgl, "_max_over_ranks", lambda value: max(value, shares[0] if value > 0 else -shares[1]))
    monkeypatch.setattr(distdgl.dist, "barrier", lambda: None)
    system, sizes = object.__new__(distdgl.DistDGLFull), list[int]()
    system.job = replace(tiny_job("distdgl_full"), options=options)
    system.nids, system.model, system.optimizer = torch.arange(shares[1]), torch.nn.Linear(1, 1), None
    system.make_optimizer = lambda _: None  # type: ignore[assignment, method-assign, return-value]
    system._make_loader = lambda size, **_: sizes.append(size) or size  # type: ignore[func-returns-value, method-assign]
    system._train = lambda loader, limit_s=math.inf: 1.0  # type: ignore[method-assign]
    found = system._choose()
    assert sizes == [*tried, tried[0]]
    names = ["all" if size == shares[0] else str(size) for size in tried]
    assert str(found["batch_size"]) == names[0]
    assert list(found["seconds_by_batch_size"]) == names
    assert found["skips_largest"] == bool(options), "lines say so"


def test_ranks_of_sampled_distdgl_make_as_many_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distdgl, "_max_over_ranks", lambda value: max(value, 1025 if value > 0 else -1024))
    system = object.__new__(distdgl.DistDGLSampled)
    system.job = replace(tiny_job("distdgl_sampled"), options={"batch_size": 1024, "fanouts": [5, 5]})
    system.rank, system.nids = 0, torch.arange(1025)
    system._make_loader = lambda *_, **__: None  # type: ignore[method-assign]
    system._choose()
    assert len(system.nids) == 1024


def test_every_system_gives_back_what_loading_has_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours alone did, so peaks of the others held what they had freed."""
    trimmed: list[int] = []

    class Library:
        def __init__(self, name: None) -> None:
            pass

        def malloc_trim(self, pad: int) -> None:
            trimmed.append(pad)

    monkeypatch.setattr(base.ctypes, "CDLL", Library)
    base.System.give_back_memory(object())  # type: ignore[arg-type]
    assert trimmed == [0]
    own = {cls for module in (distdgl, ours, plain_dgl) for cls in vars(module).values() if isinstance(cls, type)}
    assert [cls.__name__ for cls in own - {base.System} if "give_back_memory" in vars(cls)] == ["Ours"]


def test_a_strategy_goes_on_with_the_plan_that_it_has_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planned and tried anew in every turn, hybrid would be timed amid its trials."""
    monkeypatch.setattr(ours, "create_communicator", lambda transport: "communicator")
    monkeypatch.setattr(ours, "_digest", lambda plan: f"digest of {plan}")
    system = ours.OursInTurns(cast(Any, SimpleNamespace(options={})))
    begun: list[tuple[str, str | None]] = []
    sizes = [3, 2]

    def begin(communicator: str, plan: str | None = None) -> dict[str, Any]:
        begun.append((system._strategy, plan))
        found = SimpleNamespace(
            plan=SimpleNamespace(strategy=f"plan of {system._strategy}"), predicted_epoch_s=float(len(begun))
        )
        system.loader = cast(
            Any, SimpleNamespace(outcome=found if plan is None else None, sets=SimpleNamespace(sizes=sizes))
        )
        system.g = system.model = system.wrapped = system.optimizer = system.clock = cast(Any, None)
        return system.facts()

    monkeypatch.setattr(system, "_begin", begin)
    system.prepare()
    assert [system.become(name) for name in ("hybrid", "hybrid", "depcomm", "hybrid")] == [True, False, True, True]
    first, second, third = begun
    assert (first, second) == (("hybrid", None), ("depcomm", None))
    assert third[0] == "hybrid"
    assert third[1].strategy == "plan of hybrid"  # type: ignore[union-attr]
    assert (system.facts()["plan"], system.facts()["predicted"]) == ("plan of hybrid", 1.0)
    system.become("depcomm")
    assert (system.facts()["plan"], system.facts()["predicted"]) == ("plan of depcomm", 2.0)
    sizes[0] = 4
    with pytest.raises(RuntimeError, match="hybrid held"):
        system.become("hybrid")
