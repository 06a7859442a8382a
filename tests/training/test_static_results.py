# SPDX-License-Identifier: Apache-2.0
"""What the first layer makes of raw features is made once and kept, and stays what plain DGL computes every epoch.

The default run sees every kind of layer plain and optimised, and under either plan; the slow run all combinations.
"""

from __future__ import annotations

import copy
import sys
import tempfile
from typing import Any

import dgl
import dgl.nn as dglnn
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from dgl import function as fn
from torch import Tensor, nn

from dgl_hybrid import FullGraphLoader, PartitionedGraph, infer
from dgl_hybrid.errors import BlockError
from dgl_hybrid.graph.optimize import optimize
from dgl_hybrid.ops.cpu import resting_rows
from dgl_hybrid.planner import uniform_topology
from dgl_hybrid.training.models import GraphStack
from tests.helpers.exactness import (
    LAYERS,
    Case,
    assert_close,
    assert_same_step,
    reference_step,
    run_step,
)
from tests.helpers.graphs import power_law
from tests.helpers.partitions import PartitionStore
from tests.helpers.thinning import each_value, pairwise
from tests.helpers.world import run_ranks, run_ranks_expect_errors
from tests.training.kept_runs import EPOCHS, Run, assert_same, reference, train

KEPT_BY_ITSELF = {"gin", "gin_max", "gin_learned"}
"""Layers that aggregate the very tensor they are given; GraphConv and SAGEConv narrow it by a product first."""
KEPT_WHEN_OPTIMIZED = KEPT_BY_ITSELF | {"gcn_both", "gcn_right", "gcn_left", "gcn_none", "sage_mean", "sage_gcn"}
KEPT_IN_PART_WHEN_OPTIMIZED = {"every_way"}
"""Layers of which something is kept, and which exchange rows all the same."""


def test_weights_that_were_changed_are_not_divided_by_the_degrees_of_others(partitions: PartitionStore) -> None:
    """`EdgeWeightNorm("both")` knows the out-degrees of fields as they are, and of nothing that a script computes."""
    case = Case(kind="edge_weight_norm", plan="depcomm")
    folder = partitions.get("power_law", power_law(), 3)
    assert_same(run_ranks(3, train, folder, case), reference(case))
    errors = run_ranks_expect_errors(3, train, folder, case, change="writes weights in place")
    messages = [error.message for error in errors]
    assert len(messages) == 3
    assert all("as it came from the loader, not written to" in message for message in messages), messages


@pairwise(kind=sorted(LAYERS), plan=["depcomm", "planned:hybrid"], optimized=[False, True])
def test_every_layer(kind: str, plan: str, optimized: bool, partitions: PartitionStore) -> None:
    case = Case(kind=kind, plan=plan)
    runs = run_ranks(3, train, partitions.get("power_law", power_law(), 3), case, optimized=optimized)
    assert_same(runs, reference(case))
    keeps = kind in (KEPT_WHEN_OPTIMIZED if optimized else KEPT_BY_ITSELF)
    keeps_part = optimized and kind in KEPT_IN_PART_WHEN_OPTIMIZED
    for run in runs:
        first, *later = run.first_layer_exchanges
        if keeps:
            assert later == [0, 0]
        else:
            assert later[0] == later[1]
        assert (run.kept_bytes > 0) == (keeps or keeps_part)
        if plan == "depcomm":
            assert first > 0


@pairwise(
    kind=["gcn_both", "sage_mean", "sage_gcn", "gin", "gin_max", "gin_learned"], num_layers=[1, 3], world_size=[1, 2, 4]
)
def test_every_number_of_ranks(kind: str, num_layers: int, world_size: int, partitions: PartitionStore) -> None:
    case = Case(kind=kind, plan="random:2:0.5", num_layers=num_layers, residual=True)
    runs = run_ranks(world_size, train, partitions.get("power_law", power_law(), world_size), case, optimized=True)
    assert_same(runs, reference(case))
    assert all(run.first_layer_exchanges[1:] == [0, 0] for run in runs)


@pairwise(
    kind=["gcn_both", "gcn_left", "sage_mean", "sage_gcn", "gin", "gin_max", "gin_learned", "edge_weight_norm"],
    num_layers=[1, 2, 3],
    world_size=[2, 3, 4],
    plan=["planned:depcache", "planned-random:1:0.5", "planned-random:2:0.9"],
    optimized=[False, True],
)
def test_cached_vertices_get_what_their_owners_aggregate(
    kind: str, num_layers: int, world_size: int, plan: str, optimized: bool, partitions: PartitionStore
) -> None:
    """Of every kind: those that keep nothing have the edges of cached vertices themselves."""
    case = Case(kind=kind, plan=plan, num_layers=num_layers, residual=num_layers == 3)
    folder = partitions.get("power_law", power_law(), world_size)
    runs = run_ranks(world_size, train, folder, case, optimized=optimized)
    assert_same(runs, reference(case))
    keeps = kind in (KEPT_WHEN_OPTIMIZED if optimized else KEPT_BY_ITSELF)
    if num_layers > 1:  # else nothing is cached but a borrowed seed
        assert any(run.num_without_edges for run in runs) == keeps


def train_at_rest(rank: int, world_size: int, part_config: str, case: Case, **options: Any) -> Run:
    """As `train`; after each epoch, rows of any size that nobody reads are left on disk, also where that is memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resting_rows, "LEAST_BYTES", 1)
        patch.setattr(resting_rows, "_folder_on_disk", tempfile.gettempdir)
        return train(rank, world_size, part_config, case, rests=True, **options)


@pytest.mark.skipif(sys.platform != "linux", reason="rows are left on disk on Linux alone")
@each_value(
    kind=["gcn_both", "gcn_none", "sage_gcn", "gin", "gin_learned", "sage_mean", "gat"],
    world_size=[2, 3, 4, 1],
    plan=["depcomm", "planned:depcache", "planned-random:1:0.5"],
)
def test_raw_rows_that_nobody_reads_can_be_left_on_disk(
    kind: str, world_size: int, plan: str, partitions: PartitionStore
) -> None:
    case = Case(kind=kind, plan=plan, num_layers=2)
    runs = run_ranks(
        world_size, train_at_rest, partitions.get("power_law", power_law(), world_size), case, optimized=True
    )
    assert_same(runs, reference(case))
    for run in runs:  # once: they stay there, or were read all the same and go back for good
        assert run.num_left == (0 if kind in ("sage_mean", "gat") else 1)


@pytest.mark.parametrize("plan", ["random:1:0.5", "planned:depcache", "planned-random:1:0.5"])
def test_nothing_is_kept_if_only_some_ranks_copy_their_features(plan: str, partitions: PartitionStore) -> None:
    """Those that did not had the first layer's sums at hand, and did not come to the exchange of the others."""
    case = Case(kind="gin", plan=plan)
    runs = run_ranks(2, train, partitions.get("power_law", power_law(), 2), case, change="copies on rank 1")
    assert_same(runs, reference(case))
    told, *others = [run.warnings for run in runs]
    assert others == [[]]
    assert len(told) == 1
    assert "rank 0 of 2 made 1 results" in told[0]
    assert "rank 1 0" in told[0]
    assert "keep_static=False" in told[0]
    assert all(run.kept_bytes == 0 for run in runs)


class WithSkip(nn.Module):
    """A convolution whose result raw rows may be added to."""

    def __init__(self, num_features: int, *, skips: bool) -> None:
        super().__init__()
        self.conv, self.skip = dglnn.GraphConv(num_features, 4), nn.Linear(num_features, 4)
        self.skips = skips

    def forward(self, blocks: list[Any], x: Tensor) -> Any:
        y = self.conv(blocks[0], x)
        return y + self.skip(x[: len(y)]) if self.skips else y


@pytest.mark.skipif(sys.platform != "linux", reason="rows are left on disk on Linux alone")
@pytest.mark.parametrize("skips", [False, True])
def test_raw_rows_stay_on_disk_unless_the_model_reads_them(
    skips: bool, partitions: PartitionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = power_law()
    graph.ndata["feat"] = torch.rand(
        graph.num_nodes(), resting_rows.LEAST_BYTES // (8 * graph.num_nodes()) + 1
    ).double()
    monkeypatch.setattr(resting_rows, "_folder_on_disk", tempfile.gettempdir)
    g = PartitionedGraph.open(partitions.get("wide_power_law", graph, 1))
    model = WithSkip(graph.ndata["feat"].shape[1], skips=skips).double()
    optimize(model)
    gradients: list[list[Tensor]] = []
    for rests in (False, True):
        loader = FullGraphLoader(g, g.owned_nodes(), 1, plan=[torch.empty(0, dtype=torch.int64)])
        num_before, num_on_disk = len(resting_rows._on_disk), []
        for _ in range(4):
            if rests:
                loader._free_memory.leave_rows_on_disk()
            num_on_disk.append(len(resting_rows._on_disk) - num_before)
            for input_nodes, _, blocks in loader:
                model.zero_grad()
                model(blocks, g.ndata["feat"][input_nodes]).pow(2).sum().backward()
            gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        later = [] if not rests else [1, 0, 0] if skips else [1, 1, 1]
        assert num_on_disk == ([0, *later] if rests else [0] * 4)
        del loader, blocks, input_nodes
    for found in gradients[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found, gradients[0], strict=True))


@pytest.mark.skipif(sys.platform != "linux", reason="rows are left on disk on Linux alone")
@pytest.mark.parametrize("change", ["sets the field", "writes in place", "writes on rank 0 between epochs"])
def test_what_was_made_of_rows_on_disk_is_made_anew(change: str, partitions: PartitionStore) -> None:
    folder = partitions.get("power_law", power_law(), 3)
    case = Case(kind="gcn_both", plan="planned-random:1:0.6", num_layers=3)
    runs = run_ranks(3, train_at_rest, folder, case, optimized=True, change=change)
    assert_same(runs, reference(case, change=change))


@pytest.mark.parametrize("change", ["sets the field", "writes in place", "writes on rank 0 between epochs"])
def test_what_owners_aggregate_is_made_anew(change: str, partitions: PartitionStore) -> None:
    folder = partitions.get("power_law", power_law(), 3)
    case = Case(kind="gin", plan="planned-random:1:0.6", num_layers=3)
    runs = run_ranks(3, train, folder, case, change=change)
    assert_same(runs, reference(case, change=change))
    assert all(run.num_without_edges for run in runs)


@each_value(
    kind=["gcn_both", "sage_mean", "gin_max", "gin_learned", "user_defined", "edge_weight_norm"],
    world_size=[2, 3, 4],
    plan=["planned:depcache", "planned-random:3:0.6"],
    optimized=[False, True],
    batch_norm=[False, True],
)
def test_features_that_turn_out_to_change(
    kind: str, world_size: int, plan: str, optimized: bool, batch_norm: bool, partitions: PartitionStore
) -> None:
    """The plan expects the same features in every epoch and gets others that need a gradient: exact all the same."""
    case = Case(kind=kind, plan=plan, num_layers=3, epochs=2, optimized=optimized, batch_norm=batch_norm)
    folder = partitions.get("power_law", power_law(), world_size)
    assert_same_step(run_ranks(world_size, run_step, folder, case), reference_step(power_law(), case))


def run_attention_on_sums(rank: int, world_size: int, part_config: str) -> str:
    g = PartitionedGraph.open(part_config)
    case = Case(kind="gin")
    loader = FullGraphLoader(
        g,
        g.owned_nodes("train_mask"),
        2,
        model=case.build(g.ndata["feat"].shape[1]),
        strategy="depcache",
        topology=uniform_topology(world_size),
    )
    attention = dglnn.GATConv(g.ndata["feat"].shape[1], 2, 1).double()
    for input_nodes, _, blocks in loader:
        assert torch.equal(blocks[0].in_degrees(), g.fetch_nodes(g.partition.in_degrees, blocks[0].dstdata[dgl.NID]))
        try:
            attention(blocks[0], g.ndata["feat"][input_nodes])
        except BlockError as error:
            return str(error)
    return "no error"


def test_who_needs_the_edges_of_cached_vertices_is_told(partitions: PartitionStore) -> None:
    for message in run_ranks(3, run_attention_on_sums, partitions.get("power_law", power_law(), 3)):
        assert "get those sums from their owners and have no in-edges" in message
        assert "keep_static=False" in message


def teach(student: nn.Module, teacher: nn.Module, blocks: list[Any], x: Tensor, labels: Tensor, rows: Any) -> Tensor:
    """The loss of a student that also follows a teacher, who does not train."""
    logits = student(blocks, x)[rows]
    with torch.no_grad():
        taught = teacher(blocks, x)[rows]
    return F.cross_entropy(logits, labels) + F.mse_loss(logits, taught)


def train_with_teacher(rank: int, world_size: int, part_config: str) -> tuple[list[dict[str, Tensor]], list[bool]]:
    g = PartitionedGraph.open(part_config)
    student, teacher = (Case(kind=kind).build(g.ndata["feat"].shape[1]) for kind in ("gcn_both", "gat"))
    ddp = nn.parallel.DistributedDataParallel(optimize(student)) if world_size > 1 else optimize(student)
    loader = FullGraphLoader(
        g, g.owned_nodes("train_mask"), 2, strategy="depcache", topology=uniform_topology(world_size)
    )
    grads, have_all_edges = [], []
    for _ in range(3):
        student.zero_grad()
        for input_nodes, seeds, blocks in loader:
            x, labels = g.ndata["feat"][input_nodes], g.ndata["label"][seeds]
            teach(ddp, teacher, blocks, x, labels, slice(None)).backward()
            have_all_edges.append(blocks[0].structure.replicas is None)
        grads.append({name: parameter.grad.clone() for name, parameter in student.named_parameters()})
    assert loader.outcome is not None
    assert sum(loader.outcome.plan.num_cached) > 0 or world_size == 1
    return grads, have_all_edges


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_a_teacher_that_needs_the_edges_is_planned_for_too(world_size: int, partitions: PartitionStore) -> None:
    """Seen in the first epoch, under `no_grad`, beside the student whose first layer keeps its sums."""
    graph = power_law()
    student, teacher = (Case(kind=kind).build(graph.ndata["feat"].shape[1]) for kind in ("gcn_both", "gat"))
    rows = graph.ndata["train_mask"].bool()
    teach(student, teacher, [graph] * 2, graph.ndata["feat"], graph.ndata["label"][rows], rows).backward()
    folder = partitions.get("power_law", graph, world_size)
    for grads, have_all_edges in run_ranks(world_size, train_with_teacher, folder):
        assert all(have_all_edges)
        for of_epoch in grads:
            for name, parameter in student.named_parameters():
                assert_close(of_epoch[name], parameter.grad, f"{name}, {world_size} ranks")


@pytest.mark.parametrize("kind", ["gcn_both", "sage_mean"])
def test_who_sets_the_field_gets_it_made_anew(kind: str, partitions: PartitionStore) -> None:
    folder = partitions.get("power_law", power_law(), 3)
    runs = run_ranks(3, train, folder, Case(kind=kind), optimized=True, change="sets the field")
    assert_same(runs, reference(Case(kind=kind), change="sets the field"))


def test_who_writes_into_what_was_read_gets_the_fields_rows_again(partitions: PartitionStore) -> None:
    """A read after such a write answers with the field's rows, in a new tensor: what was kept is not used for it."""
    folder = partitions.get("power_law", power_law(), 3)
    runs = run_ranks(3, train, folder, Case(kind="gin"), change="writes in place")
    assert_same(runs, reference(Case(kind="gin")))


def test_a_kept_result_that_one_rank_wrote_into_is_made_anew_on_all(partitions: PartitionStore) -> None:
    folder = partitions.get("power_law", power_law(), 3)
    runs = run_ranks(3, train, folder, Case(kind="gin"), change="writes on rank 0 between epochs")
    assert_same(runs, reference(Case(kind="gin")))
    assert all(run.first_layer_exchanges[1] > 0 and run.first_layer_exchanges[2] == 0 for run in runs)


def kept_around_a_write(rank: int, world_size: int, part_config: str, written: str = "feat") -> list[int]:
    """Bytes kept as each of two epochs begins and ends, of which the last rank wrote into a field between."""
    g = PartitionedGraph.open(part_config)
    model = optimize(GraphStack([dglnn.SAGEConv(g.ndata["feat"].shape[1], 4, "mean").double()], None))
    loader = FullGraphLoader(
        g,
        g.owned_nodes("train_mask"),
        1,
        model=model,  # else plans are made, and blocks anew, after the first epoch
        strategy="depcache",
        topology=uniform_topology(world_size),
    )
    found = []
    for epoch in range(2):
        for input_nodes, _, blocks in loader:
            found.append(blocks[0].static_results.num_bytes)
            model(blocks, g.ndata["feat"][input_nodes]).sum().backward()
            found.append(blocks[0].static_results.num_bytes)
        if epoch == 0 and rank == world_size - 1:
            g.ndata[written].local.mul_(2)
    return found


def test_what_was_made_of_a_written_field_is_dropped_before_it_is_made_anew(partitions: PartitionStore) -> None:
    """On all ranks, so that there are never both."""
    for before, kept, begin, again in run_ranks(3, kept_around_a_write, partitions.get("power_law", power_law(), 3)):
        assert before == begin == 0
        assert kept == again > 0


def test_a_write_into_another_field_drops_nothing(partitions: PartitionStore) -> None:
    """As of predictions after every epoch: all that was kept was exchanged and made anew each time."""
    folder = partitions.get("power_law", power_law(), 3)
    for before, kept, begin, again in run_ranks(3, kept_around_a_write, folder, written="label"):
        assert before == 0
        assert kept == begin == again > 0


class NormedBeforeKept(nn.Module):
    """The first layer's weights pass through a norm that leaves them as they are."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.norm = dglnn.EdgeWeightNorm("none")
        self.first = dglnn.GraphConv(num_features, 6, norm="none", allow_zero_in_degree=True)
        self.second = dglnn.SAGEConv(6, 4, "mean")

    def forward(self, blocks: Any, x: Tensor) -> Tensor:
        weight = self.norm(blocks[0], blocks[0].edata["w"])
        return self.second(blocks[1], self.first(blocks[0], x, edge_weight=weight).relu())


def train_normed(rank: int, world_size: int, part_config: str) -> tuple[list[Tensor], bool]:
    g = PartitionedGraph.open(part_config)
    model = optimize(NormedBeforeKept(g.ndata["feat"].shape[1]).double())
    sampler = dgl.dataloading.MultiLayerFullNeighborSampler(2, prefetch_node_feats=["feat"], prefetch_edge_feats=["w"])
    loader = FullGraphLoader(
        g, g.owned_nodes("train_mask"), sampler, strategy="depcache", topology=uniform_topology(world_size), model=model
    )
    has_replicas = False
    for _ in range(2):
        model.zero_grad()
        for input_nodes, _, blocks in loader:
            has_replicas |= blocks[0].structure.replicas is not None
            model(blocks, g.ndata["feat"][input_nodes]).pow(2).mean().backward()
    grads = []
    for parameter in model.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        grads.append(parameter.grad / world_size)
    return grads, has_replicas


def test_a_norm_that_is_none_needs_no_edges_of_replicas(partitions: PartitionStore) -> None:
    """Who looked whether its graph is a block had the edges of all vertices of that block."""
    graph = power_law()
    ((expected, _),) = run_ranks(1, train_normed, partitions.get("power_law", graph, 1))
    runs = run_ranks(3, train_normed, partitions.get("power_law", graph, 3))
    assert any(has_replicas for _, has_replicas in runs), "nothing was looked at"
    for grads, _ in runs:
        for grad, of_one in zip(grads, expected, strict=True):
            assert_close(grad, of_one, "3 ranks")


def test_an_evaluation_in_inference_mode_may_come_first(partitions: PartitionStore) -> None:
    folder = partitions.get("power_law", power_law(), 3)
    runs = run_ranks(3, train, folder, Case(kind="gcn_both"), optimized=True, change="evaluates first")
    assert_same(runs, reference(Case(kind="gcn_both")))


def test_dropout_of_the_features_makes_them_differ(partitions: PartitionStore) -> None:
    """Nothing is kept, and the optimised model draws what the plain one draws."""
    folder = partitions.get("power_law", power_law(), 3)
    case = Case(kind="gcn_both", dropout=0.5)
    plain, optimized = (run_ranks(3, train, folder, case, optimized=flag) for flag in (False, True))
    assert all(run.kept_bytes == 0 for run in optimized)
    for a, b in zip(plain, optimized, strict=True):
        assert a.losses == pytest.approx(b.losses, rel=1e-9)


def test_autocast_keeps_nothing(partitions: PartitionStore) -> None:
    folder = partitions.get("power_law", power_law(), 2)
    runs = run_ranks(2, train, folder, Case(kind="gin"), change="autocast")
    assert all(run.kept_bytes == 0 for run in runs)


def run_with_other_eps(rank: int, world_size: int, part_config: str) -> tuple[list[list[Tensor]], list[int]]:
    """Results of DGL's forward and of ours, and gradients of eps, as somebody sets it anew; and the bytes kept."""
    g = PartitionedGraph.open(part_config)
    torch.manual_seed(4)
    layer = dglnn.GINConv(nn.Sequential(nn.Linear(g.ndata["feat"].shape[1], 4), nn.ReLU(), nn.Linear(4, 4)), "sum")
    layer = layer.double()
    ours = optimize(copy.deepcopy(layer))
    loader = FullGraphLoader(
        g, g.owned_nodes("train_mask"), 1, strategy="depcomm", topology=uniform_topology(world_size)
    )
    found: list[list[Tensor]] = [[], []]
    num_bytes = []
    for eps in (0.0, 0.5):
        for input_nodes, _, (block,) in loader:
            x = g.ndata["feat"][input_nodes]
            for module, results in zip((layer, ours), found, strict=True):
                module.eps.fill_(eps)
                results.append(module(block, x).detach())
                # As `torch.func.functional_call` puts it there: learned, and no parameter.
                learned = torch.full((1,), eps, dtype=torch.float64, requires_grad=True)
                constant, module._buffers["eps"] = module.eps, learned
                results.append(torch.autograd.grad(module(block, x).square().sum(), learned)[0])
                module._buffers["eps"] = constant
            num_bytes.append(block.static_results.num_bytes)
    return found, num_bytes


def test_a_kept_sum_serves_any_factor_of_the_rows_themselves(partitions: PartitionStore) -> None:
    folder = partitions.get("power_law", power_law(), 2)
    for (expected, ours), (bytes_before, bytes_after) in run_ranks(2, run_with_other_eps, folder):
        for one, other in zip(ours, expected, strict=True):
            assert_close(one, other, "result, gradient")
        assert not torch.allclose(expected[0], expected[2])
        assert float(expected[1].abs()) > 0.0
        assert bytes_before == bytes_after


def test_it_can_be_switched_off(partitions: PartitionStore) -> None:
    folder = partitions.get("power_law", power_law(), 3)
    runs = run_ranks(3, train, folder, Case(kind="gcn_both"), optimized=True, keep_static=False)
    assert_same(runs, reference(Case(kind="gcn_both")))
    for run in runs:
        assert run.kept_bytes == 0
        assert run.first_layer_exchanges[0] == run.first_layer_exchanges[1] > 0


def plan_both_ways(rank: int, world_size: int, part_config: str) -> tuple[list[bool], list[float], list[int]]:
    g = PartitionedGraph.open(part_config)
    model = optimize(Case(kind="gcn_both", num_layers=3).build(g.ndata["feat"].shape[1]))
    topology = uniform_topology(world_size, bandwidth_bytes_per_s=1e6)
    seeds = g.owned_nodes("train_mask")
    keeps, predicted, cached = [], [], []
    for keep_static in (False, True):
        loader = FullGraphLoader(g, seeds, 3, model=model, topology=topology, keep_static=keep_static)
        assert loader.outcome is not None
        trace = loader.outcome.plan.trace
        keeps.append([layer.keeps_result for layer in trace.layers])
        predicted.append(loader.outcome.predicted_epoch_s)
        cached.append(loader.outcome.plan.num_cached[1])
    return keeps, predicted, cached


def test_the_planner_knows(partitions: PartitionStore) -> None:
    """A kept first layer costs no time, so rows of level 1 are cheap to compute: more of them are, over a slow link."""
    results = run_ranks(3, plan_both_ways, partitions.get("power_law", power_law(), 3))
    for keeps, predicted, cached in results:
        assert keeps == [[False, False, False], [True, False, False]]
        assert predicted[1] < predicted[0]
        assert cached[1] >= cached[0]


def infer_twice(rank: int, world_size: int, part_config: str) -> tuple[Tensor, Tensor, Tensor]:
    g = PartitionedGraph.open(part_config)
    model = optimize(Case(kind="sage_mean").build(g.ndata["feat"].shape[1]))
    loader = FullGraphLoader(g, g.owned_nodes(), 2, model=model, topology=uniform_topology(world_size))
    ids, first = infer(model, g, 2, loader=loader)
    _, second = infer(model, g, 2, loader=loader)
    return g.partition.orig_node_ids[ids - g.nodes.start], first, second


def test_inference_keeps_it_too(partitions: PartitionStore) -> None:
    graph = power_law()
    results = run_ranks(3, infer_twice, partitions.get("power_law", graph, 3))
    model = Case(kind="sage_mean").build(graph.ndata["feat"].shape[1])
    expected = model([graph] * 2, graph.ndata["feat"]).detach()
    for ids, first, second in results:
        assert_close(first, expected[ids], "first inference")
        assert torch.equal(first, second)


def sum_kept_fields(rank: int, world_size: int, part_config: str) -> tuple[Tensor, list[list[Tensor]], list[int]]:
    """One layer sums two prefetched fields of one shape by the same functions, in every epoch."""
    g = PartitionedGraph.open(part_config)
    g.ndata["other"] = torch.sin(g.ndata["feat"].local)
    sampler = dgl.dataloading.MultiLayerFullNeighborSampler(1, prefetch_node_feats=["feat", "other"])
    loader = FullGraphLoader(g, g.owned_nodes(), sampler, plan=[torch.empty(0, dtype=torch.int64)])
    sums, num_exchanges = [], []
    for _ in range(EPOCHS):
        for _, _, (block,) in loader:
            g.communicator.clock.drain()
            for name in ("feat", "other"):
                block.update_all(fn.copy_u(name, "m"), fn.sum("m", f"of_{name}"))
            sums.append([block.dstdata["of_feat"].clone(), block.dstdata["of_other"].clone()])
            num_exchanges.append(len(g.communicator.clock.drain()))
    return g.partition.orig_node_ids[loader.seeds - g.nodes.start], sums, num_exchanges


def test_sums_of_two_fields_stay_kept_beside_each_other(partitions: PartitionStore) -> None:
    """They went by what is done, not to what, so that each drove out the other."""
    graph = power_law()
    graph.ndata["other"] = torch.sin(graph.ndata["feat"])
    for name in ("feat", "other"):
        graph.update_all(fn.copy_u(name, "m"), fn.sum("m", f"of_{name}"))
    for ids, sums, num_exchanges in run_ranks(3, sum_kept_fields, partitions.get("power_law", power_law(), 3)):
        assert num_exchanges == [2, 0, 0]
        for epoch, (of_feat, of_other) in enumerate(sums):
            assert_close(of_feat, graph.ndata["of_feat"][ids], f"epoch {epoch}: sums of the first field")
            assert_close(of_other, graph.ndata["of_other"][ids], f"epoch {epoch}: sums of the other")


def sums_after_writes(rank: int, world_size: int, part_config: str) -> tuple[Tensor, list[Tensor]]:
    """A script reads once, and writes into what it has: between epochs, in one, and past PyTorch's count of writes."""
    g = PartitionedGraph.open(part_config)
    nothing = [torch.empty(0, dtype=torch.int64)]
    sampler = dgl.dataloading.MultiLayerFullNeighborSampler(1, prefetch_edge_feats=["w"])
    loader = FullGraphLoader(g, g.owned_nodes(), sampler, plan=nothing)
    x, sums = torch.empty(0), []
    for epoch in range(5):
        if epoch == 1:
            x.mul_(2.0)
        elif epoch == 4:
            x.data.mul_(2.0)
        for input_nodes, _, (block,) in loader:
            if epoch == 0:
                x = g.ndata["feat"][input_nodes]
            if epoch == 2:
                block.edata["w"].mul_(3.0)
            with block.local_scope():
                block.srcdata["h"] = x
                block.update_all(fn.u_mul_e("h", "w", "m"), fn.sum("m", "y"))
                sums.append(block.dstdata["y"].clone())
    return g.partition.orig_node_ids[loader.seeds - g.nodes.start], sums


def test_what_was_written_into_in_place_is_summed_anew(partitions: PartitionStore) -> None:
    graph = power_law()
    with graph.local_scope():
        graph.update_all(fn.u_mul_e("feat", "w", "m"), fn.sum("m", "y"))
        expected = graph.ndata["y"]
    for ids, sums in run_ranks(3, sums_after_writes, partitions.get("power_law", graph, 3)):
        # What the script has read is its own; what was prefetched is there anew in every epoch.
        for factor, found in zip((1.0, 2.0, 6.0, 2.0, 4.0), sums, strict=True):
            assert_close(found, factor * expected[ids], f"sums times {factor}")


class _Replaced(nn.Module):
    """One `SAGEConv` whose product of in-neighbours is something else."""

    def __init__(self, way: str, num_features: int, aggregator: str) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.conv = dglnn.SAGEConv(num_features, 3, aggregator)
        if way == "function":
            self.conv.fc_neigh = nn.Sequential(nn.Linear(num_features, 3), nn.ReLU())
        elif way == "bias":
            self.conv.fc_neigh = nn.Linear(num_features, 3)
            nn.init.normal_(self.conv.fc_neigh.bias)
        elif way == "hook":
            self.conv.fc_neigh.register_forward_hook(lambda module, args, output: output.relu())
        elif way == "forward":
            linear = self.conv.fc_neigh
            linear.forward = lambda x: F.linear(x, linear.weight).abs()
        self.double()

    def forward(self, blocks: list[Any], x: Tensor) -> Tensor:
        out: Tensor = self.conv(blocks[0], x)
        return out


def run_replaced(rank: int, world_size: int, part_config: str) -> dict[tuple[str, str], float]:
    """Returns how far the optimised layer is from DGL's own, for each way and aggregator."""
    g = PartitionedGraph.open(part_config)
    found = {}
    for aggregator in ("mean", "gcn"):
        for way in ("none", "function", "bias", "hook", "forward"):
            results = []
            for is_optimized in (False, True):
                model = _Replaced(way, g.ndata["feat"].shape[1], aggregator)
                model = optimize(model) if is_optimized else model
                loader = FullGraphLoader(g, g.owned_nodes(), 1, plan=[torch.arange(0)])
                for input_nodes, _, blocks in loader:
                    results.append(model(blocks, g.ndata["feat"][input_nodes]).detach())
            found[aggregator, way] = float((results[0] - results[1]).abs().max())
    return found


def test_rows_are_summed_first_only_before_a_product(partitions: PartitionStore) -> None:
    """What DGL sums is what `fc_neigh` makes of rows that are wider: a ReLU of sums is no sum of ReLUs."""
    for world_size in (1, 2):
        for found in run_ranks(world_size, run_replaced, partitions.get("power_law", power_law(), world_size)):
            assert max(found.values()) < 1e-12, found


def take_greatest_twice(rank: int, world_size: int, part_config: str) -> dict[str, Tensor]:
    """Changes a field in place between two uses of it that receive its rows (sums may travel in their place)."""
    g = PartitionedGraph.open(part_config)
    found = {}
    for name, mode in {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}.items():
        with mode():
            for input_nodes, _, blocks in FullGraphLoader(g, g.owned_nodes(), 1, plan=[torch.arange(0)]):
                with blocks[0].local_scope():
                    h = g.ndata["feat"][input_nodes] * 1.0
                    blocks[0].srcdata["h"] = h
                    blocks[0].update_all(fn.copy_u("h", "m"), fn.max("m", "y"))
                    h.mul_(2.0)
                    blocks[0].update_all(fn.copy_u("h", "m"), fn.max("m", "z"))
                    found[name] = blocks[0].dstdata["z"] - 2.0 * blocks[0].dstdata["y"]
    return found


def count_fields_that_travel(rank: int, world_size: int, part_config: str) -> list[int]:
    g = PartitionedGraph.open(part_config)
    found = []
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            for input_nodes, _, blocks in FullGraphLoader(g, g.owned_nodes(), 1, plan=[torch.arange(0)]):
                with blocks[0].local_scope():
                    h = g.ndata["feat"][input_nodes] * 1.0
                    g.communicator.clock.drain()
                    blocks[0].srcdata.update({"el": h[:, :1] * 1.0, "ft": h})
                    blocks[0].complete_sources(("el",))
                    before = len(g.communicator.clock.drain())
                    blocks[0].complete_sources(("ft",))
                    found += [before, len(g.communicator.clock.drain())]
    return found


def test_fields_that_travelled_along_do_not_travel_with_others_again(partitions: PartitionStore) -> None:
    for no_grad, again, inference, named in run_ranks(
        2, count_fields_that_travel, partitions.get("power_law", power_law(), 2)
    ):
        assert (no_grad, inference, again) == (1, 1, 0)
        assert named == 1, "nobody counts writes to it, so it is received at its own use"


def test_fields_changed_in_place_are_received_again_in_inference_mode(partitions: PartitionStore) -> None:
    """Nobody counts the writes to tensors of that mode, and rows received before the change were used again."""
    for found in run_ranks(2, take_greatest_twice, partitions.get("power_law", power_law(), 2)):
        for name, off in found.items():
            assert float(off.abs().max()) < 1e-12, name
