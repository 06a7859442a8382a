# SPDX-License-Identifier: Apache-2.0
"""Sums of rows that are packed some columns at a time equal those of rows where they are."""

from __future__ import annotations

import pytest
import torch

from dgl_hybrid.ops import EdgeDropout, SparseGraph, gat, spmm
from dgl_hybrid.ops.cpu import gat as cpu_gat
from dgl_hybrid.ops.cpu import reductions
from dgl_hybrid.ops.cpu.lanes import Block
from dgl_hybrid.ops.cpu.reductions import Operand
from dgl_hybrid.ops.cpu.tasks import LONG_ROW_ENTRIES

NUM_SRC, NUM_DST = 90, 70


def random_graph(*, longest: int = 0) -> SparseGraph:
    """Every source is read some twenty times; the first destination reads `longest` times."""
    generator = torch.Generator().manual_seed(longest)
    num_edges = 20 * NUM_SRC
    src = torch.randint(0, NUM_SRC, (num_edges + longest,), generator=generator)
    dst = torch.cat([torch.randint(1, NUM_DST, (num_edges,), generator=generator), torch.zeros(longest).long()])
    return SparseGraph.from_coo(src, dst[torch.randperm(len(dst), generator=generator)], NUM_SRC, NUM_DST)


def count_packed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Returns where each block of packed columns begins, and its width, as they are used."""
    packed: list[tuple[int, int]] = []
    columns = Operand.columns

    def watched(self: Operand, num_reads: int):  # type: ignore[no-untyped-def]
        for one in columns(self, num_reads):
            if one.x is not self.x:
                packed.append((one.begin, one.stride))
            yield one

    monkeypatch.setattr(Operand, "columns", watched)
    return packed


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(128,), (100,), (4, 32), (3, 24), (2, 3, 40)], ids=str)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("longest", [0, 2 * LONG_ROW_ENTRIES + 5])
def test_packed_columns_give_the_same_sums(
    dtype: torch.dtype, shape: tuple[int, ...], weighted: bool, longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = random_graph(longest=longest)
    x = torch.randn(NUM_SRC, *shape, dtype=dtype)
    w = torch.rand(graph.num_edges, *shape[:-1], 1, dtype=dtype) if weighted else None
    packed = count_packed(monkeypatch)
    expected = spmm(graph, x, w)
    assert packed == [], "so few rows stay where they are"
    monkeypatch.setattr(reductions, "LEAST_PACKED_BYTES", 1)
    found = spmm(graph, x, w)
    assert len(packed) > 1
    num_columns = x[0].numel()
    assert [begin for begin, _ in packed] == [sum(width for _, width in packed[:i]) for i in range(len(packed))]
    assert sum(width for _, width in packed) == num_columns, "every column once"
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-13, torch.bfloat16: 1e-2}[dtype]
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * max(longest, 1) ** 0.5)


def test_backward_packs_the_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = random_graph()
    x = torch.randn(NUM_SRC, 64, dtype=torch.float64, requires_grad=True)
    monkeypatch.setattr(reductions, "LEAST_PACKED_BYTES", 1)
    packed = count_packed(monkeypatch)
    torch.autograd.gradcheck(lambda x: spmm(graph, x[:, :32]), (x[:, :32].detach().requires_grad_(),))
    packed.clear()
    spmm(graph, x).square().sum().backward()
    assert len(packed) == 2 * 64 * 8 // reductions.SLICE_BYTES[1], "forward and backward"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("heads", "width"), [(4, 32), (3, 24), (9, 4), (2, 40), (5, 1)], ids=str)
@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize("longest", [0, 2 * LONG_ROW_ENTRIES + 5])
def test_attention_packs_whole_heads(
    dtype: torch.dtype, heads: int, width: int, dropped: bool, longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is gathered: sources forward, the gradients of destinations backward."""
    graph = random_graph(longest=longest)
    generator = torch.Generator().manual_seed(heads)
    x = torch.randn(NUM_SRC, heads, width, dtype=dtype, generator=generator, requires_grad=True)
    el = torch.randn(NUM_SRC, heads, dtype=dtype, generator=generator, requires_grad=True)
    er = torch.randn(NUM_DST, heads, dtype=dtype, generator=generator, requires_grad=True)
    grad = torch.randn(NUM_DST, heads, width, dtype=dtype, generator=generator)
    dropout = EdgeDropout.from_call(0.3, seed=1, step=2, call_index=3) if dropped else None
    packed: list[int] = []
    pack = Operand.packed

    def watched(self: Operand, begin: int, block: Block, memory: torch.Tensor):  # type: ignore[no-untyped-def]
        packed.append(block.heads)
        return pack(self, begin, block, memory)

    monkeypatch.setattr(Operand, "packed", watched)

    def run() -> list[torch.Tensor]:
        out = gat(graph, x, el, er, dropout=dropout)
        return [out, *torch.autograd.grad(out, (x, el, er), grad)]

    expected = run()
    assert packed == [], "so few rows stay where they are"
    monkeypatch.setattr(reductions, "LEAST_PACKED_BYTES", 1)
    monkeypatch.setattr(cpu_gat, "_LEAST_PACKED_READS", 1)
    found = run()
    row_bytes = heads * width * dtype.itemsize
    assert len(packed) == 0 if row_bytes < 2 * reductions.SLICE_BYTES[1] else sum(packed) == 2 * heads
    for packed_result, result in zip(found, expected, strict=True):
        tolerance = (1e-5 if dtype == torch.float32 else 1e-13) * max(longest, 1) ** 0.5
        torch.testing.assert_close(packed_result, result, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("rows", "columns", "reads", "width"),
    [
        (32768, 128, 8 * 32768, 32),  # 16 MiB: two lines of each row
        (32767, 128, 8 * 32768, 0),  # fits
        (32768, 128, 8 * 32768 - 1, 0),  # too few reads
        (524288, 16, 8 * 524288, 0),  # rows of one line
        (131072, 32, 8 * 131072, 0),  # rows of two lines
        (131073, 32, 8 * 131073, 16),  # too many rows for two lines
        (200000, 100, 8 * 200000, 16),
    ],
)
def test_who_is_packed(rows: int, columns: int, reads: int, width: int) -> None:
    operand = Operand(torch.empty(rows, 1, columns))
    first = next(operand.columns(reads))
    assert first.stride == (width or columns)
    assert first.block == Block(1, width or min(columns, first.block.size))
    assert next(Operand(operand.x, by_edge=True).columns(reads)).x is operand.x
