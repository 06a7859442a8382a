# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import ctypes
import re
import threading
from ctypes import c_float, c_int, c_longlong, c_ulonglong, c_void_p

import pytest

from dgl_hybrid.errors import KernelError
from dgl_hybrid.ops.cuda import driver as driver_module
from dgl_hybrid.ops.cuda.driver import Driver, Kernel
from tests.ops.cuda.fake_driver import FakeDriver
from tests.ops.cuda.record import Record


def load_record(driver: Driver, fake: FakeDriver, device: int) -> Kernel:
    return driver.find_kernel(driver.load_module(device, bytes(fake.path), "record"), "record")


def record_arguments(record: Record) -> list[driver_module.KernelArgument]:
    return [
        c_void_p(ctypes.addressof(record)),
        c_void_p(0xFEDC_BA98_7654_3210),
        c_void_p(None),
        c_int(-7),
        c_longlong(-(1 << 62) - 1),
        c_ulonglong((1 << 64) - 3),
        c_float(0.2),
    ]


def test_every_kind_of_argument_arrives(fake: FakeDriver) -> None:
    driver, record = Driver(fake.library), Record(null=1)
    kernel = load_record(driver, fake, 1)
    stream = 0x7FFF_0000_1234
    driver.launch(kernel, (2_147_483_647, 65_535, 3), (128, 2, 4), stream, record_arguments(record))
    assert (list(record.grid), list(record.block)) == ([2_147_483_647, 65_535, 3], [128, 2, 4])
    assert (record.pointer, record.null) == (0xFEDC_BA98_7654_3210, None)
    assert (record.i, record.l, record.u) == (-7, -(1 << 62) - 1, (1 << 64) - 3)
    assert record.f == c_float(0.2).value
    assert fake.library.fake_last_stream() == stream


def test_what_was_current_stays_current(fake: FakeDriver) -> None:
    driver, record = Driver(fake.library), Record()
    before = fake.library.fake_depth()
    kernel = load_record(driver, fake, 0)
    driver.launch(kernel, (1, 1, 1), (32, 1, 1), 0, record_arguments(record))
    fake.set(fail_next=719)
    with pytest.raises(KernelError):
        driver.launch(kernel, (1, 1, 1), (32, 1, 1), 0, record_arguments(record))
    with pytest.raises(KernelError):
        driver.load_module(0, b"no such file", "nothing")
    assert fake.library.fake_depth_at_launch() == before + 1, "the kernel ran in the context that was entered for it"
    assert fake.library.fake_depth() == before


def test_launch_from_a_thread_without_a_context(fake: FakeDriver) -> None:
    driver, record, raised = Driver(fake.library), Record(), []
    kernel = load_record(driver, fake, 1)

    def launch() -> None:
        try:
            driver.launch(kernel, (5, 1, 1), (32, 1, 1), 0, record_arguments(record))
        except KernelError as error:
            raised.append(error)

    thread = threading.Thread(target=launch)
    thread.start()
    thread.join(timeout=60)
    assert raised == []
    assert record.grid[0] == 5


def test_refused_launch_names_kernel_grid_and_gpu(fake: FakeDriver) -> None:
    driver, record = Driver(fake.library), Record()
    kernel = load_record(driver, fake, 1)
    words = (
        "cannot launch the kernel record on GPU 1 with grid (1, 65536, 1) and block (32, 1, 1) (if the arguments are "
        "sound, an earlier kernel failed: CUDA_LAUNCH_BLOCKING=1 shows which) "
        "(got CUDA_ERROR_INVALID_VALUE: as the driver words it)"
    )
    with pytest.raises(KernelError, match=re.escape(words)):
        driver.launch(kernel, (1, 65_536, 1), (32, 1, 1), 0, record_arguments(record))


def test_status_without_a_name(fake: FakeDriver) -> None:
    driver, record = Driver(fake.library), Record()
    kernel = load_record(driver, fake, 0)
    fake.set(fail_next=12345)
    with pytest.raises(KernelError, match=r"\(got CUDA error 12345\)"):
        driver.launch(kernel, (1, 1, 1), (32, 1, 1), 0, record_arguments(record))


def test_bad_cubin_missing_kernel_and_missing_gpu(fake: FakeDriver) -> None:
    driver = Driver(fake.library)
    with pytest.raises(
        KernelError, match=r"cannot load kernels of -DA \(4 bytes\) onto GPU 0 \(got CUDA_ERROR_INVALID_IMAGE"
    ):
        driver.load_module(0, b"\x7fELF", "kernels of -DA")
    module = driver.load_module(1, bytes(fake.path), "record")
    with pytest.raises(KernelError, match=r"cannot find the kernel absent in its module on GPU 1 .*NOT_FOUND"):
        driver.find_kernel(module, "absent")
    with pytest.raises(KernelError, match=r"there is no GPU 2 \(got CUDA_ERROR_INVALID_DEVICE"):
        driver.load_module(2, bytes(fake.path), "record")


def test_what_the_driver_says_of_itself(fake: FakeDriver) -> None:
    driver = Driver(fake.library)
    assert driver.version() == "12.8"
    assert driver.device_count() == 2
    assert [driver.device_name(device) for device in range(2)] == ["Fake GPU 0", "Fake GPU 1"]
    assert driver.compute_capability(1) == (9, 0)
    assert driver.context(0) == driver.context(0) != driver.context(1)


def test_no_gpu(fake: FakeDriver) -> None:
    fake.set(devices=0)
    with pytest.raises(KernelError, match=r"cannot initialise the CUDA driver \(got CUDA_ERROR_NO_DEVICE"):
        Driver(fake.library)


def test_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_module, "LIBRARY", "libcuda_that_is_not_here.so.1")
    with pytest.raises(KernelError, match=r"expected the CUDA driver libcuda_that_is_not_here.so.1 \(got .*install"):
        Driver.load()


def test_library_that_is_no_driver() -> None:
    with pytest.raises(KernelError, match=r"expected the CUDA driver to have cuInit \(got none in None\)"):
        Driver(ctypes.CDLL(None))
