# SPDX-License-Identifier: Apache-2.0
"""`BufferPool`: memory for the rows of an exchange that is used again instead of being faulted in anew every epoch.

[Note: when memory is free again]
Whoever gets a tensor may keep it: autograd until the backward, a checkpoint until it recomputes, the user for good.
Only the tensor's storage knows when the last of them (views, saved tensors, another thread's) has let go. So each
tensor is made over a NumPy array of its own, which the storage holds and nobody else:

    tensor, its views, what autograd saved ──▶ storage ──▶ lease (array) ──▶ block
                                                             └─ when it dies, the block goes back to the pool

PyTorch drops its reference to the array when it frees the storage, wherever that happens; the block is handed out again
after that and never before. Nothing is counted or guessed here.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

SMALLEST_BYTES = 1 << 16
"""Below this the allocator's own lists are as good: such memory is not given back to the system."""

LARGEST_WASTE = 1.25
"""A block serves requests of at least its size divided by this."""

IDLE_REQUESTS = 128
"""A block that lay idle for so many requests is given back to the system: the plan has changed, or the
program moved on. An epoch makes a few requests for each layer."""

PASSING_AT_ONCE = 3
"""Blocks in use at a time where messages pass through them: what came last, and the next one on its way here and from
here."""

LONGEST_WAIT_S = 0.01
"""For a block that a thread of the process group's is about to let go of: it does so after it said that the message
went, and may be interrupted in between."""

_ROUNDED_TO_BYTES = 1 << 12
_WAIT_STEP_S = 5e-5


@dataclass(slots=True)
class _Shelf:
    """What blocks return to: apart from the pool, since tensors may outlive it."""

    free: list[tuple[Tensor, int]] = field(default_factory=list)
    """(n,) uint8 blocks, and the number of requests when they came back."""
    num_requests: int = 0

    def put_back(self, block: Tensor) -> None:
        # Runs wherever a storage dies, in any thread and amid `take` too: one append, no lock.
        self.free.append((block, self.num_requests))


class BufferPool:
    """Hands out tensors of CPU memory that it takes back when nothing refers to them any more.

    Contents are arbitrary, as of `torch.empty`. Tensors may be kept, changed in place, viewed and saved for a backward
    as any others; only `resize_` to a larger size is refused by PyTorch, as for every tensor made from an array.
    """

    def __init__(self) -> None:
        self._shelf = _Shelf()
        self._lock = threading.Lock()
        self._passing: list[tuple[int, weakref.ref[Any]]] = []
        """Sizes and leases of blocks that messages pass through."""

    def take(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device | None = None,
        *,
        passes_through: int | None = None,
    ) -> Tensor:
        """Returns a contiguous tensor of arbitrary content, not a view of anything.

        Args:
            device: Other devices than the CPU have allocators that keep their memory: theirs is used.
            passes_through: Of one of many that pass through a few blocks, since memory is short: bytes of the largest
                of them. Blocks are of that size for all, and where there is none, idle ones go before one is made: the
                pool then holds no more than was in use at one time.
        """
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes < SMALLEST_BYTES or (device is not None and device.type != "cpu"):
            return torch.empty(tuple(shape), dtype=dtype, device=device)
        block_bytes = -(-max(num_bytes, passes_through or 0) // _ROUNDED_TO_BYTES) * _ROUNDED_TO_BYTES
        with self._lock:
            block = self._find(block_bytes)
            if block is None and passes_through is not None:
                block = self._await(block_bytes)
                if block is None:
                    self.drop_free()
        if block is None:
            block = torch.empty(block_bytes, dtype=torch.uint8)
        lease = block.numpy()[:num_bytes]
        if passes_through is not None:
            with self._lock:
                self._passing = [*self._still_passing(), (block_bytes, weakref.ref(lease))]
        weakref.finalize(lease, self._shelf.put_back, block).atexit = False
        # Not a view of bytes: autograd would treat results that are views in ways of its own.
        storage = torch.from_numpy(lease).untyped_storage()
        buffer: Tensor = torch.empty(0, dtype=dtype).set_(storage, 0, tuple(shape), _strides(shape))
        return buffer

    def _find(self, block_bytes: int) -> Tensor | None:
        """Takes the smallest block that fits out of the free ones, and drops those that were idle for long."""
        shelf = self._shelf
        shelf.num_requests += 1
        # Blocks that come back meanwhile go to the new list; one that misses both is merely freed.
        free, shelf.free = shelf.free, []
        free = [(block, since) for block, since in free if shelf.num_requests - since <= IDLE_REQUESTS]
        fitting = [
            (block.numel(), position)
            for position, (block, _) in enumerate(free)
            if block_bytes <= block.numel() <= LARGEST_WASTE * block_bytes
        ]
        found = free.pop(min(fitting)[1])[0] if fitting else None
        shelf.free.extend(free)
        return found

    def _await(self, block_bytes: int) -> Tensor | None:
        """Takes the block that comes back in a moment, if more are in use than messages that pass through them need."""
        if sum(size == block_bytes for size, _ in self._still_passing()) < PASSING_AT_ONCE:
            return None
        latest_s = time.monotonic() + LONGEST_WAIT_S
        while time.monotonic() < latest_s:
            time.sleep(_WAIT_STEP_S)
            if self._shelf.free and (block := self._find(block_bytes)) is not None:
                return block
        return None

    def _still_passing(self) -> list[tuple[int, weakref.ref[Any]]]:
        return [(size, lease) for size, lease in self._passing if lease() is not None]

    def drop_free(self) -> None:
        """Gives back all that is in nobody's use, however short a time it has been so."""
        self._shelf.free = []

    @property
    def free_bytes(self) -> int:
        """Bytes held for later requests, in nobody's use."""
        return sum(block.numel() for block, _ in list(self._shelf.free))


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[position + 1 :]) for position in range(len(shape)))
