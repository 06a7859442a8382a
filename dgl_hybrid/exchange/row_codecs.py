# SPDX-License-Identifier: Apache-2.0
"""Codecs that make rows narrower on the wire, for those who accept an approximate result: bfloat16, or 8-bit integers.

| codec | bytes of a row of F float32 | what arrives of each element |
| --- | --- | --- |
| bf16 | 2 F | the nearest bfloat16, ties to even: off by at most 2⁻⁸ of itself; what is too large becomes inf |
| int8 | F + 4 | at random one of the two nearest of 256 steps from the row's least element to its largest |

`int8` is unbiased: the expected value of what arrives is what was sent (to 2⁻¹⁷ of a step, since 16 random bits
decide), so errors of many rows average out in a sum, and in the gradients of many epochs, which those of rounding to
nearest need not. The error is less than a step, and a step at most (largest − least + |least| / 100) / 250.

    int8 row on the wire      F codes │ least, step      the latter two as bfloat16, rounded so that all codes fit

Zero stays zero where it is the row's least element (after a ReLU); a row of zeros arrives as zeros. A row with NaN or
inf in it arrives as NaN throughout, so that a run that diverges does not look healthy; so does one whose elements lie
further apart than float32 can say. Of elements that differ by less than 1e-34 little is left.

Codecs keep nothing: the same rows with the same key give the same bytes, on one kind of device.
"""

from __future__ import annotations

import hashlib
from typing import Protocol

import torch
from torch import Tensor

SMALLEST_WIDTH = 4
"""Narrower fields travel as they are: there is little to save, and they are often sums or logits of a whole row."""

_CHUNK_ELEMENTS = 1 << 17
"""Rows are encoded so many elements at a time: every temporary stays in a core's cache."""

_GPU_CHUNK_ELEMENTS = 1 << 24
"""On a GPU: each chunk takes some thirty launches, and temporaries of 12 bytes for an element."""

_NUM_STEPS = 254.5
"""A little below 255: the largest element plus a random number below 1 stays below 256 however it is rounded."""

_HEADER_BYTES = 4
_BF16_ERROR = 2.0**-8
"""A bfloat16 is off by at most half of this share of the number; a whole one makes up for the rounding before it."""

_SMALLEST_STEP = 1e-36


class RowCodec(Protocol):
    """Turns rows into what travels, and back."""

    name: str

    def row_bytes(self, width: int) -> int:
        """Returns the bytes that a row of `width` elements travels in."""

    def encode(self, rows: Tensor, *, key: tuple[int, ...], out: Tensor | None = None) -> Tensor:
        """Returns the rows as bytes.

        Args:
            rows: (W, F) floating.
            key: Decides the rounding; two messages of a run have different keys.
            out: (W, row_bytes(F)) uint8 to write to, columns of a wider tensor perhaps; None makes a new one.
        """

    def decode(self, wire: Tensor, width: int, dtype: torch.dtype, *, out: Tensor | None = None) -> Tensor:
        """Returns (R, width) rows of the (R, row_bytes(width)) uint8 that arrived, which is not changed.

        Args:
            out: (R, width) of `dtype` to write to; None makes a new one.
        """


def make_codec(name: str | None) -> RowCodec | None:
    """Returns the codec of that name, None for None: rows travel as they are.

    Raises:
        ValueError: For another name.
    """
    if name is None:
        return None
    if name not in CODECS:
        raise ValueError(f"unknown row codec (got {name!r}); choose one of {', '.join(CODECS)}")
    return CODECS[name]


def is_encoded(codec: RowCodec | None, width: int, dtype: torch.dtype) -> bool:
    """Whether a field of this width and dtype is encoded. Follows from these alone, so alike on all ranks."""
    if codec is None or not dtype.is_floating_point or width < SMALLEST_WIDTH:
        return False
    return codec.row_bytes(width) < width * dtype.itemsize


class Bf16Codec:
    """Rounds to bfloat16."""

    name = "bf16"

    def row_bytes(self, width: int) -> int:
        return 2 * width

    def encode(self, rows: Tensor, *, key: tuple[int, ...], out: Tensor | None = None) -> Tensor:
        wire = _new_wire(self, rows) if out is None else out
        if _holds_bf16(wire):
            wire.view(torch.bfloat16).copy_(rows)
        else:
            wire.copy_(rows.to(torch.bfloat16).view(torch.uint8))
        return wire

    def decode(self, wire: Tensor, width: int, dtype: torch.dtype, *, out: Tensor | None = None) -> Tensor:
        rows = wire.new_empty((len(wire), width), dtype=dtype) if out is None else out
        aligned = wire if _holds_bf16(wire) else wire.clone(memory_format=torch.contiguous_format)
        return rows.copy_(aligned.view(torch.bfloat16))


class Int8Codec:
    """Rounds at random to 256 steps between the least and the largest element of each row."""

    name = "int8"

    def row_bytes(self, width: int) -> int:
        return width + _HEADER_BYTES

    def encode(self, rows: Tensor, *, key: tuple[int, ...], out: Tensor | None = None) -> Tensor:
        wire = _new_wire(self, rows) if out is None else out
        num_rows, width = rows.shape
        generator = _generator(key, rows.device)
        chunk_rows = max(1, _chunk_elements(rows.device) // width)
        size = min(num_rows, chunk_rows)
        scaled = rows.new_empty((size, width), dtype=torch.float32)
        codes = rows.new_empty((size, width), dtype=torch.int32)
        draws = torch.empty(-(-size * width // 4), dtype=torch.int64, device=rows.device)
        for begin in range(0, num_rows, chunk_rows):
            chunk, target = rows[begin : begin + chunk_rows], wire[begin : begin + chunk_rows]
            x = scaled[: len(chunk)].copy_(chunk)
            least, step = _header_of(x)
            target[:, width:].copy_(torch.cat([least, step], 1).view(torch.uint8))
            x.sub_(least.float()).mul_(step.float().reciprocal_())
            # A random number in [0, 1) and truncation: up with the probability of the fraction. 16 bits of each draw.
            random = _draw(draws, generator).view(torch.int16)[: x.numel()]
            x.add_(random.view(x.shape), alpha=2.0**-16).add_(0.5)
            # By way of int32: straight from float to uint8, PyTorch converts one element at a time.
            target[:, :width].copy_(codes[: len(chunk)].copy_(x))
        return wire

    def decode(self, wire: Tensor, width: int, dtype: torch.dtype, *, out: Tensor | None = None) -> Tensor:
        rows = wire.new_empty((len(wire), width), dtype=dtype) if out is None else out
        header = wire[:, width:].clone(memory_format=torch.contiguous_format).view(torch.bfloat16)
        header = header.to(torch.promote_types(dtype, torch.float32))
        least, step = header[:, :1], header[:, 1:]
        chunk_rows = max(1, _chunk_elements(wire.device) // max(1, width))
        for begin in range(0, len(wire), chunk_rows):
            here = slice(begin, begin + chunk_rows)
            if rows.dtype == header.dtype:
                torch.mul(wire[here, :width], step[here], out=rows[here])
                rows[here].add_(least[here])
            else:
                rows[here].copy_(wire[here, :width] * step[here] + least[here])
        return rows


CODECS: dict[str, RowCodec] = {codec.name: codec for codec in (Bf16Codec(), Int8Codec())}


def _chunk_elements(device: torch.device) -> int:
    return _GPU_CHUNK_ELEMENTS if device.type == "cuda" else _CHUNK_ELEMENTS


def _holds_bf16(wire: Tensor) -> bool:
    """Whether all elements lie at even addresses, as a view of them as bfloat16 needs."""
    return wire.stride(0) % 2 == 0 and wire.storage_offset() % 2 == 0


def _header_of(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the (n, 1) bfloat16 least code's value and step of float32 rows; NaN where codes cannot hold a row."""
    least, largest = x.amin(1, keepdim=True), x.amax(1, keepdim=True)
    low = (least - least.abs() * _BF16_ERROR).to(torch.bfloat16)
    step = (largest - low.float()) * ((1 + _BF16_ERROR) / _NUM_STEPS)
    step = torch.where(torch.isfinite(step), step.clamp_(min=_SMALLEST_STEP), torch.nan)
    return torch.where(step.isnan(), torch.nan, low), step.to(torch.bfloat16)


def _generator(key: tuple[int, ...], device: torch.device) -> torch.Generator:
    digest = hashlib.blake2b(repr(tuple(int(part) for part in key)).encode(), digest_size=8).digest()
    return torch.Generator(device=device).manual_seed(int.from_bytes(digest, "little") >> 1)


def _draw(out: Tensor, generator: torch.Generator) -> Tensor:
    """Fills int64 numbers from a generator of ours, unseen by what watches over a model's own draws: rows are encoded
    inside of its forward, and the length of a buffer may be a number of rows.
    """
    with torch._C.DisableTorchFunction():
        return out.random_(-(2**63), None, generator=generator)


def _new_wire(codec: RowCodec, rows: Tensor) -> Tensor:
    return rows.new_empty((len(rows), codec.row_bytes(rows.shape[1])), dtype=torch.uint8)
