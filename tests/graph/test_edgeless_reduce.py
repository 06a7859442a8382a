# SPDX-License-Identifier: Apache-2.0
"""What a user-defined reduce gives where there are no edges; on ranks, `test_exactness` has it."""

from __future__ import annotations

from typing import Any

import dgl
import pytest
import torch

from dgl_hybrid.graph.edgeless_reduce import reduce_of_nothing


def test_the_made_up_edge_is_moved_as_blocks_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """DGL's own `to` raises where its build is for CPUs and features are on a GPU: a rank without edges failed there,
    for which the others waited."""

    to = dgl.DGLGraph.to

    def refuse(graph: Any, device: Any, **kwargs: Any) -> Any:
        if device is not None:
            raise dgl.DGLError(f"Device API {device} is not enabled")
        return to(graph, device, **kwargs)

    monkeypatch.setattr(dgl.DGLGraph, "to", refuse)
    x = torch.ones(5, 3, requires_grad=True)
    zeros = reduce_of_nothing(
        lambda edges: {"m": 2 * edges.src["x"]},
        lambda nodes: {"y": nodes.mailbox["m"].sum(1)},
        sources={"x": x},
        destinations={},
        edges={},
        num_dst=4,
    )
    assert torch.equal(zeros["y"].detach(), torch.zeros(4, 3))
    zeros["y"].sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.zeros(5, 3))


def test_functions_need_not_be_defined_between_equal_rows() -> None:
    """The direction between two vertices was NaN on the made-up edge, and with it the gradient of every weight."""
    torch.manual_seed(0)
    linear = torch.nn.Linear(3, 2)
    x = torch.ones(5, 3, requires_grad=True)

    def message(edges: Any) -> dict[str, torch.Tensor]:
        step = edges.src["x"] - edges.dst["x"]
        distance = step.norm(dim=-1, keepdim=True)
        return {"m": linear(step / distance) + distance.log() + torch.acos(edges.data["w"]) / edges.dst["x"][:, :2]}

    zeros = reduce_of_nothing(
        message,
        lambda nodes: {"y": nodes.mailbox["m"].sum(1)},
        sources={"x": x},
        destinations={"x": x},
        edges={"w": torch.ones(0, 1, requires_grad=True)},
        num_dst=4,
    )
    zeros["y"].sum().backward()
    assert torch.equal(linear.weight.grad, torch.zeros(2, 3))
    assert torch.equal(x.grad, torch.zeros(5, 3))
