# SPDX-License-Identifier: Apache-2.0
"""Damaged, moved and plain folders: what loads, and what each refusal says."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import dgl
import dgl.distributed
import pytest
import torch

from dgl_hybrid.errors import PartitionError
from dgl_hybrid.partition import load_partition, partition_graph, read_partition_summary, verify_partition
from dgl_hybrid.partition.manifest import hash_file, partition_digest
from dgl_hybrid.partition.verify import find_problems_of_plain_part
from tests.helpers.graphs import power_law

FILES = ["graph.dgl", "node_feat.dgl", "edge_feat.dgl", "hybrid.safetensors"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    partition_graph(power_law(), "g", 3, tmp_path / "p", num_hops=2, part_method="random")
    return tmp_path / "p"


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    dgl.seed(0)
    dgl.distributed.partition_graph(power_law(), "g", 3, str(tmp_path / "plain"), num_hops=2, part_method="random")
    return tmp_path / "plain"


@pytest.mark.parametrize("name", FILES)
def test_missing_file(name: str, folder: Path) -> None:
    (folder / "part1" / name).unlink()
    for call in (lambda: verify_partition(folder / "g.json", 1), lambda: load_partition(folder / "g.json", 1)):
        with pytest.raises(PartitionError, match=rf"part1/{name} is missing.*Copy the folder again"):
            call()
    verify_partition(folder / "g.json", 0)  # another machine's part is whole
    with pytest.raises(PartitionError, match=f"part1/{name} is missing"):
        verify_partition(folder / "g.json")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("keep", [1, 0.5, -1])
def test_truncated_file(name: str, keep: float, folder: Path) -> None:
    path = folder / "part1" / name
    content = path.read_bytes()
    kept = int(len(content) * keep) if isinstance(keep, float) else keep
    path.write_bytes(content[:kept])
    with pytest.raises(PartitionError, match=rf"part1/{name} is truncated: \d+ bytes were written \(got \d+\)"):
        load_partition(folder / "g.json", 1)


def test_what_is_missing_of_files_is_told_without_reading_them(folder: Path) -> None:
    path = folder / "part1" / "graph.dgl"
    content = path.read_bytes()
    path.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    verify_partition(folder / "g.json", 1, checksums=False)
    path.write_bytes(content + b"more")
    verify_partition(folder / "g.json", 1, checksums=False)
    with pytest.raises(PartitionError, match="is longer than written"):
        verify_partition(folder / "g.json", 1)
    path.write_bytes(content[:-1])
    with pytest.raises(PartitionError, match=r"part1/graph.dgl is truncated"):
        verify_partition(folder / "g.json", 1, checksums=False)
    verify_partition(folder / "g.json", 1, checksums=False, sizes=False)


@pytest.mark.parametrize("name", FILES)
def test_one_flipped_bit(name: str, folder: Path) -> None:
    path = folder / "part1" / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(PartitionError, match=rf"part1/{name}: checksum mismatch: sha256 [0-9a-f]+\.\.\. was written"):
        load_partition(folder / "g.json", 1)


def test_longer_and_empty_files(folder: Path) -> None:
    path = folder / "part0" / "edge_feat.dgl"
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(PartitionError, match=r"edge_feat.dgl is longer than written"):
        verify_partition(folder / "g.json", 0)
    path.write_bytes(b"")
    with pytest.raises(PartitionError, match=r"edge_feat.dgl is empty; g.json names it"):
        load_partition(folder / "g.json", 0, verify=False)


def test_a_changed_json_is_noticed(folder: Path) -> None:
    config = folder / "g.json"
    config.write_text(config.read_text().replace('"halo_hops": 2', '"halo_hops": 3'))
    with pytest.raises(PartitionError, match=r"g\.json: checksum mismatch"):
        load_partition(config, 0)


def test_missing_manifest_and_missing_entry(folder: Path) -> None:
    manifest = folder / "hybrid_manifest.json"
    content = json.loads(manifest.read_text())
    del content["files"]["part0/graph.dgl"]
    manifest.write_text(json.dumps(content))
    with pytest.raises(PartitionError, match=r"part0/graph.dgl is not listed in hybrid_manifest.json"):
        load_partition(folder / "g.json", 0)
    manifest.unlink()
    with pytest.raises(
        PartitionError, match=r"hybrid_manifest\.json is missing although part0/hybrid\.safetensors is there"
    ):
        load_partition(folder / "g.json", 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(format_version=99), r"format_version must be 1 \(got 99\)"),
        (lambda c: c.update(num_parts=2), r"num_parts must equal the 3 of g.json \(got 2\)"),
        (lambda c: c.update(num_parts=-1), "must be a string and two integers"),
        (lambda c: c.update(files=[]), "'files' must be a non-empty object"),
        (lambda c: c["files"].update({"../x": {"sha256": "0" * 64, "bytes": 1}}), "'../x' leaves the partition folder"),
        (lambda c: c["files"].update({"/etc/x": {"sha256": "0" * 64, "bytes": 1}}), "leaves the partition folder"),
        (lambda c: c["files"].update({"x": {"sha256": "00", "bytes": 1}}), "must hold 'sha256'"),
    ],
)
def test_malformed_manifest(change: Callable[[dict[str, object]], None], message: str, folder: Path) -> None:
    path = folder / "hybrid_manifest.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(PartitionError, match=message):
        load_partition(folder / "g.json", 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(num_parts=0), r"num_parts must be between 1 and num_nodes=60 \(got 0\)"),
        (lambda c: c.update(num_nodes="60"), "num_nodes must be a count"),
        (lambda c: c.pop("part-2"), r"'part-2' must be an object"),
        (lambda c: c["part-0"].update(part_graph="../../etc/passwd"), "leaves the partition folder"),
        (lambda c: c["part-0"].update(node_feats=7), "must be a relative path"),
        (lambda c: c.update(node_map="map.npy"), "must hold one range for each of 3 parts"),
        (lambda c: c["node_map"]["_N"].pop(), "must hold one range for each of 3 parts"),
        (lambda c: c["node_map"]["_N"][1].__setitem__(0, 0), "ranges of node_map must follow each other"),
        (lambda c: c["edge_map"]["_N:_E:_N"][2].__setitem__(1, 10**6), "ranges of edge_map must end at"),
        (lambda c: c.update(graph_name=None), "graph_name must be a string"),
        (lambda c: c.update(ntypes=[]), "ntypes and etypes must be objects"),
    ],
)
def test_malformed_json(change: Callable[[dict[str, object]], None], message: str, folder: Path) -> None:
    path = folder / "g.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(PartitionError, match=message):
        read_partition_summary(path)


def test_json_missing_truncated_or_not_an_object(folder: Path) -> None:
    path = folder / "g.json"
    content = path.read_text()
    path.write_text(content[: len(content) // 2])
    with pytest.raises(PartitionError, match=r"g\.json is not valid JSON, it may be truncated"):
        load_partition(path, 0)
    path.write_text("[]")
    with pytest.raises(PartitionError, match=r"must hold a JSON object \(got list\)"):
        load_partition(path, 0)
    path.unlink()
    with pytest.raises(PartitionError, match=r"g\.json does not exist"):
        load_partition(path, 0)
    with pytest.raises(PartitionError, match=r"is a folder: give the <graph name>\.json"):
        load_partition(folder, 0)


@pytest.mark.parametrize("part_id", [-1, 3])
def test_part_id_out_of_range(part_id: int, folder: Path) -> None:
    with pytest.raises(ValueError, match=rf"part_id must be in 0\.\.2 .* \(got {part_id}\)"):
        load_partition(folder / "g.json", part_id)
    with pytest.raises(ValueError, match=r"part_id must be in 0\.\.2"):
        verify_partition(folder / "g.json", part_id)


def test_sidecar_of_another_part_even_with_matching_checksums(folder: Path) -> None:
    """Checksums say the file is what was listed; the contents must still fit the part."""
    shutil.copy(folder / "part2" / "hybrid.safetensors", folder / "part1" / "hybrid.safetensors")
    manifest = folder / "hybrid_manifest.json"
    content = json.loads(manifest.read_text())
    record = hash_file(folder / "part1" / "hybrid.safetensors")
    content["files"]["part1/hybrid.safetensors"] = {"sha256": record.sha256, "bytes": record.num_bytes}
    manifest.write_text(json.dumps(content))
    with pytest.raises(PartitionError, match=r"must be of format 1 and part 1 .got format 1, part 2"):
        load_partition(folder / "g.json", 1)


def test_the_folder_can_be_moved(folder: Path, tmp_path: Path) -> None:
    before = load_partition(folder / "g.json", 1)
    shutil.move(folder, tmp_path / "elsewhere" / "deep")
    after = load_partition(tmp_path / "elsewhere" / "deep" / "g.json", 1)
    assert torch.equal(before.lists.src_global, after.lists.src_global)
    verify_partition(tmp_path / "elsewhere" / "deep" / "g.json")


def test_one_machine_needs_only_its_own_part(folder: Path) -> None:
    shutil.rmtree(folder / "part0")
    shutil.rmtree(folder / "part2")
    assert load_partition(folder / "g.json", 1).halo_global.numel() > 0


# --- partitions that DGL has written over ours ---


def partition_over(folder: Path, name: str, num_parts: int = 3, graph: dgl.DGLGraph | None = None) -> Path:
    """Has DGL itself partition into the folder, where it leaves the manifest and the sidecars."""
    dgl.seed(1)
    graph = power_law() if graph is None else graph
    dgl.distributed.partition_graph(graph, name, num_parts, str(folder), num_hops=2, part_method="random")
    return folder / f"{name}.json"


def test_another_graph_that_dgl_wrote_over_ours_is_read_as_plain(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It was refused: the manifest, which is there, were missing."""
    other = power_law(40, 150, seed=3)
    config = partition_over(folder, "h", graph=other)
    assert not read_partition_summary(config).has_sidecar
    assert partition_digest(config) == hash_file(config).sha256
    for options in ({}, {"checksums": False}, {"checksums": False, "sizes": False}):
        verify_partition(config, **options)
    caplog.clear()
    parts = [load_partition(config, part_id) for part_id in range(3)]
    assert sum(part.lists.src_global.numel() for part in parts) == other.num_edges()
    assert all(part.out_degrees is None and part.orig_node_ids is None for part in parts)
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 3
    assert "hybrid_manifest.json is of another partition than h.json" in caplog.text
    with pytest.raises(PartitionError, match=r"part0/\S+ is .* If something else has partitioned into this"):
        load_partition(folder / "g.json", 0)  # whose parts are gone


@pytest.mark.parametrize("num_parts", [2, 3])
def test_one_of_the_same_name_that_dgl_wrote_over_ours(
    num_parts: int, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its files were compared with what the former ones had been. Nobody can tell it from ours with a changed JSON."""
    before = partition_digest(folder / "g.json")
    config = partition_over(folder, "g", num_parts, graph=power_law(40, 150, seed=3))
    assert partition_digest(config) not in (before, hash_file(folder / "hybrid_manifest.json").sha256)
    for call in (lambda: verify_partition(config), lambda: load_partition(config, 1)):
        with pytest.raises(
            PartitionError,
            match=r"g\.json: checksum mismatch: it is not the file that .* lists\. .* write it anew with .* delete "
            r"hybrid_manifest\.json and part\*/hybrid\.safetensors to read what it wrote as plain DistDGL",
        ):
            call()
    verify_partition(config, checksums=False)  # as before a job is launched
    unchecked = load_partition(config, 1, verify=False)
    assert unchecked.out_degrees is None
    assert caplog.text.count("is of another partition than g.json") == 2
    for left in (folder / "hybrid_manifest.json", *folder.glob("part*/hybrid.safetensors")):
        left.unlink()  # as we are told to
    assert load_partition(config, 1).num_inner == unchecked.num_inner


# --- plain DistDGL folders ---


def test_plain_folder_agrees_with_the_graph(plain: Path) -> None:
    summary = read_partition_summary(plain / "g.json")
    assert not summary.has_sidecar
    graph = power_law()
    total = 0
    for part_id in range(3):
        part = load_partition(plain / "g.json", part_id)
        assert part.out_degrees is None
        assert part.orig_node_ids is None
        assert part.orig_edge_ids is None
        # The features identify the original vertices: DGL keeps no ids.
        original = torch.cdist(part.node_data["feat"], graph.ndata["feat"]).argmin(dim=1)
        assert torch.equal(part.in_degrees, graph.in_degrees()[original])
        dst = torch.repeat_interleave(torch.arange(part.num_inner), part.in_degrees)
        weights = torch.zeros(part.num_inner, dtype=torch.float64).index_add(
            0, dst, part.edge_data["w"][part.lists.eid_global - part.edge_offsets[part_id]]
        )
        expected = torch.zeros(graph.num_nodes(), dtype=torch.float64).index_add(0, graph.edges()[1], graph.edata["w"])
        assert torch.allclose(weights, expected[original], rtol=0, atol=1e-12)  # sums in another order
        total += part.lists.src_global.numel()
    assert total == graph.num_edges()


def test_plain_halo_lists_need_the_owner_as_witness(plain: Path) -> None:
    """`halo_hops` is a claim; lists count only where the owner's file confirms their length."""
    config = plain / "g.json"
    everything = {p: load_partition(config, p) for p in range(3)}
    part = everything[0]
    assert part.halo_global.numel() > 0
    for row, vertex in enumerate(part.halo_global.tolist()):
        owner = int(torch.searchsorted(part.node_offsets, vertex, right=True)) - 1
        k = vertex - int(part.node_offsets[owner])
        theirs = slice(int(everything[owner].lists.indptr[k]), int(everything[owner].lists.indptr[k + 1]))
        ours = slice(int(part.halo_lists.indptr[row]), int(part.halo_lists.indptr[row + 1]))
        assert torch.equal(part.halo_lists.eid_global[ours], everything[owner].lists.eid_global[theirs])
        assert torch.equal(part.halo_lists.src_global[ours], everything[owner].lists.src_global[theirs])
    shutil.rmtree(plain / "part2")
    alone = load_partition(config, 0)
    assert bool((alone.halo_global < int(part.node_offsets[2])).all())
    assert 0 < alone.halo_global.numel() < part.halo_global.numel()


@pytest.mark.parametrize("what", ["edges", "edges by their ids alone", "vertices"])
def test_plain_folder_in_another_order(what: str, plain: Path) -> None:
    expected = load_partition(plain / "g.json", 1)
    path = plain / "part1" / "graph.dgl"
    graph = dgl.load_graphs(str(path))[0][0]
    nodes, edges = torch.arange(graph.num_nodes()), torch.arange(graph.num_edges())
    if what == "vertices":
        nodes = torch.randperm(len(nodes), generator=torch.Generator().manual_seed(0))
    elif what == "edges":
        edges = torch.randperm(len(edges), generator=torch.Generator().manual_seed(0))
    else:
        edges = torch.argsort(graph.edata[dgl.EID])  # those of the halo among the owned ones
    new_id = torch.empty_like(nodes)
    new_id[nodes] = torch.arange(len(nodes))
    src, dst = (new_id[ends.long()][edges] for ends in graph.edges(order="eid"))
    other = dgl.graph((src, dst), num_nodes=len(nodes))
    other.ndata.update({name: value[nodes] for name, value in graph.ndata.items()})
    other.edata.update({name: value[edges] for name, value in graph.edata.items()})
    dgl.save_graphs(str(path), [other])
    part = load_partition(plain / "g.json", 1)
    for name in (field.name for field in fields(part)):
        before, after = getattr(expected, name), getattr(part, name)
        if isinstance(before, torch.Tensor):
            assert torch.equal(before, after), name
    assert len(part.halo_lists.src_global), "lists of the halo are compared, too"


def test_plain_folder_of_one_hop_claims_nothing(tmp_path: Path) -> None:
    dgl.distributed.partition_graph(power_law(), "g", 2, str(tmp_path), num_hops=1, part_method="random")
    assert load_partition(tmp_path / "g.json", 0).halo_global.numel() == 0


def test_plain_folder_truncated_features(plain: Path) -> None:
    """DGL itself loads such a file without complaint and fills the rest with whatever the memory held."""
    path = plain / "part0" / "node_feat.dgl"
    path.write_bytes(path.read_bytes()[:-5])
    dgl.distributed.load_partition(str(plain / "g.json"), 0)
    with pytest.raises(PartitionError, match=r"node_feat\.dgl is truncated: '.*' ends at byte \d+ of \d+"):
        load_partition(plain / "g.json", 0)


def test_plain_folder_truncated_structure(plain: Path) -> None:
    path = plain / "part0" / "graph.dgl"
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(PartitionError, match=r"graph\.dgl is truncated"):
        load_partition(plain / "g.json", 0)


def test_what_dgl_makes_of_a_damaged_structure_is_told(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It checks nothing of what it reads, and ends the process for some files, which no test can try."""
    (graph,), _ = dgl.load_graphs(str(plain / "part0" / "graph.dgl"))
    sources, targets = graph.edges(order="eid")
    beyond = (sources, targets + graph.num_nodes())
    monkeypatch.setattr(dgl.DGLGraph, "edges", lambda *of, **options: beyond)
    with pytest.raises(PartitionError, match=r"part0/graph\.dgl: ends of edges must lie in 0\.\.\d+ \(got "):
        load_partition(plain / "g.json", 0)

    def fail(*args: object) -> None:
        raise AttributeError("'NoneType' object has no attribute 'contents'")

    monkeypatch.setattr(dgl, "load_graphs", fail)
    with pytest.raises(PartitionError, match=r"part0/graph\.dgl cannot be read by DGL \('NoneType' object"):
        load_partition(plain / "g.json", 0)


@pytest.mark.parametrize("key", ["part_graph", "node_feats", "edge_feats"])
def test_what_servers_could_not_open_of_a_plain_part(key: str, plain: Path) -> None:
    """All of a job was started, to end in the midst of DGL; that of other machines need not be here."""
    config = plain / "g.json"
    assert find_problems_of_plain_part(config, 1) == []
    file = plain / json.loads(config.read_text())["part-1"][key]
    file.unlink()
    (problem,) = find_problems_of_plain_part(config, 1)
    assert problem.startswith(f"{file} is missing, which g.json names for part 1. Copy the folder again")
    assert find_problems_of_plain_part(config, 0) == []


@pytest.mark.parametrize("name", ["node_feat.dgl", "graph.dgl"])
def test_files_of_a_plain_part_that_are_cut_short(name: str, plain: Path) -> None:
    file = plain / "part1" / name
    file.write_bytes(file.read_bytes()[:-1])
    (problem,) = find_problems_of_plain_part(plain / "g.json", 1)
    assert problem.startswith(f"{file} is truncated")
    file.unlink()
    (plain / "part1" / "edge_feat.dgl").unlink()
    assert len(find_problems_of_plain_part(plain / "g.json", 1)) == 2


def test_what_other_versions_of_dgl_may_name_is_not_judged(plain: Path) -> None:
    """Such jobs must run as before."""
    config = plain / "g.json"
    content = json.loads(config.read_text())
    content["node_map"] = "a file of its own"
    (plain / content["part-1"]["part_graph"]).unlink()
    content["part-1"]["part_graph_graphbolt"] = "part1/fused_csc_sampling_graph.pt"
    config.write_text(json.dumps(content))
    assert find_problems_of_plain_part(config, 1) == []
    for entry in (None, [], {"node_feats": None}):
        content["part-1"] = entry
        config.write_text(json.dumps(content))
        assert find_problems_of_plain_part(config, 1) == []
    config.write_text("{")
    (problem,) = find_problems_of_plain_part(config, 1)
    assert "g.json is not valid JSON" in problem


def test_plain_folder_parts_swapped(plain: Path) -> None:
    shutil.copy(plain / "part1" / "graph.dgl", plain / "part0" / "graph.dgl")
    with pytest.raises(PartitionError, match=r"graph\.dgl: its inner vertices must be the ids"):
        load_partition(plain / "g.json", 0)


def test_plain_folder_feature_rows_of_another_part(plain: Path) -> None:
    sizes = [load_partition(plain / "g.json", p).num_inner for p in range(3)]
    other = next(p for p in (1, 2) if sizes[p] != sizes[0])
    shutil.copy(plain / f"part{other}" / "node_feat.dgl", plain / "part0" / "node_feat.dgl")
    with pytest.raises(PartitionError, match=rf"must have {sizes[0]} rows"):
        load_partition(plain / "g.json", 0)


def test_old_map_format_lists_only_ends(plain: Path) -> None:
    path = plain / "g.json"
    content = json.loads(path.read_text())
    expected = read_partition_summary(path).node_offsets
    content["node_map"] = [end for _, end in content["node_map"]["_N"]]
    path.write_text(json.dumps(content))
    assert read_partition_summary(path).node_offsets == expected


def test_a_graph_file_without_distdgl_fields(plain: Path) -> None:
    dgl.save_graphs(str(plain / "part0" / "graph.dgl"), [power_law()])
    with pytest.raises(PartitionError, match="lacks the fields"):
        load_partition(plain / "g.json", 0)
