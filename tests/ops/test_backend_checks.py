# SPDX-License-Identifier: Apache-2.0
"""The checks of backends see what they are there for: each planted fault fails the one that should catch it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dgl_hybrid.ops.backend import Backend, Reduce
from dgl_hybrid.ops.naive import NaiveBackend
from dgl_hybrid.ops.sparse_graph import Adjacency
from tests.helpers.thinning import marks_of
from tests.ops import backend_checks as checks
from tests.ops.backend_checks import Case

CASE = Case("power-law", heads=2, width=6)


class IgnoresEdgeIds(NaiveBackend):
    def spmm(self, rows: Adjacency, x: Tensor | None, w: Tensor | None, reduce: Reduce) -> tuple[Tensor, Tensor | None]:
        return super().spmm(replace(rows, edge_ids=None), x, w, reduce)


class LastOfEqualsWins(NaiveBackend):
    def spmm(self, rows: Adjacency, x: Tensor | None, w: Tensor | None, reduce: Reduce) -> tuple[Tensor, Tensor | None]:
        out, arg = super().spmm(rows, x, w, reduce)
        if arg is None or x is None:
            return out, arg
        edges = rows.edge_ids.flip(0).contiguous() if rows.edge_ids is not None else None
        sizes = rows.indptr.diff().flip(0)
        backwards = Adjacency(
            torch.cat([sizes.new_zeros(1), sizes.cumsum(0, dtype=sizes.dtype)]),
            rows.indices.flip(0).contiguous(),
            edges,
        )
        out, arg = super().spmm(backwards, x, w, reduce)
        assert arg is not None
        return out.flip(0).contiguous(), arg.flip(0).contiguous()


class NanLoses(NaiveBackend):
    def spmm(self, rows: Adjacency, x: Tensor | None, w: Tensor | None, reduce: Reduce) -> tuple[Tensor, Tensor | None]:
        worst = float("-inf") if reduce == "max" else float("inf")
        return super().spmm(rows, None if x is None else torch.where(x.isnan(), worst, x), w, reduce)


class LeavesEmptyRows(NaiveBackend):
    def spmm(self, rows: Adjacency, x: Tensor | None, w: Tensor | None, reduce: Reduce) -> tuple[Tensor, Tensor | None]:
        full, arg = super().spmm(rows, x, w, reduce)
        out = torch.empty_like(full)
        written = rows.indptr.diff() > 0
        out[written] = full[written]
        return out, arg


class DiffersBetweenCalls(NaiveBackend):
    calls = 0

    def edge_softmax(self, rows: Adjacency, logits: Tensor) -> Tensor:
        self.calls += 1
        return super().edge_softmax(rows, logits) * (1 + self.calls * 1e-7)


class DropsByEntry(NaiveBackend):
    def gat(self, rows, *arguments, **options):  # type: ignore[no-untyped-def]
        return super().gat(replace(rows, edge_ids=None), *arguments, **options)


class ForgetsTheKeys(NaiveBackend):
    def gat(self, rows, x, el, er, slope, dropout, **options):  # type: ignore[no-untyped-def]
        return super().gat(rows, x, el, er, slope, dropout and replace(dropout, edge_keys=None), **options)


class ForgetsTheSlope(NaiveBackend):
    def gat_backward(self, *arguments):  # type: ignore[no-untyped-def]
        return super().gat_backward(*arguments[:9], 1.0, arguments[10])


class SumsInHalf(NaiveBackend):
    def spmm(self, rows: Adjacency, x: Tensor | None, w: Tensor | None, reduce: Reduce) -> tuple[Tensor, Tensor | None]:
        out, arg = super().spmm(rows, x, w, reduce)
        if x is None or w is not None or reduce != "sum":
            return out, arg
        out = torch.zeros_like(out)
        starts = rows.indptr.tolist()
        for v, (begin, end) in enumerate(itertools.pairwise(starts)):
            for u in rows.indices[begin:end].tolist():
                out[v] += x[u]
        return out, arg


class WritesInsteadOfAdding(NaiveBackend):
    def add_sums(self, out, targets, rows, x, w, row_factors=None):  # type: ignore[no-untyped-def]
        out[targets] = self.spmm(rows, x, w, "sum")[0]


class AddsToTheFirstRows(NaiveBackend):
    def add_sums(self, out, targets, rows, x, w, row_factors=None):  # type: ignore[no-untyped-def]
        super().add_sums(out, torch.arange(len(targets)), rows, x, w)


class ScalesOtherRows(NaiveBackend):
    def scaled_sums(self, rows, x, source_factors, row_factors):  # type: ignore[no-untyped-def]
        if row_factors is None:
            return super().scaled_sums(rows, x, source_factors, None)
        return super().scaled_sums(rows, x, source_factors, row_factors.roll(1))


PLANTED = (
    (WritesInsteadOfAdding, checks.check_add_sums, CASE),
    (AddsToTheFirstRows, checks.check_add_sums, CASE),
    (ScalesOtherRows, checks.check_scaled_sums, CASE),
    (IgnoresEdgeIds, checks.check_spmm, CASE),
    (LastOfEqualsWins, checks.check_spmm_ties, CASE),
    (NanLoses, checks.check_spmm_ties, CASE),
    (LeavesEmptyRows, checks.check_spmm, Case("hand", heads=2, width=6)),
    (DiffersBetweenCalls, checks.check_edge_softmax, CASE),
    (DropsByEntry, checks.check_gat, CASE),
    (ForgetsTheKeys, checks.check_gat, CASE),
    (ForgetsTheSlope, checks.check_gat, CASE),
    (SumsInHalf, checks.check_spmm, Case("hub", torch.bfloat16, heads=1, width=4)),
)


@pytest.mark.parametrize(
    ("backend", "check", "case"),
    [
        pytest.param(*planted, id=planted[0].__name__, marks=marks_of(turn % 3 == 0))
        for turn, planted in enumerate(PLANTED)
    ],
)
def test_a_planted_fault_is_caught(backend: type[Backend], check: Callable[..., None], case: Case) -> None:
    with pytest.raises(AssertionError):
        check(backend(), case)
    check(NaiveBackend(), case)


def test_graphs_have_what_they_promise() -> None:
    degrees = checks.make_graph("power-law").in_edges.indptr.diff()
    assert degrees.min() == 0
    assert checks.make_graph("power-law").out_edges.indptr.diff().min() == 0
    assert degrees.max() > 4 * degrees.float().mean()
    hub = checks.make_graph("hub")
    assert hub.in_edges.indptr.diff().max() >= 5000
    assert hub.out_edges.indptr.diff().max() >= 300
    assert checks.make_graph("power-law", permuted=False).in_edges.edge_ids is None
    assert checks.make_graph("hand", index_dtype=torch.int64).index_dtype == torch.int64
