# SPDX-License-Identifier: Apache-2.0
"""What epochs run on by one plan: a rank's level sets and blocks, the ids that scripts read by, and keys of dropout."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import dgl
import torch
from torch import Tensor

from dgl_hybrid.exchange.approximate import Approximation
from dgl_hybrid.exchange.closure import LayerStructure, LevelSets, close_levels
from dgl_hybrid.exchange.locality import RowOrder
from dgl_hybrid.graph.build import build_layer_blocks
from dgl_hybrid.graph.layer_block import LayerBlock
from dgl_hybrid.graph.static_results import nothing_is_static
from dgl_hybrid.training.edge_keys import EdgeKeys
from dgl_hybrid.training.partitioned_graph import PartitionedGraph


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """What a plan says of the blocks."""

    cached: list[Tensor]
    """(L,) of each level from 0 the global ids that are cached."""
    dense_below: int
    """Levels below this one hold every owned vertex."""
    chunk_rows: int | None = None
    """What fits the plan's memory budget."""
    sums_first: Sequence[bool] = ()
    """(L,) which layers sum before they multiply although that makes rows narrower; empty: none."""
    owners_aggregate: bool = False
    """Whether what is cached at level 1 gets what the first layer sums up from its owner."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanBlocks:
    """All of one plan."""

    sets: LevelSets
    blocks: list[LayerBlock]
    """One a layer, first layer first."""
    input_nodes: Tensor
    """(|C_0|,) int64 global ids."""
    seeds: Tensor
    """(|C_L|,) likewise."""
    node_keys: Tensor
    """(|C_0|,) int64: an id of every row that is the same for any partition, where such ids are known."""
    edge_keys: EdgeKeys
    """Likewise of the edges of each layer."""

    @property
    def num_edges(self) -> int:
        """Of all layers together."""
        return sum(layer.num_edges for layer in self.sets.layers)

    def retire(self, graph: PartitionedGraph) -> list[weakref.ref[LayerStructure]]:
        """Leaves the blocks unusable, as a script's variables still hold what was yielded last.

        Returns:
            (L,) the structures of layers, which go with these blocks unless somebody else holds them.
        """
        for block in self.blocks:
            graph.forget_reads(block.known_ids())
            block.retire()
        return [weakref.ref(layer) for layer in self.sets.layers]


class BlockBuilder:
    """Builds what epochs run on, one plan of a loader after another.

    Args:
        seeds, num_borrowed: From `settle_seeds`.
        device: Where blocks lie.
        chunk_rows: Received rows come in messages of so many at most; None: as the plan has it.
        row_order, approximation, overlap, partial_sums: As `FullGraphLoader` takes them.
    """

    def __init__(
        self,
        graph: PartitionedGraph,
        seeds: Tensor,
        num_borrowed: int,
        *,
        device: torch.device,
        row_order: RowOrder,
        approximation: Approximation | None,
        overlap: bool,
        chunk_rows: int | None,
        partial_sums: bool,
    ) -> None:
        self._graph, self._communicator = graph, graph.communicator
        self._seeds, self._num_borrowed = seeds, num_borrowed
        self._device, self._row_order = device, row_order
        self._approximation, self._overlap = approximation, overlap
        self.chunk_rows, self._partial_sums = chunk_rows, partial_sums
        self._seed_order: Tensor | None = None
        """That of the first plan, which others keep: scripts may read labels once."""

    def build(self, layout: Layout, *, seed: int, keeps_static: bool) -> PlanBlocks:
        """Builds it. Collective.

        Args:
            seed: Of random rounding, where rows are approximated.
            keeps_static: Whether what layers make of the graph's own fields is kept.
        """
        g = self._graph
        sets = close_levels(
            self._communicator,
            g.nodes,
            g.in_edges,
            self._seeds,
            self._num_borrowed,
            layout.cached,
            dense_below=layout.dense_below,
            row_order=self._row_order,
            places=g.places,
            owners_aggregate=layout.owners_aggregate,
            seed_order=self._seed_order,
        )
        if self._seed_order is None:
            self._seed_order = sets.rows_global[: len(self._seeds)].clone()
        has_replicas = sets.layers[0].replicas is not None  # alike on all ranks
        of_first_layer = sets.rows_global[: sets.sizes[1]]
        limits = [rows for rows in (self.chunk_rows, layout.chunk_rows) if rows is not None]
        blocks = build_layer_blocks(
            sets,
            self._communicator,
            out_degrees=g.fetch_nodes(g.out_degrees, sets.rows_global),
            in_degrees=g.fetch_nodes(g.partition.in_degrees, of_first_layer) if has_replicas else None,
            device=self._device,
            weighted_out_degrees=lambda block, weight: g.weighted_out_degrees(weight, block.source_ids()),
            is_static=g.hands_out if keeps_static else nothing_is_static,
            approximation=self._approximation,
            seed=seed,
            overlap=self._overlap,
            chunk_rows=min(limits, default=None),
            partial_sums=self._partial_sums,
            sums_first=layout.sums_first,
            on_edge_ids=g.row_sets.register_edges,
        )
        for block in blocks:
            for ids in (block.srcdata[dgl.NID], block.dstdata[dgl.NID]):
                g.row_sets.register_nodes(ids)
        node_keys, edge_keys = self._find_keys(sets)
        return PlanBlocks(
            sets=sets,
            blocks=blocks,
            input_nodes=blocks[0].srcdata[dgl.NID],
            seeds=blocks[-1].dstdata[dgl.NID],
            node_keys=node_keys,
            edge_keys=edge_keys,
        )

    def _find_keys(self, sets: LevelSets) -> tuple[Tensor, EdgeKeys]:
        """Finds ids of rows and edges that are the same for any partition, so that dropout is too. Collective."""
        g, partition = self._graph, self._graph.partition
        known = self._communicator.gather_ints(
            [int(partition.orig_node_ids is not None), int(partition.orig_edge_ids is not None)]
        )
        node_keys = sets.rows_global
        if all(row[0] for row in known) and partition.orig_node_ids is not None:
            node_keys = g.fetch_nodes(partition.orig_node_ids, node_keys)
        own_keys = partition.orig_edge_ids if all(row[1] for row in known) else None
        return node_keys.to(self._device), EdgeKeys(self._communicator, g.edges, sets.edge_ids, own_keys)
