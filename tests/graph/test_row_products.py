# SPDX-License-Identifier: Apache-2.0
"""The products of `SAGEConv` in fewer passes: the same numbers and derivatives as the linear layers they stand for."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import dgl
import dgl.nn as dglnn
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from dgl_hybrid import optimize
from dgl_hybrid.graph import gradient_owners
from dgl_hybrid.graph.layer_block import LayerBlock
from dgl_hybrid.graph.row_products import are_plain, is_relu, narrowed_rows, product, rows_and_first, sum_of_products
from dgl_hybrid.graph.static_results import StaticResults
from dgl_hybrid.graph.tiny_blocks import build_block_of
from dgl_hybrid.ops import SparseRows
from dgl_hybrid.ops.op_counts import op_counts, reset_op_counts
from dgl_hybrid.ops.row_blocks import BLOCK_ROWS
from tests.graph.blocks import one_layer
from tests.helpers.thinning import pairwise
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


@pairwise(
    num_rows=[0, 1, BLOCK_ROWS, 2 * BLOCK_ROWS + 3],
    kind=["dense", "sparse"],
    needs_rows=[False, True],
    has_bias=[False, True],
    has_factors=[False, True],
    has_addend=[False, True],
    relu=[False, True],
    turned=[False, True],
    create_graph=[False, True],
)
def test_products_in_blocks_of_rows(
    num_rows: int,
    kind: str,
    needs_rows: bool,
    has_bias: bool,
    has_factors: bool,
    has_addend: bool,
    relu: bool,
    turned: bool,
    create_graph: bool,
) -> None:
    """Whatever needs a gradient: those of weights alone take another way than others."""
    torch.manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64)

    x = random(num_rows, 5) * (torch.rand(num_rows, 5) < 0.3)
    weight = (random(4, 5).t() if turned else random(5, 4)).requires_grad_()
    bias = random(4).requires_grad_() if has_bias else None
    addend = random(num_rows, 4).requires_grad_() if has_addend else None
    rows = SparseRows.from_dense(x) if kind == "sparse" else x.requires_grad_(needs_rows)
    factors = random(num_rows, 1) if has_factors and kind == "dense" else None
    expected = x @ weight if factors is None else (factors * x) @ weight
    for other in (bias, addend):
        expected = expected if other is None else expected + other
    expected = torch.relu(expected) if relu else expected
    ours = product(rows, weight, bias, factors=factors, addend=addend, relu=relu)
    torch.testing.assert_close(ours, expected)
    inputs = [t for t in (x, weight, bias, addend) if t is not None and t.requires_grad]
    grad = random(num_rows, 4)
    found, wanted = (torch.autograd.grad(y, inputs, grad, create_graph=create_graph) for y in (ours, expected))
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("is_turned", [(False, False), (True, False), (True, True)])
def test_gradients_of_weights_alone_are_made_block_by_block(
    relu: bool, has_bias: bool, is_turned: tuple[bool, bool]
) -> None:
    torch.manual_seed(2)
    rows = [torch.randn(2 * BLOCK_ROWS + 3, width, dtype=torch.float64) for width in (5, 3)]
    shapes = [(4, x.shape[1]) if turn else (x.shape[1], 4) for x, turn in zip(rows, is_turned, strict=True)]
    inputs = [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    bias = torch.randn(4, dtype=torch.float64, requires_grad=True) if has_bias else None
    weights = [w.t() if turn else w for w, turn in zip(inputs, is_turned, strict=True)]
    expected = rows[0] @ weights[0] + rows[1] @ weights[1]
    expected = expected if bias is None else expected + bias
    expected = torch.relu(expected) if relu else expected
    ours = torch.ops.dgl_hybrid.row_products(rows, weights, None, None, bias, relu)
    torch.testing.assert_close(ours, expected)
    inputs += [] if bias is None else [bias]
    grad = torch.randn_like(expected)
    torch.testing.assert_close(torch.autograd.grad(ours, inputs, grad), torch.autograd.grad(expected, inputs, grad))


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(("inputs", "outputs"), [(7, 3), (3, 7), (5, 5)])
def test_gradients_lie_in_memory_as_their_weights_do(inputs: int, outputs: int, turned: bool) -> None:
    torch.manual_seed(3)
    x = torch.randn(BLOCK_ROWS + 5, inputs, dtype=torch.float64)
    parameter = torch.randn((outputs, inputs) if turned else (inputs, outputs), dtype=torch.float64, requires_grad=True)
    weight = parameter.t() if turned else parameter
    ours, expected = product(x, weight, None), x @ weight
    grad = torch.randn_like(expected)
    (found,), (wanted,) = (torch.autograd.grad(y, [parameter], grad) for y in (ours, expected))
    assert found.is_contiguous()
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("by_columns", [False, True])
@pytest.mark.parametrize(("inputs", "outputs"), [(7, 3), (3, 7), (5, 5), (1, 4), (4, 1), (1, 1)])
def test_weights_of_layers_may_lie_by_columns(inputs: int, outputs: int, by_columns: bool) -> None:
    """Those of an orthogonal initialisation, or tied to a transposed one, do: of square ones shapes tell nothing."""
    torch.manual_seed(3)
    x = torch.randn(BLOCK_ROWS + 5, inputs, dtype=torch.float64, requires_grad=True)
    layers = [nn.Linear(inputs, outputs, bias=False, dtype=torch.float64) for _ in range(2)]
    for layer in layers:
        values = torch.randn(outputs, inputs, dtype=torch.float64)
        layer.weight = nn.Parameter(values.t().contiguous().t() if by_columns else values)
    weights = [layer.weight for layer in layers]
    num_own = len(x) - 2
    (all_rows, own), (rows, first) = narrowed_rows(x, *layers, num_own), rows_and_first(x, num_own)
    only_own = product(first, layers[1].weight.t(), None)
    ours = torch.cat([all_rows[:, :outputs], own, only_own]).square().sum() + rows.square().sum()
    of_all, of_own = (layer(x) for layer in layers)
    expected = torch.cat([of_all, of_own[:num_own], of_own[:num_own]]).square().sum() + x.square().sum()
    torch.testing.assert_close(ours, expected)
    found, wanted = (torch.autograd.grad(loss, [x, *weights]) for loss in (ours, expected))
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("needs_rows", [False, True])
def test_gradients_of_products_with_factors(needs_rows: bool, relu: bool) -> None:
    """In blocks: of the rows, the weight, and what is added after the factors."""
    torch.manual_seed(5)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64)

    x, factors = random(BLOCK_ROWS + 3, 5).requires_grad_(needs_rows), random(BLOCK_ROWS + 3, 1)
    weight, bias, addend = (t.requires_grad_() for t in (random(5, 4), random(4), random(BLOCK_ROWS + 3, 4)))
    ours = product(x, weight, bias, factors=factors, addend=addend, relu=relu)
    expected = (factors * x) @ weight + bias + addend
    expected = torch.relu(expected) if relu else expected
    inputs = [t for t in (x, weight, bias, addend) if t.requires_grad]
    grad = torch.randn_like(expected)
    torch.testing.assert_close(torch.autograd.grad(ours, inputs, grad), torch.autograd.grad(expected, inputs, grad))


def test_factors_that_would_need_a_gradient_are_refused() -> None:
    factors = torch.ones(3, 1, requires_grad=True)
    result = product(torch.ones(3, 2), torch.ones(2, 2, requires_grad=True), None, factors=factors)
    with pytest.raises(RuntimeError, match="factors of rows have no gradient"):
        result.sum().backward()


@pytest.mark.parametrize("relu", [False, True])
def test_gradients_of_weights_alone_can_be_differentiated(relu: bool) -> None:
    x = torch.randn(7, 3, dtype=torch.float64)
    inputs = [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((3, 2), (2,))]
    assert torch.autograd.gradgradcheck(lambda w, b: product(x, w * w, b, relu=relu), inputs)


def test_a_nan_passes_a_relu_both_ways() -> None:
    x = torch.tensor([[float("nan")], [1.0], [-1.0]])
    for weight in (torch.ones(1, 1, requires_grad=True), torch.ones(1, 1).t().requires_grad_()):
        ours, expected = product(x, weight, None, relu=True), torch.relu(x @ weight)
        torch.testing.assert_close(ours, expected, equal_nan=True)
        grads = [torch.autograd.grad(y[1:].sum() + 0.0 * y[0].sum(), weight) for y in (ours, expected)]
        torch.testing.assert_close(*grads, equal_nan=True)


def test_which_activations_are_a_relu() -> None:
    watched = nn.ReLU()
    watched.register_forward_hook(lambda *_: None)
    assert all(is_relu(activation) for activation in (F.relu, torch.relu, nn.ReLU(), nn.ReLU(inplace=True)))
    assert not any(is_relu(activation) for activation in (None, F.elu, nn.LeakyReLU(), watched, lambda x: x.relu()))


@pytest.mark.parametrize("sparse", ["x", "y", "both"])
@pytest.mark.parametrize("bias", [True, False])
def test_sums_of_products_of_sparse_rows(sparse: str, bias: bool) -> None:
    of_y, of_x = linears(5, 7, bias=bias)
    x, y = (torch.randn(2, 11, 5, dtype=torch.float64) * (torch.rand(2, 11, 5) < 0.3)).unbind()
    rows = {name: SparseRows.from_dense(z) if sparse in (name, "both") else z for name, z in (("x", x), ("y", y))}
    inputs = [*of_x.parameters(), *of_y.parameters()]
    ours, expected = sum_of_products(rows["x"], of_x, rows["y"], of_y), of_x(x) + of_y(y)
    torch.testing.assert_close(ours, expected)
    torch.testing.assert_close(gradients([ours], inputs), gradients([expected], inputs))


@pytest.mark.parametrize("num_first", [0, 4, 11])
def test_rows_and_first(num_first: int) -> None:
    """What reaches the rows from elsewhere is left as it is: others may hold it."""
    x = torch.randn(11, 6, dtype=torch.float64, requires_grad=True)
    rows, first = rows_and_first(x, num_first)
    expected = [x * 1.0, x[:num_first] * 1.0]
    torch.testing.assert_close([rows, first], expected)
    torch.testing.assert_close(gradients([rows, first], [x]), gradients(expected, [x]))
    given = torch.ones_like(x)
    torch.autograd.backward([rows, first], [given, torch.ones_like(first)])
    assert torch.equal(given, torch.ones_like(x))


class _Twice(torch.autograd.Function):
    """2 x, of which the gradient is a tensor of its own; `made` keeps where it lies, `kept` perhaps itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, made: list[int], kept: list[Tensor] | None) -> Tensor:
        ctx.made, ctx.kept = made, kept
        return 2.0 * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        grad = 2.0 * grads[0]
        ctx.made.append(grad.data_ptr())
        if ctx.kept is not None:
            ctx.kept.append(grad)
        return grad, None, None


HOLDERS = ["nobody", "maker", "hook", "prehook", "other operand", "grad", "caller"]


@pytest.mark.parametrize("is_view", [False, True])
@pytest.mark.parametrize("holder", HOLDERS)
def test_a_gradient_that_others_hold_is_not_written_to(holder: str, is_view: bool) -> None:
    """What nobody else holds takes the own rows' gradient where it lies."""
    of_own = linears(6, 3, bias=False)[1]
    x = torch.randn(11, 6, dtype=torch.float64, requires_grad=True)
    seen = torch.randn(11, 6, dtype=torch.float64, requires_grad=True)
    made: list[int] = []
    kept: list[Tensor] = []
    where: list[int] = []
    earlier = 1.0 * seen  # its node comes after that of `rows_and_first`, and waits with the gradient it has been given
    earlier.retain_grad()
    rows_in = 1.0 * x
    rows_in.register_hook(lambda grad: where.append(grad.data_ptr()))
    rows, first = rows_and_first(rows_in, 4)
    own = product(first, of_own.weight.t(), None)
    if holder == "hook":
        rows.register_hook(lambda grad: kept.append(grad))
    if holder == "prehook":
        rows.grad_fn.register_prehook(lambda grads: kept.append(grads[0]))  # type: ignore[union-attr]
    last = rows + earlier if holder == "other operand" else rows
    last = last.unsqueeze(1) if is_view else last  # as sums do
    if holder == "caller":
        kept.append(torch.full_like(rows, 2.0))
        torch.autograd.backward([rows, own], [kept[0], torch.ones_like(own)])
        made = [kept[0].data_ptr()]
    elif holder == "grad":
        result = _Twice.apply(last, made, None).sum() + own.sum()
        kept.append(torch.autograd.grad(result, [x, rows])[1])
    else:
        result = _Twice.apply(last, made, kept if holder == "maker" else None).sum() + own.sum()
        result.backward()
        kept += [earlier.grad] if holder == "other operand" and earlier.grad is not None else []
    assert (where == made) == (holder == "nobody")
    assert len(kept) == (holder != "nobody")
    for grad in kept:
        assert torch.equal(grad.view_as(x), torch.full_like(x, 2.0))
    if holder != "grad":
        expected = torch.full_like(x, 2.0)
        expected[:4] += of_own.weight.sum(0)
        torch.testing.assert_close(x.grad, expected)


class _Recorder(TorchDispatchMode):
    """Keeps every tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.made.append(result)
        return result


def test_gradients_that_are_recorded_are_not_written_to() -> None:
    gradient_owners._counts_without_owners.cache_clear()
    of_own = linears(6, 3, bias=False)[1]
    for is_recorded in (True, False):  # what is measured while all are kept would be the least ever after
        x = torch.randn(11, 6, dtype=torch.float64, requires_grad=True)
        rows_in, where, made = 1.0 * x, [], []
        rows_in.register_hook(lambda grad, where=where: where.append(grad.data_ptr()))
        rows, first = rows_and_first(rows_in, 4)
        own = product(first, of_own.weight.t(), None)
        result = _Twice.apply(rows, made, None).sum() + own.sum()
        with _Recorder() if is_recorded else contextlib.nullcontext():
            result.backward()
        assert (where == made) == (not is_recorded)


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
        wide, first = rows_and_first(x * x, 3)
        return rows, own, wide, of_own(first), sum_of_products(x, of_own, x * x, of_all)

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


def sage_on_known_rows(**options: Any) -> tuple[dglnn.SAGEConv, LayerBlock, Tensor]:
    """An optimised layer and rows of which its sums are kept."""
    torch.manual_seed(7)
    x = torch.randn(10, 4)
    block = build_block_of(torch.arange(0, 21, 2), torch.randint(10, (20,)))
    block.static_results = StaticResults(lambda tensor: tensor is x)
    return optimize(dglnn.SAGEConv(4, 3, "mean", **options)), block, x


def test_dropout_that_is_left_on_while_evaluating_draws_every_time() -> None:
    """Whether the layer trains was asked, not whether its dropout does: Monte Carlo dropout drew nothing."""
    layer, block, x = sage_on_known_rows(feat_drop=0.5)
    layer.eval()
    assert torch.equal(layer(block, x), layer(block, x))
    layer.feat_drop.train()
    first, second = layer(block, x), layer(block, x)
    assert not torch.equal(first, second)


def test_a_dropout_that_somebody_watches_is_called() -> None:
    layer, block, x = sage_on_known_rows()
    expected, seen = layer(block, x), []
    handle = layer.feat_drop.register_forward_hook(lambda *_: seen.append("hook"))
    torch.testing.assert_close(layer(block, x), expected)
    assert seen == ["hook"]
    layer.feat_drop.forward = lambda rows: 2.0 * rows  # type: ignore[method-assign]
    doubled = layer(block, x)
    handle.remove()
    del layer.feat_drop.forward
    torch.testing.assert_close(doubled, layer(block, 2.0 * x))


@dataclass(kw_only=True)
class OneWay:
    output: Tensor
    weight_grads: list[Tensor]
    seeds: Tensor
    """Original ids."""
    events: list[bool]
    """Of every exchange, whether it was one of the backward."""


def run_constant_rows(rank: int, world_size: int, part_config: str) -> OneWay:
    g, x, (block, _loader) = one_layer(part_config, keep_static=False)
    torch.manual_seed(6)
    layer = optimize(dglnn.SAGEConv(x.shape[1], 8, "mean").double())
    g.communicator.clock.drain()
    y = layer.forward(block, torch.sin(x.detach()))  # past what weights the loss of a rank
    y.square().sum().backward()
    events = [event.backward for event in g.communicator.clock.drain()]
    return OneWay(
        output=y.detach(),
        weight_grads=[parameter.grad for parameter in layer.parameters()],
        seeds=g.fetch_nodes(g.partition.orig_node_ids, block.dstdata[dgl.NID]),
        events=events,
    )


def test_no_gradient_travels_for_rows_that_need_none(folder: str, graph: dgl.DGLGraph) -> None:
    """Taken together with their product they seemed to need one, as the weight does."""
    torch.manual_seed(6)
    layer = dglnn.SAGEConv(graph.ndata["feat"].shape[1], 8, "mean").double()
    expected = layer(graph, torch.sin(graph.ndata["feat"]))
    expected.square().sum().backward()
    results = run_ranks(3, run_constant_rows, folder)
    for result in results:
        assert result.events == [False]
        torch.testing.assert_close(result.output, expected[result.seeds].detach())
    for index, parameter in enumerate(layer.parameters()):
        torch.testing.assert_close(sum(result.weight_grads[index] for result in results), parameter.grad)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "sage_mean": lambda: dglnn.SAGEConv(64, 47, "mean"),
    "sage_no_bias": lambda: dglnn.SAGEConv(64, 5, "mean", bias=False, activation=F.elu),
    "gcn_both": lambda: dglnn.GraphConv(64, 47, norm="both", allow_zero_in_degree=True),
    "gcn_left": lambda: dglnn.GraphConv(64, 47, norm="left", allow_zero_in_degree=True, activation=F.elu),
    "gcn_right": lambda: dglnn.GraphConv(64, 31, norm="right", allow_zero_in_degree=True, bias=False),
    "gcn_none": lambda: dglnn.GraphConv(64, 7, norm="none", allow_zero_in_degree=True),
    "gcn_both_wide": lambda: dglnn.GraphConv(64, 65, norm="both", allow_zero_in_degree=True, activation=F.elu),
    "gcn_none_wide": lambda: dglnn.GraphConv(64, 64, norm="none", allow_zero_in_degree=True, bias=False),
    "sage_mean_wide": lambda: dglnn.SAGEConv(64, 65, "mean", feat_drop=0.0, activation=F.elu),
    "gcn_both_relu": lambda: dglnn.GraphConv(64, 47, norm="both", allow_zero_in_degree=True, activation=F.relu),
    "sage_mean_relu": lambda: dglnn.SAGEConv(64, 5, "mean", activation=nn.ReLU(), norm=nn.LayerNorm(5)),
    "sage_gcn": lambda: dglnn.SAGEConv(64, 47, "gcn"),
    "sage_gcn_relu": lambda: dglnn.SAGEConv(64, 5, "gcn", bias=False, activation=F.relu, norm=nn.LayerNorm(5)),
    "sage_gcn_wide": lambda: dglnn.SAGEConv(64, 65, "gcn", activation=F.elu),
    "gin": lambda: dglnn.GINConv(nn.Sequential(nn.Linear(64, 47), nn.ReLU(), nn.Linear(47, 3)), init_eps=0.2),
    "gin_mean": lambda: dglnn.GINConv(nn.Linear(64, 5, bias=False), "mean", learn_eps=True, activation=F.relu),
    "gin_max": lambda: dglnn.GINConv(nn.Linear(64, 5), "max"),
    "gin_wide": lambda: dglnn.GINConv(nn.Linear(64, 65)),
    "gin_unseen": lambda: dglnn.GINConv(nn.Sequential(nn.Tanh(), nn.Linear(64, 5))),
    "gin_alone": lambda: dglnn.GINConv(),
    "sage_mean_wide_relu": lambda: dglnn.SAGEConv(64, 65, "mean", activation=F.relu),
}


OPS = ("graphconv/", "sageconv/", "ginconv/")
NARROWED_GIN = ("gin", "gin_mean")


def expected_way(kind: str, sums_first: bool) -> str:
    """What `GINConv` does of its own is to sum first."""
    if kind.startswith("gin"):
        return "ginconv/ours: fewer passes" if kind in NARROWED_GIN and not sums_first else ""
    way = "ours: sum first" if sums_first or "wide" in kind else "ours: fewer passes"
    return f"{'graphconv' if kind.startswith('gcn') else 'sageconv'}/{way}"


def run_on_block(
    rank: int, world_size: int, part_config: str, sums_first: bool
) -> dict[str, tuple[list[Tensor], list[Tensor], str]]:
    """Returns output and gradients of every layer, of DGL's forward and of ours, and which of ours ran."""
    _, x, (block, _loader) = one_layer(part_config)
    block.sums_first = sums_first
    torch.manual_seed(5)
    rows = (x.detach().double() @ torch.randn(x.shape[1], 64, dtype=torch.float64)).requires_grad_()
    compared = {}
    for kind, make in LAYERS.items():
        torch.manual_seed(6)  # ranks draw gradients of other sizes, but have the same weights
        layer = make().double()
        for name, parameter in layer.named_parameters():
            if name.endswith("bias"):
                nn.init.normal_(parameter)  # zeros would hide one that is left out
        found = []
        for model in (layer, optimize(copy.deepcopy(layer))):
            reset_op_counts()
            result = model(block, rows)
            found.append([result.detach(), *gradients([result], [rows, *model.parameters()])])
        ran = [name for name in op_counts() if name.startswith(OPS)]
        compared[kind] = (found[0], found[1], "".join(ran))
    return compared


@pytest.mark.parametrize("sums_first", [False, True])
def test_layers_on_blocks(folder: str, sums_first: bool) -> None:
    by_rank = run_ranks(3, run_on_block, folder, sums_first)
    for kind in LAYERS:
        sums: list[list[Tensor]] = []
        for expected, ours, ran in (compared[kind] for compared in by_rank):
            assert ran == expected_way(kind, sums_first), kind
            torch.testing.assert_close(ours[:2], expected[:2], msg=lambda text, kind=kind: f"{kind}: {text}")
            sums = sums or [[torch.zeros_like(x) for x in expected[2:]] for _ in range(2)]
            for total, found in zip(sums, (expected, ours), strict=True):
                for into, gradient in zip(total, found[2:], strict=True):
                    into += gradient
        # A rank's share of a weight's gradient is of the rows it multiplies: sources in one order, sums in the other.
        torch.testing.assert_close(*sums, msg=lambda text, kind=kind: f"{kind}, weights: {text}")


def ready_block() -> LayerBlock:
    """One of three destinations, the second of which has no in-edges."""
    return build_block_of(torch.tensor([0, 2, 2, 4]), torch.tensor([1, 2, 0, 2]))


def test_factors_of_degrees_are_made_once() -> None:
    block = ready_block()
    factors = block.degree_factors("both", torch.float64, of_sources=False)
    assert torch.equal(factors, torch.tensor([2.0, 1.0, 2.0], dtype=torch.float64) ** -0.5)
    assert block.degree_factors("both", torch.float64, of_sources=False) is factors
    assert block.degree_factors("both", torch.float32, of_sources=False).dtype == torch.float32
    # Sources 0 and 1 are read once, 2 twice.
    of_sources = block.degree_factors("right", torch.float64, of_sources=True)
    assert of_sources.tolist() == [1.0, 1.0, 0.5]
    assert block.has_empty_rows
    assert not build_block_of(torch.tensor([0, 1, 2]), torch.tensor([1, 0])).has_empty_rows


@pytest.mark.parametrize("evaluates", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("kind", ["gcn", "gcn_narrow", "sage", "sage_narrow"])
def test_training_may_come_after_an_evaluation(kind: str, evaluates: Callable[[], Any]) -> None:
    """What is kept of degrees is saved for backward, which tensors of an inference mode cannot be."""
    out = 2 if kind.endswith("narrow") else 7
    options = {"allow_zero_in_degree": True} if kind.startswith("gcn") else {"aggregator_type": "mean"}
    made = (dglnn.GraphConv if kind.startswith("gcn") else dglnn.SAGEConv)(4, out, **options).double()
    layer = optimize(copy.deepcopy(made))
    x = torch.rand(3, 4, dtype=torch.float64)
    block, plain = ready_block(), dgl.graph(([1, 2, 0, 2], [0, 0, 2, 2]), num_nodes=3)
    with evaluates():
        torch.testing.assert_close(layer(block, x), made(plain, x))
    leaf, expected = x.clone().requires_grad_(), x.clone().requires_grad_()
    layer(block, leaf).square().sum().backward()
    made(plain, expected).square().sum().backward()
    assert leaf.grad is not None
    assert expected.grad is not None
    torch.testing.assert_close(leaf.grad, expected.grad)
    for (name, ours), theirs in zip(layer.named_parameters(), made.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        torch.testing.assert_close(ours.grad, theirs.grad, msg=name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("turned", [False, True])
def test_narrow_gradients_are_summed_wide(dtype: torch.dtype, turned: bool) -> None:
    """Of 256 equal sums of blocks bfloat16 cannot add another: gradients of one sign came out at half of theirs."""
    num_rows = 600 * BLOCK_ROWS * torch.get_num_threads()
    x, grad = torch.full((num_rows, 2), 0.01, dtype=dtype), torch.full((num_rows, 3), 0.005, dtype=dtype)
    weight = (torch.ones(3, 2, dtype=dtype).t() if turned else torch.ones(2, 3, dtype=dtype)).requires_grad_()
    bias = torch.zeros(3, dtype=dtype, requires_grad=True)
    product(x, weight, bias).backward(grad)
    assert weight.grad is not None
    assert bias.grad is not None
    exact = num_rows * float(x[0, 0]) * float(grad[0, 0])
    assert ((weight.grad.double() - exact) / exact).abs().max() < 0.01
    exact = num_rows * float(grad[0, 0])
    assert ((bias.grad.double() - exact) / exact).abs().max() < 0.01
