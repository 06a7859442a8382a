# SPDX-License-Identifier: Apache-2.0
"""Explicit changes to a dataset's graph; nothing here happens unless asked for."""

from __future__ import annotations

import dataclasses

import dgl
import torch
from torch import Tensor

from dgl_hybrid.datasets.dataset import GraphDataset


def symmetrise(src: Tensor, dst: Tensor, num_nodes: int) -> tuple[Tensor, Tensor]:
    """Adds the reverse of every arc; duplicates collapse into one, self-loops stay.

    Args:
        src: (E,) int64.
        dst: (E,) int64.
        num_nodes: N, at most 2**31.
    Returns:
        Sorted by (src, dst).
    """
    key = torch.unique(torch.cat([src * num_nodes + dst, dst * num_nodes + src]))
    return key // max(num_nodes, 1), key % max(num_nodes, 1)


def add_self_loops(src: Tensor, dst: Tensor, num_nodes: int) -> tuple[Tensor, Tensor]:
    """Gives every vertex exactly one self-loop, after all other arcs; (E,) int64 in, (E' + N,) out."""
    kept = src != dst
    loops = torch.arange(num_nodes)
    return torch.cat([src[kept], loops]), torch.cat([dst[kept], loops])


def normalize_rows(feat: Tensor) -> Tensor:
    """Divides each row by its sum of absolute values; zero rows stay zero. (N, F) in and out."""
    return feat / feat.abs().sum(dim=1, keepdim=True).clamp(min=torch.finfo(feat.dtype).tiny)


def transform_dataset(
    dataset: GraphDataset, *, symmetric: bool, self_loops: bool, normalize_features: bool
) -> GraphDataset:
    """Applies the chosen transformations, in this order, and records them in `meta["transforms"]`."""
    graph = dataset.graph
    num_nodes = int(graph.num_nodes())
    meta = {
        **dataset.meta,
        "transforms": {"symmetric": symmetric, "self_loops": self_loops, "normalize_features": normalize_features},
    }
    if symmetric or self_loops:
        src, dst = graph.edges(order="eid")
        if symmetric:
            src, dst = symmetrise(src, dst, num_nodes)
        if self_loops:
            src, dst = add_self_loops(src, dst, num_nodes)
        changed = dgl.graph((src, dst), num_nodes=num_nodes)
        for name, data in graph.ndata.items():
            changed.ndata[name] = data
        graph = changed
    if normalize_features:
        graph.ndata["feat"] = normalize_rows(graph.ndata["feat"])
    return dataclasses.replace(dataset, graph=graph, meta=meta)
