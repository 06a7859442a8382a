# SPDX-License-Identifier: Apache-2.0
"""`load_partition`: one part of a folder, checked, as plain tensors."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import dgl
import torch
from dgl.data.utils import load_tensors
from torch import Tensor

from dgl_hybrid.errors import PartitionError
from dgl_hybrid.ops.cpu.memory import unmap_read_files_in
from dgl_hybrid.partition.dgl_files import check_graph_file, check_tensor_file
from dgl_hybrid.partition.edge_lists import StoredLists
from dgl_hybrid.partition.local_order import LocalOrder
from dgl_hybrid.partition.manifest import SIDECAR_NAME
from dgl_hybrid.partition.sidecar import Sidecar, read_sidecar
from dgl_hybrid.partition.split import counts_to_offsets, expand_ranges
from dgl_hybrid.partition.summary import PartitionSummary, read_partition_summary
from dgl_hybrid.partition.verify import verify_partition

_logger = logging.getLogger(__name__)
_REMEDY = "Copy the folder again from its source, or write it anew with dgl_hybrid.partition_graph."


@dataclass(frozen=True, kw_only=True)
class LocalPartition:
    """One part: N inner vertices, E owned edges, Hc halo vertices whose complete in-edge lists are here; on the CPU.

    Inner vertex k has the global id `node_offsets[part_id] + k`; owned edge k likewise with `edge_offsets`. In-edges of
    one vertex stand in original edge-id order (in a plain DistDGL folder: in the order of its global edge ids, since
    DGL keeps no other).
    """

    part_id: int
    num_parts: int
    graph_name: str
    part_config: Path
    halo_hops: int
    node_offsets: Tensor
    """(P+1,) int64."""
    edge_offsets: Tensor
    """(P+1,) int64."""
    lists: StoredLists
    """In-edge lists of inner vertices."""
    halo_global: Tensor
    """(Hc,) int64, sorted."""
    halo_lists: StoredLists
    """In-edge lists of the vertices of `halo_global`."""
    in_degrees: Tensor
    """(N,) int64, full graph."""
    out_degrees: Tensor | None
    """(N,) int64, full graph; None for plain DistDGL folders, where one part alone cannot tell."""
    orig_node_ids: Tensor | None
    """(N,) int64; None for plain DistDGL folders."""
    orig_edge_ids: Tensor | None
    """(E,) int64 by owned edge id; None for plain DistDGL folders."""
    local_order: LocalOrder | None
    """Of inner vertices; None where nobody looked for one."""
    node_data: dict[str, Tensor]
    """(N, ...) each, by inner vertex."""
    edge_data: dict[str, Tensor]
    """(E, ...) each, by owned edge id."""

    @property
    def num_inner(self) -> int:
        """N."""
        return self.lists.num_rows


@dataclass(frozen=True, kw_only=True)
class _Structure:
    """graph.dgl in global ids: `dst`/`src`/`eid` of all local edges, owned first, each group sorted by (dst, eid)."""

    src: Tensor
    dst: Tensor
    eid: Tensor
    num_inner_edges: int
    halo: Tensor


def load_partition(part_config: str | Path, part_id: int, *, verify: bool = True) -> LocalPartition:
    """Loads one part of a folder written by `dgl_hybrid.partition_graph` or by plain DGL.

    Not collective. For plain folders written with `num_hops > 1`, a halo vertex counts as complete only where its
    owner's files are in the folder as well and agree on its in-degree; otherwise `halo_global` leaves it out.

    Args:
        part_config: Path of `<graph name>.json`.
        part_id: Which part.
        verify: Compare checksums before anything is parsed (plain folders have none).
    Raises:
        ValueError: part_id is not one of the parts.
        PartitionError: a file is missing, truncated, changed or contradicts another (named), or the graph has several
            vertex or edge types.
    """
    summary = read_partition_summary(part_config)
    if not 0 <= part_id < summary.num_parts:
        raise ValueError(f"part_id must be in 0..{summary.num_parts - 1} for {summary.part_config} (got {part_id})")
    if not summary.is_homogeneous:
        raise PartitionError(
            f"{summary.part_config} holds a heterograph; full-graph training reads homogeneous graphs only in this "
            "release. Convert it with dgl.to_homogeneous before partitioning, or train it by sampling."
        )
    verify_partition(part_config, part_id, checksums=verify, sizes=verify)
    first, last = summary.node_offsets[part_id], summary.node_offsets[part_id + 1]
    num_owned_edges = summary.edge_offsets[part_id + 1] - summary.edge_offsets[part_id]
    files = summary.part_files[part_id]
    structure = _read_structure(summary, part_id)
    sidecar = None
    if summary.has_sidecar:
        path = summary.folder / f"part{part_id}" / SIDECAR_NAME
        sidecar = read_sidecar(path, part_id=part_id, num_inner_nodes=last - first, num_inner_edges=num_owned_edges)
        if not torch.equal(sidecar.halo_global, structure.halo):
            raise PartitionError(f"{path} lists other halo vertices than {files.part_graph}. {_REMEDY}")
    owned = slice(0, structure.num_inner_edges)
    in_degrees = torch.bincount(structure.dst[owned] - first, minlength=last - first)
    if sidecar is not None and not torch.equal(in_degrees, sidecar.in_degrees):
        raise PartitionError(
            f"{summary.folder / files.part_graph} lacks in-edges of owned vertices: {int(sidecar.in_degrees.sum())} in "
            f"the full graph (got {int(in_degrees.sum())}). {_REMEDY}"
        )
    halo_global, halo_indptr, halo_edges = _complete_halo(summary, part_id, structure, sidecar)
    if sidecar is not None:
        unmap_read_files_in(summary.folder / f"part{part_id}")  # most never ask for original edge ids again
    return LocalPartition(
        part_id=part_id,
        num_parts=summary.num_parts,
        graph_name=summary.graph_name,
        part_config=summary.part_config,
        halo_hops=summary.halo_hops,
        node_offsets=torch.tensor(summary.node_offsets),
        edge_offsets=torch.tensor(summary.edge_offsets),
        lists=StoredLists(counts_to_offsets(in_degrees), structure.src[owned], structure.eid[owned]),
        halo_global=halo_global,
        halo_lists=StoredLists(halo_indptr, structure.src[halo_edges], structure.eid[halo_edges]),
        in_degrees=in_degrees,
        out_degrees=None if sidecar is None else sidecar.out_degrees,
        orig_node_ids=None if sidecar is None else sidecar.orig_node_ids,
        orig_edge_ids=None if sidecar is None else sidecar.orig_edge_ids,
        local_order=None if sidecar is None else sidecar.local_order,
        node_data=_read_data(summary.folder / files.node_feats, last - first, "node", sidecar),
        edge_data=_read_data(summary.folder / files.edge_feats, num_owned_edges, "edge", sidecar),
    )


def _load_dgl_graph(path: Path) -> dgl.DGLGraph:
    check_graph_file(path, _REMEDY)  # DGL may end the process at one that is cut short
    try:
        graphs, _ = dgl.load_graphs(str(path))
        graph = graphs[0]
        missing = [name for name in ("inner_node", dgl.NID) if name not in graph.ndata]
        missing += [name for name in ("inner_edge", dgl.EID) if name not in graph.edata]
    except (dgl.DGLError, RuntimeError, IndexError, KeyError, AttributeError, ValueError) as error:
        raise PartitionError(f"{path} cannot be read by DGL ({_reason(error)}). {_REMEDY}") from error
    if missing:
        raise PartitionError(f"{path} lacks the fields {missing} of a DistDGL part. {_REMEDY}")
    return graph


def _read_structure(summary: PartitionSummary, part_id: int) -> _Structure:
    path = summary.folder / summary.part_files[part_id].part_graph
    graph = _load_dgl_graph(path)
    first, last = summary.node_offsets[part_id], summary.node_offsets[part_id + 1]
    first_edge, last_edge = (summary.edge_offsets[part_id], summary.edge_offsets[part_id + 1])
    nodes = graph.ndata[dgl.NID].to(torch.int64)
    eid = graph.edata[dgl.EID].to(torch.int64)
    inner = graph.ndata["inner_node"] == 1
    _check_ids(nodes, summary.num_nodes, "vertex", path)
    _check_ids(eid, summary.num_edges, "edge", path)
    halo = _sorted(nodes[~inner])
    if not torch.equal(_sorted(nodes[inner]), torch.arange(first, last)):
        raise PartitionError(
            f"{path}: its inner vertices must be the ids {first}..{last - 1} of {summary.part_config.name}. {_REMEDY}"
        )
    if bool((halo[1:] == halo[:-1]).any()) or bool(((halo >= first) & (halo < last)).any()):
        raise PartitionError(f"{path}: a halo vertex occurs twice or is an inner one. {_REMEDY}")
    local_src, local_dst = (ends.to(torch.int64) for ends in graph.edges(order="eid"))
    for ends in (local_src, local_dst):
        if len(ends) and not 0 <= int(ends.min()) <= int(ends.max()) < len(nodes):
            raise PartitionError(
                f"{path}: ends of edges must lie in 0..{len(nodes) - 1} (got {int(ends.min())}..{int(ends.max())}). "
                f"{_REMEDY}"
            )
    inner_edge = inner[local_dst]
    if not torch.equal(_sorted(eid[inner_edge]), torch.arange(first_edge, last_edge)):
        raise PartitionError(
            f"{path}: the in-edges of its inner vertices must be the ids {first_edge}..{last_edge - 1} "
            f"of {summary.part_config.name} (got {int(inner_edge.sum())} edges). {_REMEDY}"
        )
    src, dst = nodes[local_src], nodes[local_dst]
    num_inner_edges = last_edge - first_edge
    # As we write them: those of this part first, each in order. Of other parts there may be smaller ids.
    groups = [(eid[of], dst[of]) for of in (slice(num_inner_edges), slice(num_inner_edges, None))]
    if not (bool(inner_edge[:num_inner_edges].all()) and all(_is_sorted(x) for group in groups for x in group)):
        order = torch.argsort(eid)
        order = order[torch.argsort(dst[order], stable=True)]
        order = torch.cat([order[inner_edge[order]], order[~inner_edge[order]]])
        src, dst, eid = src[order], dst[order], eid[order]
    return _Structure(src=src, dst=dst, eid=eid, num_inner_edges=last_edge - first_edge, halo=halo)


def _is_sorted(values: Tensor) -> bool:
    return bool((values[1:] >= values[:-1]).all())


def _sorted(values: Tensor) -> Tensor:
    """Sorting takes forty times as long as seeing that it is not needed."""
    return values if _is_sorted(values) else torch.sort(values).values


def _check_ids(ids: Tensor, bound: int, what: str, path: Path) -> None:
    if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= bound):
        raise PartitionError(
            f"{path}: {what} ids must be in 0..{bound - 1} (got {int(ids.min())}..{int(ids.max())}). {_REMEDY}"
        )


def _complete_halo(
    summary: PartitionSummary, part_id: int, structure: _Structure, sidecar: Sidecar | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Halo vertices with a complete list, their indptr, and the positions of their edges in `structure`."""
    position = torch.searchsorted(structure.halo, structure.dst[structure.num_inner_edges :])
    local_degrees = torch.bincount(position, minlength=structure.halo.numel())
    if sidecar is not None:
        full_degrees = sidecar.halo_in_degrees
    elif summary.halo_hops > 1:
        full_degrees = _degrees_from_owners(summary, part_id, structure.halo)
    else:
        full_degrees = torch.full_like(local_degrees, -1)
    complete = local_degrees == full_degrees
    starts = structure.num_inner_edges + counts_to_offsets(local_degrees)
    edges = expand_ranges(starts[:-1][complete], starts[1:][complete])
    return structure.halo[complete], counts_to_offsets(local_degrees[complete]), edges


def _degrees_from_owners(summary: PartitionSummary, part_id: int, halo: Tensor) -> Tensor:
    """Full in-degrees of halo vertices read from their owners' graph files; -1 where such a file is not here.

    `halo_hops` in the JSON is a claim about the writer, no proof; the owner's list is one, since owned edges are
    checked against the edge ranges.
    """
    degrees = torch.full((halo.numel(),), -1, dtype=torch.int64)
    offsets = torch.tensor(summary.node_offsets)
    owner = torch.searchsorted(offsets, halo, right=True) - 1
    for other in torch.unique(owner).tolist():
        path = summary.folder / summary.part_files[other].part_graph
        if other == part_id or not path.is_file():
            _logger.info("%s is not here: halo vertices of part %d count as incomplete", path, other)
            continue
        structure = _read_structure(summary, other)
        first, last = summary.node_offsets[other], summary.node_offsets[other + 1]
        owned = torch.bincount(structure.dst[: structure.num_inner_edges] - first, minlength=last - first)
        mine = owner == other
        degrees[mine] = owned[halo[mine] - first]
    return degrees


def _reason(error: Exception) -> str:
    """The line of a DGL error that says something; the rest is a C++ stack trace."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in lines if "Check failed" in line), lines[0] if lines else type(error).__name__)


def _read_data(path: Path, num_rows: int, kind: str, sidecar: Sidecar | None) -> dict[str, Tensor]:
    check_tensor_file(path, _REMEDY)  # DGL fills what a truncated file lacks with whatever the memory held
    try:
        stored = load_tensors(str(path))
    except (dgl.DGLError, RuntimeError, ValueError) as error:
        raise PartitionError(f"{path} cannot be read by DGL ({_reason(error)}). {_REMEDY}") from error
    data: dict[str, Tensor] = {}
    for key, tensor in stored.items():
        # "_N/feat" and "_N:_E:_N/weight"; folders of old DGL versions have no prefix.
        name = key.split("/", 1)[-1]
        if tensor.shape[:1] != (num_rows,):
            raise PartitionError(
                f"{path}: {key!r} must have {num_rows} rows (got shape {tuple(tensor.shape)}). {_REMEDY}"
            )
        is_bool = sidecar is not None and f"{kind}/{name}" in sidecar.bool_data
        data[name] = tensor.bool() if is_bool else tensor
    return data
