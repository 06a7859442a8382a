# SPDX-License-Identifier: Apache-2.0
"""Products of float32 on the matrix unit: as exact as those of vectors, for all numbers, used where they pay."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from dgl_hybrid.ops.cpu import matrix_unit, matrix_unit_kernels, products
from dgl_hybrid.ops.cpu.matrix_unit import LEAST_GRADIENT, LEAST_OPERAND, MOST

BLOCK, GRADIENT_BLOCK = matrix_unit_kernels.BLOCK_ROWS, matrix_unit_kernels.GRADIENT_BLOCK_ROWS
INF, NAN = math.inf, math.nan

HAS_UNIT = matrix_unit.has_matrix_unit()
needs_unit = pytest.mark.skipif(not HAS_UNIT, reason="this processor has no matrix unit")


@pytest.fixture
def flushed() -> Iterator[None]:
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor takes no numbers for 0")
    yield
    torch.set_flush_denormal(False)


@pytest.fixture
def emitted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Modules of the kernels that multiplied."""
    names: list[str] = []
    run = products.run

    def note(emit: Callable[..., str], *rest: Any) -> None:
        if emit is not matrix_unit_kernels.emit_parts:
            names.append(emit.__module__.rpartition(".")[2])
        run(emit, *rest)

    monkeypatch.setattr(products, "run", note)
    return names


def by_vectors(monkeypatch: pytest.MonkeyPatch, call: Callable[[], Any]) -> Any:
    with monkeypatch.context() as patch:
        patch.setattr(matrix_unit, "has_matrix_unit", lambda: False)
        return call()


def multiply(rows: list[Tensor], weights: list[Tensor]) -> Tensor:
    return products.multiply(rows, weights, None, None, None, False)


def gradients(rows: list[Tensor], weights: list[Tensor], grad: Tensor) -> list[Tensor]:
    needed = [True] * len(rows)
    return products.gradients(rows, weights, grad, None, None, needed, needed, False)


def random_operands(num_rows: int, widths: tuple[int, ...], num_columns: int) -> tuple[list[Tensor], list[Tensor]]:
    torch.manual_seed(num_rows)
    rows = [torch.randn(num_rows, width) for width in widths]
    return rows, [torch.randn(width, num_columns) / width**0.5 for width in widths]


def put_together(parts: Tensor) -> Tensor:
    """(registers of columns, steps, parts …) to the numbers whose parts they are, and those behind."""
    size, depth = matrix_unit.SIZE, matrix_unit.DEPTH
    lain = parts.reshape(*parts.shape[:2], matrix_unit.NUM_PARTS, depth // 2, size, 2).double().sum(2)
    return lain.permute(1, 2, 4, 0, 3).reshape(parts.shape[1] * depth, parts.shape[0] * size)


@pytest.mark.parametrize("scale", [1.0, 1e-20, 1e20])
@pytest.mark.parametrize("shapes", [[(1, 1)], [(128, 64)], [(100, 47), (33, 47)], [(602, 130)]])
def test_parts_of_weights_add_up_to_the_last_bit(shapes: list[tuple[int, int]], scale: float) -> None:
    torch.manual_seed(0)
    weights = [torch.randn(columns, rows).t() * scale for rows, columns in shapes]
    parts = products._cut(weights, 0)  # nothing is too small
    if scale > 1.0:
        assert parts is None
        return
    assert parts is not None
    rest = put_together(parts)
    for weight in weights:
        count = matrix_unit_kernels.num_steps(len(weight)) * matrix_unit.DEPTH
        found, rest = rest[:count], rest[count:]
        assert torch.equal(found[: len(weight), : weight.shape[1]], weight.double())
        assert not found[len(weight) :].any()
        assert not found[:, weight.shape[1] :].any()
    assert len(rest) == 0


@pytest.mark.parametrize(
    ("number", "is_cut"),
    [
        *((0.0, True), (-0.0, True), (-1.0, True), (LEAST_OPERAND, True), (-LEAST_OPERAND, True)),
        *((LEAST_OPERAND * 0.99, False), (-LEAST_OPERAND * 0.99, False), (1e-42, False), (MOST * 0.99, True)),
        *((MOST, False), (-MOST, False), (INF, False), (-INF, False), (NAN, False)),
    ],
)
@pytest.mark.parametrize("place", [(0, 0), (69, 36), (33, 17)])
def test_weights_with_numbers_that_must_not_be_cut(number: float, is_cut: bool, place: tuple[int, int]) -> None:
    weight = torch.ones(70, 37)
    weight[place] = number
    assert (products._cut([torch.ones(5, 37), weight], matrix_unit.least_bits(LEAST_OPERAND)) is not None) == is_cut


SHAPES = [
    (1, (128,), 128),
    (2 * BLOCK, (96,), 96),
    (GRADIENT_BLOCK + 1, (100,), 128),
    (3 * GRADIENT_BLOCK - 1, (128, 100), 112),
    (777, (602,), 128),
    (9000, (250, 60), 144),
    (500, (33 * 8,), 272),
]


@needs_unit
@pytest.mark.parametrize(("num_rows", "widths", "num_columns"), SHAPES)
def test_it_is_at_least_as_exact_as_vectors(
    num_rows: int,
    widths: tuple[int, ...],
    num_columns: int,
    emitted: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Fewer roundings, if anything: by root mean squares, beside float64."""
    rows, weights = random_operands(num_rows, widths, num_columns)
    grad = torch.randn(num_rows, num_columns)
    exact = [sum(x.double() @ w.double() for x, w in zip(rows, weights, strict=True))]
    exact += [grad.double() @ w.double().t() for w in weights]
    exact += [x.double().t() @ grad.double() for x in rows]

    def run() -> list[Tensor]:
        return [multiply(rows, weights), *gradients(rows, weights, grad)[:-1]]

    ours = run()
    assert emitted == ["matrix_unit_kernels"] * 2
    theirs = by_vectors(monkeypatch, run)
    assert emitted[2:] == ["product_kernels"] * 2

    def error(found: Tensor, wanted: Tensor) -> float:
        return float((found - wanted).square().mean().sqrt() / wanted.square().mean().sqrt())

    for mine, other, wanted in zip(ours, theirs, exact, strict=True):
        assert error(mine, wanted) < max(1.1 * error(other, wanted), 1e-7)


UNFIT = [INF, -INF, NAN, torch.finfo(torch.float32).max, -MOST, LEAST_GRADIENT / 4, -1e-40]


def assert_same(mine: Tensor, theirs: Tensor) -> None:
    """Bit by bit, whatever NaN's bits are."""
    assert torch.equal(mine.nan_to_num(7.0, 8.0, 9.0), theirs.nan_to_num(7.0, 8.0, 9.0))


@needs_unit
@pytest.mark.parametrize("value", UNFIT)
@pytest.mark.parametrize("row", [0, BLOCK + 3, 3 * BLOCK])
def test_blocks_of_numbers_that_have_no_parts_go_to_vectors(
    value: float, row: int, emitted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, weights = random_operands(3 * BLOCK + 5, (128, 64), 128)
    plain = multiply(rows, weights)
    rows[1][row, 63] = value
    result = multiply(rows, weights)
    expected = by_vectors(monkeypatch, lambda: multiply(rows, weights))
    assert emitted == ["matrix_unit_kernels"] * 2 + ["product_kernels"]
    block = slice(row // BLOCK * BLOCK, (row // BLOCK + 1) * BLOCK)
    assert_same(result[block], expected[block])
    others = torch.ones(len(result), dtype=torch.bool)
    others[block] = False
    assert torch.equal(result[others], plain[others])


@needs_unit
@pytest.mark.parametrize("value", UNFIT)
@pytest.mark.parametrize("where", ["gradient", "operand", "last group"])
@pytest.mark.parametrize("row", [3, 2 * GRADIENT_BLOCK - 1, 3 * GRADIENT_BLOCK])
def test_the_same_for_gradients(
    value: float, where: str, row: int, emitted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, weights = random_operands(3 * GRADIENT_BLOCK + 5, (150, 128), 128)
    grad = torch.randn(len(rows[0]), 128)
    place = {"gradient": grad[row, 5:6], "operand": rows[1][row, 2:3], "last group": rows[0][row, 149:]}[where]
    place.fill_(value)
    found = gradients(rows, weights, grad)
    wanted = by_vectors(monkeypatch, lambda: gradients(rows, weights, grad))
    assert emitted == ["matrix_unit_kernels", "product_kernels"]
    block = slice(row // GRADIENT_BLOCK * GRADIENT_BLOCK, (row // GRADIENT_BLOCK + 1) * GRADIENT_BLOCK)
    for number, (mine, theirs) in enumerate(zip(found, wanted, strict=True)):
        if number < 2 and where == "gradient":
            assert_same(mine[block], theirs[block])
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4, equal_nan=True)


@needs_unit
@pytest.mark.parametrize("value", UNFIT)
def test_weights_that_have_no_parts(value: float, emitted: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    rows, weights = random_operands(BLOCK, (128,), 128)
    weights[0][3, 4] = value
    result = multiply(rows, weights)
    gradients(rows, weights, torch.randn(BLOCK, 128))
    assert emitted == ["product_kernels"] * 2
    assert_same(result, by_vectors(monkeypatch, lambda: multiply(rows, weights)))


@needs_unit
@pytest.mark.parametrize(("width", "least"), [(128, 1e30), (1536, 0.9 * MOST)])
def test_sums_that_overflow_are_infinite_as_by_vectors(
    width: int, least: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts of one product could overflow with opposite signs, which made it NaN; sums of products may overflow."""
    rows, weights = (
        [x.sign().abs() * least * (1 + x.abs().clamp(max=1.0) / 10) for x in given]
        for given in random_operands(BLOCK, (width,), 128)
    )
    result = multiply(rows, weights)
    assert_same(result, by_vectors(monkeypatch, lambda: multiply(rows, weights)))
    assert result.isposinf().all()


@needs_unit
def test_small_numbers_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The least that go to the unit, in all places at once."""
    rows, weights = random_operands(GRADIENT_BLOCK, (128,), 128)
    grad = torch.randn(GRADIENT_BLOCK, 128)
    for x, least in ((rows[0], LEAST_OPERAND), (weights[0], LEAST_OPERAND), (grad, LEAST_GRADIENT)):
        x.copy_(x.sign() * least * (1 + torch.rand_like(x)))
    found = [multiply(rows, weights), *gradients(rows, weights, grad)[:2]]
    exact = [rows[0].double() @ weights[0].double(), grad.double() @ weights[0].double().t()]
    exact.append(rows[0].double().t() @ grad.double())
    for mine, wanted in zip(found, exact, strict=True):
        scale = wanted.square().mean().sqrt()
        torch.testing.assert_close(mine / scale, wanted / scale, rtol=0, atol=3e-6, check_dtype=False)


@needs_unit
def test_smaller_ones_go_there_where_they_may_be_taken_for_0(flushed: None, emitted: list[str]) -> None:
    rows, weights = random_operands(GRADIENT_BLOCK, (128,), 128)
    tiny = torch.full_like(rows[0], 1e-39)
    mixed = torch.where(torch.arange(GRADIENT_BLOCK)[:, None] % 2 == 0, rows[0], tiny)
    result = multiply([mixed], weights)
    assert emitted == ["matrix_unit_kernels"]
    assert torch.equal(result[::2], multiply(rows, weights)[::2])
    assert not result[1::2].any()


@needs_unit
def test_the_largest_fit_on_a_small_stack(emitted: list[str]) -> None:
    """Of 1 MiB, where threads commonly have 2 or 8; what does not fit ends the process."""
    rows, weights = random_operands(3 * BLOCK, (matrix_unit_kernels.MAX_STEPS * matrix_unit.DEPTH,), 128)
    wide, wide_weights = random_operands(3 * BLOCK, (128,), matrix_unit_kernels.MAX_GRADIENT_COLUMNS)
    results: list[Tensor] = []

    def run() -> None:
        results.append(multiply(rows, weights))
        results.extend(gradients(wide, wide_weights, results[0].repeat(1, 4)))

    before = threading.stack_size(1 << 20)
    try:
        thread = threading.Thread(target=run)
        thread.start()
    finally:
        threading.stack_size(before)
    thread.join()
    assert emitted == ["matrix_unit_kernels"] * 2
    assert len(results) == 4
    torch.testing.assert_close(results[0], rows[0] @ weights[0], rtol=1e-4, atol=1e-4)


@needs_unit
def test_where_it_is_used(emitted: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def kernels(widths: tuple[int, ...], num_columns: int, dtype: torch.dtype = torch.float32) -> list[str]:
        emitted.clear()
        rows, weights = random_operands(40, widths, num_columns)
        rows, weights = [x.to(dtype) for x in rows], [w.to(dtype) for w in weights]
        multiply(rows, weights)
        gradients(rows, weights, torch.randn(40, num_columns, dtype=dtype))
        return [name.removesuffix("_kernels") for name in emitted]

    assert kernels((128,), 128) == ["matrix_unit", "matrix_unit"]
    assert kernels((128,), 128, torch.float64) == ["product", "product"]
    assert kernels((128,), 40) == ["matrix_unit", "product"], "gradients of few columns"
    assert kernels((33,), 128) == ["product", "product"], "registers would be filled with zeros"
    most = matrix_unit_kernels.MAX_STEPS * matrix_unit.DEPTH // 2
    assert kernels((most, most), 128) == ["matrix_unit", "matrix_unit"]
    assert kernels((most, most, 128), 128) == ["product", "matrix_unit"], "too much for a thread's stack"
    assert kernels((128,), matrix_unit_kernels.MAX_GRADIENT_COLUMNS + 1) == ["matrix_unit", "product"], "the same"
    matrix_unit.has_matrix_unit.cache_clear()
    monkeypatch.setenv("DGL_HYBRID_MATRIX_UNIT", "0")
    assert kernels((128,), 128) == ["product", "product"]
    matrix_unit.has_matrix_unit.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_it_does_not_matter_what_a_script_makes_the_default_dtype(dtype: torch.dtype, flushed: None) -> None:
    """Nothing trained after `torch.set_default_dtype(torch.float64)`: the bits were those of numbers of that dtype."""
    torch.set_flush_denormal(False)
    expected = matrix_unit.least_bits(LEAST_OPERAND), matrix_unit._MOST_BITS
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        assert (matrix_unit.least_bits(LEAST_OPERAND), matrix_unit._bits_of(MOST)) == expected
        torch.set_flush_denormal(True)
        assert matrix_unit.least_bits(LEAST_OPERAND) == 0
    finally:
        torch.set_default_dtype(before)
