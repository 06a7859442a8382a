# SPDX-License-Identifier: Apache-2.0
"""Huge pages are asked for in the heap, where the system has them; the compiler does not stay in memory."""

from __future__ import annotations

import ctypes
import io
import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dgl_hybrid.ops.compiled_code import FOLDER_VARIABLE
from dgl_hybrid.ops.cpu import memory
from dgl_hybrid.ops.cpu.launch import address
from dgl_hybrid.ops.cpu.memory import ask_for_huge_heap, unmap_code_in, unmap_read_files_in


def flags_of_heap() -> list[str]:
    """The kernel's flags of each mapping of the heap."""
    flags, is_heap = [], False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8", errors="replace").splitlines():
        if "-" in line.split()[0]:
            is_heap = line.endswith("[heap]")
        elif is_heap and line.startswith("VmFlags:"):
            flags.append(line)
    return flags


@pytest.mark.skipif(sys.platform != "linux", reason="huge pages are asked for on Linux")
def test_the_heap_is_advised_and_its_memory_stays() -> None:
    if not Path("/sys/kernel/mm/transparent_hugepage/enabled").is_file():
        pytest.skip("this kernel has no transparent huge pages")
    kept = [torch.full((2048,), float(number)) for number in range(200)]  # small enough for the heap
    ask_for_huge_heap()
    ask_for_huge_heap()
    flags = flags_of_heap()
    assert flags
    assert all(" hg" in line for line in flags), flags
    assert all(bool((rows == number).all()) for number, rows in enumerate(kept))


WHERE_TENSORS_LIE = """
import ctypes
import torch
import dgl_hybrid
from dgl_hybrid.ops.cpu.memory import keep_freed_memory, stop_keeping_freed_memory

class Mallinfo(ctypes.Structure):
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Mallinfo

def fill(num_elements=12 << 20):  # 48 MiB, which glibc maps by itself
    before = libc.mallinfo2()
    tensor = torch.ones(num_elements)
    full = libc.mallinfo2()
    del tensor
    after = libc.mallinfo2()
    found = full.hblkhd - before.hblkhd, full.arena - before.arena, full.arena - after.arena
    return [number >> 20 for number in found]

held = torch.ones(12 << 20)
libc.malloc_trim(0)  # what imports have freed may be as large as a tensor, and serve for it
first = fill()
is_kept = keep_freed_memory()
kept = fill() + fill()
stop_keeping_freed_memory()
libc.malloc_trim(0)
last = fill(64 << 20)  # what lies below something newer stays in the heap, and serves smaller ones
print(int(is_kept), *first, *kept, *last, int(held.sum()))
del held
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc of Linux")
@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)},
        {"GLIBC_TUNABLES": "glibc.malloc.check=0:glibc.malloc.mmap_threshold=1048576"},
        {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=3"},
    ],
    ids=["untold", "variable", "tunable", "another tunable"],
)
def test_freed_memory_is_taken_again_unless_the_user_has_told_how(variables: dict[str, str]) -> None:
    if not hasattr(ctypes.CDLL(None), "mallinfo2"):
        pytest.skip("another C library than glibc 2.33 or newer")
    environment = {name: value for name, value in os.environ.items() if "MALLOC" not in name} | variables
    command = [sys.executable, "-c", WHERE_TENSORS_LIE]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    is_kept, *in_mib, total = (int(word) for word in done.stdout.split())
    assert total == 12 << 20, "what was allocated before stays"
    is_told = any("mmap_threshold" in text.lower() for text in (*variables, *variables.values()))
    assert is_kept == (not is_told)
    # Of each of four tensors what was mapped for it alone, what the heap grew by, and shrank by as it went.
    alone, on_heap, again, last = (48, 0), (0, 48), (0, 0), (256, 0)
    expected = [alone, on_heap, again, last] if is_kept else [*[alone] * 3, last]
    for number, (to_map, to_grow) in enumerate(expected):
        mapped, grown, given_back = in_mib[3 * number : 3 * number + 3]
        assert mapped == pytest.approx(to_map, abs=1)
        assert to_grow <= grown <= to_grow + (66 if to_grow else 2)  # in steps of 64 MiB
        assert given_back <= 1


def test_the_compiler_leaves_memory_and_comes_back_when_it_is_needed() -> None:
    """In a process of its own: this one may have compiled long ago, or be shared with other tests."""
    code = """
import psutil, torch
import dgl_hybrid
from dgl_hybrid.ops import SparseGraph, spmm
from dgl_hybrid.ops.cpu import compiler

def total(width):
    graph = SparseGraph.from_csc(torch.tensor([0, 1, 3]), torch.tensor([1, 0, 1]), num_src=2)
    x = torch.arange(2.0 * width).reshape(2, width)
    found = spmm(graph, x)
    assert torch.equal(found, torch.stack([x[1], x[0] + x[1]]))
    return compiler.num_compiled_kernels()

first = total(16)
before = psutil.Process().memory_info().rss
compiler.give_back_compiler()
freed = before - psutil.Process().memory_info().rss
assert total(17) > first, "another width is another kernel"
compiler.give_back_compiler()
held = psutil.Process().memory_info().rss
compiler.give_back_compiler()
print(freed, held - (before - freed))
"""
    if sys.platform != "linux":
        pytest.skip("mappings are listed on Linux")
    environment = os.environ | {"OMP_NUM_THREADS": "1", FOLDER_VARIABLE: "0"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    freed, more = (int(word) for word in done.stdout.split())
    assert freed > 20e6, "most of the compiler's code"
    assert more < 15e6, "and again after the next kernel"


@pytest.mark.parametrize("is_compiled", [True, False], ids=["compiled", "found"])
def test_kernels_leave_their_code_alone(is_compiled: bool, tmp_path: Path) -> None:
    """Not what they were made from: a training has a dozen or two of them."""
    code = """
import ctypes, torch
import dgl_hybrid
from dgl_hybrid.ops import SparseGraph, spmm
from dgl_hybrid.ops.cpu import compiler

class Information(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena a b c d e f used g h".split()]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Information
graph = SparseGraph.from_csc(torch.tensor([0, 1, 3]), torch.tensor([1, 0, 1]), num_src=2)

def total(width):
    x = torch.arange(2.0 * width).reshape(2, width)
    assert torch.equal(spmm(graph, x), torch.stack([x[1], x[0] + x[1]]))

for width in range(16, 20):
    total(width)
before, num_before = libc.mallinfo2().used, compiler.num_compiled_kernels()
for width in range(20, 40):
    total(width)
grown = libc.mallinfo2().used - before
for width in range(16, 40):
    total(width)
print(grown, compiler.num_compiled_kernels() - num_before)
"""
    if not hasattr(ctypes.CDLL(None), "mallinfo2"):
        pytest.skip("glibc 2.33 or later tells what the heap holds")
    environment = os.environ | {FOLDER_VARIABLE: "0" if is_compiled else str(tmp_path)}
    for _ in range(1 if is_compiled else 2):
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        assert done.returncode == 0, done.stderr
    grown, num_kernels = (int(word) for word in done.stdout.split())
    assert num_kernels == 20
    assert grown < 100e3 * num_kernels, "their modules and machines would be 700 kB each"


def test_pages_that_were_written_to_stay(tmp_path: Path) -> None:
    file = tmp_path / "code"
    file.write_bytes(b"a" * memory.MIN_UNMAPPED_BYTES)
    with file.open("r+b") as handle:
        changed = mmap.mmap(handle.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        read = mmap.mmap(handle.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
    changed[0] = ord("b")
    address = ctypes.addressof(ctypes.c_char.from_buffer(changed))
    # As the loader does with relocated tables: written, then no longer writable.
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address), ctypes.c_size_t(len(changed)), mmap.PROT_READ) == 0
    assert read[:1] == b"a"
    if sys.platform != "linux":
        pytest.skip("mappings are listed on Linux")
    link = tmp_path / "link"
    link.symlink_to(tmp_path, target_is_directory=True)
    assert unmap_code_in(link) > 0, "the one that was only read"
    assert changed[:1] == b"b"
    assert read[:] == b"a" * len(read)
    assert unmap_code_in(tmp_path / "other") == 0


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what of a file is resident")
def test_files_that_were_read_leave_and_can_be_read_again(tmp_path: Path) -> None:
    file = tmp_path / "ids"
    file.write_bytes(b"a" * memory.MIN_UNMAPPED_BYTES)
    with file.open("r+b") as handle:
        changed, read = (
            mmap.mmap(handle.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
            for _ in range(2)
        )
    changed[0] = ord("b")
    assert read[:] == b"a" * len(read)
    assert unmap_code_in(tmp_path) == 0, "it could be written to"
    assert unmap_read_files_in(tmp_path) == len(read)
    assert unmap_read_files_in(tmp_path) == 0
    assert changed[:2] == b"ba"
    assert read[:] == b"a" * len(read)


@pytest.mark.skipif(sys.platform != "linux", reason="mappings are listed on Linux")
def test_who_has_mapped_little_does_not_look_how_much_of_all_is_resident(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "ids"
    file.write_bytes(b"a" * (memory.MIN_UNMAPPED_BYTES - mmap.PAGESIZE))
    with file.open("rb") as handle:
        read = mmap.mmap(handle.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
    assert read[:] == b"a" * len(read)
    monkeypatch.setattr(memory, "_mappings_in", lambda folder: pytest.fail("it takes a while"))
    assert unmap_read_files_in(tmp_path) == 0


def test_kernels_get_no_address_of_another_device() -> None:
    """They would read it, and that ends the process."""
    assert address(torch.zeros(3), 2) > 0
    with pytest.raises(ValueError, match=r"expected all tensors on the CPU, as the first is \(got one on meta\)"):
        address(torch.zeros(3, device="meta"))


def test_pages_that_were_written_to_count_where_they_are_swapped_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of them is resident then, and to drop the mapping would be to lose what was written."""
    listing = (
        "7f00-7f10 r--p 00000000 00:1f 12 /lib/a.so\nRss: 4 kB\nAnonymous: 0 kB\nSwap: 8 kB\nVmFlags: rd mr\n"
        "7f20-7f30 r--p 00000000 00:1f 12 /lib/b.so\nRss: 4 kB\nAnonymous: 0 kB\nSwap: 0 kB\nVmFlags: rd mr\n"
    )
    monkeypatch.setattr(memory, "open", lambda *args, **options: io.StringIO(listing), raising=False)
    assert [mapping.private_bytes for mapping in memory._mappings_in(Path("/lib"))] == [8192, 0]
