# SPDX-License-Identifier: Apache-2.0
"""What one rank alone would find wrong is raised on all: each rank that went on would wait for that one."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from typing import Any

import dgl
import dgl.function as fn
import dgl.nn as dglnn
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dgl_hybrid import FullGraphLoader, PartitionedGraph, optimize
from dgl_hybrid.exchange.connect import create_communicator
from dgl_hybrid.planner import uniform_topology
from dgl_hybrid.training import planning
from dgl_hybrid.training.metrics import global_accuracy, global_f1, global_mean, global_roc_auc
from tests.helpers.exactness import LAYERS
from tests.helpers.graphs import power_law
from tests.helpers.partitions import PartitionStore
from tests.helpers.thinning import pairwise
from tests.helpers.world import RaisedError, run_ranks, run_ranks_expect_errors
from tests.training.loader_cases import open_graph
from tests.training.test_counts_of_one_rank import WIDTH, ring_with_chords

NUM_NODES = 40
CHECKED = {
    "graphconv": lambda: dglnn.GraphConv(4, 4),
    "gat": lambda: dglnn.GATConv(4, 4, 1),
    "gatv2": lambda: dglnn.GATv2Conv(4, 4, 1),
    "agnn": lambda: dglnn.AGNNConv(),
    "dotgat": lambda: dglnn.DotGatConv(4, 4, 1),
    "edgeconv": lambda: dglnn.EdgeConv(4, 4),
    "gcn2": lambda: dglnn.GCN2Conv(4, 1),
}


def told_at_once(raised: list[RaisedError], type_name: str) -> list[str]:
    """Returns the messages; each rank has raised that itself, none as a peer did not take part."""
    assert [one.type_name for one in raised] == [type_name] * len(raised)
    return [one.message for one in raised]


# -------------------------------------------------------------------- vertices without in-edges


def without_edges_into(*nodes: int) -> dgl.DGLGraph:
    v = torch.arange(NUM_NODES)
    sources, targets = torch.cat([v, (v + 3) % NUM_NODES]), torch.cat([(v + 1) % NUM_NODES, v])
    keep = ~torch.isin(targets, torch.tensor(nodes))
    graph = dgl.graph((sources[keep], targets[keep]), num_nodes=NUM_NODES)
    graph.ndata["feat"] = torch.randn(NUM_NODES, 4, generator=torch.Generator().manual_seed(0))
    return graph


class TwoLayers(nn.Module):
    def __init__(self, kind: str, allow: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([CHECKED[kind](), CHECKED[kind]()])
        for layer in self.layers:
            layer._allow_zero_in_degree = allow

    def forward(self, blocks: Any, x: Tensor) -> Tensor:
        for layer, block in zip(self.layers, blocks, strict=True):
            inputs = (x, x[: block.num_dst_nodes()]) if isinstance(layer, dglnn.GCN2Conv) else (x,)
            x = layer(block, *inputs).reshape(block.num_dst_nodes(), -1)
        return x


def train_two_layers(
    rank: int, world_size: int, part_config: str, kind: str, plan: str, optimized: bool, allow: bool = False
) -> tuple[list[bool], list[bool]]:
    g, model = PartitionedGraph.open(part_config), TwoLayers(kind, allow)
    if optimized:
        optimize(model)
    loader = FullGraphLoader(
        g, g.owned_nodes(), 2, model=model, strategy=plan, topology=uniform_topology(world_size), autotune=False
    )
    lacks = [bool((block.in_degrees() == 0).any()) for block in loader.blocks]
    for input_nodes, _, blocks in loader:
        model(blocks, g.ndata["feat"][input_nodes]).sum().backward()
    return lacks, [block.structure.has_empty_rows for block in loader.blocks]


@pairwise(kind=[k for k in CHECKED if k != "gcn2"], plan=["depcomm", "depcache"], optimized=[False, True])
def test_a_vertex_without_in_edges_is_raised_on_all(
    kind: str, plan: str, optimized: bool, partitions: PartitionStore
) -> None:
    folder = partitions.get("one without in-edges", without_edges_into(5), 3)
    for message in told_at_once(
        run_ranks_expect_errors(3, train_two_layers, folder, kind, plan, optimized), "DGLError"
    ):
        assert "layer 1: some vertices have no in-edges" in message
        assert "dgl.add_self_loop" in message


@pytest.mark.parametrize("plan", ["depcomm", "depcache"])
@pytest.mark.parametrize("optimized", [False, True])  # sums of the first layer come from their owners then
def test_only_vertices_without_in_edges_in_the_whole_graph_count(
    plan: str, optimized: bool, partitions: PartitionStore
) -> None:
    told = run_ranks(
        3, train_two_layers, partitions.get("all with", without_edges_into(), 3), "graphconv", plan, optimized
    )
    assert told == [([False] * 2, [False] * 2)] * 3
    folder = partitions.get("one without in-edges", without_edges_into(5), 3)
    told = run_ranks(3, train_two_layers, folder, "graphconv", plan, optimized, True)
    assert [anywhere for _, anywhere in told] == [[True] * 2] * 3
    assert any(not own[1] for own, _ in told), "on some rank alone"


def test_all_layers_that_check_degrees_are_known() -> None:
    """Who has that attribute raises, if it is not told otherwise."""
    for kind, make in {**CHECKED, **{name: lambda make=make: make(4, 4) for name, make in LAYERS.items()}}.items():
        for module in make().modules():
            if type(module).__module__.startswith("dgl.nn") and hasattr(module, "set_allow_zero_in_degree"):
                assert "_allow_zero_in_degree" in module.__dict__, kind


# -------------------------------------------------------------------- metrics


def measure_with_one_row_too_many(rank: int, world_size: int, metric: str) -> float:
    """As of `logits[: loader.num_seeds]` beside labels of all seeds, one of which the last rank has borrowed."""
    communicator = create_communicator()
    num_logits, num_labels = (0, 1) if rank == world_size - 1 else (5, 5)
    logits, labels = torch.randn(num_logits, 2), torch.zeros(num_labels, dtype=torch.long)
    if metric == "accuracy":
        return global_accuracy(logits, labels, communicator=communicator)
    if metric == "f1":
        return global_f1(logits, labels, communicator=communicator).micro
    if metric == "roc_auc":
        return global_roc_auc(logits, labels, communicator=communicator)
    return global_mean(logits[:, 0], torch.ones(num_labels), communicator=communicator)


@pytest.mark.parametrize("metric", ["accuracy", "f1", "roc_auc", "mean"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_shapes_of_a_metric_that_do_not_fit_are_raised_on_all(metric: str, world_size: int) -> None:
    *others, own = told_at_once(
        run_ranks_expect_errors(world_size, measure_with_one_row_too_many, metric), "ValueError"
    )
    assert "(0" in own or "(1" in own
    assert others == [f"rank {world_size - 1} of {world_size}: {own}"] * (world_size - 1)


def measure_other_columns(rank: int, world_size: int, metric: str) -> float:
    """The last rank has none of them, or labels of another kind."""
    communicator, is_last = create_communicator(), rank == world_size - 1
    if metric == "f1":
        logits = torch.randn(0, 0) if is_last else torch.randn(5, 3)
        return global_f1(logits, torch.zeros(len(logits), dtype=torch.long), communicator=communicator).micro
    if metric == "f1 of several classes":
        labels = torch.eye(3) if is_last else torch.arange(3)
        return global_f1(torch.eye(3), labels, communicator=communicator).micro
    scores = torch.randn(0, 3) if is_last else torch.randn(10)
    return global_roc_auc(scores, torch.zeros(0, 3) if is_last else torch.arange(10) % 2, communicator=communicator)


@pytest.mark.parametrize("metric", ["f1", "f1 of several classes", "roc_auc"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_columns_of_a_metric_that_differ_by_rank_are_raised_on_all(metric: str, world_size: int) -> None:
    for message in told_at_once(run_ranks_expect_errors(world_size, measure_other_columns, metric), "ValueError"):
        assert "on every rank" in message
        assert f"on rank {world_size - 1})" in message


# -------------------------------------------------------------------- batch norm and dropout


class NormsEdges(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(1).double()

    def forward(self, block: Any, x: Tensor) -> Tensor:
        with block.local_scope():
            block.edata["e"] = self.norm(block.edata["w"].view(-1, 1))
            block.srcdata["h"] = x
            block.update_all(fn.u_mul_e("h", "e", "m"), fn.sum("m", "o"))
            out: Tensor = block.dstdata["o"]
            return out


class NormsSeeds(nn.Module):
    """Of the rank's own, which are no level where one is borrowed."""

    def __init__(self, num_seeds: int) -> None:
        super().__init__()
        self.norm, self.num_seeds = nn.BatchNorm1d(WIDTH).double(), num_seeds

    def forward(self, block: Any, x: Tensor) -> Tensor:
        with block.local_scope():
            block.srcdata["h"] = x
            block.update_all(fn.copy_u("h", "m"), fn.sum("m", "o"))
            return self.norm(block.dstdata["o"][: self.num_seeds])


class DropsHalves(nn.Module):
    """Of messages, two rows for each edge."""

    def forward(self, block: Any, x: Tensor) -> Tensor:
        def messages(edges: Any) -> dict[str, Tensor]:
            h = edges.src["h"]
            return {"m": F.dropout(h.reshape(2 * len(h), -1), 0.5).reshape(h.shape)}

        with block.local_scope():
            block.srcdata["h"] = x
            block.update_all(messages, fn.sum("m", "o"))
            out: Tensor = block.dstdata["o"]
            return out


IN_REDUCE: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "torch.dropout": lambda x: torch.dropout(x, 0.5, train=True),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "rand_like": lambda x: x * torch.rand_like(x),
    "bernoulli": lambda x: x * torch.bernoulli(torch.full_like(x, 0.5)),
    "rand": lambda x: x * torch.rand(1),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "lstm": lambda x: nn.LSTM(4, 4, num_layers=2, dropout=0.5).double()(x.double())[0],
}
ONLY_EVALUATES: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.5, training=False),
    "torch.dropout": lambda x: torch.dropout(x, 0.5, train=False),
    "batch_norm": lambda x: F.batch_norm(x, torch.zeros(4, dtype=x.dtype), torch.ones(4, dtype=x.dtype)),
    "rrelu": lambda x: F.rrelu(x, training=False),
}


class InReduce(nn.Module):
    def __init__(self, apply: Callable[[Tensor], Tensor], *, then: bool = False) -> None:
        super().__init__()
        self.apply_to_sums, self.then = apply, then

    def forward(self, block: Any, x: Tensor) -> Tensor:
        def reduce(nodes: Any) -> dict[str, Tensor]:
            return {"o": self.apply_to_sums(nodes.mailbox["m"].sum(1))}

        def double(nodes: Any) -> dict[str, Tensor]:
            return {"o": 2.0 * nodes.data["o"]}

        with block.local_scope():
            block.srcdata["h"] = x
            block.update_all(fn.copy_u("h", "m"), reduce, double if self.then else None)
            return F.dropout(block.dstdata["o"], 0.5)  # after it, all may draw that may draw anywhere


def train_one_layer(rank: int, world_size: int, part_config: str, kind: str) -> None:
    g = PartitionedGraph.open(part_config)
    seeds, degrees = g.owned_nodes(), g.partition.in_degrees
    if kind == "norms edges" and rank == 0:
        seeds = seeds[degrees == 1]  # as many as they have edges
    if kind == "norms seeds" and rank == world_size - 1:
        seeds = seeds[:0]
    if kind == "drops halves" and rank == 1:
        seeds = seeds[degrees == 0]  # has no messages
    sampler = dgl.dataloading.MultiLayerFullNeighborSampler(
        1, prefetch_edge_feats=["w"] if kind == "norms edges" else None
    )
    loader = FullGraphLoader(g, seeds, sampler, plan=[torch.arange(0)], seed=3)
    makes = {"norms edges": NormsEdges, "norms seeds": lambda: NormsSeeds(loader.num_seeds)}
    model = makes.get(kind, DropsHalves)().train()
    for input_nodes, _, (block,) in loader:
        model(block, g.ndata["feat"][input_nodes])


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("kind", ["norms edges", "norms seeds"])
def test_batch_norm_of_what_is_no_level_is_raised_on_all(
    kind: str, world_size: int, partitions: PartitionStore
) -> None:
    folder = partitions.get("chords", ring_with_chords(), world_size)
    messages = told_at_once(run_ranks_expect_errors(world_size, train_one_layer, folder, kind), "BlockError")
    own = [message for message in messages if "a tensor of shape" in message and "other ranks" not in message]
    assert own, "who has such rows says of what shape they are"
    assert all("batch norm inside the model" in message for message in messages)
    assert len(own) < world_size, "another rank has as many rows as vertices of a level"


def test_dropout_of_what_is_no_edges_is_raised_where_there_are_none(partitions: PartitionStore) -> None:
    graph = without_edges_into(*range(0, NUM_NODES, 4))
    folder = partitions.get("every fourth without in-edges", graph, 3)
    messages = told_at_once(run_ranks_expect_errors(3, train_one_layer, folder, "drops halves"), "BlockError")
    assert all("cannot be made equal on all ranks" in message for message in messages)


def reduce_by(rank: int, world_size: int, part_config: str, name: str, trains: bool, then: bool) -> Tensor:
    g = PartitionedGraph.open(part_config)
    seeds, degrees = g.owned_nodes(), g.partition.in_degrees
    if rank == 1:
        seeds = seeds[degrees == 0]  # has nothing to reduce
    torch.manual_seed(rank)
    loader = FullGraphLoader(g, seeds, 1, plan=[torch.arange(0)], seed=3)
    apply = (IN_REDUCE if trains else ONLY_EVALUATES)[name]
    for input_nodes, _, (block,) in loader:
        out: Tensor = InReduce(apply, then=then)(block, g.ndata["feat"][input_nodes])
    return out


@pytest.mark.parametrize("name", IN_REDUCE)
def test_what_draws_in_a_reduce_function_is_raised_on_all(name: str, partitions: PartitionStore) -> None:
    """Also where all vertices have as many in-edges, so that there are as many rows as in a level."""
    for graph_name, graph in (
        ("every fourth without in-edges", without_edges_into(*range(0, NUM_NODES, 4))),
        ("all with two in-edges", without_edges_into()),
    ):
        for world_size in (2, 3):
            folder = partitions.get(graph_name, graph, world_size)
            then = world_size == 3
            raised = run_ranks_expect_errors(world_size, reduce_by, folder, name, True, then)
            for message in told_at_once(raised, "BlockError"):
                assert f"{name.removeprefix('torch.')} inside a reduce function" in message


@pytest.mark.parametrize("name", ONLY_EVALUATES)
def test_what_draws_nothing_in_a_reduce_function_is_run(name: str, partitions: PartitionStore) -> None:
    folder = partitions.get("every fourth without in-edges", without_edges_into(*range(0, NUM_NODES, 4)), 3)
    for out in run_ranks(3, reduce_by, folder, name, False, False):
        assert torch.isfinite(out).all()


@pytest.mark.parametrize("name", IN_REDUCE)
def test_one_rank_draws_in_a_reduce_function_as_in_dgl(name: str, partitions: PartitionStore) -> None:
    """Where all vertices have as many in-edges, so that it is called once."""
    (out,) = run_ranks(
        1, reduce_by, partitions.get("all with two in-edges", without_edges_into(), 1), name, True, False
    )
    assert torch.isfinite(out).all()
    assert bool((out != 0).any())


# -------------------------------------------------------------------- plans, memory


def plan_anew_without_memory(rank: int, world_size: int, part_config: str) -> tuple[str, str]:
    g, model = open_graph(part_config)
    loader = FullGraphLoader(g, g.owned_nodes("train_mask"), 2, model=model, autotune=float("inf"))

    def train() -> None:
        for input_nodes, seeds, blocks in loader:
            F.cross_entropy(model(blocks, g.ndata["feat"][input_nodes]), g.ndata["label"][seeds]).backward()

    while not loader.is_settled:
        train()
    assert loader.outcome is not None
    before, propose = loader.outcome.plan.strategy, planning.propose_plans

    def lacks_memory(*args: Any, **options: Any) -> Any:
        raise MemoryError("cannot allocate 3 GiB")

    planning.propose_plans = lacks_memory if rank == 1 else propose
    try:
        loader._follow(loader._choice.plan_anew())
    finally:
        planning.propose_plans = propose
    train()
    return before, loader.outcome.plan.strategy


def test_where_one_rank_lacks_memory_to_plan_anew_all_keep_their_plans(partitions: PartitionStore) -> None:
    by_rank = run_ranks(2, plan_anew_without_memory, partitions.get("power_law", power_law(), 2))
    assert by_rank[0] == by_rank[1]


def lose_memory_before_an_exchange(rank: int, world_size: int) -> float:
    communicator = create_communicator(timeout_s=60.0)
    rows = torch.zeros(1000, 2)
    counts = [0 if other == rank else 1000 // (world_size - 1) for other in range(world_size)]
    if rank == world_size - 1:

        def lacks_memory(*args: Any) -> Any:
            raise OSError(errno.ENOSPC, "No space left on device")

        communicator.transport._outbox.place = lacks_memory  # type: ignore[union-attr]
    begin = time.monotonic()
    try:
        send = communicator.send_buffer(rows.shape, rows.dtype, rows.device)
        send.copy_(rows)
        communicator.exchange(send, counts, counts)
    except Exception as error:
        error.add_note("")
        raise type(error)(f"{error} after {time.monotonic() - begin:.1f} s") from None
    return 0.0


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rank_without_memory_for_what_it_sends_tells_its_peers(world_size: int) -> None:
    raised = run_ranks_expect_errors(world_size, lose_memory_before_an_exchange)
    *peers, own = (one.message for one in raised)
    assert "No space left on device" in own
    for message in peers:
        assert "No space left on device" in message, "in its words, not as one that nothing came from"
