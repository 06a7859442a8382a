# SPDX-License-Identifier: Apache-2.0
"""What a codec may do to rows: how far off, not biased, the same for the same key, and odd rows in the stated way."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dgl_hybrid.exchange import row_codecs
from dgl_hybrid.exchange.row_codecs import CODECS, is_encoded, make_codec

INT8, BF16 = CODECS["int8"], CODECS["bf16"]


def pass_through(codec: row_codecs.RowCodec, rows: Tensor, key: tuple[int, ...] = (1, 2)) -> Tensor:
    wire = codec.encode(rows, key=key)
    assert wire.dtype == torch.uint8
    assert wire.shape == (len(rows), codec.row_bytes(rows.shape[1]))
    return codec.decode(wire, rows.shape[1], rows.dtype)


def largest_step(rows: Tensor) -> Tensor:
    """(n, 1): the bound that the module states."""
    least, largest = rows.double().amin(1, keepdim=True), rows.double().amax(1, keepdim=True)
    return (largest - least + least.abs() / 100) / 250


def varied_rows(num_rows: int = 4000, width: int = 33) -> Tensor:
    """Normal rows of magnitudes from 1e-8 to 1e8, some shifted far from zero, some cut off at zero."""
    generator = torch.Generator().manual_seed(7)
    rows = torch.randn(num_rows, width, generator=generator)
    rows *= 10.0 ** (16 * torch.rand(num_rows, 1, generator=generator) - 8)
    rows[::3] += 50 * rows[::3, :1]
    rows[1::3] = rows[1::3].relu()
    return rows


def test_bf16_rounds_to_nearest_and_ties_to_even() -> None:
    unit = 2.0**-7  # between neighbours of 1
    rows = torch.tensor([[1.0, 1 + unit / 2, 1 + 3 * unit / 2, 1 + 0.51 * unit, -3.3e38, math.inf, math.nan, 0.0]])
    expected = torch.tensor([[1.0, 1.0, 1 + 2 * unit, 1 + unit, -math.inf, math.inf, math.nan, 0.0]])
    expected[0, 4] = torch.tensor(-3.3e38).bfloat16()
    assert torch.equal(pass_through(BF16, rows).nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0))
    rows = varied_rows()
    assert bool(((pass_through(BF16, rows) - rows).abs() <= rows.abs() * 2.0**-8).all())


def test_int8_is_off_by_less_than_a_step() -> None:
    rows = varied_rows()
    error = (pass_through(INT8, rows).double() - rows.double()).abs()
    bound = largest_step(rows)
    assert bool((error <= bound * (1 + 1e-4)).all())
    # And of the size that random rounding has: a step over sqrt(6) if fractions are spread evenly.
    assert 0.3 < float((error**2 / bound**2).mean().sqrt()) < 0.45


@pytest.mark.parametrize("shift", [0.0, -3.0, 1000.0])
def test_int8_is_unbiased(shift: float) -> None:
    """The mean over keys, element by element, and over all elements; rounding to nearest fails both."""
    num_keys, rows = 600, torch.linspace(0, 1, 16 * 64).view(16, 64) ** 2 + shift
    rows[:, -1] = shift - 0.1
    errors = torch.stack([pass_through(INT8, rows, (key, 3)).double() - rows.double() for key in range(num_keys)])
    step = largest_step(rows)
    by_element = errors.mean(0).abs() / step
    assert float(by_element.max()) < 5.5 * 0.5 / math.sqrt(num_keys)
    assert abs(float((errors / step).mean())) < 5.0 * 0.5 / math.sqrt(errors.numel())
    nearest = (rows / step).round() * step - rows
    assert float((nearest / step).abs().max()) > 5.5 * 0.5 / math.sqrt(num_keys)


def test_int8_errors_of_different_elements_and_keys_are_independent() -> None:
    rows = torch.full((40, 50), 0.437)
    rows[:, 0], rows[:, 1] = 0.0, 1.0
    errors = torch.stack([pass_through(INT8, rows, (key,))[:, 2:] - 0.437 for key in range(300)]).double()
    per_key = errors.mean((1, 2)) / errors.std()
    # The mean of 1920 independent errors; were they the same for all rows of a message, this would be 6 times larger.
    assert float(per_key.std()) == pytest.approx(1 / math.sqrt(40 * 48), rel=0.2)


@pytest.mark.parametrize("codec", CODECS.values(), ids=list(CODECS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(0, 8), (1, 4), (5, 7), (300, 65)])
def test_the_same_key_gives_the_same_bytes_wherever_they_are_written(
    codec: row_codecs.RowCodec, dtype: torch.dtype, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_codecs, "_CHUNK_ELEMENTS", 1000)
    rows = torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(1))
    wire = codec.encode(rows, key=(1, 2, 3))
    assert torch.equal(wire, codec.encode(rows, key=(1, 2, 3)))
    for before, after in ((0, 4), (2, 2), (3, 0), (1, 6)):
        whole = torch.full((len(rows), before + wire.shape[1] + after), 99, dtype=torch.uint8)
        columns = whole[:, before : before + wire.shape[1]]
        assert codec.encode(rows, key=(1, 2, 3), out=columns).data_ptr() == columns.data_ptr()
        assert torch.equal(columns, wire)
        assert bool((whole[:, :before] == 99).all())
        assert bool((whole[:, before + wire.shape[1] :] == 99).all())
        assert torch.equal(codec.decode(columns, shape[1], dtype), codec.decode(wire, shape[1], dtype))
    out = torch.empty_like(rows)
    assert codec.decode(wire, shape[1], dtype, out=out) is out
    assert out.dtype == dtype
    if codec is INT8 and len(rows) > 1:
        assert not torch.equal(wire, codec.encode(rows, key=(1, 2, 4)))


def test_rows_of_many_chunks_are_as_those_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = varied_rows()
    monkeypatch.setattr(row_codecs, "_CHUNK_ELEMENTS", 1000)
    error = (pass_through(INT8, rows).double() - rows.double()).abs()
    assert bool((error <= largest_step(rows) * (1 + 1e-4)).all())


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ([0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]),
        ([0.0, 0.0, -0.0, 3e38], [0.0, 0.0, 0.0, None]),
        ([1.0, 2.0, math.nan, 0.0], [math.nan] * 4),
        ([1.0, 2.0, math.inf, 0.0], [math.nan] * 4),
        ([1.0, 2.0, -math.inf, 0.0], [math.nan] * 4),
        ([3e38, -3e38, 0.0, 0.0], [math.nan] * 4),
    ],
)
def test_odd_rows(row: list[float], expected: list[float | None]) -> None:
    rows = torch.tensor([[1.0, 2.0, 3.0, 4.0], row, [4.0, 3.0, 2.0, 1.0]])
    before, odd, after = pass_through(INT8, rows).tolist()
    assert [a for a, e in zip(odd, expected, strict=True) if e is not None] == pytest.approx(
        [e for e in expected if e is not None], abs=0.0, nan_ok=True
    )
    assert before == pytest.approx([1, 2, 3, 4], abs=0.013)
    assert after == pytest.approx([4, 3, 2, 1], abs=0.013)


def test_nearly_equal_elements_keep_their_value() -> None:
    rows = torch.tensor([[1000.3] * 4, [-1e-7] * 4, [5e8, 5e8 + 64, 5e8, 5e8]])
    assert bool(((pass_through(INT8, rows) / rows - 1).abs() < 5e-5).all())


def test_half_precision_rows() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        rows = torch.randn(50, 16, generator=torch.Generator().manual_seed(2)).to(dtype)
        arrived = pass_through(INT8, rows)
        assert arrived.dtype == dtype
        bound = largest_step(rows) + rows.double().abs() * torch.finfo(dtype).eps
        assert bool(((arrived.double() - rows.double()).abs() <= 1.01 * bound).all())


def test_what_is_encoded_follows_from_width_and_dtype() -> None:
    floats = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    assert [is_encoded(BF16, 8, dtype) for dtype in floats] == [True, True, False, False]
    assert [is_encoded(INT8, 8, dtype) for dtype in floats] == [True] * 4
    assert [is_encoded(INT8, width, torch.float32) for width in (0, 1, 3, 4)] == [False, False, False, True]
    # Four elements in half precision are 8 bytes, as long as their codes with header.
    assert not is_encoded(INT8, 4, torch.float16)
    assert not is_encoded(INT8, 8, torch.int64)
    assert not is_encoded(None, 8, torch.float32)


def test_names() -> None:
    assert make_codec(None) is None
    assert [make_codec(name) for name in ("bf16", "int8")] == [BF16, INT8]
    with pytest.raises(ValueError, match=r"unknown row codec \(got 'int4'\); choose one of bf16, int8"):
        make_codec("int4")
