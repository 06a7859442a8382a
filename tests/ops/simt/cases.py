# SPDX-License-Identifier: Apache-2.0
"""Every kernel family on small graphs, with results in float64: what all tests of the kernels run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dgl_hybrid.ops.random_words import call_keys
from dgl_hybrid.training.dropout import replicated_dropout
from tests.ops.simt import reference
from tests.ops.simt.graphs import NUM_DST, NUM_SRC, TASK_ENTRIES, Rows, TaskList, cut_rows, make_graph
from tests.ops.simt.launches import Dropout, Launcher, Options

TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
SLOPE = 0.2
NUM_WORKERS = 7


@dataclass(frozen=True)
class Profile:
    """Types, sizes and layout of one case; between them, the profiles hold every value of every option."""

    dtype: str
    index_bits: int
    group: int
    vec: int
    packs: int
    heads: int
    width: int
    edge_ids: bool = True
    task_entries: int | None = TASK_ENTRIES
    head_lanes: int = 1

    def options(self, kernels: str, *extra: str) -> Options:
        return Options(kernels, self.dtype, self.index_bits, self.group, self.vec, self.packs, extra)


PROFILES = {
    "idle_lanes": Profile("F32", 32, 8, 4, 1, 2, 8, head_lanes=2),
    "three_tiles": Profile("F16", 64, 4, 8, 1, 1, 72, edge_ids=False),
    "odd_width": Profile("BF16", 32, 32, 1, 1, 3, 7, head_lanes=4),
    "one_lane": Profile("F32", 64, 1, 2, 1, 2, 6, edge_ids=False, task_entries=None),
    "half_full": Profile("F32", 32, 16, 4, 2, 4, 40, head_lanes=8),
    "wide_heads": Profile("BF16", 64, 2, 4, 2, 3, 40, head_lanes=2),
    "narrow_heads": Profile("F16", 32, 2, 2, 1, 5, 2, head_lanes=1),
    "prime_width": Profile("F32", 32, 4, 1, 4, 1, 13, edge_ids=False),
    "full_warp": Profile("F32", 64, 32, 4, 8, 2, 132, head_lanes=16),
    "wide_words": Profile("BF16", 32, 16, 8, 4, 2, 152, task_entries=None, head_lanes=2),
}


@dataclass(frozen=True)
class Result:
    """One output; the expected one is float64, or of the output's own type if it must be equal."""

    name: str
    got: Tensor
    expected: Tensor


@dataclass(frozen=True)
class Data:
    """A case's graph and operands; those of the kernel's type hold values that it represents exactly."""

    in_edges: Rows
    out_edges: Rows
    in_tasks: TaskList
    out_tasks: TaskList
    x: Tensor
    x_dst: Tensor
    grad: Tensor
    el: Tensor
    er: Tensor
    attention: Tensor
    edges: Tensor
    edge_rows: Tensor


Run = Callable[["Case", Data, Launcher], list[Result]]


@dataclass(frozen=True)
class Case:
    name: str
    profile: Profile
    options: Options
    run: Run

    def results(self, launcher: Launcher, *, operands: str = "normal") -> list[Result]:
        return self.run(self, make_data(self.profile, operands), launcher)


def make_data(profile: Profile, operands: str = "normal") -> Data:
    """Operands "normal"; "special": small integers (many ties), some NaN and infinities; "far_edge_rows": normal, but
    numbers of edge rows beyond 32 bits, for kernels that only pass them on.
    """
    in_edges, out_edges = make_graph(edge_ids=profile.edge_ids)
    if operands == "far_edge_rows":
        assert in_edges.edge_ids is not None
        in_edges = replace(in_edges, edge_ids=in_edges.edge_ids + 2**40)
    generator = torch.Generator().manual_seed(1)
    dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[profile.dtype]
    heads, width, num_edges = profile.heads, profile.width, len(in_edges.indices)

    def values(*shape: int, to: torch.dtype = dtype) -> Tensor:
        if operands != "special":
            return torch.randn(*shape, generator=generator).to(to)
        numbers = torch.randint(-2, 3, shape, generator=generator).float()
        chance = torch.rand(shape, generator=generator)
        for i, special in enumerate((torch.nan, torch.inf, -torch.inf)):
            numbers[(chance > i * 0.01) & (chance < i * 0.01 + 0.01)] = special
        return numbers.to(to)

    x, x_dst, grad = values(NUM_SRC, heads, width), values(NUM_DST, heads, width), values(NUM_DST, heads, width)
    el, er = values(NUM_SRC, heads, to=torch.float32), values(NUM_DST, heads, to=torch.float32)
    # No result may depend on rows that no edge touches.
    for tensor, rows in ((x, out_edges), (el, out_edges), (x_dst, in_edges), (grad, in_edges), (er, in_edges)):
        tensor[rows.indptr.diff() == 0] = torch.nan
    return Data(
        in_edges, out_edges, cut_rows(in_edges, profile.task_entries), cut_rows(out_edges, profile.task_entries),
        x, x_dst, grad, el, er,
        (values(heads, width) * width**-0.5).to(dtype), values(num_edges, heads), values(num_edges, heads, width),
    )  # fmt: skip


def check(case: Case, results: list[Result]) -> None:
    """Compares element by element and by norm.

    Raises:
        AssertionError: A result is not as expected.
    """
    for result in results:
        got, expected, where = result.got, result.expected, f"{case.name}: {result.name}"
        assert got.shape == expected.shape, where
        if expected.dtype != torch.float64:
            assert torch.equal(got.isnan(), expected.isnan()), f"{where}: NaN at other places"
            assert torch.equal(got.nan_to_num(), expected.nan_to_num()), f"{where}: not equal"
            continue
        tolerance = TOLERANCE[got.dtype]
        rounded = expected.to(got.dtype).double()
        expected = torch.where(rounded.isinf(), rounded, expected)  # quotients that float16 cannot hold
        got = got.double()
        finite = expected.isfinite()
        assert torch.equal(got[~finite].nan_to_num(7.0), expected[~finite].nan_to_num(7.0)), f"{where}: not finite"
        got, expected = got[finite], expected[finite]
        difference = (got - expected).abs()
        if expected.numel() == 0:
            continue
        limit = tolerance * expected.abs() + 5e-6 * expected.abs().max()
        assert bool((difference <= limit).all()), f"{where}: off by {difference.max():.2e}"
        assert float(difference.norm()) <= tolerance * float(expected.norm()), (
            f"{where}: relative error {difference.norm() / expected.norm():.2e}"
        )


# ---- SpMM


def _spmm_operands(case: Case, data: Data) -> tuple[Tensor | None, Tensor | None, int, int]:
    """x, w, heads, width of the case's weight and source."""
    extra, heads, width = case.options.extra, case.profile.heads, case.profile.width
    if "SOURCE=SOURCE_EDGES" in extra:
        return None, data.edge_rows.flatten(1), heads * width, 1
    if "WEIGHT=WEIGHT_COLUMN" in extra:
        return data.x.reshape(NUM_SRC, heads * width, 1), data.edge_rows.flatten(1), heads * width, 1
    return data.x, data.edges if "WEIGHT=WEIGHT_HEAD" in extra else None, heads, width


def _run_spmm(case: Case, data: Data, launcher: Launcher) -> list[Result]:
    x, w, heads, width = _spmm_operands(case, data)
    features, weights = (w, None) if x is None else (x, w)
    assert features is not None
    out, arg = launcher.spmm(data.in_edges, data.in_tasks, features, weights, heads, width, from_edges=x is None)
    if arg is None:
        values = reference.messages(data.in_edges, _double(x), _double(w))
        return [Result("out", out, reference.row_sum(data.in_edges, values))]
    # The product is taken in float32 and rounded after the choice, so the result is exact.
    values = reference.messages(data.in_edges, None if x is None else x.float(), None if w is None else w.float())
    reduce = "max" if "REDUCE=REDUCE_MAX" in case.options.extra else "min"
    best, winners = reference.select(data.in_edges, values, reduce)
    return [Result("out", out, best.to(out.dtype)), Result("arg", arg, winners.to(arg.dtype))]


def _run_spmm_select(case: Case, data: Data, launcher: Launcher) -> list[Result]:
    x, w, heads, width = _spmm_operands(case, data)
    assert x is not None
    rows = data.in_edges
    _, arg = reference.select(rows, reference.messages(rows, x.float(), None if w is None else w.float()), "max")
    grad = data.grad.reshape(NUM_DST, heads, width)
    dx = launcher.spmm_select_backward(data.out_edges, data.out_tasks, grad, arg, w, heads, width)
    won = (arg[rows.row_of_entry] == rows.edge_of_entry[:, None, None]) * grad.double()[rows.row_of_entry]
    weighted = won if w is None else won * w.double()[rows.edge_of_entry].unsqueeze(-1)
    expected = torch.zeros(NUM_SRC, heads, width, dtype=torch.float64).index_add(0, rows.indices, weighted)
    by_head = launcher if width > 1 else launcher.with_vec(1)  # VEC must divide D here
    dw = by_head.spmm_select_edges_backward(rows, data.in_tasks, grad, arg, x, heads, width)
    expected_dw = reference.by_edge_row(rows, (won * x.double()[rows.indices]).sum(-1))
    # copy_e: the gradient of a maximum over edge rows, D = 1.
    copied = data.edge_rows.flatten(1)
    _, arg_e = reference.select(rows, reference.messages(rows, None, copied.float()), "max")
    grad_e = data.grad.reshape(NUM_DST, -1, 1)
    de = launcher.with_vec(1).spmm_select_edges_backward(rows, data.in_tasks, grad_e, arg_e, None, grad_e.shape[1], 1)
    won_e = (arg_e[rows.row_of_entry] == rows.edge_of_entry[:, None, None]) * grad_e.double()[rows.row_of_entry]
    return [
        Result("dx", dx, expected),
        Result("dw", dw, expected_dw),
        Result("dw of copy_e", de, reference.by_edge_row(rows, won_e).squeeze(-1)),
    ]


# ---- SDDMM


def _sddmm_operands(case: Case, data: Data) -> list[tuple[Tensor, Tensor]]:
    """Per side: the operand and its rows per entry."""
    rows = data.in_edges
    choices = {
        "U": (data.x, rows.indices),
        "V": (data.x_dst, rows.row_of_entry),
        "E": (data.edge_rows, rows.edge_of_entry),
    }
    targets = dict(option.split("=TARGET_") for option in case.options.extra if "=TARGET_" in option)
    return [choices[targets[side]] for side in ("LHS", "RHS")]


def _run_sddmm(case: Case, data: Data, launcher: Launcher) -> list[Result]:
    (lhs, lhs_rows), (rhs, rhs_rows) = _sddmm_operands(case, data)
    op = next(option for option in case.options.extra if option.startswith("OP="))[6:].lower()
    out = launcher.sddmm(
        data.in_edges, data.in_tasks, lhs, None if op == "copy" else rhs, case.profile.heads, case.profile.width
    )
    left, right = lhs.double()[lhs_rows], rhs.double()[rhs_rows]
    expected = left if op == "copy" else getattr(torch, op)(left, right)
    return [Result("out", out, reference.by_edge_row(data.in_edges, expected))]


def _run_sddmm_dot(case: Case, data: Data, launcher: Launcher) -> list[Result]:
    (lhs, lhs_rows), (rhs, rhs_rows) = _sddmm_operands(case, data)
    out = launcher.sddmm_dot(data.in_edges, data.in_tasks, lhs, rhs, case.profile.heads, case.profile.width)
    expected = (lhs.double()[lhs_rows] * rhs.double()[rhs_rows]).sum(-1)
    return [Result("out", out, reference.by_edge_row(data.in_edges, expected))]


# ---- Softmax


def _run_softmax(case: Case, data: Data, launcher: Launcher) -> list[Result]:
    rows, lanes = data.in_edges, case.profile.head_lanes
    logits = data.edges * 3
    logits[::11] = -torch.inf  # masked edges; a row of nothing else is NaN, as in PyTorch
    out = launcher.edge_softmax(rows, data.in_tasks, logits, lanes)
    by_edge = logits.double().requires_grad_()
    expected = reference.by_edge_row(rows, reference.softmax(rows, by_edge[rows.edge_of_entry])[0])

    given, grad = reference.by_edge_row(rows, data.edges.double().sigmoid()).to(out.dtype), data.edge_rows[..., 0]
    d_logits = launcher.edge_softmax_backward(rows, data.in_tasks, given, grad, lanes)
    out_d, grad_d = given.double()[rows.edge_of_entry], grad.double()[rows.edge_of_entry]
    sums = reference.row_sum(rows, out_d * grad_d)
    expected_d = reference.by_edge_row(rows, out_d * (grad_d - sums[rows.row_of_entry]))
    return [Result("out", out, expected.detach()), Result("d_logits", d_logits, expected_d)]


# ---- Fused attention


def _dropout(case: Case, num_edges: int) -> tuple[Dropout, Tensor]:
    """The arguments, and the factor of each (edge row, head) by the rows' dropout."""
    if "DROPOUT=1" not in case.options.extra:
        return Dropout(0, 0, 0.0, None), torch.ones(num_edges, case.profile.heads, dtype=torch.float64)
    p, identity = 0.4, not case.profile.edge_ids
    keys = torch.arange(num_edges) if identity else torch.arange(num_edges) * 7_000_000_019 - 5
    ones = torch.ones(num_edges, case.profile.heads, dtype=torch.float64)
    factor = replicated_dropout(ones, p, keys, seed=3, step=14, call_index=2)
    return Dropout(*call_keys(3, 14, 2), p, None if identity else keys), factor


def _run_gat(case: Case, data: Data, launcher: Launcher) -> list[Result]:
    dropout, factor = _dropout(case, len(data.in_edges.indices))
    out, lse = launcher.gat(data.in_edges, data.in_tasks, data.x, data.el, data.er, SLOPE, dropout)
    expected = reference.gat(data.in_edges, data.x.double(), data.el.double(), data.er.double(), SLOPE, factor)
    return [Result("out", out, expected[0]), Result("lse", lse, expected[1])]


def _run_gatv2(case: Case, data: Data, launcher: Launcher) -> list[Result]:
    dropout, factor = _dropout(case, len(data.in_edges.indices))
    out, lse = launcher.gatv2(data.in_edges, data.in_tasks, data.x, data.x_dst, data.attention, SLOPE, dropout)
    operands = (data.x.double(), data.x_dst.double(), data.attention.double())
    expected = reference.gatv2(data.in_edges, *operands, SLOPE, factor)
    return [Result("out", out, expected[0]), Result("lse", lse, expected[1])]


def _terms(launcher: Launcher, grad: Tensor, out: Tensor, er: Tensor | None, lse: Tensor) -> tuple[Tensor, Result]:
    """The exact terms as the backward's input, and the kernel's as a result."""
    rounded = out.to(grad.dtype)
    got = launcher.gat_terms(grad, rounded, er, lse.float())
    delta, zeros = (grad.double() * out).sum(-1), torch.zeros_like(lse)
    first = zeros if er is None else er.double()
    expected = torch.stack([first, lse.float().double(), (grad.double() * rounded.double()).sum(-1), zeros], -1)
    return torch.stack([first, lse, delta, zeros], -1).float(), Result("terms", got, expected)


def _run_gat_backward(case: Case, data: Data, launcher: Launcher) -> list[Result]:
    rows = data.in_edges
    dropout, factor = _dropout(case, len(rows.indices))
    x, el, er = (tensor.double().requires_grad_() for tensor in (data.x, data.el, data.er))
    logits = torch.nn.functional.leaky_relu(el[rows.indices] + er[rows.row_of_entry], SLOPE)
    out, lse = reference.gat(rows, x, el, er, SLOPE, factor)
    grad = data.grad.nan_to_num(0.0)  # of rows without edges: autograd would multiply it by zero
    out.backward(grad.double())
    terms, terms_result = _terms(launcher, data.grad, out.detach(), data.er, lse.detach())
    got = launcher.gat_backward(data.out_edges, data.out_tasks, data.x, data.grad, data.el, terms, SLOPE, dropout)
    weights = reference.softmax(rows, logits.detach())[0]
    delta = (grad.double() * out.detach()).sum(-1)[rows.row_of_entry]
    d_weight = (grad.double()[rows.row_of_entry] * x.detach()[rows.indices]).sum(-1) * factor[rows.edge_of_entry]
    d_logit = weights * (d_weight - delta) * torch.where(logits > 0, 1.0, SLOPE).detach()
    assert x.grad is not None
    assert el.grad is not None
    assert er.grad is not None
    torch.testing.assert_close(reference.row_sum(rows, d_logit), er.grad)  # the formula of d_logit is autograd's
    return [
        terms_result,
        Result("dx", got[0], x.grad),
        Result("d_el", got[1], el.grad),
        Result("d_logit", got[2], reference.by_edge_row(rows, d_logit)),
    ]


def _run_gatv2_backward(case: Case, data: Data, launcher: Launcher) -> list[Result]:
    rows = data.in_edges
    dropout, factor = _dropout(case, len(rows.indices))
    x_src, x_dst, attention = (t.double().requires_grad_() for t in (data.x, data.x_dst, data.attention))
    out, lse = reference.gatv2(rows, x_src, x_dst, attention, SLOPE, factor)
    grad = data.grad.nan_to_num(0.0)
    out.backward(grad.double())
    terms, terms_result = _terms(launcher, data.grad, out.detach(), None, lse.detach())
    operands = (data.x, data.x_dst, data.attention)
    dx_src, d_logit = launcher.gatv2_src_backward(
        data.out_edges, data.out_tasks, *operands, data.grad, terms, SLOPE, dropout
    )
    inner = torch.nn.functional.leaky_relu(x_src[rows.indices] + x_dst[rows.row_of_entry], SLOPE).detach()
    weights = reference.softmax(rows, (attention.detach() * inner).sum(-1))[0]
    delta = (grad.double() * out.detach()).sum(-1)[rows.row_of_entry]
    d_weight = (grad.double()[rows.row_of_entry] * x_src.detach()[rows.indices]).sum(-1) * factor[rows.edge_of_entry]
    expected_d = reference.by_edge_row(rows, weights * (d_weight - delta))
    dx_dst, parts = launcher.gatv2_dst_backward(rows, data.in_tasks, NUM_WORKERS, *operands, expected_d.float(), SLOPE)
    assert x_src.grad is not None
    assert x_dst.grad is not None
    assert attention.grad is not None
    return [
        terms_result,
        Result("dx_src", dx_src, x_src.grad),
        Result("d_logit", d_logit, expected_d),
        Result("dx_dst", dx_dst, x_dst.grad),
        Result("d_attention", parts.double().sum(0).float(), attention.grad),
        Result("d_attention parts", parts.isnan().float(), torch.zeros_like(parts)),
    ]


def _double(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.double()


# ---- Lists of cases

_VARIANTS: dict[str, tuple[Run, list[tuple[str, ...]]]] = {
    "SPMM": (
        _run_spmm,
        [
            (f"REDUCE=REDUCE_{reduce}", f"SOURCE=SOURCE_{source}", f"WEIGHT=WEIGHT_{weight}")
            for reduce in ("SUM", "MAX", "MIN")
            for source, weight in (("NODES", "NONE"), ("NODES", "HEAD"), ("NODES", "COLUMN"), ("EDGES", "NONE"))
        ],
    ),
    "SPMM_SELECT": (_run_spmm_select, [(f"WEIGHT=WEIGHT_{weight}",) for weight in ("NONE", "HEAD", "COLUMN")]),
    "SDDMM": (
        _run_sddmm,
        [
            (f"OP=OP_{op}", f"LHS=TARGET_{lhs}", f"RHS=TARGET_{rhs}")
            for op in ("ADD", "SUB", "MUL", "DIV", "COPY")
            for lhs in "UVE"
            for rhs in ("UVE" if op != "COPY" else "V")
        ],
    ),
    "SDDMM_DOT": (_run_sddmm_dot, [(f"LHS=TARGET_{lhs}", f"RHS=TARGET_{rhs}") for lhs in "UVE" for rhs in "UVE"]),
    "SOFTMAX": (_run_softmax, [()]),
    "GAT": (_run_gat, [("DROPOUT=0",), ("DROPOUT=1",)]),
    "GAT_BACKWARD": (_run_gat_backward, [("DROPOUT=0",), ("DROPOUT=1",)]),
    "GATV2": (_run_gatv2, [("DROPOUT=0",), ("DROPOUT=1",)]),
    "GATV2_BACKWARD": (_run_gatv2_backward, [("DROPOUT=0",), ("DROPOUT=1",)]),
}
_PROFILES_BY_DEFAULT = {"SPMM": 1, "SPMM_SELECT": 2, "SDDMM": 1, "SDDMM_DOT": 1, "SOFTMAX": 5}
_VARIANTS_BY_DEFAULT = {"SDDMM": 4, "SDDMM_DOT": 2}  # every n-th


def all_cases() -> Iterator[Case]:
    """Every variant of every family with every profile."""
    for kernels, (_, variants) in _VARIANTS.items():
        for variant in variants:
            for name in PROFILES:
                yield make_case(kernels, variant, name)


def default_cases() -> Iterator[Case]:
    """Every family, every reduction, weight and source, every profile, in about a tenth of all combinations."""
    names = list(PROFILES)
    turn = 0
    for kernels, (_, variants) in _VARIANTS.items():
        for variant in variants[:: _VARIANTS_BY_DEFAULT.get(kernels, 1)]:
            for _ in range(_PROFILES_BY_DEFAULT.get(kernels, 3)):
                yield make_case(kernels, variant, names[turn % len(names)])
                turn += 1


def make_case(kernels: str, variant: tuple[str, ...], profile: str) -> Case:
    run, _ = _VARIANTS[kernels]
    name = "-".join([kernels, *(option.rpartition("_")[2] or option for option in variant), profile])
    return Case(name, PROFILES[profile], PROFILES[profile].options(kernels, *variant), run)
