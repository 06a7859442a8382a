# SPDX-License-Identifier: Apache-2.0
"""What is read from the data loaders of scripts, among them those that DGL would not recognise."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import dgl_hybrid  # noqa: F401  before dgl, which it makes importable

# isort: split
import dgl
import numpy as np
import pytest
import torch
from dgl.dataloading.dist_dataloader import EdgeCollator, NodeCollator
from dgl.distributed import graph_services

from dgl_hybrid.sampling import loaders
from dgl_hybrid.sampling.loaders import graph_of_loader, read_loader

ETYPE = ("_N", "_E", "_N")


def to_canonical(etype: Any) -> tuple[str, str, str]:
    """As DGL does."""
    if etype not in (ETYPE, ETYPE[1]):
        raise dgl.DGLError(f'Edge type "{etype}" does not exist.')
    return ETYPE


G = SimpleNamespace(
    ntypes=["_N"],
    canonical_etypes=[ETYPE],
    num_nodes=lambda *_: 10,
    to_canonical_etype=lambda etype: to_canonical(etype),
    get_partition_book=lambda: SimpleNamespace(is_homogeneous=True),
)


class OldStyleSampler:
    def __init__(self, fanouts: Any) -> None:
        self.g, self.fanouts = G, fanouts

    def sample_blocks(self, seeds: Any) -> None: ...


class EndlessItems:
    """A data set of the script's own, which answers every index; so do many that inherit from PyTorch's."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        assert index < len(self), "nobody asked for that"
        return torch.tensor(index)


def test_ids_may_lie_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """DGL takes them one by one from a GPU, where NumPy takes none."""
    asked: list[Any] = []
    to = torch.Tensor.to
    monkeypatch.setattr(
        torch.Tensor, "to", lambda x, *args, **options: (asked.append(args), to(x, *args, **options))[1]
    )
    assert read_loader(G, torch.tensor([3, 1]), 2, False, OldStyleSampler([2]).sample_blocks) is not None
    assert ("cpu", torch.int64) in asked


class NotYet:
    """Sampling that a script sets up later."""

    @property
    def g(self) -> Any:
        raise RuntimeError("call setup() first")

    g_sampling = fanouts = g

    def sample_blocks(self, seeds: Any) -> None: ...


def test_properties_that_raise_are_the_scripts_own_affair() -> None:
    """DGL never looks at them."""
    assert graph_of_loader(NotYet().sample_blocks) is None
    assert read_loader(G, [3, 1], 2, False, NotYet().sample_blocks) is None


def test_nodes_of_an_unknown_type_are_left_to_dgl() -> None:
    g = SimpleNamespace(**vars(G) | {"ntypes": ["author", "paper"]})
    collator = NodeCollator.__new__(NodeCollator)
    collator.g, collator._nids = g, {"nope": torch.tensor([1])}
    collator.graph_sampler = dgl.dataloading.NeighborSampler([2])
    assert read_loader(g, [("nope", 1)], 2, False, collator.collate) is None


@pytest.mark.parametrize("dataset", [[3, 1, 1], (3, 1, 1), np.array([3, 1, 1]), torch.tensor([3, 1, 1])])
def test_node_ids_of_an_old_style_loader(dataset: Any) -> None:
    access = read_loader(G, dataset, 2, False, OldStyleSampler([2, 5]).sample_blocks)
    assert access is not None
    assert (access.seeds.tolist(), access.occurrences.tolist()) == ([1, 3], [2.0, 1.0])
    assert (access.num_batches, access.fanouts) == (2, (5, 2)), "it draws the first fanout first"


@pytest.mark.parametrize(
    "dataset",
    [EndlessItems(), [("paper", 3)], [], torch.rand(3), torch.zeros(2, 2, dtype=torch.int64), [3, 10], [-1]],
)
def test_what_are_no_node_ids_is_left_alone(dataset: Any) -> None:
    assert read_loader(G, dataset, 2, False, OldStyleSampler([2, 5]).sample_blocks) is None


@pytest.mark.parametrize(
    "fanouts", [[2, 5], (2, 5), np.array([2, 5]), torch.tensor([2, 5]), [np.int64(2), np.int32(5)]]
)
def test_fanouts_are_numbers_of_any_kind(fanouts: Any) -> None:
    access = read_loader(G, [1], 1, False, OldStyleSampler(fanouts).sample_blocks)
    assert access is not None
    assert access.fanouts == (5, 2)
    assert all(type(fanout) is int for fanout in access.fanouts)


@pytest.mark.parametrize("fanouts", [None, [], "10,25", [2.5], [None], 5, [{"paper": 10}], [{"_E": None}]])
def test_other_fanouts_say_nothing(fanouts: Any) -> None:
    assert read_loader(G, [1], 1, False, OldStyleSampler(fanouts).sample_blocks) is None


def test_a_fanout_of_the_only_edge_type_is_a_number() -> None:
    access = read_loader(G, [1], 1, False, OldStyleSampler([{"_E": 10}, {ETYPE: 25}, 3]).sample_blocks)
    assert access is not None
    assert access.fanouts == (3, 25, 10)
    assert all(type(fanout) is int for fanout in access.fanouts)


def test_ends_of_edges_are_counted_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ends of every edge, and three negatives for each, drawn from ten vertices."""
    generator = torch.Generator().manual_seed(0)
    src, dst = torch.randint(8, (2, 50), generator=generator)
    asked: list[int] = []

    def find_edges(g: Any, eids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        asked.append(len(eids))
        return src[eids], dst[eids]

    class Collator(EdgeCollator):  # type: ignore[misc]
        def __init__(self) -> None:
            self.g, self.eids = G, torch.arange(50)
            self.graph_sampler = dgl.dataloading.NeighborSampler([2])
            self.negative_sampler = dgl.dataloading.negative_sampler.Uniform(3)

    monkeypatch.setattr(graph_services, "find_edges", find_edges)
    monkeypatch.setattr(loaders, "EDGES_AT_ONCE", 7)
    access = read_loader(G, torch.arange(50), 10, False, Collator().collate)
    assert access is not None
    assert max(asked) == 7
    expected = torch.bincount(torch.cat([src, dst]), minlength=10) + 3 * 50 / 10
    assert access.seeds.tolist() == list(range(10))
    assert torch.allclose(access.occurrences, expected.double())


def test_edges_of_another_graph_say_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Validation edges of a graph of their own, their ends sampled in the one of training: DGL's `g_sampling`."""

    class Collator(EdgeCollator):  # type: ignore[misc]
        def __init__(self) -> None:
            self.g, self.g_sampling, self.eids = dgl.graph(([0, 1], [1, 2])), G, torch.tensor([0, 1])
            self.graph_sampler = dgl.dataloading.NeighborSampler([2])
            self.negative_sampler = None

    monkeypatch.setattr(graph_services, "find_edges", lambda *_: pytest.fail("ids of another graph"))
    assert read_loader(G, torch.arange(2), 1, False, Collator().collate) is None


def test_an_edge_loader_that_is_made_again_asks_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As scripts do for every evaluation; one of other edges, or of more negatives, is read."""
    asked: list[int] = []

    def find_edges(g: Any, eids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        asked.append(len(eids))
        return eids, eids

    class Collator(EdgeCollator):  # type: ignore[misc]
        def __init__(self, eids: Any, num_negatives: int) -> None:
            self.g, self.eids, self.graph_sampler = G, eids, dgl.dataloading.NeighborSampler([2])
            self.negative_sampler = dgl.dataloading.negative_sampler.Uniform(num_negatives)

    monkeypatch.setattr(graph_services, "find_edges", find_edges)
    seen: set[tuple[object, ...]] = set()
    for num_edges, num_negatives, is_new in [(5, 1, True), (5, 1, False), (6, 1, True), (5, 2, True), (6, 1, False)]:
        asked.clear()
        collator = Collator(torch.arange(num_edges), num_negatives)
        access = read_loader(G, torch.arange(num_edges), 2, False, collator.collate, seen=seen)
        assert (access is not None, asked) == (is_new, [num_edges] * is_new)


@pytest.mark.parametrize("base", [NodeCollator, EdgeCollator])
def test_a_collator_with_an_init_of_its_own_may_lack_what_dgls_have(base: Any) -> None:
    class Collator(base):  # type: ignore[misc]
        def __init__(self) -> None:
            self.g, self.graph_sampler = G, dgl.dataloading.NeighborSampler([2])

    assert read_loader(G, [1], 1, False, Collator().collate) is None


def test_batches_are_of_what_is_drawn_from() -> None:
    """GraphStorm's loaders hand over ids by type: batches were one for each type, however many ids there were."""

    class Collator(NodeCollator):  # type: ignore[misc]
        def __init__(self) -> None:
            self.g, self.graph_sampler, self.nids = G, dgl.dataloading.NeighborSampler([2]), torch.arange(10)

    access = read_loader(G, {"_N": torch.arange(10)}, 2, False, Collator().collate)  # type: ignore[arg-type]
    assert access is not None
    assert access.num_batches == 5


@pytest.mark.parametrize("collate_fn", [None, len, lambda items: items, OldStyleSampler([1])])
def test_no_distributed_graph_in_sight(collate_fn: Any) -> None:
    assert graph_of_loader(collate_fn) is None
