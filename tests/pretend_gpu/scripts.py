# SPDX-License-Identifier: Apache-2.0
"""One training script, run with everything on the CPU and with everything on the GPU: the same losses and gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import dgl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dgl_hybrid import FullGraphLoader, PartitionedGraph, infer
from dgl_hybrid.graph.optimize import optimize
from dgl_hybrid.planner import uniform_topology
from tests.helpers.exactness import Case, Model, assert_close, forced_plan
from tests.helpers.graphs import NUM_FEATURES
from tests.pretend_gpu.ranks import IS_REAL


@dataclass(frozen=True, kw_only=True)
class Script:
    """What a user's script does that a `Case` does not say."""

    case: Case
    reads_static: bool = False
    """The model is given the rows that were read: a first layer can keep what it makes of them."""
    moves_blocks: bool = False
    """The loader is given no device: the script moves what it yields."""
    names_model: bool = True
    """The loader is given the model; else it plans from the first call."""
    has_rates: bool = True
    """The loader is given rates of the machine; else it probes them."""
    approximate: str | None = None
    is_autocast: bool = False
    checkpoints: Literal["none", "reentrant", "plain"] = "none"
    holds: Literal["nothing", "attribute", "literal", "scalar", "vector"] = "nothing"
    """A tensor on the device besides parameters: of the model, made in its forward, or an argument."""
    infers: bool = False


@dataclass(kw_only=True)
class Trained:
    """By one rank, off the GPU."""

    losses: list[float]
    gradients: list[Tensor]
    inferred: Tensor | None
    is_planned: bool


class ScriptModel(nn.Module):
    """A `Model` that deals with more tensors of its device than its parameters."""

    def __init__(self, script: Script, device: str) -> None:
        super().__init__()
        self.script, self.device = script, device
        self.inner: Model = script.case.build(NUM_FEATURES)
        self.scale = torch.full((NUM_FEATURES,), 1.5, dtype=script.case.dtype, device=device)

    def forward(self, blocks: Sequence[Any], x: Tensor, factor: Tensor | None = None) -> Tensor:
        if self.script.holds == "attribute":
            x = x * self.scale
        if self.script.holds == "literal":
            x = x * torch.full((NUM_FEATURES,), 1.5, dtype=x.dtype, device=self.device)
        if factor is not None:
            x = x * factor
        if self.script.checkpoints == "none" or not torch.is_grad_enabled():
            out = self.inner(blocks, x)
        else:
            x = x if x.requires_grad else x.detach().requires_grad_()
            out = checkpoint(self.inner, blocks, x, use_reentrant=self.script.checkpoints == "reentrant")
        assert isinstance(out, Tensor)
        return out


def train(rank: int, world_size: int, part_config: str, script: Script, device: str) -> Trained:
    case = script.case
    g = PartitionedGraph.open(part_config)
    g.ndata["feat"] = g.ndata["feat"].local.to(case.dtype)
    g.edata["w"] = g.edata["w"].local.to(case.dtype)
    model = ScriptModel(script, device).to(device)
    if case.optimized:
        optimize(model)
    plan = forced_plan(g, case, model)
    fetched = {} if script.moves_blocks else {"prefetch_node_feats": ["feat"], "prefetch_edge_feats": ["w"]}
    loader = FullGraphLoader(
        g,
        g.owned_nodes("train_mask"),
        dgl.dataloading.MultiLayerFullNeighborSampler(case.num_layers, **fetched),
        None if script.moves_blocks else device,
        plan=plan,
        model=model if plan is None and script.names_model else None,
        topology=uniform_topology(world_size) if script.has_rates else None,
        strategy="depcomm" if plan is not None else case.plan.partition(":")[2],
        autotune=False,
        seed=7,
        overlap=case.overlap,
        chunk_rows=case.chunk_rows,
        partial_sums=case.partial_sums,
        approximate=script.approximate,
    )
    ddp = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.Adam(ddp.parameters(), lr=case.lr)
    shape = {"scalar": (), "vector": (NUM_FEATURES,)}.get(script.holds)
    factors = () if shape is None else (torch.full(shape, 1.5, dtype=case.dtype, device=device),)
    losses = []
    for _ in range(case.epochs):
        for input_nodes, seeds, blocks in loader:
            x, labels = g.ndata["feat"][input_nodes], g.ndata["label"][seeds]
            if script.moves_blocks:
                blocks = [block.to(device) for block in blocks]
                x, labels = x.to(device), labels.to(device)
            if not script.reads_static:
                x = x.clone()
            cast = torch.autocast(device, dtype=torch.bfloat16) if script.is_autocast else contextlib.nullcontext()
            with cast:
                logits = ddp(blocks, x, *factors)
            loss = F.cross_entropy(logits.to(case.dtype), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item() * loader.loss_weight / world_size)
    inferred = infer(model, g, case.num_layers)[1].cpu() if script.infers else None
    return Trained(
        losses=losses,
        gradients=[parameter.grad.cpu() for parameter in model.parameters() if parameter.grad is not None],
        inferred=inferred,
        is_planned=loader.outcome is not None,
    )


def train_twice(rank: int, world_size: int, part_config: str, script: Script) -> tuple[Trained, Trained]:
    """On the CPU, then on the GPU."""
    return train(rank, world_size, part_config, script, "cpu"), train(rank, world_size, part_config, script, "cuda")


def tolerance_of(script: Script) -> float:
    """Of float64. Rows of int8 are rounded by chance, and a GPU's generator has other numbers than the CPU's."""
    return 0.02 if IS_REAL and "int8" in (script.approximate or "") else 1e-9


def assert_same_training(on_cpu: Trained, on_gpu: Trained, tolerance: float) -> None:
    losses, expected = (torch.tensor(trained.losses, dtype=torch.float64) for trained in (on_gpu, on_cpu))
    assert_close(losses, expected, "losses", tolerance)
    assert len(on_gpu.gradients) == len(on_cpu.gradients)
    for number, (gradient, wanted) in enumerate(zip(on_gpu.gradients, on_cpu.gradients, strict=True)):
        assert_close(gradient, wanted, f"gradient of parameter {number}", tolerance)
    if on_cpu.inferred is not None:
        assert on_gpu.inferred is not None
        assert_close(on_gpu.inferred, on_cpu.inferred, "inferred rows", tolerance)
