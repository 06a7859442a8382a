# SPDX-License-Identifier: Apache-2.0
"""Exact full-graph inference: every neighbour, no sampling, on the partitioned graph."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from dgl.distributed import DistGraph
from torch import Tensor, nn

from dgl_hybrid.training.dist_graph import TransportName
from dgl_hybrid.training.loader import FullGraphLoader
from dgl_hybrid.training.partitioned_graph import PartitionedGraph, as_partitioned


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Puts a model into evaluation mode, and then each of its modules back into the mode it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, was_training in modes:
            module.training = was_training


def infer(
    model: nn.Module,
    g: PartitionedGraph | DistGraph,
    sampler: Any,
    *,
    nids: Tensor | None = None,
    feature: str = "feat",
    device: torch.device | str | None = None,
    loader: FullGraphLoader | None = None,
    transport: TransportName | None = None,
    chunk_rows: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Runs `model(blocks, x)` in evaluation mode for some nodes. Collective; no gradients.

    Args:
        model: Any module a loader's blocks work with, wrapped in DDP or not; its modules' modes are restored.
        g: A running `DistGraph`, or the graph as this rank sees it.
        sampler: A DGL sampler or the number of layers, as for `FullGraphLoader`.
        device: Of the blocks; by default where the model's first parameter lies.
        nids: (n,) global ids for this rank; None takes all nodes it owns. A rank may give none.
        feature: The node field that is the model's input.
        loader: One made before for the same nodes, to save building it.
        transport: Of a `DistGraph`, as for `FullGraphLoader`.
        chunk_rows: As for `FullGraphLoader`, where not all received rows fit.

    Returns:
        `(nids, output)`: the ids this rank owns among all those asked for, ascending, and their output rows.
    """
    inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    if loader is None:
        if device is None:
            device = next((parameter.device for parameter in inner.parameters()), None)
        graph = as_partitioned(g, transport)
        wanted = graph.owned_nodes() if nids is None else nids
        loader = FullGraphLoader(graph, wanted, sampler, device, strategy="depcomm", chunk_rows=chunk_rows)
    with evaluating(inner), torch.no_grad():
        input_nodes, seeds, blocks = next(iter(loader))
        output = inner(blocks, loader.graph.ndata[feature][input_nodes])
    ids, order = seeds[: loader.num_seeds].sort()
    return ids, output[: loader.num_seeds][order]
