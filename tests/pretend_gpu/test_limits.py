# SPDX-License-Identifier: Apache-2.0
"""What a GPU has less of than a host: order in which it adds, elements that it sorts, memory, and launches to spare."""

from __future__ import annotations

from typing import Any
from unittest import mock

import dgl
import dgl.nn.pytorch as dglnn
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dgl_hybrid.exchange import row_codecs
from dgl_hybrid.exchange.connect import create_communicator
from dgl_hybrid.exchange.ids import Ownership
from dgl_hybrid.exchange.row_codecs import Int8Codec
from dgl_hybrid.graph import op_rates
from dgl_hybrid.graph.fused_attention import _find_edges
from dgl_hybrid.ops import SparseGraph, sparse_graph
from dgl_hybrid.training import metrics
from dgl_hybrid.training.learned_rows import settle_gradient
from dgl_hybrid.training.metrics import global_roc_auc
from tests.pretend_gpu.device import FREE_BYTES, GPU
from tests.pretend_gpu.ranks import PretendedGpus


class NoTwoInOneRow(TorchDispatchMode):
    """Refuses sums of floating rows on the GPU that meet in one row of a call: it adds them in any order."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.index_add_, torch.ops.aten.index_add):
            into, _, index = args[:3]
            if into.is_cuda and into.is_floating_point():
                at = index.cpu()
                assert len(at.unique()) == len(at), f"{func} adds rows that meet"
        return func(*args, **(kwargs or {}))


def add_learned_rows(rank: int, world_size: int, device: str) -> tuple[Tensor, float]:
    """Gradients of rows that all ranks hold, and a metric of rows with weights that binary numbers cannot tell."""
    communicator = create_communicator()
    ownership = Ownership(offsets=4 * torch.arange(world_size + 1), rank=rank)
    ids = torch.arange(ownership.total).roll(rank)
    grad = torch.rand(len(ids), 3, generator=torch.Generator().manual_seed(rank))
    scores = torch.tensor([0.1, 0.4, 0.4, 0.8]) + rank
    labels, weight = torch.tensor([0, 1, 0, 1]), torch.tensor([0.1, 0.2, 0.3, 0.7])
    with NoTwoInOneRow():
        settled = settle_gradient(grad.to(device), ids, ownership, communicator)
    assert settled.device.type == device
    with mock.patch.object(metrics, "_roc_auc", wraps=metrics._roc_auc) as add:
        area = global_roc_auc(scores.to(device), labels.to(device), weight=weight.to(device), communicator=communicator)
    assert all(column.device.type == "cpu" for call in add.call_args_list for column in call.args)
    return settled.cpu()[torch.argsort(ids)], area


def test_what_ranks_add_up_is_added_in_one_order(gpus: PretendedGpus) -> None:
    on_cpu, on_gpu = (gpus.run(3, add_learned_rows, device) for device in ("cpu", "cuda"))
    total = sum(
        torch.rand(12, 3, generator=torch.Generator().manual_seed(rank))[torch.argsort(torch.arange(12).roll(rank))]
        for rank in range(3)
    )
    for settled, area in on_gpu:
        torch.testing.assert_close(settled, total / 3)
        assert torch.equal(settled, on_cpu[0][0])
        assert area == on_cpu[0][1]


def sort_edges(rank: int, world_size: int) -> list[list[Tensor]]:
    """The edges of a graph by source, as a GPU sorts them and as it is done of more edges than it sorts."""
    ends = torch.randint(0, 30, (2, 200), generator=torch.Generator().manual_seed(0))
    found = []
    for most in (sparse_graph._MOST_SORTED, 10):
        with (
            mock.patch.object(sparse_graph, "_MOST_SORTED", most),
            mock.patch.object(torch, "argsort", wraps=torch.argsort) as sort,
        ):
            graph = SparseGraph.from_coo(*ends, 30, 30).to("cuda")
            neighbours = graph.out_neighbours
            found.append([x.cpu() for x in (*graph.out_edges.tensors(), *neighbours.tensors())])
            assert most > 10 or not any(call.args[0].is_cuda for call in sort.call_args_list)
    return found


def test_more_edges_than_a_gpu_sorts_are_sorted_on_the_host(gpus: PretendedGpus) -> None:
    ((sorted_there, sorted_here),) = gpus.run(1, sort_edges)
    assert all(torch.equal(*pair) for pair in zip(sorted_there, sorted_here, strict=True))


def measure_in_little_memory(rank: int, world_size: int) -> tuple[list[int], float]:
    made: list[int] = []

    def noted(*shape: int, device: torch.device) -> Tensor:
        made.append(shape[0])
        return random_rows(*shape, device=device)

    random_rows = op_rates._random_rows
    with (
        mock.patch.object(op_rates, "_random_rows", noted),
        mock.patch.object(op_rates, "_NUM_NODES", 1 << 3),
        mock.patch.object(op_rates, "_GPU_NODES", 1 << 20),
        mock.patch.object(op_rates, "_NODE_BYTES", FREE_BYTES // 64),
    ):
        op_rates.weighted_slowdown(1, 2, GPU)
    with mock.patch.object(op_rates, "_random_rows", side_effect=torch.OutOfMemoryError("CUDA out of memory")):
        price = op_rates.attention_slowdown("gat", 3, 5, GPU, has_dropout=True)
    return made, price


def test_operations_are_priced_by_as_many_rows_as_there_is_memory_for(gpus: PretendedGpus) -> None:
    """A model had no plan, or its loader could not be made, though it would have trained."""
    ((made, price),) = gpus.run(1, measure_in_little_memory)
    assert made == [32, 16 * 32, 32], "rows of sources, of edges, of the plain sum"
    assert price == 1.0


def encode(rank: int, world_size: int, device: str) -> tuple[int, float]:
    rows = torch.rand(4096, 256, generator=torch.Generator().manual_seed(0))
    codec = Int8Codec()
    with mock.patch.object(row_codecs, "_draw", wraps=row_codecs._draw) as draw:
        wire = codec.encode(rows.to(device), key=(1, 2))
    return draw.call_count, float((codec.decode(wire, 256, torch.float32).cpu() - rows).abs().max())


@pytest.mark.parametrize(("device", "chunks"), [("cpu", 8), ("cuda", 1)])
def test_a_gpu_encodes_rows_in_few_launches(device: str, chunks: int, gpus: PretendedGpus) -> None:
    ((count, error),) = gpus.run(1, encode, device)
    assert count == chunks
    assert error < 2.0 / 250


def capture(rank: int, world_size: int) -> list[Any]:
    layer = dglnn.GATConv(3, 4, 2, attn_drop=0.5, allow_zero_in_degree=True)
    graph, x = dgl.rand_graph(10, 30), torch.ones(10, 3, device="cuda")
    found = []
    with mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True):
        for mode in (True, False):
            found.append(str(_find_edges(layer.train(mode), graph, x, False)))
    return found


def test_dropout_is_not_frozen_into_a_cuda_graph(gpus: PretendedGpus) -> None:
    """Its keys come from the host: every replay would have dropped the same edges."""
    ((training, evaluating),) = gpus.run(1, capture)
    assert training == "dropout in a CUDA graph"
    assert evaluating != training
