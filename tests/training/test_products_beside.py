# SPDX-License-Identifier: Apache-2.0
"""Layers with products beside their exchange: numbers and derivatives of the plain operations."""

from __future__ import annotations

from typing import Any

import dgl.nn as dglnn
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dgl_hybrid import FullGraphLoader, PartitionedGraph
from dgl_hybrid.exchange.connect import create_communicator
from dgl_hybrid.graph.layer_block import LayerBlock
from dgl_hybrid.graph.optimize import optimize
from dgl_hybrid.ops.op_counts import op_counts, reset_op_counts
from tests.helpers.graphs import power_law
from tests.helpers.partitions import PartitionStore
from tests.helpers.thinning import pairwise
from tests.helpers.world import run_ranks, run_ranks_expect_errors

INPUTS = 60
KINDS = ("multiply", "sum", "sum, wide", "gcn: sum", "gcn: sum, wide")
"""`SAGEConv` and what comes first, "wide" where that is the layer's own order; `GraphConv`. 47 columns become 48."""
FROZEN = ("", "x", "fc_neigh.weight", "fc_self.weight", "bias", "x fc_neigh.weight", "weight")
ROUTE = "copy_u/ours: split by source, work beside"


def make_layer(kind: str, *, relu: bool, frozen: str = "") -> nn.Module:
    torch.manual_seed(3)
    outputs, activation = 64 if "wide" in kind else 47, F.relu if relu else None
    layer: nn.Module = dglnn.SAGEConv(INPUTS, outputs, "mean", activation=activation)
    if "gcn" in kind:
        norm = "right" if relu else "both"
        layer = dglnn.GraphConv(INPUTS, outputs, norm, activation=activation, allow_zero_in_degree=True)
    layer.double()
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(not any(name.endswith(part) for part in frozen.split()))
    return optimize(layer)  # type: ignore[no-any-return]


def make_block(folder: str, kind: str, *, overlap: bool, **options: Any) -> tuple[LayerBlock, Tensor, FullGraphLoader]:
    g = PartitionedGraph.open(folder, communicator=create_communicator(transport="collective"))
    loader = FullGraphLoader(
        g, g.nodes.owned(), 1, plan=[torch.empty(0, dtype=torch.int64)], overlap=overlap, **options
    )
    ((input_nodes, _, (block,)),) = list(loader)
    block.sums_first = "sum" in kind
    return block, torch.sin(input_nodes.double()[:, None] * torch.arange(1, INPUTS + 1)), loader


def run_layer(
    rank: int, world_size: int, folder: str, kind: str, relu: bool, frozen: str, chunk_rows: int | None, sums: bool
) -> tuple[dict[str, float], int, bool]:
    """How far everything is from the same with its exchange apart, how often the layer was one function, and whether
    the fewest rows to send were looked for.
    """
    found: dict[bool, dict[str, Tensor]] = {}
    reset_op_counts()
    for overlap in (True, False):
        options = {"chunk_rows": chunk_rows, "partial_sums": sums} if overlap else {}
        block, x, loader = make_block(folder, kind, overlap=overlap, **options)
        layer = make_layer(kind, relu=relu, frozen=frozen)
        x.requires_grad_("x" not in frozen.split())
        with torch.no_grad():
            found[overlap] = {"evaluated": layer(block, x)}
        out = layer(block, x)
        inputs = {name: p for name, p in [("x", x), *layer.named_parameters()] if p.requires_grad}
        weights = torch.cos(torch.arange(out.numel(), dtype=out.dtype)).view_as(out)
        grads = torch.autograd.grad(out, list(inputs.values()), weights, retain_graph=True)
        again = torch.autograd.grad(out, list(inputs.values()), weights)
        found[overlap] |= {"out": out.detach(), **dict(zip(inputs, grads, strict=True))}
        found[overlap] |= {f"{name} again": grad for name, grad in zip(inputs, again, strict=True)}
        assert loader is not None  # its blocks are at work
        if overlap:
            assert block._split is not None
            has_searched = "trained_sums" in vars(block._split)
    assert found[True].keys() == found[False].keys()
    off = {name: float((found[True][name] - found[False][name]).abs().max()) for name in found[True] if len(x)}
    return off, op_counts().get(ROUTE, 0), has_searched


@pairwise(kind=KINDS, relu=[False, True], frozen=FROZEN, chunk_rows=[None, 4], sums=[False, True], world_size=[2, 3, 4])
def test_as_with_the_exchange_apart(
    kind: str,
    relu: bool,
    frozen: str,
    chunk_rows: int | None,
    sums: bool,
    world_size: int,
    partitions: PartitionStore,
) -> None:
    folder = partitions.get("power_law", power_law(), world_size)
    num_calls = 2 if "gcn" not in kind else 0 if frozen.startswith("x") else 1  # of `GraphConv` only what is trained
    is_trained = "x" not in frozen.split() or (kind == "multiply" and "weight" not in frozen)
    for off, num_whole, has_searched in run_ranks(world_size, run_layer, folder, kind, relu, frozen, chunk_rows, sums):
        assert num_whole == num_calls
        assert has_searched == is_trained
        assert all(error < 1e-10 for error in off.values()), off


def run_second(rank: int, world_size: int, folder: str, kind: str, relu: bool, chunk_rows: int | None) -> list[float]:
    """How far second derivatives are from those with the exchange apart."""
    found = []
    for overlap in (True, False):
        options = {"chunk_rows": chunk_rows if overlap else None, "loss_reduction": "weighted"}
        block, x, _loader = make_block(folder, kind, overlap=overlap, **options)
        layer = make_layer(kind, relu=relu)
        inputs = [x.requires_grad_(), *layer.parameters()]
        first = torch.autograd.grad((layer(block, x) ** 3).sum(), inputs, create_graph=True)
        second = torch.autograd.grad(sum((grad**2).sum() for grad in first), inputs)
        found.append([*first, *second])
    return [float((a - b).abs().max() / b.abs().max()) for a, b in zip(*found, strict=True)]


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_second_derivatives(kind: str, relu: bool, partitions: PartitionStore) -> None:
    folder = partitions.get("power_law", power_law(), 3)
    for off in run_ranks(3, run_second, folder, kind, relu, 5 if relu else None):
        assert max(off) < 1e-9, off


class Twice(nn.Module):
    """One layer's weights after each other, a tied pair, and a weight that is made of another."""

    def __init__(self, relu: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer = dglnn.SAGEConv(INPUTS, INPUTS, "mean", activation=F.relu if relu else None).double()
        self.layer.fc_self.weight = self.layer.fc_neigh.weight
        optimize(self)

    def forward(self, block: LayerBlock, x: Tensor) -> Tensor:
        return self.layer(block, torch.tanh(self.layer(block, x)))  # type: ignore[no-any-return]


def run_twice(rank: int, world_size: int, folder: str, relu: bool, sum_first: bool) -> list[float]:
    """How far gradients that can be differentiated, and the next ones, are from those with the exchange apart; each is
    doubled by a hook."""
    found = []
    for overlap in (True, False):
        block, x, _loader = make_block(
            folder, "sum" if sum_first else "multiply", overlap=overlap, loss_reduction="weighted"
        )
        model = Twice(relu)
        parameters = list(dict.fromkeys(model.parameters()))
        inputs = [x.requires_grad_(), *parameters]
        for tensor in inputs:
            tensor.register_hook(lambda grad: 2 * grad)
        first = torch.autograd.grad((model(block, x) ** 3).sum(), inputs, create_graph=True)
        second = torch.autograd.grad(sum((grad**2).sum() for grad in first), inputs)
        found.append([*first, *second])
    return [float((a - b).abs().max() / b.abs().max()) for a, b in zip(*found, strict=True)]


@pytest.mark.parametrize(("relu", "sum_first"), [(False, False), (True, True)])
def test_weights_that_are_used_twice(relu: bool, sum_first: bool, partitions: PartitionStore) -> None:
    """Gradients were those of all uses, at each of them."""
    folder = partitions.get("power_law", power_law(), 2)
    for off in run_ranks(2, run_twice, folder, relu, sum_first):
        assert max(off) < 1e-9, off


class Gone(torch.autograd.Function):
    """Whose gradient is none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None


def run_gone(rank: int, world_size: int, folder: str, kind: str) -> list[float]:
    """The largest gradients where the last rank's loss hands none back."""
    block, x, _loader = make_block(folder, kind, overlap=True)
    layer = make_layer(kind, relu=True)
    out = layer.forward(block, x.requires_grad_())  # a module's call would make zeros of it
    (Gone.apply(out) if rank == world_size - 1 else out).sum().backward()
    return [float(tensor.grad.abs().max()) for tensor in (x, *layer.parameters()) if tensor.grad is not None]


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_without_a_gradient_takes_part(kind: str, partitions: PartitionStore) -> None:
    *others, last = run_ranks(3, run_gone, partitions.get("power_law", power_law(), 3), kind)
    assert all(min(largest) > 0 for largest in others)
    assert len(last) == len(others[0])  # DDP waits for each parameter's
    assert last[0] > 0, "rows that others have read"
    assert max(last[1:]) == 0 if "sum" in kind else last


def step_after_epoch(rank: int, world_size: int, folder: str, kind: str, is_trained: bool) -> None:
    """By gradients of a layer that no module's call encloses, from which the loss weight is missing."""
    g = PartitionedGraph.open(folder, communicator=create_communicator(transport="collective"))
    loader = FullGraphLoader(g, g.nodes.owned()[: 3 + 4 * rank], 1, plan=[torch.empty(0, dtype=torch.int64)])
    layer = make_layer(kind, relu=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    for input_nodes, _, (block,) in loader:
        block.sums_first = "sum" in kind
        x = torch.ones(len(input_nodes), INPUTS, dtype=torch.float64, requires_grad=is_trained)
        layer.forward(block, x).sum().backward()
    optimizer.step()


@pytest.mark.parametrize(("kind", "is_trained"), [*((kind, True) for kind in KINDS), ("multiply", False)])
def test_rows_outside_of_modules_are_noticed(kind: str, is_trained: bool, partitions: PartitionStore) -> None:
    folder = partitions.get("power_law", power_law(), 2)
    for error in run_ranks_expect_errors(2, step_after_epoch, folder, kind, is_trained):
        assert "lack the loss weight" in error.message


def run_switched(rank: int, world_size: int, folder: str) -> list[int]:
    counts = []
    for overlap, wrap in ((False, lambda layer: layer), (True, with_hook)):
        reset_op_counts()
        block, x, _loader = make_block(folder, "multiply", overlap=overlap)
        layer = wrap(make_layer("multiply", relu=False))
        layer(block, x.requires_grad_()).sum().backward()
        counts.append(op_counts().get(ROUTE, 0))
    return counts


def with_hook(layer: Any) -> Any:
    layer.fc_self.register_forward_hook(lambda module, args, out: 2 * out)
    return layer


def test_not_where_the_exchange_is_apart_or_somebody_watches_a_product(partitions: PartitionStore) -> None:
    folder = partitions.get("power_law", power_law(), 2)
    assert run_ranks(2, run_switched, folder) == [[0, 0]] * 2
