# SPDX-License-Identifier: Apache-2.0
"""Rows that lie in memory of their own until nobody reads them, and then on disk, at the same addresses.

A first layer that is kept needs raw features once; the script holds them in every epoch, so they must stay what they
are, views and NumPy arrays of them included. What changes is what lies behind their addresses: first memory, then a
private mapping of a file without a name. Who reads them again finds them, from the system's page cache or from disk;
who writes gets pages of his own, as ever. Rows that are read all the same go back to memory: it has larger pages.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import math
import mmap
import os
import sys
import tempfile
import weakref
from pathlib import Path

import numpy as np
import numpy.typing as npt
import psutil
import torch
from torch import Tensor

from dgl_hybrid.ops.cpu.memory import ask_for_huge_pages

_logger = logging.getLogger(__name__)

Bytes = npt.NDArray[np.uint8]

LEAST_BYTES = 4 << 20
"""Smaller rows are ordinary tensors."""

_HUGE_PAGE = 2 << 20
_IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")
"""Kinds of file systems on which nothing is gained."""

_in_memory: dict[int, weakref.ref[Bytes]] = {}
"""By address: what can be left on disk, as the bytes that its tensors hold."""
_on_disk: dict[int, weakref.ref[Bytes]] = {}


def new_rows(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An uninitialised CPU tensor that `leave_on_disk` can take out of memory; an ordinary one if that is small."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < LEAST_BYTES or sys.platform != "linux":
        return torch.empty(shape, dtype=dtype)
    # Unmapped when its last tensor, view or array ends: nothing else refers to it.
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    held = np.frombuffer(memory, dtype=np.uint8)
    address = held.ctypes.data
    ask_for_huge_pages(address, num_bytes)
    weakref.finalize(held, _forget, address).atexit = False
    _in_memory[address] = weakref.ref(held)
    storage = torch.from_numpy(held).untyped_storage()
    strides = torch.empty(shape, device="meta").stride()
    return torch.empty(0, dtype=dtype).set_(storage, 0, shape, strides)


def own_rows(rows: Tensor) -> Tensor:
    """Returns a copy that can be left on disk; the rows themselves if they are small, or not on the CPU."""
    if rows.device.type != "cpu" or rows.numel() * rows.element_size() < LEAST_BYTES or sys.platform != "linux":
        return rows
    return new_rows(tuple(rows.shape), rows.dtype).copy_(rows)


def leave_on_disk(rows: Tensor) -> int:
    """Writes rows of `new_rows` to a file and takes them out of resident memory; returns how many bytes they had.

    Nobody may write to them meanwhile. Where there is no disk (or no room on it) they stay where they are: that is 0,
    as for rows that were left before, and for other tensors.
    """
    held = _find(_in_memory, rows)
    folder = _folder_on_disk()
    if held is None or folder is None:
        return 0
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            # A huge page of the system's cache is mapped as a whole where addresses and file are aligned alike: a look
            # at one row would bring 2 MiB back.
            offset = mmap.PAGESIZE if held.ctypes.data % _HUGE_PAGE == 0 else 0
            # A page of a file that has no room on disk would end the process when it is written out.
            os.posix_fallocate(file.fileno(), 0, offset + held.nbytes)
            file.seek(offset)
            file.write(held.data)
            file.flush()
            _map_over(held, mmap.MAP_PRIVATE, file.fileno(), offset)
    except OSError as error:
        _logger.info("%.0f MB of raw rows stay in memory: %s has no room (%s)", held.nbytes / 1e6, folder, error)
        return 0
    _on_disk[held.ctypes.data] = _in_memory.pop(held.ctypes.data)
    return held.nbytes


def take_back_if_read(rows: Tensor) -> int:
    """Puts rows that lie on disk back into memory, for good, if most of them were read since; returns their bytes.

    Nobody may read or write them meanwhile. 0 if they were not read, or are not on disk.
    """
    held = _find(_on_disk, rows)
    if held is None or 2 * _resident_bytes(held) < held.nbytes:
        return 0
    content = held.copy()
    try:
        _map_over(held, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
        ask_for_huge_pages(held.ctypes.data, held.nbytes)
    except OSError as error:
        _logger.info("%.0f MB of raw rows stay on disk (%s)", held.nbytes / 1e6, error)
        return 0
    finally:
        held[:] = content  # whatever comes between: Ctrl-C would leave zeros
    del _on_disk[held.ctypes.data]
    return held.nbytes


def _find(mappings: dict[int, weakref.ref[Bytes]], rows: Tensor) -> Bytes | None:
    reference = mappings.get(rows.untyped_storage().data_ptr())
    return None if reference is None else reference()


def _forget(address: int) -> None:
    for mappings in (_in_memory, _on_disk):
        mappings.pop(address, None)


def _map_over(held: Bytes, flags: int, descriptor: int, offset: int = 0) -> None:
    """Lets something else lie where these bytes are, in one step."""
    function = ctypes.CDLL(None, use_errno=True).mmap
    function.restype = ctypes.c_void_p
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
    fixed = 0x10  # MAP_FIXED of Linux, which `mmap` does not name
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    address = function(held.ctypes.data, held.nbytes, protection, flags | fixed, descriptor, offset)
    if address != held.ctypes.data:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _resident_bytes(held: Bytes) -> int:
    """Of these bytes, which begin with a page; 0 where the system does not tell."""
    num_pages = -(-held.nbytes // mmap.PAGESIZE)
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as pages:
            pages.seek(held.ctypes.data // mmap.PAGESIZE * 8)
            entries = np.frombuffer(pages.read(8 * num_pages), dtype=np.uint64)
    except OSError:
        return 0
    return int((entries >> np.uint64(63)).sum()) * mmap.PAGESIZE


@functools.cache
def _folder_on_disk() -> Path | None:
    """Returns the folder for temporary files (`TMPDIR`); None if it lies in memory, or nobody may write to any."""
    try:
        folder = Path(tempfile.gettempdir()).resolve()
    except OSError as error:  # of this rank alone, maybe in the middle of training
        _logger.info("raw rows stay in memory: %s", error)
        return None
    kinds: dict[Path, str] = {}
    with contextlib.suppress(OSError):
        kinds = {Path(partition.mountpoint): partition.fstype for partition in psutil.disk_partitions(all=True)}
    kind = next((kinds[parent] for parent in (folder, *folder.parents) if parent in kinds), "")
    return None if not kind or kind in _IN_MEMORY else folder
