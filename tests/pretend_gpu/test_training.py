# SPDX-License-Identifier: Apache-2.0
"""Training on the pretended GPU is single-process full-graph training, or the same script's on the CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.helpers.exactness import Case, assert_same_step, reference_step, run_step
from tests.helpers.graphs import power_law
from tests.helpers.partitions import PartitionStore
from tests.ops.cuda.fake_driver import build_fake_driver
from tests.pretend_gpu.ranks import PretendedGpus
from tests.pretend_gpu.scripts import Script, assert_same_training, tolerance_of, train_twice

slow = pytest.mark.slow

STEPS = [
    Case(kind="gcn_both", plan="depcomm"),
    Case(kind="sage_mean", plan="depcache"),
    Case(kind="gat", plan="random:1:0.5"),
    Case(kind="gin", plan="random:1:0.5"),
    Case(kind="user_defined", plan="random:1:0.5"),
    Case(kind="edge_weight_norm", plan="random:1:0.5", epochs=2),
    Case(kind="direct_ops", plan="random:1:0.5"),
    Case(kind="gcn_both", plan="planned:hybrid", num_layers=3, epochs=2, batch_norm=True, optimized=True),
    # Rows in flight while others are summed; in messages of a few; as partial sums.
    Case(kind="gcn_both", plan="random:1:0.3", num_layers=3, epochs=2, optimized=True, chunk_rows=7),
    Case(kind="sage_mean", plan="random:1:0.3", num_layers=3, epochs=2, optimized=True, partial_sums=True),
    Case(kind="gat", plan="random:1:0.3", num_layers=3, epochs=2, optimized=True, chunk_rows=7),
    Case(kind="gatv2", plan="random:1:0.3", num_layers=3, epochs=2, optimized=True),
    *(
        pytest.param(case, marks=slow)
        for case in (
            Case(kind="sage_pool", plan="random:1:0.5"),
            Case(kind="sage_gcn", plan="planned:neutronstar", epochs=2),
            Case(kind="gcn_left", plan="depcache"),
            Case(kind="gin_max", plan="depcomm", num_layers=3),
            Case(kind="gin_learned", plan="random:1:0.3", epochs=2, optimized=True),
            Case(kind="dotgat", plan="random:1:0.5"),
            Case(kind="agnn", plan="random:1:0.5"),
            Case(kind="edgeconv", plan="random:1:0.5"),
            Case(kind="gcn_both", plan="random:1:0.3", num_layers=3, overlap=False),
            Case(kind="gat", plan="random:1:0.3", num_layers=3, overlap=False),
            Case(kind="gatv2", plan="random:1:0.3", num_layers=3, optimized=True, chunk_rows=7),
            Case(kind="edge_weight_norm", plan="random:1:0.3", num_layers=3, optimized=True, chunk_rows=7),
        )
    ),
]


def describe(value: object) -> str:
    """What of a case or script is not as usual."""
    if not isinstance(value, (Case, Script)):
        return str(value)
    usual = {name: field.default for name, field in value.__dataclass_fields__.items()}
    said = {name: getattr(value, name) for name in usual if getattr(value, name) != usual[name] and name != "device"}
    return "-".join(
        describe(told) if isinstance(told, Case) else (name if told is True else str(told))
        for name, told in said.items()
    )


def on_gpu(case: Case) -> Case:
    return replace(case, device="cuda")


@pytest.mark.parametrize("case", STEPS, ids=describe)
def test_steps_are_those_of_one_process(case: Case, gpus: PretendedGpus, partitions: PartitionStore) -> None:
    graph = power_law()
    results = gpus.run(2, run_step, partitions.get("power_law", graph, 2), on_gpu(case))
    assert_same_step(results, reference_step(graph, case))


def test_step_of_a_rank_that_is_alone(gpus: PretendedGpus, partitions: PartitionStore) -> None:
    graph, case = power_law(), Case(kind="gat", plan="planned:hybrid", epochs=2, optimized=True)
    results = gpus.run(1, run_step, partitions.get("power_law", graph, 1), on_gpu(case))
    assert_same_step(results, reference_step(graph, case))


SAGE = Case(kind="sage_mean", plan="planned:hybrid", epochs=3, optimized=True)
DROPS = Case(kind="gat_attn_drop", plan="random:1:0.3", epochs=2, optimized=True, dropout=0.3)
APPROXIMATE = Case(kind="gcn_both", plan="random:1:0.3", num_layers=3, epochs=3, optimized=True)
SCRIPTS = [
    Script(case=DROPS, reads_static=True),
    Script(case=SAGE, reads_static=True, infers=True),
    Script(case=replace(SAGE, batch_norm=True), names_model=False, has_rates=False, reads_static=True),
    Script(case=replace(SAGE, plan="planned-random:1:0.5"), reads_static=True),
    Script(case=APPROXIMATE, approximate="int8"),
    Script(case=APPROXIMATE, approximate="stale+bf16"),
    Script(case=replace(DROPS, optimized=False), checkpoints="plain"),
    *(
        pytest.param(script, marks=slow)
        for script in (
            Script(case=SAGE, moves_blocks=True, reads_static=True),
            Script(case=DROPS, checkpoints="reentrant"),
            Script(case=replace(DROPS, kind="gcn_both", chunk_rows=7)),
            Script(case=APPROXIMATE, approximate="bf16"),
            Script(case=APPROXIMATE, approximate="stale+int8"),
            Script(case=replace(APPROXIMATE, kind="edge_weight_norm"), approximate="bf16"),
            Script(case=replace(SAGE, kind="gcn_both", plan="planned:depcache"), reads_static=True, infers=True),
            Script(case=replace(SAGE, kind="gatv2"), names_model=False, has_rates=False),
        )
    ),
]


@pytest.mark.parametrize("script", SCRIPTS, ids=describe)
def test_scripts_train_as_on_the_cpu(script: Script, gpus: PretendedGpus, partitions: PartitionStore) -> None:
    for on_cpu, on_gpu in gpus.run(2, train_twice, partitions.get("power_law", power_law(), 2), script):
        assert_same_training(on_cpu, on_gpu, tolerance_of(script))
        assert on_gpu.is_planned == on_cpu.is_planned == script.case.plan.startswith("planned:")


@pytest.mark.parametrize("kind", ["sage_mean", pytest.param("gat", marks=slow)])
def test_autocast_trains_as_on_the_cpu(kind: str, gpus: PretendedGpus, partitions: PartitionStore) -> None:
    """Up to bfloat16's rounding: which operations are cast differs."""
    case = Case(kind=kind, plan="planned:hybrid", epochs=3, optimized=True, dtype=torch.float32)
    script = Script(case=case, is_autocast=True, names_model=False)
    for on_cpu, on_gpu in gpus.run(2, train_twice, partitions.get("power_law", power_law(), 2), script):
        assert_same_training(on_cpu, on_gpu, 0.05)
        assert on_gpu.is_planned


@slow
@pytest.mark.parametrize("kind", ["sage_mean", "gat", "gatv2", "gin_max", "direct_ops", "edge_weight_norm", "dotgat"])
def test_float32_runs_on_the_kernels(
    kind: str, gpus: PretendedGpus, partitions: PartitionStore, tmp_path: Path
) -> None:
    graph = power_law()
    graph.ndata["feat"], graph.edata["w"] = graph.ndata["feat"].float(), graph.edata["w"].float()
    case = Case(kind=kind, plan="random:1:0.3", dtype=torch.float32, epochs=2, optimized=True)
    driver = build_fake_driver(tmp_path).path
    results = gpus.run(2, run_step, partitions.get("float32", graph, 2), on_gpu(case), kernels=driver)
    assert_same_step(results, reference_step(graph, case), 1e-4)
