# SPDX-License-Identifier: Apache-2.0
"""Batch norm and dropout of a model's parts that are not given blocks: pieces that a script calls itself, parts before
the first layer of a model that holds its blocks in an object, parts that a checkpoint repeats inside the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import dgl
import dgl.nn as dglnn
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dgl_hybrid import FullGraphLoader, PartitionedGraph, average_gradients
from dgl_hybrid.errors import BlockError
from dgl_hybrid.planner import uniform_topology
from tests.helpers.exactness import Case, assert_close, forced_plan
from tests.helpers.graphs import NUM_CLASSES, NUM_FEATURES, power_law
from tests.helpers.partitions import PartitionStore
from tests.helpers.thinning import each_value
from tests.helpers.world import run_ranks

WIDTH = 4
WAYS = ("whole", "pieces", "object", "reentrant", "nonreentrant", "reentrant after another loader")


class Held:
    """An object of the script's, which cannot be looked into."""

    def __init__(self, blocks: Sequence[Any]) -> None:
        self.blocks = blocks


class Normed(nn.Module):
    """Batch norm before the first layer and between the two, with dropout where one is asked for."""

    def __init__(self, way: str, dropout: float) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.way = way
        self.before = nn.Sequential(nn.Linear(NUM_FEATURES, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(dropout))
        self.first = dglnn.SAGEConv(WIDTH, WIDTH, "mean")
        self.between = nn.Sequential(
            *(nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout)),
            *(nn.BatchNorm1d(WIDTH, momentum=0.3), nn.Tanh()),
        )
        self.second = dglnn.SAGEConv(WIDTH, NUM_CLASSES, "mean")
        self.double()

    def forward(self, blocks: Any, x: Tensor) -> Tensor:
        if self.way == "object":
            h = self.before(x)
            first, second = blocks.blocks
            out: Tensor = self.second(second, self.between(self.first(first, h)))
        else:
            out = self.second(blocks[1], self.part(self.between, self.first(blocks[0], self.part(self.before, x))))
        return out

    def part(self, module: nn.Module, h: Tensor) -> Tensor:
        if "reentrant" not in self.way:
            out: Tensor = module(h)
        else:
            out = checkpoint(module, h, use_reentrant=self.way.startswith("reentrant"))
        return out

    def run(self, blocks: Sequence[Any], x: Tensor) -> Tensor:
        """The model as the script calls it."""
        if self.way == "pieces":
            h = x
            for module in self.before:
                h = module(h)
            h = self.first(blocks[0], h)
            for module in self.between:
                h = module(h)
            out: Tensor = self.second(blocks[1], h)
        else:
            out = self(Held(blocks) if self.way == "object" else blocks, x)
        return out


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Of two epochs, one after another."""

    inputs: Tensor
    """Original ids of the input nodes."""
    input_gradients: list[Tensor]
    losses: list[Tensor]
    state: dict[str, Tensor]
    """Weights, and running statistics."""


TAKEN: dict[str, Callable[[FullGraphLoader], Iterable[Any]]] = {
    "in a loop": lambda loader: loader,
    "as a list": list,
    "by next": lambda loader: [next(iter(loader))],
}


def train(rank: int, world_size: int, part_config: str, way: str, dropout: float, taken: str = "in a loop") -> Trained:
    g = PartitionedGraph.open(part_config)
    assert g.partition.orig_node_ids is not None
    model = Normed(way, dropout)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    plan = forced_plan(g, Case(kind="sage_mean", plan="random:1:0.5"))
    loader = FullGraphLoader(g, g.owned_nodes("train_mask"), 2, plan=plan, seed=3)
    other = FullGraphLoader(g, g.owned_nodes(), 1, plan=[torch.arange(0)])
    input_gradients, losses, held = [], [], []
    for _ in range(2):
        for input_nodes, seeds, blocks in TAKEN[taken](loader):
            x = g.ndata["feat"][input_nodes].clone().requires_grad_()
            loss = F.cross_entropy(model.run(blocks, x), g.ndata["label"][seeds])
            if way.endswith("after another loader"):
                held.append(next(iter(other)))
            optimizer.zero_grad()
            loss.backward()
            average_gradients(model, loader)
            optimizer.step()
            assert x.grad is not None
            input_gradients.append(x.grad / world_size)
            losses.append(g.communicator.sum_(loss.detach() * loader.loss_weight / world_size))
    inputs = g.fetch_nodes(g.partition.orig_node_ids, input_nodes)
    return Trained(inputs=inputs, input_gradients=input_gradients, losses=losses, state=model.state_dict())


def train_whole(way: str) -> Trained:
    """With plain DGL in one process."""
    graph = power_law()
    model = Normed(way, 0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    is_seed = graph.ndata["train_mask"]
    input_gradients, losses = [], []
    for _ in range(2):
        x = graph.ndata["feat"].clone().requires_grad_()
        loss = F.cross_entropy(model.run([graph, graph], x)[is_seed], graph.ndata["label"][is_seed])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert x.grad is not None
        input_gradients.append(x.grad)
        losses.append(loss.detach())
    return Trained(inputs=graph.nodes(), input_gradients=input_gradients, losses=losses, state=model.state_dict())


def assert_alike(ranks: list[Trained], expected: Trained, what: str) -> None:
    for epoch, gradients in enumerate(expected.input_gradients):
        total = torch.zeros_like(gradients)
        for trained in ranks:
            total.index_add_(0, trained.inputs, trained.input_gradients[epoch])
        whole = torch.zeros_like(gradients).index_add_(0, expected.inputs, gradients)
        assert_close(total, whole, f"{what}: input gradients in epoch {epoch}")
    for trained in ranks:
        for loss, other in zip(trained.losses, expected.losses, strict=True):
            assert_close(loss, other, f"{what}: loss")
        for name, value in trained.state.items():
            assert_close(value, expected.state[name], f"{what}: {name}")


@each_value(way=WAYS, world_size=[3, 2, 4, 1])
def test_batch_norm_is_that_of_the_whole_graph_in_every_part(
    way: str, world_size: int, partitions: PartitionStore
) -> None:
    """Statistics were those of each rank's rows where no block was in use, silently. Running ones, too: a checkpoint
    updates them twice, as it does without ranks.
    """
    folder = partitions.get("power_law", power_law(), world_size)
    assert_alike(run_ranks(world_size, train, folder, way, 0.0), train_whole(way), f"{way} on {world_size} ranks")


@pytest.mark.parametrize("way", WAYS)
def test_dropout_is_that_of_one_rank_in_every_part(way: str, partitions: PartitionStore) -> None:
    graph = power_law()
    (alone,) = run_ranks(1, train, partitions.get("power_law", graph, 1), way, 0.4)
    assert_alike(run_ranks(3, train, partitions.get("power_law", graph, 3), way, 0.4), alone, way)


@each_value(way=["pieces", "object"], taken=list(TAKEN))
def test_however_a_script_takes_the_batch(way: str, taken: str, partitions: PartitionStore) -> None:
    """Who took it as a list had ended the epoch before it was trained on: each rank normed and dropped out its own."""
    graph = power_law()
    folder = partitions.get("power_law", graph, 3)
    assert_alike(run_ranks(3, train, folder, way, 0.0, taken), train_whole(way), f"{way}, {taken}")
    (alone,) = run_ranks(1, train, partitions.get("power_law", graph, 1), way, 0.4)
    assert_alike(run_ranks(3, train, folder, way, 0.4, taken), alone, f"{way}, {taken}, dropout")


def drop_in_pieces(rank: int, world_size: int, part_config: str) -> dict[str, str]:
    """Calls modules that drop out inside of themselves on the rows of a level, and on others."""
    g = PartitionedGraph.open(part_config)
    loader = FullGraphLoader(g, g.owned_nodes(), 2, plan=[torch.arange(0)] * 2)
    first = dglnn.SAGEConv(NUM_FEATURES, WIDTH, "mean").double()
    recurrence = nn.GRU(WIDTH, WIDTH, 2, dropout=0.1).double()
    heads = nn.MultiheadAttention(WIDTH, 2, dropout=0.1, batch_first=True).double()
    said = {}
    for input_nodes, _, blocks in loader:
        h = first(blocks[0], g.ndata["feat"][input_nodes]).detach()
        calls = {
            "recurrence": (recurrence, [h]),
            "recurrence of one row": (recurrence, [h[:1]]),
            "heads": (heads, [h[:, None]] * 3),
        }
        for name, (module, arguments) in calls.items():
            try:
                module(*arguments)
                said[name] = ""
            except BlockError as error:
                said[name] = str(error)
    return said


def test_pieces_that_drop_out_inside_of_themselves_are_refused(partitions: PartitionStore) -> None:
    """They drew from each rank's own generator, silently, unless they were parts of a module that is given blocks."""
    for said in run_ranks(2, drop_in_pieces, partitions.get("power_law", power_law(), 2)):
        for name in ("recurrence", "heads"):
            assert "draws from each rank's own generator" in said[name], name
        assert not said["recurrence of one row"]


# -------------------------------------------------------------------------------- what has nothing to do with the graph


def one_ranks_size(loader: FullGraphLoader) -> int:
    """Returns a number of rows that a level has on one rank and no level, and no layer's edges, on another one."""
    own = {*loader.sets.sizes, *(layer.num_edges for layer in loader.sets.layers)}
    ranks = [set(sizes) for sizes in loader.communicator.gather_json(sorted(own))]
    levels = loader.communicator.gather_json(list(loader.sets.sizes))
    told = [size for sizes in levels for size in sizes if size > 1 and not all(size in rank for rank in ranks)]
    return int(told[0])


def train_beside(rank: int, world_size: int, part_config: str, beside: bool) -> list[Tensor]:
    """Another model, with batch norm and dropout, gets the same number of rows on all ranks before ours is called."""
    g = PartitionedGraph.open(part_config)
    plan = forced_plan(g, Case(kind="sage_mean", plan="random:1:0.5"))
    loader = FullGraphLoader(g, g.owned_nodes(), 2, plan=plan, seed=3)
    model = Normed("whole", 0.4)
    other = nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(2))
    torch.manual_seed(rank)
    batch = torch.randn(one_ranks_size(loader), 2)
    expected = F.batch_norm(batch, None, None, training=True)
    for input_nodes, _, blocks in loader:
        if beside:
            other(batch)
            assert_close(other[1](batch), expected, "a model of its own rank")
        out = model(blocks, g.ndata["feat"][input_nodes])
    return [loader.seeds, out.detach()]


def test_a_number_that_is_a_size_on_one_rank_alone_is_none(partitions: PartitionStore) -> None:
    """That rank took dropout on so many rows for dropout on a level, and its masks were others from then on."""
    folder = partitions.get("power_law", power_law(), 3)
    outputs = [run_ranks(3, train_beside, folder, beside) for beside in (False, True)]
    for (ids, without), (other_ids, beside) in zip(*outputs, strict=True):
        assert torch.equal(ids, other_ids)
        assert torch.equal(beside, without)


class Drawing(nn.Module):
    def __init__(self, draw: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.first = dglnn.SAGEConv(NUM_FEATURES, WIDTH, "mean").double()
        self.second = dglnn.SAGEConv(WIDTH, NUM_CLASSES, "mean").double()
        self.draw = draw

    def forward(self, blocks: Sequence[Any], x: Tensor) -> Tensor:
        h = self.first(blocks[0], x)
        self.draw(h)
        out: Tensor = self.second(blocks[1], h)
        return out


def draw_beside_one_row(rank: int, world_size: int, part_config: str, seeds: str) -> dict[str, str]:
    """Ranks but the last have one seed, or none, and borrow one."""
    g = PartitionedGraph.open(part_config)
    owned = g.owned_nodes()
    count = len(owned) if rank == world_size - 1 else ("none", "one").index(seeds)
    loader = FullGraphLoader(g, owned[:count], 2, plan=[torch.arange(0)] * 2)
    assert (1 in loader.sets.sizes) == (rank < world_size - 1)
    draws: dict[str, Callable[[Tensor], Any]] = {
        "one number": lambda h: torch.rand(1),
        "one row": lambda h: torch.randn(1, WIDTH),
        "like one row": lambda h: torch.rand_like(h[:1]),
        "rows": torch.rand_like,
        "a size of one rank": lambda h: torch.rand(size),
    }
    size, said = one_ranks_size(loader), {}
    for input_nodes, _, blocks in loader:
        for name, draw in draws.items():
            try:
                Drawing(draw)(blocks, g.ndata["feat"][input_nodes])
                said[name] = ""
            except BlockError as error:
                said[name] = str(error)
    return said


@pytest.mark.parametrize("seeds", ["one", "none"])
def test_one_number_is_no_row(seeds: str, partitions: PartitionStore) -> None:
    """The rank with one seed raised alone, and the others waited for it."""
    for said in run_ranks(3, draw_beside_one_row, partitions.get("power_law", power_law(), 3), seeds):
        assert [said["one number"], said["one row"], said["like one row"]] == [""] * 3
        assert "draws from each rank's own generator" in said["rows"]
        assert "draws from each rank's own generator" in said["a size of one rank"], "on all ranks alike"


class Layers(nn.Module):
    """A model that is given all blocks, and has no batch norm of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = dglnn.SAGEConv(WIDTH, WIDTH, "mean").double()
        self.second = dglnn.SAGEConv(WIDTH, NUM_CLASSES, "mean").double()

    def forward(self, blocks: Sequence[Any], h: Tensor) -> Tensor:
        out: Tensor = self.second(blocks[1], self.first(blocks[0], h).tanh())
        return out


def ring(num_nodes: int = 80) -> dgl.DGLGraph:
    """Every vertex reads itself and the one before: few seeds depend on a small part of it."""
    nodes = torch.arange(num_nodes)
    graph = dgl.add_self_loop(dgl.graph((nodes, (nodes + 1) % num_nodes)))
    generator = torch.Generator().manual_seed(9)
    graph.ndata["feat"] = torch.randn(num_nodes, NUM_FEATURES, generator=generator, dtype=torch.float64)
    graph.ndata["label"] = nodes % NUM_CLASSES
    graph.ndata["train_mask"] = torch.ones(num_nodes, dtype=torch.bool)
    return graph


def make_apart() -> nn.ModuleDict:
    torch.manual_seed(5)
    encoder = nn.Sequential(nn.Linear(NUM_FEATURES, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh()).double()
    return nn.ModuleDict({"encoder": encoder, "layers": Layers(), "probe": nn.BatchNorm1d(NUM_CLASSES).double()})


def train_apart(rank: int, world_size: int, part_config: str) -> tuple[Tensor, list[int], dict[str, Tensor]]:
    """Batch norm before a model that is planned for, and over what it returns for the seeds."""
    g = PartitionedGraph.open(part_config)
    assert g.partition.orig_node_ids is not None
    parts = make_apart()
    optimizer = torch.optim.SGD(parts.parameters(), lr=0.5)
    nids = g.owned_nodes()[-2:]
    loader = FullGraphLoader(g, nids, 2, topology=uniform_topology(world_size), autotune=False)
    sizes = []
    for epoch in range(3):
        if epoch == 2:
            assert loader.outcome is not None
            loader = FullGraphLoader(g, nids, 2, plan=loader.best_plan)  # as a script that is resumed
        for input_nodes, seeds, blocks in loader:
            out = parts["layers"](blocks, parts["encoder"](g.ndata["feat"][input_nodes]))
            parts["probe"](out.detach())
            optimizer.zero_grad()
            F.cross_entropy(out, g.ndata["label"][seeds]).backward()
            average_gradients(parts, loader)
            optimizer.step()
        sizes.append(int(loader.sets.owned[: loader.sets.sizes[1]].sum()))
    return g.fetch_nodes(g.partition.orig_node_ids, nids), sizes, parts.state_dict()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_batch_norm_beside_a_model_that_is_planned_for(world_size: int, partitions: PartitionStore) -> None:
    """Plans computed only what the model needs, so that statistics of the rows it is given were not of all vertices;
    and what it returns was taken for rows that should have been.
    """
    graph = ring()
    ranks = run_ranks(world_size, train_apart, partitions.get("ring", graph, world_size))
    is_seed = torch.cat([ids for ids, _, _ in ranks])
    parts = make_apart()
    optimizer = torch.optim.SGD(parts.parameters(), lr=0.5)
    for _ in range(3):
        out = parts["layers"]([graph, graph], parts["encoder"](graph.ndata["feat"]))[is_seed]
        parts["probe"](out.detach())
        optimizer.zero_grad()
        F.cross_entropy(out, graph.ndata["label"][is_seed]).backward()
        optimizer.step()
    first, second, third = (sum(of_epoch) for of_epoch in zip(*(sizes for _, sizes, _ in ranks), strict=True))
    assert first == graph.num_nodes() > second == third, "plans compute less of what lies above that batch norm"
    for _, _, state in ranks:
        for name, value in state.items():
            assert_close(value, parts.state_dict()[name], name)


def train_something_else(rank: int, world_size: int, part_config: str) -> list[int]:
    """Returns how often ranks asked each other about rows of a model that has nothing to do with the loaders."""
    g = PartitionedGraph.open(part_config)
    loaders = [FullGraphLoader(g, g.owned_nodes(), 2, plan=[torch.arange(0)] * 2) for _ in range(2)]
    layers = Layers()
    other = nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(2))
    batch = torch.randn(loaders[0].sets.sizes[0], 2)
    asked = []
    gather_ints = g.communicator.gather_ints

    def count(values: Sequence[int], *, what: str = "") -> list[list[int]]:
        asked[-1] += 1
        return gather_ints(values, what=what)

    g.communicator.gather_ints = count  # type: ignore[method-assign, assignment]
    try:
        with torch.no_grad():
            asked.append(0)
            held = next(iter(loaders[0]))
            layers(held[2], torch.randn(len(held[0]), WIDTH, dtype=torch.float64))
        asked.append(0)
        other(batch)
        asked.append(0)
        for input_nodes, _, blocks in loaders[1]:
            asked.append(0)
            other(batch[:1].expand(len(input_nodes), 2))
            layers(blocks, torch.randn(len(input_nodes), WIDTH, dtype=torch.float64)).sum().backward()
        asked.append(0)
        other(batch)
    finally:
        del g.communicator.gather_ints
    return asked


def test_after_an_epoch_or_an_evaluation_other_models_are_their_own(partitions: PartitionStore) -> None:
    """Numbers of rows of sampled batches differ from rank to rank: one that is a level's on one of them would have that
    rank ask the others, which wait for it elsewhere.
    """
    for asked in run_ranks(2, train_something_else, partitions.get("power_law", power_law(), 2)):
        _, after_evaluation, _, within, after_epoch = asked
        assert within > 0
        assert (after_evaluation, after_epoch) == (0, 0)
