# SPDX-License-Identifier: Apache-2.0
"""Decides which part owns each vertex: METIS, random, contiguous ranges."""

from __future__ import annotations

import logging
from typing import Literal, get_args

import dgl
import numpy as np
import torch
from torch import Tensor

from dgl_hybrid.errors import PartitionError
from dgl_hybrid.partition.quiet import captured_output

_logger = logging.getLogger(__name__)

PartMethod = Literal["metis", "random", "contiguous"]


def check_method(part_method: str) -> None:
    """Raises ValueError, listing the choices, if `part_method` is not one of `PartMethod`."""
    if part_method not in get_args(PartMethod):
        raise ValueError(f"part_method must be one of {', '.join(get_args(PartMethod))} (got {part_method!r})")


def check_num_parts(num_parts: int, num_nodes: int) -> None:
    """Raises ValueError if so many vertices cannot be split into so many parts that none is empty."""
    if num_parts < 1:
        raise ValueError(f"num_parts must be at least 1 (got {num_parts})")
    if num_parts > num_nodes:
        raise ValueError(
            f"num_parts must not exceed the number of vertices (got {num_parts} parts for {num_nodes} vertices)"
        )


def assign_nodes(
    graph: dgl.DGLGraph,
    num_parts: int,
    part_method: str,
    *,
    balance_ntypes: Tensor | None = None,
    balance_edges: bool = False,
    objtype: str = "cut",
    seed: int = 0,
) -> Tensor:
    """Gives every vertex a part; no part stays empty.

    Args:
        graph: Homogeneous, int64 ids, on the CPU.
        num_parts: P, at most the number of vertices.
        part_method: "metis", "random" (each vertex independently, from `seed`) or "contiguous" (1D: consecutive
            original ids, equal vertex counts, or equal in-edge counts with `balance_edges`).
        balance_ntypes: (N_total,) integer classes that METIS spreads evenly over the parts.
        balance_edges: Balance in-edges as well (METIS, of which parallel edges are one) or instead of vertices
            (contiguous).
        objtype: "cut" or "vol", METIS only.
        seed: For "random". METIS takes none, and two calls may differ (see `partition_graph`).
    Returns:
        (N_total,) int64 in 0..P-1.
    Raises:
        ValueError: unknown method, or more parts than vertices.
        PartitionError: METIS gave up.
    """
    check_method(part_method)
    num_nodes = int(graph.num_nodes())
    check_num_parts(num_parts, num_nodes)
    if num_parts == 1:
        return torch.zeros(num_nodes, dtype=torch.int64)
    if part_method == "random":
        rng = np.random.default_rng(seed)
        node_part = torch.from_numpy(rng.integers(0, num_parts, size=num_nodes))
    elif part_method == "contiguous":
        node_part = _contiguous(graph, num_parts, balance_edges)
    else:
        node_part = _metis(graph, num_parts, balance_ntypes, balance_edges, objtype)
    return fill_empty_parts(node_part, num_parts)


def fill_empty_parts(node_part: Tensor, num_parts: int) -> Tensor:
    """Moves vertices from the largest parts into empty ones, one vertex each.

    METIS and a random draw leave parts empty on tiny graphs; DistDGL cannot even load such a folder.

    Args:
        node_part: (N_total,) int64, N_total >= num_parts.
        num_parts: P.
    Returns:
        (N_total,) int64 with every part present; the same tensor if nothing was empty.
    """
    counts = torch.bincount(node_part, minlength=num_parts)
    empty = (counts == 0).nonzero().flatten().tolist()
    if not empty:
        return node_part
    _logger.warning("parts %s came out empty; each gets one vertex of the largest part", empty)
    node_part = node_part.clone()
    for part in empty:
        largest = int(counts.argmax())
        vertex = int((node_part == largest).nonzero().flatten()[-1])
        node_part[vertex] = part
        counts[largest] -= 1
        counts[part] += 1
    return node_part


def _contiguous(graph: dgl.DGLGraph, num_parts: int, balance_edges: bool) -> Tensor:
    num_nodes = int(graph.num_nodes())
    if not balance_edges:
        return torch.arange(num_nodes) * num_parts // num_nodes
    # One is added per vertex so that runs of vertices without in-edges count too. A vertex goes where its middle is.
    weight = graph.in_degrees().to(torch.int64) + 1
    middle = torch.cumsum(weight, 0) * 2 - weight
    bounds = torch.searchsorted(middle, torch.arange(1, num_parts) * 2 * int(weight.sum()) // num_parts)
    # A hub may span several shares: every part keeps at least one vertex, and the ranges stay in order.
    step = torch.arange(1, num_parts)
    bounds = torch.cummax(bounds - step, 0).values.clamp(min=0, max=num_nodes - num_parts) + step
    return torch.searchsorted(bounds, torch.arange(num_nodes), right=True)


def _metis(
    graph: dgl.DGLGraph, num_parts: int, balance_ntypes: Tensor | None, balance_edges: bool, objtype: str
) -> Tensor:
    if graph.is_multigraph:
        # METIS is for simple graphs: of tiny ones with parallel edges it writes past its memory, and the process ends.
        graph = dgl.to_simple(graph, return_counts=None, copy_ndata=False)
    try:
        with captured_output("METIS"):
            node_part = dgl.metis_partition_assignment(
                graph, num_parts, balance_ntypes=balance_ntypes, balance_edges=balance_edges, objtype=objtype
            )
    except dgl.DGLError as error:
        raise PartitionError(
            f"METIS failed on {graph.num_nodes()} vertices and {num_parts} parts ({error}). "
            "Use part_method='contiguous' or 'random'."
        ) from error
    if node_part is None:
        raise PartitionError(
            f"METIS returned nothing for {graph.num_nodes()} vertices and {num_parts} parts. "
            "Use part_method='contiguous' or 'random'."
        )
    return torch.as_tensor(node_part).to(torch.int64)
