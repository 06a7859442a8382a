# SPDX-License-Identifier: Apache-2.0
"""What `give_back_memory` takes out of resident memory, and when that is done."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm  # type: ignore[import-untyped]
import numpy as np
import pytest
import torch

from dgl_hybrid import FullGraphLoader, PartitionedGraph, infer, partition_graph
from dgl_hybrid.datasets import PowerLawConfig, generate_powerlaw
from dgl_hybrid.ops.cpu import compiler
from dgl_hybrid.ops.cpu.memory import _mappings_in
from dgl_hybrid.ops.cpu.products import multiply
from dgl_hybrid.planner import PlannerConfig
from dgl_hybrid.training import loader as loader_module
from dgl_hybrid.training import memory, resident_memory
from dgl_hybrid.training.config import ModelConfig, StrategyConfig, TrainConfig, TrainJob
from dgl_hybrid.training.memory import FreeMemory, give_back_memory
from dgl_hybrid.training.resident_memory import current_rss_bytes, peak_rss_bytes
from dgl_hybrid.training.trainer import train as train_job
from tests.cli.commands import environment
from tests.helpers.exactness import Case
from tests.helpers.graphs import power_law
from tests.helpers.partitions import PartitionStore
from tests.helpers.thinning import each_value


def solve() -> int:
    from ortools.graph.python import max_flow

    problem = max_flow.SimpleMaxFlow()
    problem.add_arcs_with_capacity(np.arange(50), np.arange(50) + 1, np.full(50, 7))
    problem.solve(0, 50)
    return int(problem.optimal_flow())


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what of a file is resident")
def test_the_code_of_planning_leaves_and_can_be_called_again() -> None:
    assert solve() == 7
    ortools = sys.modules["ortools"].__file__
    assert ortools is not None

    def resident() -> int:
        return sum(m.resident_bytes - m.private_bytes for m in _mappings_in(Path(ortools).parent.resolve()))

    before = resident()
    give_back_memory()
    assert resident() < before / 4
    assert solve() == 7


PEAK = "from dgl_hybrid.training.resident_memory import current_rss_bytes, peak_rss_bytes"
PARENT = f"""
import subprocess, sys
held = bytearray(b"x") * 400_000_000
del held
subprocess.run([sys.executable, "-c", "{PEAK}; print(peak_rss_bytes(), current_rss_bytes())"], check=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a process has no part in its parent's peak")
def test_the_peak_is_not_that_of_who_started_the_process() -> None:
    """The launcher's, which had loaded and partitioned the graph, stood in reports as that of each of its ranks."""
    done = subprocess.run(
        [sys.executable, "-c", PARENT], capture_output=True, text=True, timeout=300, env=environment(), check=False
    )
    assert done.returncode == 0, done.stderr
    peak, current = map(int, done.stdout.split())
    assert current / 2 < peak < current + 200_000_000


OF_WHAT_FOLLOWS = """
from dgl_hybrid.training.resident_memory import current_rss_bytes, forget_peak_rss, peak_rss_bytes
held = bytearray(b"x") * 400_000_000
del held
forget_peak_rss()
print(peak_rss_bytes(), current_rss_bytes())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a peak cannot be forgotten")
def test_the_peak_of_what_follows() -> None:
    """Plain DGL's in the demo had in it what generating the graph took."""
    done = subprocess.run(
        [sys.executable, "-c", OF_WHAT_FOLLOWS], capture_output=True, text=True, timeout=300, env=environment()
    )
    assert done.returncode == 0, done.stderr
    peak, current = map(int, done.stdout.split())
    assert current / 2 < peak < current + 200_000_000


def test_the_peak_where_the_system_does_not_tell_it_of_this_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "status").write_text("Name:\tpython\n")
    monkeypatch.setattr(resident_memory, "_STATUS", tmp_path / "status")
    assert peak_rss_bytes() > 50_000_000, "of all that is imported here"


@pytest.fixture
def given_back(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    calls: list[bool] = []
    monkeypatch.setattr(memory, "give_back_memory", lambda *, thoroughly: calls.append(thoroughly))
    return calls


class Clock:
    now_s = 1e4

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made_up = Clock()
    monkeypatch.setattr(memory, "time", made_up)
    return made_up


def test_free_memory_waits_until_faults_are_cheap(given_back: list[bool], clock: Clock) -> None:
    free = FreeMemory(at_once=lambda: False)
    free.leave(thoroughly=True)
    faults_s = current_rss_bytes() / 1e9
    clock.now_s += 10 * faults_s
    free.leave(thoroughly=False)
    free.give_back_if_cheap()
    assert not given_back, "they would take a tenth of the time that has passed"
    clock.now_s += 20 * faults_s
    free.give_back_if_cheap()
    assert given_back == [True], "once, as thoroughly as any of what waits needs"
    clock.now_s += 1e6
    free.give_back_if_cheap()
    free.give_back()
    assert given_back == [True], "nothing has been freed since"
    free.leave(thoroughly=False)
    free.give_back_if_cheap()
    assert given_back == [True], "no time has passed since"
    free.give_back()
    assert given_back == [True, False]


def test_with_a_budget_free_memory_does_not_wait(given_back: list[bool]) -> None:
    free = FreeMemory(at_once=lambda: True)
    free.leave(thoroughly=False)
    free.leave(thoroughly=True)
    assert given_back == [False, True]


def train(g: PartitionedGraph, loader: FullGraphLoader, model: torch.nn.Module) -> None:
    for input_nodes, _, blocks in loader:
        model(blocks, g.ndata["feat"][input_nodes]).sum().backward()


@pytest.mark.parametrize("budget", [None, 1 << 34])
def test_a_loader_gives_back_what_planning_left_after_long_training(
    budget: int | None,
    given_back: list[bool],
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    partitions: PartitionStore,
) -> None:
    monkeypatch.setattr(loader_module, "_MANY_EDGES", 1)
    g = PartitionedGraph.open(partitions.get("power_law", power_law(), 1))
    model = Case(kind="sage_mean", num_layers=2).build(g.ndata["feat"].shape[1])
    config = PlannerConfig(memory_budget_bytes=budget)
    loader = FullGraphLoader(g, g.owned_nodes("train_mask"), 2, model=model, planner=config)
    train(g, loader, model)
    if budget is not None:
        assert len(given_back) > 1, "memory is scarcer than time"
        return
    assert not given_back
    train(g, loader, model)
    assert not given_back, "no time has passed"
    clock.now_s += 1e3
    train(g, loader, model)
    assert given_back == [True]
    loader.give_back_memory()
    assert given_back == [True], "nothing has been freed since"


def test_of_a_small_graph_memory_is_given_back_when_asked_for(
    given_back: list[bool], clock: Clock, partitions: PartitionStore
) -> None:
    """Nothing was, nor were rows left on disk, however wide they are."""
    g = PartitionedGraph.open(partitions.get("power_law", power_law(), 1))
    model = Case(kind="sage_mean", num_layers=2).build(g.ndata["feat"].shape[1])
    loader = FullGraphLoader(g, g.owned_nodes("train_mask"), 2, model=model)
    for _ in range(2):
        train(g, loader, model)
        clock.now_s += 1e3
    assert not given_back, "it is little"
    loader.give_back_memory()
    loader.give_back_memory()
    assert given_back == [True], "once"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what of a file is resident")
def test_the_compiler_does_not_stay_for_what_a_later_epoch_compiled(
    partitions: PartitionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler._linker().cache, "folder", None)
    g = PartitionedGraph.open(partitions.get("power_law", power_law(), 1))
    model = Case(kind="sage_mean", num_layers=2).build(g.ndata["feat"].shape[1])
    loader = FullGraphLoader(g, g.owned_nodes("train_mask"), 2, model=model)
    folder = Path(llvm.__file__).parent.resolve()

    def resident() -> int:
        return sum(m.resident_bytes for m in _mappings_in(folder) if not m.private_bytes)

    for _ in range(2):
        train(g, loader, model)
    for _ in loader:
        before, rows = compiler.num_compiled_kernels(), torch.ones(3, 1999)
        multiply([rows], [torch.ones(1999, 3)], None, None, None, False)
        assert compiler.num_compiled_kernels() > before, "nobody else multiplies such rows"
        in_use = resident()
    assert in_use > 5e6
    assert resident() < in_use / 4


@pytest.mark.parametrize("budget", [None, 1 << 34])
def test_a_loader_keeps_freed_memory_before_it_plans_unless_memory_is_scarce(
    budget: int | None, monkeypatch: pytest.MonkeyPatch, partitions: PartitionStore
) -> None:
    calls: list[str] = []
    plan = loader_module.PlanChoice.plan

    def noted_plan(*args: Any, **options: Any) -> Any:
        calls.append("plan")
        return plan(*args, **options)

    monkeypatch.setattr(loader_module, "keep_freed_memory", lambda: calls.append("keep"))
    monkeypatch.setattr(loader_module.PlanChoice, "plan", noted_plan)
    g = PartitionedGraph.open(partitions.get("power_law", power_law(), 1))
    model = Case(kind="sage_mean", num_layers=2).build(g.ndata["feat"].shape[1])
    FullGraphLoader(g, g.owned_nodes("train_mask"), 2, model=model, planner=PlannerConfig(memory_budget_bytes=budget))
    assert calls == (["keep", "plan"] if budget is None else ["plan"])


@each_value(budget=[None, 1 << 34], is_first_without=[False, True])
def test_another_loader_leaves_memory_scarce(
    budget: int | None,
    is_first_without: bool,
    given_back: list[bool],
    monkeypatch: pytest.MonkeyPatch,
    partitions: PartitionStore,
) -> None:
    """That of `infer`, which takes no budget, had the process keep freed memory for the rest of the training."""
    kept: list[None] = []
    stopped: list[None] = []
    monkeypatch.setattr(loader_module, "keep_freed_memory", lambda: kept.append(None))
    monkeypatch.setattr(loader_module, "stop_keeping_freed_memory", lambda: stopped.append(None))
    monkeypatch.setattr(loader_module, "_MANY_EDGES", 1)
    g = PartitionedGraph.open(partitions.get("power_law", power_law(), 1))
    model = Case(kind="sage_mean", num_layers=2).build(g.ndata["feat"].shape[1])
    config = PlannerConfig(memory_budget_bytes=budget)
    before = FullGraphLoader(g, g.owned_nodes(), 2, strategy="depcomm") if is_first_without else None
    assert bool(kept) is is_first_without
    loader = FullGraphLoader(g, g.owned_nodes("train_mask"), 2, model=model, planner=config)
    assert bool(stopped) is (budget is not None)
    kept.clear()
    given_back.clear()
    infer(model, g, 2)
    FullGraphLoader(g, g.owned_nodes(), 2, strategy="depcomm")
    assert bool(kept) is (budget is None)
    assert bool(given_back) is (budget is not None), "at once"
    if before is not None:
        given_back.clear()
        before._leave_memory(thoroughly=False)
        assert bool(given_back) is (budget is not None), "of one that was made before"
    del loader
    assert not g.is_memory_scarce
    FullGraphLoader(g, g.owned_nodes(), 2, strategy="depcomm")
    assert kept, "nobody has a budget any more"


@pytest.mark.parametrize("budget", [None, 1e10])
def test_evaluations_of_a_run_within_a_budget_keep_no_freed_memory(
    budget: float | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """That is for the process, and for good: their loader, which had no budget of its own, undid it for training."""
    kept: list[None] = []
    dataset = generate_powerlaw(PowerLawConfig(nodes=100, degree=6.0, features=5, classes=3))
    partition_graph(dataset.graph, "g", 1, tmp_path)
    monkeypatch.setattr(loader_module, "keep_freed_memory", lambda: kept.append(None))
    train_job(
        TrainJob(
            part_config=str(tmp_path / "g.json"),
            dataset="g",
            num_classes=3,
            model=ModelConfig(num_layers=2, hidden=4),
            strategy=StrategyConfig(memory_budget=budget),
            training=TrainConfig(epochs=1, dtype="float64"),
        )
    )
    assert bool(kept) is (budget is None)
