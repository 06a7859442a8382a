# SPDX-License-Identifier: Apache-2.0
"""From the name of a kernel to its run on a GPU: compile a specialisation, load it, marshal the arguments, launch."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from ctypes import c_void_p
from typing import Protocol

import torch
from torch import Tensor

from dgl_hybrid.ops.cuda.driver import Driver, Extent, Kernel, KernelArgument, Module

Scalar = ctypes.c_int | ctypes.c_longlong | ctypes.c_ulonglong | ctypes.c_float
Argument = Tensor | None | Scalar
"""A tensor stands for its address, None for a null pointer; a number carries its type, as Python's has none."""

Options = tuple[str, ...]
"""What selects a specialisation of the source, such as `("-DDTYPE=0", "-DLANES=8")`."""

Capability = tuple[int, int]
"""Major and minor compute capability of a GPU."""


class Launcher(Protocol):
    """Runs kernels of the source on the device of their tensors, in the order of the calls."""

    def launch(self, kernel: str, options: Options, grid: Extent, block: Extent, arguments: Sequence[Argument]) -> None:
        """Starts a kernel; may return before it has run. Every extent of `grid` and `block` is at least 1."""


class DriverLauncher:
    """Launches through the CUDA driver, on PyTorch's current stream of the tensors' device.

    The first use of a specialisation compiles and loads it (or takes it from the cache); later ones cost a launch.

    Args:
        driver: The CUDA driver.
        cubin_of: From options and compute capability to a cubin that holds the kernels.
        stream_of: From a device to its current stream, as the driver knows it; by default PyTorch's.
    """

    def __init__(
        self,
        driver: Driver,
        cubin_of: Callable[[Options, Capability], bytes],
        stream_of: Callable[[torch.device], int] | None = None,
    ) -> None:
        self._driver, self._cubin_of = driver, cubin_of
        self._stream_of = stream_of or current_stream
        self._cubins: dict[tuple[Options, Capability], bytes] = {}
        self._modules: dict[tuple[int, Options], Module] = {}
        self._kernels: dict[tuple[int, str, Options], Kernel] = {}
        self._lock = threading.Lock()  # autograd's threads compile at the same time as the caller's

    def launch(self, kernel: str, options: Options, grid: Extent, block: Extent, arguments: Sequence[Argument]) -> None:
        """Starts a kernel on the device that its tensors are on.

        Raises:
            ValueError: The tensors are on several devices, or not contiguous.
            KernelError: The kernel cannot be compiled, loaded or launched.
        """
        device = _common_device(kernel, arguments)
        index = device.index or 0
        loaded = self._kernels.get((index, kernel, options)) or self._load(index, kernel, options)
        self._driver.launch(loaded, grid, block, self._stream_of(device), [_parameter(value) for value in arguments])

    def _load(self, index: int, kernel: str, options: Options) -> Kernel:
        with self._lock:
            key = (index, kernel, options)
            if key not in self._kernels:
                if (index, options) not in self._modules:
                    self._modules[index, options] = self._load_module(index, options)
                self._kernels[key] = self._driver.find_kernel(self._modules[index, options], kernel)
            return self._kernels[key]

    def _load_module(self, index: int, options: Options) -> Module:
        capability = self._driver.compute_capability(index)
        if (options, capability) not in self._cubins:
            self._cubins[options, capability] = self._cubin_of(options, capability)
        return self._driver.load_module(index, self._cubins[options, capability], f"kernels of {' '.join(options)}")


def current_stream(device: torch.device) -> int:
    """Returns PyTorch's current stream of a CUDA device, as the driver knows it."""
    return int(torch.cuda.current_stream(device).cuda_stream)


def _common_device(kernel: str, arguments: Sequence[Argument]) -> torch.device:
    device = None
    for argument in arguments:
        if isinstance(argument, Tensor):
            if device is None:
                device = argument.device
            elif argument.device != device:
                raise ValueError(f"{kernel}: expected all tensors on {device} (got one on {argument.device})")
            if not argument.is_contiguous():
                raise ValueError(
                    f"{kernel}: expected contiguous tensors (got shape {tuple(argument.shape)} with strides "
                    f"{argument.stride()})"
                )
    assert device is not None, "a kernel writes to a tensor"
    return device


def _parameter(argument: Argument) -> KernelArgument:
    if isinstance(argument, Tensor):
        return c_void_p(argument.data_ptr())
    return c_void_p(None) if argument is None else argument
