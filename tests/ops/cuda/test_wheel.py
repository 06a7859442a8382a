# SPDX-License-Identifier: Apache-2.0
"""A wheel holds the kernels' source and nothing compiled; what is installed from it imports on a bare machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[3]
CU = Path("dgl_hybrid", "ops", "cuda", "message_passing.cu")

# Runs where no program can be found, so no compiler either.
SCRIPT = """
import os, shutil, sys
import torch
with open("/proc/self/maps") as file:
    before = file.read()  # PyTorch for CUDA loads NVRTC itself
import dgl_hybrid.ops
assert shutil.which("g++") is None and shutil.which("nvcc") is None
assert dgl_hybrid.ops.__file__.startswith(sys.argv[1]), dgl_hybrid.ops.__file__
kernels = ("numba", "llvmlite", "dgl_hybrid.ops.cuda.nvrtc", "dgl_hybrid.ops.cuda.driver")
assert not [name for name in kernels if name in sys.modules]
with open("/proc/self/maps") as file:
    libraries = file.read()
assert not [name for name in ("nvrtc", "libcuda.so") if name in libraries and name not in before]
import dgl_hybrid.ops.cuda.runtime as runtime
assert runtime.SOURCE.read_text("utf-8").startswith("// SPDX-License-Identifier")
assert str(runtime.SOURCE).startswith(sys.argv[1])
runtime.describe()
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the checkout, because building writes beside its source."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "checkout"
    source.mkdir()
    for name in ("setup.py", "README.md"):
        shutil.copy(CHECKOUT / name, source)
    for name in ("dgl_hybrid", "patches"):
        shutil.copytree(CHECKOUT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--use-pep517", "--disable-pip-version-check")
    command = [sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", str(folder), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = folder.glob("*.whl")
    return built


def test_wheel_is_pure_and_holds_the_kernels(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        assert archive.read(str(CU)) == (CHECKOUT / CU).read_bytes()
    assert not [name for name in names if Path(name).suffix in {".so", ".cubin", ".ptx", ".o", ".dll"}]
    modules = {str(path.relative_to(CHECKOUT)) for path in (CHECKOUT / "dgl_hybrid" / "ops").rglob("*.py")}
    assert modules <= set(names), "every module of the room is in the wheel"


def test_import_on_a_machine_without_compiler_or_gpu(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    environment = {**os.environ, "PATH": "/nonexistent", "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
