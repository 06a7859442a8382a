# SPDX-License-Identifier: Apache-2.0
"""Keys of edges: fetched when a model first draws on edges, by all ranks together, and never otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import dgl.dataloading
import dgl.nn.pytorch as dglnn
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from dgl import function as fn
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dgl_hybrid import FullGraphLoader, PartitionedGraph, average_gradients
from dgl_hybrid.exchange.connect import create_communicator
from dgl_hybrid.exchange.ids import Ownership
from dgl_hybrid.partition.narrow_ids import NarrowIds
from dgl_hybrid.planner import uniform_topology
from dgl_hybrid.training.edge_keys import EdgeKeys
from tests.helpers.exactness import assert_close
from tests.helpers.graphs import NUM_CLASSES, NUM_FEATURES, power_law, with_isolated
from tests.helpers.partitions import PartitionStore
from tests.helpers.world import run_ranks, run_ranks_expect_errors


def ask_differently(rank: int, world_size: int) -> list[tuple[str, bool, list[int] | None]]:
    communicator = create_communicator()
    edges = Ownership(offsets=torch.arange(world_size + 1) * 10, rank=rank)
    own_keys = torch.arange(10) * 7 + 1000 * rank
    shared = NarrowIds((torch.arange(5) * 9 + rank) % (10 * world_size))
    other = NarrowIds(torch.arange(3 * rank))  # none on rank 0
    found: list[tuple[str, bool, list[int] | None]] = []

    def look(what: str, keys: EdgeKeys) -> None:
        of_layers = [keys.of_layer(layer).peek() for layer in (1, 2, 3)] if keys.is_known else None
        if of_layers is not None:
            assert keys.of_layer(1) is keys.of_layer(3)
        found.append((what, keys.is_known, None if of_layers is None else torch.cat(of_layers).tolist()))

    def make(known: Tensor | None = own_keys) -> EdgeKeys:
        return EdgeKeys(communicator, edges, (shared, other, shared), known)

    keys = make()
    keys.ask(False, agreed=False)
    look("nobody", keys)
    keys.ask(rank == 1, agreed=False)
    look("rank 1 alone", keys)
    before = communicator.num_calls
    keys.ask(True, agreed=False)
    assert communicator.num_calls == before, "fetched twice"
    keys = make()
    keys.ask(True, agreed=True)
    look("all", keys)
    keys = make(None)
    keys.ask(True, agreed=False)
    look("unknown", keys)
    dist.barrier()
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_all_ranks_fetch_if_one_of_them_draws_on_edges(world_size: int) -> None:
    for rank, found in enumerate(run_ranks(world_size, ask_differently)):
        shared = [(position * 9 + rank) % (10 * world_size) for position in range(5)]
        ids = [*shared, *range(3 * rank), *shared]
        keys = [edge % 10 * 7 + edge // 10 * 1000 for edge in ids]
        assert found == [
            ("nobody", False, None),
            ("rank 1 alone", True, keys),
            ("all", True, keys),
            ("unknown", True, ids),
        ]


class Attention(nn.Module):
    """Draws on vertices, and on edges when it is told to: inside the fused layer, or on the messages of its own one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = dglnn.GATConv(NUM_FEATURES, 4, 2, allow_zero_in_degree=True).double()
        self.second = dglnn.SAGEConv(8, NUM_CLASSES, "mean").double()
        self.p_messages = 0.0

    def forward(self, blocks: Sequence[Any], x: Tensor) -> Tensor:
        h = F.dropout(self.first(blocks[0], x).flatten(1), 0.3, self.training)
        block = blocks[1]
        with block.local_scope():
            block.srcdata["h"] = h
            block.update_all(self._message, lambda nodes: {"m": nodes.mailbox["m"].sum(1)})
            return self.second.fc_neigh(block.dstdata["m"]) + self.second.fc_self(h[: block.num_dst_nodes()])

    def _message(self, edges: Any) -> dict[str, Tensor]:
        return {"m": F.dropout(edges.src["h"], self.p_messages, self.training)}


SCHEDULE = ((0.0, 0.0), (0.4, 0.0), (0.0, 0.0), (0.0, 0.5))
"""Of each epoch: attention dropout, message dropout."""


def train(
    rank: int, world_size: int, part_config: str, epochs: Sequence[int]
) -> tuple[Tensor, list[Tensor], list[bool]]:
    g = PartitionedGraph.open(part_config)
    model = Attention()
    loader = FullGraphLoader(g, g.owned_nodes(), 2, plan=[torch.arange(0)] * 2, seed=3)
    outputs, known = [], []
    for epoch in epochs:
        model.first.attn_drop.p, model.p_messages = SCHEDULE[epoch]
        for input_nodes, _, blocks in loader:
            logits = model(blocks, g.ndata["feat"][input_nodes])
            logits.sum().backward()
            outputs.append(logits.detach())
        known.append(loader._current.edge_keys.is_known)
    assert g.partition.orig_node_ids is not None
    return g.fetch_nodes(g.partition.orig_node_ids, loader.seeds), outputs, known


@pytest.mark.parametrize(
    ("epochs", "expected_known"),
    [((0, 1, 2), [False, True, True]), ((0, 3), [False, True]), ((3, 0), [True, True]), ((0, 2), [False, False])],
    ids=["attention from the second epoch on", "messages later", "messages at once", "vertices alone"],
)
def test_keys_come_with_the_first_draw_on_edges(
    partitions: PartitionStore, epochs: tuple[int, ...], expected_known: list[bool]
) -> None:
    graph = power_law()
    ((ids, alone, _),) = run_ranks(1, train, partitions.get("power_law", graph, 1), epochs)
    expected = [torch.empty_like(output) for output in alone]
    for whole, output in zip(expected, alone, strict=True):
        whole[ids] = output
    for world_size in (2, 3, 4):
        results = run_ranks(world_size, train, partitions.get("power_law", graph, world_size), epochs)
        for ids, outputs, known in results:
            assert known == expected_known
            for epoch, output, whole in zip(epochs, outputs, expected, strict=True):
                assert_close(output, whole[ids], f"epoch {epoch} on {world_size} ranks")


class EncodesEdges(nn.Module):
    """Makes weights of edges of what they have, with dropout, before the layer that reads them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        encoders = [nn.Sequential(nn.Linear(1, 4), nn.ReLU(), nn.Dropout(0.5), nn.Linear(4, 1)) for _ in range(2)]
        self.encoders = nn.ModuleList(encoders)
        widths = [(NUM_FEATURES, 8), (8, NUM_CLASSES)]
        self.layers = nn.ModuleList([dglnn.GraphConv(*pair, allow_zero_in_degree=True) for pair in widths])

    def forward(self, blocks: Sequence[Any], x: Tensor) -> Tensor:
        for number, block in enumerate(blocks):
            x = self.encode_and_convolve(number, block, x)
        return x

    def encode_and_convolve(self, number: int, block: Any, x: Tensor, weight: Tensor | None = None) -> Tensor:
        if weight is None:
            weight = self.encode(number, block)
        convolved: Tensor = self.layers[number](block, x, edge_weight=weight)
        return convolved

    def encode(self, number: int, block: Any) -> Tensor:
        encoded: Tensor = self.encoders[number](block.edata["w"].unsqueeze(1))
        return encoded


class EncodesEdgesFirst(EncodesEdges):
    """Those of all layers before the first of them."""

    def forward(self, blocks: Sequence[Any], x: Tensor) -> Tensor:
        weights = [self.encode(number, block) for number, block in enumerate(blocks)]
        for number, (block, weight) in enumerate(zip(blocks, weights, strict=True)):
            x = self.encode_and_convolve(number, block, x, weight)
        return x


class EncodesEdgesAgain(EncodesEdges):
    """Repeats each layer in backward, the last one first."""

    def forward(self, blocks: Sequence[Any], x: Tensor) -> Tensor:
        for number, block in enumerate(blocks):
            x = checkpoint(self.encode_and_convolve, number, block, x, use_reentrant=False)
        return x


class EncodesEdgesTwice(EncodesEdges):
    """Runs twice in an epoch."""

    def forward(self, blocks: Sequence[Any], x: Tensor) -> Tensor:
        return super().forward(blocks, x) + super().forward(blocks, x)


ENCODERS = {kind.__name__: kind for kind in (EncodesEdges, EncodesEdgesFirst, EncodesEdgesAgain, EncodesEdgesTwice)}


def encode_edges(rank: int, world_size: int, part_config: str, strategy: str, kind: str) -> list[dict[str, Tensor]]:
    """Gradients of each epoch, averaged as DDP does."""
    g = PartitionedGraph.open(part_config)
    model = ENCODERS[kind]().double()
    sampler = dgl.dataloading.MultiLayerFullNeighborSampler(2, prefetch_edge_feats=["w"])
    loader = FullGraphLoader(
        g, g.owned_nodes("train_mask"), sampler, strategy=strategy, topology=uniform_topology(world_size), seed=3
    )
    found = []
    for _ in range(3):
        model.zero_grad()
        for input_nodes, seeds, blocks in loader:
            logits = model(blocks, g.ndata["feat"][input_nodes])
            F.cross_entropy(logits, g.ndata["label"][seeds]).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad /= world_size
        found.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})  # type: ignore[union-attr]
    return found


@pytest.mark.parametrize(
    ("strategy", "kind", "world_sizes"),
    [
        *(("depcomm", "EncodesEdges", (2, 3, 4)), ("depcache", "EncodesEdges", (2, 3, 4))),
        *(("depcache", kind, (3,)) for kind in ENCODERS if kind != "EncodesEdges"),
    ],
)
def test_an_encoder_of_edges_before_its_layer_drops_by_edges(
    strategy: str, kind: str, world_sizes: Sequence[int], partitions: PartitionStore
) -> None:
    """The block that was used last is then another layer's, or none's."""
    graph = power_law()
    (alone,) = run_ranks(1, encode_edges, partitions.get("power_law", graph, 1), strategy, kind)
    assert not torch.allclose(*(of_epoch["encoders.0.0.weight"] for of_epoch in alone[:2])), "other masks"
    for world_size in world_sizes:
        part_config = partitions.get("power_law", graph, world_size)
        for found in run_ranks(world_size, encode_edges, part_config, strategy, kind):
            for epoch, (of_epoch, expected) in enumerate(zip(found, alone, strict=True)):
                for name, grad in of_epoch.items():
                    assert_close(grad, expected[name], f"{name}, epoch {epoch}, {world_size} ranks")


class DropsOutside(nn.Module):
    """Drops attention after a layer that has worked on a copy of its block, which is gone by then."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [dglnn.DotGatConv(NUM_FEATURES, 4, 2), dglnn.DotGatConv(8, 4, 2)]  # `local_var` each
        )

    def forward(self, blocks: Sequence[Any], x: Tensor) -> Tensor:
        h = self.layers[0](blocks[0], x).flatten(1)
        _, attention = self.layers[1](blocks[1], h, get_attention=True)
        return F.dropout(attention, 0.5)


def drop_outside(rank: int, world_size: int, part_config: str) -> tuple[int, Tensor]:
    g = PartitionedGraph.open(part_config)
    torch.manual_seed(0)
    model = DropsOutside().double()
    loader = FullGraphLoader(g, g.owned_nodes("train_mask"), 2, plan=[torch.arange(0)] * 2, seed=5)
    with torch.no_grad():
        for input_nodes, _, blocks in loader:
            dropped = model(blocks, g.ndata["feat"][input_nodes])
    return int((dropped == 0).sum()), dropped.sum((0, 2))


def test_attention_of_a_layer_that_copied_its_block_is_dropped_by_edges(partitions: PartitionStore) -> None:
    """The block that was used last is that copy: then the one it was copied from says which edges there are."""
    alone, split = (
        run_ranks(world_size, drop_outside, partitions.get("power_law", power_law(), world_size))
        for world_size in (1, 3)
    )
    assert 0 < alone[0][0] == sum(zeros for zeros, _ in split)
    assert_close(sum(total for _, total in split), alone[0][1], "attention that was kept")


class EdgeRows(nn.Module):
    """Drops out rows of edges before they are summed."""

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.linear = nn.Linear(NUM_FEATURES, NUM_CLASSES * max(num_heads, 1)).double()
        self.num_heads = num_heads

    def forward(self, blocks: Sequence[Any], x: Tensor) -> Tensor:
        h = self.linear(x)
        (block,) = blocks
        with block.local_scope():
            block.srcdata["h"] = h.view(len(h), self.num_heads, -1) if self.num_heads else h
            block.apply_edges(lambda edges: {"m": 1.0 * edges.src["h"]})
            block.edata["m"] = F.dropout(block.edata["m"], 0.5, self.training)
            block.update_all(fn.copy_e("m", "m"), fn.sum("m", "h"))
            summed: Tensor = block.dstdata["h"]
            return summed.flatten(1)


def seeds_with_so_many_edges(g: PartitionedGraph, count: int) -> Tensor:
    """Returns own nodes whose in-edges are so many in all."""
    degrees = g.partition.in_degrees
    chosen, left = [], count
    for node in degrees.argsort(descending=True).tolist():
        if 0 < degrees[node] <= left:
            chosen.append(node)
            left -= int(degrees[node])
    assert left == 0
    return g.nodes.owned()[torch.tensor(sorted(chosen))]


def train_on_as_many_edges_as_vertices(
    rank: int, world_size: int, part_config: str, num_heads: int, seeds_of: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, bool]:
    """Rank 0 of several has as many edges in the layer as it owns vertices, the others have not.

    Args:
        seeds_of: Original ids of the seeds; None: what rank 0 is to have, and most vertices of others.
    """
    g = PartitionedGraph.open(part_config)
    own, ids = g.nodes.owned(), g.partition.orig_node_ids
    assert ids is not None
    if seeds_of is not None:
        nids = own[torch.isin(ids, seeds_of)]
    else:
        nids = seeds_with_so_many_edges(g, len(own)) if rank == 0 else own[1:]
    loader = FullGraphLoader(g, nids, 1, plan=[own[:0]], seed=3, loss_reduction="sum")
    model = EdgeRows(num_heads)
    for _ in range(2):  # in a plan's first step, and in one after it
        for input_nodes, _, blocks in loader:
            logits = model(blocks, g.ndata["feat"][input_nodes])
            model.zero_grad()
            (logits**2).sum().backward()
            is_ambiguous = blocks[0].num_edges() in loader.sets.sizes
    average_gradients(model, loader)
    assert model.linear.weight.grad is not None
    return g.fetch_nodes(ids, loader.seeds), logits.detach(), model.linear.weight.grad, is_ambiguous


@pytest.mark.parametrize("num_heads", [0, 2])
def test_one_rank_with_as_many_edges_as_vertices_draws_as_the_others(
    num_heads: int, partitions: PartitionStore
) -> None:
    """It took rows of edges for vertices, or (with heads) raised alone while the others waited for it."""
    of_three = partitions.get("power_law", power_law(), 3)
    results = run_ranks(3, train_on_as_many_edges_as_vertices, of_three, num_heads, None)
    assert [is_ambiguous for *_, is_ambiguous in results] == [True, False, False]
    seeds = torch.cat([ids for ids, *_ in results])
    of_one = partitions.get("power_law", power_law(), 1)
    ((ids, logits, gradient, _),) = run_ranks(1, train_on_as_many_edges_as_vertices, of_one, num_heads, seeds)
    position = {int(node): i for i, node in enumerate(ids.tolist())}
    for these, found, found_gradient, _ in results:
        assert_close(found, logits[[position[node] for node in these.tolist()]], "logits")
        assert_close(found_gradient, gradient, "gradient")


class Pooled(nn.Module):
    """Drops out rows that are none of the graph's."""

    def __init__(self, num_rows: int) -> None:
        super().__init__()
        self.linear, self.num_rows = nn.Linear(NUM_FEATURES, NUM_CLASSES).double(), num_rows

    def forward(self, blocks: Sequence[Any], x: Tensor) -> Tensor:
        (block,) = blocks
        with block.local_scope():
            block.srcdata["h"] = self.linear(x)
            block.update_all(fn.copy_u("h", "m"), fn.sum("m", "h"))
            summed: Tensor = block.dstdata["h"]
        return summed + F.dropout(summed.new_ones(self.num_rows, NUM_CLASSES), 0.5, self.training).mean(0)


def draw_on_rows_of_something_else(rank: int, world_size: int, part_config: str) -> None:
    g = PartitionedGraph.open(part_config)
    own = g.nodes.owned()
    loader = FullGraphLoader(g, own[: 5 + rank], 1, plan=[own[:0]])
    model = Pooled(num_rows=6)  # as many as rank 1 has seeds
    for input_nodes, _, blocks in loader:
        model(blocks, g.ndata["feat"][input_nodes]).sum().backward()


def test_all_ranks_refuse_rows_that_are_vertices_on_one_of_them_by_chance(partitions: PartitionStore) -> None:
    """That one went on, and waited for the others."""
    errors = run_ranks_expect_errors(3, draw_on_rows_of_something_else, partitions.get("power_law", power_law(), 3))
    for error in errors:
        assert error.type_name == "BlockError"
        assert "a tensor of shape (6, " in error.message
        assert "Apply it to tensors with one row for each vertex or edge" in error.message


class DropsInMessages(nn.Module):
    """Drops out messages inside of functions of the user's."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.linear, self.way = nn.Linear(NUM_FEATURES, NUM_CLASSES).double(), way

    def forward(self, blocks: Sequence[Any], x: Tensor) -> Tensor:
        (block,) = blocks
        with block.local_scope():
            block.srcdata["h"] = self.linear(x)
            if self.way == "reduce":
                block.update_all(self._message, lambda nodes: {"h": nodes.mailbox["m"].sum(1)})
            else:
                block.update_all(self._message, fn.sum("m", "h"))
            summed: Tensor = block.dstdata["h"]
        return F.dropout(summed, 0.5, self.training)

    def _message(self, edges: Any) -> dict[str, Tensor]:
        rows = F.dropout(edges.src["h"], 0.5, self.training)
        # What cannot be told of no rows: how wide they are.
        return {"m": rows.reshape(len(rows), -1) if self.way == "no rows" else rows}


def drop_without_edges(
    rank: int, world_size: int, part_config: str, way: str
) -> tuple[Tensor, list[Tensor], Tensor, int]:
    """The last rank of several has seeds without in-edges alone, and they are no seeds where there is one rank."""
    g = PartitionedGraph.open(part_config)
    own, ids = g.nodes.owned(), g.partition.orig_node_ids
    assert ids is not None
    is_empty = g.partition.in_degrees == 0
    is_seed = is_empty if rank == world_size - 1 and world_size > 1 else ~is_empty & (ids % 2 == 0)
    loader = FullGraphLoader(g, own[is_seed], 1, plan=[own[:0]], seed=3, loss_reduction="sum")
    model, outputs = DropsInMessages(way), []
    for _ in range(2):
        for input_nodes, _, blocks in loader:
            logits = model(blocks, g.ndata["feat"][input_nodes])
            model.zero_grad()
            (logits**2).sum().backward()
            outputs.append(logits.detach())
            num_edges = blocks[0].num_edges()
    average_gradients(model, loader)
    assert model.linear.weight.grad is not None
    return g.fetch_nodes(ids, loader.seeds), outputs, model.linear.weight.grad, num_edges


@pytest.mark.parametrize("way", ["sum", "reduce", "no rows"])
def test_a_rank_without_edges_takes_part_in_dropout_of_messages(way: str, partitions: PartitionStore) -> None:
    results = run_ranks(3, drop_without_edges, partitions.get("with_isolated", with_isolated(), 3), way)
    assert [num_edges > 0 for *_, num_edges in results] == [True, True, False]
    of_one = partitions.get("with_isolated", with_isolated(), 1)
    ((ids, expected, _, _),) = run_ranks(1, drop_without_edges, of_one, way)
    position = {int(node): i for i, node in enumerate(ids.tolist())}
    for these, found, gradient, num_edges in results:
        assert_close(gradient, results[0][2], "gradient")
        for epoch, logits in enumerate(found):
            if num_edges:
                rows = [position[node] for node in these.tolist()]
                assert_close(logits, expected[epoch][rows], f"epoch {epoch}")
            else:
                assert not logits.any()
