# SPDX-License-Identifier: Apache-2.0
"""The few functions of the CUDA driver API that loading and launching kernels takes, through ctypes.

The driver (`libcuda.so.1`) comes with the GPU's kernel module, so wherever PyTorch can use a GPU it is there. Kernels
run in the device's primary context, which is the one that PyTorch's runtime uses: its pointers and streams are valid
there.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from ctypes import POINTER, byref, c_char_p, c_int, c_uint, c_void_p
from dataclasses import dataclass
from typing import Any

from dgl_hybrid.errors import KernelError

LIBRARY = "libcuda.so.1"

_CAPABILITY = (75, 76)  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR

_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuDriverGetVersion": (POINTER(c_int),),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetName": (c_char_p, c_int, c_int),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (POINTER(c_void_p),),
    "cuModuleLoadData": (POINTER(c_void_p), c_void_p),
    "cuModuleGetFunction": (POINTER(c_void_p), c_void_p, c_char_p),
    # function, grid x 3, block x 3, bytes of shared memory, stream, parameters, extra
    "cuLaunchKernel": (c_void_p, *(c_uint,) * 7, c_void_p, POINTER(c_void_p), POINTER(c_void_p)),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuGetErrorString": (c_int, POINTER(c_char_p)),
}

KernelArgument = c_int | ctypes.c_longlong | ctypes.c_ulonglong | ctypes.c_float | c_void_p
"""One parameter of a kernel, with the size and the bits that the kernel reads."""

Extent = tuple[int, int, int]
"""Blocks of a grid, or threads of a block, along x, y and z."""


@dataclass(frozen=True, slots=True)
class Module:
    """Kernels that are loaded onto a GPU, for as long as the process runs."""

    device: int
    handle: int


@dataclass(frozen=True, slots=True)
class Kernel:
    """A function of a loaded module, with what an error says about it."""

    name: str
    device: int
    handle: int


class Driver:
    """The driver of this machine. Its methods may be called from several threads, such as autograd's.

    Args:
        library: `libcuda`, or what stands for it in a test.
    Raises:
        KernelError: The library lacks a function, or cannot be initialised.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._contexts: dict[int, int] = {}
        self._lock = threading.Lock()
        for name, signature in _SIGNATURES.items():
            try:
                function = getattr(library, name)
            except AttributeError:
                raise KernelError(
                    f"expected the CUDA driver to have {name} (got none in {library._name}): update the GPU's driver"
                ) from None
            function.argtypes, function.restype = signature, c_int
        self._check(library.cuInit(0), "cannot initialise the CUDA driver")

    @classmethod
    def load(cls) -> Driver:
        """Opens the driver of this machine.

        Raises:
            KernelError: There is none, or no GPU is visible to this process.
        """
        try:
            library = ctypes.CDLL(LIBRARY)
        except OSError as error:
            raise KernelError(f"expected the CUDA driver {LIBRARY} (got {error}): install the GPU's driver") from None
        return cls(library)

    def version(self) -> str:
        """Returns the highest CUDA version that the driver supports, such as "12.8"."""
        value = c_int()
        self._check(self._library.cuDriverGetVersion(byref(value)), "cannot read the driver's version")
        return f"{value.value // 1000}.{value.value % 1000 // 10}"

    def device_count(self) -> int:
        """Returns the number of GPUs visible to this process (as `CUDA_VISIBLE_DEVICES` orders them)."""
        value = c_int()
        self._check(self._library.cuDeviceGetCount(byref(value)), "cannot count the GPUs")
        return value.value

    def device_name(self, device: int) -> str:
        """Returns the model of a GPU."""
        text = ctypes.create_string_buffer(256)
        self._check(self._library.cuDeviceGetName(text, len(text), self._device(device)), f"cannot name GPU {device}")
        return text.value.decode(errors="replace")

    def compute_capability(self, device: int) -> tuple[int, int]:
        """Returns the major and minor compute capability of a GPU."""
        handle, values = self._device(device), [c_int(), c_int()]
        for attribute, value in zip(_CAPABILITY, values):
            status = self._library.cuDeviceGetAttribute(byref(value), attribute, handle)
            self._check(status, f"cannot read the compute capability of GPU {device}")
        return values[0].value, values[1].value

    def load_module(self, device: int, cubin: bytes, what: str) -> Module:
        """Loads a cubin onto a GPU.

        Args:
            device: Number of the GPU.
            cubin: Compiled for it; copied.
            what: Names the kernels in an error.
        Raises:
            KernelError: There is no such GPU, or the cubin is not for it.
        """
        handle = c_void_p()
        with _Current(self, device):
            # A cubin carries its own length.
            status = self._library.cuModuleLoadData(byref(handle), ctypes.create_string_buffer(cubin))
        self._check(status, f"cannot load {what} ({len(cubin)} bytes) onto GPU {device}")
        assert handle.value is not None
        return Module(device=device, handle=handle.value)

    def find_kernel(self, module: Module, name: str) -> Kernel:
        """Finds a kernel in a module.

        Raises:
            KernelError: It has none of that name.
        """
        handle = c_void_p()
        with _Current(self, module.device):
            status = self._library.cuModuleGetFunction(byref(handle), module.handle, name.encode())
        self._check(status, f"cannot find the kernel {name} in its module on GPU {module.device}")
        assert handle.value is not None
        return Kernel(name=name, device=module.device, handle=handle.value)

    def launch(
        self, kernel: Kernel, grid: Extent, block: Extent, stream: int, arguments: Sequence[KernelArgument]
    ) -> None:
        """Puts a kernel on a stream of its GPU; returns before it has run.

        Args:
            kernel: From `find_kernel`.
            grid: Blocks along x, y, z; each at least 1.
            block: Threads along x, y, z.
            stream: A `CUstream` of the kernel's GPU, 0 for the default stream.
            arguments: One per parameter, in order, with the parameter's size.
        Raises:
            KernelError: The driver refuses; or an earlier kernel failed, which it reports at the next call.
        """
        parameters = (c_void_p * len(arguments))(*[ctypes.addressof(argument) for argument in arguments])
        with _Current(self, kernel.device):
            status = self._library.cuLaunchKernel(kernel.handle, *grid, *block, 0, stream, parameters, None)
        if status:
            self._check(
                status,
                f"cannot launch the kernel {kernel.name} on GPU {kernel.device} with grid {grid} and block {block} "
                "(if the arguments are sound, an earlier kernel failed: CUDA_LAUNCH_BLOCKING=1 shows which)",
            )

    def context(self, device: int) -> int:
        """Returns the primary context of a GPU, which is held from the first call until the process ends."""
        with self._lock:
            if device not in self._contexts:
                value = c_void_p()
                status = self._library.cuDevicePrimaryCtxRetain(byref(value), self._device(device))
                self._check(status, f"cannot use GPU {device}")
                assert value.value is not None
                self._contexts[device] = value.value
            return self._contexts[device]

    def _device(self, device: int) -> int:
        handle = c_int()
        self._check(self._library.cuDeviceGet(byref(handle), device), f"there is no GPU {device}")
        return handle.value

    def _check(self, status: int, what: str) -> None:
        if status == 0:
            return
        name, text = c_char_p(), c_char_p()
        self._library.cuGetErrorName(status, byref(name))
        self._library.cuGetErrorString(status, byref(text))
        words = [word.value.decode() for word in (name, text) if word.value]
        raise KernelError(f"{what} (got {': '.join(words) or f'CUDA error {status}'})")


class _Current:
    """Makes a GPU's primary context current on this thread and puts back what was current.

    Autograd's threads, or a caller whose current device is another one, need not have it current.
    """

    def __init__(self, driver: Driver, device: int) -> None:
        self._driver, self._context = driver, driver.context(device)

    def __enter__(self) -> None:
        driver = self._driver
        driver._check(driver._library.cuCtxPushCurrent_v2(self._context), "cannot enter the GPU's context")

    def __exit__(self, *raised: object) -> None:
        self._driver._library.cuCtxPopCurrent_v2(byref(c_void_p()))
