# SPDX-License-Identifier: Apache-2.0
"""Runs cases with every buffer between inaccessible pages: `python -m tests.ops.simt.guarded end|begin [options] CASE ...`.

A read or write outside a buffer, or a write to an operand, ends the process with SIGSEGV. "end" puts buffers flush with
the page behind, "begin" with the page before.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import mmap
from pathlib import Path

import torch
from torch import Tensor

from tests.ops.simt.build import SOURCE, load_kernels
from tests.ops.simt.cases import all_cases, check
from tests.ops.simt.launches import Launcher

PROT_NONE, PROT_READ = 0, 1


def place_guarded(tensor: Tensor, writable: bool, *, at_end: bool) -> Tensor:
    """Copies a tensor to pages of its own between two inaccessible ones; they stay until the process ends."""
    size = tensor.numel() * tensor.element_size()
    if size == 0:
        return tensor
    page = mmap.PAGESIZE
    inner = -(-size // page) * page
    pages = mmap.mmap(-1, inner + 2 * page)
    base = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    _KEPT.append(pages)
    offset = page + (inner - size if at_end else 0)
    placed = torch.frombuffer(pages, dtype=tensor.dtype, count=tensor.numel(), offset=offset).view(tensor.shape)
    placed.copy_(tensor)
    _protect(base, page, PROT_NONE)
    _protect(base + page + inner, page, PROT_NONE)
    if not writable:
        _protect(base + page, inner, PROT_READ)
    return placed


_KEPT: list[mmap.mmap] = []
_LIBC = ctypes.CDLL(None, use_errno=True)


def _protect(address: int, size: int, protection: int) -> None:
    if _LIBC.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(size), protection) != 0:
        raise OSError(ctypes.get_errno(), "mprotect failed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mode", choices=["end", "begin", "plain"])
    parser.add_argument("--source", type=Path, default=SOURCE)
    parser.add_argument("--sanitizer", choices=["undefined", "address"])
    parser.add_argument("cases", nargs="+")
    arguments = parser.parse_args()
    cases = {case.name: case for case in all_cases()}
    load = functools.partial(load_kernels, source=arguments.source, sanitizer=arguments.sanitizer)
    guard = functools.partial(place_guarded, at_end=arguments.mode == "end")
    for name in arguments.cases:
        case = cases[name]
        place = {} if arguments.mode == "plain" else {"place": guard}
        print(name, flush=True)  # the last name printed is the one that crashed
        check(case, case.results(Launcher(case.options, load=load, **place)))
    print("passed")


if __name__ == "__main__":
    main()
