# SPDX-License-Identifier: Apache-2.0
"""Numbers below the normal range: kept unless PyTorch was told to take them for 0, by kernels as by PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from dgl_hybrid.ops import spmm
from dgl_hybrid.ops.cpu import products
from tests.ops.backend_checks import make_graph

TINY = 1e-41


@pytest.fixture
def flushed() -> Iterator[None]:
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor has no such mode")
    yield
    torch.set_flush_denormal(False)


def sum_of_neighbours() -> Tensor:
    graph = make_graph("power-law")
    return spmm(graph, torch.full((graph.num_src, 16), TINY), reduce="sum")


def product() -> Tensor:
    return products.multiply([torch.full((40, 16), TINY)], [torch.eye(16)], None, None, None, False)


def gradient_of_weights() -> Tensor:
    rows, grad = torch.ones(40, 16), torch.full((40, 16), TINY)
    return products.gradients([rows], [torch.eye(16)], grad, None, None, [False], [True], False)[0]


RUNS = pytest.mark.parametrize("run", [sum_of_neighbours, product, gradient_of_weights])


@RUNS
def test_are_kept(run: Callable[[], Tensor]) -> None:
    result = run()
    assert ((result > 0) & (result < torch.finfo(torch.float32).tiny)).any()


@RUNS
def test_are_zero_where_pytorch_was_told_so(run: Callable[[], Tensor], flushed: None) -> None:
    assert not run().any()
