# SPDX-License-Identifier: Apache-2.0
"""The backend as it is shipped, on a GPU that is this CPU: the same kernels, compiled by g++, behind a fake driver."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from torch import Tensor

from dgl_hybrid.ops.cuda.backend import CudaBackend
from dgl_hybrid.ops.cuda.driver import Driver, Extent
from dgl_hybrid.ops.cuda.launch import Argument, Capability, DriverLauncher, Options
from dgl_hybrid.ops.cuda.tasks import TaskLists
from tests.ops.cuda.fake_driver import FakeDriver
from tests.ops.simt.build import load_kernels

LETTERS = {ctypes.c_int: "i", ctypes.c_longlong: "l", ctypes.c_ulonglong: "u", ctypes.c_float: "f"}


class HostLauncher(DriverLauncher):
    """Checks what a driver cannot see, the number and types of the arguments, and launches."""

    def __init__(self, fake: FakeDriver) -> None:
        super().__init__(Driver(fake.library), compile_for_host, stream_of=lambda device: 0)
        self.launched: list[tuple[str, Options, Extent]] = []

    def launch(self, kernel: str, options: Options, grid: Extent, block: Extent, arguments: Sequence[Argument]) -> None:
        given = "".join(
            "p" if value is None or isinstance(value, Tensor) else LETTERS[type(value)] for value in arguments
        )
        expected = load_kernels(options).signature(kernel)
        assert given == expected, f"{kernel} takes {expected} (got {given})"
        self.launched.append((kernel, options, grid))
        super().launch(kernel, options, grid, block, arguments)


def compile_for_host(options: Options, capability: Capability) -> bytes:
    """A "cubin" of the fake driver: the path of a library that holds the kernels."""
    assert capability == (9, 0)
    return bytes(load_kernels(options).path)


def make_backend(fake: FakeDriver, task_entries: int) -> tuple[CudaBackend, HostLauncher]:
    launcher = HostLauncher(fake)
    return CudaBackend(launcher, TaskLists(task_entries)), launcher
