# SPDX-License-Identifier: Apache-2.0
"""What `tests/ops/test_backends.py` does not see: other machines' vectors, code for other targets, exp itself."""

from __future__ import annotations

import re
from collections.abc import Callable

import llvmlite.binding as llvm
import numpy as np
import pytest
import torch

from dgl_hybrid.ops.cpu import compiler, lanes, logits
from dgl_hybrid.ops.cpu.attention_kernels import (
    AttentionSpec,
    emit_backward_by_destination,
    emit_backward_by_source,
    emit_forward,
)
from dgl_hybrid.ops.cpu.backend import CpuBackend
from dgl_hybrid.ops.cpu.edge_kernels import SddmmSpec, SoftmaxSpec, emit_edge_softmax, emit_sddmm
from dgl_hybrid.ops.cpu.elementary import exp
from dgl_hybrid.ops.cpu.host import VectorUnit
from dgl_hybrid.ops.cpu.ir import KernelBuilder, Kind
from dgl_hybrid.ops.cpu.lanes import Block, column_blocks
from dgl_hybrid.ops.cpu.launch import run
from dgl_hybrid.ops.cpu.spmm_kernels import SpmmSpec, emit_select, emit_sum
from tests.ops.backend_checks import (
    Case,
    check_edge_softmax,
    check_gat,
    check_gatv2,
    check_sddmm,
    check_spmm,
    check_spmm_select_backward,
)

SSE, AVX2, NEON = VectorUnit(16, 16), VectorUnit(32, 16), VectorUnit(16, 32)


def pretend(monkeypatch: pytest.MonkeyPatch, unit: VectorUnit) -> None:
    """Kernels are written for another machine's registers; LLVM still compiles them for this one."""
    monkeypatch.setattr(lanes, "vector_unit", lambda: unit)
    monkeypatch.setattr(logits, "vector_unit", lambda: unit)
    monkeypatch.setattr(compiler, "_kernels", {})


@pytest.mark.parametrize("unit", [SSE, AVX2], ids=["sse", "avx2"])
@pytest.mark.parametrize(
    "check", [check_spmm, check_spmm_select_backward, check_sddmm, check_edge_softmax, check_gat, check_gatv2]
)
def test_narrower_registers_give_the_same(monkeypatch: pytest.MonkeyPatch, unit: VectorUnit, check: Callable) -> None:
    pretend(monkeypatch, unit)
    check(CpuBackend(), Case("power-law", heads=3, width=23))


@pytest.mark.parametrize("width", [513, 1030])
def test_heads_wider_than_any_block(width: int) -> None:
    check_spmm(CpuBackend(), Case("hand", heads=2, width=width))
    check_spmm_select_backward(CpuBackend(), Case("hand", heads=2, width=width))
    check_sddmm(CpuBackend(), Case("hand", heads=1, width=width))


def test_more_heads_than_registers_hold() -> None:
    for check in (check_edge_softmax, check_gat, check_gatv2):
        check(CpuBackend(), Case("power-law", heads=19, width=9))


TARGETS = {
    "x86-64": ("x86_64-unknown-linux-gnu", "x86-64", "", SSE),
    "haswell": ("x86_64-unknown-linux-gnu", "haswell", "", AVX2),
    "arm64": ("aarch64-unknown-linux-gnu", "generic", "+neon", NEON),
}


@pytest.mark.parametrize("name", TARGETS)
def test_kernels_compile_for_other_machines_without_calls(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    triple, cpu, features, unit = TARGETS[name]
    pretend(monkeypatch, unit)
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    try:
        target = llvm.Target.from_triple(triple)
    except RuntimeError as error:
        pytest.skip(f"this llvmlite has no code generator for {triple}: {error}")
    block = Block(4, 20)
    spmm = SpmmSpec("f32", "i32", block, edge_ids=True, weighted=True)
    attention = {v2: AttentionSpec("f32", "i32", block, v2, True, True, True) for v2 in (False, True)}
    kernels = {
        "sum": emit_sum(spmm),
        "select": emit_select(spmm),
        "dot": emit_sddmm(SddmmSpec("f32", "i32", block, "dot", "u", "v", True)),
        "softmax": emit_edge_softmax(SoftmaxSpec("f64", "i64", 5, True)),
        "gat": emit_forward(attention[False]),
        "gatv2": emit_forward(attention[True]),
        "gat backward": emit_backward_by_source(attention[False]),
        "gatv2 backward": emit_backward_by_source(attention[True]),
        "gatv2 destinations": emit_backward_by_destination(AttentionSpec("f32", "i32", block, True, True)),
    }
    for kernel, assembly in kernels.items():
        machine = target.create_target_machine(cpu=cpu, features=features, opt=2)
        module = llvm.parse_assembly(assembly)
        module.triple, module.data_layout = triple, str(machine.target_data)
        code = machine.emit_assembly(module)
        assert not re.search(r"\t(callq?|bl|blr)\t", code), f"{kernel} on {name} calls a function"


@pytest.mark.parametrize(("kind", "dtype", "bound"), [("f32", torch.float32, 2.5), ("f64", torch.float64, 2.5)])
def test_exp_is_accurate_to_the_last_places(kind: Kind, dtype: torch.dtype, bound: float) -> None:
    def emit() -> str:
        k = KernelBuilder()
        source, target = k.pointer(kind), k.pointer(kind)
        with k.rows() as row:
            target.store(row * 8, exp(source.load(row * 8, 8)))
        return k.finish()

    least = -87.0 if dtype == torch.float32 else -708.0
    special = torch.tensor([0.0, -0.0, least, -1e-30, float("-inf"), float("nan"), 2 * least, 1.0], dtype=dtype)
    x = torch.cat([torch.linspace(least, 1.0, 80_000, dtype=dtype), special])
    got = torch.empty_like(x)
    run(emit, (), np.array([0, len(x) // 8], dtype=np.int64), [x.data_ptr(), got.data_ptr()])
    regular = got[: -len(special)]
    wanted = torch.from_numpy(np.exp(x[: -len(special)].numpy().astype(np.longdouble)).astype(np.float64))
    unit = torch.finfo(dtype).eps * wanted
    assert float(((regular.double() - wanted).abs() / unit).max()) <= bound
    assert got[-8:-6].tolist() == [1.0, 1.0]
    assert got[-4].item() == 0.0
    assert got[-3].isnan()
    assert got[-2].item() == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("heads", "width"), [(1, 1), (1, 129), (4, 32), (3, 50), (40, 7), (2, 700), (1, 4096)])
def test_column_blocks_cover_each_column_once(heads: int, width: int, dtype: torch.dtype) -> None:
    size = lanes.accumulator_elements(dtype)
    covered: list[int] = []
    kinds = set()
    for first, block in column_blocks(heads, width, size):
        assert block.size <= size
        assert block.heads == 1 or first % width == 0, "a block of several heads holds whole ones"
        covered += range(first, first + block.size)
        kinds.add(block)
        pieces = block.pieces("f32" if dtype == torch.float32 else "f64")
        assert [p.begin for p in pieces] == [sum(q.lanes for q in pieces[:i]) for i in range(len(pieces))]
        assert sum(p.lanes for p in pieces) == block.size
    assert covered == list(range(heads * width))
    assert len(kinds) <= 2, "as many kernels to compile"


def test_a_block_without_columns_needs_no_kernel() -> None:
    assert list(column_blocks(3, 0, 128)) == []
