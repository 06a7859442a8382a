# SPDX-License-Identifier: Apache-2.0
"""Training on a GPU equals single-process full-graph DGL on the CPU: forward, input gradients and weight gradients.

In float64, where CUDA tensors go to the reference ops, to 1e-9; in float32, on the kernels, to what that precision
leaves. One rank goes over NCCL; NCCL refuses several ranks on one GPU, so these take rows through pinned memory.
"""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from dgl_hybrid import FullGraphLoader, PartitionedGraph
from dgl_hybrid.graph.optimize import optimize
from dgl_hybrid.ops.op_counts import op_counts, reset_op_counts
from dgl_hybrid.training import planning
from tests.helpers.exactness import LAYERS, Case, StepResult, assert_same_step, reference_step, run_step
from tests.helpers.graphs import NUM_FEATURES, power_law
from tests.helpers.partitions import PartitionStore
from tests.helpers.thinning import pairwise
from tests.helpers.world import run_ranks

pytestmark = pytest.mark.cuda

KINDS = sorted(set(LAYERS) - {"user_defined"})
"""All but functions of a user's own, which DGL runs; whether its build for CPUs can on a GPU is not known."""
SPLIT = ("gcn_both", "sage_mean", "gin", "edge_weight_norm", "gat", "gatv2")


def run_counted(rank: int, world_size: int, folder: str, case: Case) -> tuple[StepResult, dict[str, int]]:
    reset_op_counts()
    return run_step(rank, world_size, folder, case), op_counts()


def run_over_nccl(
    rank: int, world_size: int, folder: str, case: Case, rendezvous: str
) -> tuple[StepResult, dict[str, int]]:
    dist.destroy_process_group()
    dist.init_process_group("nccl", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size)
    return run_counted(rank, world_size, folder, case)


def check(case: Case, world_size: int, partitions: PartitionStore) -> list[dict[str, int]]:
    graph, name = power_law(), "power_law"
    if case.dtype == torch.float32:
        graph.ndata["feat"], graph.edata["w"], name = graph.ndata["feat"].float(), graph.edata["w"].float(), "float32"
    outcomes = run_ranks(world_size, run_counted, partitions.get(name, graph, world_size), case)
    tolerance = 1e-9 if case.dtype == torch.float64 else 1e-4
    assert_same_step([result for result, _ in outcomes], reference_step(graph, case), tolerance)
    return [counts for _, counts in outcomes]


@pairwise(kind=KINDS, plan=["depcomm", "depcache", "random:1:0.5"], world_size=[1, 2, 3, 4], is_wide=[True, False])
def test_every_layer(kind: str, plan: str, world_size: int, is_wide: bool, partitions: PartitionStore) -> None:
    dtype = torch.float64 if is_wide else torch.float32
    check(Case(kind=kind, plan=plan, dtype=dtype, device="cuda"), world_size, partitions)


@pairwise(
    kind=SPLIT,
    world_size=[2, 3, 4],
    overlap=[True, False],
    chunk_rows=[None, 7],
    partial_sums=[None, True],
    is_wide=[True, False],
)
def test_with_messages_in_flight(
    kind: str,
    world_size: int,
    overlap: bool,
    chunk_rows: int | None,
    partial_sums: bool | None,
    is_wide: bool,
    partitions: PartitionStore,
) -> None:
    if not overlap:
        chunk_rows = partial_sums = None  # parts of what is split by source
    case = Case(
        kind=kind,
        num_layers=3,
        plan="random:1:0.3",
        dtype=torch.float64 if is_wide else torch.float32,
        epochs=2,
        optimized=True,
        overlap=overlap,
        chunk_rows=chunk_rows,
        partial_sums=partial_sums if kind not in ("gat", "gatv2") else None,
        device="cuda",
    )
    for counts in check(case, world_size, partitions):
        split = sum(number for route, number in counts.items() if "split by source" in route)
        assert split == (case.num_layers * case.epochs if overlap else 0)


@pairwise(kind=["gcn_both", "sage_mean", "gat"], strategy=["hybrid", "neutronstar", "depcomm"], world_size=[1, 3])
def test_planned(kind: str, strategy: str, world_size: int, partitions: PartitionStore) -> None:
    case = Case(
        kind=kind,
        plan=f"planned:{strategy}",
        num_layers=3,
        dtype=torch.float32,
        epochs=3,
        optimized=True,
        batch_norm=True,
        device="cuda",
    )
    check(case, world_size, partitions)


def plan_on_gpu(rank: int, world_size: int, folder: str) -> tuple[float, str]:
    g = PartitionedGraph.open(folder)
    model = optimize(Case(kind="gat").build(NUM_FEATURES).float().to("cuda"))
    with patch.object(planning, "cost_model", wraps=planning.cost_model) as priced:
        outcome = FullGraphLoader(g, g.owned_nodes("train_mask"), 2, "cuda", model=model).outcome
    assert outcome is not None
    assert g.topology is not None
    times = priced.call_args.args[3]
    assert times is not None, "the model is timed where it trains"
    return outcome.predicted_epoch_s, g.topology.device


def test_plans_come_from_times_of_the_gpu(partitions: PartitionStore) -> None:
    graph = power_law()
    graph.ndata["feat"], graph.edata["w"] = graph.ndata["feat"].float(), graph.edata["w"].float()
    told = run_ranks(2, plan_on_gpu, partitions.get("float32", graph, 2))
    assert {device for _, device in told} == {"cuda"}
    assert all(0.0 < predicted_s < float("inf") for predicted_s, _ in told)


@pytest.mark.skipif(not dist.is_nccl_available(), reason="no NCCL in this PyTorch")
@pytest.mark.parametrize("kind", SPLIT)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_over_nccl(kind: str, dtype: torch.dtype, partitions: PartitionStore, tmp_path: object) -> None:
    graph, name = power_law(), "power_law"
    if dtype == torch.float32:
        graph.ndata["feat"], graph.edata["w"], name = graph.ndata["feat"].float(), graph.edata["w"].float(), "float32"
    case = Case(kind=kind, num_layers=3, dtype=dtype, epochs=2, optimized=True, device="cuda")
    outcomes = run_ranks(1, run_over_nccl, partitions.get(name, graph, 1), case, f"{tmp_path}/rendezvous")
    expected = reference_step(graph, case)
    assert_same_step([result for result, _ in outcomes], expected, 1e-9 if dtype == torch.float64 else 1e-4)


@pytest.mark.parametrize("kind", ["gat_attn_drop", "gat", "sage_mean"])
def test_dropout_is_that_of_one_rank_on_the_cpu(kind: str, partitions: PartitionStore) -> None:
    graph = power_law()
    cpu = Case(kind=kind, dropout=0.3, optimized=True, epochs=2)
    (alone,) = run_ranks(1, run_step, partitions.get("power_law", graph, 1), cpu)
    gpu = Case(kind=kind, dropout=0.3, optimized=True, epochs=2, device="cuda")
    together = run_ranks(3, run_step, partitions.get("power_law", graph, 3), gpu)
    for epoch, loss in enumerate(alone.losses):
        assert sum(result.losses[epoch] for result in together) == pytest.approx(loss, rel=1e-9)
