# SPDX-License-Identifier: Apache-2.0
"""`torch.compile` of a model, of a part of it, or of something else beside a loader: as exact as without it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import dgl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dgl_hybrid import FullGraphLoader, PartitionedGraph, average_gradients
from dgl_hybrid.errors import BlockError
from dgl_hybrid.exchange.connect import create_communicator
from dgl_hybrid.graph.optimize import optimize
from tests.helpers.exactness import Case, assert_close, forced_plan
from tests.helpers.graphs import NUM_CLASSES, power_law
from tests.helpers.partitions import PartitionStore
from tests.helpers.world import run_ranks
from tests.training.test_session import REFUSED, Drawing

WAYS = ("whole", "whole, ahead of time", "in place", "a function", "a layer", "another module")
NESTED, APART = ("whole, ahead of time", "a function", "a layer"), ("whole", "in place", "another module")
"""Dynamo takes seconds for each way: the first case has all of them by default, every other one half of them."""
EPOCHS = 2


def compiled(way: str, model: nn.Module) -> Any:
    """Compiles something of the script's and returns what it calls."""
    layers = model.get_submodule("layers")
    assert isinstance(layers, nn.ModuleList)
    if way == "whole":
        return torch.compile(model, backend="eager")
    if way == "whole, ahead of time":
        return torch.compile(model, backend="aot_eager")
    if way == "in place":
        model.compile(backend="eager")
    if way == "a function":
        return torch.compile(lambda blocks, x: model(blocks, x), backend="eager")
    if way == "a layer":
        layers[1] = torch.compile(layers[1], backend="eager")
    if way == "another module":
        other = torch.compile(nn.Linear(NUM_CLASSES, NUM_CLASSES).double(), backend="eager", fullgraph=False)
        return lambda blocks, x: (other(torch.ones(2, NUM_CLASSES).double()), model(blocks, x))[1]
    return model


def train(
    rank: int, world_size: int, part_config: str, case: Case, ways: Sequence[str], *, is_late: bool = False
) -> dict[str, list[Tensor]]:
    """Returns, for each way of compiling, and without, the gradients of all epochs.

    Args:
        is_late: Compile after the first epoch.
    """
    g = PartitionedGraph.open(part_config, communicator=create_communicator(transport=case.rank_transport))
    sampler = dgl.dataloading.MultiLayerFullNeighborSampler(2, prefetch_edge_feats=["w"])
    found: dict[str, list[Tensor]] = {}
    for way in ("not at all", *ways):
        torch._dynamo.reset()
        model = case.build(g.ndata["feat"].shape[1])
        if case.optimized:
            optimize(model)
        loader = FullGraphLoader(g, g.owned_nodes("train_mask"), sampler, plan=forced_plan(g, case, model), seed=7)
        called = model if is_late else compiled(way, model)
        found[way] = []
        for epoch in range(EPOCHS):
            for input_nodes, seeds, blocks in loader:
                x = g.ndata["feat"][input_nodes].clone().requires_grad_()
                model.zero_grad()
                F.cross_entropy(called(blocks, x), g.ndata["label"][seeds]).backward()
                average_gradients(model, loader)
            found[way] += [x.grad, *(parameter.grad.clone() for parameter in model.parameters())]
            if is_late and epoch == 0:
                called = compiled(way, model)
    return found


DROPPING = Case(kind="sage_mean", plan="random:1:0.5", dropout=0.5, batch_norm=True)
ATTENDING = Case(kind="gat", plan="random:1:0.5")
OPTIMIZED = Case(kind="sage_mean", plan="random:1:0.5", optimized=True, rank_transport="collective")


@pytest.mark.parametrize(
    ("case", "is_late", "ways"),
    [
        (DROPPING, False, WAYS),
        (ATTENDING, True, NESTED),
        pytest.param(ATTENDING, True, APART, marks=pytest.mark.slow),
        (OPTIMIZED, False, APART),
        pytest.param(OPTIMIZED, False, NESTED, marks=pytest.mark.slow),
        pytest.param(replace(OPTIMIZED, kind="gcn_both"), False, WAYS, marks=pytest.mark.slow),
    ],
)
def test_gradients_are_those_without_it(
    case: Case, is_late: bool, ways: Sequence[str], partitions: PartitionStore
) -> None:
    """Dynamo followed every module call into our hooks, and failed there."""
    for found in run_ranks(2, train, partitions.get("power_law", power_law(), 2), case, ways, is_late=is_late):
        expected = found.pop("not at all")
        assert list(found) == list(ways)
        for way, gradients in found.items():
            for number, (actual, wanted) in enumerate(zip(gradients, expected, strict=True)):
                assert_close(actual, wanted, f"{way}: gradient {number}")


def traced_lines(rank: int, world_size: int, part_config: str, kind: str) -> list[str]:
    """Returns where the operations stand that dynamo has put into graphs while an optimised model trained."""
    found: list[str] = []

    def look(graph: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Any:
        found.extend(node.stack_trace or "" for node in graph.graph.nodes)
        return graph.forward

    torch._dynamo.reset()
    g = PartitionedGraph.open(part_config)
    model = optimize(Case(kind=kind).build(g.ndata["feat"].shape[1]))
    called = torch.compile(model, backend=look)
    for _ in range(2):
        for input_nodes, _, blocks in FullGraphLoader(g, g.owned_nodes(), 2, strategy="depcomm", autotune=False):
            called(blocks, g.ndata["feat"][input_nodes]).sum().backward()
    return found


@pytest.mark.parametrize("kind", ["gat", "sage_mean"])
def test_optimized_layers_are_called_as_they_are(kind: str, partitions: PartitionStore) -> None:
    """Dynamo followed the call of a kernel to where it is made, which ended in tracebacks, and in errors at times."""
    (lines,) = run_ranks(1, traced_lines, partitions.get("power_law", power_law(), 1), kind)
    assert not [line for line in lines if "dgl_hybrid/ops" in line or "dgl_hybrid/graph" in line]


LATE = """
import sys
import torch
from dgl_hybrid import FullGraphLoader, PartitionedGraph
from dgl_hybrid.errors import BlockError
from tests.helpers.exactness import Case

g = PartitionedGraph.open(sys.argv[1])
model = Case(kind="gcn_both").build(g.ndata["feat"].shape[1])
loader = FullGraphLoader(g, g.owned_nodes(), 2, plan=[torch.arange(0)] * 2)
called, sums = model, []
for epoch in range(3):
    for input_nodes, _, blocks in loader:
        if epoch == 0:
            called(blocks, g.ndata["feat"][input_nodes])
            assert "torch._dynamo" not in sys.modules, "an epoch imported dynamo, which takes seconds"
            called = torch.compile(model, backend="eager")  # which imports it, amid an epoch
        sums.append(float(called(blocks, g.ndata["feat"][input_nodes]).sum()))
assert len(set(sums)) == 1, sums
"""


def test_nobody_waits_for_dynamo_who_does_not_compile(partitions: PartitionStore) -> None:
    folder = partitions.get("power_law", power_law(), 1)
    root = Path(__file__).resolve().parents[2]
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LATE, str(folder)], cwd=root, capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0, ended.stderr


DRAWS = ("torch.randn_like", "torch.normal of means", "torch.dropout_", "torch.rand of a vector", "Tensor.uniform_")


def draw_compiled(rank: int, world_size: int, part_config: str) -> dict[str, str]:
    g = PartitionedGraph.open(part_config)
    said = {}
    for input_nodes, _, blocks in FullGraphLoader(g, g.owned_nodes(), 2, plan=[torch.arange(0)] * 2):
        for name in (*DRAWS, "nn.MultiheadAttention"):
            model = Drawing(REFUSED[name])
            model.compile(backend="aot_eager")
            with pytest.raises(BlockError) as raised:
                model(blocks, g.ndata["feat"][input_nodes])
            said[name] = str(raised.value)
    return said


def test_what_rows_must_not_draw_is_refused_in_a_compiled_model_too(partitions: PartitionStore) -> None:
    """Graphs of functions that are lowered further would draw from each rank's own generator, silently."""
    for said in run_ranks(2, draw_compiled, partitions.get("power_law", power_law(), 2)):
        assert all("draws from each rank's own generator" in words for words in said.values())
