# SPDX-License-Identifier: Apache-2.0
"""Rows, fields and ids that a script reads, sets, writes into or leaves behind: nothing else is changed."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

import dgl
import dgl.nn as dglnn
import pytest
import torch
import torch.nn.functional as F
from dgl import function as fn
from torch import Tensor, nn

import dgl_hybrid
from dgl_hybrid import FullGraphLoader, PartitionedGraph
from tests.helpers.exactness import assert_close
from tests.helpers.graphs import NUM_CLASSES, NUM_FEATURES, power_law
from tests.helpers.partitions import PartitionStore
from tests.helpers.thinning import each_value
from tests.helpers.world import run_ranks
from tests.training.user_scripts import (
    EPOCHS,
    RANKS,
    TwoLayers,
    assert_same_gradients,
    average_gradients,
    open_graph,
    original_ids,
    plain_gradients,
    plain_loss,
)


@dataclasses.dataclass(kw_only=True)
class Reads:
    doubled: list[float]
    """This rank's part of the loss in each epoch, on features multiplied in place."""
    input_ids: Tensor
    input_grads: list[Tensor]
    """Of features that `requires_grad_()` was called on in place, each epoch."""
    grads: list[list[Tensor]]
    """Of the same epochs."""
    was_inference: bool
    after_inference: list[list[Tensor]]


def read_features(rank: int, world_size: int, part_config: str) -> Reads:
    g, plan = open_graph(part_config)

    def step(loader: FullGraphLoader, change: Callable[[Tensor], Tensor]) -> tuple[float, Tensor, list[Tensor]]:
        ((input_nodes, seeds, blocks),) = list(loader)
        x = change(g.ndata["feat"][input_nodes])
        model = TwoLayers().double()
        loss = F.cross_entropy(model(blocks, x), g.ndata["label"][seeds])
        loss.backward()
        return loss.item() * loader.loss_weight / world_size, x, average_gradients(model)

    def make_loader() -> FullGraphLoader:
        return FullGraphLoader(g, g.owned_nodes("train_mask"), 2, plan=plan)

    loader = make_loader()
    doubled = [step(loader, lambda x: x.mul_(2))[0] for _ in range(EPOCHS)]
    leaves = [step(loader, lambda x: x.requires_grad_()) for _ in range(EPOCHS)]
    fresh = make_loader()
    with torch.inference_mode():
        was_inference = g.ndata["feat"][fresh.input_nodes].is_inference()
    _, _, after_inference = step(fresh, lambda x: x.requires_grad_())
    return Reads(
        doubled=doubled,
        input_ids=original_ids(g, loader.input_nodes),
        input_grads=[x.grad / world_size for _, x, _ in leaves if x.grad is not None],
        grads=[grads for _, _, grads in leaves],
        was_inference=was_inference,
        after_inference=[after_inference],
    )


def test_what_a_script_does_to_rows_it_read_does_not_reach_the_next_epoch(folder: str) -> None:
    """The same tensor is returned at every read: `x.mul_(2)` doubled the features again each epoch, the gradient of
    `x.requires_grad_()` grew, and a first read under inference mode gave a tensor that could never be trained on."""
    graph, train = power_law(), power_law().ndata["train_mask"]
    model = TwoLayers().double()
    doubled = F.cross_entropy(model([graph] * 2, graph.ndata["feat"] * 2)[train], graph.ndata["label"][train]).item()
    x = graph.ndata["feat"].clone().requires_grad_()
    F.cross_entropy(model([graph] * 2, x)[train], graph.ndata["label"][train]).backward()
    grads = [parameter.grad.clone() for parameter in model.parameters()]

    results = run_ranks(RANKS, read_features, folder)
    assert [sum(r.doubled[epoch] for r in results) for epoch in range(EPOCHS)] == pytest.approx(
        [doubled] * EPOCHS, rel=1e-9
    )
    for epoch in range(EPOCHS):
        summed = torch.zeros_like(x)
        for result in results:
            summed.index_add_(0, result.input_ids, result.input_grads[epoch])
        assert_close(summed, x.grad, f"input gradient of epoch {epoch}")
    for result in results:
        assert_same_gradients(result.grads, [grads] * EPOCHS, "leaves")
        assert not result.was_inference
        assert_same_gradients(result.after_inference, [grads], "after inference mode")


class SetsFields(nn.Module):
    """Sets fields of blocks without a scope, first one for functions of its own and then one for builtins."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.linears = nn.ModuleList(nn.Linear(a, b) for a, b in ((NUM_FEATURES, 4), (4, NUM_CLASSES)))

    def forward(self, blocks: Sequence[Any], x: Tensor) -> Tensor:
        for linear, block in zip(self.linears, blocks, strict=True):
            block.srcdata["h"] = linear(x)
            block.update_all(
                lambda edges: {"m": torch.tanh(edges.src["h"])}, lambda nodes: {"o": nodes.mailbox["m"].sum(1)}
            )
            block.srcdata["k"] = torch.exp(linear(x))
            block.update_all(fn.copy_u("k", "m"), fn.sum("m", "p"))
            block.edata["s"] = torch.ones(block.num_edges())
            x = torch.sigmoid(block.dstdata["o"] + block.dstdata["p"])
        return x


def train_with_leftovers(
    rank: int, world_size: int, part_config: str, forwards: int = 1, copies: bool = False
) -> tuple[list[list[Tensor]], list[list[str]]]:
    """Gradients of each epoch, and the fields that are in the blocks at its beginning."""
    g, plan = open_graph(part_config)
    sampler = dgl.dataloading.MultiLayerFullNeighborSampler(
        2, prefetch_node_feats=["feat"], prefetch_labels=["label"], prefetch_edge_feats=["w"]
    )
    loader = FullGraphLoader(g, g.owned_nodes("train_mask"), sampler, plan=plan)
    model = SetsFields().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    grads, names = [], []
    for _ in range(EPOCHS):
        for _, seeds, blocks in loader:
            names.append([f"{f} {sorted(getattr(b, f))}" for b in blocks for f in ("srcdata", "dstdata", "edata")])
            x = blocks[0].srcdata["feat"]
            blocks = [block.int() for block in blocks] if copies else blocks
            for _ in range(forwards):
                optimizer.zero_grad()
                F.cross_entropy(model(blocks, x), g.ndata["label"][seeds]).backward()
                grads.append(average_gradients(model))
                optimizer.step()
    return grads, names


@pytest.mark.parametrize("world_size", [2, 3])
def test_fields_left_in_blocks_are_gone_in_the_next_epoch(world_size: int, partitions: PartitionStore) -> None:
    """A block was the same in every epoch, and functions of one's own get all fields: in the second epoch what the
    first had left was exchanged too, and its gradients went back into a graph that was freed."""
    _, expected = plain_gradients(plain_loss, SetsFields().double())
    results = run_ranks(world_size, train_with_leftovers, partitions.get("power_law", power_law(), world_size))
    for grads, names in results:
        assert_same_gradients(grads, expected, "leftovers")
        assert names[1:] == names[:1] * (EPOCHS - 1)
        assert names[0] == [
            *("srcdata ['_ID', 'feat']", "dstdata ['_ID']", "edata ['_ID', 'w']"),
            *("srcdata ['_ID']", "dstdata ['_ID', 'label']", "edata ['_ID', 'w']"),
        ]


@each_value(world_size=[2, 3], copies=[False, True])
def test_fields_of_a_forward_do_not_travel_for_the_next_of_the_epoch(
    world_size: int, copies: bool, partitions: PartitionStore
) -> None:
    """What the first forward had left was exchanged along with what the second had set, and its backward ran again;
    copies of blocks (`block.int()`, `block.to(device)`) did not hear that there was a second one."""
    _, expected = plain_gradients(plain_loss, SetsFields().double(), 2 * EPOCHS)
    part_config = partitions.get("power_law", power_law(), world_size)
    for grads, _ in run_ranks(world_size, train_with_leftovers, part_config, 2, copies):
        assert_same_gradients(grads, expected, "two forwards an epoch")


class WritesIntoSums(nn.Module):
    """Two layers read the same sums of raw features, one of them to divide them where they are."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.of_sums = nn.Linear(NUM_FEATURES, 4)
        self.of_means = nn.Linear(NUM_FEATURES, 4)
        self.of_flat = nn.Linear(NUM_FEATURES, 4)
        self.second = dglnn.SAGEConv(4, NUM_CLASSES, "mean")
        options = {"norm": "none", "weight": False, "bias": False, "allow_zero_in_degree": True}
        self.unweighted = [
            dglnn.GraphConv(NUM_FEATURES, NUM_FEATURES, **options, activation=activation)
            for activation in (None, nn.ReLU(inplace=True))
        ]

    @staticmethod
    def summed(block: Any, x: Tensor) -> Tensor:
        with block.local_scope():
            block.srcdata["h"] = x
            block.update_all(fn.copy_u("h", "m"), fn.sum("m", "total"))
            total: Tensor = block.dstdata["total"]
            return total

    def forward(self, blocks: Sequence[Any], x: Tensor) -> Tensor:
        first, second = blocks
        sums = self.summed(first, x)
        h = self.of_sums(sums)  # which autograd keeps
        means = self.summed(first, x)
        degrees = first.in_degrees()
        means /= degrees.clamp(min=1).unsqueeze(1)
        if bool((degrees == 0).any()):  # not on every rank
            means[degrees == 0] = 1.0
        flat = self.unweighted[0](first, x) - self.unweighted[1](first, x)
        h = torch.tanh(h + self.of_means(means) + self.of_flat(flat))
        return self.second(second, h)


def train_and_evaluate(
    rank: int, world_size: int, part_config: str, optimized: bool
) -> tuple[list[list[Tensor]], list[int]]:
    """Gradients of each epoch, and how many exchanges of the first layer it had."""
    g, plan = open_graph(part_config)
    loader = FullGraphLoader(g, g.owned_nodes("train_mask"), 2, plan=plan)
    model = WritesIntoSums().double()
    if optimized:
        dgl_hybrid.optimize(model)
        for layer in model.unweighted:
            dgl_hybrid.optimize(layer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    grads, exchanges = [], []
    for _ in range(EPOCHS):
        g.communicator.clock.drain()
        for input_nodes, seeds, blocks in loader:
            x = g.ndata["feat"][input_nodes]
            optimizer.zero_grad()
            F.cross_entropy(model(blocks, x), g.ndata["label"][seeds]).backward()
            grads.append(average_gradients(model))
            optimizer.step()
            with torch.no_grad():
                model(blocks, x)
        exchanges.append(sum(event.layer == 1 for event in g.communicator.clock.drain()))
    return grads, exchanges


@pytest.mark.parametrize("optimized", [False, True])
@pytest.mark.parametrize("world_size", [1, 3])
def test_sums_that_are_kept_are_nobodys_to_write_into(
    world_size: int, optimized: bool, partitions: PartitionStore
) -> None:
    """Who divided the sums of raw features in place divided them for all layers, and changed what autograd had kept;
    who did so on some ranks alone let the others wait. All was exchanged anew in every epoch, too."""
    _, expected = plain_gradients(plain_loss, WritesIntoSums().double())
    part_config = partitions.get("power_law", power_law(), world_size)
    for grads, exchanges in run_ranks(world_size, train_and_evaluate, part_config, optimized):
        assert_same_gradients(grads, expected, "sums that are written into")
        assert exchanges[1:] == [0] * (EPOCHS - 1)
        assert exchanges[0] > 0 or world_size == 1


def divide_kept_sums(rank: int, world_size: int, part_config: str) -> tuple[Tensor, list[Tensor]]:
    """What a layer of one's own makes of the raw features in each epoch, which divides its sum where nobody counts."""
    g = PartitionedGraph.open(part_config)
    loader = FullGraphLoader(g, g.owned_nodes(), 1, plan=[torch.arange(0)])

    class Mean(nn.Module):
        def forward(self, blocks: Sequence[Any], x: Tensor) -> Tensor:
            with blocks[0].local_scope():
                blocks[0].srcdata["h"] = x
                blocks[0].update_all(fn.copy_u("h", "m"), fn.sum("m", "h"))
                h = blocks[0].dstdata["h"]
                h.data.div_(blocks[0].in_degrees().clamp(min=1)[:, None])
                return h.clone()

    assert g.partition.orig_node_ids is not None
    found = []
    for _ in range(EPOCHS):
        for input_nodes, _, blocks in loader:
            found.append(Mean()(blocks, g.ndata["feat"][input_nodes]))
    return g.fetch_nodes(g.partition.orig_node_ids, loader.seeds), found


@pytest.mark.parametrize("world_size", [1, 3])
def test_kept_sums_that_a_layer_divides_are_made_anew(world_size: int, partitions: PartitionStore) -> None:
    """In the second epoch they were divided twice, in the third three times."""
    graph = power_law()
    with graph.local_scope():
        graph.update_all(fn.copy_u("feat", "m"), fn.mean("m", "h"))
        expected = graph.ndata["h"]
    part_config = partitions.get("power_law", graph, world_size)
    for ids, found in run_ranks(world_size, divide_kept_sums, part_config):
        for epoch, means in enumerate(found):
            assert_close(means, expected[ids], f"means of epoch {epoch}")


def read_by_other_ids(rank: int, world_size: int, part_config: str) -> dict[str, str]:
    g = PartitionedGraph.open(part_config)
    owned = g.nodes.owned()
    ids: dict[str, Any] = {
        "slice": slice(0, 3),
        "scalar": 3,
        "none": None,
        "mask": torch.ones(len(owned), dtype=torch.bool),
        "table": owned[:, None],
        "list": owned[:2].tolist(),
        "array": owned[:2].numpy(),
    }
    outcomes = {}
    for name, given in ids.items():
        try:
            outcomes[name] = str(torch.equal(g.ndata["feat"][given], g.ndata["feat"].local[:2]))
        except TypeError as error:
            outcomes[name] = str(error)
    return outcomes


def test_slices_scalars_and_masks_as_ids_are_explained(folder: str) -> None:
    """A slice raised an error of torch's about a number, and a scalar returned one row without its dimension."""
    for outcomes in run_ranks(RANKS, read_by_other_ids, folder):
        assert outcomes.pop("list") == outcomes.pop("array") == "True"
        for name, got in {
            "slice": r"slice\(0, 3, None\)",
            "scalar": "3",
            "none": "None",
            "mask": r"torch.bool, shape \(\d+,\)",
            "table": r"torch.int64, shape \(\d+, 1\)",
        }.items():
            assert re.search(rf"'feat' is read by a vector of integer ids \(got {got}\)", outcomes[name]), outcomes
