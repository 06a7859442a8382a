# SPDX-License-Identifier: Apache-2.0
"""What `partition_graph` writes, read back by us and by plain DGL, against the graph it was given."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import resource
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import dgl
import dgl.distributed
import pytest
import torch
from torch import Tensor

from dgl_hybrid.errors import PartitionError
from dgl_hybrid.partition import (
    LocalPartition,
    load_partition,
    partition_graph,
    read_partition_summary,
    verify_partition,
)
from dgl_hybrid.partition.location import find_part_config
from tests.helpers.graphs import NAMED, hand_drawn, power_law, with_duplicates

CASES = [(1, 1, "metis"), (2, 1, "random"), (3, 1, "metis"), (3, 2, "random"), (4, 3, "contiguous")]


def write(graph: dgl.DGLGraph, folder: Path, num_parts: int, num_hops: int = 1, method: str = "random") -> Path:
    partition_graph(graph, "g", num_parts, folder, num_hops=num_hops, part_method=method)
    return folder / "g.json"


def in_edges_by_id(graph: dgl.DGLGraph, vertex: int) -> tuple[Tensor, Tensor]:
    """Sources and ids of the in-edges of a vertex, in edge-id order."""
    src, dst = graph.edges(order="eid")
    eid = (dst == vertex).nonzero().flatten()
    return src[eid], eid


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize(("num_parts", "num_hops", "method"), CASES)
def test_parts_together_are_the_graph(name: str, num_parts: int, num_hops: int, method: str, tmp_path: Path) -> None:
    graph = NAMED[name]()
    graph.ndata["flag"] = torch.arange(graph.num_nodes()) % 3 == 0
    mapping = partition_graph(graph, "g", num_parts, tmp_path / "p", num_hops, method, return_mapping=True)
    assert mapping is not None
    orig_nids, orig_eids = mapping
    assert isinstance(orig_nids, Tensor)
    assert isinstance(orig_eids, Tensor)
    assert torch.equal(orig_nids.sort().values, graph.nodes())
    assert torch.equal(orig_eids.sort().values, torch.arange(graph.num_edges()))
    for part_id in range(num_parts):
        part = load_partition(tmp_path / "p" / "g.json", part_id)
        first = int(part.node_offsets[part_id])
        assert part.orig_node_ids is not None
        assert part.orig_edge_ids is not None
        assert part.out_degrees is not None
        assert torch.equal(part.orig_node_ids, orig_nids[first : first + part.num_inner])
        assert torch.equal(part.in_degrees, graph.in_degrees()[part.orig_node_ids])
        assert torch.equal(part.out_degrees, graph.out_degrees()[part.orig_node_ids])
        for key, data in part.node_data.items():
            assert data.dtype == graph.ndata[key].dtype
            assert torch.equal(data, graph.ndata[key][part.orig_node_ids])
        for key, data in part.edge_data.items():
            assert data.dtype == graph.edata[key].dtype
            assert torch.equal(data, graph.edata[key][part.orig_edge_ids])
        assert set(part.node_data) == set(graph.ndata)
        assert set(part.edge_data) == set(graph.edata)
        lists = [
            (first + k, part.lists.indptr, k, part.lists.src_global, part.lists.eid_global)
            for k in range(part.num_inner)
        ]
        lists += [
            (int(v), part.halo_lists.indptr, k, part.halo_lists.src_global, part.halo_lists.eid_global)
            for k, v in enumerate(part.halo_global)
        ]
        for vertex, indptr, row, src, eid in lists:
            expected_src, expected_eid = in_edges_by_id(graph, int(orig_nids[vertex]))
            rows = slice(int(indptr[row]), int(indptr[row + 1]))
            assert torch.equal(orig_eids[eid[rows]], expected_eid)  # original edge-id order: ties in max depend on it
            assert torch.equal(orig_nids[src[rows]], expected_src)


@pytest.mark.parametrize(("num_parts", "num_hops", "method"), CASES)
def test_plain_dgl_reads_the_same(num_parts: int, num_hops: int, method: str, tmp_path: Path) -> None:
    graph = with_duplicates()
    config = write(graph, tmp_path / "p", num_parts, num_hops, method)
    for part_id in range(num_parts):
        ours = load_partition(config, part_id)
        local, node_feats, edge_feats, book, name, ntypes, etypes = dgl.distributed.load_partition(str(config), part_id)
        assert (name, ntypes, etypes) == ("g", ["_N"], [("_N", "_E", "_N")])
        first, last = int(ours.node_offsets[part_id]), int(ours.node_offsets[part_id + 1])
        assert torch.equal(book.partid2nids(part_id), torch.arange(first, last))
        first_edge, last_edge = int(ours.edge_offsets[part_id]), int(ours.edge_offsets[part_id + 1])
        assert torch.equal(book.partid2eids(part_id), torch.arange(first_edge, last_edge))
        nids, eids = local.ndata[dgl.NID], local.edata[dgl.EID]
        inner, inner_edge = local.ndata["inner_node"] == 1, local.edata["inner_edge"] == 1
        # DistGraph's servers rely on both: owned vertices and edges come first, in id order.
        assert torch.equal(nids[: last - first], torch.arange(first, last))
        assert int(inner.sum()) == last - first
        assert torch.equal(eids[: last_edge - first_edge], torch.arange(first_edge, last_edge))
        assert int(inner_edge.sum()) == last_edge - first_edge
        src, dst = local.edges(order="eid")
        assert torch.equal(inner[dst], inner_edge)
        order = torch.argsort(nids[dst[inner_edge]] * graph.num_edges() + eids[inner_edge])
        assert torch.equal(nids[src[inner_edge]][order], ours.lists.src_global)
        assert ours.out_degrees is not None
        # What DistGraph.out_degrees answers from the owner's part.
        assert torch.equal(local.out_degrees(torch.arange(last - first)), ours.out_degrees)
        assert torch.equal(book.nid2partid(ours.lists.src_global), _owner(ours, ours.lists.src_global))
        assert torch.equal(node_feats["_N/feat"], ours.node_data["feat"])
        assert torch.equal(edge_feats["_N:_E:_N/w"], ours.edge_data["w"])


def _owner(part: LocalPartition, ids: Tensor) -> Tensor:
    return torch.searchsorted(part.node_offsets, ids, right=True) - 1


@pytest.mark.parametrize("num_hops", [1, 2, 3])
def test_halo_is_what_dgl_would_store(num_hops: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Same assignment, so the same owned and halo vertices and the same edges as DGL's own writer."""
    graph = power_law()
    mapping = partition_graph(graph, "g", 3, tmp_path / "ours", num_hops, "random", return_mapping=True)
    assert mapping is not None
    offsets = torch.tensor(read_partition_summary(tmp_path / "ours" / "g.json").node_offsets)
    assignment = torch.empty(graph.num_nodes(), dtype=torch.int64)
    assignment[mapping[0]] = torch.repeat_interleave(torch.arange(3), offsets.diff())
    monkeypatch.setattr(dgl.distributed.partition, "random_choice", lambda *_: assignment)
    theirs_nids, theirs_eids = dgl.distributed.partition_graph(
        graph, "g", 3, str(tmp_path / "dgl"), num_hops=num_hops, part_method="random", return_mapping=True
    )
    for part_id in range(3):
        contents = []
        for folder, nids, eids in (("dgl", theirs_nids, theirs_eids), ("ours", mapping[0], mapping[1])):
            local = dgl.distributed.load_partition(str(tmp_path / folder / "g.json"), part_id)[0]
            vertices, inner = nids[local.ndata[dgl.NID]], local.ndata["inner_node"] == 1
            contents.append((vertices[inner].tolist(), vertices[~inner].tolist(), eids[local.edata[dgl.EID]].tolist()))
        for theirs, ours in zip(*contents, strict=True):
            assert sorted(theirs) == sorted(ours)


@pytest.mark.parametrize("num_hops", [1, 2, 3])
def test_halo_lists_are_claimed_exactly_where_complete(num_hops: int, tmp_path: Path) -> None:
    """Halo vertices at in-distance < num_hops have their lists; others only if all in-edges are here by chance."""
    graph = NAMED["isolated"]()
    config = write(graph, tmp_path / "p", 3, num_hops)
    nids = torch.cat([_original(load_partition(config, p)) for p in range(3)])
    src, dst = (ends.tolist() for ends in graph.edges(order="eid"))
    for part_id in range(3):
        part = load_partition(config, part_id)
        owned = set(_original(part).tolist())
        reached = set(owned)
        for _ in range(num_hops - 1):
            reached |= {u for u, v in zip(src, dst, strict=True) if v in reached}
        stored = [(u, v) for u, v in zip(src, dst, strict=True) if v in reached or u in owned]
        present = {vertex for edge in stored for vertex in edge} - owned
        complete = {v for v in present if sum(w == v for _, w in stored) == int(graph.in_degrees(v))}
        assert reached - owned <= complete
        assert set(nids[part.halo_global].tolist()) == complete


def _original(part: LocalPartition) -> Tensor:
    assert part.orig_node_ids is not None
    return part.orig_node_ids


def test_hand_drawn_folder(tmp_path: Path) -> None:
    config = write(hand_drawn(), tmp_path / "p", 2, 1, "contiguous")
    part = load_partition(config, 1)  # owns vertices 3, 4, 5
    assert part.node_offsets.tolist() == [0, 3, 6]
    assert part.edge_offsets.tolist() == [0, 4, 7]  # edges into 0, 1, 2, 2 come first
    assert part.lists.indptr.tolist() == [0, 1, 2, 3]
    assert part.lists.src_global.tolist() == [1, 3, 4]
    assert part.lists.eid_global.tolist() == [4, 5, 6]
    assert part.edge_data["w"].tolist() == [3.0, 4.0, 5.0]
    assert part.in_degrees.tolist() == [1, 1, 1]
    assert part.out_degrees is not None
    assert part.out_degrees.tolist() == [1, 2, 1]
    # The only in-edge of vertex 0 starts here; 1 and 2 have in-edges that one hop does not store.
    assert part.halo_global.tolist() == [0]
    assert part.halo_lists.src_global.tolist() == [5]
    assert load_partition(write(hand_drawn(), tmp_path / "q", 2, 2, "contiguous"), 1).halo_global.tolist() == [0, 1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.int32, torch.bool])
def test_data_keeps_its_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    graph = power_law()
    graph.ndata["x"] = torch.arange(graph.num_nodes() * 6).reshape(-1, 2, 3).to(dtype)
    graph.edata["y"] = torch.arange(graph.num_edges()).to(dtype)
    part = load_partition(write(graph, tmp_path / "p", 2), 0)
    assert part.orig_edge_ids is not None
    assert torch.equal(part.node_data["x"], graph.ndata["x"][_original(part)])
    assert torch.equal(part.edge_data["y"], graph.edata["y"][part.orig_edge_ids])


def test_parts_without_edges_and_a_graph_without_edges(tmp_path: Path) -> None:
    """DGL's own writer fails on both."""
    chain = dgl.graph(([0], [1]), num_nodes=6)
    for graph in (chain, dgl.graph(([], []), num_nodes=6)):
        config = write(graph, tmp_path / "p", 3, 2, "contiguous")
        for part_id in range(3):
            part = load_partition(config, part_id)
            assert part.num_inner == 2
            assert part.lists.src_global.numel() == (graph.num_edges() if part_id == 0 else 0)
            assert dgl.distributed.load_partition(str(config), part_id)[0].num_nodes() == 2


def test_custom_type_names_int32_ids_and_formats(tmp_path: Path) -> None:
    graph = dgl.heterograph({("user", "follows", "user"): ([0, 1, 2, 3], [1, 2, 3, 0])}).int()
    graph.ndata["x"] = torch.arange(4.0)
    partition_graph(graph, "g", 2, tmp_path, part_method="contiguous", graph_formats=["csc"])
    assert load_partition(tmp_path / "g.json", 1).node_data["x"].tolist() == [2.0, 3.0]
    _, node_feats, _, _, _, ntypes, etypes = dgl.distributed.load_partition(str(tmp_path / "g.json"), 1)
    assert (ntypes, etypes) == (["user"], [("user", "follows", "user")])
    assert list(node_feats) == ["user/x"]


def test_trainer_ids_are_written_and_set_on_the_graph(tmp_path: Path) -> None:
    """As DGL sets them; nothing else of the graph changes."""
    graph = power_law()
    fields = set(graph.ndata), set(graph.edata)
    partition_graph(graph, "g", 2, tmp_path, num_trainers_per_machine=2, balance_edges=True)
    assert (set(graph.ndata), set(graph.edata)) == tuple(names | {"trainer_id"} for names in fields)
    assert torch.equal(graph.edata["trainer_id"], graph.ndata["trainer_id"][graph.edges()[1]])
    for part_id in range(2):
        part = load_partition(tmp_path / "g.json", part_id)
        assert set(part.node_data["trainer_id"].tolist()) <= {2 * part_id, 2 * part_id + 1}
        owner = torch.repeat_interleave(part.node_data["trainer_id"], part.in_degrees)
        order = part.lists.eid_global - part.edge_offsets[part_id]
        assert torch.equal(part.edge_data["trainer_id"][order], owner)
        assert torch.equal(graph.ndata["trainer_id"][_original(part)], part.node_data["trainer_id"])


@pytest.mark.parametrize("method", ["random", "contiguous"])
def test_the_same_call_writes_the_same_bytes(method: str, tmp_path: Path) -> None:
    """METIS as DGL builds it reads uninitialised memory, and graph.dgl holds some; everything else repeats."""
    files = []
    for name in ("a", "b"):
        write(power_law(), tmp_path / name, 3, 2, method)
        content = json.loads((tmp_path / name / "hybrid_manifest.json").read_text())
        files.append({path: record for path, record in content["files"].items() if not path.endswith("graph.dgl")})
    assert len(files[0]) == 10
    assert files[0] == files[1]


def test_seed_changes_a_random_partition(tmp_path: Path) -> None:
    sizes = []
    for seed in (0, 0, 1):
        partition_graph(power_law(), "g", 2, tmp_path, part_method="random", seed=seed)
        sizes.append(_original(load_partition(tmp_path / "g.json", 0)).tolist())
    assert sizes[0] == sizes[1] != sizes[2]


def test_stdout_stays_clean(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write(power_law(), tmp_path / "p", 3, 1, "metis")
    load_partition(tmp_path / "p" / "g.json", 0)
    captured = capfd.readouterr()
    assert captured.out == ""
    assert "edge cuts" not in captured.err


def test_a_heterograph_is_written_and_refused_by_load(tmp_path: Path) -> None:
    ring = torch.arange(40)
    graph = dgl.heterograph({("a", "x", "b"): (ring, ring), ("b", "y", "a"): (ring, ring.roll(1))})
    graph.nodes["a"].data["h"] = torch.arange(40.0)
    mapping = partition_graph(graph, "h", 2, tmp_path / "p", part_method="random", return_mapping=True)
    assert mapping is not None
    assert set(mapping[0]) == {"a", "b"}
    config = tmp_path / "p" / "h.json"
    assert dgl.distributed.load_partition(str(config), 0)[5] == ["a", "b"]
    summary = read_partition_summary(config)
    assert (summary.is_homogeneous, summary.has_sidecar, summary.node_offsets) == (False, True, ())
    with pytest.raises(PartitionError, match="holds a heterograph; full-graph training reads homogeneous graphs only"):
        load_partition(config, 0)
    rare = dgl.heterograph({("a", "x", "b"): ([0], [0]), ("b", "y", "a"): ([0], [1])}, {"a": 4, "b": 4})
    with pytest.raises(PartitionError, match="DGL cannot write this heterograph in 2 parts"):
        partition_graph(rare, "h", 2, tmp_path / "q", part_method="random")
    with pytest.raises(ValueError, match="'contiguous' is for homogeneous graphs"):
        partition_graph(graph, "h", 2, tmp_path / "q", part_method="contiguous")


def test_what_ails_dgl_with_a_heterograph_is_told_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DGL's own words are a KeyError where nothing was drawn for a part, a TypeError where METIS gives nothing."""
    pair = dgl.heterograph({("a", "x", "b"): ([0], [0]), ("b", "y", "a"): ([0], [0])})
    words = []
    for seed in range(12):  # in every fourth draw both vertices go to part 0
        with pytest.raises(PartitionError, match="DGL cannot write this heterograph in 2 parts") as caught:
            partition_graph(pair, "h", 2, tmp_path / "q", part_method="random", seed=seed)
        words.append(str(caught.value))
    assert any("KeyError" in word for word in words)
    monkeypatch.setattr(dgl.distributed.partition, "metis_partition_assignment", lambda *args, **kwargs: None)
    with pytest.raises(PartitionError, match=r"in 2 parts \(TypeError"):
        partition_graph(pair, "h", 2, tmp_path / "q")
    for num_parts, message in ((0, r"must be at least 1 \(got 0\)"), (3, r"number of vertices \(got 3 parts for 2")):
        with pytest.raises(ValueError, match=f"num_parts .*{message}"):
            partition_graph(pair, "h", num_parts, tmp_path / "q")


def next_draws(graph: dgl.DGLGraph, folder: Path, seed: int, method: str | None) -> list[int]:
    """What a script that has seeded DGL draws after it has written a partition, or has not (None)."""
    dgl.seed(seed)
    if method is not None:
        partition_graph(graph, "h", 2, folder, part_method=method)
    return dgl.random.choice(10**9, 4).tolist()


def test_a_heterograph_leaves_the_scripts_seed(tmp_path: Path) -> None:
    ring = torch.arange(40)
    graph = dgl.heterograph({("a", "x", "b"): (ring, ring), ("b", "y", "a"): (ring, ring.roll(1))})
    assert next_draws(graph, tmp_path, 5, "metis") == next_draws(graph, tmp_path, 5, None)
    after_random = [next_draws(graph, tmp_path, seed, "random") for seed in (5, 5, 6)]
    assert after_random[0] == after_random[1] != after_random[2]


def test_formats_of_a_graph_that_cannot_be_partitioned(tmp_path: Path) -> None:
    graph = dgl.graph(([0, 1, 2], [1, 2, 0])).formats("csc")
    with pytest.raises(ValueError, match=r"must have the format coo \(got csc alone\): pass g\.formats"):
        partition_graph(graph, "g", 2, tmp_path / "p", part_method="contiguous")
    graph = graph.formats(["coo", "csr", "csc"])  # as it says
    partition_graph(graph, "g", 2, tmp_path / "p", part_method="contiguous")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hops": 0}, r"num_hops must be at least 1 \(got 0\)"),
        ({"part_method": "kway"}, r"part_method must be one of metis, random, contiguous \(got 'kway'\)"),
        ({"num_parts": 0}, r"num_parts must be at least 1 \(got 0\)"),
        ({"num_parts": 7}, r"num_parts must not exceed the number of vertices \(got 7 parts for 6 vertices\)"),
        ({"objtype": "sum"}, "objtype must be 'cut' or 'vol'"),
        ({"graph_name": "../g"}, "graph_name must be usable as a file name"),
        ({"graph_name": "hybrid_manifest"}, "its JSON file would be the manifest"),
        ({"num_trainers_per_machine": 0}, "num_trainers_per_machine must be at least 1"),
        ({"balance_ntypes": {"a": torch.zeros(6), "b": torch.zeros(6)}}, "balance_ntypes must name one vertex type"),
    ],
)
def test_wrong_arguments(changes: dict[str, object], message: str, tmp_path: Path) -> None:
    arguments: dict[str, object] = {"graph_name": "g", "num_parts": 2, "out_path": tmp_path / "p", **changes}
    with pytest.raises(ValueError, match=message):
        partition_graph(hand_drawn(), **arguments)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []  # no half folder, no staging folder


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((2, "g", "p"), r"a name, a number of parts and a folder, in this order \(got 2, 'g', 'p'\)"),
        (("g", "p", 2), r"in this order \(got 'g', 'p', 2\)"),
        (("g", True, "p"), "in this order"),
        (("g", 2, 3), r"out_path must be a folder \(got 3\)"),
    ],
)
def test_arguments_in_another_order(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        partition_graph(hand_drawn(), *arguments)
    with pytest.raises(TypeError, match=r"as a folder or a file \(got DGLGraph\)"):
        find_part_config(hand_drawn())


def test_rewriting_replaces_and_another_graph_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("kept")
    write(power_law(), tmp_path, 4)
    write(hand_drawn(), tmp_path, 2, 1, "contiguous")
    assert load_partition(tmp_path / "g.json", 0).num_inner == 3
    assert (tmp_path / "notes.txt").read_text() == "kept"
    with pytest.raises(PartitionError, match="holds the partition of graph 'g'; writing 'other' there would overwrite"):
        partition_graph(hand_drawn(), "other", 2, tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(PartitionError, match="exists and is not a folder"):
        partition_graph(hand_drawn(), "g", 2, tmp_path / "file")


def test_parts_of_a_larger_partition_go_with_it(tmp_path: Path) -> None:
    (tmp_path / "part9").mkdir()  # somebody's own
    (tmp_path / "part8").symlink_to(tmp_path / "part9")
    write(power_law(), tmp_path, 4)
    write(power_law(), tmp_path, 2)
    assert sorted(path.name for path in tmp_path.glob("part*")) == ["part0", "part1", "part8", "part9"]


@pytest.mark.parametrize("is_there", [False, True])
def test_what_killed_processes_were_writing_is_removed(is_there: bool, tmp_path: Path) -> None:
    """Each left as much as a partition, under a name that `ls` does not show."""
    target = tmp_path / "[parts]"
    if is_there:
        target.mkdir()
    beside = target if is_there else tmp_path
    old = time.time() - 1e4
    names = {"left": ".[parts].writing-a", "written": ".[parts].writing-b", "young": ".[parts].writing-c"}
    names |= {"another's": ".p.writing-d", "linked": ".[parts].writing-e"}
    for kind, name in names.items():
        if kind == "linked":
            (beside / name).symlink_to(beside / names["another's"], target_is_directory=True)
            continue
        (beside / name / "part0").mkdir(parents=True)
        if kind != "young":
            os.utime(beside / name, (old, old))
    writer = os.open(beside / names["written"], os.O_RDONLY)
    try:
        fcntl.flock(writer, fcntl.LOCK_EX)
        partition_graph(power_law(), "g", 2, target, part_method="random")
    finally:
        os.close(writer)
    assert {kind for kind, name in names.items() if not (beside / name).exists()} == {"left"}
    assert len(list(beside.glob(".*.writing-*"))) == len(names) - 1, "nor is there one of this run"


def test_what_a_killed_first_write_left_is_removed_though_the_target_is_there_now(tmp_path: Path) -> None:
    """Run again within a minute, it was taken for one that is being written; later ones looked in the target only."""
    left = tmp_path / ".p.writing-k2_0x9ab"
    (left / "part0").mkdir(parents=True)
    (left / "g.json").write_text("{")
    own = tmp_path / ".p.writing-together"
    own.mkdir()
    (own / "notes.txt").write_text("a user's own")
    write(hand_drawn(), tmp_path / "p", 2)
    assert left.exists(), "somebody may be about to lock it"
    old = time.time() - 1e4
    for folder in (left, own):
        os.utime(folder, (old, old))
    writer = os.open(left, os.O_RDONLY)
    try:
        fcntl.flock(writer, fcntl.LOCK_EX)
        write(hand_drawn(), tmp_path / "p", 2)
        assert left.exists(), "somebody writes there"
    finally:
        os.close(writer)
    write(hand_drawn(), tmp_path / "p", 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [own.name, "p"]
    assert (own / "notes.txt").exists()


def test_what_is_of_no_partition_is_not_replaced(tmp_path: Path) -> None:
    """Scripts choose the names: somebody's own files may have them."""
    notes = tmp_path / "a" / "g.json"
    notes.parent.mkdir()
    notes.write_text('{"license": "mine"}')
    with pytest.raises(PartitionError, match=r"a/g\.json describes no partition, and would have to be replaced"):
        write(hand_drawn(), notes.parent, 2)
    assert notes.read_text() == '{"license": "mine"}'
    data = tmp_path / "b" / "part1" / "data.csv"
    data.parent.mkdir(parents=True)
    data.write_text("1,2")
    with pytest.raises(PartitionError, match=r"b/part1 would have to be replaced, and holds .*: data\.csv\. Choose"):
        write(hand_drawn(), tmp_path / "b", 2)
    write(hand_drawn(), tmp_path / "b", 1)  # in which there is no such part
    (tmp_path / "b" / "part0" / "mine").mkdir()
    with pytest.raises(PartitionError, match=r"b/part0 would have to be replaced, and holds .*: mine\. Choose"):
        write(hand_drawn(), tmp_path / "b", 1)
    assert data.read_text() == "1,2"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_a_damaged_partition_is_replaced(tmp_path: Path) -> None:
    write(power_law(), tmp_path, 3)
    (tmp_path / "g.json").write_text((tmp_path / "g.json").read_text()[:100])
    (tmp_path / "part1" / "graph.dgl").unlink()
    write(hand_drawn(), tmp_path, 3)
    assert sum(load_partition(tmp_path / "g.json", part_id).num_inner for part_id in range(3)) == 6


def test_a_linked_part_is_not_written_over(tmp_path: Path) -> None:
    """As where each part lies on a disk of its own: half of the former partition was gone before it failed."""
    write(power_law(), tmp_path / "p", 2)
    (tmp_path / "p" / "part7").symlink_to(tmp_path)  # somebody's own
    (tmp_path / "p" / "part1").rename(tmp_path / "elsewhere")
    (tmp_path / "p" / "part1").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PartitionError, match="part1 is a link, and would have to be replaced"):
        write(power_law(), tmp_path / "p", 2)
    assert load_partition(tmp_path / "p" / "g.json", 1).num_inner > 0


def test_an_empty_folder_stays_the_same_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be somebody's working directory, or a mount point."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    before = folder.stat().st_ino
    write(hand_drawn(), Path(), 2)
    assert folder.stat().st_ino == before
    assert sorted(path.name for path in Path().iterdir()) == ["g.json", "hybrid_manifest.json", "part0", "part1"]
    assert [path.name for path in tmp_path.iterdir()] == ["here"]
    assert load_partition(folder / "g.json", 0).num_inner == load_partition(folder / "g.json", 1).num_inner


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PartitionError, match=r"file/p cannot be written: .*\. Choose another out_path"):
        write(hand_drawn(), tmp_path / "file" / "p", 2)


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("dgl_hybrid.partition.write.sync_tree", fail)
    with pytest.raises(PartitionError, match=r"cannot be written: .*No space left on device"):
        write(hand_drawn(), tmp_path / "p", 2)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("homogeneous", "DGL could not write a file"),
        ("its features", "node_feat.dgl is truncated"),
        ("its ids", "File too large"),
        ("heterogeneous", "DGL could not write a file"),
    ],
)
def test_a_disk_that_is_full_where_libraries_write_is_told_as_such(kind: str, words: str, tmp_path: Path) -> None:
    """They raise errors of their own there, which were shown raw, or taken for a graph that cannot be split."""
    ends = torch.arange(100)
    graph = dgl.heterograph({("a", "r", "b"): (ends, ends), ("b", "s", "a"): (ends, ends)})
    graph = graph if kind == "heterogeneous" else power_law()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, ({"its features": 1000, "its ids": 1600}.get(kind, 3000), before[1])
    )  # of a file, in place of a small disk
    try:
        with pytest.raises(PartitionError) as raised:
            partition_graph(graph, "g", 2, tmp_path / "p", part_method="random")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert f"{tmp_path / 'p'} cannot be written: " in str(raised.value)
    assert words in str(raised.value)
    assert "choose another out_path" in str(raised.value)
    assert "Stack trace" not in str(raised.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("renames", [0, 1, 3, 6])
def test_killed_while_replacing_leaves_nothing_that_loads_or_all(renames: int, tmp_path: Path) -> None:
    """The process dies before its n-th rename; what is left must be a whole partition or fail to load."""
    write(power_law(), tmp_path / "p", 2)
    script = f"""
import os, signal, pathlib
import dgl_hybrid
from dgl_hybrid.partition import partition_graph
from tests.helpers.graphs import hand_drawn
left, rename = {renames}, pathlib.Path.rename
def dying(self, target):
    global left
    if left == 0: os.kill(os.getpid(), signal.SIGKILL)
    left -= 1
    return rename(self, target)
pathlib.Path.rename = dying
partition_graph(hand_drawn(), "g", 2, {str(tmp_path / "p")!r}, part_method="contiguous")
"""
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run([sys.executable, "-c", script], env=environment, timeout=600, check=False)
    assert ended.returncode == -signal.SIGKILL
    if renames == 0:
        verify_partition(tmp_path / "p" / "g.json")
        return
    with pytest.raises(PartitionError, match=r"g\.json does not exist"):
        load_partition(tmp_path / "p" / "g.json", 0)
    write(hand_drawn(), tmp_path / "p", 2)
    verify_partition(tmp_path / "p" / "g.json")
    assert sorted(path.name for path in tmp_path.glob("**/.*.replaced-*")) == []


def test_of_two_new_ones_the_last_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process has written there since it was looked at. Nobody waits for who has locked the folder above."""
    (tmp_path / "p").mkdir()
    write(power_law(), tmp_path / "p" / "q", 2)
    (tmp_path / "p" / "q" / ".notes.replaced-by-me").write_text("not ours")
    above = os.open(tmp_path / "p", os.O_RDONLY)
    fcntl.flock(above, fcntl.LOCK_EX)
    exists, target = Path.exists, tmp_path / "p" / "q"
    unseen = [target]

    def not_yet(path: Path, **options: bool) -> bool:
        return False if path == target and unseen else exists(path, **options)

    rename = Path.rename

    def renamed(path: Path, to: Path) -> Path:
        if to == target:
            unseen.clear()
        return rename(path, to)

    monkeypatch.setattr(Path, "exists", not_yet)
    monkeypatch.setattr(Path, "rename", renamed)
    write(hand_drawn(), target, 2)
    monkeypatch.undo()
    os.close(above)
    verify_partition(target / "g.json")
    assert read_partition_summary(target / "g.json").num_nodes == hand_drawn().num_nodes()
    assert (target / ".notes.replaced-by-me").read_text() == "not ours"


@pytest.mark.parametrize("renames", range(8))
def test_a_replacement_that_fails_leaves_the_old_one(
    renames: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part of another user's, or one that a running job still has open (NFS): both partitions were lost."""
    write(power_law(), tmp_path / "p", 2)
    left, rename = renames, Path.rename

    def failing(path: Path, target: Path) -> Path:
        nonlocal left
        left -= 1
        if left == -1:
            raise OSError(errno.ENOTEMPTY, "Directory not empty")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(PartitionError, match=r"cannot be written: .*Directory not empty"):
        write(hand_drawn(), tmp_path / "p", 2)
    monkeypatch.undo()
    verify_partition(tmp_path / "p" / "g.json")
    assert read_partition_summary(tmp_path / "p" / "g.json").num_nodes == power_law().num_nodes()
    assert sorted(path.name for path in tmp_path.glob("**/.*")) == []
    write(hand_drawn(), tmp_path / "p", 2)
    assert read_partition_summary(tmp_path / "p" / "g.json").num_nodes == hand_drawn().num_nodes()


def test_two_that_are_written_to_one_place_wait_for_each_other(tmp_path: Path) -> None:
    """Each replaced parts of the other, and plain DistDGL, which knows no checksums, read the mixture."""
    write(power_law(), tmp_path / "p", 2)
    other = os.open(tmp_path / "p", os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    released: list[bool] = []

    def release() -> None:
        released.append(read_partition_summary(tmp_path / "p" / "g.json").num_nodes == power_law().num_nodes())
        os.close(other)

    timer = threading.Timer(3.0, release)
    timer.start()
    write(hand_drawn(), tmp_path / "p", 2)
    timer.join()
    assert released == [True], "nothing was moved before"
    assert read_partition_summary(tmp_path / "p" / "g.json").num_nodes == hand_drawn().num_nodes()


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGINT", -signal.SIGINT)])
def test_ended_while_replacing_ends_when_the_new_one_is_there(name: str, code: int, tmp_path: Path) -> None:
    """The old partition had been removed, and what was not renamed yet of the new one was."""
    write(power_law(), tmp_path / "p", 2)
    script = f"""
import os, shutil, signal
import dgl_hybrid
from dgl_hybrid.partition import partition_graph
from tests.helpers.graphs import hand_drawn
remove = shutil.rmtree
def ended(path, *args, **options):
    shutil.rmtree = remove
    os.kill(os.getpid(), signal.{name})
    remove(path, *args, **options)
shutil.rmtree = ended
partition_graph(hand_drawn(), "g", 2, {str(tmp_path / "p")!r}, part_method="contiguous")
print("went on")
"""
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [sys.executable, "-c", script], env=environment, timeout=600, check=False, stdout=subprocess.PIPE
    )
    assert (ended.returncode, ended.stdout) == (code, b"")
    load_partition(tmp_path / "p" / "g.json", 0)
    assert read_partition_summary(tmp_path / "p" / "g.json").num_nodes == hand_drawn().num_nodes()
    assert sorted(path.name for path in tmp_path.glob("**/.*")) == []


def test_graphbolt_is_refused_in_one_line_where_it_has_no_library(tmp_path: Path) -> None:
    try:
        partition_graph(hand_drawn(), "g", 2, tmp_path / "p", use_graphbolt=True)
    except PartitionError as error:
        assert "use_graphbolt=True needs DGL's GraphBolt library" in str(error)  # noqa: PT017 - it may also work
        assert list(tmp_path.iterdir()) == []
    else:
        assert list((tmp_path / "p").rglob("fused_csc_sampling_graph.pt"))


def stock(graph: dgl.DGLGraph, name: str, folder: Path) -> None:
    dgl.distributed.partition_graph(graph, name, 2, str(folder), part_method="random")


def contents_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_partition_of_dgls_own_is_not_written_over(tmp_path: Path) -> None:
    """Only a folder with our manifest was seen to hold a partition; parts of any other went without a word."""
    (tmp_path / "other").mkdir()
    (tmp_path / "notes.json").write_text('{"num_parts": 2, "part-0": {"part_graph": "other/part0/graph.dgl"}}')
    (tmp_path / "broken.json").write_text("{")
    stock(with_duplicates(), "theirs", tmp_path)
    before = contents_of(tmp_path)
    with pytest.raises(
        PartitionError, match="holds the partition of graph 'theirs'; writing 'g' there would overwrite"
    ):
        write(hand_drawn(), tmp_path, 2)
    assert contents_of(tmp_path) == before
    (tmp_path / "theirs.json").unlink()
    write(hand_drawn(), tmp_path, 2)


def test_rights_follow_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write(hand_drawn(), tmp_path / "p", 2)
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "p", tmp_path / "p" / "part0")} == {0o750}
    files = [path for path in (tmp_path / "p").rglob("*") if path.is_file()]
    assert {path.name: path.stat().st_mode & 0o777 for path in files} == {path.name: 0o640 for path in files}


def test_the_group_of_a_shared_folder_stays(tmp_path: Path) -> None:
    tmp_path.chmod(0o2775)
    write(hand_drawn(), tmp_path / "p", 2)
    assert all(path.stat().st_mode & stat.S_ISGID for path in (tmp_path / "p", tmp_path / "p" / "part0"))


@pytest.mark.parametrize("part_id", [0, 1, 2])
def test_what_is_as_we_write_it_is_not_sorted_again(
    part_id: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Edges of lower parts have smaller ids, and come after a part's own: all parts but the first were sorted."""
    config = write(power_law(), tmp_path / "p", 3)
    monkeypatch.setattr(torch, "argsort", lambda *_, **__: pytest.fail("they are in order"))
    assert load_partition(config, part_id).part_id == part_id
