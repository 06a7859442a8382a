# SPDX-License-Identifier: Apache-2.0
"""When a loader plans, what it plans for, and changes of plans."""

from __future__ import annotations

import contextlib

import dgl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dgl_hybrid import FullGraphLoader, PartitionedGraph
from dgl_hybrid.errors import BlockError, ExchangeError, PlanError
from dgl_hybrid.planner import PlannerConfig, uniform_topology
from dgl_hybrid.training.loader_arguments import dense_below_of
from tests.helpers.exactness import Case
from tests.helpers.graphs import power_law
from tests.helpers.partitions import PartitionStore
from tests.helpers.world import run_ranks, run_ranks_expect_errors
from tests.training.loader_cases import Centred, OtherHead, open_graph, reference_curve


def train_without_model(rank: int, world_size: int, part_config: str, **options: object) -> list[float]:
    """The loader is built before the model and never told of it."""
    g = PartitionedGraph.open(part_config)
    loader = FullGraphLoader(
        g,
        g.owned_nodes("train_mask"),
        dgl.dataloading.NeighborSampler([10, 25]),
        topology=uniform_topology(world_size),
        batch_size=1024,
        shuffle=True,
        drop_last=False,
    )
    model = Case(kind="gcn_both", **options).build(g.ndata["feat"].shape[1])
    ddp = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    losses = []
    planned = []
    for _ in range(3):
        for input_nodes, seeds, blocks in loader:
            loss = F.cross_entropy(ddp(blocks, g.ndata["feat"][input_nodes]), g.ndata["label"][seeds])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(loss.item() * loader.loss_weight / world_size)
        planned.append(loader.outcome is not None)
    assert planned == [False, True, True]
    return losses


def train_beside_a_normed_one(rank: int, world_size: int, part_config: str, how: str) -> list[float]:
    """Of two models that share a loader the one with batch norm, which planning has to know of; its losses."""
    g, plain = open_graph(part_config)
    normed = Case(kind="gcn_both", batch_norm=True).build(g.ndata["feat"].shape[1])
    given = {"model": normed} if how == "given, second" else {}
    loader = FullGraphLoader(g, g.owned_nodes("train_mask"), 2, topology=uniform_topology(world_size), **given)
    chosen = [OtherHead(plain), plain, normed] if how == "third" else [plain, normed]
    ddps = [nn.parallel.DistributedDataParallel(model) for model in chosen]
    optimizer = torch.optim.SGD(ddps[-1].parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        for input_nodes, seeds, blocks in loader:
            for ddp in ddps:
                with torch.autocast("cpu", enabled=how == "given, second" and ddp is ddps[0]):
                    logits = ddp(blocks, g.ndata["feat"][input_nodes])
                loss = F.cross_entropy(logits, g.ndata["label"][seeds])
                optimizer.zero_grad()
                loss.backward()
            optimizer.step()
        losses.append(loss.item() * loader.loss_weight / world_size)
    outcome = loader.outcome
    assert outcome is not None
    assert outcome.dense_below == 2, "batch norm is over the rows of level 1"
    assert dense_below_of(loader.best_plan, 2) == 2, "so will it be for who is given this plan"
    return losses


@pytest.mark.parametrize("batch_norm", [False, True])
def test_plans_after_the_first_forward_when_not_given_a_model(batch_norm: bool, partitions: PartitionStore) -> None:
    folder = partitions.get("power_law", power_law(), 3)
    by_rank = run_ranks(3, train_without_model, folder, batch_norm=batch_norm)
    total = [sum(losses) for losses in zip(*by_rank, strict=True)]
    assert total == pytest.approx(reference_curve(batch_norm=batch_norm), rel=1e-9)


@pytest.mark.parametrize("how", ["second", "third", "given, second"])
def test_batch_norm_of_any_model_on_a_loader_is_planned_for(how: str, partitions: PartitionStore) -> None:
    """One without comes first in each epoch; from the second on vertices are left out that no model needs."""
    folder = partitions.get("power_law", power_law(), 3)
    by_rank = run_ranks(3, train_beside_a_normed_one, folder, how)
    total = [sum(losses) for losses in zip(*by_rank, strict=True)]
    assert total == pytest.approx(reference_curve(batch_norm=True), rel=1e-9)


def evaluate_twice(rank: int, world_size: int, part_config: str) -> list[bool]:
    """A loader that only ever evaluates plans from its first forward as well, without gradients though it is."""
    g, model = open_graph(part_config)
    planned = []
    for guard in (torch.no_grad, torch.inference_mode):
        loader = FullGraphLoader(g, g.owned_nodes(), 2, topology=uniform_topology(world_size))
        for _ in range(2):
            with guard():
                for input_nodes, _, blocks in loader:
                    model.eval()(blocks, g.ndata["feat"][input_nodes])
            planned.append(loader.outcome is not None)
    return planned


def test_a_loader_that_only_evaluates_plans_too(partitions: PartitionStore) -> None:
    folder = partitions.get("power_law", power_law(), 3)
    assert run_ranks(3, evaluate_twice, folder) == [[False, True, False, True]] * 3


def train_with_given_plan(rank: int, world_size: int, part_config: str, mixes: bool) -> list[float]:
    g, model = open_graph(part_config)
    chosen: nn.Module = Centred(model) if mixes else _Unrepeatable(model)
    loader = FullGraphLoader(g, g.owned_nodes("train_mask"), 2, plan=[torch.arange(0)] * 2)
    ddp = nn.parallel.DistributedDataParallel(chosen)
    losses = []
    for _ in range(3):
        for input_nodes, seeds, blocks in loader:
            loss = F.cross_entropy(ddp(blocks, g.ndata["feat"][input_nodes]), g.ndata["label"][seeds])
            loss.backward()
        losses.append(loss.item())
    return losses


class _Unrepeatable(nn.Module):
    """Works on the graph it knows, not on a made-up one."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.num_rows = model, 0

    def forward(self, blocks: list[object], x: Tensor) -> Tensor:
        self.num_rows = self.num_rows or len(x)
        if len(x) != self.num_rows:
            raise RuntimeError("another graph")
        return self.model(blocks, x)


def test_a_given_plan_does_not_hide_that_a_model_mixes_rows(partitions: PartitionStore) -> None:
    folder = partitions.get("power_law", power_law(), 3)
    errors = run_ranks_expect_errors(3, train_with_given_plan, folder, True)
    assert all("mixes rows of different vertices" in error.message for error in errors)


def test_a_model_that_cannot_be_traced_trains_all_the_same(partitions: PartitionStore) -> None:
    for losses in run_ranks(3, train_with_given_plan, partitions.get("power_law", power_law(), 3), False):
        assert losses[0] == losses[1] == losses[2]


def read_seeds(rank: int, world_size: int, part_config: str) -> tuple[bool, int, int]:
    g, model = open_graph(part_config)
    loader = FullGraphLoader(
        g, g.owned_nodes(), 2, model=model, row_order="locality", autotune=float("inf"), planner=PlannerConfig()
    )
    first, orders, plans = loader.seeds.clone(), set(), set()
    is_kept = True
    while not loader.is_settled:
        for input_nodes, seeds, blocks in loader:
            assert loader.outcome is not None
            plans.add(loader.outcome.plan.num_cached)
            orders.add(tuple(input_nodes.tolist()))
            is_kept &= torch.equal(seeds, first) and torch.equal(blocks[-1].dstdata[dgl.NID], first)
            F.cross_entropy(model(blocks, g.ndata["feat"][input_nodes]), g.ndata["label"][seeds]).backward()
    return is_kept, len(plans), len(orders)


def test_seeds_keep_their_order_when_plans_change(partitions: PartitionStore) -> None:
    """Scripts may read labels once."""
    for is_kept, num_plans, num_orders in run_ranks(2, read_seeds, partitions.get("power_law", power_law(), 2)):
        assert num_plans > 1
        assert num_orders > 1
        assert is_kept


def interrupt_change_of_plans(rank: int, world_size: int, part_config: str) -> tuple[str, str]:
    g, model = open_graph(part_config)
    loader = FullGraphLoader(g, g.owned_nodes("train_mask"), 2, model=model, topology=uniform_topology(1))
    assert loader.outcome is not None

    def interrupted(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    loader._builder.build = interrupted  # type: ignore[method-assign, assignment]
    with contextlib.suppress(KeyboardInterrupt):
        loader._follow(loader.outcome)
    said = []
    for _ in range(2):
        try:
            next(iter(loader))
        except RuntimeError as error:
            said.append(str(error))
    return said[0], said[1]


def test_a_change_of_plans_that_was_interrupted_is_told(partitions: PartitionStore) -> None:
    (said,) = run_ranks(1, interrupt_change_of_plans, partitions.get("power_law", power_law(), 1))
    assert set(said) == {"a change of plans was interrupted and has left no blocks: make the loader anew"}


def plan_where_nothing_fits_any_more(rank: int, world_size: int, part_config: str, error: Exception) -> tuple[str, str]:
    g, model = open_graph(part_config)
    loader = FullGraphLoader(
        g, g.owned_nodes("train_mask"), 2, model=model, topology=uniform_topology(world_size), autotune=float("inf")
    )
    while not loader.is_settled:
        for input_nodes, seeds, blocks in loader:
            F.cross_entropy(model(blocks, g.ndata["feat"][input_nodes]), g.ndata["label"][seeds]).backward()

    def nothing_fits(*args: object, **kwargs: object) -> None:
        raise error

    outcome = loader.outcome
    assert outcome is not None
    assert loader._choice.trials is not None
    loader._choice.maker.make = nothing_fits  # type: ignore[method-assign, assignment]
    loader._choice.maker._given_topology = None  # rates are measured again
    before = outcome.plan.strategy
    loader._follow(loader._choice.plan_anew())
    for input_nodes, seeds, blocks in loader:
        F.cross_entropy(model(blocks, g.ndata["feat"][input_nodes]), g.ndata["label"][seeds]).backward()
    assert loader.outcome is not None
    return before, loader.outcome.plan.strategy


@pytest.mark.parametrize(
    "error",
    [
        PlanError("the plan needs at least 9 bytes for halo rows"),
        BlockError("the model does not use the blocks of layers [1]"),  # as it is by now: it trains all the same
    ],
)
def test_where_no_plan_is_found_after_a_drift_those_of_before_stay(
    error: Exception, partitions: PartitionStore
) -> None:
    by_rank = run_ranks(2, plan_where_nothing_fits_any_more, partitions.get("power_law", power_law(), 2), error)
    assert by_rank[0] == by_rank[1]


def test_ranks_that_part_ways_as_they_plan_anew_are_told(partitions: PartitionStore) -> None:
    folder, error = partitions.get("power_law", power_law(), 2), ExchangeError("a peer left")
    for raised in run_ranks_expect_errors(2, plan_where_nothing_fits_any_more, folder, error):
        assert (raised.type_name, raised.message) == ("ExchangeError", "a peer left")


def plan_for_other_ranks(rank: int, world_size: int, part_config: str) -> None:
    g = PartitionedGraph.open(part_config)
    model = Case(kind="gcn_both").build(g.ndata["feat"].shape[1])
    FullGraphLoader(g, g.owned_nodes(), 2, model=model, topology=uniform_topology(world_size + 2))


def test_a_topology_of_other_ranks_is_named(partitions: PartitionStore) -> None:
    for error in run_ranks_expect_errors(2, plan_for_other_ranks, partitions.get("power_law", power_law(), 2)):
        assert "the topology is of 4 ranks, and 2 are running" in error.message
