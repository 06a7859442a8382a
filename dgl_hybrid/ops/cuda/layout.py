# SPDX-License-Identifier: Apache-2.0
"""How the threads of a kernel are laid over rows and columns. Pure functions of shapes, dtypes and addresses.

A *group* of 1 to 32 lanes of a warp works on one task. Each lane loads `vec` consecutive elements at once, at best 16
bytes; in kernels that keep one head's whole row, each lane makes `packs` such loads. What a group does not cover goes
in tiles along grid.y. Blocks always have 128 threads, so a block holds 128 / group tasks.

    x (S, 4, 16) float16, flat:     64 columns = 8 lanes x 8 elements:          group 8, vec 8
    x (S, 4, 16) float32, by head:  16 columns = 4 lanes x 4 elements, 1 load:  group 4, vec 4, packs 1
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dgl_hybrid.ops.cuda.driver import Extent

BLOCK: Extent = (128, 1, 1)
"""What the kernels are compiled for."""

_LOAD_BYTES = 16
_MAX_GROUP = 32
_MAX_HELD = 32
"""Elements of one head's row that a lane may hold in registers: vec * packs."""

_MAX_GRID_X, _MAX_GRID_Y = 2**31 - 1, 2**16 - 1


@dataclass(frozen=True, slots=True)
class Layout:
    """How the threads of one specialisation are laid out; see the note of this module."""

    group: int
    vec: int
    packs: int = 1

    def tiles(self, columns: int) -> int:
        """The number of tiles that cover `columns`."""
        return -(-columns // (self.group * self.vec * self.packs))

    def grid(self, units: int, tiles: int = 1) -> Extent:
        """The grid in which every unit gets a group, in every tile.

        Raises:
            ValueError: More than a grid can have.
        """
        blocks = -(-units * self.group // BLOCK[0])
        if blocks > _MAX_GRID_X or tiles > _MAX_GRID_Y:
            raise ValueError(
                f"a launch takes at most {_MAX_GRID_X} blocks of rows and {_MAX_GRID_Y} tiles of columns (got {blocks} "
                f"and {tiles}): split the rows, or the columns"
            )
        return blocks, tiles, 1


def flat_layout(columns: int, divides: int, *operands: Tensor | None) -> Layout:
    """For kernels that take the columns of all heads in one row.

    Args:
        columns: H * D.
        divides: What `vec` must divide: D where elements of one load must share a head, else H * D.
        operands: Tensors that are read or written `vec` elements at a time.
    """
    vec = _widest_load(divides, operands)
    return Layout(group=_power_of_two_from(-(-columns // vec), _MAX_GROUP), vec=vec)


def head_layout(width: int, *operands: Tensor | None) -> Layout:
    """For kernels that hold one head's row of `width` elements, as far as registers allow."""
    vec = _widest_load(width, operands)
    group = _power_of_two_from(-(-width // vec), _MAX_GROUP)
    packs = max(1, min(-(-width // (group * vec)), _MAX_HELD // vec))
    return Layout(group=group, vec=vec, packs=packs)


def softmax_layout(num_rows: int, num_entries: int, num_heads: int) -> tuple[Layout, int]:
    """For kernels whose lanes take (entry, head) pairs: as many lanes as an average row fills.

    Returns:
        The layout and the number of its lanes that lie along the heads, a power of two.
    """
    head_lanes = _power_of_two_from(num_heads, _MAX_GROUP)
    entries = -(-num_entries // max(1, num_rows))
    return Layout(group=max(head_lanes, _power_of_two_from(entries * head_lanes, _MAX_GROUP)), vec=1), head_lanes


def _widest_load(divides: int, operands: tuple[Tensor | None, ...]) -> int:
    """The most elements per load, at most 16 bytes of each operand, that divide `divides` and suit the addresses."""
    tensors = [operand for operand in operands if operand is not None]
    vec = _LOAD_BYTES // min(tensor.element_size() for tensor in tensors if tensor.is_floating_point())
    while vec > 1 and (
        divides % vec
        # Wider operands (the index type of `arg`) take several loads of 16 bytes.
        or any(tensor.data_ptr() % min(_LOAD_BYTES, vec * tensor.element_size()) for tensor in tensors)
    ):
        vec //= 2
    return vec


def _power_of_two_from(least: int, most: int) -> int:
    """The smallest power of two that is at least `least`, but not above `most`."""
    return min(most, 1 << max(0, least - 1).bit_length())


def dtype_option(dtype: torch.dtype) -> str:
    """The option that names a dtype of features.

    Raises:
        TypeError: A dtype that the kernels do not have.
    """
    if dtype not in _DTYPES:
        names = ", ".join(str(known) for known in _DTYPES)
        raise TypeError(f"the CUDA kernels take {names} (got {dtype}); ops.naive takes any")
    return _DTYPES[dtype]


def index_option(dtype: torch.dtype) -> str:
    """The option that names the integers of a structure."""
    if dtype not in (torch.int32, torch.int64):
        raise TypeError(f"the CUDA kernels take int32 and int64 structures (got {dtype})")
    return f"-DINDEX_BITS={32 if dtype == torch.int32 else 64}"


_DTYPES = {
    torch.float32: "-DDTYPE=DTYPE_F32",
    torch.float16: "-DDTYPE=DTYPE_F16",
    torch.bfloat16: "-DDTYPE=DTYPE_BF16",
}
