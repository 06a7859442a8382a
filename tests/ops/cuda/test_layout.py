# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch

from dgl_hybrid.ops.cuda.layout import (
    Layout,
    dtype_option,
    flat_layout,
    head_layout,
    index_option,
    softmax_layout,
)

POWERS = [1, 2, 4, 8, 16, 32]


def aligned(numel: int, dtype: torch.dtype, offset_bytes: int = 0) -> torch.Tensor:
    """A tensor whose address is `offset_bytes` above a multiple of 64."""
    base = torch.zeros(numel * dtype.itemsize + 256, dtype=torch.uint8)
    start = -base.data_ptr() % 64 + offset_bytes
    return base[start : start + numel * dtype.itemsize].view(dtype)


@pytest.mark.parametrize(
    ("columns", "divides", "dtype", "expected"),
    [
        (64, 16, torch.float16, Layout(group=8, vec=8)),  # the first example of the note
        (64, 16, torch.float32, Layout(group=16, vec=4)),
        (128, 128, torch.float32, Layout(group=32, vec=4)),
        (602, 602, torch.float32, Layout(group=32, vec=2)),
        (47, 47, torch.float32, Layout(group=32, vec=1)),
        (47, 47, torch.bfloat16, Layout(group=32, vec=1)),
        (36, 9, torch.float32, Layout(group=32, vec=1)),
        (1, 1, torch.float32, Layout(group=1, vec=1)),
        (5, 5, torch.float32, Layout(group=8, vec=1)),
        (2048, 2048, torch.bfloat16, Layout(group=32, vec=8)),
    ],
)
def test_flat(columns: int, divides: int, dtype: torch.dtype, expected: Layout) -> None:
    assert flat_layout(columns, divides, aligned(columns, dtype), None) == expected


@pytest.mark.parametrize(
    ("width", "dtype", "expected"),
    [
        (16, torch.float32, Layout(group=4, vec=4, packs=1)),  # the second example of the note
        (300, torch.float32, Layout(group=32, vec=4, packs=3)),
        (1024, torch.float32, Layout(group=32, vec=4, packs=8)),
        (5000, torch.float32, Layout(group=32, vec=4, packs=8)),
        (5000, torch.bfloat16, Layout(group=32, vec=8, packs=4)),
        (1, torch.float16, Layout(group=1, vec=1, packs=1)),
    ],
)
def test_by_head(width: int, dtype: torch.dtype, expected: Layout) -> None:
    assert head_layout(width, aligned(width, dtype)) == expected


@pytest.mark.parametrize("columns", [*range(1, 140), 602, 1433, 3703, 65_536])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_column_is_covered_and_no_load_crosses_the_end(columns: int, dtype: torch.dtype) -> None:
    operand = aligned(1, dtype)
    for layout in (flat_layout(columns, columns, operand), head_layout(columns, operand)):
        assert columns % layout.vec == 0
        assert layout.vec * dtype.itemsize <= 16
        assert layout.vec * layout.packs <= 32
        assert layout.group in POWERS
        tile = layout.group * layout.vec * layout.packs
        assert (layout.tiles(columns) - 1) * tile < columns <= layout.tiles(columns) * tile


@pytest.mark.parametrize(
    ("offset_bytes", "dtype", "vec"),
    [
        (0, torch.float32, 4),
        (4, torch.float32, 1),
        (8, torch.float32, 2),
        (2, torch.float16, 1),
        (4, torch.float16, 2),
        (8, torch.float16, 4),
        (16, torch.float16, 8),
    ],
)
def test_loads_suit_the_addresses(offset_bytes: int, dtype: torch.dtype, vec: int) -> None:
    sound, offset = aligned(64, dtype), aligned(64, dtype, offset_bytes)
    assert flat_layout(64, 64, sound, offset).vec == vec
    assert flat_layout(64, 64, offset, sound).vec == vec


def test_addresses_of_winners_count_too() -> None:
    """`arg` has the index dtype; 8 int64 take four loads of 16 bytes, so no more than 16 bytes of alignment."""
    x = aligned(64, torch.float16)
    assert flat_layout(64, 64, x, aligned(64, torch.int64, 16)).vec == 8
    assert flat_layout(64, 64, x, aligned(64, torch.int64, 8)).vec == 1
    assert flat_layout(64, 64, x, aligned(64, torch.int32, 8)).vec == 2


@pytest.mark.parametrize(
    ("num_rows", "num_entries", "num_heads", "expected"),
    [
        (100, 3000, 1, (Layout(group=32, vec=1), 1)),
        (100, 300, 1, (Layout(group=4, vec=1), 1)),
        (100, 300, 4, (Layout(group=16, vec=1), 4)),
        (100, 300, 3, (Layout(group=16, vec=1), 4)),
        (100, 0, 8, (Layout(group=8, vec=1), 8)),
        (0, 0, 1, (Layout(group=1, vec=1), 1)),
        (100, 300, 200, (Layout(group=32, vec=1), 32)),
    ],
)
def test_softmax(num_rows: int, num_entries: int, num_heads: int, expected: tuple[Layout, int]) -> None:
    assert softmax_layout(num_rows, num_entries, num_heads) == expected


def test_grid_gives_every_unit_a_group() -> None:
    for group in POWERS:
        for units in (1, 3, 127, 128, 129, 1_000_003):
            blocks, tiles, _ = Layout(group=group, vec=1).grid(units, 5)
            assert (blocks - 1) * 128 < units * group <= blocks * 128
            assert tiles == 5


def test_grid_beyond_the_limits() -> None:
    layout = Layout(group=32, vec=1)
    assert layout.grid(4 * (2**31 - 1), 65_535) == (2**31 - 1, 65_535, 1)
    with pytest.raises(ValueError, match=r"at most 2147483647 blocks .* \(got 2147483648 and 1\)"):
        layout.grid(4 * (2**31 - 1) + 1)
    with pytest.raises(ValueError, match=r"65535 tiles of columns \(got 1 and 65536\)"):
        layout.grid(1, 65_536)


def test_dtypes_the_kernels_lack() -> None:
    with pytest.raises(TypeError, match=r"take torch.float32, .* \(got torch.float64\); ops.naive takes any"):
        dtype_option(torch.float64)
    with pytest.raises(TypeError, match=r"int32 and int64 structures \(got torch.int16\)"):
        index_option(torch.int16)
