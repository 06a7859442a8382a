# SPDX-License-Identifier: Apache-2.0
"""Builds the driver of `fake_driver.cpp` and speaks to it."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("fake_driver.cpp")


class FakeDriver:
    """A CUDA driver on this CPU, with two GPUs unless told otherwise."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.library = ctypes.CDLL(str(path))
        self.library.fake_last_stream.restype = ctypes.c_void_p

    def set(self, *, devices: int = 2, fail_next: int = 0, seed: int = 1) -> None:
        """Sets the number of GPUs, the status of the next launch, and the seed of the next launch's thread schedule."""
        self.library.fake_set(devices, fail_next, seed)

    @property
    def launches(self) -> int:
        return int(self.library.fake_launches())


def build_fake_driver(folder: Path) -> FakeDriver:
    if shutil.which("g++") is None:
        pytest.skip("no g++ here: the driver that stands for CUDA's cannot be built")
    path = folder / "libfakecuda.so"
    subprocess.run(
        ["g++", "-O1", "-std=c++17", "-Wall", "-Wextra", "-shared", "-fPIC", SOURCE, "-o", path, "-ldl"],
        check=True,
        timeout=600,
    )
    return FakeDriver(path)
