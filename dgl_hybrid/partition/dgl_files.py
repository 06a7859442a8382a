# SPDX-License-Identifier: Apache-2.0
"""Whether files that DGL has written (`node_feat.dgl`, `graph.dgl`) are whole, found out without DGL.

DGL reads what a truncated file lacks from memory that it does not own, or ends the process. Layouts are little-endian.

Tensors: magic, number of tensors, and that again; of each tensor the length of its name, the name, and the array as DGL
stores one: magic, 8 bytes kept free, device (two int32), number of dimensions (int32), dtype (code, bits, uint16
lanes), shape (int64), number of bytes (int64), and these.

Graphs: magic, version, kind and number of graphs in a head of 4096 bytes; where the first graph begins; labels; the
graphs; and at the end where each of them begins, as a list with its length, between two numbers that both say how many
bytes it has. All are uint64.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from dgl_hybrid.errors import PartitionError

_FILE_MAGIC = 0xDD5A9FBE3FA2443F
_ARRAY_MAGIC = 0xDD5E40F096B4A13F
_GRAPH_MAGIC, _GRAPH_VERSION, _GRAPH_HEAD_BYTES = 0xDD2E4FF046B4A13F, 2, 4096
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
    _check(path, remedy, _walk)


def check_graph_file(path: Path, remedy: str) -> None:
    """Looks whether it ends as DGL ends one; what is stored in it is not looked at. Files of another layout pass.

    Args:
        path: Of the file.
        remedy: What the error says to do.

    Raises:
        PartitionError: It is truncated, or something follows its end; names the file.
    """
    _check(path, remedy, _look_at_end)


def _check(path: Path, remedy: str, look: Callable[[BinaryIO, int], None]) -> None:
    try:
        with path.open("rb") as file:
            look(file, path.stat().st_size)
    except _DamagedError as error:
        raise PartitionError(f"{path} {error}. {remedy}") from None
    except OSError as error:
        raise PartitionError(f"{path} cannot be read: {error.strerror}. {remedy}") from error


def _look_at_end(file: BinaryIO, size: int) -> None:
    truncated = _DamagedError(f"is truncated (it has {size} bytes)")
    head = file.read(32)
    if len(head) < 32:
        raise truncated
    magic, version, _, count = struct.unpack("<4Q", head)
    if (magic, version) != (_GRAPH_MAGIC, _GRAPH_VERSION):
        return
    num_bytes = 8 * (1 + count)  # of the list at the end
    if size < _GRAPH_HEAD_BYTES + 8 + num_bytes + 16:
        raise truncated
    file.seek(_GRAPH_HEAD_BYTES)
    start = file.read(8)
    file.seek(size - num_bytes - 16)
    before, found, first = file.read(8), file.read(8), file.read(8)
    file.seek(size - 8)
    length = struct.pack("<Q", num_bytes)
    if (before, found, first, file.read(8)) != (length, struct.pack("<Q", count), start, length):
        raise _DamagedError(f"is truncated, or damaged (it has {size} bytes, and does not end as DGL ends a file)")


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
