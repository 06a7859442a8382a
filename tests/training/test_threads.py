# SPDX-License-Identifier: Apache-2.0
"""Threads of a script beside a training step: they may run modules, fetch batches, or train."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import dgl.function as fn
import dgl.nn as dglnn
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from dgl_hybrid import FullGraphLoader, PartitionedGraph
from tests.helpers.exactness import assert_close
from tests.helpers.graphs import NUM_CLASSES, NUM_FEATURES, power_law
from tests.helpers.partitions import PartitionStore
from tests.helpers.world import run_ranks, run_ranks_expect_errors

EPOCHS = 3
P = 0.4


@pytest.fixture(scope="module")
def partitions(tmp_path_factory: pytest.TempPathFactory) -> PartitionStore:
    return PartitionStore(tmp_path_factory.mktemp("threads"))


class Sage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = dglnn.SAGEConv(NUM_FEATURES, 4, "mean").double()
        self.second = dglnn.SAGEConv(4, NUM_CLASSES, "mean").double()
        self.drop = nn.Dropout(P)

    def forward(self, blocks: Any, x: Tensor) -> Tensor:
        out: Tensor = self.second(blocks[1], self.drop(torch.tanh(self.first(blocks[0], x))))
        return out


class Holds(nn.Module):
    """Its blocks are in an object that nobody looks into."""

    def forward(self, get: Callable[[], Any], x: Tensor) -> Tensor:
        for block in get():
            block.srcdata["x"] = F.dropout(x, P)
            block.update_all(fn.copy_u("x", "message"), fn.mean("message", "x"))
            x = block.dstdata["x"]
        return x


class Waits(nn.Module):
    """A module that has nothing to do with the graph, and is called until it is told to end."""

    def __init__(self) -> None:
        super().__init__()
        self.is_inside, self.may_end = threading.Event(), threading.Event()

    def forward(self, x: Tensor) -> Tensor:
        self.is_inside.set()
        assert self.may_end.wait(60)
        return F.dropout(x, P)


def in_thread(function: Callable[[], Any]) -> Callable[[], Any]:
    """Starts it in a thread; what is returned joins that, and returns or raises what it did."""
    ended: list[Any] = []

    def run() -> None:
        try:
            ended.extend((None, function()))
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def join() -> Any:
        thread.join(60)
        assert ended, "it did not end"
        if ended[0] is not None:
            raise ended[0]
        return ended[1]

    return join


def fetched_in_a_thread(loader: FullGraphLoader) -> Iterator[Any]:
    """One batch of each epoch, taken by a thread that lives as long as the epoch: its ids are not used again."""
    taken, may_end = threading.Event(), threading.Event()
    batches: list[Any] = []

    def fetch() -> None:
        for batch in loader:
            batches.append(batch)
            taken.set()
            assert may_end.wait(60)

    join = in_thread(fetch)
    assert taken.wait(60)
    yield batches[0]
    may_end.set()
    join()


def train(rank: int, world_size: int, part_config: str, way: str) -> list[Tensor]:
    g = PartitionedGraph.open(part_config)
    own = g.nodes.owned()
    # As many seeds on no two ranks: a weight that is missed shows.
    loader = FullGraphLoader(g, own[: 3 + 4 * rank], 2, plan=[own[:0]] * 2, seed=5)
    model = Sage()
    whole, copied = power_law(), copy.deepcopy(model).eval()
    gradients = []

    def epoch() -> None:
        batches = fetched_in_a_thread(loader) if way == "batches come from a thread" else loader
        for input_nodes, seeds, blocks in batches:
            x, y = g.ndata["feat"][input_nodes], g.ndata["label"][seeds]
            waits = Waits()
            join = None
            if way == "a thread runs a module" and rank != 1:
                join = in_thread(functools.partial(waits, torch.ones(len(x), 2)))
                assert waits.is_inside.wait(60)
            F.cross_entropy(model(blocks, x), y).backward()
            if join is not None:
                waits.may_end.set()
                join()
        for parameter in model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            gradients.append(parameter.grad / world_size)
            parameter.grad = None

    def evaluate(stop: threading.Event) -> None:
        while not stop.is_set():
            with torch.no_grad():
                copied([whole] * 2, whole.ndata["feat"])

    for number in range(EPOCHS):
        if way == "a thread trains":
            in_thread(epoch)()
        elif way == "a thread evaluates" and rank == 0 and number:
            stop = threading.Event()
            join = in_thread(functools.partial(evaluate, stop))
            epoch()
            stop.set()
            join()
        else:
            epoch()
    return gradients


@pytest.mark.parametrize(
    "way", ["a thread runs a module", "a thread evaluates", "a thread trains", "batches come from a thread"]
)
def test_gradients_are_those_without_threads(way: str, partitions: PartitionStore) -> None:
    """A module of another thread was taken for the outermost call: no loss weight, no replicated dropout, no error."""
    folder = partitions.get("power_law", power_law(), 3)
    expected = run_ranks(3, train, folder, "no threads")
    for gradients, without in zip(run_ranks(3, train, folder, way), expected, strict=True):
        assert len(gradients) == len(without)
        for gradient, other in zip(gradients, without, strict=True):
            assert_close(gradient, other, "gradient")


def use_elsewhere(rank: int, world_size: int, part_config: str) -> None:
    g = PartitionedGraph.open(part_config)
    own = g.nodes.owned()
    model = Sage()
    for input_nodes, _, blocks in FullGraphLoader(g, own[:3], 2, plan=[own[:0]] * 2):
        x = g.ndata["feat"][input_nodes]
        model(blocks, x)
        in_thread(lambda x=x, blocks=blocks: Holds()(lambda: blocks, x))()


def test_blocks_inside_of_an_object_are_not_used_in_another_thread(partitions: PartitionStore) -> None:
    for error in run_ranks_expect_errors(2, use_elsewhere, partitions.get("power_law", power_law(), 2)):
        assert error.type_name == "BlockError"
        assert "in a thread that has not used any so far" in error.message
