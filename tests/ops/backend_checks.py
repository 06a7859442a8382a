# SPDX-License-Identifier: Apache-2.0
"""What every backend must pass: each method against references written here, row by row, in float64.

The references share nothing with `ops/naive.py`: they loop over the rows of the graph and leave gradients to PyTorch's
autograd. A check takes a backend and a `Case`, calls the method twice on poisoned memory, and compares element by
element. Usage, in a test of a backend:

    @pytest.mark.parametrize("case", CASES, ids=str)
    def test_spmm(case): check_spmm(MyBackend(), case)
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dgl_hybrid.ops.backend import Backend, PositiveSums, Reduce
from dgl_hybrid.ops.edge_dropout import EdgeDropout
from dgl_hybrid.ops.sparse_graph import Adjacency, SparseGraph
from dgl_hybrid.training.dropout import replicated_dropout

TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Norm-wise over a result, relative to the reference on the same (rounded) operands."""

SLOPE = 0.2


@dataclass(frozen=True)
class Case:
    """One graph with one shape of operands."""

    graph: str
    dtype: torch.dtype = torch.float32
    heads: int = 1
    width: int = 8
    index_dtype: torch.dtype = torch.int32
    permuted: bool = True
    """Whether edge tensors are in another order than the entries."""

    def __str__(self) -> str:
        kind = "permuted" if self.permuted else "in-order"
        dtypes = f"{self.dtype}-{self.index_dtype}".replace("torch.", "")
        return f"{self.graph}-{dtypes}-{self.heads}x{self.width}-{kind}"


SHAPES = ((1, 1), (1, 7), (1, 16), (1, 33), (1, 128), (2, 3), (3, 8), (4, 32), (8, 1), (5, 20))
GRAPHS = ("hand", "power-law", "hub", "no-edges", "no-destinations", "nothing")
CASES = (
    *(Case("power-law", torch.float32, heads, width) for heads, width in SHAPES),
    *(Case("power-law", dtype, 4, 16) for dtype in (torch.float64, torch.float16, torch.bfloat16)),
    *(Case("power-law", dtype, 1, 65) for dtype in (torch.float64, torch.float16, torch.bfloat16)),
    *(Case(graph, torch.float32, 2, 12) for graph in GRAPHS if graph != "power-law"),
    *(Case("hub", dtype, 1, 40) for dtype in (torch.float64, torch.float16, torch.bfloat16)),
    *(Case("power-law", torch.float32, heads, width) for heads, width in ((1, 0), (3, 0), (0, 4))),
    Case("power-law", torch.float32, 4, 8, torch.int64),
    Case("hub", torch.float32, 1, 32, torch.int64, permuted=False),
    Case("power-law", torch.float32, 4, 8, permuted=False),
    Case("hand", torch.float64, 1, 4, permuted=False),
    # Several blocks of columns, and more heads than a block has columns.
    *(Case("hub", dtype, 3, 90) for dtype in (torch.float32, torch.float64)),
    *(Case("hub", dtype, 140, 1) for dtype in (torch.float32, torch.float64)),
)


@functools.cache
def make_graph(name: str, *, index_dtype: torch.dtype = torch.int32, permuted: bool = True) -> SparseGraph:
    """A small graph with what goes wrong in large ones: rows without entries, a hub, self-loops, repeated edges."""
    generator = torch.Generator().manual_seed(len(name))
    sizes = {
        "hand": (4, 5),
        "power-law": (60, 50),
        "hub": (900, 40),
        "no-edges": (3, 6),
        "no-destinations": (5, 0),
        "nothing": (0, 0),
    }
    num_src, num_dst = sizes[name]
    if name == "hand":  # destinations 1 and 4 have no in-edges; 2 -> 2 is a self-loop, 0 -> 3 comes twice
        src, dst = torch.tensor([1, 0, 3, 0, 2, 0, 1]), torch.tensor([0, 3, 3, 3, 2, 0, 2])
    elif name == "power-law":
        src = (num_src * torch.rand(700, generator=generator) ** 2.5).long()
        dst = (num_dst * torch.rand(700, generator=generator) ** 2.0).long()
        src, dst = (torch.where(ids % 7 == 6, ids - 1, ids) for ids in (src, dst))  # leaves rows empty on both sides
    elif name == "hub":  # one row with 5000 entries, one source with most of the others
        src = torch.cat([torch.randint(num_src, (5000,), generator=generator), torch.full((300,), 7)])
        dst = torch.cat([torch.full((5000,), 3), torch.randint(num_dst, (300,), generator=generator)])
    else:
        src = dst = torch.empty(0, dtype=torch.int64)
    if permuted:
        order = torch.randperm(len(src), generator=generator)
        src, dst = src[order], dst[order]
    else:
        order = torch.argsort(dst, stable=True)
        src, dst = src[order], dst[order]
    graph = SparseGraph.from_coo(src, dst, num_src, num_dst)
    graph.validate()
    if index_dtype == graph.index_dtype:
        return graph
    return SparseGraph(_as(graph.in_edges, index_dtype), num_src=num_src, out_edges=_as(graph.out_edges, index_dtype))


def check_spmm(backend: Backend, case: Case, *, device: str = "cpu") -> None:
    """copy_u, copy_e and u_mul_e with per-head weights; sum, max and min with their args."""
    graph, x, w = _spmm_operands(case, ties=False)
    full = _random((graph.num_edges, case.heads * case.width), case.dtype, 5)
    for reduce in ("sum", "max", "min"):
        for operands in ((x, None), (x, w), (None, full), (x.reshape(len(x), case.heads * case.width, 1), full)):
            _check_spmm_once(backend, graph, *operands, reduce, device)


def check_add_sums(backend: Backend, case: Case, *, device: str = "cpu") -> None:
    """Sums with and without weights are added to the rows that are named, and to no others."""
    graph, x, w = _spmm_operands(case, ties=False)
    generator = torch.Generator().manual_seed(11)
    targets = torch.randperm(2 * graph.num_dst + 3, generator=generator)[: graph.num_dst].sort().values
    before = _random((2 * graph.num_dst + 3, case.heads, case.width), case.dtype, 12)
    for weights in (None, w):
        expected, _ = reference_spmm(graph, x, weights, "sum")
        wanted = before.double().index_add(0, targets, expected.double())
        into, where, rows, values, factors = _on(device, before, targets, graph.in_edges, x, weights)

        def added() -> Tensor:
            out: Tensor = into.clone()  # noqa: B023
            backend.add_sums(out, where, rows, values, factors)  # noqa: B023
            return out

        got = _twice(added)
        _compare("added sums", got, wanted, case.dtype)
        untouched = torch.ones(len(before), dtype=torch.bool)
        untouched[targets] = False
        assert torch.equal(got.cpu()[untouched], before[untouched])


def check_scaled_sums(backend: Backend, case: Case, *, device: str = "cpu") -> None:
    """Factors of the rows that are summed, of the sums, of both and of neither; of sums that are added, too."""
    graph, x, _ = _spmm_operands(case, ties=False)
    of_sources, of_rows = (_random((n,), case.dtype, n + 7) for n in (graph.num_src, graph.num_dst))
    targets = torch.arange(graph.num_dst)
    before = _random((graph.num_dst, case.heads, case.width), case.dtype, 13)
    for sources, sums in ((of_sources, None), (None, of_rows), (of_sources, of_rows), (None, None)):
        # Rounded where kernels of half precision round.
        rows = x if sources is None else x.double() * sources.double().view(-1, 1, 1)
        expected, _ = reference_spmm(graph, rows, None, "sum")
        expected = expected.double() if sums is None else expected.double() * sums.double().view(-1, 1, 1)
        moved = _on(device, graph.in_edges, x, sources, sums)
        got = _twice(lambda: backend.scaled_sums(*moved))  # noqa: B023
        assert got.dtype == case.dtype
        _compare("scaled sums", got, expected, case.dtype)
        if sources is not None:
            continue
        into, where, adjacency, values, factors = _on(device, before, targets, graph.in_edges, x, sums)

        def added() -> Tensor:
            out: Tensor = into.clone()  # noqa: B023
            backend.add_sums(out, where, adjacency, values, None, factors)  # noqa: B023
            return out

        _compare("added scaled sums", _twice(added), before.double() + expected, case.dtype)


def check_spmm_ties(backend: Backend, case: Case, *, device: str = "cpu") -> None:
    """Of equal extremes the first in-edge wins, and a NaN before everything; infinities are values as others."""
    graph, x, w = _spmm_operands(case, ties=True)
    if x.numel():
        x.view(-1)[:: max(1, x.numel() // 7)] = float("nan")
        x.view(-1)[1 :: max(1, x.numel() // 5)] = float("-inf")
        x.view(-1)[2 :: max(1, x.numel() // 5)] = float("inf")
    for reduce in ("max", "min"):
        _check_spmm_once(backend, graph, x, None, reduce, device)
        _check_spmm_once(backend, graph, None, x.new_zeros(graph.num_edges, case.heads), reduce, device)
        _check_spmm_once(backend, graph, x.nan_to_num(nan=0.0, posinf=2.0, neginf=-2.0), w.round(), reduce, device)


def check_spmm_select_backward(backend: Backend, case: Case, *, device: str = "cpu") -> None:
    """Both gradients of max, with and without weights, from the args of the reference."""
    graph, x, w = _spmm_operands(case, ties=True)
    grad = _random((graph.num_dst, case.heads, case.width), case.dtype, 8)
    for weights in (None, w):
        _, arg = reference_spmm(graph, x, weights, "max")
        assert arg is not None
        arg = arg.to(case.index_dtype)
        x64 = _leaf(x)
        w64 = None if weights is None else _leaf(weights)
        _taken(graph, x64, w64, arg).backward(grad.double())
        got = _twice(lambda: backend.spmm_select_backward(*_on(device, graph.out_edges, grad, arg, weights)))  # noqa: B023
        _compare("dx of max", got, x64.grad, case.dtype)
        if w64 is not None:
            got = _twice(lambda: backend.spmm_select_backward_edges(*_on(device, graph.in_edges, grad, arg, x)))  # noqa: B023
            _compare("dw of max", got, w64.grad, case.dtype)
            # Rows that lose may be infinite, as masked ones are: what they are multiplied by is 0.
            lost = torch.ones(len(x), dtype=torch.bool, device=x.device)
            lost[endpoints(graph)["u"][arg[arg >= 0].long()]] = False
            masked = torch.where(lost[:, None, None], float("-inf"), x)
            got = _twice(lambda: backend.spmm_select_backward_edges(*_on(device, graph.in_edges, grad, arg, masked)))  # noqa: B023
            _compare("dw of max beside masked rows", got, w64.grad, case.dtype)
            drawn = torch.zeros(weights.shape, dtype=torch.bool)
            heads = torch.arange(case.heads)[:, None].expand(arg.shape)
            drawn[arg[arg >= 0].long(), heads[arg >= 0]] = True
            infinite = torch.where(drawn, weights, float("inf"))
            got = _twice(lambda: backend.spmm_select_backward(*_on(device, graph.out_edges, grad, arg, infinite)))  # noqa: B023
            _compare("dx of max beside infinite weights", got, x64.grad, case.dtype)
    edges = _random((graph.num_edges, case.heads), case.dtype, 4).round()
    _, arg = reference_spmm(graph, None, edges, "min")
    assert arg is not None
    arg = arg.to(case.index_dtype)
    edges64 = _leaf(edges)
    edge_grad = _random((graph.num_dst, case.heads, 1), case.dtype, 9)
    _taken(graph, None, edges64, arg).backward(edge_grad.double())
    got = _twice(lambda: backend.spmm_select_backward_edges(*_on(device, graph.in_edges, edge_grad, arg, None)))
    _compare("dw of min of edges", got, edges64.grad, case.dtype)


def check_sddmm(backend: Backend, case: Case, *, device: str = "cpu", third: int | None = None) -> None:
    """Every op on every pair of targets; of a third of those, each op with each target on each side."""
    targets = ("u", "v", "e")
    graph = make_graph(case.graph, index_dtype=case.index_dtype, permuted=case.permuted)
    ends = endpoints(graph)
    counts = {"u": graph.num_src, "v": graph.num_dst, "e": graph.num_edges}
    for i, lhs_target in enumerate(targets):
        lhs = _random((counts[lhs_target], case.heads, case.width), case.dtype, 1)
        if third in (None, i):
            got = _twice(lambda: backend.sddmm(*_on(device, graph.in_edges, lhs, None, "copy", lhs_target, "v")))  # noqa: B023
            _compare(f"copy {lhs_target}", got, lhs.double()[ends[lhs_target]], case.dtype)
        for j, rhs_target in enumerate(targets):
            rhs = _random((counts[rhs_target], case.heads, case.width), case.dtype, 2)
            rhs = torch.where(rhs.abs() < 0.25, 0.25, rhs)  # a divisor near 0 would amplify roundings
            left, right = lhs.double()[ends[lhs_target]], rhs.double()[ends[rhs_target]]
            expected = {
                "add": left + right,
                "sub": left - right,
                "mul": left * right,
                "div": left / right,
                "dot": torch.einsum("ehd,ehd->eh", left, right),
            }
            for k, (op, reference) in enumerate(expected.items()):
                if third not in (None, (i + j + k) % 3):
                    continue
                arguments = _on(device, graph.in_edges, lhs, rhs, op, lhs_target, rhs_target)
                got = _twice(lambda: backend.sddmm(*arguments))  # noqa: B023
                _compare(f"{lhs_target} {op} {rhs_target}", got, reference, case.dtype)


def check_edge_softmax(backend: Backend, case: Case, *, device: str = "cpu") -> None:
    """Forward and backward, with logits of a size that overflows exp unless the largest is subtracted."""
    graph = make_graph(case.graph, index_dtype=case.index_dtype, permuted=case.permuted)
    for scale in (1.0, 100.0):
        logits = _random((graph.num_edges, case.heads), case.dtype, 3) * scale
        reference = torch.zeros_like(logits, dtype=torch.float64)
        for edges in in_edges_of(graph):
            reference[edges] = torch.softmax(logits.double()[edges], dim=0)
        out = _twice(lambda: backend.edge_softmax(*_on(device, graph.in_edges, logits)))  # noqa: B023
        _compare("edge_softmax", out, reference, case.dtype)
    grad = _random((graph.num_edges, case.heads), case.dtype, 6)
    expected = torch.zeros_like(reference)
    for edges in in_edges_of(graph):
        a, g = out.cpu().double()[edges], grad.double()[edges]
        expected[edges] = a * (g - (a * g).sum(0))
    got = _twice(lambda: backend.edge_softmax_backward(*_on(device, graph.in_edges, out, grad)))
    # The difference cancels: errors are those of its terms.
    _compare("edge_softmax_backward", got, expected, case.dtype, scale=_rms(out.cpu().double() * grad.double()))


def check_gat(backend: Backend, case: Case, *, device: str = "cpu") -> None:
    """Forward, log-sum-exp and the three gradients, without dropout, with it, and with everything dropped."""
    graph = make_graph(case.graph, index_dtype=case.index_dtype, permuted=case.permuted)
    sum_dtype = torch.float64 if case.dtype == torch.float64 else torch.float32
    x = _random((graph.num_src, case.heads, case.width), case.dtype, 1)
    el, er = (_random((n, case.heads), sum_dtype, n + 2) for n in (graph.num_src, graph.num_dst))
    grad = _random((graph.num_dst, case.heads, case.width), case.dtype, 4)
    for dropout, factors in dropouts(graph.num_edges, case.heads):
        _check_gat_once(backend, case, graph, (x, el, er), grad, dropout, factors, sum_dtype, device)


def _check_gat_once(
    backend: Backend,
    case: Case,
    graph: SparseGraph,
    operands: tuple[Tensor, Tensor, Tensor],
    grad: Tensor,
    dropout: EdgeDropout | None,
    factors: Tensor,
    sum_dtype: torch.dtype,
    device: str,
) -> None:
    ends = endpoints(graph)
    x64, el64, er64 = (_leaf(operand) for operand in operands)
    logits = F.leaky_relu(el64[ends["u"]] + er64[ends["v"]], SLOPE)
    expected = reference_attention(graph, x64, logits, factors, grad.double())
    expected_grads = torch.autograd.grad(expected.out, (x64, el64, er64), grad.double())

    given = [_unless_at_an_edge(x, ends[where]) for x, where in zip(operands, "uuv", strict=True)]
    rows, out_rows, x, el, er, grad_, kept = _on(device, graph.in_edges, graph.out_edges, *given, grad, dropout)
    out, lse, *sums = _twice(lambda: _attended(backend, rows, x, el, er, kept))
    positive = PositiveSums(*sums) if sums else None
    alone, _, nothing = backend.gat(rows, x, el, er, SLOPE, kept)
    assert nothing is None
    assert torch.equal(alone.nan_to_num(), out.nan_to_num()), "what is kept for the backward changes the forward"
    assert lse.dtype == sum_dtype
    _compare("gat", out, expected.out, case.dtype)
    _compare("lse of gat", lse, expected.lse, sum_dtype)
    grads = _twice(lambda: backend.gat_backward(rows, out_rows, x, el, er, out, lse, positive, grad_, SLOPE, kept))
    scales = (
        0.0,
        _rms(_added(expected.logit_scale, ends["u"], graph.num_src)),
        _rms(_added(expected.logit_scale, ends["v"], graph.num_dst)),
    )
    for name, got, wanted, like, scale in zip(("dx", "d_el", "d_er"), grads, expected_grads, operands, scales):
        assert got.dtype == like.dtype
        terms = expected.value_terms if name == "dx" else None
        _compare(f"{name} of gat", got, wanted, case.dtype, scale=scale, terms=terms)


def _attended(
    backend: Backend, rows: Adjacency, x: Tensor, el: Tensor, er: Tensor, dropout: EdgeDropout | None
) -> tuple[Tensor, ...]:
    """What gat returns for its backward, without structure."""
    out, lse, positive = backend.gat(rows, x, el, er, SLOPE, dropout, for_backward=True)
    assert (positive is not None) == backend.keeps_positive_sums
    return out, lse, *(positive or ())


def check_gatv2(backend: Backend, case: Case, *, device: str = "cpu") -> None:
    """As `check_gat`."""
    graph = make_graph(case.graph, index_dtype=case.index_dtype, permuted=case.permuted)
    sum_dtype = torch.float64 if case.dtype == torch.float64 else torch.float32
    shape = (case.heads, case.width)
    x_src, x_dst = (_random((n, *shape), case.dtype, n + 1) for n in (graph.num_src, graph.num_dst))
    attention = _random(shape, case.dtype, 3) / max(1.0, math.sqrt(case.width))
    grad = _random((graph.num_dst, *shape), case.dtype, 4)
    for dropout, factors in dropouts(graph.num_edges, case.heads):
        _check_gatv2_once(backend, case, graph, (x_src, x_dst, attention), grad, dropout, factors, sum_dtype, device)


def _check_gatv2_once(
    backend: Backend,
    case: Case,
    graph: SparseGraph,
    operands: tuple[Tensor, Tensor, Tensor],
    grad: Tensor,
    dropout: EdgeDropout | None,
    factors: Tensor,
    sum_dtype: torch.dtype,
    device: str,
) -> None:
    ends = endpoints(graph)
    src64, dst64, attention64 = (_leaf(operand) for operand in operands)
    activated = F.leaky_relu(src64[ends["u"]] + dst64[ends["v"]], SLOPE)
    expected = reference_attention(graph, src64, (activated * attention64).sum(-1), factors, grad.double())
    expected_grads = torch.autograd.grad(expected.out, (src64, dst64, attention64), grad.double())

    given = [_unless_at_an_edge(x, ends[where]) for x, where in zip(operands[:2], "uv", strict=True)]
    moved = _on(device, graph.in_edges, graph.out_edges, *given, operands[2], grad, dropout)
    rows, out_rows, x_src, x_dst, attention, grad_, kept = moved
    out, lse = _twice(lambda: backend.gatv2(rows, x_src, x_dst, attention, SLOPE, kept))
    assert lse.dtype == sum_dtype
    _compare("gatv2", out, expected.out, case.dtype)
    _compare("lse of gatv2", lse, expected.lse, sum_dtype)
    grads = _twice(
        lambda: backend.gatv2_backward(rows, out_rows, x_src, x_dst, attention, out, lse, grad_, SLOPE, kept)
    )
    terms = expected.logit_scale.unsqueeze(-1)
    by_sums = terms * attention64.detach().abs()
    scales = (
        _rms(_added(by_sums, ends["u"], graph.num_src)),
        _rms(_added(by_sums, ends["v"], graph.num_dst)),
        _rms((terms * activated.detach().abs()).sum(0)),
    )
    names = ("dx_src", "dx_dst", "d_attention")
    for name, got, wanted, like, scale in zip(names, grads, expected_grads, operands, scales):
        assert got.dtype == like.dtype
        value_terms = expected.value_terms if name == "dx_src" else None
        _compare(f"{name} of gatv2", got, wanted, case.dtype, scale=scale, terms=value_terms)


def check_segment_reduce(backend: Backend, case: Case, *, device: str = "cpu") -> None:
    """The rows of the graph as segments, sum, max and min with their args."""
    graph = make_graph(case.graph, index_dtype=case.index_dtype, permuted=False)
    offsets = graph.in_edges.indptr
    x = (_random((graph.num_edges, case.heads * case.width), case.dtype, 1) * 2).round() / 2
    for reduce in ("sum", "max", "min"):
        expected, expected_arg = reference_spmm(graph, None, x, reduce)
        moved = _on(device, offsets, x, reduce)
        out, arg = _twice(lambda: backend.segment_reduce(*moved))  # noqa: B023
        _compare(f"segment {reduce}", out, expected.squeeze(-1), case.dtype)
        if expected_arg is None:
            assert arg is None
        else:
            assert arg is not None
            assert arg.dtype == offsets.dtype
            assert torch.equal(arg.cpu().long(), expected_arg.squeeze(-1))


CHECKS: tuple[Callable[..., None], ...] = (
    check_spmm,
    check_add_sums,
    check_scaled_sums,
    check_spmm_ties,
    check_spmm_select_backward,
    check_sddmm,
    check_edge_softmax,
    check_gat,
    check_gatv2,
    check_segment_reduce,
)


# References


@functools.cache
def in_edges_of(graph: SparseGraph) -> list[list[int]]:
    """For each destination the rows of its edges in the edge tensors, in in-edge order."""
    starts = graph.in_edges.indptr.tolist()
    ids = range(graph.num_edges) if graph.in_edges.edge_ids is None else graph.in_edges.edge_ids.tolist()
    return [list(ids[begin:end]) for begin, end in itertools.pairwise(starts)]


@functools.cache
def endpoints(graph: SparseGraph) -> dict[str, Tensor]:
    """By edge row: its source "u", destination "v" and itself "e"."""
    sources = torch.full((graph.num_edges,), -1)
    destinations = torch.full((graph.num_edges,), -1)
    neighbours = iter(graph.in_edges.indices.tolist())
    for v, edges in enumerate(in_edges_of(graph)):
        for e in edges:
            sources[e], destinations[e] = next(neighbours), v
    return {"u": sources, "v": destinations, "e": torch.arange(graph.num_edges)}


def reference_spmm(
    graph: SparseGraph, x: Tensor | None, w: Tensor | None, reduce: Reduce
) -> tuple[Tensor, Tensor | None]:
    """(N, H, D) float64 and, for max and min, the winning edge rows int64."""
    sources = endpoints(graph)["u"]
    if x is None:
        assert w is not None
        messages = w.double().unsqueeze(-1)
    else:
        messages = x.double()[sources]
        if w is not None:
            messages = messages * w.double().unsqueeze(-1)
    out = torch.zeros(graph.num_dst, *messages.shape[1:], dtype=torch.float64)
    if reduce == "sum":
        for v, edges in enumerate(in_edges_of(graph)):
            out[v] = messages[edges].sum(0)
        return out, None
    # Ties are decided by values as the kernel sees them: products rounded to its dtype of accumulation.
    dtype = (w if x is None else x).dtype  # type: ignore[union-attr]
    seen = messages if dtype == torch.float64 else messages.float().double()
    arg = torch.full(out.shape, -1)
    find = np.argmax if reduce == "max" else np.argmin  # the first of equals, the first NaN before all
    for v, edges in enumerate(in_edges_of(graph)):
        if edges and out[v].numel():
            first = torch.from_numpy(np.asarray(find(seen[edges].numpy(), axis=0)))
            arg[v] = torch.tensor(edges)[first]
            out[v] = messages[edges].gather(0, first[None])[0]
    return out, arg


@dataclass(frozen=True)
class ReferenceAttention:
    out: Tensor
    """(N, H, D), differentiable."""
    lse: Tensor
    """(N, H)."""
    logit_scale: Tensor
    """(E, H): size of the two terms whose difference is the gradient of a logit. They nearly cancel, so roundings are
    to be measured against them."""
    value_terms: Tensor
    """(S, H, D): sum of the absolute terms of the gradient of the sources through the values."""


def reference_attention(
    graph: SparseGraph, x: Tensor, logits: Tensor, factors: Tensor, grad: Tensor
) -> ReferenceAttention:
    """From float64 sources (S, H, D), logits (E, H), dropout factors (E, H) and the gradient of the result."""
    sources = endpoints(graph)["u"]
    # Connects the result with every operand also where there are no edges.
    nothing = 0.0 * (x.sum() + logits.sum())
    out = [nothing + x.new_zeros(0, *x.shape[1:])]
    lse = [logits.new_zeros(0, logits.shape[1])]
    scale, value_terms = torch.zeros_like(factors), torch.zeros_like(x.detach())
    for v, edges in enumerate(in_edges_of(graph)):
        alpha = torch.softmax(logits[edges], dim=0)
        values = x[sources[edges]]
        out.append(nothing + torch.einsum("eh,ehd->hd", alpha * factors[edges], values)[None])
        lse.append(
            torch.logsumexp(logits[edges], dim=0, keepdim=True) if edges else logits.new_zeros(1, lse[0].shape[1])
        )
        along_edges = torch.einsum("hd,ehd->eh", grad[v].abs(), values.abs()) * factors[edges]
        along_row = (grad[v] * out[-1][0]).abs().sum(-1)
        scale[edges] = (alpha * (along_edges + along_row)).detach()
        terms = (alpha * factors[edges]).detach().unsqueeze(-1) * grad[v].abs()
        value_terms.index_add_(0, sources[edges], terms)
    return ReferenceAttention(torch.cat(out), torch.cat(lse).detach(), scale, value_terms)


def dropouts(num_edges: int, num_heads: int) -> Iterator[tuple[EdgeDropout | None, Tensor]]:
    """Dropouts with the factors (E, H) that `replicated_dropout` applies for the same call."""
    ones = torch.ones(num_edges, num_heads, dtype=torch.float64)
    yield None, ones
    call = {"seed": 2**63 + 11, "step": 3, "call_index": 5}
    keys = torch.arange(num_edges) * 2**33 + 17
    yield EdgeDropout.from_call(0.4, **call, edge_keys=keys), replicated_dropout(ones, 0.4, keys, **call)
    yield EdgeDropout.from_call(0.75, **call), replicated_dropout(ones, 0.75, torch.arange(num_edges), **call)
    yield EdgeDropout.from_call(1.0, **call), torch.zeros_like(ones)


# Helpers


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """`torch.empty` gives NaN (the largest integer) inside, so an element that nobody writes is seen."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = fills  # type: ignore[attr-defined]


def _check_spmm_once(
    backend: Backend, graph: SparseGraph, x: Tensor | None, w: Tensor | None, reduce: Reduce, device: str
) -> None:
    operand = w if x is None else x
    assert operand is not None
    name = f"{reduce} of {'e' if x is None else 'u' if w is None else 'u * e'}"
    moved = _on(device, graph.in_edges, x, w, reduce)
    out, arg = _twice(lambda: backend.spmm(*moved))
    expected, expected_arg = reference_spmm(graph, x, w, reduce)
    _compare(name, out, expected, operand.dtype)
    if expected_arg is None:
        assert arg is None, name
    else:
        assert arg is not None, name
        assert arg.dtype == graph.index_dtype, name
        assert torch.equal(arg.cpu().long(), expected_arg), name


def _taken(graph: SparseGraph, x: Tensor | None, w: Tensor | None, arg: Tensor) -> Tensor:
    """(N, H, D): the messages that won, differentiable."""
    edges = arg.long().clamp(min=0)
    out = (arg >= 0).double()
    if graph.num_edges == 0 or arg.numel() == 0:
        # Nothing is taken; zero gradients for the operands all the same.
        return out + sum(0.0 * operand.sum() for operand in (x, w) if operand is not None)
    if x is not None:
        out = out * x.gather(0, endpoints(graph)["u"][edges])
    if w is not None:
        out = out * w.unsqueeze(-1).expand(-1, -1, arg.shape[2]).gather(0, edges)
    return out


def _spmm_operands(case: Case, *, ties: bool) -> tuple[SparseGraph, Tensor, Tensor]:
    graph = make_graph(case.graph, index_dtype=case.index_dtype, permuted=case.permuted)
    x = _random((graph.num_src, case.heads, case.width), case.dtype, 1)
    w = _random((graph.num_edges, case.heads), case.dtype, 2)
    return (graph, x.round(), w.round()) if ties else (graph, x, w)


def _leaf(x: Tensor) -> Tensor:
    return x.detach().to(torch.float64, copy=True).requires_grad_()


def _random(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def _on(device: str, *arguments: object) -> list:
    moved: list[object] = []
    for argument in arguments:
        if isinstance(argument, Tensor):
            moved.append(argument.to(device))
        elif isinstance(argument, Adjacency):
            moved.append(Adjacency.from_tensors([ids.to(device) for ids in argument.tensors()]))
        elif isinstance(argument, EdgeDropout) and argument.edge_keys is not None:
            moved.append(EdgeDropout(argument.p, argument.keys, argument.edge_keys.to(device)))
        else:
            moved.append(argument)
    return moved


def _as(adjacency: Adjacency, dtype: torch.dtype) -> Adjacency:
    return Adjacency.from_tensors([ids.to(dtype) for ids in adjacency.tensors()])


def _twice(call: Callable):  # type: ignore[type-arg,no-untyped-def]
    """Calls on poisoned memory, and again: the results must have the same bits."""
    with poisoned_memory():
        first, second = call(), call()
    for a, b in zip(*((r if isinstance(r, tuple) else (r,)) for r in (first, second)), strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert a.is_contiguous(), "results must be contiguous"
            assert a.dtype == b.dtype
            same = torch.equal(a.nan_to_num(nan=77.0), b.nan_to_num(nan=77.0)) and torch.equal(a.isnan(), b.isnan())
            assert same, "two calls with the same operands differ"
    return first


def _unless_at_an_edge(x: Tensor, ends: Tensor) -> Tensor:
    """NaN in rows that no edge has: nothing may come of them, and no gradient but zero go to them."""
    return torch.full_like(x, math.nan).index_copy(0, ends, x[ends])


def _added(by_edge: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    return torch.zeros(num_rows, *by_edge.shape[1:], dtype=by_edge.dtype).index_add(0, rows, by_edge)


def _rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt()) if x.numel() else 0.0


def _compare(
    name: str,
    got: Tensor,
    expected: Tensor | None,
    dtype: torch.dtype,
    *,
    scale: float = 0.0,
    terms: Tensor | None = None,
) -> None:
    """Norm-wise within the dtype's tolerance, and no element off by more than a few times what rounding explains.

    Args:
        scale: Size of the terms of sums that cancel, if larger than the results.
        terms: Shape of the result: sums of absolute terms, where a few results have far larger ones than the others.
    """
    assert expected is not None
    assert got.shape == expected.shape, f"{name}: shape {tuple(got.shape)} instead of {tuple(expected.shape)}"
    assert got.dtype in TOLERANCES, name
    shape, got, expected = got.shape, got.detach().cpu().double(), expected.detach()
    assert torch.equal(got.isnan(), expected.isnan()), f"{name}: NaN in the wrong places"
    got, expected = got.flatten(), expected.flatten()
    terms = None if terms is None else terms.expand(shape).flatten()
    finite = expected.isfinite()
    if not bool(finite.all() and got.isfinite().all()):  # picking elements takes longer than many a kernel
        assert torch.equal(got.isinf(), expected.isinf()), f"{name}: infinities in the wrong places"
        assert torch.equal(got[got.isinf()], expected[got.isinf()]), f"{name}: infinities of the wrong sign"
        got, expected = got[finite], expected[finite]
        terms = None if terms is None else terms[finite]
    if got.numel() == 0:
        return
    size = max(_rms(expected), scale)
    allowed = 10 * TOLERANCES[dtype] * (expected.abs() + size + (0.0 if terms is None else terms))
    error, tolerance = (got - expected).abs(), TOLERANCES[dtype]
    relative = _rms(error) / size if size else _rms(error)
    assert relative <= tolerance, f"{name}: relative error {relative:.2e}, allowed {tolerance:.0e}"
    worst = (error - allowed).argmax()
    assert error[worst] <= allowed[worst], (
        f"{name}: element {float(got[worst])!r} instead of {float(expected[worst])!r}"
    )
