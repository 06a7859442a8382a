# SPDX-License-Identifier: Apache-2.0
"""Masks and states: what random calls of a step draw, again, later, and after a state was loaded."""

from __future__ import annotations

from typing import Any

import dgl
import dgl.nn as dglnn
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dgl_hybrid import FullGraphLoader, PartitionedGraph
from dgl_hybrid.planner import PlannerConfig, uniform_topology
from dgl_hybrid.training.gradients import average_gradients
from tests.helpers.exactness import Case, assert_close
from tests.helpers.graphs import power_law
from tests.helpers.partitions import PartitionStore
from tests.helpers.world import run_ranks, run_ranks_expect_errors
from tests.training.loader_cases import open_graph


class Checkpointed(nn.Module):
    def __init__(self, in_feats: int, use_reentrant: bool | None) -> None:
        super().__init__()
        self.first = dglnn.GraphConv(in_feats, 6, allow_zero_in_degree=True)
        self.second = dglnn.GATConv(6, 3, 1, feat_drop=0.2, attn_drop=0.3, allow_zero_in_degree=True)
        self.dropout = nn.Dropout(0.5)
        self.use_reentrant = use_reentrant

    def _first(self, block: object, x: Tensor) -> Tensor:
        return torch.tanh(self.first(block, self.dropout(x)))

    def forward(self, blocks: list[object], x: Tensor) -> Tensor:
        if self.use_reentrant is None:
            h = self._first(blocks[0], x)
            return self.second(blocks[1], self.dropout(h)).mean(1)
        h = checkpoint(self._first, blocks[0], x, use_reentrant=self.use_reentrant)
        return checkpoint(self.second, blocks[1], self.dropout(h), use_reentrant=self.use_reentrant).mean(1)


def train_checkpointed(rank: int, world_size: int, part_config: str, use_reentrant: bool | None) -> list[Tensor]:
    g = PartitionedGraph.open(part_config)
    torch.manual_seed(0)
    model = Checkpointed(g.ndata["feat"].shape[1], use_reentrant).double()
    topology = uniform_topology(world_size)
    loader = FullGraphLoader(g, g.owned_nodes("train_mask"), 2, strategy="depcomm", topology=topology, seed=1)
    grads = []
    for _ in range(2):
        for input_nodes, seeds, blocks in loader:
            x = g.ndata["feat"][input_nodes].clone().requires_grad_()
            loss = F.cross_entropy(model(blocks, x), g.ndata["label"][seeds])
            model.zero_grad()
            loss.backward()
            for parameter in model.parameters():
                grads.append(g.communicator.sum_(parameter.grad.clone()) / world_size)
    return grads


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_repeats_masks_and_exchanges(use_reentrant: bool, partitions: PartitionStore) -> None:
    folder = partitions.get("power_law", power_law(), 3)
    plain = run_ranks(3, train_checkpointed, folder, None)
    recomputed = run_ranks(3, train_checkpointed, folder, use_reentrant)
    alone = run_ranks(1, train_checkpointed, partitions.get("power_law", power_law(), 1), None)
    for a, b, c in zip(plain[0], recomputed[0], alone[0], strict=True):
        assert_close(b, a, "recomputed gradient")
        assert_close(a, c, "gradient on three ranks")


def train_epoch(
    g: PartitionedGraph, loader: FullGraphLoader, model: nn.Module, optimizer: torch.optim.Optimizer
) -> float:
    for input_nodes, seeds, blocks in loader:
        loss = F.cross_entropy(model(blocks, g.ndata["feat"][input_nodes]), g.ndata["label"][seeds])
        optimizer.zero_grad()
        loss.backward()
        average_gradients(model, loader)
        optimizer.step()
    return loss.item()


def train_with_looks(rank: int, world_size: int, part_config: str, between: str) -> list[float]:
    """Losses of training steps with dropout, each after something that is no training step."""
    g = PartitionedGraph.open(part_config)
    model = Case(kind="gcn_both", dropout=0.5).build(g.ndata["feat"].shape[1])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = FullGraphLoader(g, g.owned_nodes("train_mask"), 2, plan=[torch.arange(0)] * 2, seed=3)
    losses = []
    for _ in range(3):
        if between == "evaluation":
            model.eval()
            for input_nodes, _, blocks in loader:
                with torch.no_grad():
                    model(blocks, g.ndata["feat"][input_nodes])
            model.train()
        elif between == "a look":
            _, seeds, blocks = next(iter(loader))
            assert blocks[-1].num_dst_nodes() == len(seeds)
        losses.append(train_epoch(g, loader, model, optimizer))
    return losses


@pytest.mark.parametrize("between", ["evaluation", "a look"])
def test_what_draws_no_masks_leaves_those_of_later_steps_alone(between: str, partitions: PartitionStore) -> None:
    """Every batch that was taken counted as a step, so a run with other evaluations was another run."""
    folder = partitions.get("power_law", power_law(), 2)
    plain = run_ranks(2, train_with_looks, folder, "nothing")
    assert run_ranks(2, train_with_looks, folder, between) == plain
    assert len(set(plain[0])) == 3


def train_and_resume(rank: int, world_size: int, part_config: str, resumed: str) -> tuple[list[float], dict[str, int]]:
    """Losses of four epochs, the last two of them by another loader if the run is interrupted; the last state."""
    g = PartitionedGraph.open(part_config)
    model = Case(kind="gcn_both", dropout=0.5).build(g.ndata["feat"].shape[1])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def make_loader(seed: int) -> FullGraphLoader:
        return FullGraphLoader(g, g.owned_nodes("train_mask"), 2, plan=[torch.arange(0)] * 2, seed=seed)

    loader = make_loader(3)
    assert loader.state_dict() == {"steps": 0, "seed": 3}
    losses = []
    for epoch in range(4):
        if epoch == 2:
            if resumed == "after an evaluation":
                with torch.no_grad():
                    input_nodes, _, blocks = next(iter(loader))
                    model.eval()(blocks, g.ndata["feat"][input_nodes])
                    model.train()
            state = loader.state_dict()
            assert state == {"steps": 2, "seed": 3}
            if resumed:
                loader = make_loader(4)
                if resumed == "after a step of its own":
                    input_nodes, _, blocks = next(iter(loader))
                    model(blocks, g.ndata["feat"][input_nodes])
                if resumed != "without the state":
                    loader.load_state_dict(state)
        losses.append(train_epoch(g, loader, model, optimizer))
    return losses, loader.state_dict()


def test_a_loader_that_loads_a_state_goes_on_with_the_same_masks(partitions: PartitionStore) -> None:
    """A run that went on from a checkpoint drew the masks of its first epochs again."""
    folder = partitions.get("power_law", power_law(), 2)
    straight = run_ranks(2, train_and_resume, folder, "")
    for resumed in ("at once", "after an evaluation", "after a step of its own"):
        assert run_ranks(2, train_and_resume, folder, resumed) == straight, resumed
    assert [state for _, state in straight] == [{"steps": 4, "seed": 3}] * 2
    other = run_ranks(2, train_and_resume, folder, "without the state")
    for (losses, _), (expected, _) in zip(other, straight, strict=True):
        assert losses[:2] == expected[:2]
        assert losses[2] != expected[2], "masks of another seed"


def load_with_numbers_of_numpy(rank: int, world_size: int, part_config: str) -> list[int | None]:
    g, _ = open_graph(part_config)
    nothing = [torch.arange(0)] * 2
    rows = [
        FullGraphLoader(g, g.owned_nodes("train_mask"), 2, plan=nothing, chunk_rows=number)._builder.chunk_rows  # type: ignore[arg-type]
        for number in (np.int64(5), torch.tensor(6), 7.0, None)
    ]
    for share in (np.float32(0.5), np.int64(1), torch.tensor(0.1), np.True_):
        FullGraphLoader(g, g.owned_nodes("train_mask"), 2, plan=nothing, autotune=share)  # type: ignore[arg-type]
    return rows


def test_numbers_of_numpy_are_numbers(partitions: PartitionStore) -> None:
    folder = partitions.get("power_law", power_law(), 1)
    assert run_ranks(1, load_with_numbers_of_numpy, folder) == [[5, 6, 7, None]]
    for budget in (np.int64(10**9), np.float32(1e9), torch.tensor(1e9)):
        PlannerConfig(memory_budget_bytes=budget)  # type: ignore[arg-type]


def load_wrong_states(rank: int, world_size: int, part_config: str) -> tuple[dict[str, str], dict[str, int]]:
    g, _ = open_graph(part_config)
    loader = FullGraphLoader(g, g.owned_nodes("train_mask"), 2, plan=[torch.arange(0)] * 2, seed=3)
    messages = {}
    wrong: dict[str, dict[str, Any]] = {
        "of something else": {"steps": 1},
        "with more": {"steps": 1, "seed": 2, "epoch": 3},
        "as text": {"steps": "1", "seed": 2},
        "negative": {"steps": -1, "seed": 2},
    }
    for name, state in wrong.items():
        try:
            loader.load_state_dict(state)
        except ValueError as error:
            messages[name] = str(error)
    unchanged = loader.state_dict()
    loader.load_state_dict({"steps": 0, "seed": -1})  # any integer is one
    assert loader.state_dict()["seed"] == -1
    return messages, unchanged


def test_a_wrong_state_is_refused(partitions: PartitionStore) -> None:
    ((messages, state),) = run_ranks(1, load_wrong_states, partitions.get("power_law", power_law(), 1))
    assert set(messages) == {"of something else", "with more", "as text", "negative"}
    for message in messages.values():
        assert "expected what FullGraphLoader.state_dict returns: steps and seed (got {" in message
    assert state == {"steps": 0, "seed": 3}, "refused, it changes nothing"


def train_on_a_ring(rank: int, world_size: int, part_config: str) -> tuple[float, int]:
    """Every vertex has one in-edge, so vertices and edges are equally many at every level."""
    g = PartitionedGraph.open(part_config)
    torch.manual_seed(0)
    model = Checkpointed(g.ndata["feat"].shape[1], None).double()
    foreign = torch.arange(g.num_nodes())
    foreign = foreign[~g.nodes.is_owned(foreign)]
    loader = FullGraphLoader(g, g.owned_nodes(), 2, plan=[foreign, foreign], seed=1)
    g.communicator.clock.drain()
    for input_nodes, seeds, blocks in loader:
        loss = F.cross_entropy(model(blocks, g.ndata["feat"][input_nodes]), g.ndata["label"][seeds])
        loss.backward()
    exchanges = sum(event.layer > 0 for event in g.communicator.clock.drain())
    return loss.item() * loader.loss_weight / world_size, exchanges


def test_masks_where_vertices_and_edges_are_equally_many(partitions: PartitionStore) -> None:
    ids = torch.arange(12)
    ring = dgl.graph((ids, (ids + 1) % 12))
    ring.ndata["feat"] = torch.randn(12, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ring.ndata["label"] = ids % 3
    curves = [run_ranks(p, train_on_a_ring, partitions.get("ring", ring, p, "contiguous")) for p in (1, 2, 3)]
    totals = [sum(loss for loss, _ in results) for results in curves]
    assert totals == pytest.approx([totals[0]] * 3, rel=1e-9)
    # Everything is cached: no rank receives anything, and all know it.
    assert all(exchanges == 0 for results in curves for _, exchanges in results)


def make_several(rank: int, world_size: int, part_config: str) -> list[int]:
    g, _ = open_graph(part_config)
    torch.manual_seed(10 + rank)
    nothing = [torch.arange(0)] * 2
    loaders = [FullGraphLoader(g, g.owned_nodes("train_mask"), 2, plan=nothing) for _ in range(3)]
    return [loader.seed for loader in loaders]


def test_loaders_made_one_after_another_draw_other_masks(partitions: PartitionStore) -> None:
    """A script that makes one in every epoch trained the same subnetwork for ever."""
    first, second = run_ranks(2, make_several, partitions.get("power_law", power_law(), 2))
    assert first == second
    assert first[0] == 10
    assert len(set(first)) == 3


def load_state_on_one_rank(rank: int, world_size: int, part_config: str) -> None:
    g, _ = open_graph(part_config)
    loader = FullGraphLoader(g, g.owned_nodes("train_mask"), 2, plan=[torch.arange(0)] * 2, seed=3)
    if rank == 0:
        loader.load_state_dict({"steps": 7, "seed": 3})
    next(iter(loader))


def test_a_state_of_one_rank_alone_is_refused(partitions: PartitionStore) -> None:
    folder = partitions.get("power_law", power_law(), 2)
    errors = run_ranks_expect_errors(2, load_state_on_one_rank, folder)
    assert len(errors) == 2
    for error in errors:
        assert "rank 0 is at step 7 of seed 3, rank 1 at step 0 of seed 3" in error.message


def draw_after_a_change_of_plans(rank: int, world_size: int, part_config: str) -> list[bool]:
    g, model = open_graph(part_config)
    loader = FullGraphLoader(g, g.owned_nodes("train_mask"), 2, model=model, topology=uniform_topology(1))
    found = []
    for epoch in range(4):
        if epoch == 2:
            loader._follow(loader.outcome)
        for input_nodes, _, blocks in loader:
            model(blocks, F.dropout(g.ndata["feat"][input_nodes], 0.5)).sum().backward()
            loader._step.next_random_call()
            found.append(loader._step.is_first_draw)
    return found


def test_ranks_ask_each_other_again_what_they_draw_for_once_plans_have_changed(partitions: PartitionStore) -> None:
    """Other plans have other rows."""
    (found,) = run_ranks(1, draw_after_a_change_of_plans, partitions.get("power_law", power_law(), 1))
    assert found == [True, False, True, False]
