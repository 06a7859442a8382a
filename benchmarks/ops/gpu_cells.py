# SPDX-License-Identifier: Apache-2.0
"""What `benchmarks.ops.gpu` measures: graphs, ops, their least traffic, their gate and what they are compared with.

Device-independent, so that every line of it runs on a CPU in the tests.

[Note: floors]
Bytes that an op must move, over the measured bandwidth of a copy. S, N rows of x and out, E edges, F columns, H heads,
b bytes per feature, i per index. *Gather*: every edge reads its source row from memory, as if no row were ever found
in a cache. *Compulsory*: every row is read once, as if all were. A kernel may beat the first on a graph with locality.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dgl_hybrid import ops
from dgl_hybrid.ops import SparseGraph
from dgl_hybrid.ops.backend import use_backend
from dgl_hybrid.ops.sparse_graph import Adjacency

HEADS, SLOPE = 4, 0.2
TOLERANCES = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
DTYPES = tuple(TOLERANCES)
DISTRIBUTIONS = ("power-law", "uniform", "local")

Run = Callable[[], object]


class GateError(AssertionError):
    """A result is wrong: nothing is timed."""


def make_graph(
    distribution: str, num_nodes: int, degree: int, device: torch.device, *, num_heavy: int = 0, seed: int = 0
) -> SparseGraph:
    """A graph with edges by destination, in the order of the edge tensors.

    Args:
        distribution: "power-law": both ends fall off as a power, so that one row holds about a hundredth of all edges;
            "uniform": both ends anywhere; "local": neighbours are near in memory.
        num_nodes: Sources, and destinations.
        degree: Mean number of in-edges.
        device: Where it lies.
        num_heavy: Edges more into one destination.
        seed: Of the random numbers.
    """
    generator = torch.Generator(device).manual_seed(seed)
    num_edges = num_nodes * degree

    def uniform() -> Tensor:
        return torch.rand(num_edges, generator=generator, device=device, dtype=torch.float64)

    if distribution == "power-law":
        # Ids are shuffled: hubs lie anywhere.
        shuffled = [torch.randperm(num_nodes, generator=generator, device=device) for _ in range(2)]
        dst = shuffled[0][(num_nodes * uniform() ** 3).long()]
        src = shuffled[1][(num_nodes * uniform() ** 2).long()]
    elif distribution == "uniform":
        dst, src = ((num_nodes * uniform()).long() for _ in range(2))
    elif distribution == "local":
        dst = (num_nodes * uniform()).long()
        offsets = 64 * torch.randn(num_edges, generator=generator, device=device)
        src = (dst + offsets.long()) % num_nodes
    else:
        raise ValueError(f"distribution must be one of {', '.join(DISTRIBUTIONS)} (got {distribution!r})")
    dst[:num_heavy] = num_nodes // 2
    dst, order = dst.sort(stable=True)
    return SparseGraph.from_coo(src[order], dst, num_nodes, num_nodes)


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the traffic of an op depends on."""

    num_src: int
    num_dst: int
    num_edges: int
    num_read: int
    """Sources that some edge reads."""
    width: int
    heads: int
    feature_bytes: int
    index_bytes: int


def sizes_of(graph: SparseGraph, width: int, dtype: torch.dtype) -> Sizes:
    return Sizes(
        num_src=graph.num_src,
        num_dst=graph.num_dst,
        num_edges=graph.num_edges,
        num_read=int((graph.in_edges.indices.bincount(minlength=graph.num_src) > 0).sum()),
        width=width,
        heads=HEADS,
        feature_bytes=dtype.itemsize,
        index_bytes=graph.index_dtype.itemsize,
    )


@dataclass(frozen=True)
class Op:
    """One op as a user calls it.

    Args:
        name: In tables.
        roles: Of the operands: "u", "v", "e" rows, or "p" parameters.
        draw: Makes the operands of a graph.
        call: The op.
        role: Of the result's rows.
        floors: Bytes `(gather, compulsory)`, forward and, if it is timed, backward.
        backward: Whether the backward is timed with the forward.
    """

    name: str
    roles: str
    draw: Callable[[SparseGraph, int, torch.dtype, torch.Generator], list[Tensor]]
    call: Callable[..., Tensor]
    role: str
    floors: Callable[[Sizes], tuple[int, int]]
    backward: bool = False
    is_attention: bool = False
    """Its gradients are differences that nearly cancel, in half precision by way of a result that is kept rounded: a
    difference may be off by twice what its terms may."""
    sparse: Callable[..., Callable[[], Tensor] | None] | None = field(default=None, repr=False)
    """Makes the same with torch.sparse, prepared; None if it cannot."""


def _randn(generator: torch.Generator, dtype: torch.dtype, *sizes: int) -> Tensor:
    return torch.randn(*sizes, generator=generator, device=generator.device, dtype=torch.float32).to(dtype)


def _rows(graph: SparseGraph, role: str) -> int:
    return {"u": graph.num_src, "v": graph.num_dst, "e": graph.num_edges}[role]


def _features(roles: str, *, heads: bool = True) -> Callable[..., list[Tensor]]:
    """Draws rows of features for some roles, (., H, D) or (., F); role "w" is one weight per edge and head."""

    def draw(graph: SparseGraph, width: int, dtype: torch.dtype, generator: torch.Generator) -> list[Tensor]:
        shape = (HEADS, width // HEADS) if heads else (width,)
        return [
            _randn(generator, dtype, graph.num_edges, HEADS, 1)
            if role == "w"
            else _randn(generator, dtype, _rows(graph, role), *shape)
            for role in roles
        ]

    return draw


def _draw_products(graph: SparseGraph, width: int, dtype: torch.dtype, generator: torch.Generator) -> list[Tensor]:
    """Of few enough bits that float32 holds every product exactly: the reference must see the same ties."""
    return [operand.half().to(dtype) for operand in _features("uw")(graph, width, dtype, generator)]


def _draw_gat(graph: SparseGraph, width: int, dtype: torch.dtype, generator: torch.Generator) -> list[Tensor]:
    (x,) = _features("u")(graph, width, dtype, generator)
    return [x, *(_randn(generator, torch.float32, _rows(graph, role), HEADS) for role in "uv")]


def _draw_gatv2(graph: SparseGraph, width: int, dtype: torch.dtype, generator: torch.Generator) -> list[Tensor]:
    attention = _randn(generator, dtype, HEADS, width // HEADS) / (width // HEADS) ** 0.5
    return [*_features("uv")(graph, width, dtype, generator), attention]


def _structure(s: Sizes) -> int:
    return s.num_edges * s.index_bytes + s.num_dst * s.index_bytes


def _spmm_floors(s: Sizes, *, weights: int = 0, winners: bool = False) -> tuple[int, int]:
    row = s.width * s.feature_bytes
    once = s.num_dst * row + _structure(s) + s.num_edges * weights * s.feature_bytes
    once += s.num_dst * s.width * s.index_bytes * winners
    return once + s.num_edges * row, once + s.num_read * row


def _dot_floors(s: Sizes) -> tuple[int, int]:
    row = s.width * s.feature_bytes
    once = s.num_dst * row + _structure(s) + s.num_edges * s.heads * s.feature_bytes
    return once + s.num_edges * row, once + s.num_read * row


def _softmax_floors(s: Sizes) -> tuple[int, int]:
    once = 2 * s.num_edges * s.heads * s.feature_bytes + s.num_dst * s.index_bytes
    return once, once


def _gat_floors(s: Sizes) -> tuple[int, int]:
    """Forward: sources with their term, edges; out, er and lse. Float32 terms."""
    row, terms = s.width * s.feature_bytes, 4 * s.heads
    once = s.num_dst * (row + 2 * terms) + _structure(s)
    return once + s.num_edges * (row + terms), once + s.num_read * (row + terms)


def _gat_both_floors(s: Sizes) -> tuple[int, int]:
    """With a backward by source, which gathers gradients and three terms and writes a number per edge and head."""
    row, terms = s.width * s.feature_bytes, 4 * s.heads
    gather, compulsory = _gat_floors(s)
    once = s.num_src * (2 * row + 2 * terms)  # x, dx, el, d_el
    once += s.num_dst * (2 * row + 5 * terms)  # grad and out for the third term; er, lse, the terms; d_er
    once += s.num_edges * (2 * terms + 2 * s.index_bytes) + s.num_src * s.index_bytes  # d_logit twice, the structure
    return gather + once + s.num_edges * (row + 3 * terms), compulsory + once + s.num_dst * (row + 3 * terms)


def _gatv2_floors(s: Sizes) -> tuple[int, int]:
    row = s.width * s.feature_bytes
    once = s.num_dst * (2 * row + 4 * s.heads) + _structure(s)
    return once + s.num_edges * row, once + s.num_read * row


def _gatv2_both_floors(s: Sizes) -> tuple[int, int]:
    """The backward gathers gradients and destinations by source, then sources by destination."""
    row, terms = s.width * s.feature_bytes, 4 * s.heads
    gather, compulsory = _gatv2_floors(s)
    once = s.num_src * 2 * row + s.num_dst * (4 * row + 4 * terms)
    once += s.num_edges * (2 * terms + 3 * s.index_bytes) + (s.num_src + s.num_dst) * s.index_bytes
    by_source, by_destination = 2 * row + 2 * terms, row
    return (
        gather + once + s.num_edges * (by_source + by_destination),
        compulsory + once + s.num_dst * by_source + s.num_read * by_destination,
    )


def _sparse_matrix(graph: SparseGraph, values: Tensor) -> Tensor:
    rows = graph.in_edges
    assert rows.edge_ids is None, "graphs here have their edges by destination"
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")
        warnings.filterwarnings("ignore", "Sparse invariant checks are implicitly disabled")
        return torch.sparse_csr_tensor(
            rows.indptr, rows.indices, values, (graph.num_dst, graph.num_src), check_invariants=False
        )


def _sparse_copy(graph: SparseGraph, x: Tensor) -> Callable[[], Tensor]:
    matrix = _sparse_matrix(graph, x.new_ones(graph.num_edges))
    return lambda: matrix @ x


def _sparse_weighted(graph: SparseGraph, x: Tensor, w: Tensor) -> Callable[[], Tensor]:
    """One product per head, of contiguous operands that are ready."""
    matrices = [_sparse_matrix(graph, w[:, head, 0].contiguous()) for head in range(HEADS)]
    parts = [x[:, head].contiguous() for head in range(HEADS)]
    return lambda: torch.stack([matrix @ part for matrix, part in zip(matrices, parts)], 1)


def _sparse_dot(graph: SparseGraph, x: Tensor, y: Tensor) -> Callable[[], Tensor] | None:
    if x.dtype != torch.float32:
        return None  # sampled_addmm has no half precisions
    matrix = _sparse_matrix(graph, x.new_zeros(graph.num_edges))
    pairs = [(y[:, head].contiguous(), x[:, head].t().contiguous()) for head in range(HEADS)]
    return lambda: torch.stack([torch.sparse.sampled_addmm(matrix, *pair).values() for pair in pairs], 1)[..., None]


def _gat(graph: SparseGraph, x: Tensor, el: Tensor, er: Tensor) -> Tensor:
    return ops.gat(graph, x, el, er, negative_slope=SLOPE)


def _gatv2(graph: SparseGraph, x: Tensor, y: Tensor, attention: Tensor) -> Tensor:
    return ops.gatv2(graph, x, y, attention, negative_slope=SLOPE)


def _dot(graph: SparseGraph, x: Tensor, y: Tensor) -> Tensor:
    return ops.sddmm(graph, "dot", x, y)


def _copy_max(graph: SparseGraph, x: Tensor) -> Tensor:
    return ops.spmm(graph, x, reduce="max")


TIMED: tuple[Op, ...] = (
    Op("copy_u sum", "u", _features("u", heads=False), ops.spmm, "v", _spmm_floors, sparse=_sparse_copy),
    Op(
        *("u_mul_e sum", "ue", _features("uw"), ops.spmm, "v"),
        floors=lambda s: _spmm_floors(s, weights=s.heads),
        sparse=_sparse_weighted,
    ),
    Op(
        *("copy_u max", "u", _features("u", heads=False), _copy_max, "v"),
        floors=lambda s: _spmm_floors(s, winners=True),
    ),
    Op("u_dot_v", "uv", _features("uv"), _dot, "e", _dot_floors, sparse=_sparse_dot),
    Op("edge_softmax", "e", _features("w"), ops.edge_softmax, "e", _softmax_floors),
    Op("gat", "uuv", _draw_gat, _gat, "v", _gat_floors, is_attention=True),
    Op("gat + backward", "uuv", _draw_gat, _gat, "v", _gat_both_floors, backward=True, is_attention=True),
    Op("gatv2 + backward", "uvp", _draw_gatv2, _gatv2, "v", _gatv2_both_floors, backward=True, is_attention=True),
)


def _dropped(graph: SparseGraph, x: Tensor, el: Tensor, er: Tensor) -> Tensor:
    dropout = ops.EdgeDropout.from_call(0.3, seed=1, step=2, call_index=3)
    return ops.gat(graph, x, el, er, negative_slope=SLOPE, dropout=dropout)


def _dropped_v2(graph: SparseGraph, x: Tensor, y: Tensor, attention: Tensor) -> Tensor:
    dropout = ops.EdgeDropout.from_call(0.3, seed=1, step=2, call_index=3)
    return ops.gatv2(graph, x, y, attention, negative_slope=SLOPE, dropout=dropout)


def _nothing(sizes: Sizes) -> tuple[int, int]:
    return 0, 0


def _checked(name: str, roles: str, call: Callable[..., Tensor], draw: Any = None, role: str = "v") -> Op:
    return Op(name, roles, draw or _features(roles.replace("e", "w")), call, role, _nothing)


CHECKED: tuple[Op, ...] = (
    *TIMED,
    _checked("u_mul_e mean", "ue", lambda g, x, w: ops.spmm(g, x, w, "mean")),
    _checked("u_mul_e max", "ue", lambda g, x, w: ops.spmm(g, x, w, "max"), _draw_products),
    _checked("u_mul_e min", "ue", lambda g, x, w: ops.spmm(g, x, w, "min"), _draw_products),
    _checked("copy_e sum", "e", lambda g, w: ops.spmm(g, None, w)),
    _checked("copy_e max", "e", lambda g, w: ops.spmm(g, None, w, "max")),
    _checked("u_mul_e elementwise", "ue", ops.spmm, _features("ue")),
    _checked("u_add_v", "uv", lambda g, x, y: ops.sddmm(g, "add", x, y), role="e"),
    _checked("e_sub_v", "ev", lambda g, x, y: ops.sddmm(g, "sub", x, y, "e", "v"), _features("ev"), "e"),
    _checked("v_mul_u", "vu", lambda g, x, y: ops.sddmm(g, "mul", x, y, "v", "u"), role="e"),
    # Denominators of at least one: errors of the operands' rounding are not to be amplified.
    _checked("u_div_v", "uv", lambda g, x, y: ops.sddmm(g, "div", x, 1 + y * y), role="e"),
    _checked("copy u", "u", lambda g, x: ops.sddmm(g, "copy", x, None, "u"), role="e"),
    Op("gat, dropout", "uuv", _draw_gat, _dropped, "v", _nothing, is_attention=True),
    Op("gatv2, dropout", "uvp", _draw_gatv2, _dropped_v2, "v", _nothing, is_attention=True),
    _checked("segment sum", "e", lambda g, x: ops.segment_reduce(g.in_edges.indptr, x), _features("e")),
    _checked("segment max", "e", lambda g, x: ops.segment_reduce(g.in_edges.indptr, x, "max"), _features("e")),
)


def evaluate(op: Op, graph: SparseGraph, operands: Sequence[Tensor], grad: Tensor | None) -> list[Tensor]:
    """The result and, given the gradient of the result, those of the operands."""
    if grad is None:
        return [op.call(graph, *operands).detach()]
    leaves = [operand.detach().requires_grad_() for operand in operands]
    out = op.call(graph, *leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))]


def check(op: Op, graph: SparseGraph, width: int, dtype: torch.dtype) -> float:
    """Forward and every gradient against float64, and twice the same bits.

    Returns:
        The largest error, relative to the norm of the reference.
    Raises:
        GateError: Names the op and what is wrong.
    """
    generator = torch.Generator(graph.device).manual_seed(width)
    operands = op.draw(graph, width, dtype, generator)
    with torch.no_grad():
        shape = op.call(graph, *operands).shape
    grad = _randn(generator, dtype, *shape)
    found, again = (evaluate(op, graph, operands, grad) for _ in range(2))
    with use_backend("naive"):
        expected = evaluate(op, graph, [operand.double() for operand in operands], grad.double())
    what = f"{op.name}, width {width}, {str(dtype)[6:]}"
    worst = 0.0
    for number, (value, repeated, reference) in enumerate(zip(found, again, expected, strict=True)):
        part = "result" if number == 0 else f"gradient {number}"
        if not torch.equal(value, repeated):
            raise GateError(f"{what}: two runs give different bits in the {part}")
        error, tolerance = relative_error(value, reference), TOLERANCES[dtype]
        if number > 0 and op.is_attention and dtype != torch.float32:
            tolerance *= 2
        if not error <= tolerance:
            raise GateError(f"{what}: expected the {part} within {tolerance:g} of float64 (got {error:.2e})")
        worst = max(worst, error)
    return worst


def relative_error(value: Tensor, reference: Tensor) -> float:
    norm = reference.norm().item()
    difference = (value.double() - reference).norm().item()
    return difference / norm if norm else difference


def check_rows(op: Op, graph: SparseGraph, operands: Sequence[Tensor], out: Tensor, num_rows: int = 64) -> float:
    """At full size: the results of some destinations, the heaviest among them, against float64.

    Raises:
        GateError: They differ.
    """
    indptr = graph.in_edges.indptr.long()
    lengths = indptr.diff()
    generator = torch.Generator(graph.device).manual_seed(0)
    rows = torch.randint(graph.num_dst, (num_rows,), generator=generator, device=graph.device)
    rows[:2] = torch.stack([lengths.argmax(), torch.full_like(rows[0], graph.num_dst - 1)])
    counts = lengths[rows]
    starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    positions = torch.arange(int(starts[-1]), device=graph.device)
    positions += (indptr[rows] - starts[:-1]).repeat_interleave(counts)
    sources, indices = graph.in_edges.indices[positions].long().unique(return_inverse=True)
    part = SparseGraph(Adjacency(starts, indices, None), num_src=len(sources))
    picked = {"u": sources, "v": rows, "e": positions}
    restricted = [o.double() if role == "p" else o[picked[role]].double() for role, o in zip(op.roles, operands)]
    with use_backend("naive"):
        (expected,) = evaluate(op, part, restricted, None)
    dtype = operands[0].dtype
    error = relative_error(out[picked[op.role]], expected)
    if not error <= TOLERANCES[dtype]:
        raise GateError(
            f"{op.name} on {graph.num_edges} edges, {str(dtype)[6:]}: expected the rows {rows.tolist()} within "
            f"{TOLERANCES[dtype]:g} of float64 (got {error:.2e})"
        )
    return error


class GatLayer(nn.Module):
    """PyG's GATConv with its parameters, on our op: linear map, attention terms, attention, bias."""

    def __init__(self, linear: nn.Linear, att_src: Tensor, att_dst: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.linear = linear
        self.att_src, self.att_dst = nn.Parameter(att_src), nn.Parameter(att_dst)
        self.bias = nn.Parameter(bias)

    def forward(self, graph: SparseGraph, x: Tensor) -> Tensor:
        h = self.linear(x).view(len(x), HEADS, -1)
        out = _gat(graph, h, (h * self.att_src).sum(-1), (h * self.att_dst).sum(-1))
        return out.flatten(1) + self.bias


def pyg_gat(width: int, dtype: torch.dtype, device: torch.device) -> nn.Module | None:
    """PyTorch Geometric's layer from `width` to `width` columns; None where it is not installed."""
    try:
        from torch_geometric.nn import GATConv
    except ImportError:
        return None
    torch.manual_seed(0)
    layer = GATConv(width, width // HEADS, heads=HEADS, add_self_loops=False, negative_slope=SLOPE)
    moved: nn.Module = layer.to(device, dtype)
    return moved


def our_gat(pyg: Any) -> GatLayer:
    """The same layer with copies of its parameters."""
    linear = getattr(pyg, "lin", None) or pyg.lin_src
    copy = nn.Linear(linear.in_channels, linear.out_channels, bias=False).to(linear.weight)
    with torch.no_grad():
        copy.weight.copy_(linear.weight)
    return GatLayer(copy, *(part.detach().clone() for part in (pyg.att_src, pyg.att_dst, pyg.bias)))


class Clock:
    """Times work on a device; on CUDA by events, so that the host's waiting does not count."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def times_ms(self, run: Run, rounds: int, warmup: int = 3) -> list[float]:
        for _ in range(warmup):
            run()
        if self._device.type != "cuda":
            times = []
            for _ in range(rounds):
                start = time.perf_counter()
                run()
                times.append((time.perf_counter() - start) * 1e3)
            return times
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(rounds)]
        for start_event, end_event in events:
            start_event.record()
            run()
            end_event.record()
        torch.cuda.synchronize(self._device)
        return [start_event.elapsed_time(end_event) for start_event, end_event in events]


def copy_bandwidth(clock: Clock, device: torch.device, num_bytes: int = 1 << 30) -> float:
    """Bytes per second that a copy reads and writes together: the best of its rounds."""
    source = torch.zeros(num_bytes // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    best_ms = min(clock.times_ms(lambda: target.copy_(source), 10))
    return 2 * source.nbytes / (best_ms / 1e3)
