# SPDX-License-Identifier: Apache-2.0
"""What `tests/ops/test_backends.py` does not see: other machines' vectors, code for other targets, exp itself."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import llvmlite.binding as llvm
import numpy as np
import pytest
import torch

from dgl_hybrid.ops.cpu import compiler, gat, gat_kernels, gatv2_kernels, lanes, logits
from dgl_hybrid.ops.cpu.attention_kernels import AttentionSpec, emit_statistics
from dgl_hybrid.ops.cpu.backend import CpuBackend
from dgl_hybrid.ops.cpu.edge_kernels import SddmmSpec, SoftmaxSpec, emit_edge_softmax, emit_sddmm
from dgl_hybrid.ops.cpu.elementary import exp
from dgl_hybrid.ops.cpu.host import VectorUnit
from dgl_hybrid.ops.cpu.ir import KernelBuilder, Kind
from dgl_hybrid.ops.cpu.lanes import Block, column_blocks
from dgl_hybrid.ops.cpu.launch import run
from dgl_hybrid.ops.cpu.spmm_kernels import SpmmSpec, emit_select, emit_sum
from dgl_hybrid.ops.cpu.tasks import KEPT_ENTRIES, LONG_ROW_ENTRIES, MAX_KEPT_ENTRIES, MIN_TASK_ROWS, cut_rows
from dgl_hybrid.ops.naive import NaiveBackend
from dgl_hybrid.ops.sparse_graph import SparseGraph
from tests.helpers.thinning import marks_of
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
    "check",
    [
        *(check_spmm, check_spmm_select_backward, check_edge_softmax, check_gat, check_gatv2),
        # Each op, with each target on each side, which load rows alike; the other pairs are slow.
        *(
            pytest.param(
                partial(check_sddmm, third=third), id=f"check_sddmm-{third + 1}of3", marks=marks_of(third == 0)
            )
            for third in range(3)
        ),
    ],
)
def test_narrower_registers_give_the_same(monkeypatch: pytest.MonkeyPatch, unit: VectorUnit, check: Callable) -> None:
    pretend(monkeypatch, unit)
    check(CpuBackend(), Case("power-law", heads=3, width=23))


@pytest.mark.parametrize("graph", ["power-law", "hand"])
def test_rows_that_are_asked_for_early_give_the_same(graph: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gat, "_LEAST_EARLY_BYTES", 0)
    monkeypatch.setattr(compiler, "_kernels", {})
    for heads, width in ((4, 32), (1, 41)):
        check_gat(CpuBackend(), Case(graph, heads=heads, width=width))
    specs = [key[1] for key in compiler._kernels if isinstance(key[1], AttentionSpec)]
    assert any(spec.positive for spec in specs)
    assert all(spec.asks_early for spec in specs)


@pytest.mark.parametrize("dots_at_end", [True, False])
def test_products_of_sums_and_of_entries_give_the_same(dots_at_end: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gat, "holds_two_sums", lambda *_: dots_at_end)
    monkeypatch.setattr(compiler, "_kernels", {})
    for heads, width in ((4, 32), (3, 23), (1, 41)):
        check_gat(CpuBackend(), Case("power-law", heads=heads, width=width))
    specs = [key[1] for key in compiler._kernels if key[0] is gat_kernels.emit_backward_by_source]
    assert {spec.dots_at_end for spec in specs} == {dots_at_end}


@pytest.mark.parametrize("width", [513, 1030])
def test_heads_wider_than_any_block(width: int) -> None:
    check_spmm(CpuBackend(), Case("hand", heads=2, width=width))
    check_spmm_select_backward(CpuBackend(), Case("hand", heads=2, width=width))
    check_sddmm(CpuBackend(), Case("hand", heads=1, width=width))


ROW_LENGTHS = {
    "tasks end between rows": [1000, 24, 1, 1023, 1024, 2, 30],
    "the last row of a task is not cut": [1023, 2048, 1, 1023, 2047, 5],
    "long rows between": [3, 2049, 5, 3000, 0, 1020, 2500, 7, 4096],
    "rows without entries": [0, 0, 1024, 0, 2048, 0, 0, 1, 0],
    "more rows than entries": [0] * 5000 + [1] * 3 + [0] * 5000 + [900],
}


def graph_of(lengths: list[int]) -> SparseGraph:
    """Rows of those lengths, from 700 sources."""
    generator = torch.Generator().manual_seed(3)
    dst = torch.repeat_interleave(torch.tensor(lengths))
    src = torch.randint(700, (len(dst),), generator=generator)
    order = torch.randperm(len(dst), generator=generator)
    return SparseGraph.from_coo(src[order], dst[order], 700, len(lengths))


@pytest.mark.parametrize("name", ROW_LENGTHS)
@pytest.mark.parametrize("heads", [1, 3, 4, 9])
def test_rows_of_gat_that_fill_its_tasks(name: str, heads: int) -> None:
    """Also by source, since what rows are of one direction the other has as columns."""
    graph = graph_of(ROW_LENGTHS[name])
    generator = torch.Generator().manual_seed(4)
    for g in (graph, graph.reverse()):
        x, grad = (torch.randn(n, heads, 8, generator=generator).double() for n in (g.num_src, g.num_dst))
        el, er = (torch.randn(n, heads, generator=generator).double() for n in (g.num_src, g.num_dst))
        found = []
        for backend in (CpuBackend(), NaiveBackend()):
            out, lse, positive = backend.gat(g.in_edges, x, el, er, 0.2, None, for_backward=True)
            grads = backend.gat_backward(g.in_edges, g.out_edges, x, el, er, out, lse, positive, grad, 0.2, None)
            found.append((out, lse, *grads))
        for mine, reference in zip(*found, strict=True):
            torch.testing.assert_close(mine, reference, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", ROW_LENGTHS)
def test_tasks_that_keep_entries_have_room_for_them(name: str) -> None:
    lengths = np.array(ROW_LENGTHS[name])
    cut = cut_rows(np.concatenate([[0], np.cumsum(lengths)]))
    for bounds, rows in ((cut.kept_bounds, lengths), (cut.kept_part_bounds, cut.part_ends - cut.part_begins)):
        assert bounds[0] == 0
        assert bounds[-1] == len(rows)
        kept = np.where(rows > LONG_ROW_ENTRIES, 0, rows)
        assert all(kept[a:b].sum() <= MAX_KEPT_ENTRIES for a, b in itertools.pairwise(bounds.tolist()))
        assert len(bounds) <= 2 + len(rows) // MIN_TASK_ROWS + kept.sum() // KEPT_ENTRIES


def test_more_heads_than_registers_hold() -> None:
    for check in (check_edge_softmax, check_gat, check_gatv2):
        for width in (9, 0):
            check(CpuBackend(), Case("power-law", heads=19, width=width))


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
    attention = AttentionSpec("f32", "i32", block, True, True, True)
    kernels = {
        "sum": emit_sum(spmm),
        "select": emit_select(spmm),
        "dot": emit_sddmm(SddmmSpec("f32", "i32", block, "dot", "u", "v", True)),
        "softmax": emit_edge_softmax(SoftmaxSpec("f64", "i64", 5, True)),
        "gat": gat_kernels.emit_forward(attention),
        "gat for backward": gat_kernels.emit_forward(replace(attention, positive=True)),
        "gatv2": gatv2_kernels.emit_forward(attention),
        "attention statistics": emit_statistics("f32", block, True, True),
        "gat backward": gat_kernels.emit_backward_by_source(attention),
        "gat backward of sums": gat_kernels.emit_backward_by_source(replace(attention, dots_at_end=True)),
        "gatv2 backward": gatv2_kernels.emit_backward_by_source(attention),
        "gatv2 destinations": gatv2_kernels.emit_backward_by_destination(AttentionSpec("f32", "i32", block, True)),
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
    size = lanes.summed_elements(dtype)
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
