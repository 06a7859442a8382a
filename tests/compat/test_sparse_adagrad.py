# SPDX-License-Identifier: Apache-2.0
"""DistDGL's Adagrad of embeddings beside PyTorch's."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import dgl_hybrid  # noqa: F401  before dgl, which it makes importable

# isort: split
import pytest
import torch
from dgl.distributed.optim import SparseAdagrad
from torch import Tensor

from dgl_hybrid.compat import repairs

LR, NUM_ROWS, WIDTH = 0.05, 30, 4


@pytest.fixture
def mended() -> Iterator[None]:
    repairs.switch_on()
    yield
    repairs.switch_off()


def train_both(num_steps: int) -> tuple[Tensor, Tensor]:
    """Returns the rows after some steps of DistDGL's and of PyTorch's."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(NUM_ROWS, WIDTH, generator=generator)
    # What `update` reads, in place of tensors that servers hold.
    optimizer = SparseAdagrad.__new__(SparseAdagrad)
    optimizer._eps, optimizer._lr = 1e-10, LR
    optimizer._state = {"rows": torch.zeros(NUM_ROWS, WIDTH)}
    embedding = SimpleNamespace(name="rows", _tensor=start.clone())
    expected = torch.nn.Parameter(start.clone())
    dense = torch.optim.Adagrad([expected], lr=LR)
    for _ in range(num_steps):
        ids = torch.randperm(NUM_ROWS, generator=generator)[:20]
        grad = 0.1 * torch.randn(len(ids), WIDTH, generator=generator)
        optimizer.update(ids, grad, embedding)
        expected.grad = torch.zeros(NUM_ROWS, WIDTH).index_copy_(0, ids, grad)  # a gradient of 0 changes nothing
        dense.step()
    return embedding._tensor, expected.detach()


@pytest.mark.usefixtures("mended")
def test_steps_are_those_of_adagrad() -> None:
    actual, expected = train_both(5)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


def test_as_released_only_the_first_is() -> None:
    torch.testing.assert_close(*train_both(1), rtol=1e-5, atol=1e-6)
    actual, expected = train_both(5)
    assert (actual - expected).abs().max() > LR
