# SPDX-License-Identifier: Apache-2.0
"""Fields of a graph without servers that a script writes to: every epoch begins with what the field holds by then."""

from __future__ import annotations

from dataclasses import dataclass, replace

import dgl
import pytest
import torch
from torch import Tensor

from dgl_hybrid import FullGraphLoader, PartitionedGraph, optimize
from dgl_hybrid.planner import uniform_topology
from dgl_hybrid.training.fields import StoredField
from tests.helpers.exactness import Case, assert_close, forced_plan
from tests.helpers.graphs import NUM_FEATURES, power_law
from tests.helpers.partitions import PartitionStore
from tests.helpers.world import run_ranks

CASE = Case(kind="sage_mean")
HANG_S = 60.0
"""Ranks that do not agree wait for each other: better a minute than four."""


@dataclass(frozen=True, kw_only=True)
class Read:
    """One epoch of one rank."""

    ids: Tensor
    """Original ids of the rows that were read."""
    rows: Tensor
    seeds: Tensor
    """Original ids of the rows of the output."""
    output: Tensor
    kept_bytes: int


def run_epoch(g: PartitionedGraph, loader: FullGraphLoader, model: torch.nn.Module) -> Read:
    assert g.partition.orig_node_ids is not None
    for input_nodes, _, blocks in loader:
        rows = g.ndata["feat"][input_nodes]
        output = model(blocks, rows)
    return Read(
        ids=g.fetch_nodes(g.partition.orig_node_ids, input_nodes),
        rows=rows.clone(),
        seeds=g.fetch_nodes(g.partition.orig_node_ids, loader.seeds),
        output=output.detach(),
        kept_bytes=blocks[0].static_results.num_bytes,
    )


def write_to_the_field(
    rank: int, world_size: int, part_config: str, writers: tuple[int, ...]
) -> tuple[Tensor, list[Read]]:
    """Returns original ids of the rows that were multiplied here, and the epochs after it: of a loader that had kept
    what its first layer makes of the features, and of a new one.
    """
    g = PartitionedGraph.open(part_config)
    model = optimize(CASE.build(NUM_FEATURES))

    def make_loader() -> FullGraphLoader:
        return FullGraphLoader(
            g, g.owned_nodes(), 2, model=model, strategy="depcomm", topology=uniform_topology(world_size)
        )

    loader = make_loader()
    first = run_epoch(g, loader, model)
    assert first.kept_bytes > 0, "nothing was kept: there is nothing to be made anew"
    written = g.partition.orig_node_ids[:0]
    if rank in writers:
        g.ndata["feat"].local.mul_(10)
        written = g.partition.orig_node_ids
    return written, [run_epoch(g, loader, model), run_epoch(g, make_loader(), model), run_epoch(g, loader, model)]


@pytest.mark.parametrize("writers", [(0, 1, 2), (1,)])
def test_what_is_written_to_local_rows_is_there_in_the_next_epoch(
    writers: tuple[int, ...], partitions: PartitionStore
) -> None:
    """It stayed what had been read first, and with it the kept sums; other ranks could not know of the write at all."""
    graph = power_law()
    results = run_ranks(3, write_to_the_field, partitions.get("power_law", graph, 3), writers, timeout=HANG_S)
    expected = graph.ndata["feat"].clone()
    for written, _ in results:
        expected[written] *= 10
    output = CASE.build(NUM_FEATURES)([graph, graph], expected).detach()
    for _, (after, fresh, later) in results:
        for name, read in {"the same loader": after, "a fresh one": fresh, "the same once more": later}.items():
            assert_close(read.rows, expected[read.ids], f"{name}: rows")
            assert_close(read.output, output[read.seeds], f"{name}: output")


def write_to_rows(rank: int, world_size: int, part_config: str) -> list[Read]:
    """Rank 1 alone writes into the rows it has read, and says nothing of it."""
    g = PartitionedGraph.open(part_config)
    model = optimize(CASE.build(NUM_FEATURES))
    topology = uniform_topology(world_size)
    loader = FullGraphLoader(g, g.owned_nodes(), 2, model=model, strategy="depcomm", topology=topology)
    reads = []
    for epoch in range(3):
        reads.append(run_epoch(g, loader, model))
        if epoch == 0 and rank == 1:
            g.ndata["feat"][loader.input_nodes][0] = 0
    return reads


def test_rows_that_one_rank_alone_wrote_into_are_read_again_by_all(partitions: PartitionStore) -> None:
    """To read again is collective: the rank that had written did so on its own, and the run stood still."""
    graph = power_law()
    output = CASE.build(NUM_FEATURES)([graph, graph], graph.ndata["feat"]).detach()
    for reads in run_ranks(3, write_to_rows, partitions.get("power_law", graph, 3), timeout=HANG_S):
        for epoch, read in enumerate(reads):
            assert_close(read.rows, graph.ndata["feat"][read.ids], f"epoch {epoch}: rows")
            assert_close(read.output, output[read.seeds], f"epoch {epoch}: output")


def spoil_prefetched(rank: int, world_size: int, part_config: str) -> list[dict[str, bool]]:
    """Does to prefetched fields what scripts do with a batch that is theirs; returns what the next epochs find."""
    g = PartitionedGraph.open(part_config)
    sampler = dgl.dataloading.MultiLayerFullNeighborSampler(
        2, prefetch_node_feats=["feat"], prefetch_labels=["label"], prefetch_edge_feats=["w"]
    )
    loader = FullGraphLoader(g, g.owned_nodes(), sampler, plan=[torch.arange(0)] * 2)
    found = []
    for epoch in range(4):
        for input_nodes, seeds, blocks in loader:
            feat = g.fetch_nodes(g.ndata["feat"].local, input_nodes)
            found.append(
                {
                    "features": torch.equal(blocks[0].srcdata["feat"], feat),
                    "labels": torch.equal(blocks[-1].dstdata["label"], g.fetch_nodes(g.ndata["label"].local, seeds)),
                    "weights": all(bool((block.edata["w"] > 0).all()) for block in blocks),
                    "nothing else": {*blocks[0].srcdata, *blocks[-1].dstdata} == {dgl.NID, "feat", "label"},
                }
            )
            if epoch == 0 or (epoch == 2 and rank == 2):
                blocks[0].srcdata["feat"].mul_(2)
                blocks[-1].dstdata["label"].zero_()
                blocks[1].edata["w"].neg_()
            elif epoch == 1:
                blocks[0].srcdata["feat"] = torch.tanh(blocks[0].srcdata["feat"])
                blocks[0].srcdata["hidden"] = feat
                blocks[-1].dstdata["hidden"] = feat[: len(seeds)]
                del blocks[-1].dstdata["label"]
                blocks[1].edata.pop("w")
    return found


def test_prefetched_fields_are_whole_again_in_the_next_epoch(partitions: PartitionStore) -> None:
    """Whatever a script did to them, in place or not, on all ranks or on one, went on to the next epoch."""
    for found in run_ranks(3, spoil_prefetched, partitions.get("power_law", power_law(), 3), timeout=HANG_S):
        for epoch, checks in enumerate(found):
            assert all(checks.values()), f"epoch {epoch}: {checks}"


def learn_a_field(rank: int, world_size: int, part_config: str) -> list[str]:
    g = PartitionedGraph.open(part_config)
    rows = torch.nn.Parameter(torch.zeros(g.nodes.stop - g.nodes.start, 3))
    said = []
    for name in ("emb", "feat"):
        try:
            g.ndata[name] = rows
            said.append("")
        except ValueError as error:
            said.append(str(error))
    g.ndata["emb"] = rows.detach()
    return said


def test_fields_are_not_learned(partitions: PartitionStore) -> None:
    """Gradients of the rows that other ranks had read were lost, silently, from the first plan on that caches any."""
    for said in run_ranks(2, learn_a_field, partitions.get("power_law", power_law(), 2)):
        assert all("must not require a gradient" in text and "nn.Embedding" in text for text in said), said


class _KeptElsewhere(StoredField):
    """As a field of servers is: what holds its rows has a name of its own, and counts its writes."""

    key = ""  # type: ignore[assignment]


def test_weighted_degrees_are_those_of_what_is_called_so_now(partitions: PartitionStore) -> None:
    """Another tensor may take a field's name, of as many writes."""
    g = PartitionedGraph.open(partitions.get("power_law", power_law(), 1))
    ids = torch.arange(g.num_nodes())
    edges = torch.arange(g.num_edges())
    g.row_sets.register_edges(edges)
    sums = []
    for number in range(2):
        weights = torch.full((g.num_edges(),), 1.0 + number)
        field = _KeptElsewhere("w", weights, g.edges, g.row_sets, "edge")
        field.key = f"edge~w{number}"  # type: ignore[assignment,misc]
        g.edata = {"w": field}  # type: ignore[assignment]
        sums.append(g.weighted_out_degrees(field[edges], ids))
    assert torch.equal(sums[0], g.fetch_nodes(g.out_degrees, ids).to(torch.float32))
    assert torch.equal(sums[1], 2 * sums[0])


def read_by_copies(rank: int, world_size: int, part_config: str) -> list[str]:
    g = PartitionedGraph.open(part_config)
    loader = FullGraphLoader(g, g.owned_nodes("train_mask"), 2, plan=forced_plan(g, replace(CASE, plan="depcache")))
    said = []
    for input_nodes, _, _ in loader:
        for ids in (input_nodes.clone(), input_nodes.flip(0)):
            try:
                g.ndata["feat"][ids]
            except ValueError as error:
                said.append(str(error))
        assert len(g.ndata["feat"][input_nodes]) == len(input_nodes)
    return said


def test_who_reads_by_a_copy_of_the_ids_is_told(partitions: PartitionStore) -> None:
    for copied, others in run_ranks(3, read_by_copies, partitions.get("power_law", power_law(), 3)):
        assert "only owned rows and the id tensors that the loader yields" in others
        assert "These are a copy of what it has yielded" in copied
        assert "a copy" not in others
