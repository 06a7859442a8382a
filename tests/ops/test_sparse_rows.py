# SPDX-License-Identifier: Apache-2.0
"""`SparseRows`: products of rows with few entries equal those of the dense rows, and so do the weights' gradients."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from dgl_hybrid.ops import SparseRows
from dgl_hybrid.ops.backend import use_backend
from dgl_hybrid.ops.sparse_rows import BLOCK_ROWS, LEAST_ENTRIES


@pytest.fixture(params=["naive", "cpu"], autouse=True)
def backend(request: pytest.FixtureRequest) -> Iterator[None]:
    with use_backend(request.param):
        yield


def rows_with(num_rows: int, num_columns: int, density: float, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(num_rows + num_columns)
    x = torch.randn(num_rows, num_columns, generator=generator, dtype=torch.float64)
    return (x * (torch.rand(num_rows, num_columns, generator=generator) < density)).to(dtype)


@pytest.mark.parametrize(
    ("num_rows", "num_columns", "density", "num_blocks"),
    [
        (0, 3, 0.0, 1),
        (7, 5, 0.0, 1),
        (7, 0, 0.0, 1),
        (1, 3, 1.0, 1),
        (BLOCK_ROWS, 4, 0.5, 1),
        (BLOCK_ROWS + 1, 4, 0.5, 2),
        (3 * BLOCK_ROWS + 17, 33, 0.1, 4),
        (3 * BLOCK_ROWS, 70, LEAST_ENTRIES / (2.9 * BLOCK_ROWS), 2),  # columns of one block would be all but empty
    ],
)
@pytest.mark.parametrize("width", [1, 17])
def test_products_and_gradients_are_those_of_dense_rows(
    num_rows: int, num_columns: int, density: float, num_blocks: int, width: int
) -> None:
    x = rows_with(num_rows, num_columns, density)
    rows = SparseRows.from_dense(x)
    assert rows is not None
    assert rows.shape == (num_rows, num_columns)
    assert rows.num_blocks == num_blocks
    assert len(rows.values) == int(x.count_nonzero())
    weight = torch.randn(num_columns, width, dtype=torch.float64, requires_grad=True)
    ours, expected = rows.times(weight), x @ weight
    torch.testing.assert_close(ours, expected)
    grad = torch.randn(num_rows, width, dtype=torch.float64)
    torch.testing.assert_close(torch.autograd.grad(ours, weight, grad), torch.autograd.grad(expected, weight, grad))
    torch.testing.assert_close(rows.transposed_times(grad), x.t() @ grad)


def test_weights_in_any_strides_and_float32() -> None:
    x = rows_with(50, 20, 0.2, torch.float32)
    rows = SparseRows.from_dense(x)
    assert rows is not None
    weight = torch.randn(8, 20)
    torch.testing.assert_close(rows.times(weight.t()), x @ weight.t())
    torch.testing.assert_close(rows.times(torch.randn(20, 1).expand(20, 6)).shape, torch.Size((50, 6)))


def test_gradients_of_gradients() -> None:
    rows = SparseRows.from_dense(rows_with(9, 6, 0.3))
    assert rows is not None
    weight = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(rows.times, weight)
    assert torch.autograd.gradgradcheck(lambda w: rows.times(w * w), weight)


def test_rows_with_too_many_entries_stay_dense() -> None:
    x = rows_with(100, 10, 0.3)
    density = int(x.count_nonzero()) / x.numel()
    assert SparseRows.from_dense(x, density * 0.99) is None
    kept = SparseRows.from_dense(x, density)
    assert kept is not None
    assert kept.num_bytes < x.numel() * x.element_size() * 1.5


def test_entries_that_are_not_finite_count_and_weights_that_are_not_reach_their_rows_alone() -> None:
    x = torch.tensor([[0.0, float("nan")], [1.0, 0.0], [0.0, float("inf")]])
    rows = SparseRows.from_dense(x)
    assert rows is not None
    assert rows.times(torch.ones(2, 1)).flatten().tolist()[1:] == [1.0, float("inf")]
    assert rows.times(torch.ones(2, 1))[0].isnan().all()
    infinite = torch.tensor([[float("inf")], [1.0]])
    assert rows.times(infinite)[1:].flatten().tolist() == [float("inf"), float("inf")]


def test_operands_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match=r"rows must have two dimensions \(got a tensor of shape \(3,\)\)"):
        SparseRows.from_dense(torch.ones(3))
    rows = SparseRows.from_dense(torch.eye(3))
    assert rows is not None
    for wrong in (torch.ones(4, 2), torch.ones(3), torch.ones(3, 2, dtype=torch.float64)):
        with pytest.raises(ValueError, match=r"weight must be \(3, H\) of torch.float32 for rows of shape \(3, 3\)"):
            rows.times(wrong)
        with pytest.raises(ValueError, match=r"x must be \(3, H\) of torch.float32"):
            rows.transposed_times(wrong)


@pytest.mark.parametrize(
    ("name", "operand", "words"),
    [
        ("addend", torch.ones(6, 2), "addend must be (3, 2) of torch.float32 for rows of shape (3, 3)"),
        ("addend", torch.ones(1, 2), "and a weight of 2 columns (got (1, 2) of torch.float32)"),
        ("addend", torch.ones(3, 2, dtype=torch.float64), "(got (3, 2) of torch.float64)"),
        ("bias", torch.ones(1), "bias must be (2,) of torch.float32 for rows of shape (3, 3)"),
        ("bias", torch.ones(2, dtype=torch.float64), "(got (2,) of torch.float64)"),
    ],
)
def test_what_is_added_must_fit(name: str, operand: Tensor, words: str) -> None:
    """More rows were left out, one row was added to a thousand, and a backward said what nobody could place."""
    rows = SparseRows.from_dense(torch.eye(3))
    assert rows is not None
    with pytest.raises(ValueError, match=re.escape(words)):
        rows.times(torch.ones(3, 2), **{name: operand})


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int64, torch.bool])
def test_rows_that_are_not_floating_are_refused(dtype: torch.dtype) -> None:
    """Products of complex rows lost the imaginary part."""
    with pytest.raises(TypeError, match=rf"rows must be floating \(got a tensor of {dtype}\)"):
        SparseRows.from_dense(torch.ones(2, 2).to(dtype))


def test_flops_are_those_of_the_entries() -> None:
    rows = SparseRows.from_dense(torch.eye(10))
    assert rows is not None
    weight = torch.ones(10, 4, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        rows.times(weight).sum().backward()
    assert counter.get_total_flops() == 2 * (2 * 10 * 4)


def test_no_columns() -> None:
    """Of rows in several blocks, whose sums are added up."""
    rows = SparseRows.from_dense((torch.rand(5000, 20) < 0.5).float())
    assert rows is not None
    assert rows.num_blocks > 1
    assert rows.transposed_times(torch.empty(5000, 0)).shape == (20, 0)
    weight = torch.empty(20, 0, requires_grad=True)
    rows.times(weight).sum().backward()
    assert weight.grad is not None
    assert weight.grad.shape == (20, 0)
