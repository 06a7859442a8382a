# SPDX-License-Identifier: Apache-2.0
"""Brings compiler, cache and driver of this machine together, and says what of them it found."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dgl_hybrid.errors import KernelError
from dgl_hybrid.ops.compiled_code import CodeCache, code_key, default_folder
from dgl_hybrid.ops.cuda.driver import Driver
from dgl_hybrid.ops.cuda.launch import Capability, DriverLauncher, Options
from dgl_hybrid.ops.cuda.nvrtc import Nvrtc

SOURCE = Path(__file__).with_name("message_passing.cu")
_FOLDER = "cubins"


@dataclass(frozen=True, slots=True)
class GpuStatus:
    """One GPU that this process sees."""

    name: str
    capability: str
    """Compute capability, such as "9.0"."""
    arch: str | None
    """What its kernels are compiled for, such as "sm_90"; None if NVRTC cannot."""


@dataclass(frozen=True, slots=True)
class CudaStatus:
    """What the CUDA ops need and what of it is here; every `*_problem` is None if there is none."""

    nvrtc_path: str | None
    nvrtc_version: str | None
    nvrtc_problem: str | None
    driver_version: str | None
    """Highest CUDA version that the driver supports."""
    driver_problem: str | None
    gpus: tuple[GpuStatus, ...]
    cubin_folder: str | None
    """Where compiled kernels are kept; None without a home folder."""
    cubin_folder_writable: bool
    num_cubins: int

    @property
    def usable(self) -> bool:
        """Whether the CUDA ops can run on some GPU here."""
        return any(gpu.arch is not None for gpu in self.gpus)


def create_launcher() -> DriverLauncher:
    """Returns a launcher of the kernels on this machine's GPUs.

    Raises:
        KernelError: No CUDA driver, no GPU, no NVRTC, or one that knows none of the GPUs.
    """
    driver, nvrtc = Driver.load(), Nvrtc.load()
    _require_known_gpu(driver, nvrtc.supported_archs())
    cache = CodeCache(default_folder(_FOLDER), "cubin")
    return DriverLauncher(driver, cubin_source(nvrtc, SOURCE.read_text("utf-8"), cache))


def cubin_source(nvrtc: Nvrtc, source: str, cache: CodeCache) -> Callable[[Options, Capability], bytes]:
    """Returns what a launcher calls for the cubin of one specialisation."""

    def cubin(options: Options, capability: Capability) -> bytes:
        arch = choose_arch(capability, nvrtc.supported_archs())
        key = code_key(source, *options, f"NVRTC {nvrtc.version}", arch)
        return cache.load_or_compile(key, lambda: nvrtc.compile(source, options, arch))

    return cubin


_TEGRA = frozenset({53, 62, 72, 87, 101})
"""Of systems on a chip: what is compiled for one runs on no other GPU of its generation."""


def choose_arch(capability: Capability, supported: Sequence[int]) -> str:
    """Returns the architecture to compile for: a GPU runs what was made for its generation or an earlier step of it.

    Args:
        capability: Of the GPU.
        supported: What the compiler knows, such as (75, 80, 86, 90).
    Raises:
        KernelError: The compiler knows no such architecture.
    """
    major, minor = capability
    own = 10 * major + minor
    known = [arch for arch in supported if arch // 10 == major and arch <= own and (arch == own or arch not in _TEGRA)]
    if not known:
        raise KernelError(
            f"expected an NVRTC that compiles for compute capability {major}.{minor} (got one for "
            f"{', '.join(f'sm_{arch}' for arch in supported) or 'none'}): install a PyTorch whose CUDA knows this GPU"
        )
    return f"sm_{max(known)}"


def _require_known_gpu(driver: Driver, supported: Sequence[int]) -> None:
    """Raises KernelError if the compiler knows no visible GPU: now, while the reference ops can still stand in."""
    problem: KernelError | None = None
    for index in range(driver.device_count()):
        try:
            choose_arch(driver.compute_capability(index), supported)
            return
        except KernelError as error:
            problem = error
    if problem is not None:
        raise problem


def describe() -> CudaStatus:
    """Looks for what the CUDA ops need, without compiling anything. Initialises the driver in this process."""
    nvrtc_path, nvrtc_version, nvrtc_problem = None, None, None
    archs: tuple[int, ...] = ()
    try:
        nvrtc = Nvrtc.load()
        nvrtc_path, nvrtc_version, archs = str(nvrtc.path), nvrtc.version, nvrtc.supported_archs()
    except KernelError as error:
        nvrtc_problem = str(error)
    driver_version, driver_problem, gpus = None, None, []
    try:
        driver = Driver.load()
        driver_version = driver.version()
        for index in range(driver.device_count()):
            capability = driver.compute_capability(index)
            try:
                arch = choose_arch(capability, archs)
            except KernelError:
                arch = None
            gpus.append(GpuStatus(driver.device_name(index), "{}.{}".format(*capability), arch))
    except KernelError as error:
        driver_problem = str(error)
    folder = default_folder(_FOLDER)
    return CudaStatus(
        nvrtc_path=nvrtc_path,
        nvrtc_version=nvrtc_version,
        nvrtc_problem=nvrtc_problem,
        driver_version=driver_version,
        driver_problem=driver_problem,
        gpus=tuple(gpus),
        cubin_folder=None if folder is None else str(folder),
        cubin_folder_writable=folder is not None and _writable(folder),
        num_cubins=0 if folder is None or not folder.is_dir() else sum(1 for _ in folder.glob("*.cubin")),
    )


def _writable(folder: Path) -> bool:
    """Whether files can be made in `folder`, or the folder itself can be."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    return there.is_dir() and os.access(there, os.W_OK | os.X_OK)
