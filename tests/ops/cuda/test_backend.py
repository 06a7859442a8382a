# SPDX-License-Identifier: Apache-2.0
"""Every op of the CUDA backend against the reference in float64: the shipped kernels and plans, run on this CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from dgl_hybrid.ops.backend import Backend, Reduce, Target
from dgl_hybrid.ops.cuda.backend import CudaBackend
from dgl_hybrid.ops.edge_dropout import EdgeDropout
from dgl_hybrid.ops.naive import NaiveBackend
from dgl_hybrid.ops.sparse_graph import Adjacency, SparseGraph
from tests.ops.cuda.fake_driver import FakeDriver
from tests.ops.cuda.host_gpu import HostLauncher, make_backend
from tests.ops.simt.build import needs_compiler

pytestmark = needs_compiler

TASK_ENTRIES = 8
TOLERANCES = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
SLOPE = 0.2

Outputs = tuple[Tensor | None, ...]


@pytest.fixture(scope="module")
def gpu(built_driver: FakeDriver) -> tuple[CudaBackend, HostLauncher]:
    return make_backend(built_driver, TASK_ENTRIES)


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """`torch.empty` gives NaN and the largest integers: an element that no kernel writes shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def make_graph(index_dtype: torch.dtype = torch.int32, *, permuted: bool = True, seed: int = 0) -> SparseGraph:
    """29 sources, 37 destinations: hubs on both sides, rows without entries, an edge twice, edge rows in any order."""
    generator = torch.Generator().manual_seed(seed)
    num_src, num_dst, num_edges = 29, 37, 260
    src = torch.randint(0, num_src - 2, (num_edges,), generator=generator)
    dst = torch.randint(3, num_dst - 1, (num_edges,), generator=generator)
    dst[:75], src[60:110] = 17, 5  # rows of ten and of seven tasks
    src[1], dst[1] = src[0], dst[0]
    dst[110:126] = 9  # a row whose length is a multiple of the task's, or nearly
    if not permuted:
        dst = dst.sort().values
    graph = SparseGraph.from_coo(src, dst, num_src, num_dst)
    assert (graph.in_edges.edge_ids is not None) == permuted
    in_edges, out_edges = (
        Adjacency.from_tensors([ids.to(index_dtype) for ids in adjacency.tensors()])
        for adjacency in (graph.in_edges, graph.out_edges)
    )
    return SparseGraph(in_edges, num_src=num_src, out_edges=out_edges)


@dataclass(frozen=True)
class Shape:
    """What chooses a specialisation."""

    heads: int = 4
    width: int = 8
    dtype: torch.dtype = torch.float32
    index_dtype: torch.dtype = torch.int32
    permuted: bool = True

    def __str__(self) -> str:
        order = "" if self.permuted else "-sorted"
        return f"{self.heads}x{self.width}-{str(self.dtype)[6:]}-{str(self.index_dtype)[6:]}{order}"


class Operands:
    """A graph and random operands for it; each call draws further ones, the same for the same shape."""

    def __init__(self, shape: Shape) -> None:
        self.shape, self.graph = shape, make_graph(shape.index_dtype, permuted=shape.permuted)
        self._generator = torch.Generator().manual_seed(7)

    @property
    def rows(self) -> Adjacency:
        return self.graph.in_edges

    @property
    def out_rows(self) -> Adjacency:
        return self.graph.out_edges

    def draw(self, *sizes: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(*sizes, generator=self._generator).to(dtype or self.shape.dtype)

    def u(self) -> Tensor:
        return self.draw(self.graph.num_src, self.shape.heads, self.shape.width)

    def v(self) -> Tensor:
        return self.draw(self.graph.num_dst, self.shape.heads, self.shape.width)

    def e(self) -> Tensor:
        return self.draw(self.graph.num_edges, self.shape.heads, self.shape.width)

    def w(self) -> Tensor:
        return self.draw(self.graph.num_edges, self.shape.heads)

    def per_node(self, target: Target) -> Tensor:
        """(., H) float32, as attention terms are."""
        count = self.graph.num_src if target == "u" else self.graph.num_dst
        return self.draw(count, self.shape.heads, dtype=torch.float32)

    def attention(self) -> Tensor:
        """(H, D), scaled as a layer initialises it: logits of tens amplify their own rounding in exp."""
        return self.draw(self.shape.heads, self.shape.width) / self.shape.width**0.5

    def operand(self, target: Target) -> Tensor:
        return {"u": self.u, "v": self.v, "e": self.e}[target]()


Run = Callable[[Backend, list[Tensor]], Outputs]
Case = Callable[[Operands], tuple[list[Tensor], Run]]


def spmm_case(reduce: Reduce, *, x: bool = True, w: bool = True) -> Case:
    def case(o: Operands) -> tuple[list[Tensor], Run]:
        tensors = [*([o.u()] if x else []), *([o.w()] if w else [])]
        return tensors, lambda b, t: b.spmm(o.rows, t[0] if x else None, t[-1] if w else None, reduce)

    return case


def select_case(*, w: bool, backward: str) -> Case:
    """The winners are those of the operands as rounded: the same for the backend and the reference."""

    def case(o: Operands) -> tuple[list[Tensor], Run]:
        x, weights, grad = o.u(), o.w() if w else None, o.v()
        _, arg = NaiveBackend().spmm(o.rows, x, weights, "max")
        assert arg is not None
        if backward == "nodes":
            tensors = [grad, *([weights] if weights is not None else [])]
            return tensors, lambda b, t: (b.spmm_select_backward(o.out_rows, t[0], arg, t[1] if w else None),)
        return [grad, x], lambda b, t: (b.spmm_select_backward_edges(o.rows, t[0], arg, t[1]),)

    return case


def copy_e_select_backward(o: Operands) -> tuple[list[Tensor], Run]:
    w = o.w()
    out, arg = NaiveBackend().spmm(o.rows, None, w, "max")
    assert arg is not None
    return [o.draw(*out.shape)], lambda b, t: (b.spmm_select_backward_edges(o.rows, t[0], arg, None),)


def sddmm_case(op: str, lhs: Target, rhs: Target | None) -> Case:
    def case(o: Operands) -> tuple[list[Tensor], Run]:
        left = o.operand(lhs)
        if rhs is None:
            return [left], lambda b, t: (b.sddmm(o.rows, t[0], None, "copy", lhs, "v"),)
        right = o.operand(rhs)
        if op == "div":
            right = right.sign() * (right.abs() + 0.5)
        return [left, right], lambda b, t: (b.sddmm(o.rows, t[0], t[1], op, lhs, rhs),)  # type: ignore[arg-type]

    return case


def softmax(o: Operands) -> tuple[list[Tensor], Run]:
    return [3 * o.w()], lambda b, t: (b.edge_softmax(o.rows, t[0]),)


def softmax_backward(o: Operands) -> tuple[list[Tensor], Run]:
    out = NaiveBackend().edge_softmax(o.rows, 3 * o.w())
    return [out, o.w()], lambda b, t: (b.edge_softmax_backward(o.rows, t[0], t[1]),)


def dropout_of(o: Operands, *, p: float = 0.4, keys: bool = True) -> EdgeDropout:
    edge_keys = torch.randint(0, 2**40, (o.graph.num_edges,), generator=torch.Generator().manual_seed(3))
    return EdgeDropout.from_call(p, seed=1, step=2, call_index=3, edge_keys=edge_keys if keys else None)


def gat_case(*, dropout: bool) -> Case:
    def case(o: Operands) -> tuple[list[Tensor], Run]:
        chosen = dropout_of(o) if dropout else None
        tensors = [o.u(), o.per_node("u"), o.per_node("v")]
        return tensors, lambda b, t: b.gat(o.rows, t[0], t[1], t[2], SLOPE, chosen)[:2]

    return case


def gat_backward_case(*, dropout: bool) -> Case:
    def case(o: Operands) -> tuple[list[Tensor], Run]:
        chosen = dropout_of(o, keys=False) if dropout else None
        x, el, er = o.u(), o.per_node("u"), o.per_node("v")
        out, lse, positive = NaiveBackend().gat(o.rows, x, el, er, SLOPE, chosen, for_backward=True)
        assert positive is None

        def run(b: Backend, t: list[Tensor]):  # type: ignore[no-untyped-def]
            x, el, er, out, lse, grad = t
            return b.gat_backward(o.rows, o.out_rows, x, el, er, out, lse, None, grad, SLOPE, chosen)

        return [x, el, er, out, lse, o.v()], run

    return case


def gatv2_case(*, dropout: bool) -> Case:
    def case(o: Operands) -> tuple[list[Tensor], Run]:
        chosen = dropout_of(o, keys=False) if dropout else None
        tensors = [o.u(), o.v(), o.attention()]
        return tensors, lambda b, t: b.gatv2(o.rows, t[0], t[1], t[2], SLOPE, chosen)

    return case


def gatv2_backward_case(*, dropout: bool) -> Case:
    def case(o: Operands) -> tuple[list[Tensor], Run]:
        chosen = dropout_of(o) if dropout else None
        x_src, x_dst, attention = o.u(), o.v(), o.attention()
        out, lse = NaiveBackend().gatv2(o.rows, x_src, x_dst, attention, SLOPE, chosen)
        tensors = [x_src, x_dst, attention, out, lse, o.v()]
        return tensors, lambda b, t: b.gatv2_backward(o.rows, o.out_rows, *t, SLOPE, chosen)

    return case


def segment_case(reduce: Reduce) -> Case:
    def case(o: Operands) -> tuple[list[Tensor], Run]:
        x = o.draw(o.graph.num_edges, o.shape.heads * o.shape.width)
        return [x], lambda b, t: b.segment_reduce(o.rows.indptr, t[0], reduce)

    return case


CASES: dict[str, Case] = {
    "copy_u sum": spmm_case("sum", w=False),
    "copy_u max": spmm_case("max", w=False),
    "u_mul_e sum": spmm_case("sum"),
    "u_mul_e min": spmm_case("min"),
    "copy_e sum": spmm_case("sum", x=False),
    "copy_e max": spmm_case("max", x=False),
    "copy_u max backward": select_case(w=False, backward="nodes"),
    "u_mul_e max backward": select_case(w=True, backward="nodes"),
    "u_mul_e max backward to edges": select_case(w=True, backward="edges"),
    "copy_e max backward": copy_e_select_backward,
    "u_add_v": sddmm_case("add", "u", "v"),
    "e_sub_v": sddmm_case("sub", "e", "v"),
    "v_mul_u": sddmm_case("mul", "v", "u"),
    "u_div_e": sddmm_case("div", "u", "e"),
    "u_dot_v": sddmm_case("dot", "u", "v"),
    "copy v": sddmm_case("copy", "v", None),
    "edge_softmax": softmax,
    "edge_softmax backward": softmax_backward,
    "gat": gat_case(dropout=False),
    "gat dropout": gat_case(dropout=True),
    "gat backward": gat_backward_case(dropout=False),
    "gat backward dropout": gat_backward_case(dropout=True),
    "gatv2": gatv2_case(dropout=False),
    "gatv2 dropout": gatv2_case(dropout=True),
    "gatv2 backward": gatv2_backward_case(dropout=False),
    "gatv2 backward dropout": gatv2_backward_case(dropout=True),
    "segment sum": segment_case("sum"),
    "segment max": segment_case("max"),
}


def check(gpu: tuple[CudaBackend, HostLauncher], fake: FakeDriver, case: Case, shape: Shape) -> None:
    operands = Operands(shape)
    tensors, run = case(operands)
    fake.set(seed=1)
    outputs = run(gpu[0], tensors)
    fake.set(seed=99)
    again = run(gpu[0], tensors)
    expected = run(NaiveBackend(), [tensor.double() for tensor in tensors])
    assert len(outputs) == len(expected)
    for output, repeated, reference in zip(outputs, again, expected):
        if output is None or repeated is None or reference is None:
            assert output is None
            assert repeated is None
            assert reference is None
            continue
        assert torch.equal(output, repeated), "another schedule of the threads gives other bits"
        assert output.shape == reference.shape
        if not output.is_floating_point():
            assert output.dtype == shape.index_dtype
            assert torch.equal(output.long(), reference.long())
            continue
        tolerance = TOLERANCES[output.dtype]
        norm = reference.norm().item()
        assert norm > 0
        assert (output.double() - reference).norm().item() <= tolerance * norm
        # Element by element: as large as the largest error of one rounding step may be, of the largest element.
        torch.testing.assert_close(
            output.double(), reference, rtol=4 * tolerance, atol=4 * tolerance * reference.abs().max().item()
        )


@pytest.mark.parametrize("name", CASES)
def test_every_op_equals_the_reference(name: str, gpu: tuple[CudaBackend, HostLauncher], fake: FakeDriver) -> None:
    check(gpu, fake, CASES[name], Shape())


F16 = Shape(dtype=torch.float16, index_dtype=torch.int64)
BF16 = Shape(heads=2, width=16, dtype=torch.bfloat16, permuted=False)
ODD = Shape(heads=3, width=5)
FLAT = Shape(heads=6, width=1)
WIDE = Shape(heads=2, width=132)
WIDEST = Shape(heads=1, width=1028)
MANY_HEADS = Shape(heads=40, width=1)
SHAPES = [Shape(permuted=False), F16, BF16, ODD, FLAT, WIDE, WIDEST, MANY_HEADS]

CHOSEN = [
    ("copy_u sum", BF16),
    ("u_mul_e sum", FLAT),  # a weight per column
    ("u_mul_e min", F16),
    ("copy_u max backward", FLAT),
    ("u_dot_v", ODD),
    ("edge_softmax", MANY_HEADS),  # two tiles of heads
    ("edge_softmax backward", F16),
    ("gat", WIDE),  # three tiles of columns
    ("gat backward", BF16),
    ("gatv2", ODD),
    ("gatv2 backward", F16),
]


@pytest.mark.parametrize(("name", "shape"), CHOSEN, ids=str)
def test_other_shapes_and_dtypes(
    name: str, shape: Shape, gpu: tuple[CudaBackend, HostLauncher], fake: FakeDriver
) -> None:
    check(gpu, fake, CASES[name], shape)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_every_op_in_every_shape(
    name: str, shape: Shape, gpu: tuple[CudaBackend, HostLauncher], fake: FakeDriver
) -> None:
    check(gpu, fake, CASES[name], shape)


@pytest.mark.parametrize("name", ["u_mul_e sum", "edge_softmax backward", "gat", "gat backward", "gatv2 backward"])
def test_no_row_is_cut(name: str, built_driver: FakeDriver, fake: FakeDriver) -> None:
    """The usual case has no list of tasks, no partial results and no merge."""
    gpu = make_backend(built_driver, 256)
    check(gpu, fake, CASES[name], Shape())
    assert not [kernel for kernel, _, _ in gpu[1].launched if "merge" in kernel or "split" in kernel]


def test_rows_that_are_cut_are_merged(gpu: tuple[CudaBackend, HostLauncher], fake: FakeDriver) -> None:
    gpu[1].launched.clear()
    check(gpu, fake, CASES["u_mul_e sum"], Shape())
    assert [kernel for kernel, _, _ in gpu[1].launched] == ["spmm_fwd_kernel", "sum_merge_kernel"] * 2


def misaligned(tensor: Tensor) -> Tensor:
    """The same values, one element behind an address that suits wide loads."""
    base = torch.zeros(tensor.numel() + 64, dtype=tensor.dtype)
    start = -base.data_ptr() % 64 // tensor.element_size() + 1
    view = base[start : start + tensor.numel()].view(tensor.shape)
    return view.copy_(tensor)


@pytest.mark.parametrize("name", ["copy_u max", "u_mul_e sum", "u_dot_v", "gat backward", "gatv2"])
def test_operands_at_odd_addresses(name: str, gpu: tuple[CudaBackend, HostLauncher], fake: FakeDriver) -> None:
    """A view of a larger tensor need not begin where a GPU can load 16 bytes at once."""

    def case(o: Operands) -> tuple[list[Tensor], Run]:
        tensors, run = CASES[name](o)
        return [misaligned(tensor) for tensor in tensors], run

    gpu[1].launched.clear()
    check(gpu, fake, case, Shape())
    # d_er sums what the backend has allocated itself, so where it likes.
    read = [options for _, options, _ in gpu[1].launched if "-DSOURCE=SOURCE_EDGES" not in options]
    assert read
    assert all("-DVEC=1" in options for options in read)


EMPTY = {
    "no edges": (5, 4, 0, 2, 3),
    "no destinations": (5, 0, 0, 2, 3),
    "no nodes": (0, 0, 0, 2, 3),
    "no heads": (3, 2, 4, 0, 3),
    "no features": (3, 2, 4, 2, 0),
}


@pytest.mark.parametrize("sizes", EMPTY.values(), ids=EMPTY)
def test_nothing_to_do(
    sizes: tuple[int, int, int, int, int], gpu: tuple[CudaBackend, HostLauncher], fake: FakeDriver
) -> None:
    num_src, num_dst, num_edges, heads, width = sizes
    src, dst = torch.arange(num_edges) % max(1, num_src), torch.arange(num_edges) % max(1, num_dst)
    graph = SparseGraph.from_coo(src, dst, num_src, num_dst)
    rows, out_rows = graph.in_edges, graph.out_edges
    u, v, e = (torch.ones(count, heads, width) for count in (num_src, num_dst, num_edges))
    w, el, er = (torch.ones(count, heads) for count in (num_edges, num_src, num_dst))
    attention = torch.ones(heads, width)

    def run(b: Backend, wide: Callable[[Tensor], Tensor]) -> Iterator[Tensor | None]:
        x, y, edges, weights, left, right, a = (wide(tensor) for tensor in (u, v, e, w, el, er, attention))
        for reduce in ("sum", "max"):
            yield from b.spmm(rows, x, None, reduce)
            yield from b.spmm(rows, x, weights, reduce)
            yield from b.spmm(rows, None, weights, reduce)
            yield from b.segment_reduce(rows.indptr, weights, reduce)
        _, arg = b.spmm(rows, x, weights, "max")
        assert arg is not None
        yield b.spmm_select_backward(out_rows, y, arg, weights)
        yield b.spmm_select_backward_edges(rows, y, arg, x)
        yield b.sddmm(rows, x, edges, "mul", "u", "e")
        yield b.sddmm(rows, x, y, "dot", "u", "v")
        softmax_out = b.edge_softmax(rows, weights)
        yield softmax_out
        yield b.edge_softmax_backward(rows, softmax_out, weights)
        out, lse, positive = b.gat(rows, x, left, right, SLOPE, None, for_backward=True)
        yield from (out, lse)
        yield from b.gat_backward(rows, out_rows, x, left, right, out, lse, positive, y, SLOPE, None)
        out, lse = b.gatv2(rows, x, y, a, SLOPE, None)
        yield from (out, lse)
        yield from b.gatv2_backward(rows, out_rows, x, y, a, out, lse, y, SLOPE, None)

    found = list(run(gpu[0], lambda tensor: tensor))
    expected = list(run(NaiveBackend(), lambda tensor: tensor.double()))
    for number, (output, reference) in enumerate(zip(found, expected)):
        if output is None or reference is None:
            assert output is reference
            continue
        assert output.shape == reference.shape, number
        assert torch.equal(torch.isnan(output), torch.isnan(reference)), number
        torch.testing.assert_close(output.double(), reference.double(), rtol=1e-6, atol=1e-6)


def test_missing_operands(gpu: tuple[CudaBackend, HostLauncher]) -> None:
    graph = make_graph()
    with pytest.raises(ValueError, match=r"spmm needs x, w or both \(got neither\)"):
        gpu[0].spmm(graph.in_edges, None, None, "sum")
    with pytest.raises(ValueError, match=r"sddmm 'dot' needs two operands \(got rhs None\)"):
        gpu[0].sddmm(graph.in_edges, torch.ones(29, 1, 1), None, "dot", "u", "v")


def test_dtype_the_kernels_lack(gpu: tuple[CudaBackend, HostLauncher]) -> None:
    with pytest.raises(TypeError, match=r"the CUDA kernels take .* \(got torch.float64\)"):
        gpu[0].spmm(make_graph().in_edges, torch.ones(29, 1, 4, dtype=torch.float64), None, "sum")
