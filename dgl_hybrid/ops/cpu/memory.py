# SPDX-License-Identifier: Apache-2.0
"""Memory as the operating system sees it: huge pages for tensors, freed memory that is kept for the next ones, and
code that is not needed any more.

The first write to a page costs more than what the kernels do with it: filling 48 MiB of fresh memory takes 80 ms in
4 KiB pages and 20 ms in huge ones (one thread, Linux 6.18). Rows gathered from huge pages also need fewer
translations. Where huge pages are off, or on other systems, these are ordinary tensors.
"""

from __future__ import annotations

import ctypes
import functools
import math
import mmap
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dgl_hybrid.ops.cpu.host import vector_unit

MIN_HUGE_BYTES = 4 << 20
"""Smaller tensors hold no or one huge page; the allocator keeps their memory anyway."""

MIN_UNMAPPED_BYTES = 1 << 20
"""Less than that stays: to learn how much of all that a process has mapped is in memory takes 20 to 80 ms."""

MIN_PAST_CACHE_BYTES = 16 << 20
"""What is smaller mostly stays in the last cache until it is read."""

_MALLOC_VARIABLES = {"MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_"}
_MALLOC_TUNABLES = re.compile(r"\bglibc\.malloc\.(mmap_max|mmap_threshold|trim_threshold|top_pad)\b")
_KEEPING = ((-4, 0), (-1, -1), (-2, 64 << 20))
"""Of `mallopt`, as `malloc.h` numbers them: nothing is mapped by itself (M_MMAP_MAX), the heap is not trimmed
(M_TRIM_THRESHOLD), and grows by so much at once (M_TOP_PAD)."""
_AS_BEFORE = ((-4, 65536), (-3, 32 << 20), (-1, 64 << 20), (-2, 128 << 10))
"""Likewise, as glibc begins; but its thresholds for mapping (M_MMAP_THRESHOLD) and trimming, which by itself grow with
what is freed and once they are set do not, as far as they would."""
_is_keeping = False
KEEPING_ENVIRONMENT = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 36),
    "MALLOC_TOP_PAD_": str(64 << 20),
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}
"""Variables that do the same, huge pages too, for a process that is none of ours: what we are compared with."""


def new_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An uninitialised CPU tensor."""
    tensor = torch.empty(shape, dtype=dtype)
    num_bytes = math.prod(shape) * tensor.element_size()
    if num_bytes >= MIN_HUGE_BYTES:
        ask_for_huge_pages(tensor.data_ptr(), num_bytes)
    return tensor


def ask_for_huge_pages(address: int, num_bytes: int) -> None:
    """Asks for huge pages in the whole pages of some memory."""
    if (advise := _madvise()) is not None:
        begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        advise(begin, end - begin)


def goes_past_cache(out: Tensor, column: int, num_columns: int) -> bool:
    """Whether some columns of a result are better written straight to memory: whole vectors of a large one.

    It would be pushed out of the last cache before anybody reads it, and memory that is written over need not be read:
    products of 100,000 rows and 128 columns take 0.9 of the time.
    """
    if out.numel() * out.element_size() < MIN_PAST_CACHE_BYTES or not out.is_contiguous():
        return False
    size = vector_unit().register_bytes
    row_bytes, begin, width = (count * out.element_size() for count in (out[0].numel(), column, num_columns))
    return not any(value % size for value in (out.data_ptr(), row_bytes, begin, width))


def ask_for_huge_heap() -> None:
    """Asks for huge pages in the C library's heap, where tensors lie that PyTorch makes.

    Memory that was given back and is taken again comes page by page else; an epoch over rows in small pages took 15 to
    20 % longer.
    """
    advise = _madvise()
    if advise is None:
        return
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            heaps = [line.split()[0].split("-") for line in maps if line.rstrip().endswith("[heap]")]
    except OSError:
        return
    for begin, end in heaps:
        advise(int(begin, 16), int(end, 16) - int(begin, 16))


def keep_freed_memory() -> bool:
    """Has glibc keep what is freed, for what is allocated next, until `stop_keeping_freed_memory`; returns whether it
    does so by this.

    By itself it asks the system for each tensor above its threshold (32 MiB at most) and hands it back when it is
    freed, so that every layer of every epoch writes to fresh pages: two layers of GCN of width 256 over 46,000 rows, as
    `dgl.nn` with a ReLU between, took 142 ms and take 86, and at most 60 to 140 MB more of 1.0 to 1.1 GB (one thread).
    `malloc_trim` still gives everything back that is free.

    Whoever has set how glibc allocates, by `MALLOC_..._` or `GLIBC_TUNABLES`, keeps that: nothing is changed then, nor
    where the C library is another one.
    """
    if _MALLOC_VARIABLES & os.environ.keys() or _MALLOC_TUNABLES.search(os.environ.get("GLIBC_TUNABLES", "")):
        return False
    if sys.platform != "linux":
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version") or not hasattr(library, "mallopt"):
        return False
    global _is_keeping
    _is_keeping = True
    return all(library.mallopt(option, value) for option, value in _KEEPING)


def stop_keeping_freed_memory() -> None:
    """Has glibc hand back what is freed, as it does by itself, where `keep_freed_memory` had told it otherwise.

    What was freed before goes back with `malloc_trim`.
    """
    global _is_keeping
    if _is_keeping:
        _is_keeping = False
        library = ctypes.CDLL(None)
        for option, value in _AS_BEFORE:
            library.mallopt(option, value)


def unmap_code_in(folder: Path) -> int:
    """Takes a library that has done its work out of this process's resident memory; returns how many bytes that was.

    Whoever calls it again finds its code where it was. What the process may write to (data, relocated tables) stays:
    other threads might be about to.
    """
    return _unmap_in(folder, lambda mapping: not mapping.is_writable)


def unmap_read_files_in(folder: Path) -> int:
    """Takes files that this process has mapped and read out of its resident memory; returns how many bytes that was.

    Whoever reads again finds everything where it was. Nobody may write to these mappings meanwhile; what somebody wrote
    before stays, with all that is mapped with it.
    """
    return _unmap_in(folder, lambda mapping: True)


def _unmap_in(folder: Path, is_chosen: Callable[[_Mapping], bool]) -> int:
    """Drops pages that are as they are on disk, and stay in the system's page cache as long as there is room.

    The system lists files by their real paths: `folder` may be reached through links, as environments often are.
    """
    advise = _madvise("MADV_DONTNEED")
    if advise is None or _mapped_bytes_in(folder.resolve()) < MIN_UNMAPPED_BYTES:
        return 0
    unmapped = 0
    for mapping in _mappings_in(folder.resolve()):
        if mapping.private_bytes or not is_chosen(mapping):
            continue
        advise(mapping.begin, mapping.end - mapping.begin)
        unmapped += mapping.resident_bytes
    return unmapped


@dataclass
class _Mapping:
    begin: int
    end: int
    is_writable: bool
    resident_bytes: int = 0
    private_bytes: int = 0
    """Of pages that are no longer those of the file, in memory or swapped out."""


def _mapped_bytes_in(folder: Path) -> int:
    """Returns how much of a folder's files is mapped, in memory or not: what is in memory takes longer to learn."""
    total = 0
    prefix = f" {folder}{os.sep}"
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if prefix in line:
                    begin, end = line.split(maxsplit=1)[0].split("-")
                    total += int(end, 16) - int(begin, 16)
    except (OSError, ValueError):
        return 0
    return total


def _mappings_in(folder: Path) -> list[_Mapping]:
    """Returns where files of a folder are mapped; nothing where the system does not tell, or not all of it."""
    found: list[_Mapping] = []
    mapping: _Mapping | None = None
    prefix = f"{folder}{os.sep}"
    try:
        with open("/proc/self/smaps", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if mapping is None and line[0].isupper():  # a score of lines about another file
                    continue
                name, *rest = line.split(maxsplit=5)
                if not name.endswith(":"):
                    begin, end = name.split("-")
                    is_here = len(rest) == 5 and rest[4].startswith(prefix)
                    mapping = _Mapping(int(begin, 16), int(end, 16), "w" in rest[0]) if is_here else None
                    found += [mapping] if mapping is not None else []
                elif mapping is not None and name == "Rss:":
                    mapping.resident_bytes = int(rest[0]) * 1024
                elif mapping is not None and name in ("Anonymous:", "Swap:"):
                    mapping.private_bytes += int(rest[0]) * 1024
    except (OSError, ValueError):
        return []
    return found


@functools.cache
def _madvise(name: str = "MADV_HUGEPAGE") -> Callable[[int, int], None] | None:
    """Gives that advice on (address, bytes); whether it is taken is the system's choice, so no answer is looked at."""
    advice = getattr(mmap, name, None)
    if sys.platform != "linux" or advice is None:
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return lambda address, num_bytes: function(address, num_bytes, advice)
