# SPDX-License-Identifier: Apache-2.0
"""Compiles the kernels for the host with g++, once per specialisation and machine, and launches them like a driver."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from torch import Tensor

import dgl_hybrid

HEADER = Path(__file__).with_name("simt_host.h")
RUNTIME = Path(__file__).with_name("simt_host.cpp")
SOURCE = Path(dgl_hybrid.__file__).parent / "ops" / "cuda" / "message_passing.cu"
FLAGS = (
    "-O1", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-fno-strict-aliasing", "-ffp-contract=off",
    "-Wall", "-Werror", "-Wno-unknown-pragmas", "-Wno-unused-function", "-Wno-unused-variable",
)  # fmt: skip
SANITIZERS = {
    "undefined": ("-O1", "-g", "-fsanitize=undefined", "-fno-sanitize-recover=all"),
    "address": ("-O1", "-g", "-fsanitize=address"),
}
LETTERS = {"i": ctypes.c_int, "l": ctypes.c_longlong, "u": ctypes.c_ulonglong, "f": ctypes.c_float}

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")


class SimtError(RuntimeError):
    """The host found a fault that a device would punish, or hide."""


@dataclass(frozen=True)
class HostKernels:
    """The kernels of one specialisation, compiled for the host."""

    path: Path
    library: ctypes.CDLL

    def signature(self, name: str) -> str:
        """Returns a letter per parameter: p pointer, i int32, l int64, u uint64, f float.

        Raises:
            KeyError: There is no such kernel in this specialisation.
        """
        letters = self.library.simt_signature(name.encode())
        if letters is None:
            raise KeyError(name)
        return letters.decode()

    def launch(
        self,
        name: str,
        grid: Sequence[int],
        block: Sequence[int],
        args: Sequence[Tensor | int | float | None],
        seed: int = 1,
    ) -> None:
        """Runs a kernel to its end; tensors stand for their data pointers, None for a null pointer.

        Raises:
            SimtError: Deadlock, a bad mask, a shuffle from outside the mask.
            TypeError: The arguments do not fit the kernel's signature.
        """
        letters = self.signature(name)
        if len(args) != len(letters):
            raise TypeError(f"{name} takes {len(letters)} arguments (got {len(args)})")
        values = [_value(name, i, letter, arg) for i, (letter, arg) in enumerate(zip(letters, args))]
        addresses = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        dims = [(ctypes.c_uint * 3)(*(*given, 1, 1)[:3]) for given in (grid, block)]
        if self.library.simt_launch(name.encode(), *dims, addresses, seed) != 0:
            raise SimtError(f"{name}: {self.library.simt_error().decode()}")


def load_kernels(
    options: Iterable[str], *, source: Path | str = SOURCE, sanitizer: str | None = None, flags: Iterable[str] = ()
) -> HostKernels:
    """Returns the kernels of these options; compiles them unless they were before (on this machine, by any process).

    Args:
        options: As for NVRTC; those that begin with -D count, the others are ignored.
        source: Path or text of a kernel source.
        sanitizer: "undefined" or "address"; the latter needs libasan preloaded into the process.
        flags: More flags for g++.
    """
    text = source.read_text("utf-8") if isinstance(source, Path) else source
    defines = tuple(sorted(option for option in options if option.startswith("-D")))
    return _load(text, defines, (*SANITIZERS.get(sanitizer or "", ()), *flags))


@functools.cache
def _load(source: str, defines: tuple[str, ...], flags: tuple[str, ...]) -> HostKernels:
    include = ["-DSIMT_HOST", "-I", str(HEADER.parent)]
    runtime = _build([*FLAGS, *flags, *include, "-c", "-x", "c++", "-"], RUNTIME.read_text("utf-8"), ".o")
    linked = [*FLAGS, *flags, *include, *defines, "-shared", "-x", "c++", "-", "-x", "none", str(runtime)]
    path = _build(linked, source, ".so")
    library = ctypes.CDLL(str(path))
    library.simt_launch.argtypes = [ctypes.c_char_p, *[ctypes.c_void_p] * 3, ctypes.c_uint]
    library.simt_error.restype = ctypes.c_char_p
    library.simt_signature.restype = ctypes.c_char_p
    library.simt_signature.argtypes = [ctypes.c_char_p]
    return HostKernels(path, library)


def _build(arguments: list[str], source: str, suffix: str) -> Path:
    """Compiles the text; the file's name is the hash of all that decides its content."""
    key = hashlib.sha256("\0".join([_compiler_version(), *arguments, source, HEADER.read_text("utf-8")]).encode())
    path = _cache_folder() / f"{key.hexdigest()[:32]}{suffix}"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            built = Path(folder, path.name)
            done = subprocess.run(["g++", *arguments, "-o", str(built)], input=source, capture_output=True, text=True)
            if done.returncode != 0:
                raise RuntimeError(f"g++ failed: {' '.join(arguments)}\n{done.stderr}")
            built.replace(path)  # whole or not at all, whoever else builds it
    return path


@functools.cache
def _compiler_version() -> str:
    return subprocess.run(["g++", "--version"], capture_output=True, text=True, check=True).stdout


def _cache_folder() -> Path:
    """A folder of the user's own, since what lies in it is executed."""
    folder = Path(tempfile.gettempdir(), f"dgl_hybrid-simt-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise RuntimeError(f"{folder} belongs to someone else or can be written by others; remove it")
    return folder


def _value(name: str, position: int, letter: str, arg: Tensor | int | float | None) -> ctypes._SimpleCData:
    if letter == "p":
        if not (arg is None or isinstance(arg, Tensor)):
            raise TypeError(f"{name}: argument {position} must be a tensor or None (got {arg!r})")
        return ctypes.c_void_p(None if arg is None else arg.data_ptr())
    if isinstance(arg, Tensor) or arg is None or (letter != "f" and not isinstance(arg, int)):
        raise TypeError(f"{name}: argument {position} must be a number of type {letter!r} (got {arg!r})")
    value = LETTERS[letter](arg)
    if letter != "f" and value.value != arg:
        raise TypeError(f"{name}: argument {position} does not fit its type {letter!r} (got {arg})")
    return value
