# SPDX-License-Identifier: Apache-2.0
"""What DistDGL does not keep and exact training needs: one safetensors file per part."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from dgl_hybrid.errors import PartitionError
from dgl_hybrid.partition.local_order import LocalOrder
from dgl_hybrid.partition.manifest import FORMAT_VERSION
from dgl_hybrid.partition.rights import umask

_REMEDY = "Write the folder anew with dgl_hybrid.partition_graph."


@dataclass(frozen=True, kw_only=True)
class Sidecar:
    """Full-graph facts about one part (N inner vertices, E inner edges, H halo vertices)."""

    part_id: int
    in_degrees: Tensor
    """(N,) int64 in the full graph, by inner vertex."""
    out_degrees: Tensor
    """(N,) int64 in the full graph, by inner vertex."""
    orig_node_ids: Tensor
    """(N,) int64, by inner vertex."""
    orig_edge_ids: Tensor
    """(E,) int64, by owned edge id."""
    halo_global: Tensor
    """(H,) int64, sorted: every halo vertex of the part."""
    halo_in_degrees: Tensor
    """(H,) int64 in the full graph: a halo vertex's in-edge list is complete if it has this many."""
    bool_data: tuple[str, ...]
    """Names ("node/..." and "edge/...") of data that was bool; DGL stores those as uint8."""
    local_order: LocalOrder | None = None
    """Of inner vertices; None where nobody looked for one."""


def write_sidecar(path: Path, sidecar: Sidecar) -> None:
    """Writes `sidecar` as safetensors to `path`."""
    tensors = {name: getattr(sidecar, name).contiguous() for name in _TENSORS}
    # One entry: safetensors writes several in random order, and equal partitions should be equal files.
    facts: dict[str, object] = {
        "format_version": FORMAT_VERSION,
        "part_id": sidecar.part_id,
        "bool_data": sidecar.bool_data,
    }
    if sidecar.local_order is not None:
        tensors[_LOCAL_ORDER] = sidecar.local_order.rows.contiguous()
        facts["reads"] = [sidecar.local_order.reads_by_id, sidecar.local_order.reads_by_locality]
    safetensors.torch.save_file(tensors, path, metadata={"dgl_hybrid": json.dumps(facts)})
    path.chmod(0o666 & ~umask())  # safetensors keeps it to this user; other users read partitions, as they do DGL's


def read_sidecar(path: Path, *, part_id: int, num_inner_nodes: int, num_inner_edges: int) -> Sidecar:
    """Reads and checks one part's sidecar.

    Raises:
        PartitionError: damaged, of another part or version, or with shapes that do not fit; names the file.
    """
    try:
        with safetensors.safe_open(path, framework="pt") as reader:
            metadata = json.loads((reader.metadata() or {}).get("dgl_hybrid", "{}"))
            tensors = {name: reader.get_tensor(name) for name in _TENSORS}
            order = reader.get_tensor(_LOCAL_ORDER) if _LOCAL_ORDER in reader.keys() else None  # noqa: SIM118
    except (OSError, safetensors.SafetensorError, json.JSONDecodeError, RecursionError) as error:
        raise PartitionError(f"{path} cannot be read ({error}). {_REMEDY}") from error
    if not isinstance(metadata, dict) or not isinstance(bool_data := metadata.get("bool_data", []), list):
        raise PartitionError(f"{path}: its metadata must be an object with a list 'bool_data'. {_REMEDY}")
    if metadata.get("format_version") != FORMAT_VERSION or metadata.get("part_id") != part_id:
        raise PartitionError(
            f"{path} must be of format {FORMAT_VERSION} and part {part_id} (got format "
            f"{metadata.get('format_version')}, part {metadata.get('part_id')}). {_REMEDY}"
        )
    num_halo = tensors["halo_global"].numel()
    sizes = {
        "in_degrees": num_inner_nodes,
        "out_degrees": num_inner_nodes,
        "orig_node_ids": num_inner_nodes,
        "orig_edge_ids": num_inner_edges,
        "halo_global": num_halo,
        "halo_in_degrees": num_halo,
    }
    for name, size in sizes.items():
        tensor = tensors[name]
        if tensor.dtype != torch.int64 or tuple(tensor.shape) != (size,) or (size and int(tensor.min()) < 0):
            raise PartitionError(
                f"{path}: {name} must be non-negative int64 of shape ({size},) "
                f"(got {tensor.dtype} {tuple(tensor.shape)}). {_REMEDY}"
            )
    local_order = None if order is None else _local_order(path, order, num_inner_nodes, metadata.get("reads"))
    names = tuple(str(name) for name in bool_data)
    return Sidecar(part_id=part_id, bool_data=names, local_order=local_order, **tensors)


def _local_order(path: Path, rows: Tensor, num_inner_nodes: int, reads: object) -> LocalOrder:
    """Returns the order that is kept in `path`, if it is one."""
    is_order = (
        rows.dtype == torch.int64 and rows.dim() == 1 and torch.equal(rows.sort().values, torch.arange(num_inner_nodes))
    )
    match reads:
        case [float() as by_id, float() as by_locality] if is_order and rows.dim() == 1:
            return LocalOrder(rows=rows, reads_by_id=by_id, reads_by_locality=by_locality)
    raise PartitionError(
        f"{path}: {_LOCAL_ORDER} must be an order of {num_inner_nodes} vertices, int64, with two numbers of reads (got "
        f"{rows.dtype} {tuple(rows.shape)}, {reads!r}). {_REMEDY}"
    )


_LOCAL_ORDER = "local_order"
_TENSORS = ("in_degrees", "out_degrees", "orig_node_ids", "orig_edge_ids", "halo_global", "halo_in_degrees")
