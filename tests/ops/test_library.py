# SPDX-License-Identifier: Apache-2.0
"""The registered ops as PyTorch sees them: opcheck, shapes without values, compiled graphs without breaks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

from dgl_hybrid.ops import EdgeDropout, SparseGraph, edge_softmax, gat, gatv2, sddmm, segment_reduce, spmm
from dgl_hybrid.ops.backend import BackendName, use_backend
from dgl_hybrid.ops.library import pack_dropout
from tests.ops.backend_checks import make_graph

OPS = torch.ops.dgl_hybrid


@pytest.fixture(params=["naive", "cpu"], autouse=True)
def backend(request: pytest.FixtureRequest) -> Iterator[BackendName]:
    with use_backend(request.param):
        yield request.param


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype).requires_grad_()


def mapped(call: object, move: Callable[[Tensor], Tensor]) -> object:
    if isinstance(call, Tensor):
        return move(call)
    if isinstance(call, (tuple, list)):
        return type(call)(mapped(part, move) for part in call)
    return call


def arguments(name: str, dtype: torch.dtype = torch.float32) -> list[tuple[object, ...]]:
    """Calls of one registered op on the graph of 4 sources, 5 destinations and 7 edges."""

    def random(*shape: int) -> Tensor:
        return leaf(*shape, dtype=dtype)

    graph = make_graph("hand")
    rows, out_rows = graph.in_edges.tensors(), graph.out_edges.tensors()
    in_order = make_graph("hand", permuted=False).in_edges.tensors()
    assert (len(rows), len(in_order)) == (3, 2)
    x, w, y = random(4, 2, 3), random(7, 2), random(5, 2, 3)
    sum_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    el, er = leaf(4, 2, dtype=sum_dtype), leaf(5, 2, dtype=sum_dtype)
    arg = OPS.spmm_select(rows, [], x.detach(), None, "max")[1]
    dropout = pack_dropout(EdgeDropout.from_call(0.5, seed=1, step=2, call_index=3, edge_keys=torch.arange(7) * 2**34))
    none, nothing = pack_dropout(None), (torch.empty(0), torch.empty(0))
    out, lse, *positive = OPS.gat(rows, [], x.detach(), el.detach(), er.detach(), 0.2, *none, True)
    offsets = torch.tensor([0, 3, 3, 7])
    # 4 rows of 6 columns in two blocks: (0, 1), (1, 5), (3, 0), (3, 1).
    by_row = [torch.tensor([0, 1, 2, 2, 4], dtype=torch.int32), torch.tensor([1, 5, 0, 1], dtype=torch.int32)]
    starts = torch.tensor([0, 0, 1, 1, 1, 1, 2, 3, 4, 4, 4, 4, 4], dtype=torch.int32)
    by_column = [starts, torch.tensor([0, 1, 3, 3], dtype=torch.int32)]
    values = random(4).detach()
    turned = random(3, 2).detach().t().requires_grad_()
    x6, x2, y3 = random(4, 6), random(4, 2), random(4, 3)
    factors, both = random(4, 1).detach(), [True, True]
    sparse = (by_row, by_column, values, values)
    table: dict[str, list[tuple[object, ...]]] = {
        "out_edges": [(rows, 4), (in_order, 4)],
        "out_neighbours": [(rows, 4), (in_order, 4)],
        "spmm_sum": [(rows, out_rows, x, w), (rows, [], x, None), (in_order, [], None, w)],
        "spmm_select": [(rows, out_rows, x, w, "max"), (rows, [], x, None, "min"), (in_order, [], None, w, "max")],
        "spmm_take": [(rows, out_rows, x, w, arg), (rows, [], x, None, arg)],
        "spmm_select_backward": [(rows, out_rows, y, w, arg), (rows, out_rows, y, None, arg)],
        "spmm_select_backward_edges": [(rows, [], y, x, arg)],
        "sddmm": [
            (rows, out_rows, x, y, "dot", "u", "v"),
            (rows, [], x, random(7, 2, 3), "mul", "u", "e"),
            (in_order, [], y, None, "copy", "v", "e"),
        ],
        "edge_softmax": [(rows, w), (in_order, w)],
        "edge_softmax_backward": [(rows, w, random(7, 2))],
        "gat": [(rows, out_rows, x, el, er, 0.2, *dropout, True), (in_order, [], x, el, er, 0.2, *none, False)],
        "gat_backward": [
            (rows, out_rows, x, el, er, out, lse, *positive, y, 0.2, *dropout),
            (rows, out_rows, x, el, er, out, lse, *nothing, y, 0.2, *dropout),
        ],
        "gatv2": [(rows, out_rows, x, y, random(2, 3), 0.2, *dropout), (in_order, [], x, y, random(2, 3), 0.2, *none)],
        "gatv2_backward": [(rows, out_rows, x, y, random(2, 3), out, lse, y, 0.2, *dropout)],
        "sparse_product": [
            (*sparse, random(6, 3), 2, None, None, False),
            (*sparse, random(6, 3), 2, random(4, 3), random(3), True),
        ],
        "sparse_product_transposed": [(*sparse, random(4, 3), 2)],
        "scaled_sum": [
            (rows, out_rows, x, random(4).detach(), True),
            (rows, [], x, random(5).detach(), False),
            (in_order, [], x.detach(), random(4).detach(), True),
        ],
        "row_products": [
            ([random(4, 6)], [random(6, 3)], None, None, None, False),
            ([random(4, 6), random(4, 2)], [random(6, 3), turned], factors, random(4, 3), random(3), True),
            ([random(4, 6).detach()], [random(6, 3)], None, None, random(3), True),
        ],
        "row_products_backward": [
            mapped(([x6, x2], [random(6, 3), turned], y3, None, None, [False, True], both, False), Tensor.detach),
            mapped(([x6], [random(6, 3)], y3, random(4, 3), factors, [True], [False], True), Tensor.detach),
            mapped(
                ([random(6, 4).t()], [random(6, 3)], random(3, 4).t(), random(4, 3), None, [True], [True], True),
                Tensor.detach,
            ),
        ],
        "biased_elu": [(random(4, 6), random(6)), (turned, None)],
        "biased_elu_backward": [mapped((random(4, 6), random(4, 6)), Tensor.detach)],
        "drop_rows": [
            (random(4, 6), torch.tensor([5, 2**40, 0, 5]), torch.tensor([-3, 2**62]), 0.4),
            (turned, torch.arange(2), torch.tensor([7, 8]), 1.0),
        ],
        "segment_sum": [(offsets, random(7, 2))],
        "segment_expand": [(offsets, random(3, 2), 7)],
        "segment_select": [(offsets, random(7, 2), "min")],
    }
    return table[name] if name else [(key,) for key in table]


NAMES = tuple(str(key) for (key,) in arguments(""))


def test_every_registered_op_is_checked_here() -> None:
    registered = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("dgl_hybrid::")]
    assert sorted(registered) == sorted(f"dgl_hybrid::{name}" for name in NAMES)


@pytest.mark.parametrize("backend", ["naive", pytest.param("cpu", marks=pytest.mark.slow)], indirect=True)
@pytest.mark.parametrize("name", NAMES)
def test_opcheck(name: str) -> None:
    for call in arguments(name):
        if name in ("gat_backward", "gatv2_backward"):  # whose gradient is a refusal
            call = mapped(call, Tensor.detach)  # type: ignore[assignment]
        results = torch.library.opcheck(getattr(OPS, name).default, call)
        assert set(results.values()) == {"SUCCESS"}
        assert len(results) >= 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", NAMES)
def test_shapes_without_values_are_those_with(name: str, dtype: torch.dtype) -> None:
    """On the meta device and as fake tensors: shape, dtype and strides of what the op really returns."""
    for call in arguments(name, dtype):
        op = getattr(OPS, name)
        real = op(*call)
        meta = op(*mapped(call, lambda x: x.to("meta")))  # type: ignore[misc]
        with FakeTensorMode() as mode:
            fake = op(*mapped(call, mode.from_tensor))  # type: ignore[misc]
        for r, m, f in zip(
            *(out if isinstance(out, (tuple, list)) else (out,) for out in (real, meta, fake)), strict=True
        ):
            assert (r.shape, r.dtype, r.stride()) == (m.shape, m.dtype, m.stride())
            assert (r.shape, r.dtype, r.stride()) == (f.shape, f.dtype, f.stride())
            assert m.is_meta
            assert f.device == r.device


def layers(graph: SparseGraph, dropout: EdgeDropout) -> Callable[..., Tensor]:
    """Every public op once."""

    def forward(x: Tensor, w: Tensor, el: Tensor, er: Tensor, attention: Tensor) -> Tensor:
        out = spmm(graph, x, w, "mean") + spmm(graph, x, None, "max") + spmm(graph, None, w, "min")
        alpha = edge_softmax(graph, sddmm(graph, "add", el, er))
        out = out + spmm(graph, x, alpha.unsqueeze(-1))
        out = out + gat(graph, x, el, er, dropout=dropout) + gatv2(graph, x, out, attention, dropout=dropout)
        products = sddmm(graph, "dot", x, out)
        return out + segment_reduce(graph.in_edges.indptr, products, "max")

    return forward


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_compiles_as_one_graph(compiler: str) -> None:
    hand = make_graph("hand")
    graph = SparseGraph(hand.in_edges, num_src=hand.num_src)  # edges by source not built yet
    dropout = EdgeDropout.from_call(0.5, seed=1, step=2, call_index=3)
    operands = [leaf(4, 2, 3), leaf(7, 2, 1), leaf(4, 2), leaf(5, 2), leaf(2, 3)]
    torch._dynamo.reset()
    compiled = torch.compile(layers(graph, dropout), backend=compiler, fullgraph=True)
    with torch.no_grad():
        inferred = compiled(*operands)
    assert not graph.has_out_edges
    out = compiled(*operands)
    assert graph.has_out_edges
    expected = layers(hand, dropout)(*operands)
    assert torch.equal(inferred, expected)
    assert torch.equal(out, expected)
    grads, expected_grads = (torch.autograd.grad(y.square().sum(), operands) for y in (out, expected))
    for got, wanted in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(got, wanted)  # AOT may add gradients of one operand in another order


def test_new_dropout_keys_and_new_graphs_of_one_shape_need_no_new_compilation() -> None:
    compilations = []

    def count(module: torch.fx.GraphModule, _example: list[Tensor]) -> Callable[..., object]:
        compilations.append(module)
        return module.forward

    def layer(graph: SparseGraph, x: Tensor, el: Tensor, er: Tensor, dropout: EdgeDropout) -> Tensor:
        return gat(graph, x, el, er, dropout=dropout)

    torch._dynamo.reset()
    compiled = torch.compile(layer, backend=count, fullgraph=True)
    x, el, er = (leaf(*shape).detach() for shape in ((4, 2, 3), (4, 2), (5, 2)))
    masks = []
    for step in range(5):
        graph = SparseGraph.from_coo(torch.tensor([step % 4, 2, 1, 3]), torch.tensor([4, 4, 2, 1]), 4, 5)
        dropout = EdgeDropout.from_call(0.5, seed=2**64 - 1, step=step, call_index=0)
        out = compiled(graph, x, el, er, dropout)
        assert torch.equal(out, gat(graph, x, el, er, dropout=dropout))
        masks.append(out)
    assert len({tuple(mask.flatten().tolist()) for mask in masks}) > 1
    assert len(compilations) == 1


def test_a_compiled_op_takes_other_sizes() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda graph, x: spmm(graph, x, reduce="mean"), backend="aot_eager", fullgraph=True, dynamic=True
    )
    for name in ("hand", "power-law"):
        graph = make_graph(name)
        x = leaf(graph.num_src, 6)
        out = compiled(graph, x)
        assert torch.equal(out, spmm(graph, x, reduce="mean"))
        (got,), (expected,) = (torch.autograd.grad(y.sum(), x) for y in (out, spmm(graph, x, reduce="mean")))
        assert torch.equal(got, expected)


@pytest.mark.parametrize("dropped", [False, True])
def test_gat_whose_backward_runs_on_another_backend(backend: BackendName, dropped: bool) -> None:
    """What the one keeps for its backward the other does not."""
    graph = make_graph("hand")
    x, el, er = (leaf(*shape, dtype=torch.float64) for shape in ((4, 2, 3), (4, 2), (5, 2)))
    dropout = EdgeDropout.from_call(0.5, seed=1, step=2, call_index=3) if dropped else None
    upstream = leaf(5, 2, 3, dtype=torch.float64).detach()
    out = gat(graph, x, el, er, dropout=dropout)
    expected = torch.autograd.grad(out, (x, el, er), upstream, retain_graph=True)
    with use_backend("cpu" if backend == "naive" else "naive"):
        found = torch.autograd.grad(out, (x, el, er), upstream)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_autocast_compiles_without_breaks() -> None:
    graph = make_graph("hand")
    x, w = leaf(4, 2, 3, dtype=torch.bfloat16).detach(), leaf(7, 2, 1).detach()
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, w: spmm(graph, x, w), backend="eager", fullgraph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = compiled(x, w)
        assert out.dtype == torch.bfloat16
        assert torch.equal(out, spmm(graph, x, w))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # by PyTorch's own forward mode
def test_forward_mode_is_refused() -> None:
    """A tangent was lost on the way, and what should have been a derivative was none."""
    graph = SparseGraph.from_coo(torch.tensor([0, 1]), torch.tensor([1, 0]), 2, 2)
    x = torch.ones(2, 3)
    with forward_ad.dual_level():
        assert spmm(graph, x=x).shape == (2, 3)
        with pytest.raises(NotImplementedError, match="no forward-mode derivative: use reverse mode"):
            spmm(graph, x=forward_ad.make_dual(x, torch.ones(2, 3)))
