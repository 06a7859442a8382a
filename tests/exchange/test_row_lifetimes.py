# SPDX-License-Identifier: Apache-2.0
"""Rows whose memory is used again equal rows in memory of their own, however long and by whom they are kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dgl_hybrid.exchange import buffers
from dgl_hybrid.exchange.buffers import BufferPool
from dgl_hybrid.exchange.communicator import Communicator
from dgl_hybrid.exchange.connect import create_communicator
from dgl_hybrid.exchange.plan import ExchangePlan
from dgl_hybrid.exchange.rows import extend_rows
from tests.exchange.test_rows import NUM_ROWS, make_plans
from tests.helpers.thinning import each_value
from tests.helpers.world import run_ranks

WIDTH, NUM_EPOCHS = 3, 5


class FreshPool(BufferPool):
    """Never hands out anything twice."""

    def take(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device | None = None, **options: Any
    ) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=device)


class PoisonedPool(BufferPool):
    """Counts what it hands out again, and overwrites it first: whoever still reads it shows."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[int] = []

    def take(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device | None = None, **options: Any
    ) -> Tensor:
        buffer = super().take(shape, dtype, device, **options)
        self.addresses.append(buffer.data_ptr())
        return buffer.fill_(torch.nan if dtype.is_floating_point else 99)

    @property
    def num_used_again(self) -> int:
        return len(self.addresses) - len(set(self.addresses))


Rows = Callable[[Tensor], Tensor]


def train(x: Tensor, rows: Rows) -> list[Tensor]:
    """Two layers, nothing kept."""
    grads = []
    for epoch in range(NUM_EPOCHS):
        hidden = torch.tanh(rows(x * (1 + epoch))[:NUM_ROWS])
        (grad,) = torch.autograd.grad((rows(hidden) ** 2).sum(), x)
        grads.append(grad)
    return grads


def keep_results(x: Tensor, rows: Rows) -> list[Tensor]:
    """Results of all epochs, as they are, as views, detached, and as gradients that autograd handed over."""
    kept = []
    for epoch in range(NUM_EPOCHS):
        leaf = (x.detach() * (1 + epoch)).requires_grad_()
        extended = rows(leaf)
        (extended * extended.detach()).sum().backward()
        assert leaf.grad is not None
        kept += [(extended, extended[NUM_ROWS:], extended.detach()[:, 1], leaf.grad)[epoch % 4]]
    return kept


def keep_graphs(x: Tensor, rows: Rows) -> list[Tensor]:
    """Several forwards in flight, their backwards in another order, some of them twice."""
    losses = [(rows(x * (1 + number)) ** 3).sum() for number in range(NUM_EPOCHS)]
    order = [3, 0, 4, 0, 2, 3, 1]
    return [torch.autograd.grad(losses[number], x, retain_graph=True)[0] for number in order]


def double_backward(x: Tensor, rows: Rows) -> list[Tensor]:
    results = []
    for _ in range(NUM_EPOCHS):
        extended = rows(x)
        (grad,) = torch.autograd.grad((extended**3).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad((grad**2).sum(), x, create_graph=True)
        (third,) = torch.autograd.grad(second.sum(), x)
        results += [grad, second, third]
    return results


def recompute(x: Tensor, rows: Rows) -> list[Tensor]:
    def two_layers(x: Tensor) -> Tensor:
        return torch.sin(rows(torch.tanh(rows(x))[:NUM_ROWS]))

    results = []
    for use_reentrant in (False, True) * 2:
        values = [checkpoint(two_layers, x * number, use_reentrant=use_reentrant) for number in (1, 2)]
        results += [*values, *torch.autograd.grad(sum(value.sum() for value in values), x)] if not use_reentrant else [
            *values, gradient_by_backward(sum(value.sum() for value in values), x)
        ]  # fmt: skip
    return results


def gradient_by_backward(loss: Any, x: Tensor) -> Tensor:
    """A reentrant checkpoint cannot be differentiated by `grad`."""
    x.grad = None
    loss.backward()
    grad, x.grad = x.grad, None
    assert grad is not None
    return grad


def change_in_place(x: Tensor, rows: Rows) -> list[Tensor]:
    """Results are the caller's: changed in place, with gradients and without."""
    results = []
    for _ in range(NUM_EPOCHS):
        extended = rows(x)
        extended.mul_(2).add_(1)
        extended[NUM_ROWS:] *= 3
        with torch.no_grad():
            plain = rows(x)
            plain.zero_().add_(5)
        (grad,) = torch.autograd.grad((extended**2).sum(), x)
        results += [extended.detach().clone(), grad, plain[1:].clone()]
    return results


def several_fields(x: Tensor, rows: Rows) -> list[Tensor]:
    """`rows` is of one field here; see `run`, which gives three."""
    return [value for number in range(NUM_EPOCHS) for value in torch.autograd.grad(rows(x * number).sin().sum(), x)]


WAYS = {
    way.__name__: way
    for way in (train, keep_results, keep_graphs, double_backward, recompute, change_in_place, several_fields)
}


def run(rank: int, world_size: int, way: str, transport: Any) -> tuple[list[Tensor], list[Tensor], int]:
    plan = make_plans(world_size)[rank]
    found = []
    before, buffers.SMALLEST_BYTES = buffers.SMALLEST_BYTES, 1
    poisoned = PoisonedPool()
    try:
        for pool in (FreshPool(), poisoned):
            communicator = create_communicator(transport=transport)
            communicator.buffers = pool
            generator = torch.Generator().manual_seed(rank)
            x = torch.randn(NUM_ROWS, WIDTH, generator=generator, dtype=torch.float64).requires_grad_()
            values = WAYS[way](x, rows_of(plan, communicator, way))
            found.append([value.detach().clone() for value in values])
    finally:
        buffers.SMALLEST_BYTES = before
    return found[0], found[1], poisoned.num_used_again


def rows_of(plan: ExchangePlan, communicator: Communicator, way: str) -> Rows:
    def one_field(x: Tensor) -> Tensor:
        return extend_rows([x], plan, communicator)[0]

    def three_fields(x: Tensor) -> Tensor:
        first, second, _, third = extend_rows(
            [x, x[:, 0] * 2, x.detach(), x.view(-1, 1, WIDTH).exp()], plan, communicator
        )
        return torch.cat([first, second[:, None], third[:, 0]], dim=1)

    return three_fields if way == "several_fields" else one_field


@each_value(way=list(WAYS), transport=["collective", "shared_memory"])
def test_memory_that_is_used_again_changes_nothing(way: str, transport: str) -> None:
    for fresh, reused, num_used_again in run_ranks(3, run, way, transport):
        assert len(fresh) == len(reused) > 0
        for number, (expected, actual) in enumerate(zip(fresh, reused, strict=True)):
            assert bool(expected.isfinite().all())
            assert torch.equal(expected, actual), f"tensor {number}"
        assert num_used_again > 0, "this test shows nothing: no memory was used again"


FIRST_EPOCHS, LATER_EPOCHS = 3, 20


def run_steady(rank: int, world_size: int, transport: Any) -> tuple[int, int]:
    """Blocks that a training asks the system for in its first epochs and in the later ones."""
    communicator, plan = create_communicator(transport=transport), make_plans(world_size)[rank]
    pool = communicator.buffers = PoisonedPool()
    x = torch.ones(NUM_ROWS, 2000, requires_grad=True)
    seen = []
    before, buffers.SMALLEST_BYTES = buffers.SMALLEST_BYTES, 1
    try:
        for _ in range(FIRST_EPOCHS + LATER_EPOCHS):
            (hidden,) = extend_rows([x], plan, communicator)
            (extended,) = extend_rows([hidden[:NUM_ROWS]], plan, communicator)
            (extended * 2).sum().backward()
            x.grad = None
            del hidden, extended
            seen.append(len(set(pool.addresses)))
    finally:
        buffers.SMALLEST_BYTES = before
    return seen[FIRST_EPOCHS - 1], seen[-1] - seen[FIRST_EPOCHS - 1]


@pytest.mark.parametrize("transport", ["collective", "shared_memory"])
def test_only_the_first_epochs_ask_for_memory(transport: str) -> None:
    for first, later in run_ranks(3, run_steady, transport):
        assert first > 0
        # Gloo's thread may hold a message for a moment after the exchange: then the next one lies elsewhere. It does so
        # for a few at most, while an exchange that used nothing again would ask for a block in every epoch.
        assert later < (LATER_EPOCHS if transport == "collective" else 1)
