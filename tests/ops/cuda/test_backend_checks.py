# SPDX-License-Identifier: Apache-2.0
"""What every backend must pass, passed by the CUDA backend on a GPU that is this CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from dgl_hybrid.ops import SparseGraph
from dgl_hybrid.ops.cuda import backend as backend_module
from tests.ops.backend_checks import CASES, CHECKS, Case, check_sddmm
from tests.ops.cuda.fake_driver import FakeDriver
from tests.ops.cuda.host_gpu import make_backend
from tests.ops.simt.build import needs_compiler

pytestmark = needs_compiler

SERVED = [case for case in CASES if case.dtype != torch.float64]
CHOSEN = [
    (check, case)
    for check in CHECKS
    for case in SERVED
    # Forty-odd specialisations for each shape, so these are for the slow run.
    if check is not check_sddmm and (case.graph == "nothing" or (case.graph, case.width) == ("power-law", 3))
]


def identify(value: object) -> str:
    return value.__name__.removeprefix("check_") if callable(value) else str(value)


@pytest.mark.parametrize(("check", "case"), CHOSEN, ids=identify)
def test_check(check: Callable[..., None], case: Case, fake: FakeDriver) -> None:
    check(make_backend(fake, 16)[0], case)


@pytest.mark.slow
@pytest.mark.parametrize("case", SERVED, ids=str)
@pytest.mark.parametrize("check", CHECKS, ids=identify)
def test_every_check(check: Callable[..., None], case: Case, fake: FakeDriver) -> None:
    check(make_backend(fake, 64)[0], case)


@pytest.mark.parametrize("has_ids", [True, False])
@pytest.mark.parametrize("operands", ["none", "weights", "factors"])
def test_sums_that_are_added_are_made_some_at_a_time(
    has_ids: bool, operands: str, fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message of few rows may be read by many: all their sums at once would be what chunks are to save."""
    monkeypatch.setattr(backend_module, "_LEAST_SUMS", 8)
    generator = torch.Generator().manual_seed(5)
    num_rows, num_edges = 50, 300
    src, dst = (torch.randint(count, (num_edges,), generator=generator) for count in (6, num_rows))
    dst = dst if has_ids else dst.sort().values
    graph = SparseGraph.from_coo(src, dst, 6, num_rows)
    assert (graph.in_edges.edge_ids is not None) == has_ids
    x = torch.randn(6, 1, 5, generator=generator)
    w = torch.randn(num_edges, 1, generator=generator) if operands == "weights" else None
    factors = torch.randn(num_rows, generator=generator) if operands == "factors" else None
    backend = make_backend(fake, 64)[0]
    made: list[int] = []
    spmm = backend.spmm
    monkeypatch.setattr(backend, "spmm", lambda rows, *rest: (made.append(rows.num_rows), spmm(rows, *rest))[1])
    targets = torch.randperm(2 * num_rows, generator=generator)[:num_rows]
    out = torch.ones(2 * num_rows, 1, 5)
    for _ in range(2):
        backend.add_sums(out, targets, graph.in_edges, x, w, factors)
    messages = x[src].double() * (1.0 if w is None else w[:, None].double())
    sums = torch.zeros(num_rows, 1, 5, dtype=torch.float64).index_add_(0, dst, messages)
    sums = sums if factors is None else sums * factors.double().view(-1, 1, 1)
    expected = torch.ones(2 * num_rows, 1, 5, dtype=torch.float64).index_add_(0, targets, 2 * sums)
    torch.testing.assert_close(out, expected.float())
    assert made == 2 * [8, 8, 8, 8, 8, 8, 2]
