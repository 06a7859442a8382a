# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dgl_hybrid.errors import KernelError
from dgl_hybrid.ops import backend
from dgl_hybrid.ops.compiled_code import FOLDER_VARIABLE, CodeCache
from dgl_hybrid.ops.cuda import driver as driver_module
from dgl_hybrid.ops.cuda import runtime
from dgl_hybrid.ops.cuda.launch import DriverLauncher
from dgl_hybrid.ops.cuda.nvrtc import Nvrtc
from dgl_hybrid.ops.cuda.runtime import choose_arch, create_launcher, cubin_source, describe
from dgl_hybrid.ops.naive import NaiveBackend
from tests.ops.cuda.fake_driver import FakeDriver

OPTIONS = ("-DKERNELS=KERNELS_SPMM", "-DDTYPE=DTYPE_F32")


class CountingNvrtc:
    """Stands for the compiler: its cubins say what they were made from."""

    def __init__(self, version: str = "12.8", archs: tuple[int, ...] = (75, 80, 90)) -> None:
        self.version, self.archs, self.compiled = version, archs, 0

    def supported_archs(self) -> tuple[int, ...]:
        return self.archs

    def compile(self, source: str, options: Sequence[str], arch: str) -> bytes:
        self.compiled += 1
        return f"{source} {' '.join(options)} {arch} {self.version}".encode()


class MissingNvrtc:
    @staticmethod
    def load() -> Nvrtc:
        raise KernelError("no compiler here")


@pytest.mark.parametrize(
    ("capability", "supported", "arch"),
    [
        ((9, 0), (75, 80, 86, 90), "sm_90"),
        ((8, 9), (75, 80, 86, 90), "sm_86"),
        ((8, 0), (75, 80, 86, 90), "sm_80"),
        ((12, 1), (75, 100, 120), "sm_120"),
        ((10, 3), (75, 100, 120), "sm_100"),
        ((10, 3), (75, 90, 100, 101, 120), "sm_100"),
        ((10, 1), (90, 100, 101), "sm_101"),
        ((8, 9), (80, 86, 87), "sm_86"),
    ],
)
def test_architecture_of_the_gpu_or_an_earlier_step(
    capability: tuple[int, int], supported: tuple[int, ...], arch: str
) -> None:
    assert choose_arch(capability, supported) == arch


@pytest.mark.parametrize("capability", [(12, 0), (7, 0), (10, 0)])
def test_gpu_that_the_compiler_does_not_know(capability: tuple[int, int]) -> None:
    words = "expected an NVRTC that compiles for compute capability {}.{} ".format(*capability)
    with pytest.raises(KernelError, match=words + r"\(got one for sm_75, sm_80, sm_90\): install a PyTorch"):
        choose_arch(capability, (75, 80, 90))


def test_cubin_is_compiled_once_per_source_compiler_and_architecture(tmp_path: Path) -> None:
    def compiled(nvrtc: Any, source: str, capability: tuple[int, int] = (9, 0)) -> tuple[bytes, int]:
        before = nvrtc.compiled
        cubin = cubin_source(nvrtc, source, CodeCache(tmp_path, "cubin"))(OPTIONS, capability)
        return cubin, nvrtc.compiled - before

    nvrtc = CountingNvrtc()
    first = f"A {' '.join(OPTIONS)} sm_90 12.8".encode()
    assert compiled(nvrtc, "A") == (first, 1)
    assert compiled(nvrtc, "A") == (first, 0)
    assert compiled(nvrtc, "B")[1] == 1
    assert compiled(nvrtc, "A", (8, 6))[1] == 1
    assert compiled(nvrtc, "A", (8, 9))[1] == 0, "compiled for the same sm_80"
    assert compiled(CountingNvrtc("12.9"), "A")[1] == 1
    assert compiled(nvrtc, "A") == (first, 0)


def test_launcher_of_a_machine_with_driver_and_compiler(
    fake: FakeDriver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(driver_module, "LIBRARY", str(fake.path))
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "dgl_hybrid"))
    monkeypatch.setattr(runtime.Nvrtc, "load", CountingNvrtc)
    launcher = create_launcher()
    with pytest.raises(KernelError, match="cannot load kernels of -DKERNELS=KERNELS_SPMM -DDTYPE=DTYPE_F32"):
        launcher.launch("spmm_fwd_kernel", OPTIONS, (1, 1, 1), (128, 1, 1), [torch.zeros(1)])
    (file,) = (tmp_path / "dgl_hybrid" / "cubins").iterdir()
    assert runtime.SOURCE.read_bytes() in file.read_bytes(), "the package's own source was compiled"


def test_launcher_without_driver_or_compiler(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(driver_module, "LIBRARY", "libcuda_that_is_not_here.so.1")
    with pytest.raises(KernelError, match="expected the CUDA driver libcuda_that_is_not_here"):
        create_launcher()
    monkeypatch.setattr(driver_module, "LIBRARY", str(fake.path))
    monkeypatch.setattr(runtime, "Nvrtc", MissingNvrtc)
    with pytest.raises(KernelError, match="no compiler here"):
        create_launcher()


def test_no_launcher_for_gpus_that_the_compiler_does_not_know(
    fake: FakeDriver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Said at once, the reference can stand in; the first launch would be too late for that."""
    monkeypatch.setattr(driver_module, "LIBRARY", str(fake.path))
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "dgl_hybrid"))
    monkeypatch.setattr(runtime.Nvrtc, "load", lambda: CountingNvrtc(archs=(75, 80)))
    with pytest.raises(KernelError, match=r"compiles for compute capability 9\.0 \(got one for sm_75, sm_80\)"):
        create_launcher()
    monkeypatch.setattr(backend, "load_backend", functools.cache(backend.load_backend.__wrapped__))
    monkeypatch.setattr(backend, "_load_or_reference", functools.cache(backend._load_or_reference.__wrapped__))
    on_cuda = SimpleNamespace(dtype=torch.float32, device=torch.device("cuda"))
    assert type(backend.choose_backend(on_cuda)) is NaiveBackend  # type: ignore[arg-type]
    capabilities = {0: (12, 0), 1: (8, 6)}
    monkeypatch.setattr(driver_module.Driver, "compute_capability", lambda self, device: capabilities[device])
    assert isinstance(create_launcher(), DriverLauncher), "one of the GPUs will do"


def test_description_of_a_machine_with_gpus(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(driver_module, "LIBRARY", str(fake.path))
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "dgl_hybrid"))
    nvrtc = CountingNvrtc()
    nvrtc.path = Path("/opt/libnvrtc.so.12")  # type: ignore[attr-defined]
    monkeypatch.setattr(runtime.Nvrtc, "load", lambda: nvrtc)
    status = describe()
    assert json.loads(json.dumps(asdict(status))) == {
        "nvrtc_path": "/opt/libnvrtc.so.12",
        "nvrtc_version": "12.8",
        "nvrtc_problem": None,
        "driver_version": "12.8",
        "driver_problem": None,
        "gpus": [{"name": f"Fake GPU {index}", "capability": "9.0", "arch": "sm_90"} for index in range(2)],
        "cubin_folder": str(tmp_path / "dgl_hybrid" / "cubins"),
        "cubin_folder_writable": True,
        "num_cubins": 0,
    }
    assert status.usable
    assert not (tmp_path / "dgl_hybrid").exists(), "looking makes nothing"
    nvrtc.archs = (75, 80)
    assert [gpu.arch for gpu in describe().gpus] == [None, None]
    assert not describe().usable
    cubin_source(CountingNvrtc(), "A", CodeCache(tmp_path / "dgl_hybrid" / "cubins", "cubin"))(OPTIONS, (9, 0))  # type: ignore[arg-type]
    assert describe().num_cubins == 1


def test_description_of_a_machine_without_anything(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(driver_module, "LIBRARY", "libcuda_that_is_not_here.so.1")
    monkeypatch.setattr(runtime, "Nvrtc", MissingNvrtc)
    (tmp_path / "file").touch()
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "file"))
    status = describe()
    assert status.nvrtc_problem == "no compiler here"
    assert status.driver_problem is not None
    assert "libcuda_that_is_not_here" in status.driver_problem
    assert (status.gpus, status.usable, status.cubin_folder_writable) == ((), False, False)


def test_import_of_the_ops_needs_no_compiler_of_any_kind() -> None:
    """No NVRTC, numba or driver is loaded and no program is looked for, before an op runs."""
    script = (
        "import os, sys, torch\n"
        "before = open('/proc/self/maps').read()\n"  # PyTorch for CUDA loads NVRTC itself
        "import dgl_hybrid.ops\n"
        "loaded = [name for name in ('numba', 'llvmlite', 'dgl_hybrid.ops.cuda.nvrtc', 'dgl_hybrid.ops.cuda.driver')"
        " if name in sys.modules]\n"
        "maps = open('/proc/self/maps').read()\n"
        "assert not loaded, loaded\n"
        "assert not [name for name in ('nvrtc', 'libcuda.so') if name in maps and name not in before]\n"
    )
    environment = {**os.environ, "PATH": "/nonexistent"}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True, timeout=600)
