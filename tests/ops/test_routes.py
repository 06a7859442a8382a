# SPDX-License-Identifier: Apache-2.0
"""Every module of `dgl.nn` gives with our ops what it gives with DGL's, and takes the route the table says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import dgl.backend.pytorch.sparse as dgls_sparse
import pytest
import torch
from torch import Tensor

from tests.helpers.exactness import assert_close
from tests.ops.routes import (
    BLOCK_MODULE_NAMES,
    FLOAT32_ONLY,
    MODULE_NAMES,
    TABLE,
    make_block,
    make_graph,
    routed,
    routes_markdown,
    run_step,
)

DTYPES = (torch.float64, torch.float32)

CASES = [
    pytest.param(name, make, dtype, id=f"{name}-{kind}-{str(dtype).removeprefix('torch.')}")
    for names, make, kind in ((MODULE_NAMES, make_graph, "graph"), (BLOCK_MODULE_NAMES, make_block, "block"))
    for name in names
    for dtype in DTYPES
    if dtype == torch.float32 or name not in FLOAT32_ONLY
]


def forbid_dgls_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a kernel of DGL ran")

    for name in ("_gspmm", "_gsddmm", "_edge_softmax_forward", "_edge_softmax_backward"):
        monkeypatch.setattr(dgls_sparse, name, forbidden)


def assert_equal(actual: Tensor, expected: Tensor, what: str) -> None:
    """Up to the order of sums. In float32, gradients that are zero by mathematics are rounding noise: hence `atol`."""
    assert actual.dtype == expected.dtype
    if expected.dtype == torch.float64:
        assert_close(actual, expected, what)
    else:
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5, msg=lambda text: f"{what}: {text}")


@pytest.mark.parametrize(("name", "make", "dtype"), CASES)
def test_a_module_gives_what_it_gives_with_dgl(
    name: str, make: Callable[[str, torch.dtype], Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = make(name, dtype)
    expected = run_step(name, graph, dtype)
    assert expected.counts == {}, "plain graphs are not routed unless asked for"
    forbid_dgls_kernels(monkeypatch)
    with routed("all"):
        actual = run_step(name, graph, dtype)
    assert_equal(actual.output, expected.output, "output")
    assert_equal(actual.input_grad, expected.input_grad, "input gradient")
    assert actual.weight_grads.keys() == expected.weight_grads.keys()
    for key, grad in expected.weight_grads.items():
        assert_equal(actual.weight_grads[key], grad, f"gradient of {key}")
    assert all(key.endswith("/ours") for key in actual.counts), actual.counts


def test_the_table_says_what_happens() -> None:
    assert TABLE.read_text() == routes_markdown(), "ROUTES.md is out of date: python -m tests.ops.routes"
