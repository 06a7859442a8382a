# SPDX-License-Identifier: Apache-2.0
"""Dropout where one rank happens to have as many edges of a layer as a level has vertices: ranks find out together."""

from __future__ import annotations

from typing import Any

import dgl
import dgl.function as fn
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dgl_hybrid import FullGraphLoader, PartitionedGraph
from tests.helpers.exactness import assert_close
from tests.helpers.partitions import PartitionStore
from tests.helpers.world import run_ranks, run_ranks_expect_errors

NUM_NODES, WIDTH = 80, 6


def ring_with_chords() -> dgl.DGLGraph:
    """Every vertex reads the one before, every other one those at some distance, too."""
    nodes = torch.arange(NUM_NODES)
    chords = [(nodes[::2] - distance) % NUM_NODES for distance in (5, 9)]
    graph = dgl.graph((torch.cat([*chords, nodes - 1]) % NUM_NODES, torch.cat([nodes[::2], nodes[::2], nodes])))
    generator = torch.Generator().manual_seed(4)
    graph.ndata["feat"] = torch.randn(NUM_NODES, WIDTH, generator=generator, dtype=torch.float64)
    graph.edata["w"] = torch.rand(graph.num_edges(), generator=generator, dtype=torch.float64)
    return graph


class Drops(nn.Module):
    """Drops out heads of vertices, or of edges, inside of its layer, or weights of edges before it."""

    def __init__(self, way: str, size: int) -> None:
        super().__init__()
        self.way, self.size = way, size

    def forward(self, block: Any, x: Tensor) -> Tensor:
        h = x.view(len(x), 2, WIDTH // 2)
        if self.way == "edges before the layer":
            weight = F.dropout(block.edata["w"].view(-1, 1, 1), 0.5)
        with block.local_scope():
            block.srcdata["h"] = h
            own = h[: block.num_dst_nodes()]
            if self.way == "vertices":
                own = F.dropout(own, 0.5)
            if self.way == "neither":
                F.dropout(torch.ones(self.size, 2), 0.5)
            if self.way == "edges":
                block.update_all(lambda edges: {"m": F.dropout(edges.src["h"], 0.5)}, fn.sum("m", "o"))
            elif self.way == "edges before the layer":
                block.edata["e"] = weight
                block.update_all(fn.u_mul_e("h", "e", "m"), fn.sum("m", "o"))
            else:
                block.update_all(fn.copy_u("h", "m"), fn.sum("m", "o"))
            out: Tensor = own + block.dstdata["o"]
            return out


def drop(rank: int, world_size: int, part_config: str, way: str) -> tuple[Tensor, list[Tensor]]:
    """Rank 0 of several has as many edges as seeds."""
    g = PartitionedGraph.open(part_config)
    own = g.owned_nodes()
    reads_one = g.partition.in_degrees == 1
    seeds = own[reads_one] if rank == 0 and world_size > 1 else own
    sampler = dgl.dataloading.MultiLayerFullNeighborSampler(1, prefetch_edge_feats=["w"])
    loader = FullGraphLoader(g, seeds, sampler, plan=[torch.arange(0)], seed=3)
    sizes = loader.communicator.gather_ints([loader.blocks[0].num_edges(), *loader.sets.sizes])
    assert [edges == num_seeds for edges, _, num_seeds in sizes] == [world_size > 1, *[False] * (world_size - 1)]
    model, outputs = Drops(way, sizes[0][2]), []
    for _ in range(2):
        for input_nodes, _, (block,) in loader:
            outputs.append(model(block, g.ndata["feat"][input_nodes]))
    assert g.partition.orig_node_ids is not None
    return g.fetch_nodes(g.partition.orig_node_ids, loader.seeds), outputs


@pytest.mark.parametrize("way", ["vertices", "edges", "edges before the layer"])
def test_masks_are_those_of_one_rank(way: str, partitions: PartitionStore) -> None:
    """That rank raised an error alone, and others waited for it; before the layer it drew by vertices, silently."""
    graph = ring_with_chords()
    ((ids, alone),) = run_ranks(1, drop, partitions.get("chords", graph, 1), way)
    expected = [torch.empty_like(output).index_copy(0, ids, output) for output in alone]
    for ids, outputs in run_ranks(3, drop, partitions.get("chords", graph, 3), way):
        for epoch, (output, whole) in enumerate(zip(outputs, expected, strict=True)):
            assert_close(output, whole[ids], f"epoch {epoch}")


def test_rows_that_are_neither_raise_on_all_ranks(partitions: PartitionStore) -> None:
    """Where one rank has as many of a level, it went on alone."""
    folder = partitions.get("chords", ring_with_chords(), 3)
    for error in run_ranks_expect_errors(3, drop, folder, "neither", timeout=40):
        assert error.type_name == "BlockError"
        assert "has neither the rows of a level" in error.message
