# SPDX-License-Identifier: Apache-2.0
"""Forward, input gradients and weight gradients equal single-process full-graph DGL, element by element, in float64.

The default run sees every kind of layer on 1 to 4 ranks and under every kind of plan, and of each further product every
pair of values, or every value where another test has the pairs (tests/helpers/thinning.py); the other combinations are
in the slow run.
"""

from __future__ import annotations

import contextlib
import io
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import dgl
import pytest
import torch

from dgl_hybrid.partition import local_order
from dgl_hybrid.partition.clusters import Numbers, cut_into_clusters
from tests.helpers.exactness import LAYERS, Case, StepResult, assert_same_step, is_mixed, reference_step, run_step
from tests.helpers.graphs import NAMED, power_law, train_mask, with_empty_pair
from tests.helpers.hosts import on_hosts
from tests.helpers.partitions import PartitionStore, relabelled
from tests.helpers.thinning import each_value, marks_of, pairwise
from tests.helpers.world import run_ranks


def check(
    name: str,
    graph: dgl.DGLGraph,
    world_size: int,
    case: Case,
    partitions: PartitionStore,
    *,
    method: str = "random",
    num_hops: int = 1,
    mixes: bool = True,
) -> None:
    """Compares with plain DGL; `mixes`: what is planned as hybrid both caches and receives rows of a level."""
    folder = partitions.get(name, graph, world_size, method, num_hops)
    results = run_ranks(world_size, run_step, folder, case)
    assert_same_step(results, reference_step(graph, case))
    assert is_mixed(results) or case.plan != "planned:hybrid" or world_size == 1 or not mixes


@pairwise(kind=sorted(LAYERS), plan=["depcomm", "depcache", "random:1:0.5"], world_size=[1, 2, 3, 4])
def test_every_layer(kind: str, plan: str, world_size: int, partitions: PartitionStore) -> None:
    check("power_law", power_law(), world_size, Case(kind=kind, plan=plan), partitions)


@pytest.mark.parametrize("kind", sorted(LAYERS))
def test_every_layer_in_float32(kind: str, partitions: PartitionStore) -> None:
    """DGL has other kernels for float32 (libxsmm), which want more of a block than those for float64."""
    graph = power_law()
    graph.ndata["feat"], graph.edata["w"] = graph.ndata["feat"].float(), graph.edata["w"].float()
    case = Case(kind=kind, plan="planned:hybrid", dtype=torch.float32)
    results = run_ranks(3, run_step, partitions.get("power_law_32", graph, 3), case)
    assert_same_step(results, reference_step(graph, case), tolerance=1e-4)
    # Of these two, at these rates, all is cached.
    assert is_mixed(results) or kind in ("direct_ops", "edgeconv")


@pairwise(
    kind=["gcn_both", "sage_pool", "gat", "user_defined"],
    num_layers=[1, 3, 4],
    plan=["depcomm", "depcache", "random:3:0.3", "random:4:0.8"],
)
def test_every_depth(kind: str, num_layers: int, plan: str, partitions: PartitionStore) -> None:
    check("directed", NAMED["directed"](), 3, Case(kind=kind, plan=plan, num_layers=num_layers), partitions)


@pairwise(
    name=sorted(NAMED),
    kind=["gcn_both", "gin_max", "gat", "edge_weight_norm", "user_defined"],
    plan=["depcomm", "depcache", "random:5:0.5"],
)
def test_every_graph(name: str, kind: str, plan: str, partitions: PartitionStore) -> None:
    check(name, NAMED[name](), 3, Case(kind=kind, plan=plan, num_layers=3), partitions)


@each_value(
    kind=["gcn_both", "gat"],
    strategy=["hybrid", "neutronstar", "greedy", "ratio", "depcache", "depcomm"],
    world_size=[2, 3, 4],
)
def test_every_strategy(kind: str, strategy: str, world_size: int, partitions: PartitionStore) -> None:
    case = Case(kind=kind, plan=f"planned:{strategy}", num_layers=3, epochs=2)
    check("power_law", power_law(), world_size, case, partitions, mixes=world_size > 2)


@pytest.mark.parametrize(
    "world_size", [pytest.param(world_size, marks=marks_of(world_size in (1, 3))) for world_size in (1, 2, 3, 4)]
)
def test_planning_that_looks_at_some_in_edges_only(world_size: int, partitions: PartitionStore) -> None:
    cached = []
    for limit in ("", ":60"):
        case = Case(kind="gat", plan=f"planned:depcache{limit}", num_layers=3)
        results = run_ranks(world_size, run_step, partitions.get("power_law", power_law(), world_size), case)
        assert_same_step(results, reference_step(power_law(), case))
        cached.append([sum(result.cached[level] for result in results) for level in (1, 2)])
    whole, limited = cached
    assert world_size == 1 or all(0 < some < every for some, every in zip(limited, whole, strict=True))


@each_value(kind=["gcn_right", "sage_mean", "gatv2"], plan=["depcomm", "depcache", "random:6:0.5", "planned:hybrid"])
def test_loss_on_all_nodes(kind: str, plan: str, partitions: PartitionStore) -> None:
    graph = power_law(seed=1)
    graph.ndata["train_mask"] = torch.ones(graph.num_nodes(), dtype=torch.bool)
    check("all_train", graph, 3, Case(kind=kind, plan=plan, residual=True), partitions)


@pairwise(
    kind=["gcn_both", "sage_gcn", "gat", "user_defined"],
    plan=["depcomm", "depcache", "random:7:0.5", "planned:hybrid"],
    world_size=[2, 3, 4],
)
def test_rank_without_train_nodes(kind: str, plan: str, world_size: int, partitions: PartitionStore) -> None:
    graph = power_law(num_nodes=48, seed=2)
    first_part = range(48 // world_size + 1)
    graph.ndata["train_mask"] = train_mask(48, none_in=first_part)
    case = Case(kind=kind, plan=plan)
    # Few seeds read few rows: in some of these all are cached.
    check(f"no_train_{world_size}", graph, world_size, case, partitions, method="contiguous", mixes=False)


@pytest.mark.parametrize("plan", ["depcomm", "depcache", "random:8:0.5", "planned:hybrid"])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_empty_pair_of_parts(world_size: int, plan: str, partitions: PartitionStore) -> None:
    graph, part = with_empty_pair(world_size)
    ordered = relabelled(graph, torch.argsort(part, stable=True))
    case = Case(kind="sage_mean", plan=plan, num_layers=3)
    # Of two, one reads nothing, and the other caches or receives a level as a whole.
    check(f"empty_pair_{world_size}", ordered, world_size, case, partitions, method="contiguous", mixes=world_size > 2)


@pytest.mark.parametrize("num_hops", [1, 2, 3])
def test_halo_hops_of_the_folder_do_not_matter(num_hops: int, partitions: PartitionStore) -> None:
    case = Case(kind="gat", plan="random:9:0.6", num_layers=3)
    check("duplicates", NAMED["duplicates"](), 3, case, partitions, num_hops=num_hops)


@pairwise(
    kind=["gcn_both", "gat", "edge_weight_norm"],
    plan=["depcomm", "depcache", "random:12:0.5", "planned:hybrid"],
    num_hops=[1, 2],
)
def test_a_folder_written_by_plain_dgl(kind: str, plan: str, num_hops: int, tmp_path: Path) -> None:
    """No sidecar: out-degrees and what is missing of the halo come from the other ranks."""
    graph = NAMED["duplicates"]()
    with contextlib.redirect_stdout(io.StringIO()):
        original_ids, _ = dgl.distributed.partition_graph(
            graph, "plain", 3, str(tmp_path), num_hops=num_hops, part_method="random", return_mapping=True
        )
    case = Case(kind=kind, plan=plan, num_layers=3)
    results = run_ranks(3, run_step, str(tmp_path / "plain.json"), case, original_ids)
    assert_same_step(results, reference_step(graph, case))


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=marks_of(seed < 20)) for seed in range(40)])
def test_random_plans_of_random_models(seed: int, partitions: PartitionStore) -> None:
    rng = random.Random(seed)
    name, kind = rng.choice(sorted(NAMED)), rng.choice(sorted(LAYERS))
    case = Case(
        kind=kind,
        plan=f"random:{seed}:{rng.choice([0.1, 0.3, 0.5, 0.7, 0.9])}",
        num_layers=rng.randint(1, 4),
        residual=rng.random() < 0.5,
        epochs=rng.randint(1, 2),
    )
    world_size = rng.choice([2, 3, 3, 4])
    if name == "hand_drawn" and world_size == 4:
        world_size = 3
    check(name, NAMED[name](), world_size, case, partitions)


@each_value(world_size=[1, 2, 3, 4], plan=["depcomm", "depcache", "random:10:0.5", "planned:hybrid"])
def test_batch_norm_over_the_whole_graph(world_size: int, plan: str, partitions: PartitionStore) -> None:
    """Below, with dropout, each plan on 1 to 4 ranks."""
    case = Case(kind="gcn_both", plan=plan, num_layers=3, batch_norm=True, epochs=3)
    check("power_law", power_law(), world_size, case, partitions)


@each_value(
    options=[{"eps": 0.1}, {"affine": False}, {"track_running_stats": False}, {"momentum": None}],
    plan=["depcomm", "depcache", "random:15:0.5", "planned:hybrid"],
)
def test_batch_norm_with_options(options: dict[str, Any], plan: str, partitions: PartitionStore) -> None:
    """With the usual options one that is not handed on would not be missed."""
    case = Case(kind="gcn_both", plan=plan, num_layers=3, batch_norm=True, norm_options=options, epochs=3)
    check("power_law", power_law(), 3, case, partitions)


@each_value(world_size=[1, 2, 3], plan=["depcomm", "random:14:0.5", "planned:hybrid"], optimized=[False, True])
def test_batch_norm_of_heads(world_size: int, plan: str, optimized: bool, partitions: PartitionStore) -> None:
    """Rows of three dimensions were refused, as not being those of a level."""
    case = Case(kind="gat", plan=plan, num_layers=3, head_norm=True, epochs=3, optimized=optimized)
    check("power_law", power_law(), world_size, case, partitions, mixes=world_size > 2)


@each_value(kind=["sage_mean", "gcn_both"], plan=["depcomm", "depcache", "random:11:0.5", "planned:hybrid"])
def test_dropout_and_batch_norm_do_not_depend_on_ranks(kind: str, plan: str, partitions: PartitionStore) -> None:
    graph = NAMED["duplicates"]()
    curves = []
    for world_size in (1, 2, 3, 4):
        case = Case(kind=kind, plan=plan, num_layers=3, dropout=0.4, batch_norm=True, epochs=3)
        results = run_ranks(world_size, run_step, partitions.get("duplicates", graph, world_size), case)
        curves.append([sum(result.losses[epoch] for result in results) for epoch in range(3)])
    without = reference_step(graph, Case(kind=kind, num_layers=3, batch_norm=True, epochs=3)).losses
    assert max(abs(a - b) for a, b in zip(curves[0], without, strict=True)) > 1e-3, "dropout had no effect"
    for curve in curves[1:]:
        assert curve == pytest.approx(curves[0], rel=1e-9, abs=0)


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("kind", ["gcn_both", "gat", "gin_max", "edge_weight_norm"])
def test_the_order_of_rows_does_not_matter(kind: str, world_size: int, partitions: PartitionStore) -> None:
    case = Case(kind=kind, plan="random:13:0.5", num_layers=3, batch_norm=True, epochs=2, row_order="locality")
    check("power_law", power_law(), world_size, case, partitions)


def run_step_in_clusters(rank: int, world_size: int, part_config: str, case: Case) -> tuple[StepResult, int]:
    """As `run_step`, with clusters of few rows, so that METIS cuts small graphs; and how often it was asked."""
    asked: list[None] = []

    def cut_and_note(indptr: Numbers, indices: Numbers, num_clusters: int, timeout_s: float) -> Numbers:
        asked.append(None)
        return cut_into_clusters(indptr, indices, num_clusters, timeout_s)

    with (
        mock.patch.object(local_order, "_CLUSTER_ROWS", 2),
        mock.patch.object(local_order, "cut_into_clusters", cut_and_note),
    ):
        return run_step(rank, world_size, part_config, case), len(asked)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize(("kind", "plan"), [("gat", "random:13:0.5"), ("gcn_both", "planned:depcache")])
def test_rows_in_clusters_of_metis(kind: str, plan: str, world_size: int, partitions: PartitionStore) -> None:
    case = Case(kind=kind, plan=plan, num_layers=3, batch_norm=True, epochs=2, row_order="locality", optimized=True)
    graph = power_law()
    results = run_ranks(world_size, run_step_in_clusters, partitions.get("power_law", graph, world_size), case)
    assert [asked for _, asked in results] == [1] * world_size, "METIS is asked on every rank, and once for a graph"
    assert_same_step([result for result, _ in results], reference_step(graph, case))


@pytest.mark.parametrize(("kind", "collectives"), [("gcn_both", 1), ("sage_mean", 1), ("gat", 1), ("agnn", 1)])
def test_one_exchange_a_layer_and_direction(kind: str, collectives: int, partitions: PartitionStore) -> None:
    case = Case(kind=kind, num_layers=3)
    for result in run_ranks(3, run_step, partitions.get("power_law", power_law(), 3), case):
        assert result.forward_exchanges == 3 * collectives
        assert result.backward_exchanges == 3 * collectives


def run_step_on_hosts(rank: int, world_size: int, part_config: str, case: Case, hosts: Sequence[int]) -> StepResult:
    with on_hosts(rank, hosts):
        return run_step(rank, world_size, part_config, case)


@pairwise(
    hosts=[(0, 0, 1, 1), (0, 1, 0, 1), (0, 1, 1)],
    kind=["gcn_both", "gat", "gin_max", "user_defined"],
    plan=["depcomm", "random:2:0.5", "planned:hybrid"],
)
def test_ranks_on_several_hosts(hosts: Sequence[int], kind: str, plan: str, partitions: PartitionStore) -> None:
    case = Case(kind=kind, plan=plan, num_layers=3, epochs=2, optimized=True)
    folder = partitions.get("power_law", power_law(), len(hosts))
    results = run_ranks(len(hosts), run_step_on_hosts, folder, case, hosts)
    assert_same_step(results, reference_step(power_law(), case))
