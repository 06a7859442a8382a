# SPDX-License-Identifier: Apache-2.0
"""The public ops on natural shapes: values, gradients, gradients of gradients, dtypes, and what they refuse.

References loop over destinations in float64 on the messages as PyTorch broadcasts them; their gradients are autograd's.
"""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.utils.checkpoint import checkpoint

from dgl_hybrid.ops import EdgeDropout, SparseGraph, edge_softmax, gat, gatv2, sddmm, segment_reduce, spmm
from dgl_hybrid.ops.backend import BackendName, use_backend
from dgl_hybrid.training.dropout import replicated_dropout
from tests.ops.backend_checks import TOLERANCES, endpoints, in_edges_of, make_graph

REDUCTIONS = ("sum", "mean", "max", "min")
Shape = tuple[int, ...]


@pytest.fixture(params=["naive", "cpu"], autouse=True)
def backend(request: pytest.FixtureRequest) -> Iterator[BackendName]:
    with use_backend(request.param):
        yield request.param


@pytest.fixture
def graph() -> SparseGraph:
    """4 sources, 5 destinations of which two have no in-edges, 7 edges, one of them twice, one a self-loop."""
    return make_graph("hand")


def rows(count: int, features: Shape, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Distinct values, so that max and min are differentiable where they are tested."""
    generator = torch.Generator().manual_seed(seed)
    size = count * math.prod(features)
    values = (torch.randperm(size, generator=generator) + 0.5) / max(size, 1) * 4 - 2
    return values.reshape(count, *features).to(dtype)


def leaf(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_()


def aligned(x: Tensor, rank: int) -> Tensor:
    return x.reshape(x.shape[0], *[1] * (rank - x.dim()), *x.shape[1:])


def messages(graph: SparseGraph, x: Tensor | None, w: Tensor | None) -> Tensor:
    at_edges = [] if x is None else [x[endpoints(graph)["u"]]]
    at_edges += [] if w is None else [w]
    rank = max(part.dim() for part in at_edges)
    product = aligned(at_edges[0], rank)
    return product if len(at_edges) == 1 else product * aligned(at_edges[1], rank)


def reduced(groups: list[list[int]], values: Tensor, reduce: str) -> Tensor:
    out = [values.new_zeros(0, *values.shape[1:])]
    for members in groups:
        if not members:
            out.append(values.new_zeros(1, *values.shape[1:]))
        elif reduce in ("sum", "mean"):
            out.append(getattr(values[members], reduce)(0, keepdim=True))
        else:
            out.append(getattr(values[members], "a" + reduce)(0, keepdim=True))
    return torch.cat(out)


def same_as_reference(op: Callable[..., Tensor], reference: Callable[..., Tensor], *operands: Tensor) -> None:
    """Values and gradients, for a random gradient of the result."""
    ours, theirs = [leaf(x) for x in operands], [leaf(x) for x in operands]
    got, expected = op(*ours), reference(*theirs)
    torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-11)
    grad = rows(expected.shape[0], tuple(expected.shape[1:]), 99)
    expected_grads = torch.autograd.grad(expected, theirs, grad)
    for name, ours_, theirs_ in zip("xyz", torch.autograd.grad(got, ours, grad), expected_grads, strict=False):
        torch.testing.assert_close(ours_, theirs_, rtol=1e-11, atol=1e-11, msg=lambda text, n=name: f"d{n}: {text}")


# spmm

FEATURES: tuple[tuple[Shape, Shape], ...] = (
    ((), ()),
    ((6,), ()),
    ((6,), (1,)),
    ((6,), (6,)),
    ((), (3,)),
    ((1,), (4,)),
    ((4, 5), (4, 1)),
    ((4, 5), (1, 1)),
    ((4, 5), (1,)),
    ((4, 5), (5,)),
    ((4, 5), (4, 5)),
    ((4, 5), (1, 5)),
    ((1, 5), (4, 1)),
    ((5,), (4, 1)),
    ((2, 3, 4), (3, 1)),
    ((2, 3, 4), (2, 1, 4)),
    ((2, 3, 4), (1, 3, 1)),
    ((2, 1, 3), (2, 1, 1)),
    ((4, 0), (4, 1)),
    ((0,), (1,)),
)


@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize(("x_features", "w_features"), FEATURES)
def test_spmm_of_sources_and_weights(graph: SparseGraph, x_features: Shape, w_features: Shape, reduce: str) -> None:
    x, w = rows(4, x_features, 1), rows(7, w_features, 2)
    same_as_reference(
        lambda x, w: spmm(graph, x, w, reduce),
        lambda x, w: reduced(in_edges_of(graph), messages(graph, x, w), reduce),
        x,
        w,
    )


@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("features", [(), (6,), (2, 3), (2, 0), (2, 2, 2)])
def test_spmm_of_one_operand(graph: SparseGraph, features: Shape, reduce: str) -> None:
    groups = in_edges_of(graph)
    same_as_reference(
        lambda x: spmm(graph, x, reduce=reduce),
        lambda x: reduced(groups, messages(graph, x, None), reduce),
        rows(4, features, 1),
    )
    same_as_reference(
        lambda w: spmm(graph, w=w, reduce=reduce), lambda w: reduced(groups, w, reduce), rows(7, features, 2)
    )


def test_a_hand_computed_case() -> None:
    """Edges 0 -> 1 (row 0), 2 -> 1 (row 1), 2 -> 0 (row 2); destination 2 has none."""
    graph = SparseGraph.from_coo(torch.tensor([0, 2, 2]), torch.tensor([1, 1, 0]), 3, 3)
    x, w = torch.tensor([[1.0, 10.0], [5.0, 50.0], [2.0, -20.0]]), torch.tensor([3.0, 4.0, 0.5])
    assert spmm(graph, x).tolist() == [[2.0, -20.0], [3.0, -10.0], [0.0, 0.0]]
    assert spmm(graph, x, w).tolist() == [[1.0, -10.0], [11.0, -50.0], [0.0, 0.0]]
    assert spmm(graph, x, w, "mean").tolist() == [[1.0, -10.0], [5.5, -25.0], [0.0, 0.0]]
    assert spmm(graph, x, w, "max").tolist() == [[1.0, -10.0], [8.0, 30.0], [0.0, 0.0]]
    assert spmm(graph, w=w, reduce="min").tolist() == [0.5, 3.0, 0.0]
    assert sddmm(graph, "sub", x, x, "u", "v").tolist() == [[-4.0, -40.0], [-3.0, -70.0], [1.0, -30.0]]
    assert sddmm(graph, "dot", x, x).tolist() == [[505.0], [-990.0], [-198.0]]


def test_a_checkpoint_repeats_a_sum_when_more_is_known_of_the_graph() -> None:
    """The second operation makes out-edges with their numbers, which the sum, when it is repeated, finds."""

    def both(graph: SparseGraph, x: Tensor) -> Tensor:
        return spmm(graph, x) + spmm(graph, x, rows(7, (1,), 1))

    plain, repeated = leaf(rows(4, (3,), 0)), leaf(rows(4, (3,), 0))
    graphs = [SparseGraph(make_graph("hand").in_edges, num_src=4) for _ in range(2)]
    both(graphs[0], plain).sin().sum().backward()
    checkpoint(both, graphs[1], repeated, use_reentrant=False).sin().sum().backward()
    assert plain.grad is not None
    assert torch.equal(repeated.grad, plain.grad)


def test_the_first_of_equal_values_gets_the_gradient() -> None:
    graph = SparseGraph.from_coo(torch.tensor([2, 0, 1]), torch.tensor([0, 0, 0]), 3, 1)
    for reduce in ("max", "min"):
        x = torch.ones(3, 2, requires_grad=True)
        spmm(graph, x, reduce=reduce).sum().backward()
        assert x.grad is not None
        assert x.grad.tolist() == [[0.0, 0.0], [0.0, 0.0], [1.0, 1.0]]


# sddmm


def at_target(graph: SparseGraph, x: Tensor, target: str) -> Tensor:
    return x[endpoints(graph)[target]]


def combined(graph: SparseGraph, op: str, lhs: Tensor, rhs: Tensor, lhs_target: str, rhs_target: str) -> Tensor:
    lhs, rhs = at_target(graph, lhs, lhs_target), at_target(graph, rhs, rhs_target)
    rank = max(lhs.dim(), rhs.dim())
    lhs, rhs = aligned(lhs, rank), aligned(rhs, rank)
    if op == "dot":
        return (lhs * rhs).sum(-1, keepdim=True) if rank > 1 else lhs * rhs
    return {"add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div}[op](lhs, rhs)


COUNTS = {"u": 4, "v": 5, "e": 7}
TARGETS = ("u", "v", "e")


@pytest.mark.parametrize("rhs_target", TARGETS)
@pytest.mark.parametrize("lhs_target", TARGETS)
@pytest.mark.parametrize("op", ["add", "sub", "mul", "div", "dot"])
def test_sddmm_on_every_pair_of_targets(graph: SparseGraph, op: str, lhs_target: str, rhs_target: str) -> None:
    lhs, rhs = rows(COUNTS[lhs_target], (2, 3), 1), rows(COUNTS[rhs_target], (2, 3), 2)
    same_as_reference(
        lambda lhs, rhs: sddmm(graph, op, lhs, rhs, lhs_target, rhs_target),
        lambda lhs, rhs: combined(graph, op, lhs, rhs, lhs_target, rhs_target),
        lhs,
        rhs,
    )


@pytest.mark.parametrize("op", ["add", "div"])
@pytest.mark.parametrize(("lhs_features", "rhs_features"), [f for f in FEATURES if f != ((), (3,))])
def test_sddmm_broadcasts(graph: SparseGraph, op: str, lhs_features: Shape, rhs_features: Shape) -> None:
    same_as_reference(
        lambda lhs, rhs: sddmm(graph, op, lhs, rhs, "v", "u"),
        lambda lhs, rhs: combined(graph, op, lhs, rhs, "v", "u"),
        rows(5, lhs_features, 1),
        rows(4, rhs_features, 2),
    )


@pytest.mark.parametrize(
    ("lhs_features", "rhs_features"),
    [((), ()), ((), (1,)), ((4,), (4,)), ((2, 4), (4,)), ((2, 1, 4), (3, 4)), ((2, 1), (2, 1)), ((2, 0), (2, 0))],
)
def test_dot_broadcasts_its_leading_features(graph: SparseGraph, lhs_features: Shape, rhs_features: Shape) -> None:
    same_as_reference(
        lambda lhs, rhs: sddmm(graph, "dot", lhs, rhs),
        lambda lhs, rhs: combined(graph, "dot", lhs, rhs, "u", "v"),
        rows(4, lhs_features, 1),
        rows(5, rhs_features, 2),
    )


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("features", [(), (3,), (2, 3), (0,)])
def test_sddmm_copies(graph: SparseGraph, features: Shape, target: str) -> None:
    same_as_reference(
        lambda x: sddmm(graph, "copy", x, lhs_target=target),
        lambda x: at_target(graph, x, target),
        rows(COUNTS[target], features, 1),
    )


# Attention


@pytest.mark.parametrize("features", [(), (1,), (3,), (3, 1), (2, 2), (0,)])
def test_edge_softmax(graph: SparseGraph, features: Shape) -> None:
    def reference(logits: Tensor) -> Tensor:
        parts = [logits[:0]]
        parts += [torch.softmax(logits[edges], 0) for edges in in_edges_of(graph)]
        order = [edge for edges in in_edges_of(graph) for edge in edges]
        return torch.cat(parts)[torch.tensor(order).argsort()]

    same_as_reference(lambda logits: edge_softmax(graph, logits), reference, rows(7, features, 1))


def attention(graph: SparseGraph, x: Tensor, logits: Tensor, dropout: Callable[[Tensor], Tensor]) -> Tensor:
    """From unfused parts: x (S, H, D), logits (E, H)."""
    alpha = torch.zeros_like(logits)
    for edges in in_edges_of(graph):
        index = torch.tensor(edges, dtype=torch.int64)
        alpha = alpha.index_add(0, index, torch.softmax(logits[index], 0))
    values = x[endpoints(graph)["u"]] * dropout(alpha).reshape(*alpha.shape, *[1] * (x.dim() - 2))
    return reduced(in_edges_of(graph), values, "sum")


def dropouts(p: float, keys: Tensor | None) -> tuple[EdgeDropout | None, Callable[[Tensor], Tensor]]:
    """The fused dropout and the one a module applies to the materialised weights."""
    if p == 0.0:
        return None, lambda alpha: alpha
    call = {"seed": 3, "step": 2**40, "call_index": 1}
    ids = torch.arange(7) if keys is None else keys
    return (
        EdgeDropout.from_call(p, **call, edge_keys=keys),
        lambda alpha: replicated_dropout(alpha, p, ids, **call),
    )


KEYS = torch.tensor([5, 2**40, 7, 8, 0, 3, 11])


@pytest.mark.parametrize(("p", "keys"), [(0.0, None), (0.5, None), (0.5, KEYS), (1.0, None)])
@pytest.mark.parametrize("el_features", [(2,), (2, 1)])
@pytest.mark.parametrize("x_features", [(2, 3), (2, 1), (2, 3, 2), (2, 0)])
def test_gat_is_its_unfused_parts(
    graph: SparseGraph, x_features: Shape, el_features: Shape, p: float, keys: Tensor | None
) -> None:
    fused, unfused = dropouts(p, keys)

    def reference(x: Tensor, el: Tensor, er: Tensor) -> Tensor:
        ends = endpoints(graph)
        logits = F.leaky_relu(el[ends["u"]] + er[ends["v"]], 0.3).reshape(7, 2)
        return attention(graph, x, logits, unfused)

    same_as_reference(
        lambda x, el, er: gat(graph, x, el, er, negative_slope=0.3, dropout=fused),
        reference,
        rows(4, x_features, 1),
        rows(4, el_features, 2),
        rows(5, el_features, 3),
    )


@pytest.mark.parametrize(("p", "keys"), [(0.0, None), (0.5, None), (0.5, KEYS), (1.0, None)])
@pytest.mark.parametrize("leading", [(), (1,)])
@pytest.mark.parametrize("features", [(2, 3), (1, 1), (3, 0)])
def test_gatv2_is_its_unfused_parts(
    graph: SparseGraph, features: Shape, leading: Shape, p: float, keys: Tensor | None
) -> None:
    fused, unfused = dropouts(p, keys)

    def reference(x_src: Tensor, x_dst: Tensor, weight: Tensor) -> Tensor:
        ends = endpoints(graph)
        sums = F.leaky_relu(x_src[ends["u"]] + x_dst[ends["v"]], 0.1)
        return attention(graph, x_src, (sums * weight).sum(-1), unfused)

    same_as_reference(
        lambda x_src, x_dst, weight: gatv2(graph, x_src, x_dst, weight, negative_slope=0.1, dropout=fused),
        reference,
        rows(4, features, 1),
        rows(5, features, 2),
        rows(*(leading or features[:1]), features if leading else features[1:], 3),
    )


def test_dropout_zero_is_none(graph: SparseGraph) -> None:
    x, el, er = rows(4, (2, 3), 1), rows(4, (2,), 2), rows(5, (2,), 3)
    nothing = EdgeDropout.from_call(0.0, seed=1, step=1, call_index=1)
    assert torch.equal(gat(graph, x, el, er, dropout=nothing), gat(graph, x, el, er))


# Segments


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("features", [(), (3,), (2, 2), (0,)])
@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_segment_reduce(reduce: str, features: Shape, dtype: torch.dtype) -> None:
    offsets = torch.tensor([0, 0, 3, 3, 7, 8, 8], dtype=dtype)
    groups = [list(range(begin, end)) for begin, end in zip(offsets.tolist(), offsets.tolist()[1:], strict=False)]
    same_as_reference(
        lambda x: segment_reduce(offsets, x, reduce), lambda x: reduced(groups, x, reduce), rows(8, features, 1)
    )


# Gradients of gradients: formulas of the registration, the same for every backend

once = pytest.mark.parametrize("backend", ["naive", pytest.param("cpu", marks=pytest.mark.slow)], indirect=True)


def check_twice(op: Callable[..., Tensor], *operands: Tensor) -> None:
    leaves = tuple(leaf(x) for x in operands)
    assert gradcheck(op, leaves)
    assert gradgradcheck(op, leaves)


@once
@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_spmm_differentiates_twice(graph: SparseGraph, reduce: str) -> None:
    x, w = rows(4, (2, 2), 1), rows(7, (2, 1), 2)
    check_twice(lambda x, w: spmm(graph, x, w, reduce), x, w)
    check_twice(lambda x: spmm(graph, x, None, reduce), x)
    check_twice(lambda w: spmm(graph, None, w, reduce), w)


@once
@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_spmm_without_edges_differentiates_twice(reduce: str) -> None:
    none = torch.empty(0, dtype=torch.int64)
    empty = SparseGraph.from_coo(none, none, 3, 2)
    check_twice(lambda x: spmm(empty, x, None, reduce), rows(3, (2, 2), 1))
    x = leaf(rows(3, (4,), 1))
    (first,) = torch.autograd.grad(spmm(empty, x, None, reduce).square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x, allow_unused=True)
    assert second is None or not second.any()


@once
@pytest.mark.parametrize("rhs_target", TARGETS)
@pytest.mark.parametrize("lhs_target", TARGETS)
def test_sddmm_differentiates_twice(graph: SparseGraph, lhs_target: str, rhs_target: str) -> None:
    for op in ("add", "mul", "div", "dot"):
        lhs, rhs = rows(COUNTS[lhs_target], (2,), 1), rows(COUNTS[rhs_target], (2,), 2)
        check_twice(lambda lhs, rhs: sddmm(graph, op, lhs, rhs, lhs_target, rhs_target), lhs, rhs)  # noqa: B023


@once
def test_edge_softmax_differentiates_twice(graph: SparseGraph) -> None:
    check_twice(lambda logits: edge_softmax(graph, logits), rows(7, (2,), 1))


@once
@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_segment_reduce_differentiates_twice(reduce: str) -> None:
    offsets = torch.tensor([0, 3, 3, 5])
    check_twice(lambda x: segment_reduce(offsets, x, reduce), rows(5, (2,), 1))


@once
def test_third_derivatives_of_max_exist(graph: SparseGraph) -> None:
    """x * x * w along one edge: the third derivative is not zero."""
    x, w = leaf(rows(4, (2,), 1)), leaf(rows(7, (1,), 2))
    value = spmm(graph, x, w, "max").pow(3).sum() / 6
    (first,) = torch.autograd.grad(value, x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
    (third,) = torch.autograd.grad(second.sum(), w)
    reference_x, reference_w = leaf(x), leaf(w)
    reference = reduced(in_edges_of(graph), messages(graph, reference_x, reference_w), "max").pow(3).sum() / 6
    (first,) = torch.autograd.grad(reference, reference_x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), reference_x, create_graph=True)
    torch.testing.assert_close(third, torch.autograd.grad(second.sum(), reference_w)[0])


class _WithoutGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        return None


def test_fused_attention_that_somebody_uses_without_a_gradient(graph: SparseGraph) -> None:
    x = rows(graph.num_src, (2, 3), 1).requires_grad_()
    el, er = rows(graph.num_src, (2,), 2).requires_grad_(), rows(graph.num_dst, (2,), 3).requires_grad_()
    attention = rows(1, (2, 3), 4)[0].requires_grad_()
    x_dst = rows(graph.num_dst, (2, 3), 5).requires_grad_()
    for out, wanted in (
        (gat(graph, x, el, er), (x, el, er)),
        (gatv2(graph, x, x_dst, attention), (x, x_dst, attention)),
    ):
        loss = _WithoutGradient.apply(out).sum() + sum(t.sum() for t in wanted)
        assert all(torch.equal(d, torch.ones_like(d)) for d in torch.autograd.grad(loss, wanted))


def test_fused_attention_differentiates_once(graph: SparseGraph) -> None:
    dropout = EdgeDropout.from_call(0.3, seed=1, step=2, call_index=3)
    x, el, er = (leaf(rows(n, f, n)) for n, f in ((4, (2, 3)), (4, (2,)), (5, (2,))))
    assert gradcheck(lambda *operands: gat(graph, *operands, dropout=dropout), (x, el, er))
    x_dst, weight = leaf(rows(5, (2, 3), 8)), leaf(rows(2, (3,), 9))
    assert gradcheck(lambda *operands: gatv2(graph, *operands, dropout=dropout), (x, x_dst, weight))

    (dx,) = torch.autograd.grad(gat(graph, x, el, er).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="gradient of the fused gat cannot be differentiated again"):
        torch.autograd.grad(dx.sum(), x)
    (dx,) = torch.autograd.grad(gatv2(graph, x, x_dst, weight).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="gradient of the fused gatv2 cannot be differentiated again"):
        torch.autograd.grad(dx.sum(), x)


# Every call, for what follows


def calls(
    dtype: torch.dtype, graph: SparseGraph, width: int = 6
) -> dict[str, tuple[Callable[..., Tensor], list[Tensor]]]:
    """Each public op with operands, by a name; `width` is D or F."""
    s, n, e = graph.num_src, graph.num_dst, graph.num_edges

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64).to(dtype)

    x, w = random(s, 2, width), random(e, 2, 1)
    offsets = graph.in_edges.indptr
    table: dict[str, tuple[Callable[..., Tensor], list[Tensor]]] = {}
    for reduce in REDUCTIONS:
        table[f"copy_u {reduce}"] = (lambda x, r=reduce: spmm(graph, x, None, r), [x])
        table[f"u_mul_e {reduce}"] = (lambda x, w, r=reduce: spmm(graph, x, w, r), [x, w])
        table[f"copy_e {reduce}"] = (lambda w, r=reduce: spmm(graph, None, w, r), [random(e, width)])
        table[f"segment {reduce}"] = (lambda x, r=reduce: segment_reduce(offsets, x, r), [random(e, width)])
    for op in ("add", "sub", "mul", "dot"):
        table[f"sddmm {op}"] = (lambda x, y, o=op: sddmm(graph, o, x, y), [x, random(n, 2, width)])
    table["edge_softmax"] = (lambda logits: edge_softmax(graph, logits), [w])
    table["gat"] = (lambda x, el, er: gat(graph, x, el, er), [x, random(s, 2), random(n, 2)])
    table["gatv2"] = (lambda a, b, c: gatv2(graph, a, b, c), [x, random(n, 2, width), random(2, width)])
    return table


NAMES = tuple(calls(torch.float32, make_graph("hand")))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_values_and_gradients_are_as_exact_as_the_dtype(name: str, dtype: torch.dtype) -> None:
    graph = make_graph("power-law")
    op, operands = calls(dtype, graph)[name]
    ours, exact = [leaf(x) for x in operands], [leaf(x.double()) for x in operands]
    got, expected = op(*ours), op(*exact)
    assert got.dtype == dtype
    grad = torch.randn(expected.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    results = [got, *torch.autograd.grad(got, ours, grad)]
    references = [expected, *torch.autograd.grad(expected, exact, grad.double())]
    # Gradients of attention are differences that nearly cancel; `backend_checks` measures them against their terms.
    slack = 8.0 if name in ("edge_softmax", "gat", "gatv2") else 1.0
    if name.endswith(("max", "min")) and dtype != torch.float32:
        slack = 8.0  # values that are distinct in float64 are equal in half precision, and another edge wins
        results, references = results[:1], references[:1]
    for result, reference in zip(results, references, strict=True):
        assert result.dtype == dtype
        error = (result.double() - reference).norm() / reference.norm()
        assert error <= slack * TOLERANCES[dtype], f"{error:.1e}"


@pytest.mark.parametrize("name", NAMES)
def test_two_calls_agree_bit_by_bit(name: str) -> None:
    op, operands = calls(torch.float32, make_graph("hub"))[name]
    runs = []
    for _ in range(2):
        leaves = [leaf(x) for x in operands]
        out = op(*leaves)
        runs.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_operands_need_not_be_contiguous_and_stay_as_they_are(graph: SparseGraph, name: str) -> None:
    op, operands = calls(torch.float32, graph)[name]
    strided = [torch.stack([x, -x], dim=-1)[..., 0].requires_grad_() for x in operands]
    assert not any(x.is_contiguous() for x in strided if x.numel() > 1)
    before = [x.detach().clone() for x in strided]
    out = op(*strided)
    assert torch.equal(out, op(*operands))
    out.transpose(0, -1).sum().backward()  # a gradient with strides of its own
    assert all(torch.equal(x, b) for x, b in zip(strided, before, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_only_wanted_gradients_are_computed(graph: SparseGraph, name: str) -> None:
    op, operands = calls(torch.float64, graph)[name]
    all_leaves = [leaf(x) for x in operands]
    expected = torch.autograd.grad(op(*all_leaves).square().sum(), all_leaves)
    for wanted in range(len(operands)):
        mixed = [leaf(x) if i == wanted else x.detach() for i, x in enumerate(operands)]
        (got,) = torch.autograd.grad(op(*mixed).square().sum(), mixed[wanted])
        assert torch.equal(got, expected[wanted])
    assert not op(*(x.detach() for x in operands)).requires_grad


@pytest.mark.parametrize("sizes", [(3, 0, 0), (0, 4, 0), (0, 0, 0), (3, 4, 0)])
@pytest.mark.parametrize("name", NAMES)
def test_empty_graphs(name: str, sizes: tuple[int, int, int]) -> None:
    num_src, num_dst, _ = sizes
    none = torch.empty(0, dtype=torch.int64)
    graph = SparseGraph.from_coo(none, none, num_src, num_dst)
    op, operands = calls(torch.float32, graph)[name]
    leaves = [leaf(x) for x in operands]
    out = op(*leaves)
    assert out.shape[0] == (0 if name.startswith(("sddmm", "edge_softmax")) else num_dst)
    assert not out.any()
    for x, grad in zip(leaves, torch.autograd.grad(out.sum(), leaves), strict=True):
        assert grad.shape == x.shape
        assert not grad.any()


@pytest.mark.parametrize("name", NAMES)
def test_rows_without_features(graph: SparseGraph, name: str) -> None:
    op, operands = calls(torch.float32, graph, width=0)[name]
    leaves = [leaf(x) for x in operands]
    out = op(*leaves)
    for x, grad in zip(leaves, torch.autograd.grad(out.sum(), leaves), strict=True):
        assert grad.shape == x.shape
        assert grad.isfinite().all()


@pytest.mark.parametrize("reduce", ["sum", "mean", "max"])
def test_sources_whose_values_no_gradient_needs_are_not_kept(graph: SparseGraph, reduce: str) -> None:
    """A deep model would hold one copy of every layer's input otherwise."""
    leaves = leaf(rows(4, (2, 3), 1))
    x = leaves * 2
    freed = weakref.ref(x)
    constant = spmm(graph, x, rows(7, (2, 1), 2), reduce)
    copied = spmm(graph, x, None, reduce)
    weighted = spmm(graph, x, leaf(rows(7, (2, 1), 2)), reduce)
    del x
    gc.collect()
    assert freed() is not None, "the gradient of the weights needs the sources"
    del weighted
    gc.collect()
    assert freed() is None
    (constant.sum() + copied.sum()).backward()
    assert leaves.grad is not None


# dtypes


def test_mixed_dtypes_promote_as_in_pytorch(graph: SparseGraph) -> None:
    x, w = rows(4, (2, 3), 1, torch.float16), rows(7, (2, 1), 2, torch.float32)
    assert spmm(graph, x, w).dtype == torch.float32
    assert torch.equal(spmm(graph, x, w), spmm(graph, x.float(), w))
    assert spmm(graph, x.double(), w).dtype == torch.float64
    assert sddmm(graph, "add", x, rows(5, (2, 3), 1, torch.bfloat16)).dtype == torch.float32
    assert gat(graph, x, *(rows(n, (2,), n, torch.float64) for n in (4, 5))).dtype == torch.float16


def test_autocast_brings_mixed_operands_to_its_dtype(graph: SparseGraph) -> None:
    x, w = leaf(rows(4, (2, 3), 1, torch.bfloat16)), leaf(rows(7, (2, 1), 2, torch.float32))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = spmm(graph, x, w)
        assert out.dtype == torch.bfloat16
        assert torch.equal(out, spmm(graph, x, w.bfloat16()))
        assert spmm(graph, w=w).dtype == torch.float32
        assert edge_softmax(graph, w).dtype == torch.float32
        assert spmm(graph, x.double(), w).dtype == torch.float64
        assert gatv2(graph, x, rows(5, (2, 3), 3, torch.bfloat16), rows(2, (3,), 4, torch.float32)).dtype == out.dtype
        assert gat(graph, x, *(rows(n, (2,), n, torch.float32) for n in (4, 5))).dtype == out.dtype
    out.float().sum().backward()
    assert x.grad is not None
    assert w.grad is not None
    assert (x.grad.dtype, w.grad.dtype) == (torch.bfloat16, torch.float32)


def test_a_mean_of_float16_does_not_overflow_in_its_sum() -> None:
    graph = SparseGraph.from_coo(torch.zeros(300, dtype=torch.int64), torch.zeros(300, dtype=torch.int64), 1, 1)
    x = torch.full((1, 2), 1000.0, dtype=torch.float16)
    assert spmm(graph, x, reduce="mean").tolist() == [[1000.0, 1000.0]]
    assert spmm(graph, x).isinf().all()
    rows_ = torch.full((300, 2), 1000.0, dtype=torch.float16)
    assert segment_reduce(torch.tensor([0, 300]), rows_, "mean").tolist() == [[1000.0, 1000.0]]


def test_a_mean_of_bfloat16_divides_by_the_exact_count() -> None:
    """257 is no bfloat16."""
    graph = SparseGraph.from_coo(torch.zeros(257, dtype=torch.int64), torch.zeros(257, dtype=torch.int64), 1, 1)
    weights = torch.zeros(257, dtype=torch.bfloat16)
    weights[0] = 256.0
    out = spmm(graph, w=weights, reduce="mean")
    assert out.item() == torch.tensor(256.0 / 257.0).bfloat16().item() != 1.0


# What they refuse


def error_cases(graph: SparseGraph) -> list[tuple[Callable[[], Tensor], type[Exception], str]]:
    x, y = torch.randn(4, 2, 3), torch.randn(5, 2, 3)
    el, er = torch.randn(4, 2), torch.randn(5, 2)
    offsets = torch.tensor([0, 2, 4])
    dropout = EdgeDropout.from_call(0.5, seed=1, step=1, call_index=1, edge_keys=torch.arange(6))
    # Not `arange`, for which the first tensor without memory imports SymPy: a second in each process.
    keys = torch.empty(7, dtype=torch.int64, device="meta")
    elsewhere = EdgeDropout.from_call(0.5, seed=1, step=1, call_index=1, edge_keys=keys)
    return [
        (lambda: spmm(graph), ValueError, r"spmm needs x, w or both \(got neither\)"),
        (
            lambda: spmm(graph, x, reduce="prod"),
            ValueError,
            r"reduce must be one of sum, mean, max, min \(got 'prod'\)",
        ),
        (lambda: spmm(graph, y), ValueError, r"x must have one row per source, 4 \(got shape \(5, 2, 3\)\)"),
        (lambda: spmm(graph, x, x), ValueError, r"w must have one row per edge, 7 \(got shape \(4, 2, 3\)\)"),
        (lambda: spmm(graph, x[0, 0, 0]), ValueError, r"x must have one row per source, 4 \(got shape \(\)\)"),
        (
            lambda: spmm(graph, x, torch.randn(7, 3, 1)),
            ValueError,
            r"features of x and w must broadcast after the rows \(got x \(4, 2, 3\) and w \(7, 3, 1\)\)",
        ),
        (lambda: spmm(graph, x.int()), TypeError, r"x must be float16, .* or float64 \(got torch.int32\)"),
        (lambda: spmm(graph, x.to("meta")), ValueError, r"x must lie on the device of the graph, cpu \(got meta\)"),
        (
            lambda: sddmm(graph, "pow", x, y),
            ValueError,
            r"op must be one of add, sub, mul, div, dot, copy \(got 'pow'\)",
        ),
        (lambda: sddmm(graph, "add", x, y, "s"), ValueError, r"lhs_target must be one of u, v, e \(got 's'\)"),
        (lambda: sddmm(graph, "add", x, y, "u", "w"), ValueError, r"rhs_target must be one of u, v, e \(got 'w'\)"),
        (lambda: sddmm(graph, "add", x), ValueError, r"sddmm 'add' takes two operands \(got rhs None\)"),
        (lambda: sddmm(graph, "copy", x, y), ValueError, r"sddmm 'copy' takes one operand \(got rhs \(5, 2, 3\)\)"),
        (
            lambda: sddmm(graph, "add", y, y),
            ValueError,
            r"lhs must have one row per source, 4 \(got shape \(5, 2, 3\)\)",
        ),
        (
            lambda: sddmm(graph, "add", x, x),
            ValueError,
            r"rhs must have one row per destination, 5 \(got shape \(4, 2, 3\)\)",
        ),
        (
            lambda: sddmm(graph, "dot", x, y[..., :1]),
            ValueError,
            r"lhs and rhs must broadcast .* \(got lhs \(4, 2, 3\) and rhs \(5, 2, 1\)\)",
        ),
        (lambda: edge_softmax(graph, x), ValueError, r"logits must have one row per edge, 7"),
        (
            lambda: gat(graph, x[:, 0], el, er),
            ValueError,
            r"x must be \(rows, heads, features\) \(got shape \(4, 3\)\)",
        ),
        (lambda: gat(graph, x, el[:, :1], er), ValueError, r"el must be \(4, 2\) for x of shape .* \(got \(4, 1\)\)"),
        (lambda: gat(graph, x, el, y), ValueError, r"er must be \(5, 2\) for x of shape .* \(got \(5, 2, 3\)\)"),
        (lambda: gat(graph, x, el, er, dropout=dropout), ValueError, r"one key per edge, 7 \(got 6 edge_keys\)"),
        (
            lambda: gat(graph, x, el, er, dropout=elsewhere),
            ValueError,
            r"edge_keys must lie on the device of the graph, cpu \(got meta\)",
        ),
        (
            lambda: gatv2(graph, x, y[..., :2], x[0]),
            ValueError,
            r"must be \(S, H, D\) and \(N, H, D\) \(got \(4, 2, 3\) and \(5, 2, 2\)\)",
        ),
        (
            lambda: gatv2(graph, x, y, x[0, :1]),
            ValueError,
            r"attention must be \(2, 3\) for x_src of shape \(4, 2, 3\) \(got \(1, 3\)\)",
        ),
        (lambda: gatv2(graph, x, y, x[0].int()), TypeError, r"attention must be float16"),
        (lambda: segment_reduce(offsets, x, "prod"), ValueError, r"reduce must be one of sum, mean, max, min"),
        (
            lambda: segment_reduce(offsets.float(), x),
            TypeError,
            r"offsets must be int32 or int64 \(got torch.float32\)",
        ),
        (lambda: segment_reduce(offsets[:0], x), ValueError, r"offsets must be \(number of segments \+ 1,\)"),
        (lambda: segment_reduce(offsets, x.int()), TypeError, r"x must be floating \(got torch.int32\)"),
        (lambda: segment_reduce(offsets, x.to("meta")), ValueError, r"on the device of offsets, cpu"),
        (
            lambda: segment_reduce(offsets, y),
            ValueError,
            r"offsets must go from 0 to the number of rows, 5 \(got 0 to 4\)",
        ),
        (lambda: segment_reduce(offsets[1:], x), ValueError, r"number of rows, 4 \(got 2 to 4\)"),
    ]


@pytest.mark.parametrize("case", range(len(error_cases(make_graph("hand")))))
def test_errors_say_what_was_expected(graph: SparseGraph, case: int) -> None:
    call, error, message = error_cases(graph)[case]
    with pytest.raises(error, match=message):
        call()
