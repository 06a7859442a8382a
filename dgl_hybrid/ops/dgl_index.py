# SPDX-License-Identifier: Apache-2.0
"""The structure behind a DGL graph as a `SparseGraph`, made once per graph index."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dgl_hybrid.ops.device_index import DeviceIndex
from dgl_hybrid.ops.devices import device_of
from dgl_hybrid.ops.index_notes import existing_notes, notes_of
from dgl_hybrid.ops.sparse_graph import SparseGraph


def sparse_graph_of(index: Any, device: torch.device | str | None = None) -> SparseGraph | None:
    """Returns the edges of a DGL graph index; the same object on every call for that index and device.

    The order of in-edges is DGL's (edge ids ascend unless the graph was made from compressed rows), so that of equal
    largest values the same edge wins.

    Args:
        index: `graph._graph`, with its structure on any device.
        device: Where the result shall lie; where the features of the graph lie by default.
    Returns:
        None if the graph has several edge types, or none.
    """
    index, target = _home(index, device)
    graphs = notes_of(index).graphs
    if not graphs:
        if index.number_of_etypes() != 1:
            return None
        graph = _convert(index)
        graphs[graph.device] = graph
    home = next(iter(graphs.values()))
    if target is None or target == home.device:
        return home
    if target not in graphs:
        graphs[target] = home.to(target)
    return graphs[target]


def destinations_without_edges(index: Any, device: torch.device) -> Tensor | None:
    """Returns the (K,) int64 destinations that have no in-edge, on `device`; None if each has one. Found once.

    Args:
        index: Of a graph with one edge type.
        device: Where the result shall lie.
    """
    index, _ = _home(index, None)
    found = notes_of(index).edgeless
    if device not in found:
        graph = sparse_graph_of(index)
        assert graph is not None
        with torch.inference_mode(False):  # who trains later saves them
            rows = torch.nonzero(graph.in_edges.indptr.diff() == 0).flatten()
            found[device] = rows.to(device) if len(rows) else None
    return found[device]


def _home(index: Any, device: torch.device | str | None) -> tuple[Any, torch.device | None]:
    """The index that notes are kept on, and the device asked for."""
    if isinstance(index, DeviceIndex):
        index, device = index.on_cpu, index.device if device is None else device
    # An empty tensor knows which device "cuda" is.
    return index, None if device is None else device_of(device)


def claim(index: Any) -> None:
    """Marks an index as one of a graph of ours, whose operations reach our ops without being asked for."""
    index, _ = _home(index, None)
    notes_of(index).is_claimed = True


def is_claimed(index: Any) -> bool:
    """Tells whether `claim` was called with this index, or with that of the graph whose only edge type it is."""
    index, _ = _home(index, None)
    notes = existing_notes(index)
    return notes is not None and notes.is_claimed


def _convert(index: Any) -> SparseGraph:
    source_type, destination_type = index.metagraph.find_edge(0)
    num_src, num_dst = index.num_nodes(source_type), index.num_nodes(destination_type)
    formats = index.formats()
    if "csc" not in (*formats["created"], *formats["not created"]):  # DGL refuses to make it for this graph
        src, dst, edge_ids = index.edges(0)
        order = torch.argsort(edge_ids)
        return SparseGraph.from_coo(src[order], dst[order], num_src, num_dst)
    # DGL hands out its own tensors, and sorts them in place for global negative sampling: if we kept those, our entries
    # would name other edges after that. Graphs of ours are never sampled so, and share them.
    _, _, indptr, indices, edge_ids = index.adjacency_matrix_tensors(0, True, "csr")
    counting = torch.arange(len(edge_ids), dtype=edge_ids.dtype, device=edge_ids.device)
    counts_up = torch.equal(edge_ids, counting)  # also of none at all, which is how DGL says it
    return SparseGraph.from_csc(
        indptr, indices, None if counts_up else edge_ids, num_src=num_src, copy=not is_claimed(index)
    )
