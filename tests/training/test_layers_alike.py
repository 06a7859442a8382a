# SPDX-License-Identifier: Apache-2.0
"""Layers of a deep model that hold and receive the same rows share their structure, and compute as they would apart."""

from __future__ import annotations

from dataclasses import dataclass

import dgl
import pytest
import torch
import torch.nn.functional as F

from dgl_hybrid import FullGraphLoader, PartitionedGraph
from dgl_hybrid.exchange.connect import RankTransport, create_communicator
from dgl_hybrid.graph.layer_block import LayerBlock
from dgl_hybrid.graph.optimize import optimize
from dgl_hybrid.ops.dgl_index import sparse_graph_of
from tests.helpers.exactness import Case, StepResult, assert_same_step, forced_plan, reference_step, run_step
from tests.helpers.graphs import power_law
from tests.helpers.partitions import PartitionStore
from tests.helpers.thinning import each_value
from tests.helpers.world import run_ranks

NUM_LAYERS = 5


def every_node_trains() -> dgl.DGLGraph:
    g = power_law()
    g.ndata["train_mask"] = torch.ones(g.num_nodes(), dtype=torch.bool)
    return g


def path() -> dgl.DGLGraph:
    """Each node reads the one before and the one after it; the last one trains, so each layer needs one node more."""
    n = 24
    there, back = (torch.arange(n - 1), torch.arange(1, n)), (torch.arange(1, n), torch.arange(n - 1))
    g = dgl.graph((torch.cat([there[0], back[0]]), torch.cat([there[1], back[1]])), num_nodes=n)
    g.ndata["feat"] = torch.randn(n, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    g.ndata["label"] = torch.arange(n) % 3
    g.ndata["train_mask"] = torch.arange(n) == n - 1
    g.edata["w"] = torch.linspace(0.5, 1.5, g.num_edges(), dtype=torch.float64)
    return g


@each_value(
    kind=["gcn_both", "sage_mean", "gin_max", "edge_weight_norm", "gat", "gatv2", "direct_ops", "user_defined"],
    plan=["depcomm", "depcache", "random:1:0.4"],
    world_size=[1, 2, 3, 4],
)
def test_as_on_the_whole_graph(kind: str, plan: str, world_size: int, partitions: PartitionStore) -> None:
    graph = every_node_trains()
    case = Case(kind=kind, num_layers=NUM_LAYERS, plan=plan, epochs=2, optimized=True)
    results = run_ranks(world_size, run_step, partitions.get("all train", graph, world_size), case)
    assert_same_step(results, reference_step(graph, case))


@each_value(
    kind=["gcn_both", "sage_mean", "edge_weight_norm", "gat"],
    rank_transport=["collective", "shared_memory"],
    chunk_rows=[None, 3],
    partial_sums=[False, True],
)
def test_whatever_travels(
    kind: str,
    rank_transport: RankTransport,
    chunk_rows: int | None,
    partial_sums: bool,
    partitions: PartitionStore,
) -> None:
    graph = every_node_trains()
    case = Case(
        kind=kind,
        num_layers=NUM_LAYERS,
        epochs=2,
        optimized=True,
        rank_transport=rank_transport,
        chunk_rows=chunk_rows,
        partial_sums=partial_sums,
    )
    results = run_ranks(3, run_step, partitions.get("all train", graph, 3), case)
    assert_same_step(results, reference_step(graph, case))


@each_value(partial_sums=[False, True], world_size=[2, 3, 4])
def test_sums_weights_and_attention_share_a_layer(
    partial_sums: bool, world_size: int, partitions: PartitionStore
) -> None:
    """Each its own way: with or without the edge of an entry, of rows or of what others have summed up."""
    graph = every_node_trains()
    case = Case(
        kind="every_way",
        num_layers=NUM_LAYERS,
        epochs=2,
        optimized=True,
        partial_sums=partial_sums,
        rank_transport="collective",
    )
    results = run_ranks(world_size, run_step, partitions.get("all train", graph, world_size), case)
    assert_same_step(results, reference_step(graph, case))


@pytest.mark.parametrize("optimized", [False, True])
def test_dropout_of_attention_is_that_of_one_rank(optimized: bool, partitions: PartitionStore) -> None:
    graph = every_node_trains()
    case = Case(kind="gat_attn_drop", num_layers=NUM_LAYERS, epochs=2, optimized=optimized)

    def losses(world_size: int) -> list[float]:
        found: list[StepResult] = run_ranks(world_size, run_step, partitions.get("all train", graph, world_size), case)
        return [sum(of_ranks) for of_ranks in zip(*(result.losses for result in found), strict=True)]

    expected = losses(1)
    for world_size in (2, 3, 4):
        assert losses(world_size) == pytest.approx(expected, rel=1e-9)


@dataclass
class Shared:
    """How many different things the layers of a rank have, after two epochs."""

    alike: list[bool]
    same_here: list[bool]
    """Of each layer but the first: whether it has the rows of the one below on this rank."""
    num_sources: int
    num_dgl_graphs: int
    num_op_graphs: int
    num_splits: int
    """Of what sums or attends while rows travel."""
    num_searches: int
    """For the fewest rows to send."""
    has_positions: list[bool]
    send_sums: list[tuple[bool, bool]]
    """Of each layer, what is evaluated and what is trained."""


def share(rank: int, world_size: int, folder: str, case: Case) -> Shared:
    g = PartitionedGraph.open(folder, communicator=create_communicator(transport=case.rank_transport))
    model = case.build(g.ndata["feat"].shape[1])
    optimize(model)
    sampler = dgl.dataloading.MultiLayerFullNeighborSampler(case.num_layers)
    loader = FullGraphLoader(
        g, g.owned_nodes("train_mask"), sampler, plan=forced_plan(g, case), partial_sums=case.partial_sums
    )
    with torch.no_grad():
        for input_nodes, _, blocks in loader:
            model(blocks, g.ndata["feat"][input_nodes].clone())
    for _ in range(2):
        for input_nodes, seeds, blocks in loader:
            x = g.ndata["feat"][input_nodes].clone()
            F.cross_entropy(model(blocks, x), g.ndata["label"][seeds]).backward()
    layers = loader.sets.layers
    rows = [
        (layer.num_dst, layer.num_held, layer.exchange.recv_global.tolist(), layer.exchange.send_index.tolist())
        for layer in layers
    ]
    splits = [block.split for block in loader.blocks if block.split is not None]
    used = [
        value.layer for split in splits for name, value in vars(split).items() if name in ("trained_sums", "attention")
    ]
    searches = {id(split._shared.partial_sums) for split in splits if split._shared.partial_sums is not None}
    return Shared(
        alike=[layer.is_like_below for layer in layers],
        same_here=[above == below for above, below in zip(rows[1:], rows, strict=False)],
        num_sources=len({layer.indices.data_ptr() for layer in layers}),
        num_dgl_graphs=len({id(block.real_index) for block in loader.blocks}),
        num_op_graphs=len({id(sparse_graph_of(block.real_index)) for block in loader.blocks}),
        num_splits=len({id(layer) for layer in used}),
        num_searches=len(searches),
        has_positions=["_found" in vars(layer.edge_positions) for layer in used],
        send_sums=[
            (split.plain_sums.layer.parts[0].are_sums, split.trained_sums.layer.parts[0].are_sums)
            for split in splits
            if "trained_sums" in vars(split)
        ],
    )


@each_value(kind=["sage_mean", "gat", "gat_attn_drop"], world_size=[2, 3, 4])
def test_layers_that_are_alike_share_everything(kind: str, world_size: int, partitions: PartitionStore) -> None:
    folder = partitions.get("all train", every_node_trains(), world_size)
    case = Case(kind=kind, num_layers=NUM_LAYERS, partial_sums=True, rank_transport="collective")
    for found in run_ranks(world_size, share, folder, case):
        assert found.alike == [False] + [True] * (NUM_LAYERS - 1)
        assert all(found.same_here)
        assert (found.num_sources, found.num_dgl_graphs, found.num_op_graphs) == (1, 1, 1)
        assert (found.num_splits, found.num_searches) == (1, int(kind == "sage_mean"))
        assert found.send_sums == [(False, True)] * (NUM_LAYERS if kind == "sage_mean" else 0)
        # The positions of edges are found for those who have numbers of edges.
        assert found.has_positions == [kind == "gat_attn_drop"] * NUM_LAYERS


@each_value(plan=["depcomm", "depcache", "random:3:0.5"], world_size=[2, 3, 4])
def test_ranks_agree_which_layers_are_alike(plan: str, world_size: int, partitions: PartitionStore) -> None:
    """A rank of whose nodes few are needed has the same in all layers, where others need one more in each."""
    folder = partitions.get("path", path(), world_size, method="metis")
    found: list[Shared] = run_ranks(world_size, share, folder, Case(kind="sage_mean", num_layers=NUM_LAYERS, plan=plan))
    assert len({tuple(of_rank.alike) for of_rank in found}) == 1
    same_everywhere = [all(column) for column in zip(*(of_rank.same_here for of_rank in found), strict=True)]
    assert found[0].alike == [False, *same_everywhere]
    if plan == "depcomm":
        assert any(any(of_rank.same_here) for of_rank in found), "this graph shows nothing"
        assert not all(same_everywhere)


def test_a_copy_of_a_block_is_not_another_layer(partitions: PartitionStore) -> None:
    """Fields of one layer's block are not those of another that shares its structure."""
    g = PartitionedGraph.open(partitions.get("all train", every_node_trains(), 1))
    loader = FullGraphLoader(g, g.owned_nodes(), 3, strategy="depcomm")
    for _, _, blocks in loader:
        assert [block.structure.is_like_below for block in blocks] == [False, True, True]
        first, second, _ = blocks
        first.srcdata["h"] = torch.ones(first.num_src_nodes(), 2)
        first.dstdata["h"] = torch.ones(first.num_dst_nodes(), 2)
        first.edata["e"] = torch.ones(first.num_edges(), 1)
        assert isinstance(second, LayerBlock)
        assert not {"h", "e"} & {*second.srcdata, *second.dstdata, *second.edata}
        assert first.layer != second.layer
