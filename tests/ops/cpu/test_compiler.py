# SPDX-License-Identifier: Apache-2.0
"""Kernels that are kept on disk: found by later processes, made anew where they are damaged or of something else."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import llvmlite.binding as llvm  # type: ignore[import-untyped]
import pytest
import torch
from torch import Tensor

from dgl_hybrid.ops.backend import load_backend
from dgl_hybrid.ops.compiled_code import FOLDER_VARIABLE
from dgl_hybrid.ops.cpu import compiler

make_linker = compiler._linker.__wrapped__


@pytest.fixture
def new_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], list[str]]:
    """Call it: from then on no kernel is known, as in a new process, with a cache of the test's own; returns the names
    of what is compiled from then on.
    """
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    make = compiler._machine_code

    def begin() -> list[str]:
        compiled: list[str] = []

        def count(assembly: str, name: str, *others: object) -> bytes:
            compiled.append(name)
            return make(assembly, name, *others)  # type: ignore[arg-type]

        monkeypatch.setattr(compiler, "_kernels", {})
        monkeypatch.setattr(compiler, "_linker", functools.cache(make_linker))
        monkeypatch.setattr(compiler, "_machine_code", count)
        return compiled

    return begin


def products(num_columns: int = 3) -> list[Tensor]:
    """A product and its gradients: two kernels."""
    generator = torch.Generator().manual_seed(0)
    rows, weight = torch.randn(9, 5, generator=generator), torch.randn(5, num_columns, generator=generator)
    backend = load_backend("cpu")
    out = backend.row_products([rows], [weight], None, None, None, False)
    return [out, *backend.row_products_backward([rows], [weight], out, None, None, [True], [True], False)]


def test_later_processes_compile_nothing(new_process: Callable[[], list[str]], tmp_path: Path) -> None:
    compiled = new_process()
    expected = products()
    assert len(compiled) == 2
    assert {file.stem for file in (tmp_path / "kernels").iterdir()} == {
        name.removeprefix("kernel_") for name in compiled
    }
    compiled = new_process()
    for found, result in zip(products(), expected, strict=True):
        assert torch.equal(found, result)
    assert not compiled
    products(4)
    assert len(compiled) == 2, "another width is another kernel"


def test_damaged_kernels_are_compiled_again(
    new_process: Callable[[], list[str]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    new_process()
    expected = products()
    for file in (tmp_path / "kernels").iterdir():
        data = bytearray(file.read_bytes())
        data[-100] ^= 1
        file.write_bytes(data)
    compiled = new_process()
    for found, result in zip(products(), expected, strict=True):
        assert torch.equal(found, result)
    assert len(compiled) == 2
    assert caplog.text.count("is damaged") == 2


@pytest.mark.parametrize("what", ["processor", "features", "LLVM", "passes", "level of passes", "level of code"])
def test_kernels_of_another_machine_or_compiler_are_not_taken(
    what: str, new_process: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    new_process()
    products()
    if what == "processor":
        monkeypatch.setattr(llvm, "get_host_cpu_name", lambda: "x86-64")
    elif what == "features":
        monkeypatch.setattr(compiler, "host_features", lambda: "")
    elif what == "LLVM":
        monkeypatch.setattr(llvm, "llvm_version_info", (1, 2, 3))
    elif what == "passes":
        monkeypatch.setattr(compiler, "_PASSES", compiler._PASSES[:-1])
    elif what == "level of passes":
        monkeypatch.setattr(compiler, "_PASS_LEVEL", 1)
    else:
        monkeypatch.setattr(compiler, "CODE_LEVEL", 2)
    compiled = new_process()
    products()
    assert len(compiled) == 2


def test_two_kernels_of_one_assembly(new_process: Callable[[], list[str]]) -> None:
    """The linker would refuse the same name twice."""
    from dgl_hybrid.ops.cpu.ir import KernelBuilder

    def emit() -> str:
        k = KernelBuilder()
        with k.rows():
            pass
        return k.finish()

    compiled = new_process()
    first, second = (compiler.compile_kernel(key, emit) for key in ("one", "two"))
    assert first is not second
    assert len(compiled) == 1
    assert compiler.num_compiled_kernels() == 2


def test_nothing_is_kept_on_request(
    new_process: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, "0")
    for _ in range(2):
        compiled = new_process()
        products()
        assert len(compiled) == 2
    assert not list(tmp_path.iterdir())
