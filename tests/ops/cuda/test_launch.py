# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import ctypes
import threading
from ctypes import c_float, c_int, c_longlong, c_ulonglong

import pytest
import torch
from torch import Tensor

from dgl_hybrid.errors import KernelError
from dgl_hybrid.ops.cuda.driver import Driver
from dgl_hybrid.ops.cuda.launch import Argument, Capability, DriverLauncher, Options
from tests.ops.cuda.fake_driver import FakeDriver
from tests.ops.cuda.record import Record

STREAM = 0x5555_0000_0010
OPTIONS: Options = ("-DA=1", "-DB")


class Compiled:
    """Stands for the compiler: counts what it is asked for."""

    def __init__(self, fake: FakeDriver) -> None:
        self.asked: list[tuple[Options, Capability]] = []
        self._cubin = bytes(fake.path)

    def __call__(self, options: Options, capability: Capability) -> bytes:
        self.asked.append((options, capability))
        return self._cubin


def make_launcher(fake: FakeDriver, compiled: Compiled | None = None) -> DriverLauncher:
    return DriverLauncher(Driver(fake.library), compiled or Compiled(fake), stream_of=lambda device: STREAM)


def arguments_of(out: Tensor, x: Tensor) -> list[Argument]:
    return [out, x, None, c_int(-3), c_longlong(1 << 40), c_ulonglong((1 << 64) - 1), c_float(0.5)]


def empty_record() -> Tensor:
    return torch.full((ctypes.sizeof(Record),), 255, dtype=torch.uint8)


def read(out: Tensor) -> Record:
    return Record.from_buffer_copy(out.numpy().tobytes())


def test_tensors_nulls_and_numbers_arrive_on_the_stream(fake: FakeDriver) -> None:
    out, base = empty_record(), torch.zeros(8, 4)
    make_launcher(fake).launch("record", OPTIONS, (7, 2, 1), (128, 1, 1), arguments_of(out, base[3:]))
    record = read(out)
    assert (list(record.grid), list(record.block)) == ([7, 2, 1], [128, 1, 1])
    assert record.pointer == base.data_ptr() + 3 * 4 * 4, "a view's own address"
    assert record.null is None
    assert (record.i, record.l, record.u, record.f) == (-3, 1 << 40, (1 << 64) - 1, 0.5)
    assert fake.library.fake_last_stream() == STREAM


def test_a_specialisation_is_compiled_once(fake: FakeDriver) -> None:
    compiled = Compiled(fake)
    launcher, before = make_launcher(fake, compiled), fake.launches
    for options in (OPTIONS, OPTIONS, ("-DA=2",), OPTIONS):
        launcher.launch("record", options, (1, 1, 1), (32, 1, 1), arguments_of(empty_record(), torch.zeros(1)))
    assert compiled.asked == [(OPTIONS, (9, 0)), (("-DA=2",), (9, 0))]
    assert fake.launches == before + 4


def test_threads_that_need_the_same_specialisation(fake: FakeDriver) -> None:
    """Autograd runs the backward of each device in a thread of its own."""
    compiled, outs = Compiled(fake), [empty_record() for _ in range(8)]
    launcher, start = make_launcher(fake, compiled), threading.Barrier(len(outs))

    def launch(number: int) -> None:
        start.wait(timeout=60)
        launcher.launch("record", OPTIONS, (number + 1, 1, 1), (32, 1, 1), arguments_of(outs[number], torch.zeros(1)))

    threads = [threading.Thread(target=launch, args=(number,)) for number in range(len(outs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert [read(out).grid[0] for out in outs] == list(range(1, len(outs) + 1))
    assert len(compiled.asked) == 1


def test_tensors_of_two_devices_are_refused(fake: FakeDriver) -> None:
    launcher = make_launcher(fake)
    with pytest.raises(ValueError, match=r"record: expected all tensors on cpu \(got one on meta\)"):
        launcher.launch(
            "record", OPTIONS, (1, 1, 1), (32, 1, 1), arguments_of(empty_record(), torch.zeros(1, device="meta"))
        )


def test_strided_tensors_are_refused(fake: FakeDriver) -> None:
    launcher = make_launcher(fake)
    with pytest.raises(
        ValueError, match=r"record: expected contiguous tensors \(got shape \(4, 3\) with strides \(1, 4\)\)"
    ):
        launcher.launch("record", OPTIONS, (1, 1, 1), (32, 1, 1), arguments_of(empty_record(), torch.zeros(3, 4).t()))


def test_kernel_that_is_missing(fake: FakeDriver) -> None:
    with pytest.raises(KernelError, match="cannot find the kernel absent in its module on GPU 0"):
        make_launcher(fake).launch("absent", OPTIONS, (1, 1, 1), (32, 1, 1), [torch.zeros(1)])


def test_cubin_that_cannot_be_loaded_names_its_options(fake: FakeDriver) -> None:
    launcher = DriverLauncher(Driver(fake.library), lambda options, capability: b"bad", stream_of=lambda device: 0)
    with pytest.raises(KernelError, match=r"cannot load kernels of -DA=1 -DB \(3 bytes\) onto GPU 0 \(got CUDA_ERROR"):
        launcher.launch("record", OPTIONS, (1, 1, 1), (32, 1, 1), [torch.zeros(1)])
