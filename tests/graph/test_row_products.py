# SPDX-License-Identifier: Apache-2.0
"""The products of `SAGEConv` in fewer passes: the same numbers and derivatives as the linear layers they stand for."""

from __future__ import annotations

import copy
from collections.abc import Callable

import dgl.nn as dglnn
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dgl_hybrid import optimize
from dgl_hybrid.graph.row_products import are_plain, narrowed_rows, sum_of_products
from dgl_hybrid.ops.op_counts import op_counts, reset_op_counts
from tests.graph.blocks import one_layer
from tests.helpers.world import run_ranks


def linears(
    inputs: int, outputs: int, *, bias: bool, dtype: torch.dtype = torch.float64
) -> tuple[nn.Linear, nn.Linear]:
    torch.manual_seed(3)
    return (
        nn.Linear(inputs, outputs, bias=False, dtype=dtype),
        nn.Linear(inputs, outputs, bias=bias, dtype=dtype),
    )


def gradients(results: list[Tensor], inputs: list[Tensor]) -> list[Tensor]:
    torch.manual_seed(4)
    loss = sum((result * torch.randn_like(result)).sum() for result in results)
    return list(torch.autograd.grad(loss, inputs, retain_graph=True))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("needs_gradient", [True, False])
def test_sum_of_products(bias: bool, needs_gradient: bool) -> None:
    of_y, of_x = linears(5, 7, bias=bias)
    x, y = torch.randn(2, 11, 5, dtype=torch.float64).unbind()
    inputs = [*of_x.parameters(), *of_y.parameters()]
    if needs_gradient:
        inputs += [x.requires_grad_(), y.requires_grad_()]
    ours, expected = sum_of_products(x, of_x, y, of_y), of_x(x) + of_y(y)
    torch.testing.assert_close(ours, expected)
    torch.testing.assert_close(gradients([ours], inputs), gradients([expected], inputs))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("outputs", "width"), [(7, 7), (16, 16), (31, 32), (41, 41), (47, 48)])
@pytest.mark.parametrize("num_own", [0, 4, 11])
def test_narrowed_rows(bias: bool, outputs: int, width: int, num_own: int) -> None:
    of_all, of_own = linears(64, outputs, bias=bias)
    x = torch.randn(11, 64, dtype=torch.float64, requires_grad=True)
    rows, own = narrowed_rows(x, of_all, of_own, num_own)
    assert rows.shape == (11, width)
    assert not rows[:, outputs:].any()
    expected = [of_all(x), of_own(x[:num_own])]
    torch.testing.assert_close([rows[:, :outputs], own], expected)
    inputs = [x, *of_all.parameters(), *of_own.parameters()]
    torch.testing.assert_close(gradients([rows[:, :outputs], own], inputs), gradients(expected, inputs))
    # What comes back in the columns of zeros belongs to nothing.
    with_noise = torch.autograd.grad([rows.sum() * 2 + own.sum()], inputs)
    without = torch.autograd.grad([expected[0].sum() * 2 + expected[1].sum()], inputs)
    torch.testing.assert_close(with_noise, without)


def test_second_derivatives() -> None:
    of_all, of_own = linears(4, 3, bias=True)
    x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)

    def both(x: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
        rows, own = narrowed_rows(x, of_all, of_own, 2)
        return rows, own, sum_of_products(x, of_own, x * x, of_all)

    inputs = (x, *of_all.parameters(), *of_own.parameters())
    assert torch.autograd.gradcheck(both, inputs)
    assert torch.autograd.gradgradcheck(both, inputs)


def test_layers_that_do_more_than_multiply_are_left_alone() -> None:
    plain, other = linears(4, 3, bias=False)
    x = torch.randn(5, 4, dtype=torch.float64)
    assert are_plain((plain, other), x)
    assert not are_plain((plain, nn.Identity()), x)
    assert not are_plain((plain, other), x.float())
    assert not are_plain((plain, other), x.reshape(5, 2, 2))
    with torch.autocast("cpu"):
        assert not are_plain((plain, other), x)
    handle = other.register_forward_hook(lambda *_: None)
    assert not are_plain((plain, other), x)
    handle.remove()
    other.forward = lambda x: 2 * x  # type: ignore[method-assign]
    assert not are_plain((plain, other), x)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "sage_mean": lambda: dglnn.SAGEConv(64, 47, "mean"),
    "sage_no_bias": lambda: dglnn.SAGEConv(64, 5, "mean", bias=False, activation=F.elu),
    "gcn_both": lambda: dglnn.GraphConv(64, 47, norm="both", allow_zero_in_degree=True),
    "gcn_left": lambda: dglnn.GraphConv(64, 47, norm="left", allow_zero_in_degree=True, activation=F.elu),
    "gcn_right": lambda: dglnn.GraphConv(64, 31, norm="right", allow_zero_in_degree=True, bias=False),
    "gcn_none": lambda: dglnn.GraphConv(64, 7, norm="none", allow_zero_in_degree=True),
}


def run_on_block(rank: int, world_size: int, part_config: str) -> dict[str, tuple[list[Tensor], list[Tensor], int]]:
    """Returns output and gradients of every layer, of DGL's forward and of ours, and how often ours ran."""
    _, x, (block, _loader) = one_layer(part_config)
    torch.manual_seed(5)
    rows = (x.detach().double() @ torch.randn(x.shape[1], 64, dtype=torch.float64)).requires_grad_()
    compared = {}
    for kind, make in LAYERS.items():
        layer = make().double()
        found = []
        for model in (layer, optimize(copy.deepcopy(layer))):
            reset_op_counts()
            result = model(block, rows)
            found.append([result.detach(), *gradients([result], [rows, *model.parameters()])])
        op = "graphconv" if "gcn" in kind else "sageconv"
        compared[kind] = (found[0], found[1], op_counts().get(f"{op}/ours: fewer passes", 0))
    return compared


def test_layers_on_blocks(folder: str) -> None:
    for compared in run_ranks(3, run_on_block, folder):
        for kind, (expected, ours, count) in compared.items():
            assert count == 1, kind
            torch.testing.assert_close(ours, expected, msg=lambda text, kind=kind: f"{kind}: {text}")
