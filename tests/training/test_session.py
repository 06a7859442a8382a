# SPDX-License-Identifier: Apache-2.0
"""Randomness inside a model: replicated where there is a form of it that is, refused where rows would get numbers of
their own rank, left alone where it has nothing to do with rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import dgl.nn as dglnn
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dgl_hybrid import FullGraphLoader, PartitionedGraph
from dgl_hybrid.errors import BlockError
from tests.helpers.exactness import assert_close
from tests.helpers.graphs import NUM_CLASSES, NUM_FEATURES, power_law
from tests.helpers.partitions import PartitionStore
from tests.helpers.world import run_ranks

WIDTH = 4

REFUSED: dict[str, Callable[[Tensor], Any]] = {
    "torch.randn of sizes": lambda h: torch.randn(len(h), WIDTH),
    "torch.randn of a shape": lambda h: torch.randn(h.shape, dtype=h.dtype),
    "torch.randn by keyword": lambda h: torch.randn(size=(len(h), WIDTH)),
    "torch.rand of a vector": lambda h: torch.rand(len(h)),
    "torch.randint": lambda h: torch.randint(0, 7, (len(h),)),
    "torch.randint without low": lambda h: torch.randint(7, [len(h), 2]),
    "torch.randperm": lambda h: torch.randperm(len(h)),
    "torch.randperm by keyword": lambda h: torch.randperm(n=len(h)),
    "torch.normal of means": lambda h: torch.normal(h, 1.0),
    "torch.normal of deviations": lambda h: torch.normal(0.0, h.abs()),
    "torch.normal by keyword": lambda h: torch.normal(mean=h, std=1.0),
    "torch.normal of a shape": lambda h: torch.normal(0.0, 1.0, (len(h), WIDTH)),
    "torch.randn_like": torch.randn_like,
    "torch.randint_like": lambda h: torch.randint_like(h, 7),
    "torch.bernoulli": lambda h: torch.bernoulli(h.sigmoid()),
    "torch.multinomial": lambda h: torch.multinomial(h.sigmoid(), 1),
    "torch.poisson": lambda h: torch.poisson(h.abs()),
    "torch.alpha_dropout": lambda h: torch.alpha_dropout(h, 0.5, True),
    "torch.dropout_": lambda h: torch.dropout_(h.clone(), 0.5, True),
    "Tensor.uniform_": lambda h: h.clone().uniform_(),
    "Tensor.normal_": lambda h: torch.empty_like(h).normal_(0.0, 1.0),
    "Tensor.bernoulli": lambda h: h.sigmoid().bernoulli(),
    "Tensor.bernoulli_": lambda h: torch.empty_like(h).bernoulli_(0.5),
    "Tensor.exponential_": lambda h: torch.empty_like(h).exponential_(),
    "Tensor.random_": lambda h: torch.empty_like(h).random_(),
    "nn.AlphaDropout": nn.AlphaDropout(0.5),
    "F.gumbel_softmax": F.gumbel_softmax,
}

ALLOWED: dict[str, Callable[[Tensor], Any]] = {
    "noise of weights": lambda h: torch.randn(WIDTH, WIDTH + 1),
    "one number": lambda h: torch.rand(()),
    "one number of a vector": lambda h: torch.rand(1),
    "numbers up to the number of rows": lambda h: torch.randint(len(h), (3,)),
    "an order of columns": lambda h: torch.randperm(h.shape[1]),
    "noise of columns": lambda h: torch.normal(h.detach().mean(0), 1.0),
    "columns that are dropped": lambda h: torch.empty(h.shape[1]).bernoulli_(0.5),
    "as many columns as rows": lambda h: torch.rand(2, len(h)),
    "a layer that is evaluated": nn.AlphaDropout(0.5).eval(),
    "a function that does not train": lambda h: torch.alpha_dropout(h, 0.5, False),
    "dropout in place that does not train": lambda h: torch.dropout_(h.clone(), 0.5, False),
    "a function that does not train, by keyword": lambda h: torch.alpha_dropout(h, p=0.5, train=False),
    "leaky units that are evaluated": nn.RReLU().eval(),
}


class Drawing(nn.Module):
    """Does something with the rows between its layers."""

    def __init__(self, draw: Callable[[Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = dglnn.SAGEConv(NUM_FEATURES, WIDTH, "mean").double()
        self.second = dglnn.SAGEConv(WIDTH, NUM_CLASSES, "mean").double()
        self.draw = draw

    def forward(self, blocks: Sequence[Any], x: Tensor) -> Tensor:
        h = self.first(blocks[0], x)
        drawn = self.draw(h)
        is_of_rows = isinstance(drawn, Tensor) and drawn.shape == h.shape
        out: Tensor = self.second(blocks[1], drawn.to(h.dtype) if is_of_rows else h)
        return out


def draw_inside(rank: int, world_size: int, part_config: str) -> dict[str, str]:
    """Returns, for each way of drawing numbers, what the error said."""
    g = PartitionedGraph.open(part_config)
    loader = FullGraphLoader(g, g.owned_nodes(), 2, plan=[torch.arange(0)] * 2)
    said = {}
    for input_nodes, _, blocks in loader:
        for name, draw in (REFUSED | ALLOWED).items():
            try:
                Drawing(draw)(blocks, g.ndata["feat"][input_nodes])
                said[name] = ""
            except BlockError as error:
                said[name] = str(error)
    return said


def test_rows_get_no_numbers_from_their_ranks_own_generator(partitions: PartitionStore) -> None:
    """A row and its replicas on other ranks got different ones from most of these, silently."""
    for said in run_ranks(2, draw_inside, partitions.get("power_law", power_law(), 2)):
        for name in REFUSED:
            assert "draws from each rank's own generator" in said[name], name
        assert {name: said[name] for name in ALLOWED} == dict.fromkeys(ALLOWED, "")


def test_one_rank_may_draw_what_it_likes(partitions: PartitionStore) -> None:
    (said,) = run_ranks(1, draw_inside, partitions.get("power_law", power_law(), 1))
    assert set(said.values()) == {""}


DROPOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "F.dropout": lambda h: F.dropout(h, 0.4, True),
    "torch.dropout": lambda h: torch.dropout(h, 0.4, True),
    "torch.dropout by keyword": lambda h: torch.dropout(h, p=0.4, train=True),
    "torch.dropout of nothing": lambda h: torch.dropout(F.dropout(h, 0.4), 0.4, False),
}


def drop_inside(rank: int, world_size: int, part_config: str) -> tuple[Tensor, dict[str, Tensor]]:
    g = PartitionedGraph.open(part_config)
    assert g.partition.orig_node_ids is not None
    outputs = {}
    for name, draw in DROPOUTS.items():
        loader = FullGraphLoader(g, g.owned_nodes(), 2, plan=[torch.arange(0)] * 2, seed=3)
        for input_nodes, _, blocks in loader:
            outputs[name] = Drawing(draw)(blocks, g.ndata["feat"][input_nodes]).detach()
    return g.fetch_nodes(g.partition.orig_node_ids, loader.seeds), outputs


def test_dropout_of_torch_is_the_same_as_the_functional_one(partitions: PartitionStore) -> None:
    """It drew from each rank's own generator where `F.dropout` is replicated."""
    graph = power_law()
    ((ids, alone),) = run_ranks(1, drop_inside, partitions.get("power_law", graph, 1))
    expected = torch.empty_like(alone["F.dropout"])
    expected[ids] = alone["F.dropout"]
    whole = Drawing(lambda h: h)([graph, graph], graph.ndata["feat"]).detach()
    assert float((expected - whole).abs().max()) > 0.1, "nothing was dropped"
    for world_size in (1, 2):
        for ids, outputs in run_ranks(world_size, drop_inside, partitions.get("power_law", graph, world_size)):
            for name, output in outputs.items():
                is_same = torch.equal(output, outputs["F.dropout"])
                assert is_same, name
                assert_close(output, expected[ids], f"{name} on {world_size} ranks")
