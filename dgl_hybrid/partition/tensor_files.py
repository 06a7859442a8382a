# SPDX-License-Identifier: Apache-2.0
"""Whether a tensor file of DGL (`node_feat.dgl`) is whole, found out without DGL.

DGL reads what a truncated file lacks from memory that it does not own, or ends the process. Layout, little-endian:
magic, number of tensors, and that again; of each tensor the length of its name, the name, and the array as DGL stores
one: magic, 8 bytes kept free, device (two int32), number of dimensions (int32), dtype (code, bits, uint16 lanes),
shape (int64), number of bytes (int64), and these.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import BinaryIO

from dgl_hybrid.errors import PartitionError

_FILE_MAGIC = 0xDD5A9FBE3FA2443F
_ARRAY_MAGIC = 0xDD5E40F096B4A13F
_LONGEST_NAME, _MOST_DIMENSIONS = 1 << 16, 64


class _DamagedError(Exception):
    """In words for the message."""


def check_tensor_file(path: Path, remedy: str) -> None:
    """Walks from tensor to tensor; what is stored in them is not looked at. Files of another layout pass.

    Args:
        path: Of the file.
        remedy: What the error says to do.

    Raises:
        PartitionError: It is truncated, or sizes in it contradict each other; names the file.
    """
    try:
        with path.open("rb") as file:
            _walk(file, path.stat().st_size)
    except _DamagedError as error:
        raise PartitionError(f"{path} {error}. {remedy}") from None
    except OSError as error:
        raise PartitionError(f"{path} cannot be read: {error.strerror}. {remedy}") from error


def _walk(file: BinaryIO, size: int) -> None:
    def read(layout: str) -> tuple[int, ...]:
        data = file.read(struct.calcsize(layout))
        if len(data) < struct.calcsize(layout):
            raise _DamagedError(f"is truncated (it has {size} bytes)")
        return struct.unpack(layout, data)

    if read("<Q") != (_FILE_MAGIC,):
        return
    count, again = read("<2Q")
    if count != again:
        raise _DamagedError(f"is damaged: it would have {count} tensors, and {again}")
    for number in range(count):
        (length,) = read("<Q")
        if length > _LONGEST_NAME:
            raise _DamagedError(f"is damaged: the name of tensor {number} of {count} would have {length} bytes")
        name = file.read(length)
        if len(name) < length:
            raise _DamagedError(f"is truncated (it has {size} bytes)")
        try:
            shown = name.decode("utf-8")
        except UnicodeDecodeError:
            raise _DamagedError(f"is damaged: the name of tensor {number} of {count} is no text") from None
        magic, _, _, _, dimensions, _, bits, lanes = read("<2Q3i2BH")
        if magic != _ARRAY_MAGIC or not 0 <= dimensions <= _MOST_DIMENSIONS:
            raise _DamagedError(f"is damaged: {shown!r} is no tensor")
        *shape, num_bytes = read(f"<{dimensions}qQ")
        expected = math.prod(shape) * ((bits * lanes + 7) // 8)
        if min(shape, default=0) < 0 or num_bytes != expected:
            raise _DamagedError(
                f"is damaged: {shown!r} of shape {tuple(shape)} would take {expected} bytes (got {num_bytes})"
            )
        if file.tell() + num_bytes > size:
            raise _DamagedError(f"is truncated: {shown!r} ends at byte {file.tell() + num_bytes} of {size}")
        file.seek(num_bytes, 1)
