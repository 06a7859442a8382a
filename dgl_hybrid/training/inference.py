# SPDX-License-Identifier: Apache-2.0
"""Exact full-graph inference: every neighbour, no sampling, on the partitioned graph."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from dgl.distributed import DistGraph
from torch import Tensor, nn

from dgl_hybrid.errors import BlockError
from dgl_hybrid.exchange.communicator import Communicator
from dgl_hybrid.exchange.locality import RowOrder
from dgl_hybrid.graph.call_template import CallTemplate, map_leaves
from dgl_hybrid.graph.layer_block import LayerBlock
from dgl_hybrid.graph.model_copy import left_as_it_was, without_ddp
from dgl_hybrid.graph.rows_apart import check_rows_apart
from dgl_hybrid.training import session
from dgl_hybrid.training.dist_graph import TransportName
from dgl_hybrid.training.loader import FullGraphLoader
from dgl_hybrid.training.partitioned_graph import PartitionedGraph, as_partitioned

_logger = logging.getLogger(__name__)


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
    timeout_s: float | None = None,
) -> tuple[Tensor, Any]:
    """Runs `model(blocks, x)` in evaluation mode for some nodes. Collective; no gradients.

    Args:
        model: Any module a loader's blocks work with, wrapped in DDP or not; its modules' modes are restored.
        g: A running `DistGraph`, or the graph as this rank sees it.
        sampler: A DGL sampler or the number of layers, as for `FullGraphLoader`.
        nids: (n,) global ids for this rank; None takes all nodes it owns. A rank may give none.
        feature: The node field that the model is given as `x`.
        device: Of the blocks; by default where the model's first parameter lies.
        loader: One made before for the same nodes, to save building it. What `sampler`, `nids`, `device`, `transport`,
            `chunk_rows` and `timeout_s` say then has no effect.
        transport: Of a `DistGraph`, as for `FullGraphLoader`.
        chunk_rows: As for `FullGraphLoader`, where not all received rows fit.
        timeout_s: Of a `DistGraph`, as for `FullGraphLoader`.

    Returns:
        `(nids, output)`: (n,) int64, the ids this rank owns among all those asked for, ascending, and (n, …) their
        output rows, on the device of the blocks. A model that returns several tensors (a tuple, list, dictionary,
        dataclass or namespace of them) has each of them there, in an object of that kind.

    Raises:
        BlockError: On all ranks, if the model mixes rows of different vertices outside message passing. This is looked
            for once a model, on small blocks; of one that cannot be run on them it is only said.
        KeyError: The graph has no such field.
        TypeError: On all ranks, if the model is no module.
        ValueError: On all ranks, if some are given a loader and others are not, or if the model returns a tensor that
            has not one row for each seed.
    """
    graph = as_partitioned(g, transport, timeout_s=timeout_s) if loader is None else loader.graph
    _check_arguments(model, loader, graph.communicator)
    inner = without_ddp(model)
    is_made_here = loader is None
    if loader is None:
        if device is None:
            device = next((parameter.device for parameter in inner.parameters()), None)
        wanted = graph.owned_nodes() if nids is None else nids
        # An order of rows that training has found serves here, too; for one pass it is not worth looking for.
        row_order: RowOrder = "auto" if graph.places.are_known else "id"
        loader = FullGraphLoader(
            graph, wanted, sampler, device, strategy="depcomm", chunk_rows=chunk_rows, row_order=row_order
        )
    with evaluating(inner), torch.no_grad():
        input_nodes, seeds, blocks = next(iter(loader))
        x = loader.graph.ndata[feature][input_nodes]
        output = inner(blocks, x)
        _check_once(inner, loader, blocks, x)
    communicator, num_seeds, is_scarce = loader.communicator, loader.num_seeds, loader.graph.is_memory_scarce
    ids, order = seeds[:num_seeds].sort()

    def rows_asked_for(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if not value.dim() or len(value) != len(seeds):
            raise ValueError(
                f"infer needs a model whose tensors have one row for each of the seeds (got one of shape "
                f"{tuple(value.shape)} for {len(seeds)} seeds). Return the others apart from it, or none."
            )
        return value[:num_seeds][order]

    with communicator.agreed():
        result = ids, map_leaves(output, rows_asked_for)
    if is_made_here or is_scarce:
        del loader, blocks, input_nodes, x  # of which some may lie where they arrived
        communicator.drop_free_memory()
    return result


def _check_arguments(model: object, loader: FullGraphLoader | None, communicator: Communicator) -> None:
    """Checks what each rank was given. Collective."""
    with communicator.agreed("infer"):
        if not isinstance(model, nn.Module):
            raise TypeError(f"infer needs a torch.nn.Module, called as model(blocks, x) (got {type(model).__name__})")
    has_loader = [bool(row[0]) for row in communicator.gather_ints([int(loader is not None)], what="infer")]
    if len(set(has_loader)) > 1:
        with_it, without = has_loader.index(True), has_loader.index(False)
        raise ValueError(
            f"infer needs loader= on every rank or on none (got one on rank {with_it} and none on rank {without})"
        )


_checked: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Models that were found to keep rows apart, or could not be looked at."""


def _check_once(model: nn.Module, loader: FullGraphLoader, blocks: list[LayerBlock], x: Tensor) -> None:
    """Checks on rank 0 that a model keeps rows apart, as training does with the model that it plans for. Collective.

    After the pass: what is wrong with the model in any other way was said by the model itself.
    """
    communicator = loader.communicator
    # Ranks may have models that were made at different times: rank 0 looks at its own, so it decides.
    if communicator.broadcast_json(model in _checked):
        return
    with communicator.agreed(), session.paused(), left_as_it_was(model):
        if communicator.rank == 0:
            try:
                template = CallTemplate.of_call((blocks, x), {}, blocks, loader.prefetch.shapes(loader.graph))
                check_rows_apart(model, template, loader.num_layers)
            except BlockError:
                raise
            except Exception as error:
                _logger.warning(
                    "%s could not be run on the small blocks by which it would be checked (%s: %s), so it is not known "
                    "whether rows of different vertices are only mixed by message passing; anything else would not be "
                    "exact",
                    *(type(model).__name__, type(error).__name__, error),
                )
    _checked.add(model)
