# SPDX-License-Identifier: Apache-2.0
"""Builds the library of `pretend_gpu.cpp` with the compiler at hand, once a session."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from torch.utils import cpp_extension

from tests.conftest import CODE_VARIABLE

SOURCE = Path(__file__).with_name("pretend_gpu.cpp")


def find_compiler() -> str | None:
    """Returns the C++ compiler, None if there is none."""
    return next((path for name in ("g++", "c++", "clang++") if (path := shutil.which(name))), None)


def build_library(compiler: str) -> Path:
    """Returns the library; compiles it unless another process of this session has."""
    path = Path(os.environ[CODE_VARIABLE], "libpretend_gpu.so")
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        built = Path(folder, path.name)
        done = subprocess.run(
            [
                *(compiler, "-O0", "-std=c++20", "-Wall", "-Wextra", "-shared", "-fPIC", str(SOURCE), "-o", str(built)),
                f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
                *(part for include in cpp_extension.include_paths() for part in ("-isystem", include)),
                *(f"-L{folder}" for folder in cpp_extension.library_paths()),
                *("-lc10", "-ltorch_cpu"),
            ],
            capture_output=True,
            text=True,
            timeout=600,
        )
        if done.returncode:
            raise RuntimeError(f"the compiler failed on {SOURCE.name}:\n{done.stderr}")
        built.replace(path)  # whole or not at all, whoever else builds it
    return path
