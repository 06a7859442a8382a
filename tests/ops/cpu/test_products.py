# SPDX-License-Identifier: Apache-2.0
"""Compiled products of rows and weights beside plain PyTorch: every option, odd sizes, strides, any threads."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dgl_hybrid.ops.backend import Backend, load_backend
from dgl_hybrid.ops.cpu import host, matrix_unit, memory, products
from dgl_hybrid.ops.cpu.host import VectorUnit, vector_unit
from tests.helpers.thinning import pairwise
from tests.ops.backend_checks import make_graph, poisoned_memory

BLOCK_ROWS, TASK_ROWS = 64, 8192


@pytest.fixture(autouse=True, params=["vectors", "matrix unit"])
def unit(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What multiplies float32, where the shapes allow it."""
    if request.param == "vectors":
        monkeypatch.setattr(matrix_unit, "has_matrix_unit", lambda: False)
    elif not matrix_unit.has_matrix_unit():
        pytest.skip("this processor has no matrix unit")


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """What is not written stays NaN."""
    with poisoned_memory():
        yield


def operands(
    num_rows: int,
    widths: tuple[int, ...],
    num_columns: int,
    dtype: torch.dtype,
    *,
    turned: bool = False,
    strided: bool = False,
    factors: bool = False,
    addend: bool = False,
    bias: bool = False,
) -> dict[str, Any]:
    torch.manual_seed(num_rows + num_columns)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=dtype)

    gap = 3 if strided else 0
    return {
        "rows": [random(num_rows, width + gap)[:, :width] for width in widths],
        "weights": [random(num_columns, width).t() if turned else random(width, num_columns) for width in widths],
        "factors": random(num_rows, 1) if factors else None,
        "addend": random(num_rows, num_columns) if addend else None,
        "bias": random(num_columns) if bias else None,
    }


def check(given: dict[str, Any], *, relu: bool, needs_rows: bool, needs_addend: bool) -> None:
    ours, plain = load_backend("cpu"), load_backend("naive")
    assert products.are_served(given["rows"], given["weights"], factors=given["factors"], bias=given["bias"])
    out, expected = ours.row_products(**given, relu=relu), plain.row_products(**given, relu=relu)
    scale = {"rtol": 1e-12, "atol": 1e-11} if out.dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-3}
    torch.testing.assert_close(out, expected, **scale)
    grad = torch.randn_like(expected)
    rest = (
        expected if relu else None,
        given["factors"],
        [needs_rows] * len(given["rows"]),
        [True] * len(given["rows"]),
        needs_addend,
    )
    found = ours.row_products_backward(given["rows"], given["weights"], grad, *rest)
    wanted = plain.row_products_backward(given["rows"], given["weights"], grad, *rest)
    assert len(found) == len(wanted)
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine.is_contiguous()
        # Sums over all rows: what is lost grows with their number, in both.
        largest = float(theirs.abs().max()) if theirs.numel() else 0.0
        size = largest or 1.0  # few rows may have nothing above 0 that a ReLU lets through
        torch.testing.assert_close(
            mine / size, theirs / size, rtol=0, atol=1e-12 if out.dtype == torch.float64 else 1e-4
        )


@pairwise(
    num_rows=[1, 5, BLOCK_ROWS, 2 * BLOCK_ROWS + 7, TASK_ROWS + 5],
    widths=[(1,), (7,), (128,), (16, 33), (301,)],
    num_columns=[1, 3, 16, 40, 47, 80, 130],
    dtype=[torch.float32, torch.float64],
    turned=[False, True],
    strided=[False, True],
    factors=[False, True],
    addend=[False, True],
    bias=[False, True],
    relu=[False, True],
    needs_rows=[False, True],
)
def test_products_are_those_of_plain_pytorch(
    num_rows: int,
    widths: tuple[int, ...],
    num_columns: int,
    dtype: torch.dtype,
    turned: bool,
    strided: bool,
    factors: bool,
    addend: bool,
    bias: bool,
    relu: bool,
    needs_rows: bool,
) -> None:
    given = operands(
        num_rows,
        widths,
        num_columns,
        dtype,
        turned=turned,
        strided=strided,
        factors=factors,
        addend=addend,
        bias=bias,
    )
    check(given, relu=relu, needs_rows=needs_rows, needs_addend=addend and relu)


@pytest.mark.parametrize("num_columns", [5, 24, 47])
@pytest.mark.parametrize("unit", [VectorUnit(32, 16), VectorUnit(32, 32)])
def test_machines_with_other_registers(unit: VectorUnit, num_columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels for shorter vectors and fewer registers run here, too; they are no kernels of this machine's own."""
    from dgl_hybrid.ops.cpu import compiler, lanes, product_kernels

    monkeypatch.setattr(compiler, "_kernels", {})
    for module in (host, lanes, products, product_kernels):
        monkeypatch.setattr(module, "vector_unit", lambda: unit)
    for dtype in (torch.float32, torch.float64):
        given = operands(531, (19, 128), num_columns, dtype, factors=True, bias=True)
        check(given, relu=True, needs_rows=True, needs_addend=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("num_columns", [16, 47, 128])
def test_results_that_go_past_the_cache(dtype: torch.dtype, num_columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    given = operands(BLOCK_ROWS + 9, (64, 33), num_columns, dtype, factors=True, bias=True)
    kept = load_backend("cpu").row_products(**given, relu=True)
    monkeypatch.setattr(memory, "MIN_PAST_CACHE_BYTES", 0)
    size = vector_unit().register_bytes // dtype.itemsize
    assert memory.goes_past_cache(kept, 0, num_columns) == (num_columns % size == 0)
    check(given, relu=True, needs_rows=True, needs_addend=False)
    assert torch.equal(load_backend("cpu").row_products(**given, relu=True), kept)


@pytest.mark.parametrize("width", [16, 24, 128, 160])
def test_sums_that_go_past_the_cache(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, cpu = make_graph("hub"), load_backend("cpu")
    x = torch.randn(graph.num_src, 1, width)
    of_rows = torch.randn(graph.num_dst)
    kept = [cpu.spmm(graph.in_edges, x, None, "sum")[0], cpu.scaled_sums(graph.in_edges, x, None, of_rows)]
    monkeypatch.setattr(memory, "MIN_PAST_CACHE_BYTES", 0)
    ours = [cpu.spmm(graph.in_edges, x, None, "sum")[0], cpu.scaled_sums(graph.in_edges, x, None, of_rows)]
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(ours, kept, strict=True))


def test_what_goes_past_the_cache() -> None:
    rows = torch.empty(memory.MIN_PAST_CACHE_BYTES // 512, 128)
    size = vector_unit().register_bytes // 4
    assert memory.goes_past_cache(rows, 0, 128)
    assert memory.goes_past_cache(rows, size, size)
    assert not memory.goes_past_cache(rows[1:], 0, 128), "too small"
    assert not memory.goes_past_cache(rows, 1, size), "not at a vector's place"
    assert not memory.goes_past_cache(rows, 0, size + 1), "not whole vectors"
    odd = torch.empty(rows.numel() + 1)[1:].view_as(rows)
    assert not memory.goes_past_cache(odd, 0, 128), "not aligned"
    assert not memory.goes_past_cache(torch.empty(len(rows), 129)[:, :128], 0, 128), "not contiguous"


@pytest.mark.parametrize(("width", "num_columns"), [(40, 33), (100, 128)])
def test_results_do_not_depend_on_the_number_of_threads(width: int, num_columns: int) -> None:
    given = operands(5 * TASK_ROWS + 77, (width,), num_columns, torch.float32, factors=True, bias=True)
    ours = load_backend("cpu")
    before, results = torch.get_num_threads(), []
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            out = ours.row_products(**given, relu=True)
            rest = (out, given["factors"], [True], [True], False)
            results.append([out, *ours.row_products_backward(given["rows"], given["weights"], out, *rest)])
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(results[0], other, strict=True))


def test_sums_over_many_rows_are_as_exact_as_those_of_pytorch() -> None:
    """One chain of equal rows, each added to the sum so far, would be off by a hundred thousandth."""
    num_rows = 4 * TASK_ROWS
    x, weight = torch.full((num_rows, 20), 0.7), torch.randn(20, 24)
    grad = torch.full((num_rows, 24), 0.3)
    assert products.are_served([x], [weight])
    exact = num_rows * float(x[0, 0].double() * grad[0, 0].double()), num_rows * float(grad[0, 0].double())

    def errors(backend: Backend) -> list[float]:
        sums = backend.row_products_backward([x], [weight], grad, None, None, [False], [True], False)
        return [float((found.double() / right - 1).abs().max()) for found, right in zip(sums, exact, strict=True)]

    # How many rows are added up before their sum is added to the others depends on the machine, in both.
    for mine, theirs in zip(errors(load_backend("cpu")), errors(load_backend("naive")), strict=True):
        assert mine <= max(theirs, 2e-6)
        assert mine < 1e-5


def test_what_has_no_kernel() -> None:
    row, wide = torch.ones(3, 2), torch.ones(3, products.MAX_COLUMNS + 1)
    weight = torch.ones(2, 4)
    assert products.are_served([row], [weight], of_result=[torch.ones(3, 4)], factors=row[:, :1], bias=weight[0])
    pairs = [(row[:0], weight), (wide, wide.t()), (row.half(), weight.half()), (row, weight.double())]
    pairs += [(row[:, :0], weight[:0]), (row, weight[:1]), (row, weight[:, :0])]
    for rows, other in pairs:
        assert not products.are_served([rows], [other])
    assert not products.are_served([row, row[:2]], [weight, weight])
    assert not products.are_served([row, row], [weight, weight[:, :2]])
    for wrong in ({"of_result": [row]}, {"factors": row}, {"bias": row[0]}, {"bias": weight[0].double()}):
        assert not products.are_served([row], [weight], **wrong)  # type: ignore[arg-type]
    ours = load_backend("cpu")
    assert ours.row_products([row[:0]], [torch.ones(2, 4)], None, None, None, True).shape == (0, 4)
    torch.testing.assert_close(
        ours.row_products([wide], [torch.ones(wide.shape[1], 1)], None, None, None, False),
        torch.full((3, 1), float(wide.shape[1])),
    )


def test_from_how_many_zeros_on_entries_are_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """More columns leave more of what a row costs besides; what multiplies faster leaves less to entries."""

    def shares(dtype: torch.dtype, has_unit: bool, register_bytes: int = 64) -> list[float]:
        monkeypatch.setattr(matrix_unit, "has_matrix_unit", lambda: has_unit)
        monkeypatch.setattr(products, "vector_unit", lambda: SimpleNamespace(register_bytes=register_bytes))
        return [products.most_entries(num_columns, dtype) for num_columns in (0, 64, 128, 512, 2048, 2049)]

    of_unit, of_vectors = shares(torch.float32, True), shares(torch.float32, False)
    assert shares(torch.float64, True) == of_vectors, "the unit multiplies float32"
    assert of_unit[:2] == of_vectors[:2] == [0.0, 0.0], "passes over results cost more than products of so few columns"
    assert all(0.0 < of_unit[i] < of_vectors[i] < 0.4 for i in (2, 3))
    assert of_vectors == sorted(of_vectors)
    assert of_unit[4] == of_vectors[4], "too many columns for the unit"
    assert of_vectors[5] == 0.4, "PyTorch multiplies them"
    assert shares(torch.float32, False, register_bytes=16)[1:] == [0.4] * 5
