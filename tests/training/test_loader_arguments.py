# SPDX-License-Identifier: Apache-2.0
"""`FullGraphLoader` takes what `DistNodeDataLoader` takes, by the same names."""

from __future__ import annotations

import inspect
from typing import Any

import dgl
import pytest
from dgl.distributed.dist_dataloader import DistDataLoader

from dgl_hybrid import FullGraphLoader, PartitionedGraph
from dgl_hybrid.training.loader_arguments import IGNORED
from dgl_hybrid.training.prefetch import Prefetch
from tests.helpers.graphs import power_law
from tests.helpers.partitions import PartitionStore
from tests.helpers.world import run_ranks, run_ranks_expect_errors


def load_by_dgls_names(rank: int, world_size: int, part_config: str) -> tuple[int, int]:
    g = PartitionedGraph.open(part_config)
    sampler = dgl.dataloading.NeighborSampler([10, 25])
    loader = FullGraphLoader(g, g.owned_nodes("train_mask"), graph_sampler=sampler, batch_size=8, queue_size=10)
    return loader.num_layers, sum(1 for _ in loader)


def test_the_sampler_has_dgls_name_too(partitions: PartitionStore) -> None:
    assert run_ranks(1, load_by_dgls_names, partitions.get("power_law", power_law(), 1)) == [(2, 1)]


@pytest.mark.parametrize(
    ("samplers", "message"),
    [
        ({}, r"needs a sampler or a number of layers \(got neither sampler nor graph_sampler\)"),
        ({"sampler": 2, "graph_sampler": 2}, "got sampler and graph_sampler, which is DGL's name for it: give one"),
    ],
)
def test_one_sampler_is_wanted(samplers: dict[str, int], message: str, partitions: PartitionStore) -> None:
    g = PartitionedGraph.open(partitions.get("power_law", power_law(), 1))
    with pytest.raises(TypeError, match=message):
        FullGraphLoader(g, g.owned_nodes(), **samplers)


def give_one_sampler(rank: int, world_size: int, part_config: str) -> None:
    g = PartitionedGraph.open(part_config)
    options: dict[str, Any] = {"no_such_argument": 1} if rank == 1 else {}
    FullGraphLoader(g, g.owned_nodes(), None if rank == 0 else 2, **options)


def test_a_sampler_or_argument_that_one_rank_gives_is_refused_on_all(partitions: PartitionStore) -> None:
    """The others waited for that rank."""
    errors = run_ranks_expect_errors(3, give_one_sampler, partitions.get("power_law", power_law(), 3))
    assert [error.type_name for error in errors[:2]] == ["TypeError", "TypeError"]
    assert "rank 0" in errors[2].message
    assert "needs a sampler or a number of layers" in errors[2].message


def test_all_arguments_of_dgls_loader_are_known() -> None:
    taken = set(inspect.signature(DistDataLoader.__init__).parameters) - {"self", "dataset"}
    assert taken <= IGNORED


@pytest.mark.parametrize("names", [["w"], {("_N", "_E", "_N"): ["w"]}])
def test_prefetched_fields_may_be_given_by_type(names: object) -> None:
    sampler = dgl.dataloading.NeighborSampler([2], prefetch_edge_feats=names)
    assert Prefetch.from_sampler(sampler).edge_fields == ["w"]


def test_prefetched_fields_of_several_types_are_refused() -> None:
    sampler = dgl.dataloading.NeighborSampler([2], prefetch_node_feats={"paper": ["x"], "author": ["x"]})
    with pytest.raises(ValueError, match=r"prefetch_node_feats names fields of 2 types \(paper, author\)"):
        Prefetch.from_sampler(sampler)
