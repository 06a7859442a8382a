# SPDX-License-Identifier: Apache-2.0
"""Reads a partition's JSON (DGL's own format) and checks every field before anybody trusts it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dgl_hybrid.errors import PartitionError
from dgl_hybrid.partition.manifest import (
    MANIFEST_NAME,
    as_count,
    check_inside,
    is_manifest_of,
    read_json_object,
    read_manifest,
)

_REMEDY = "Write the folder anew with dgl_hybrid.partition_graph."


@dataclass(frozen=True, kw_only=True)
class PartFiles:
    """DGL's three files of one part, relative to the folder."""

    part_graph: str
    node_feats: str
    edge_feats: str


@dataclass(frozen=True, kw_only=True)
class PartitionSummary:
    """What the JSON says about a partition, checked; ranges are empty for heterographs."""

    part_config: Path
    graph_name: str
    num_parts: int
    num_nodes: int
    num_edges: int
    halo_hops: int
    part_method: str
    is_homogeneous: bool
    has_sidecar: bool
    """Whether `hybrid_manifest.json` is there and of this partition, and so are the sidecars."""
    manifest_graph_name: str | None
    """Of the partition that `hybrid_manifest.json` is of: this one, or another one that was written over; None where
    there is no manifest."""
    node_offsets: tuple[int, ...]
    """P+1 prefix sums of owned vertices."""
    edge_offsets: tuple[int, ...]
    """P+1 prefix sums of owned edges."""
    part_files: tuple[PartFiles, ...]

    @property
    def folder(self) -> Path:
        """The folder all paths are relative to."""
        return self.part_config.parent


def read_partition_summary(part_config: str | Path) -> PartitionSummary:
    """Reads `<graph name>.json` of a folder written by DGL or by `dgl_hybrid.partition_graph`; no tensor is read.

    Args:
        part_config: Path of the JSON file.
    Raises:
        PartitionError: missing, truncated, or with fields that contradict each other; names the file.
    """
    path = Path(part_config).absolute()
    content = read_json_object(path)
    num_parts = _count(content, "num_parts", path)
    num_nodes = _count(content, "num_nodes", path)
    num_edges = _count(content, "num_edges", path)
    if not 1 <= num_parts <= max(num_nodes, 1):
        raise PartitionError(
            f"{path}: num_parts must be between 1 and num_nodes={num_nodes} (got {num_parts}). {_REMEDY}"
        )
    graph_name = content.get("graph_name")
    if not isinstance(graph_name, str):
        raise PartitionError(f"{path}: graph_name must be a string (got {graph_name!r}). {_REMEDY}")
    ntypes, etypes = (content.get("ntypes", {"_N": 0}), content.get("etypes", {"_N:_E:_N": 0}))
    if not isinstance(ntypes, dict) or not isinstance(etypes, dict):
        raise PartitionError(f"{path}: ntypes and etypes must be objects. {_REMEDY}")
    is_homogeneous = len(ntypes) == 1 and len(etypes) == 1
    node_offsets: tuple[int, ...] = ()
    edge_offsets: tuple[int, ...] = ()
    if is_homogeneous:
        node_offsets = _offsets(content, "node_map", num_parts, num_nodes, path)
        edge_offsets = _offsets(content, "edge_map", num_parts, num_edges, path)
    manifest = read_manifest(path.parent)
    has_sidecar = manifest is not None and manifest.graph_name == graph_name and is_manifest_of(manifest, path)
    if has_sidecar and manifest is not None and manifest.num_parts != num_parts:
        raise PartitionError(
            f"{path.parent / MANIFEST_NAME}: num_parts must equal the {num_parts} of {path.name} "
            f"(got {manifest.num_parts}). {_REMEDY}"
        )
    return PartitionSummary(
        part_config=path,
        graph_name=graph_name,
        num_parts=num_parts,
        num_nodes=num_nodes,
        num_edges=num_edges,
        halo_hops=_count(content, "halo_hops", path) if "halo_hops" in content else 1,
        part_method=str(content.get("part_method", "unknown")),
        is_homogeneous=is_homogeneous,
        has_sidecar=has_sidecar,
        manifest_graph_name=None if manifest is None else manifest.graph_name,
        node_offsets=node_offsets,
        edge_offsets=edge_offsets,
        part_files=tuple(_part_files(content, part_id, path) for part_id in range(num_parts)),
    )


def _count(content: dict[str, object], key: str, path: Path) -> int:
    value = as_count(content.get(key))
    if value is None:
        raise PartitionError(f"{path}: {key} must be a count (got {content.get(key)!r}). {_REMEDY}")
    return value


def _part_files(content: dict[str, object], part_id: int, path: Path) -> PartFiles:
    entry = content.get(f"part-{part_id}")
    if not isinstance(entry, dict):
        raise PartitionError(f"{path}: 'part-{part_id}' must be an object (got {type(entry).__name__}). {_REMEDY}")
    return PartFiles(
        part_graph=check_inside(entry.get("part_graph"), path),
        node_feats=check_inside(entry.get("node_feats"), path),
        edge_feats=check_inside(entry.get("edge_feats"), path),
    )


def _offsets(content: dict[str, object], key: str, num_parts: int, total: int, path: Path) -> tuple[int, ...]:
    """Turns `node_map`/`edge_map` into prefix sums; DGL's older form lists only the ends of the ranges."""
    value = content.get(key)
    if isinstance(value, dict) and len(value) == 1:
        value = next(iter(value.values()))
    if not isinstance(value, list) or len(value) != num_parts:
        raise PartitionError(
            f"{path}: {key} must hold one range for each of {num_parts} parts; maps kept in a separate file are not "
            f"supported, as in DistDGL 2.1. {_REMEDY}"
        )
    offsets = [0]
    for entry in value:
        start, end = entry if isinstance(entry, list) and len(entry) == 2 else (offsets[-1], entry)
        if not isinstance(start, int) or not isinstance(end, int) or start != offsets[-1] or end < start:
            raise PartitionError(f"{path}: the ranges of {key} must follow each other (got {entry!r}). {_REMEDY}")
        offsets.append(end)
    if offsets[-1] != total:
        raise PartitionError(f"{path}: the ranges of {key} must end at {total} (got {offsets[-1]}). {_REMEDY}")
    return tuple(offsets)
