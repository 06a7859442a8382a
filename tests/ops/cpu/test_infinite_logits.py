# SPDX-License-Identifier: Apache-2.0
"""Logits of -inf weigh nothing wherever in a row they lie; a row that has no other is NaN, as in the reference."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dgl_hybrid.ops import EdgeDropout, SparseGraph
from dgl_hybrid.ops.backend import Backend
from dgl_hybrid.ops.cpu.backend import CpuBackend
from dgl_hybrid.ops.cpu.launch import RowPlan
from dgl_hybrid.ops.cpu.logits import CHUNK_ENTRIES
from dgl_hybrid.ops.cpu.tasks import LONG_ROW_ENTRIES
from dgl_hybrid.ops.naive import NaiveBackend

HEADS, WIDTH, SLOPE = 3, 5, 0.2
SHORT, LONG = 3 * CHUNK_ENTRIES + 8, LONG_ROW_ENTRIES + 500
"""Entries of row 0, which takes several chunks, and of row 1, which is run in parts; row 2 has none."""

Results = tuple[Tensor, ...]


def make_graph() -> SparseGraph:
    """Entry k of all has source k."""
    dst = torch.cat([torch.zeros(SHORT, dtype=torch.int64), torch.ones(LONG, dtype=torch.int64)])
    return SparseGraph.from_coo(torch.arange(SHORT + LONG), dst, SHORT + LONG, 3)


GRAPH = make_graph()
PARTS = RowPlan.of(GRAPH.in_edges).parts
PART_CUTS = [*PARTS.begins.tolist(), SHORT + LONG]

WHERE = {
    "first chunk": (0, CHUNK_ENTRIES),
    "first chunk and more": (0, CHUNK_ENTRIES + 30),
    "all chunks but the last": (0, 3 * CHUNK_ENTRIES),
    "middle chunk": (CHUNK_ENTRIES, 2 * CHUNK_ENTRIES),
    "first chunk of a middle part": (PART_CUTS[1], PART_CUTS[1] + CHUNK_ENTRIES),
    "middle chunk of a part": (PART_CUTS[1] + CHUNK_ENTRIES, PART_CUTS[1] + 2 * CHUNK_ENTRIES),
    "first part": (PART_CUTS[0], PART_CUTS[1]),
    "middle part": (PART_CUTS[1], PART_CUTS[2]),
    "all parts but the first": (PART_CUTS[1], PART_CUTS[-1]),
    "all of the short row": (0, SHORT),
    "all of the long row": (SHORT, SHORT + LONG),
}
DROPOUTS = {"": None, "dropout": EdgeDropout.from_call(0.4, seed=1, step=2, call_index=3)}


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


def run_gat(backend: Backend, where: slice, dtype: torch.dtype, dropout: EdgeDropout | None) -> Results:
    x, grad = random(GRAPH.num_src, HEADS, WIDTH, dtype=dtype), random(GRAPH.num_dst, HEADS, WIDTH, dtype=dtype)
    el, er = random(GRAPH.num_src, HEADS, dtype=dtype), random(GRAPH.num_dst, HEADS, dtype=dtype)
    el[where, 0] = float("-inf")
    rows, out_rows = GRAPH.in_edges, GRAPH.out_edges
    out, lse, positive = backend.gat(rows, x, el, er, SLOPE, dropout, for_backward=True)
    grads = backend.gat_backward(rows, out_rows, x, el, er, out, lse, positive, grad, SLOPE, dropout)
    return out, lse, *grads


def run_gatv2(backend: Backend, where: slice, dtype: torch.dtype, dropout: EdgeDropout | None) -> Results:
    """The sources are summed, too, so they have to be finite: their product with the attention is not."""
    x_src, x_dst = random(GRAPH.num_src, HEADS, WIDTH, dtype=dtype), random(GRAPH.num_dst, HEADS, WIDTH, dtype=dtype)
    attention, grad = random(HEADS, WIDTH, dtype=dtype), 0.1 * random(GRAPH.num_dst, HEADS, WIDTH, dtype=dtype)
    x_src[where, 0, 0], attention[0, 0] = 0.5 * torch.finfo(dtype).max, -10.0
    out, lse = backend.gatv2(GRAPH.in_edges, x_src, x_dst, attention, SLOPE, dropout)
    rows, out_rows = GRAPH.in_edges, GRAPH.out_edges
    grads = backend.gatv2_backward(rows, out_rows, x_src, x_dst, attention, out, lse, grad, SLOPE, dropout)
    return out, lse, *grads


def run_edge_softmax(backend: Backend, where: slice, dtype: torch.dtype, _: EdgeDropout | None) -> Results:
    logits, grad = (random(GRAPH.num_edges, *shape, dtype=dtype) for shape in ((HEADS,), (HEADS, 1)))
    logits[where, 0] = float("-inf")
    out = backend.edge_softmax(GRAPH.in_edges, logits)
    return out, backend.edge_softmax_backward(GRAPH.in_edges, out, grad.squeeze(-1))


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize(
    ("run", "dtype", "dropout"),
    [
        (run_gat, torch.float32, ""),
        (run_gat, torch.float64, "dropout"),
        # The reference takes float32 logits in float64, where none of them would be infinite.
        (run_gatv2, torch.float64, ""),
        (run_gatv2, torch.float64, "dropout"),
        (run_edge_softmax, torch.float32, ""),
    ],
)
def test_infinite_logits_as_in_the_reference(
    run: Callable[..., Results], dtype: torch.dtype, dropout: str, where: str
) -> None:
    entries = slice(*WHERE[where])
    expected = run(NaiveBackend(), entries, dtype, DROPOUTS[dropout])
    for result in expected:
        assert bool(result.isnan().any()) == where.startswith("all of"), "the reference is not what is tested"
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    for found, wanted in zip(run(CpuBackend(), entries, dtype, DROPOUTS[dropout]), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance, equal_nan=True)


def test_the_rows_are_cut_as_the_cases_say() -> None:
    assert RowPlan.of(GRAPH.in_edges).long_rows.tolist() == [1]
    assert len(PART_CUTS) >= 4, "no middle part"
    assert all(end - begin > 2 * CHUNK_ENTRIES for begin, end in itertools.pairwise(PART_CUTS))
