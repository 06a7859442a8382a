# SPDX-License-Identifier: Apache-2.0
"""Loaders side by side, what they read and hold, and what stays of one."""

from __future__ import annotations

import gc
import os
import weakref
from typing import Any

import dgl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dgl_hybrid import FullGraphLoader, PartitionedGraph, infer
from dgl_hybrid.exchange.shared_memory_transport import SharedMemoryTransport
from dgl_hybrid.planner import PlannerConfig, uniform_topology
from tests.helpers.exactness import Case, assert_close
from tests.helpers.graphs import power_law
from tests.helpers.partitions import PartitionStore
from tests.helpers.world import run_ranks
from tests.training.loader_cases import open_graph, reference_curve


def train_and_validate(rank: int, world_size: int, part_config: str) -> tuple[list[float], Tensor, Tensor]:
    g, model = open_graph(part_config)
    ddp = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    train = FullGraphLoader(g, g.owned_nodes("train_mask"), 2, model=model, topology=uniform_topology(world_size))
    seeds, topology = ~g.ndata["train_mask"].local, uniform_topology(world_size)
    valid = FullGraphLoader(g, seeds, 2, model=model, strategy="depcache", topology=topology)
    losses = []
    for _ in range(3):
        for input_nodes, seeds, blocks in train:
            loss = F.cross_entropy(ddp(blocks, g.ndata["feat"][input_nodes]), g.ndata["label"][seeds])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(loss.item() * train.loss_weight / world_size)
        infer(ddp, g, 2, loader=valid)
        assert model.training
    nids, logits = infer(ddp, g, 2)
    return losses, g.partition.orig_node_ids[nids - g.nodes.start], logits


@pytest.mark.parametrize("world_size", [1, 3])
def test_train_and_validation_loaders_side_by_side(world_size: int, partitions: PartitionStore) -> None:
    results = run_ranks(world_size, train_and_validate, partitions.get("power_law", power_law(), world_size))
    assert [sum(x) for x in zip(*(r[0] for r in results), strict=True)] == pytest.approx(reference_curve(), rel=1e-9)
    graph = power_law()
    model = Case(kind="gcn_both").build(graph.ndata["feat"].shape[1])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train = graph.ndata["train_mask"]
    for _ in range(3):
        loss = F.cross_entropy(model([graph] * 2, graph.ndata["feat"])[train], graph.ndata["label"][train])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    order = torch.argsort(torch.cat([r[1] for r in results]))
    logits = torch.cat([r[2] for r in results])[order]
    assert_close(logits, model([graph] * 2, graph.ndata["feat"]).detach(), "inference")


def read_identities(rank: int, world_size: int, part_config: str) -> list[bool]:
    g, _ = open_graph(part_config)
    sampler = dgl.dataloading.MultiLayerFullNeighborSampler(
        2, prefetch_node_feats=["feat"], prefetch_labels=["label"], prefetch_edge_feats=["w"]
    )
    foreign = torch.arange(g.num_nodes())[~g.nodes.is_owned(torch.arange(g.num_nodes()))]
    loader = FullGraphLoader(g, g.owned_nodes(), sampler, plan=[foreign, foreign])
    first, seeds, blocks = next(iter(loader))
    second, _, _ = next(iter(loader))
    x = g.ndata["feat"][first]
    checks = [
        first is second,
        x is g.ndata["feat"][second],
        blocks[0].srcdata["feat"] is x,
        blocks[-1].dstdata["label"] is g.ndata["label"][seeds],
        blocks[0].edata["w"] is g.edata["w"][blocks[0].edata[dgl.EID]],
        blocks[0].srcdata[dgl.NID] is first,
        torch.equal(blocks[0].to("cpu").srcdata[dgl.NID], first),
        len(loader) == 1,
    ]
    g.ndata["feat"].set_local(g.ndata["feat"].local * 2)
    checks.append(torch.equal(g.ndata["feat"][first], 2 * x))
    return checks


def test_reads_of_a_loaders_ids_are_stable(partitions: PartitionStore) -> None:
    for checks in run_ranks(3, read_identities, partitions.get("power_law", power_law(), 3)):
        assert all(checks), checks


def overwrite_ids(rank: int, world_size: int, part_config: str, how: str) -> list[bool]:
    g, model = open_graph(part_config)
    loader = FullGraphLoader(
        g,
        g.owned_nodes("train_mask"),
        dgl.dataloading.MultiLayerFullNeighborSampler(2, prefetch_node_feats=["feat"], prefetch_labels=["label"]),
        plan=[torch.arange(0)] * 2,
    )
    edge_ids = loader.blocks[0].edata[dgl.EID]
    found = []
    for _ in range(3):
        for input_nodes, seeds, blocks in loader:
            frames = [(blocks[0].srcdata, dgl.NID), (blocks[-1].dstdata, dgl.NID), (blocks[0].edata, dgl.EID)]
            known = [input_nodes, seeds, edge_ids]
            found += [frame[name] is ids for (frame, name), ids in zip(frames, known, strict=True)]
            assert_close(blocks[0].srcdata["feat"], g.ndata["feat"][input_nodes], "prefetched")
            F.cross_entropy(model(blocks, blocks[0].srcdata["feat"]), blocks[-1].dstdata["label"]).backward()
            for frame, name in frames:
                if how == "written":
                    frame[name] = frame[name].flip(0)
                else:
                    frame.pop(name)
    return found


@pytest.mark.parametrize("how", ["written", "dropped"])
def test_ids_that_a_script_writes_into_blocks_are_gone_in_the_next_epoch(how: str, partitions: PartitionStore) -> None:
    """As other fields are, and with sampled blocks these, too. What is prefetched was read by the script's ids."""
    folder = partitions.get("power_law", power_law(), 2)
    assert run_ranks(2, overwrite_ids, folder, how) == [[True] * 9] * 2


def hold_edges(rank: int, world_size: int, part_config: str, plan: str) -> dict[str, Any]:
    g, model = open_graph(part_config)
    planner = PlannerConfig(strategy=plan)
    topology = uniform_topology(world_size)
    loader = FullGraphLoader(g, g.owned_nodes(), 2, model=model, planner=planner, topology=topology)
    for _ in range(3):
        for input_nodes, seeds, blocks in loader:
            F.cross_entropy(model(blocks, g.ndata["feat"][input_nodes]), g.ndata["label"][seeds]).backward()
    num_edges = blocks[-1].num_edges()
    own = {value.untyped_storage().data_ptr() for value in vars(g.partition).values() if isinstance(value, Tensor)}

    def held() -> int:
        """Tensors of eight bytes for every edge, each memory once, without the partition's own."""
        gc.collect()
        alive = [thing for thing in gc.get_objects() if isinstance(thing, Tensor)]
        wide = [x for x in alive if x.dtype == torch.int64 and x.dim() == 1 and len(x) >= num_edges]
        return len({x.untyped_storage().data_ptr() for x in wide} - own)

    before = held()
    ids = blocks[0].edata[dgl.EID]
    return {
        "is_telling": num_edges > 2 * g.num_nodes(),
        "before": before,
        "asked": held(),
        "is_asked": len(ids) == blocks[0].num_edges(),
    }


@pytest.mark.parametrize("plan", ["depcache", "depcomm"])
def test_nothing_takes_eight_bytes_for_every_edge_unless_asked_for(plan: str, partitions: PartitionStore) -> None:
    graph = power_law(num_edges=1500)
    for result in run_ranks(3, hold_edges, partitions.get("power_law_of_many_edges", graph, 3), plan):
        assert result["is_telling"], "else ids of vertices are as many"
        assert (result["before"], result["asked"], result["is_asked"]) == (0, 1, True)


def look_at_comparing(rank: int, world_size: int, part_config: str) -> list[bool]:
    """Returns whether ranks compare what they exchange, by epoch; asked to always do so in the third."""
    g, _ = open_graph(part_config)
    loader = FullGraphLoader(g, g.owned_nodes("train_mask"), 2, plan=[torch.arange(0)] * 2)
    compared = []
    for epoch in range(4):
        g.communicator.always_cross_check = epoch == 2
        for _ in loader:
            compared.append(g.communicator.cross_check)
    return compared


def test_ranks_compare_what_they_exchange_in_the_first_epoch(partitions: PartitionStore) -> None:
    """Later ones exchange the same; each comparison costs a gather."""
    folder = partitions.get("power_law", power_law(), 2)
    assert run_ranks(2, look_at_comparing, folder) == [[True, False, True, False]] * 2


def send_much_once(rank: int, world_size: int, part_config: str) -> list[int]:
    """Returns how much shared and pooled memory this rank holds: after a large exchange, and after an epoch."""
    g, model = open_graph(part_config)
    communicator, held = g.communicator, []

    def measure() -> None:
        transport = communicator.transport
        assert isinstance(transport, SharedMemoryTransport)
        shared = os.fstat(transport._outbox.descriptor).st_blocks * 512
        held.append(shared + communicator.buffers.free_bytes)

    for fill in (1, 2):  # as when features are fetched, then something else
        send = communicator.send_buffer((world_size, 8 << 20), torch.uint8, torch.device("cpu")).fill_(fill)
        received = communicator.buffers.take((world_size, 8 << 20), torch.uint8)
        assert communicator.transport is not None
        communicator.transport.all_to_all(received, send, [1] * world_size, [1] * world_size)
        assert torch.unique(received).tolist() == [fill]
    del send, received
    measure()
    loader = FullGraphLoader(g, g.owned_nodes("train_mask"), 2, model=model, seed=0, strategy="depcomm")
    for input_nodes, _, blocks in loader:
        model(blocks, g.ndata["feat"][input_nodes]).sum().backward()
    measure()
    return held


def test_memory_of_earlier_exchanges_is_given_back(partitions: PartitionStore) -> None:
    for before, after in run_ranks(3, send_much_once, partitions.get("power_law", power_law(), 3)):
        assert before > 60 << 20
        assert after <= 4 << 20


def make_and_drop(rank: int, world_size: int, part_config: str) -> list[bool]:
    """Returns which of a loader, its blocks and its step are still there once a script has dropped them."""
    g = PartitionedGraph.open(part_config)
    model = Case(kind="sage_mean", num_layers=2).build(g.ndata["feat"].shape[1])
    loader = FullGraphLoader(g, g.owned_nodes("train_mask"), 2, model=model, seed=0)
    for input_nodes, _, blocks in loader:
        model(blocks, g.ndata["feat"][input_nodes]).sum().backward()
    watched = [weakref.ref(thing) for thing in (loader, blocks[0], loader._step, loader.communicator)]
    del loader, blocks, input_nodes, g
    gc.collect()
    return [reference() is not None for reference in watched]


def test_nothing_of_a_loader_stays_when_it_is_dropped(partitions: PartitionStore) -> None:
    """Neither hooks nor observers may hold it: its process group has threads of its own."""
    for left in run_ranks(2, make_and_drop, partitions.get("power_law", power_law(), 2)):
        assert left == [False] * 4
