# SPDX-License-Identifier: Apache-2.0
"""Huge pages are asked for in the heap, where the system has them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from dgl_hybrid.ops.cpu.memory import ask_for_huge_heap


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
