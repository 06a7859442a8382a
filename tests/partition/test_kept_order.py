# SPDX-License-Identifier: Apache-2.0
"""The order of a part's vertices by locality that `partition_graph` keeps with it."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import dgl
import pytest
import safetensors.torch
import torch

from dgl_hybrid.errors import PartitionError
from dgl_hybrid.exchange.communicator import Communicator
from dgl_hybrid.exchange.ids import Ownership
from dgl_hybrid.exchange.locality import LocalPlaces
from dgl_hybrid.partition import clusters, load_partition, partition_graph, write
from dgl_hybrid.partition.local_order import LocalOrder, find_local_order
from dgl_hybrid.partition.manifest import SIDECAR_NAME
from dgl_hybrid.partition.sidecar import read_sidecar, write_sidecar
from dgl_hybrid.training.dist_graph import _order_of_own
from tests.helpers.rings import ring


@pytest.fixture(scope="module")
def graph() -> dgl.DGLGraph:
    """8000 vertices on a ring, with edges enough that their order matters; not sorted by destination."""
    indptr, indices, _ = ring(8000, torch.Generator().manual_seed(0))
    dst = torch.repeat_interleave(torch.arange(8000), indptr.diff())
    mixed = torch.randperm(len(dst), generator=torch.Generator().manual_seed(1))
    return dgl.graph((indices[mixed], dst[mixed]), num_nodes=8000)


@pytest.mark.parametrize(("num_parts", "method"), [(1, "random"), (2, "metis"), (3, "contiguous")])
def test_each_part_keeps_what_its_rank_would_find(
    num_parts: int, method: str, graph: dgl.DGLGraph, tmp_path: Path
) -> None:
    partition_graph(graph, "g", num_parts, tmp_path / "p", part_method=method)
    for rank in range(num_parts):
        part = load_partition(tmp_path / "p" / "g.json", rank)
        assert part.local_order is not None
        places = []
        for kept in (part.local_order, None):
            communicator = cast(Communicator, SimpleNamespace(timeout_s=60.0))
            nodes = Ownership(offsets=part.node_offsets, rank=rank)
            found = LocalPlaces(communicator, nodes, part.lists, graph.num_edges(), kept)
            found.find("auto")
            places.append((found.is_local("auto"), found._of_owned))
        assert places[0][0] == places[1][0]
        assert places[0][1] is not None
        assert places[1][1] is not None
        assert torch.equal(places[0][1], places[1][1])
        assert places[0][0]


def test_none_is_kept_where_none_is_asked_for_or_the_graph_is_small(
    graph: dgl.DGLGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write, "look_for_order", None)
    partition_graph(graph, "g", 2, tmp_path / "p", part_method="random", local_order=False)
    partition_graph(dgl.edge_subgraph(graph, range(40_000), relabel_nodes=False), "g", 2, tmp_path / "small")
    for folder in ("p", "small"):
        assert load_partition(tmp_path / folder / "g.json", 1).local_order is None


def test_a_part_of_one_vertex_has_none(graph: dgl.DGLGraph, tmp_path: Path) -> None:
    parts = torch.zeros(8000, dtype=torch.int64)
    parts[5] = 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(write, "assign_nodes", lambda *args, **options: parts)
        partition_graph(graph, "g", 2, tmp_path / "p")
    assert load_partition(tmp_path / "p" / "g.json", 0).local_order is not None
    assert load_partition(tmp_path / "p" / "g.json", 1).local_order is None


def test_where_metis_fails_training_looks_for_one(
    graph: dgl.DGLGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The order of breadth first, which takes its place in one run, would stay for ever."""
    monkeypatch.setattr(clusters, "sys", SimpleNamespace(**{**vars(sys), "executable": "/nowhere/python"}))
    partition_graph(graph, "g", 1, tmp_path / "p", part_method="random")
    assert load_partition(tmp_path / "p" / "g.json", 0).local_order is None
    assert "no order of a part's vertices by locality is kept: FileNotFoundError" in caplog.text


def test_equal_partitions_are_equal_files(graph: dgl.DGLGraph, tmp_path: Path) -> None:
    for name in ("a", "b"):
        partition_graph(graph, "g", 2, tmp_path / name, part_method="random", seed=3)
    for part in ("part0", "part1"):
        first, second = ((tmp_path / name / part / SIDECAR_NAME).read_bytes() for name in ("a", "b"))
        assert first == second


@pytest.mark.parametrize(
    ("rows", "reads"),
    [
        (torch.tensor([0, 1, 1]), (0.5, 0.5)),
        (torch.tensor([0, 1]), (0.5, 0.5)),
        (torch.tensor([0, 1, 3]), (0.5, 0.5)),
        (torch.tensor([[2, 1, 0]]), (0.5, 0.5)),
        (torch.tensor([2, 1, 0], dtype=torch.int32), (0.5, 0.5)),
        (torch.tensor([2, 1, 0]), ("many", 0.5)),
        (torch.tensor([2, 1, 0]), (0.5, None)),
    ],
)
def test_what_is_no_order_is_refused(rows: torch.Tensor, reads: tuple[float, float], tmp_path: Path) -> None:
    partition_graph(dgl.graph(([0, 1], [1, 2])), "g", 1, tmp_path / "p")
    path = tmp_path / "p" / "part0" / SIDECAR_NAME
    sidecar = read_sidecar(path, part_id=0, num_inner_nodes=3, num_inner_edges=2)
    assert sidecar.local_order is None
    order = LocalOrder(rows=rows, reads_by_id=reads[0], reads_by_locality=reads[1])
    write_sidecar(path, replace(sidecar, local_order=order))
    with pytest.raises(PartitionError, match=r"local_order must be an order of 3 vertices"):
        read_sidecar(path, part_id=0, num_inner_nodes=3, num_inner_edges=2)
    tensors = safetensors.torch.load_file(path)
    safetensors.torch.save_file(
        tensors, path, metadata={"dgl_hybrid": '{"reads": ' + "[" * 100_000 + "]" * 100_000 + "}"}
    )
    with pytest.raises(PartitionError, match=r"cannot be read \(maximum recursion depth"):
        read_sidecar(path, part_id=0, num_inner_nodes=3, num_inner_edges=2)
    good = LocalOrder(rows=torch.tensor([2, 0, 1]), reads_by_id=0.5, reads_by_locality=0.25)
    write_sidecar(path, replace(sidecar, local_order=good))
    kept = read_sidecar(path, part_id=0, num_inner_nodes=3, num_inner_edges=2).local_order
    assert kept is not None
    assert kept.rows.tolist() == [2, 0, 1]
    assert (kept.reads_by_id, kept.reads_by_locality) == (0.5, 0.25)


def test_trainers_of_one_machine_have_theirs_of_its_part(graph: dgl.DGLGraph, tmp_path: Path) -> None:
    partition_graph(graph, "g", 1, tmp_path / "p", part_method="random")
    path = tmp_path / "p" / "part0" / SIDECAR_NAME
    sidecar = read_sidecar(path, part_id=0, num_inner_nodes=8000, num_inner_edges=graph.num_edges())
    assert sidecar.local_order is not None
    assert _order_of_own(None, slice(0, 5)) is None
    assert _order_of_own(replace(sidecar, local_order=None), slice(0, 5)) is None
    whole = sidecar.local_order.rows
    for own in (slice(0, 3000), slice(3000, 8000)):
        order = _order_of_own(sidecar, own)
        assert order is not None
        assert torch.equal(order.rows.sort().values, torch.arange(own.stop - own.start))
        places = torch.argsort(whole)[own.start : own.stop]
        assert bool((places[order.rows].diff() > 0).all())
        assert order.shares_more


def test_breadth_first_order_is_none_where_clusters_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    indptr, indices, _ = ring(6000, torch.Generator().manual_seed(0))
    monkeypatch.setattr(clusters, "sys", SimpleNamespace(**{**vars(sys), "executable": None}))
    with pytest.raises(clusters.ClusterError, match="no Python to start METIS with"):
        find_local_order(indptr, indices, needs_clusters=True)
