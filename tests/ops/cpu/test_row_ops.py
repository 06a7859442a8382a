# SPDX-License-Identifier: Apache-2.0
"""Compiled work on rows without a graph beside plain PyTorch: odd sizes, several tasks, threads, strange numbers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dgl_hybrid.ops import plain_rows
from dgl_hybrid.ops.cpu import compiler, host, lanes, memory, row_ops
from dgl_hybrid.ops.cpu.host import VectorUnit
from tests.ops.backend_checks import poisoned_memory

DTYPES = [torch.float32, torch.float64]
ELU = torch.ops.dgl_hybrid.biased_elu
TASK_ROWS = 8192


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """What is not written stays NaN."""
    with poisoned_memory():
        yield


@pytest.fixture
def past_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results of any size go straight to memory where their place allows it."""
    monkeypatch.setattr(memory, "MIN_PAST_CACHE_BYTES", 0)


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed + sum(shape)))


def close(actual: Tensor, expected: Tensor) -> None:
    tolerance = 2e-5 if actual.dtype == torch.float32 else 1e-13
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


# ------------------------------------------------------------------------------------------------------------- ELU


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize(("num_rows", "width"), [(1, 1), (7, 40), (100, 47), (2 * TASK_ROWS + 5, 8), (33, 1100)])
def test_elu(num_rows: int, width: int, has_bias: bool, dtype: torch.dtype) -> None:
    x = random(num_rows, width, dtype=dtype).mul_(3.0).requires_grad_()
    bias = random(width, dtype=dtype, seed=1).requires_grad_() if has_bias else None
    wanted = [t for t in (x, bias) if t is not None]
    upstream = random(num_rows, width, dtype=dtype, seed=2)
    out, expected = ELU(x, bias), F.elu(x if bias is None else x + bias)
    close(out, expected)
    for actual, other in zip(
        torch.autograd.grad(out, wanted, upstream), torch.autograd.grad(expected, wanted, upstream)
    ):
        # Sums over all rows are rounded in another order.
        torch.testing.assert_close(actual, other, rtol=1e-4 if dtype == torch.float32 else 1e-12, atol=1e-4)


@pytest.mark.usefixtures("past_cache")
@pytest.mark.parametrize("width", [16, 40, 128])
def test_elu_straight_to_memory(width: int) -> None:
    test_elu(500, width, True, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_elu_is_as_exact_near_0_as_elsewhere(dtype: torch.dtype) -> None:
    exponents = torch.linspace(-30 if dtype == torch.float32 else -290, 2, 4001, dtype=torch.float64)
    x = -(10.0**exponents).to(dtype).view(-1, 1)
    error = (ELU(x, None).double() / torch.expm1(x.double()) - 1).abs().max()
    assert error < 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", DTYPES)
def test_elu_of_strange_numbers(dtype: torch.dtype) -> None:
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([[inf, -inf, nan, 0.0, -0.0, 1e30, -1e30, -87.0, -104.0, -1e-30]], dtype=dtype).requires_grad_()
    out, expected = ELU(x, None), F.elu(x)
    torch.testing.assert_close(out, expected, equal_nan=True)
    grads = [torch.autograd.grad(y, x, torch.full_like(y, 3.0))[0] for y in (out, expected)]
    # PyTorch makes 3 or NaN of NaN, by whether the element is in one of its vectors or behind the last.
    torch.testing.assert_close(*(grad[~x.isnan()] for grad in grads), rtol=0, atol=1e-7)
    assert grads[0][x.isnan()].tolist() == [3.0]


def test_elu_can_be_differentiated_again() -> None:
    x, bias = random(5, 3, dtype=torch.float64).requires_grad_(), random(3, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(ELU, (x, bias))
    assert torch.autograd.gradgradcheck(ELU, (x, bias))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_elu_of_narrow_numbers(dtype: torch.dtype) -> None:
    x, bias = random(9, 20, dtype=torch.float32).to(dtype), random(20, dtype=torch.float32).to(dtype)
    torch.testing.assert_close(ELU(x, bias), F.elu(x + bias))


def test_elu_of_nothing() -> None:
    x, bias = torch.empty(0, 4, requires_grad=True), torch.ones(4, requires_grad=True)
    out = ELU(x, bias)
    assert out.shape == (0, 4)
    dx, d_bias = torch.autograd.grad(out.sum(), [x, bias])
    assert dx.shape == (0, 4)
    assert not d_bias.any()


# --------------------------------------------------------------------------------------------------- rows added


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bfloat16])
@pytest.mark.parametrize("has_factors", [True, False])
@pytest.mark.parametrize(("num_rows", "width"), [(0, 3), (1, 1), (9, 4), (700, 47), (20, 600), (5000, 8)])
@pytest.mark.parametrize("gap", [0, 5])
def test_rows_are_added_to_their_places(
    num_rows: int, width: int, gap: int, has_factors: bool, dtype: torch.dtype
) -> None:
    wide = torch.float32 if dtype == torch.bfloat16 else dtype
    out, rows = (
        random(2 * num_rows + 3, width, dtype=wide).to(dtype),
        random(num_rows, width + gap, dtype=wide).to(dtype),
    )
    targets = torch.randint(len(out), (num_rows,), generator=torch.Generator().manual_seed(1))  # some more than once
    targets = targets.to(torch.int32 if gap else torch.int64)
    factors = random(len(out), dtype=wide, seed=5).to(dtype) if has_factors else None
    given = rows[:, gap:]
    expected = out.clone()
    for target, row in zip(targets.tolist(), given, strict=True):
        expected[target] += row if factors is None else row * factors[target]
    row_ops.add_rows(out, targets, given, factors)
    tolerance = 0.05 if dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)


# -------------------------------------------------------------------------------------------------- rows merged


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bfloat16])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("num_rows", "heads", "width"),
    [(0, 2, 3), (1, 1, 1), (9, 4, 32), (30, 5, 200), (700, 3, 7), (20, 2, 600), (TASK_ROWS + 5, 4, 1)],
)
def test_rows_are_merged(num_rows: int, heads: int, width: int, index: torch.dtype, dtype: torch.dtype) -> None:
    wide = torch.float32 if dtype == torch.bfloat16 else dtype
    shape = (num_rows, heads)
    rows = random(*shape, width, dtype=wide).to(dtype)
    keeps, adds = (random(*shape, dtype=wide, seed=seed).abs().to(dtype) for seed in (1, 2))
    out = random(2 * num_rows + 3, heads, width, dtype=wide, seed=4).to(dtype)
    targets = torch.randperm(len(out), generator=torch.Generator().manual_seed(1))[:num_rows].to(index)
    expected = out.clone()
    expected[targets.long()] = out[targets.long()] * keeps.unsqueeze(-1) + rows * adds.unsqueeze(-1)
    row_ops.merge_rows(out, targets, rows, keeps, adds)
    tolerance = 0.05 if dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)
    # Of results that lie apart.
    apart = random(len(out), heads, width + 1, dtype=wide, seed=4).to(dtype)
    expected = apart.clone()
    expected[targets.long(), :, 1:] = apart[targets.long(), :, 1:] * keeps.unsqueeze(-1) + rows * adds.unsqueeze(-1)
    row_ops.merge_rows(apart[:, :, 1:], targets, rows, keeps, adds)
    torch.testing.assert_close(apart, expected, rtol=tolerance, atol=tolerance)


# ----------------------------------------------------------------------------------------------- rows with a mask


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [16, 47, 128])
def test_masked_rows_that_go_past_the_cache(width: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    x, ids = random(300, width, dtype=dtype), torch.arange(300) * 7
    kept = row_ops.drop(x, ids, (3, 5), 0.4)
    monkeypatch.setattr(memory, "MIN_PAST_CACHE_BYTES", 0)
    size = host.vector_unit().register_bytes // dtype.itemsize
    assert memory.goes_past_cache(kept, 0, width) == (width % size == 0)
    before = compiler.num_compiled_kernels()
    assert torch.equal(row_ops.drop(x, ids, (3, 5), 0.4), kept)
    assert (compiler.num_compiled_kernels() > before) == (width % size == 0)


# ------------------------------------------------------------------------------------------------- terms of heads


SHAPES = [
    (1, 1, 1, 1),
    (50, 20, 4, 32),
    (50, 0, 1, 40),
    (20, 20, 3, 7),
    (9, 4, 2, 300),
    (2 * TASK_ROWS + 9, 8200, 2, 8),
]


def terms(num_rows: int, num_dst: int, heads: int, width: int, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """What `head_terms` takes, and what its backward takes besides."""
    given = [random(*shape, dtype=dtype) for shape in ((num_rows, heads, width), (1, heads, width), (1, heads, width))]
    given[2] = given[2] * 0.5 + 1.0
    return given, [random(rows, heads, 1, dtype=dtype, seed=3) for rows in (num_rows, num_dst)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_head_terms(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    given, d_terms = terms(*shape, dtype=dtype)
    num_dst = shape[1]
    for actual, expected in zip(
        row_ops.head_terms(*given, num_dst), plain_rows.head_terms(*given, num_dst), strict=True
    ):
        close(actual, expected)
    start = random(*given[0].shape, dtype=dtype, seed=9)
    dx, expected_dx = start.clone(), start.clone()
    found = row_ops.head_terms_backward(*given, *d_terms, dx)
    wanted = plain_rows.head_terms_backward(*given, *d_terms, expected_dx)
    close(dx, expected_dx)
    for actual, expected in zip(found, wanted, strict=True):
        assert actual.shape == expected.shape
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-3 if dtype == torch.float32 else 1e-10)
    for actual, other in zip(row_ops.head_terms_backward(*given, *d_terms, None), found, strict=True):
        assert torch.equal(actual, other)


def test_rows_of_results_that_lie_apart_are_added_too() -> None:
    wide, rows = random(6, 9, dtype=torch.float32), random(2, 4, dtype=torch.float32)
    expected = wide.clone()
    expected[[3, 1], 2:6] += rows
    row_ops.add_rows(wide[:, 2:6], torch.tensor([3, 1]), rows, None)
    assert torch.equal(wide, expected)


def test_sums_over_many_rows_are_as_exact_as_those_of_pytorch() -> None:
    """Added one after another they would be off by some millionths of all."""
    num_rows = 2 * TASK_ROWS
    (x, attn_l, attn_r), (d_el, d_er) = terms(num_rows, num_rows, 1, 16, torch.float32)
    x, d_el, d_er = x.abs(), d_el.abs(), d_er.abs()
    ones = torch.ones(num_rows, 16)
    found = [*row_ops.head_terms_backward(x, attn_l, attn_r, d_el, d_er, None)]
    found.append(row_ops.biased_elu_backward(x.flatten(1), ones)[1])
    exact = [(x.double() * d.double()).sum(0, keepdim=True) for d in (d_el, d_er)] + [x.double().flatten(1).sum(0)]
    for actual, expected in zip(found, exact, strict=True):
        assert ((actual.double() - expected) / expected).abs().max() < 5e-7


def test_head_terms_of_rows_that_lie_apart() -> None:
    (x, attn_l, attn_r), (d_el, d_er) = terms(30, 10, 2, 24, torch.float64)
    apart = torch.zeros(30, 2, 50, dtype=torch.float64)[:, :, 3:27].copy_(x)
    turned = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in (attn_l, attn_r, d_el, d_er)]
    close(row_ops.head_terms(apart, *turned[:2], 10)[0], plain_rows.head_terms(x, attn_l, attn_r, 10)[0])
    found = row_ops.head_terms_backward(apart, *turned, None)
    for actual, expected in zip(
        found, plain_rows.head_terms_backward(x, attn_l, attn_r, d_el, d_er, None), strict=True
    ):
        close(actual, expected)


# ----------------------------------------------------------------------------------------------------------- both


def run_all(dtype: torch.dtype) -> list[Tensor]:
    given, d_terms = terms(2 * TASK_ROWS + 9, 8200, 4, 32, dtype)
    x, dx = given[0].flatten(1), given[0].clone()
    out = row_ops.biased_elu(x, given[1].flatten())
    found = row_ops.head_terms_backward(*given, *d_terms, dx)
    total = x.clone()
    row_ops.add_rows(total, torch.arange(len(x) - 1, -1, -1), out, x[:, 3])
    return [out, *row_ops.biased_elu_backward(x, out), *row_ops.head_terms(*given, 8200), dx, *found, total]


def test_no_result_depends_on_threads() -> None:
    results = []
    before = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(run_all(torch.float32))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("unit", [VectorUnit(16, 16), VectorUnit(32, 16), VectorUnit(16, 32)])
def test_machines_with_other_registers(unit: VectorUnit, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels for shorter vectors and fewer registers run here, too."""
    monkeypatch.setattr(compiler, "_kernels", {})
    for module in (host, lanes, memory):
        monkeypatch.setattr(module, "vector_unit", lambda: unit)
    test_head_terms((50, 20, 4, 32), torch.float32)
    test_head_terms((20, 20, 3, 7), torch.float64)
    test_elu(100, 47, True, torch.float32)
    test_elu_straight_to_memory(64)


def test_narrow_gradients_of_attention_are_summed_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """In many pieces, the sum over which would stop to grow."""
    monkeypatch.setattr(plain_rows, "_PIECE_ELEMENTS", 64)
    x = torch.full((20_000, 2, 8), 0.5, dtype=torch.bfloat16)
    attn = torch.ones(1, 2, 8, dtype=torch.bfloat16)
    d_term = torch.full((20_000, 2, 1), 0.25, dtype=torch.bfloat16)
    for found in plain_rows.head_terms_backward(x, attn, attn, d_term, d_term, None):
        assert found.dtype == torch.bfloat16
        assert ((found.double() - 2500.0) / 2500.0).abs().max() < 0.01
