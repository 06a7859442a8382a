# SPDX-License-Identifier: Apache-2.0
"""Which kernels serve a tensor; what happens where they cannot be loaded."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
import torch

from dgl_hybrid.errors import KernelError
from dgl_hybrid.ops import SparseGraph, backend, spmm
from dgl_hybrid.ops.backend import choose_backend, load_backend, use_backend
from dgl_hybrid.ops.naive import NaiveBackend
from dgl_hybrid.ops.sparse_graph import Adjacency


@pytest.fixture(autouse=True)
def forget_choices() -> Iterator[None]:
    """Backends are loaded once per process; these tests change what can be loaded."""
    yield
    backend.load_backend.cache_clear()
    backend._load_or_reference.cache_clear()


class Kernels(NaiveBackend):
    """Stands for a compiled backend."""


class NoKernels:
    def __init__(self) -> None:
        raise KernelError("no NVRTC was found: install nvidia-cuda-nvrtc")


def offer(monkeypatch: pytest.MonkeyPatch, name: str, class_name: str) -> None:
    load_backend.cache_clear()
    backend._load_or_reference.cache_clear()
    monkeypatch.setitem(backend._CLASSES, name, (__name__, class_name))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_cpu_tensors_go_to_the_cpu_kernels(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    offer(monkeypatch, "cpu", "Kernels")
    assert isinstance(choose_backend(torch.zeros(1, dtype=dtype)), Kernels)
    assert choose_backend(torch.zeros(1, dtype=dtype)) is choose_backend(torch.zeros(2, dtype=dtype))


class OnCuda:
    """What `choose_backend` reads of a CUDA tensor, on a machine without one."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.device = dtype, torch.device("cuda")


def test_cuda_tensors_go_to_the_cuda_kernels_float64_to_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, "cuda", "Kernels")
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert isinstance(choose_backend(OnCuda(dtype)), Kernels)  # type: ignore[arg-type]
    assert type(choose_backend(OnCuda(torch.float64))) is NaiveBackend  # type: ignore[arg-type]


def test_other_tensors_go_to_the_reference() -> None:
    assert type(choose_backend(torch.zeros(1, device="meta"))) is NaiveBackend
    assert type(choose_backend(torch.zeros(1, dtype=torch.int64))) is NaiveBackend


def test_the_reference_stands_in_and_says_why_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    offer(monkeypatch, "cpu", "NoKernels")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert type(choose_backend(torch.zeros(1))) is NaiveBackend
    assert [record.message for record in caplog.records] == [
        "The cpu ops cannot be used; slow reference ops stand in for them: no NVRTC was found: install "
        "nvidia-cuda-nvrtc"
    ]
    with pytest.raises(KernelError, match="no NVRTC was found"):
        load_backend("cpu")


def test_use_backend_holds_in_every_thread_and_ends() -> None:
    seen: list[object] = []
    with use_backend("naive") as named:
        thread = threading.Thread(target=lambda: seen.append(choose_backend(torch.zeros(1))))
        thread.start()
        thread.join(30)
        assert seen == [named]
        with use_backend("cpu") as inner:
            assert choose_backend(torch.zeros(1)) is inner
        assert choose_backend(torch.zeros(1)) is named
    with pytest.raises(RuntimeError, match="inside"), use_backend("naive"):
        raise RuntimeError("inside")
    assert backend._override is None


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ValueError, match=r"backend must be one of naive, cpu, cuda \(got 'tpu'\)"):
        load_backend("tpu")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="got 'tpu'"), use_backend("tpu"):  # type: ignore[arg-type]
        pass


def test_every_op_goes_to_the_chosen_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, "cpu", "Kernels")
    called: list[str] = []
    for name in ("spmm", "sddmm"):
        original = getattr(NaiveBackend, name)
        monkeypatch.setattr(
            Kernels,
            name,
            lambda self, *args, n=name, o=original: called.append(n) or o(self, *args),
            raising=False,
        )
    graph = SparseGraph.from_coo(torch.tensor([0, 1]), torch.tensor([0, 0]), 2, 1)
    x, w = torch.randn(2, 3, requires_grad=True), torch.randn(2, 1, requires_grad=True)
    spmm(graph, x, w).sum().backward()
    assert called == ["spmm", "spmm", "sddmm"]


@pytest.mark.parametrize("is_weighted", [False, True])
def test_a_backend_sees_the_same_index_tensors_in_every_call(
    is_weighted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Backends keep what they derive of a structure (cuts of its rows) by the identity of its `indptr`."""
    offer(monkeypatch, "cpu", "Kernels")
    seen: list[torch.Tensor] = []
    original = NaiveBackend.spmm

    def spmm_and_note(self: NaiveBackend, rows: Adjacency, *operands: object) -> object:
        seen.append(rows.indptr)
        return original(self, rows, *operands)  # type: ignore[arg-type]

    monkeypatch.setattr(Kernels, "spmm", spmm_and_note, raising=False)
    graph = SparseGraph.from_coo(torch.tensor([0, 1]), torch.tensor([0, 0]), 2, 1)
    for _ in range(2):
        spmm(graph, torch.randn(2, 3, requires_grad=True), torch.ones(2, 1) if is_weighted else None).sum().backward()
    by_source = graph.out_edges if is_weighted else graph.out_neighbours
    expected = [graph.in_edges.indptr, by_source.indptr] * 2
    assert len(seen) == 4
    assert all(a is b for a, b in zip(seen, expected, strict=True))


def test_importing_the_ops_loads_no_kernels() -> None:
    kernels = ("numba", "llvmlite", "dgl_hybrid.ops.naive", "dgl_hybrid.ops.cpu", "dgl_hybrid.ops.cuda")
    program = f"import sys, dgl_hybrid.ops; print([name for name in {kernels} if name in sys.modules])"
    out = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=600
    ).stdout
    assert out.strip().splitlines()[-1] == "[]"
