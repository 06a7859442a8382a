# SPDX-License-Identifier: Apache-2.0
"""Layers that sum before they multiply, where the plan says so: the same training as DGL's order."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dgl_hybrid import FullGraphLoader, PartitionedGraph, optimize
from dgl_hybrid.errors import HybridError, PlanError
from dgl_hybrid.exchange.closure import LevelSets
from dgl_hybrid.planner import ModelTimes, ModelTrace, PlannerConfig, load_plan, save_plan, uniform_topology
from dgl_hybrid.training import planning
from dgl_hybrid.training.planning import PlanMaker
from tests.helpers.exactness import LAYERS, assert_close
from tests.helpers.graphs import power_law
from tests.helpers.partitions import PartitionStore
from tests.helpers.thinning import pairwise
from tests.helpers.world import run_ranks

WIDTHS = (5, 16, 3)


class Net(nn.Module):
    """Two layers, the last of which narrows its rows."""

    def __init__(self, kind: str, batch_norm: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.last = (LAYERS[kind](a, b) for a, b in itertools.pairwise(WIDTHS))
        self.norm = nn.BatchNorm1d(WIDTHS[1]) if batch_norm else nn.Identity()

    def forward(self, blocks: list[object], x: torch.Tensor) -> torch.Tensor:
        return self.last(blocks[1], torch.tanh(self.norm(self.first(blocks[0], x))))


def train(
    rank: int, world_size: int, part_config: str, kind: str, strategy: str, folder: str, batch_norm: bool
) -> tuple[list[list[bool]], list[dict[str, torch.Tensor]]]:
    """Trains with slow products, and again with the plan as it was saved."""
    g = PartitionedGraph.open(part_config)
    slow_products = uniform_topology(world_size, dense_flops_per_s=1e6, bandwidth_bytes_per_s=1e8)
    orders, gradients = [], []
    for plan in (None, folder):
        model = optimize(Net(kind, batch_norm).double())
        ddp = nn.parallel.DistributedDataParallel(model) if world_size > 1 else model
        loader = FullGraphLoader(
            g,
            g.owned_nodes("train_mask"),
            2,
            model=None if plan else model,
            strategy=strategy,
            topology=slow_products,
            plan=load_plan(folder, rank) if plan else None,
            autotune=False,
            seed=5,
        )
        if plan is None:
            assert loader.outcome is not None
            assert loader.outcome.plan.trace is not None
            save_plan(loader.outcome.plan, folder)
        orders.append([block.sums_first for block in loader.blocks])
        for input_nodes, seeds, blocks in loader:
            F.cross_entropy(ddp(blocks, g.ndata["feat"][input_nodes]), g.ndata["label"][seeds]).backward()
        gradients.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
        # As README's recipe of a script that is resumed does at each of its checkpoints: a given plan had none.
        assert loader.best_plan is not None
        save_plan(loader.best_plan, folder)
    return orders, gradients


@pairwise(
    kind=["gcn_both", "sage_mean", "sage_gcn", "gin"],
    world_size=[1, 2, 3, 4],
    strategy=["hybrid", "depcache", "depcomm"],
    batch_norm=[False, True],
)
def test_gradients(
    kind: str, world_size: int, strategy: str, batch_norm: bool, partitions: PartitionStore, tmp_path: Path
) -> None:
    graph = power_law()
    model = Net(kind, batch_norm).double()
    mask = graph.ndata["train_mask"].bool()
    F.cross_entropy(model([graph] * 2, graph.ndata["feat"])[mask], graph.ndata["label"][mask]).backward()
    part_config = partitions.get("power_law", graph, world_size)
    for orders, gradients in run_ranks(world_size, train, part_config, kind, strategy, str(tmp_path), batch_norm):
        assert orders == [[False, True]] * 2
        for found in gradients:
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None
                assert_close(found[name], parameter.grad, name)


def load_other_orders(rank: int, world_size: int, part_config: str) -> list[str]:
    """Ranks give plans that were traced in different orders, and a trace of another model."""
    g = PartitionedGraph.open(part_config)
    model = optimize(Net("sage_mean", False).double())
    topology = uniform_topology(world_size, dense_flops_per_s=1e6)
    seeds = g.owned_nodes("train_mask")
    made = FullGraphLoader(g, seeds, 2, model=model, topology=topology, strategy="depcomm").outcome
    assert made is not None
    trace = made.plan.trace
    assert trace is not None
    assert trace.sums_first == (False, True)
    mine = tuple(replace(layer, sums_first=layer.sums_first and rank != 1) for layer in trace.layers)
    short = replace(trace, layers=trace.layers[:1], levels=trace.levels[:2])
    said = []
    for changed in (replace(trace, layers=mine), short if rank == 1 else trace):
        with pytest.raises((ValueError, HybridError)) as failure:
            FullGraphLoader(g, seeds, 2, plan=replace(made.plan, trace=changed))
        said.append(str(failure.value))
    return said


def test_plans_of_other_orders_are_refused_on_all_ranks(partitions: PartitionStore) -> None:
    """Ranks would exchange rows of different widths, or wait for each other."""
    folder = partitions.get("power_law", power_law(), 3)
    for alike, layers in run_ranks(3, load_other_orders, folder):
        assert "sums_first of the plan" in alike
        assert "on rank 1" in alike
        assert "holds the trace of a model of 1 layers, but this one has 2" in layers


def order_of(rank: int, world_size: int, part_config: str, dense_flops_per_s: float, seeds: str) -> list[bool]:
    g = PartitionedGraph.open(part_config)
    topology = uniform_topology(world_size, dense_flops_per_s=dense_flops_per_s)
    nids = g.owned_nodes("train_mask") if seeds == "few" else g.owned_nodes()
    loader = FullGraphLoader(
        g, nids, 2, model=optimize(Net("sage_mean", False).double()), topology=topology, strategy="depcomm"
    )
    return [block.sums_first for block in loader.blocks]


@pytest.mark.parametrize(
    ("dense_flops_per_s", "seeds", "expected"), [(1e6, "few", True), (1e15, "few", False), (1e6, "all", False)]
)
def test_the_order_follows_rates_and_seeds(
    dense_flops_per_s: float, seeds: str, expected: bool, partitions: PartitionStore
) -> None:
    folder = partitions.get("power_law", power_law(), 3)
    for order in run_ranks(3, order_of, folder, dense_flops_per_s, seeds):
        assert order == [False, expected]


def order_within(
    rank: int,
    world_size: int,
    part_config: str,
    strategy: str,
    budget: int,
    dense_flops_per_s: float,
    *,
    is_alike: bool,
) -> list[bool] | str:
    """Returns the order, or what was raised. The first rank may have room for everything."""
    g = PartitionedGraph.open(part_config)
    try:
        loader = FullGraphLoader(
            g,
            g.owned_nodes("train_mask"),
            2,
            model=optimize(Net("sage_mean", False).double()),
            topology=uniform_topology(world_size, dense_flops_per_s=dense_flops_per_s),
            planner=PlannerConfig(strategy=strategy, memory_budget_bytes=budget if is_alike or rank else 1 << 40),
        )
    except PlanError as error:
        return str(error)
    return [block.sums_first for block in loader.blocks]


@pytest.mark.parametrize("is_alike", [True, False])
@pytest.mark.parametrize("strategy", ["hybrid", "depcomm"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_what_a_memory_budget_must_be_does_not_depend_on_the_order_that_is_faster(
    world_size: int, strategy: str, is_alike: bool, partitions: PartitionStore
) -> None:
    """Which is measured, so that the same command was refused in one run and not in another one, and the number of
    bytes that an error named was not always enough.
    """
    folder = partitions.get("power_law", power_law(), world_size)
    slow, fast = 1e6, 1e12

    def order(budget: int, dense_flops_per_s: float) -> list[bool] | str:
        found, *others = run_ranks(
            world_size, order_within, folder, strategy, budget, dense_flops_per_s, is_alike=is_alike
        )
        assert others == [found] * (world_size - 1)
        return found

    assert order(1 << 30, slow) == [False, True]
    assert order(1 << 30, fast) == [False, False]
    said = order(1, slow)
    assert isinstance(said, str)
    assert order(1, fast) == said
    (needed,) = re.findall(r"needs at least (\d+) bytes for its halo rows", said)
    assert order(int(needed), slow) == order(int(needed), fast) == [False, False]
    assert order(int(needed) - 1, slow) == order(int(needed) - 1, fast) == said


def order_that_is_timed(
    rank: int,
    world_size: int,
    part_config: str,
    seconds: list[tuple[float, float] | None],
    bandwidth_bytes_per_s: float = 1e12,
) -> tuple[list[bool], list[tuple[bool, ...]]]:
    """What a rank's loader chooses where it and the others measure these times of the two orders."""
    g = PartitionedGraph.open(part_config)
    asked: list[tuple[bool, ...]] = []

    def orders(trace: ModelTrace, trace_with: Any, *others: Any) -> tuple[ModelTrace, ...]:
        return trace, trace_with([False, True])

    def time(
        self: PlanMaker, model: Any, template: Any, orders: Sequence[ModelTrace], sets: LevelSets
    ) -> list[ModelTimes] | None:
        asked.extend(order.sums_first for order in orders)
        of_rank = seconds[rank]
        if of_rank is None:
            return None
        return [
            ModelTimes(row_s=(0.0,) * 3, edge_s=(0.0,) * 2, fixed_s=of_rank[order.sums_first[1]]) for order in orders
        ]

    topology = uniform_topology(world_size, bandwidth_bytes_per_s=bandwidth_bytes_per_s)
    with (
        mock.patch.object(planning, "propose_orders", orders),
        mock.patch.object(PlanMaker, "time", time),
        mock.patch.object(PlanMaker, "_topology", return_value=topology),
    ):
        loader = FullGraphLoader(
            g, g.owned_nodes("train_mask"), 2, model=optimize(Net("sage_mean", False).double()), strategy="depcomm"
        )
    return [block.sums_first for block in loader.blocks], asked


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ([(1.0, 1.0), (3.0, 1.0), (1.0, 1.0)], True),  # of all ranks together
        ([(1.0, 2.0), (2.0, 1.0), (1.0, 2.0)], False),
        ([(1.0, 0.98), (1.0, 0.98), (1.0, 0.98)], False),  # not by as much as times are off
        ([None, None, None], False),
    ],
)
def test_of_two_orders_the_one_stays_that_is_faster_on_all_ranks_together(
    seconds: list[tuple[float, float] | None], expected: bool, partitions: PartitionStore
) -> None:
    folder = partitions.get("power_law", power_law(), 3)
    for order, asked in run_ranks(3, order_that_is_timed, folder, seconds):
        assert order == [False, expected]
        assert sorted(set(asked)) == [(False, False), (False, True)]


def times_if_one_fails(rank: int, world_size: int, part_config: str, failing: int) -> tuple[list[int], list[bool]]:
    """How many orders a rank is given to time where another cannot time two, and whether plans then go by times."""
    g = PartitionedGraph.open(part_config)
    given: list[int] = []
    priced: list[bool] = []
    cost_model = planning.cost_model

    def orders(trace: ModelTrace, trace_with: Any, *others: Any) -> tuple[ModelTrace, ...]:
        return trace, trace_with([False, True])

    def time_model(model: Any, template: Any, sets: LevelSets, orders: Sequence[ModelTrace], **options: Any) -> Any:
        given.append(len(orders))
        if rank == failing and len(orders) > 1:
            raise MemoryError("no room for the second")
        return [ModelTimes(row_s=(1e-6,) * 3, edge_s=(1e-6,) * 2, fixed_s=1.0) for _ in orders]

    def note(*args: Any, **options: Any) -> Any:
        priced.append(args[3] is not None)
        return cost_model(*args, **options)

    with (
        mock.patch.object(planning, "propose_orders", orders),
        mock.patch.object(planning, "time_model", time_model),
        mock.patch.object(planning, "cost_model", note),
    ):
        loader = FullGraphLoader(
            g, g.owned_nodes("train_mask"), 2, model=optimize(Net("sage_mean", False).double()), autotune=False
        )
    assert [block.sums_first for block in loader.blocks] == [False, False]
    return given, priced


def test_where_only_the_first_order_can_be_timed_its_times_are_kept(partitions: PartitionStore) -> None:
    folder = partitions.get("power_law", power_law(), 3)
    for given, priced in run_ranks(3, times_if_one_fails, folder, 1):
        assert given == [2, 1]
        assert priced == [True]


def test_of_two_orders_the_narrow_rows_stay_where_the_network_is_slow(partitions: PartitionStore) -> None:
    folder = partitions.get("power_law", power_law(), 3)
    seconds = [(1.0, 0.5)] * 3
    for bandwidth, expected in ((1e12, True), (1e3, False)):
        for order, _ in run_ranks(3, order_that_is_timed, folder, seconds, bandwidth):
            assert order == [False, expected], bandwidth
