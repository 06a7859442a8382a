# SPDX-License-Identifier: Apache-2.0
"""Memory of a pool is used again when nothing refers to it, and never before: every way to keep a tensor is tried."""

from __future__ import annotations

import copy
import gc
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dgl_hybrid.exchange import buffers
from dgl_hybrid.exchange.buffers import BufferPool

LARGE = (1 << 15, 1)
"""Shape of float32 rows that come from a pool."""


class Holder(torch.autograd.Function):
    """Keeps its result for the backward, where no Python object refers to it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, buffer: Tensor) -> Tensor:
        buffer.copy_(x)
        ctx.save_for_backward(buffer)
        return x.sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (kept,) = ctx.saved_tensors
        return grads[0] * kept, None


def test_memory_is_used_again() -> None:
    pool = BufferPool()
    first = pool.take(LARGE, torch.float32)
    address = first.data_ptr()
    del first
    assert pool.free_bytes == 1 << 17
    for shape, dtype in (((1 << 14, 2), torch.float32), ((1 << 14,), torch.float64), ((1 << 16,), torch.bfloat16)):
        again = pool.take(shape, dtype)
        assert (again.data_ptr(), again.shape, again.dtype) == (address, shape, dtype)
        assert again.is_contiguous()
        assert pool.free_bytes == 0
        del again


KEEPERS: dict[str, Callable[[Tensor], object]] = {
    "itself": lambda x: x,
    "a view": lambda x: x[5:7],
    "a view of a view": lambda x: x.view(-1)[3:].unsqueeze(0)[0, :1],
    "a detached one": lambda x: x.detach(),
    "its data": lambda x: x.data,
    "an array": lambda x: x.numpy(),
    "an array of a view": lambda x: x[1:2].numpy()[0:1],
    "its storage": lambda x: x.untyped_storage(),
    "a capsule": lambda x: torch.utils.dlpack.to_dlpack(x),
    "a parameter": lambda x: torch.nn.Parameter(x),
    "a memoryview": lambda x: memoryview(x.numpy()),
    "a cycle": lambda x: [cycle := [x], cycle.append(cycle)],
    "a graph": lambda x: (x * torch.ones(1, requires_grad=True)).sum(),
    "a view with a graph": lambda x: torch.ones_like(x, requires_grad=True).mul(x[:]).sum(),
    "a closure": lambda x: lambda: x,
}


@pytest.mark.parametrize("way", KEEPERS)
def test_nothing_that_is_kept_is_handed_out(way: str) -> None:
    pool = BufferPool()
    buffer = pool.take(LARGE, torch.float32)
    address = buffer.data_ptr()
    kept = KEEPERS[way](buffer)
    del buffer
    others = [pool.take(LARGE, torch.float32) for _ in range(3)]
    assert address not in [other.data_ptr() for other in others]
    del kept, others
    gc.collect()
    assert address in [other.data_ptr() for other in [pool.take(LARGE, torch.float32) for _ in range(4)]]


def test_what_autograd_saved_is_not_handed_out() -> None:
    pool = BufferPool()
    x = torch.rand(LARGE, requires_grad=True)
    loss = Holder.apply(x, pool.take(LARGE, torch.float32))
    for _ in range(3):
        pool.take(LARGE, torch.float32).fill_(float("nan"))
    loss.backward(retain_graph=True)
    assert x.grad is not None
    assert torch.equal(x.grad, x)
    pool.take(LARGE, torch.float32).fill_(float("nan"))
    loss.backward()
    assert torch.equal(x.grad, 2 * x)
    assert pool.free_bytes == 2 << 17, "what the graph kept did not come back, beside what the others used in turn"


def test_what_a_checkpoint_computes_again_is_right() -> None:
    pool = BufferPool()
    x = torch.rand(LARGE, requires_grad=True)

    def part(x: Tensor) -> Tensor:
        return Holder.apply(x, pool.take(LARGE, torch.float32)).sin()

    loss = torch.stack([checkpoint(part, x, use_reentrant=False) for _ in range(3)]).sum()
    pool.take(LARGE, torch.float32).fill_(float("nan"))
    loss.backward()
    expected = 3 * torch.cos(x.detach().sum()) * x.detach()
    assert torch.allclose(x.grad, expected)


def test_a_gradient_that_is_kept_stays() -> None:
    pool = BufferPool()

    class FromPool(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            return pool.take(LARGE, torch.float32).copy_(grads[0])

    x = torch.zeros(LARGE, requires_grad=True)
    weight = torch.rand(LARGE)
    (FromPool.apply(x) * weight).sum().backward()  # autograd may make the very tensor x.grad
    for _ in range(3):
        pool.take(LARGE, torch.float32).fill_(float("nan"))
    assert x.grad is not None
    assert torch.equal(x.grad, weight)


def test_results_are_tensors_as_any_others() -> None:
    """Views and detached tensors refuse some changes in place; results of a layer must not."""
    buffer = BufferPool().take((1 << 12, 3, 5), torch.float64)
    assert not buffer._is_view()
    assert buffer.stride() == (15, 5, 1)
    assert buffer.data_ptr() % 16 == 0
    assert buffer.fill_(2.0).transpose_(0, 1).unsqueeze_(0).shape == (1, 3, 1 << 12, 5)
    assert torch.equal(copy.deepcopy(buffer), buffer)
    assert torch.equal(buffer.requires_grad_().mul(3).sum(), torch.tensor(6.0 * buffer.numel(), dtype=torch.float64))


def test_small_ones_and_empty_ones() -> None:
    pool = BufferPool()
    for shape in ((), (0,), (0, 5), (7, 0), (3, 4)):
        assert pool.take(shape, torch.int16).shape == shape
    assert pool.free_bytes == 0


def test_pools_made_and_used_in_inference_mode_serve_training_too() -> None:
    pool = BufferPool()
    with torch.inference_mode():
        pool.take(LARGE, torch.float32).fill_(1.0)
    buffer = pool.take(LARGE, torch.float32)
    assert not buffer.is_inference()
    buffer.fill_(2.0).requires_grad_().sum().backward()


def test_blocks_that_nobody_wants_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "IDLE_REQUESTS", 5)
    pool = BufferPool()
    pool.take((1 << 20,), torch.float32)
    assert pool.free_bytes == 1 << 22
    for _ in range(5):
        pool.take(LARGE, torch.float32)
    assert pool.free_bytes == (1 << 22) + (1 << 17)
    pool.take(LARGE, torch.float32)
    assert pool.free_bytes == 1 << 17


def test_a_block_much_too_large_is_not_taken() -> None:
    pool = BufferPool()
    pool.take((1 << 18,), torch.float32)
    small = pool.take((1 << 16,), torch.float32)
    assert pool.free_bytes == 1 << 20
    nearly = pool.take((250_000,), torch.float32)
    assert pool.free_bytes == 0
    assert small.data_ptr() != nearly.data_ptr()


def test_tensors_outlive_their_pool() -> None:
    pool = BufferPool()
    buffer = pool.take(LARGE, torch.float32).fill_(3.0)
    del pool
    assert bool((buffer == 3.0).all())


@pytest.mark.parametrize("seed", range(4))
def test_random_lives(seed: int) -> None:
    """Several threads take, fill, keep, let go of and check tensors of many sizes."""
    pool, faults = BufferPool(), list[str]()

    def live(thread: int) -> None:
        rng, held = random.Random(f"{seed} {thread}"), dict[int, tuple[object, Callable[[], bool]]]()
        for step in range(300):
            buffer = pool.take((rng.choice([1 << 14, 20_000, 1 << 15, 50_000]),), torch.float32)
            value = float(1000 * thread + step)
            buffer.fill_(value)
            kept = buffer[rng.randrange(len(buffer)) :] if rng.random() < 0.5 else buffer
            if rng.random() < 0.3:  # what keeps it is in C++ only
                x = torch.zeros(len(kept), requires_grad=True)
                loss = (x * kept).sum()
                held[step] = loss, lambda loss=loss, x=x, v=value: bool((torch.autograd.grad(loss, x)[0] == v).all())
            else:
                held[step] = kept, lambda kept=kept, v=value: bool((kept == v).all())
            del buffer, kept
            while len(held) > 6:
                chosen = rng.choice(sorted(held))
                if not held.pop(chosen)[1]():
                    faults.append(f"thread {thread}, tensor {chosen} at step {step}")

    threads = [threading.Thread(target=live, args=(thread,)) for thread in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    assert pool.free_bytes > 0


class TestWhatMessagesPassThrough:
    """Where memory is short, a pool holds no more than what is in use at one time."""

    LARGEST = 1 << 18

    def take(self, pool: BufferPool, num_bytes: int = LARGEST) -> Tensor:
        return pool.take((num_bytes,), torch.uint8, passes_through=self.LARGEST)

    def test_smaller_ones_pass_through_the_blocks_of_the_largest(self) -> None:
        pool = BufferPool()
        addresses = {self.take(pool, num_bytes).data_ptr() for num_bytes in (1 << 16, self.LARGEST, 100_000)}
        assert len(addresses) == 1
        assert pool.free_bytes == self.LARGEST
        assert self.take(pool, 1 << 16).shape == (1 << 16,)
        assert self.take(pool, 4).shape == (4,)

    def test_idle_blocks_go_before_one_is_made(self) -> None:
        pool = BufferPool()
        for num_bytes in (1 << 17, 1 << 20):
            pool.take((num_bytes,), torch.uint8)
        passing = self.take(pool)
        assert pool.free_bytes == 0
        pool.take((1 << 17,), torch.uint8)
        del passing
        self.take(pool)
        assert pool.free_bytes == self.LARGEST + (1 << 17), "one that fits was there"

    def test_a_block_that_is_about_to_come_back_is_waited_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(buffers, "LONGEST_WAIT_S", 60.0)
        pool = BufferPool()
        first, *others = [self.take(pool) for _ in range(buffers.PASSING_AT_ONCE)]
        address, kept = first.data_ptr(), [first]
        del first
        slow_thread = threading.Timer(0.05, kept.clear)
        slow_thread.start()
        assert self.take(pool).data_ptr() == address
        assert len(others) == buffers.PASSING_AT_ONCE - 1
        slow_thread.join()

    def test_not_for_long_and_not_if_few_are_in_use(self, monkeypatch: pytest.MonkeyPatch) -> None:
        slept: list[float] = []
        monkeypatch.setattr(buffers.time, "sleep", slept.append)
        pool = BufferPool()
        held = [self.take(pool) for _ in range(buffers.PASSING_AT_ONCE)]
        assert not slept
        assert self.take(pool).data_ptr() not in [buffer.data_ptr() for buffer in held]
        assert slept

    def test_leases_are_not_counted_for_ever(self) -> None:
        pool = BufferPool()
        for _ in range(100):
            self.take(pool)
        assert len(pool._passing) <= 1
