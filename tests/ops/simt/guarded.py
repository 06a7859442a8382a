# SPDX-License-Identifier: Apache-2.0
"""Runs cases in processes of their own, with every buffer between inaccessible pages.

A read or write outside a buffer, or a write to an operand, ends such a process with SIGSEGV. "end" puts buffers flush
with the page behind, "begin" with the page before, "plain" where they were allocated.
`python -m tests.ops.simt.guarded MODE [--sanitizer NAME] CASE ...` runs cases in this process.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import mmap
import multiprocessing
import os
import traceback
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from tests.ops.simt.build import SOURCE, SimtError, load_kernels
from tests.ops.simt.cases import Case, all_cases, check
from tests.ops.simt.launches import Launcher

Mode = Literal["end", "begin", "plain"]
WRONG, FAULT, CRASHED = 10, 11, -11
"""Exit codes: a wrong result, a fault that the host reported, SIGSEGV."""

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


def run_case(
    case: Case, mode: Mode, *, source: str | None = None, sanitizer: str | None = None, operands: str = "normal"
) -> None:
    """Runs and checks a case under two schedules."""
    load = functools.partial(load_kernels, source=source or SOURCE, sanitizer=sanitizer)
    guard = functools.partial(place_guarded, at_end=mode == "end")
    for seed in (1, 2):
        place = {} if mode == "plain" else {"place": guard}
        check(case, case.results(Launcher(case.options, seed, load=load, **place), operands=operands))


def run_isolated(cases: Sequence[Case], mode: Mode, *, source: str | None = None, operands: str = "normal") -> int:
    """Runs cases in a process of their own; returns its exit code, 0 if all are right."""
    context = multiprocessing.get_context("forkserver")  # forked from a process that has imported all this
    context.set_forkserver_preload([__name__])
    process = context.Process(target=_run_all, args=([case.name for case in cases], mode, source, operands))
    process.start()
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def _run_all(names: Sequence[str], mode: Mode, source: str | None, operands: str) -> None:
    by_name = {case.name: case for case in all_cases()}
    for name in names:
        try:
            run_case(by_name[name], mode, source=source, operands=operands)
        except (AssertionError, SimtError) as error:
            traceback.print_exc()
            os._exit(WRONG if isinstance(error, AssertionError) else FAULT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mode", choices=["end", "begin", "plain"])
    parser.add_argument("--sanitizer", choices=["undefined", "address"])
    parser.add_argument("cases", nargs="+")
    arguments = parser.parse_args()
    by_name = {case.name: case for case in all_cases()}
    for name in arguments.cases:
        print(name, flush=True)  # the last name printed is the one that crashed
        run_case(by_name[name], arguments.mode, sanitizer=arguments.sanitizer)


if __name__ == "__main__":
    main()
