# SPDX-License-Identifier: Apache-2.0
"""NVRTC, NVIDIA's run-time compiler, as PyTorch's CUDA wheels install it: found, loaded and called through ctypes."""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib.util
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from dgl_hybrid.errors import KernelError

_SYSTEM_FOLDERS = (
    "/usr/local/cuda/lib64",
    "/usr/local/cuda/targets/x86_64-linux/lib",
    "/usr/local/cuda/targets/sbsa-linux/lib",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
)


@dataclass(frozen=True, eq=False)
class Nvrtc:
    """One loaded NVRTC library; calls are thread-safe."""

    path: Path
    """The library's file."""
    version: str
    """Of NVRTC, for example "12.8": cubins of another version differ."""
    _library: ctypes.CDLL = field(repr=False)

    @classmethod
    def load(cls) -> Nvrtc:
        """Loads the first NVRTC that works: of PyTorch's CUDA major version if there is one, else the newest.

        A driver runs cubins of its own CUDA major version and of older ones, and PyTorch's version is one that it runs.

        Raises:
            KernelError: None is installed, or none of them loads.
        """
        failures = []
        for path in find_libraries():
            try:
                return cls.open(path)
            except OSError as error:
                failures.append(f"{path}: {error}")
        tried = (
            "; ".join(failures)
            if failures
            else "no libnvrtc.so in site-packages/nvidia, torch/lib, the environment's lib or the system's CUDA"
        )
        raise KernelError(
            f"the CUDA kernels are compiled at first use by NVRTC, which was not found (got {tried}). Install a CUDA "
            "build of PyTorch, which brings it, or `pip install nvidia-cuda-nvrtc-cu12` (drivers for CUDA 12) or "
            "`pip install nvidia-cuda-nvrtc` (CUDA 13)"
        )

    @classmethod
    def open(cls, path: Path) -> Nvrtc:
        """Loads this library.

        Raises:
            OSError: It or its built-in functions cannot be loaded.
        """
        # NVRTC opens its built-ins by bare name, which the loader finds only if they are in memory already.
        for builtins in sorted(path.parent.glob("libnvrtc-builtins*.so*")):
            ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
        library = ctypes.CDLL(str(path))
        _declare(library)
        major, minor = ctypes.c_int(), ctypes.c_int()
        _check(library, library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)), "nvrtcVersion")
        return cls(path, f"{major.value}.{minor.value}", library)

    def supported_archs(self) -> tuple[int, ...]:
        """Returns the compute capabilities that it compiles for, ascending: 75, 80, ..."""
        count = ctypes.c_int()
        _check(self._library, self._library.nvrtcGetNumSupportedArchs(ctypes.byref(count)), "nvrtcGetNumSupportedArchs")
        archs = (ctypes.c_int * count.value)()
        _check(self._library, self._library.nvrtcGetSupportedArchs(archs), "nvrtcGetSupportedArchs")
        return tuple(sorted(archs))

    def compile(self, source: str, options: Sequence[str], arch: str) -> bytes:
        """Compiles CUDA C++ to a cubin; see `compile_with_log`."""
        return self.compile_with_log(source, options, arch)[0]

    def compile_with_log(self, source: str, options: Sequence[str], arch: str) -> tuple[bytes, str]:
        """Compiles CUDA C++ to a cubin.

        Args:
            source: The text; it may include nothing.
            options: Command-line options, for example "-DGROUP=8" or "--ptxas-options=-v".
            arch: A real architecture, for example "sm_90".
        Returns:
            The cubin and what the compiler said.
        Raises:
            KernelError: It does not compile; the message holds the compiler's.
        """
        library, program = self._library, ctypes.c_void_p()
        status = library.nvrtcCreateProgram(
            ctypes.byref(program), source.encode(), b"message_passing.cu", 0, None, None
        )
        _check(library, status, "nvrtcCreateProgram")
        try:
            arguments = [f"--gpu-architecture={arch}", "--std=c++17", *options]
            encoded = (ctypes.c_char_p * len(arguments))(*(argument.encode() for argument in arguments))
            status = library.nvrtcCompileProgram(program, len(arguments), encoded)
            log = _read(library, program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
            if status != 0:
                reason = library.nvrtcGetErrorString(status).decode()
                raise KernelError(
                    f"NVRTC {self.version} ({self.path}) failed for {' '.join(arguments)}: {reason}\n{log}"
                )
            return _read(library, program, "CUBIN"), log
        finally:
            library.nvrtcDestroyProgram(ctypes.byref(program))


def find_libraries() -> list[Path]:
    """Lists the NVRTC libraries on this machine, best first, each file once."""
    found = {path.resolve(): path for folder in _library_folders() for path in folder.glob("libnvrtc*.so*")}
    libraries = [path for path in found.values() if "builtins" not in path.name and "alt" not in path.name]
    wanted = torch.version.cuda.partition(".")[0] if torch.version.cuda else None
    return sorted(libraries, key=lambda path: (_major(path) != wanted, -int(_major(path) or 0)))


def _library_folders() -> Iterator[Path]:
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or ()) if spec else ():
        yield Path(root, "cuda_nvrtc", "lib")  # wheels of CUDA 11 and 12
        yield from sorted(Path(root).glob("cu[0-9]*/lib"))  # wheels of CUDA 13 and later
    yield Path(torch.__file__).parent / "lib"
    yield Path(sys.prefix, "lib")  # conda
    yield from (Path(folder) for folder in _SYSTEM_FOLDERS)


def _major(path: Path) -> str | None:
    match = re.search(r"\.so\.(\d+)", path.resolve().name)
    return match[1] if match else None


def _read(library: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    _check(library, getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)), f"nvrtcGet{what}Size")
    buffer = ctypes.create_string_buffer(size.value)
    _check(library, getattr(library, f"nvrtcGet{what}")(program, buffer), f"nvrtcGet{what}")
    return buffer.raw


def _check(library: ctypes.CDLL, status: int, call: str) -> None:
    if status != 0:
        raise KernelError(f"{call} failed: {library.nvrtcGetErrorString(status).decode()}")


def _declare(library: ctypes.CDLL) -> None:
    """Tells ctypes the types of the functions; the result is a status, an int, unless said otherwise.

    Raises:
        OSError: It lacks one of them, being older than CUDA 11.2.
    """
    program, text = ctypes.c_void_p, ctypes.c_char_p
    int_p, size_p = ctypes.POINTER(ctypes.c_int), ctypes.POINTER(ctypes.c_size_t)
    signatures: dict[str, list[type]] = {
        "nvrtcVersion": [int_p, int_p],
        "nvrtcGetNumSupportedArchs": [int_p],
        "nvrtcGetSupportedArchs": [int_p],
        "nvrtcGetErrorString": [ctypes.c_int],
        "nvrtcCreateProgram": [ctypes.POINTER(program), text, text, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p],
        "nvrtcDestroyProgram": [ctypes.POINTER(program)],
        "nvrtcCompileProgram": [program, ctypes.c_int, ctypes.POINTER(text)],
        "nvrtcGetProgramLogSize": [program, size_p],
        "nvrtcGetProgramLog": [program, text],
        "nvrtcGetCUBINSize": [program, size_p],
        "nvrtcGetCUBIN": [program, text],
    }
    for name, arguments in signatures.items():
        try:
            function = getattr(library, name)
        except AttributeError as error:
            raise OSError(f"{name} is missing; CUDA 11.2 or later is needed") from error
        function.argtypes, function.restype = arguments, ctypes.c_int
    library.nvrtcGetErrorString.restype = text
