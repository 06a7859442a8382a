# SPDX-License-Identifier: Apache-2.0
"""Scripts in which one rank is not like the others: no seeds, an error, labels of another kind, another device."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, cast

import dgl
import dgl.nn as dglnn
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dgl_hybrid import FullGraphLoader, PartitionedGraph
from dgl_hybrid.errors import BlockError
from dgl_hybrid.planner import uniform_topology
from tests.helpers.graphs import NUM_CLASSES, NUM_FEATURES, power_law
from tests.helpers.partitions import PartitionStore
from tests.helpers.world import run_ranks, run_ranks_expect_errors
from tests.training.user_scripts import (
    RANKS,
    TwoLayers,
    assert_same_gradients,
    average_gradients,
    open_graph,
    original_ids,
    plain_gradients,
)


class Synchronised(nn.SyncBatchNorm):
    """On the CPU, where PyTorch's own refuses to run."""

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, None, None, self.weight, self.bias, training=True)


def train_synchronised(rank: int, world_size: int, part_config: str) -> str:
    g, plan = open_graph(part_config)
    model = TwoLayers().double()
    model.norm = Synchronised(NUM_FEATURES).double()
    forward = model.forward
    model.forward = lambda blocks, x: forward(blocks, model.norm(x))
    loader = FullGraphLoader(g, g.owned_nodes("train_mask"), 2, plan=plan, seed=7)
    for input_nodes, _, blocks in loader:
        x = g.ndata["feat"][input_nodes]
        try:
            model(blocks, x)
        except BlockError as error:
            model.eval()
            assert model(blocks, x).shape[1] == NUM_CLASSES, "the next call is as any other"
            return str(error)
    return ""


def test_statistics_that_pytorch_would_make_global_are_refused(folder: str) -> None:
    """They count a vertex once for each rank that holds it."""
    for told in run_ranks(RANKS, train_synchronised, folder):
        assert "SyncBatchNorm counts vertices that several ranks hold several times. Leave out convert_sync" in told


class LostPlan:
    """Of a script's own, which reads ids as they are asked for."""

    def __iter__(self) -> Iterator[Tensor]:
        raise OSError("the disk is gone")


def fail_on_one_rank(rank: int, world_size: int, part_config: str, mistake: str) -> None:
    g, plan = open_graph(part_config)
    if mistake == "assertion":
        with g.communicator.agreed():
            assert rank != 1
    given: Any = LostPlan() if rank == 1 else plan
    FullGraphLoader(g, g.owned_nodes("train_mask"), 2, plan=given)


@pytest.mark.parametrize(
    ("mistake", "message"),
    [("assertion", "AssertionError"), ("plan", "OSError: the disk is gone")],
)
def test_a_peers_error_of_unknown_kind_keeps_its_name_and_words(mistake: str, message: str, folder: str) -> None:
    """The other ranks raised an error without words where a peer had failed at an assertion."""
    errors = run_ranks_expect_errors(RANKS, fail_on_one_rank, folder, mistake)
    assert errors[1].type_name == message.partition(":")[0]
    for error in (errors[0], errors[2]):
        assert error.type_name == "HybridError"
        assert f"rank 1 of {RANKS}: {message}" in error.message


def train_without_seeds_on_one_rank(
    rank: int, world_size: int, part_config: str
) -> list[tuple[Tensor, float, list[list[Tensor]]]]:
    """For each kind of emptiness: original ids of this rank's seeds, its part of the loss, gradients."""
    g, plan = open_graph(part_config)
    results = []
    for nothing in ([], np.array([]), torch.tensor([])):
        seeds: Any = nothing if rank == 1 else g.owned_nodes("train_mask")
        loader = FullGraphLoader(g, seeds, 2, plan=plan)
        assert (loader.num_seeds == 0) == (rank == 1)
        model = TwoLayers().double()
        for input_nodes, seeds, blocks in loader:
            loss = F.cross_entropy(model(blocks, g.ndata["feat"][input_nodes]), g.ndata["label"][seeds])
            loss.backward()
            share = loss.item() * loader.loss_weight / world_size
            ids = original_ids(g, seeds)[: loader.num_seeds]
            results.append((ids, share, [average_gradients(model)]))
    return results


def test_an_empty_list_or_array_of_seeds_on_one_rank_is_no_seeds(folder: str) -> None:
    """`[]` and `np.array([])` are floating-point to torch, and were refused as ids that are no integers."""
    by_rank = run_ranks(RANKS, train_without_seeds_on_one_rank, folder)
    seeds = torch.cat([results[0][0] for results in by_rank])
    assert 0 < len(seeds) < int(power_law().ndata["train_mask"].sum()), "rank 1 owns some that are left out"

    def loss_of(model: nn.Module, graph: dgl.DGLGraph, train: Tensor) -> Tensor:
        return F.cross_entropy(model([graph] * 2, graph.ndata["feat"])[seeds], graph.ndata["label"][seeds])

    losses, expected = plain_gradients(loss_of, TwoLayers().double(), epochs=1)
    for kind in range(3):
        assert sum(results[kind][1] for results in by_rank) == pytest.approx(losses[0], rel=1e-9)
        for results in by_rank:
            assert_same_gradients(results[kind][2], expected, f"kind {kind}")


def train_with_class_weights(rank: int, world_size: int, part_config: str) -> list[tuple[float, list[list[Tensor]]]]:
    """For each class that weighs nothing: this rank's loss as it sees it, and gradients. Rank 1 has no seeds."""
    g = PartitionedGraph.open(part_config)
    seeds = g.owned_nodes("train_mask")[: 0 if rank == 1 else None]
    results = []
    for ignored in range(NUM_CLASSES):
        weight = class_weights(ignored)
        denominator = float(weight[g.ndata["label"][seeds]].sum())
        loader = FullGraphLoader(g, seeds, 2, plan=[torch.arange(0)] * 2, loss_denominator=denominator)
        model = TwoLayers().double()
        for input_nodes, ids, blocks in loader:
            logits = model(blocks, g.ndata["feat"][input_nodes])
            loss = F.cross_entropy(logits, g.ndata["label"][ids], weight=weight)
            loss.backward()
            results.append((loss.item(), [average_gradients(model)]))
    return results


def class_weights(ignored: int) -> Tensor:
    weight = torch.arange(1, NUM_CLASSES + 1, dtype=torch.float64)
    weight[ignored] = 0.0
    return weight


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_loss_of_a_borrowed_seed_may_be_nan(world_size: int, partitions: PartitionStore) -> None:
    """The mean over one seed whose class weighs nothing is 0 / 0, and 0 times its gradient was NaN on all ranks."""
    graph = power_law()
    folder = partitions.get("power_law", graph, world_size)
    by_rank = run_ranks(world_size, train_with_class_weights, folder)
    assert any(math.isnan(loss) for loss, _ in by_rank[1]), "the borrowed seed is of some class"
    seeds = torch.cat(run_ranks(world_size, seeds_but_of_rank_one, folder))
    for ignored in range(NUM_CLASSES):

        def loss_of(model: nn.Module, graph: dgl.DGLGraph, train: Tensor, ignored: int = ignored) -> Tensor:
            logits = model([graph, graph], graph.ndata["feat"])[seeds]
            return F.cross_entropy(logits, graph.ndata["label"][seeds], weight=class_weights(ignored))

        _, expected = plain_gradients(loss_of, TwoLayers().double(), epochs=1)
        for results in by_rank:
            assert_same_gradients(results[ignored][1], expected, f"class {ignored} ignored")


def normalise_weights(rank: int, world_size: int, part_config: str) -> None:
    """One weight in the part of rank 1 is 0."""
    g = PartitionedGraph.open(part_config)
    weights = g.edata["w"].local.clone()
    if rank == 1:
        weights[0] = 0.0
    g.edata["w"] = weights
    sampler = dgl.dataloading.NeighborSampler([1], prefetch_edge_feats=["w"])
    loader = FullGraphLoader(g, g.owned_nodes(), sampler, plan=[torch.empty(0, dtype=torch.int64)])
    for _, _, (block,) in loader:
        dglnn.EdgeWeightNorm("both")(block, block.edata["w"])


def test_a_weight_that_is_not_positive_is_refused_on_all_ranks(folder: str) -> None:
    """Its rank raised, and the others waited for it to sum weights of out-edges."""
    errors = run_ranks_expect_errors(RANKS, normalise_weights, folder, timeout=60)
    assert [error.type_name for error in errors] == ["HybridError", "DGLError", "HybridError"]
    for error in errors:
        assert "edge weights must be positive with norm='both'" in error.message
        assert error.rank == 1 or "rank 1 of 3" in error.message


def seeds_but_of_rank_one(rank: int, world_size: int, part_config: str) -> Tensor:
    g = PartitionedGraph.open(part_config)
    return original_ids(g, g.owned_nodes("train_mask")[: 0 if rank == 1 else None])


class OnGpu:
    """What a step asks of a block that it is told is used."""

    layer, device = 1, torch.device("cuda", 0)

    def fields_to_train(self) -> list[torch.Tensor]:
        return []


def test_a_script_that_moves_its_blocks_is_measured_where_it_runs(
    folder_of_one: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a loader on the CPU times of launches were taken for those of epochs, and rates of the CPU for a GPU's."""
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    g = PartitionedGraph.open(folder_of_one)
    loader, moved = FullGraphLoader(g, g.owned_nodes("train_mask"), 2, topology=uniform_topology(1)), OnGpu()
    for _, _, blocks in loader:
        assert blocks[0].on_use is not None
        blocks[0].on_use(cast(Any, moved))
        loader._step.was_trained = True
    assert waited == [OnGpu.device]
    for _ in loader:
        pass
    assert waited == [OnGpu.device] * 2, "before the next epoch, which trained nothing"
    assert loader._choice.maker.device == OnGpu.device
    assert caplog.text.count("the script moves its blocks from cpu to cuda:0") == 1
