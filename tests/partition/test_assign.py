# SPDX-License-Identifier: Apache-2.0
"""Which part a vertex goes to."""

from __future__ import annotations

from typing import Any

import dgl
import pytest
import torch

from dgl_hybrid.errors import PartitionError
from dgl_hybrid.partition import assign
from dgl_hybrid.partition.assign import assign_nodes, fill_empty_parts
from tests.helpers.graphs import power_law


@pytest.mark.parametrize("method", ["metis", "random", "contiguous"])
@pytest.mark.parametrize("num_parts", [1, 2, 5, 6])
def test_no_part_is_empty_even_on_a_tiny_graph(method: str, num_parts: int) -> None:
    graph = dgl.graph(([0, 1], [1, 0]), num_nodes=6)
    part = assign_nodes(graph, num_parts, method)
    assert sorted(set(part.tolist())) == list(range(num_parts))


def test_contiguous_is_ordered_and_even() -> None:
    part = assign_nodes(dgl.graph(([], []), num_nodes=10), 3, "contiguous")
    assert part.tolist() == sorted(part.tolist())
    assert torch.bincount(part).tolist() == [4, 3, 3]


def test_contiguous_can_balance_edges() -> None:
    src = torch.arange(30) % 10
    graph = dgl.graph((src, torch.where(torch.arange(30) < 24, 0, 9)), num_nodes=10)  # vertex 0 has 24 in-edges
    part = assign_nodes(graph, 2, "contiguous", balance_edges=True)
    assert part.tolist() == [0] + [1] * 9
    # With five parts the hub alone spans several shares; the ranges stay ordered and none is empty.
    part = assign_nodes(graph, 5, "contiguous", balance_edges=True)
    assert part.tolist() == sorted(part.tolist())
    assert set(part.tolist()) == set(range(5))


def test_metis_cuts_few_edges_between_two_cliques() -> None:
    ends = [(u, v) for base in (0, 10) for u in range(base, base + 10) for v in range(base, base + 10) if u != v]
    src, dst = torch.tensor([*ends, (0, 10), (10, 0)]).t()
    part = assign_nodes(dgl.graph((src, dst)), 2, "metis")
    assert len(set(part[:10].tolist())) == len(set(part[10:].tolist())) == 1


def test_metis_never_sees_parallel_edges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of these it overran its memory, so that the process was aborted."""
    src, dst = [2, 4, 2, 1, 1, 2, 0, 2, 2, 0], [2, 1, 1, 2, 4, 0, 2, 0, 2, 2]
    graphs: list[dgl.DGLGraph] = []

    def assign_by_metis(graph: dgl.DGLGraph, *args: Any, **options: Any) -> torch.Tensor:
        graphs.append(graph)
        return torch.arange(5) % 2

    monkeypatch.setattr(assign.dgl, "metis_partition_assignment", assign_by_metis)
    graph = dgl.graph((src, dst), num_nodes=5)
    graph.ndata["feat"] = torch.rand(5, 2)
    assign_nodes(graph, 2, "metis")
    assert graph.num_edges() == 10
    (seen,) = graphs
    ends = [ids.tolist() for ids in seen.edges()]
    assert sorted(zip(*ends, strict=True)) == sorted(set(zip(src, dst, strict=True)))


def test_metis_balances_a_vertex_class() -> None:
    graph = power_law(num_nodes=200, num_edges=1600)
    classes = (torch.arange(200) < 40).long()
    part = assign_nodes(graph, 2, "metis", balance_ntypes=classes)
    inside = int((part[:40] == 0).sum())
    assert 14 <= inside <= 26


def test_fill_empty_parts_takes_from_the_largest() -> None:
    given = torch.tensor([0, 0, 0, 1])
    filled = fill_empty_parts(given, 4)
    assert sorted(torch.bincount(filled).tolist()) == [1, 1, 1, 1]
    assert given.tolist() == [0, 0, 0, 1]
    assert fill_empty_parts(given, 2) is given


def test_metis_failure_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise dgl.DGLError("METIS_ERROR_MEMORY")

    monkeypatch.setattr(assign.dgl, "metis_partition_assignment", fail)
    with pytest.raises(PartitionError, match=r"METIS failed on 60 vertices and 2 parts \(METIS_ERROR_MEMORY\)"):
        assign_nodes(power_law(), 2, "metis")
    monkeypatch.setattr(assign.dgl, "metis_partition_assignment", lambda *_, **__: None)
    with pytest.raises(PartitionError, match="METIS returned nothing"):
        assign_nodes(power_law(), 2, "metis")
