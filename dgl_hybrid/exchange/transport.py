# SPDX-License-Identifier: Apache-2.0
"""What carries tensors between ranks: the few operations a `Communicator` needs, and their `torch.distributed` form."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

_LONGEST_WAIT_MS = 2**31 - 1
"""What the system takes for a wait, some 25 days; who is told to wait for longer gives up then."""

_PROGRESS_KEY = "dgl_hybrid/late/{name}/{rank}"
_STORE_TIMEOUT_S = 10.0
"""For the store to tell which ranks are late."""
SAME_CALLS = (
    "Every rank must make the same calls in the same order (an `if rank == 0: evaluate()` breaks this), and an "
    "exception on one rank ends the job on all."
)


@dataclass(frozen=True, slots=True)
class ExchangeTag:
    """What an exchange is for: alike on every rank if all run the same program."""

    call: int = 0
    """Of the communicator's exchanges, from 1; 0 for one that is not of rows."""
    layer: int = 0
    backward: bool = False


NO_TAG = ExchangeTag()


def milliseconds(seconds: float) -> int:
    """Returns a wait as the system takes it: at least 1, rounded up."""
    return min(max(1, math.ceil(1000 * seconds)), _LONGEST_WAIT_MS)


class PeerLeftError(RuntimeError):
    """Another rank gave up; in its words."""


class Transport(ABC):
    """Moves plain tensors between `world_size` ranks, in program order; every operation is collective.

    A peer that does not take part makes an operation raise `RuntimeError` after the transport's timeout.

    Attributes:
        rank, world_size: This process and their number.
        backend: "gloo", "nccl", "shared_memory" (all ranks are on one host), "mixed" (on several, this one and others
            on this host) or "kvstore".
    """

    rank: int
    world_size: int
    backend: str
    elsewhere: Mapping[int, str] = {}
    """Where ranks stand that `find_late_ranks` found waiting for something else than this one, at its last call."""
    can_lend: bool = False
    """It has memory of its own to send from and to read from."""

    @property
    def device(self) -> torch.device:
        """Where the tensors lie that it moves as they are."""
        return torch.device("cpu")

    @abstractmethod
    def start_all_to_all(
        self,
        received: Tensor,
        send: Tensor,
        recv_counts: list[int],
        send_counts: list[int],
        tag: ExchangeTag = NO_TAG,
    ) -> Callable[[], None]:
        """Begins to send `send_counts[q]` consecutive rows of `send` to every rank q; returns what ends that.

        When it has ended, `received` is filled, by sending rank. No other operation comes between the two, and until
        then `send` is not to be written to and `received` not to be read. A transport that cannot move rows in the
        background has done everything when this returns.

        Both tensors are contiguous and on `device`.

        Args:
            tag: What for; transports that can tell ranks apart by it do.
        """

    def all_to_all(
        self, received: Tensor, send: Tensor, recv_counts: list[int], send_counts: list[int], tag: ExchangeTag = NO_TAG
    ) -> None:
        """Both halves of `start_all_to_all`."""
        self.start_all_to_all(received, send, recv_counts, send_counts, tag)()

    def send_buffer(self, num_bytes: int) -> Tensor:
        """Returns memory, (num_bytes,) uint8, out of which the next operation sends without a copy. If `can_lend`."""
        raise NotImplementedError(f"{type(self).__name__} lends no memory")

    def start_borrowing(
        self, send: Tensor, recv_counts: list[int], send_counts: list[int], tag: ExchangeTag = NO_TAG
    ) -> Callable[[], list[Tensor]]:
        """As `start_all_to_all`; what ends it returns each rank's rows where they lie, by sending rank. If `can_lend`.

        They may be read until the next operation begins, and not be written to.
        """
        raise NotImplementedError(f"{type(self).__name__} lends no memory")

    @abstractmethod
    def all_reduce(self, tensor: Tensor, what: str = "") -> None:
        """Replaces `tensor` by its sum over ranks, the same bits on every rank.

        Args:
            what: Where this rank is; transports that can tell ranks apart by it do.
        """

    @abstractmethod
    def all_gather(self, tensor: Tensor, what: str = "") -> list[Tensor]:
        """Returns every rank's tensor, by rank; shapes are equal. `what` as of `all_reduce`."""

    def drop_free(self) -> None:  # noqa: B027  most have nothing
        """Gives back memory of the transport's own that no operation needs at present. Not collective."""

    @abstractmethod
    def find_late_ranks(self, name: str, where: str) -> list[int]:
        """Returns the ranks that did not come to a call that failed here, as far as can be told.

        Args:
            name: Of the communicator; alike on every rank.
            where: What failed; alike on the ranks that came.
        """


def bound_gpu(group: dist.ProcessGroup) -> torch.device | None:
    """The GPU that a script has given its process group, by `init_process_group(device_id=)`: PyTorch leaves the
    current device alone then, and NCCL takes no tensors of another one. Groups made from it have it, too.
    """
    device = getattr(group, "bound_device_id", None)
    return device if isinstance(device, torch.device) and device.type == "cuda" else None


class _Running:
    """A process group with the number of its operations that have begun but not ended well.

    [Note: threads of gloo at the end]
    A thread of gloo lets go of an operation's tensors after whoever waits for it was told, and needs the interpreter's
    lock for that. If the interpreter is being finalised by then, the process aborts ("terminate called without an
    active exception"): on busy cores one script in fifty, of those that end with a collective. So groups of gloo are
    ended before, which joins their threads; unless one of them may wait for a peer that never comes.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.num_open = 0
        self._process = os.getpid()

    def end(self) -> None:
        """Lets go of the group. Not collective; there are no operations after it."""
        if self.num_open or self._process != os.getpid():
            return
        with contextlib.suppress(ValueError):  # the script has ended all groups
            dist.destroy_process_group(self.group)
        del self.group


class CollectiveTransport(Transport):
    """A process group of `torch.distributed`.

    Args:
        group: Used by nobody else, since calls on it are in program order; ended with the transport, or when the
            process ends.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._running = _Running(group)
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.backend = str(dist.get_backend(group))
        self._gpu = bound_gpu(group)
        if self.backend == "gloo":
            weakref.finalize(self, _Running.end, self._running)

    @property
    def device(self) -> torch.device:
        if self.backend != "nccl":
            return torch.device("cpu")
        # Once: it is the thread's own, and 0 in a thread that has just begun.
        self._gpu = self._gpu or torch.device("cuda", torch.cuda.current_device())
        return self._gpu

    def start_all_to_all(
        self,
        received: Tensor,
        send: Tensor,
        recv_counts: list[int],
        send_counts: list[int],
        tag: ExchangeTag = NO_TAG,
    ) -> Callable[[], None]:
        running = self._running
        running.num_open += 1
        work = dist.all_to_all_single(received, send, recv_counts, send_counts, group=running.group, async_op=True)

        def finish() -> None:
            if work is not None:
                work.wait()
            running.num_open -= 1

        return finish

    def all_reduce(self, tensor: Tensor, what: str = "") -> None:
        summed = as_stored(tensor)  # gloo takes no notice of strides
        self._running.num_open += 1
        dist.all_reduce(summed, group=self._running.group)
        self._running.num_open -= 1
        if summed.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(summed)

    def all_gather(self, tensor: Tensor, what: str = "") -> list[Tensor]:
        source = as_stored(tensor)
        out = [torch.empty_like(source) for _ in range(self.world_size)]
        self._running.num_open += 1
        dist.all_gather(out, source, group=self._running.group)
        self._running.num_open -= 1
        return out

    def find_late_ranks(self, name: str, where: str) -> list[int]:
        """Each rank that is stuck says in the store where; those that said nothing after a moment are late."""
        found: list[int] = []

        def ask() -> None:
            # The store lives on rank 0 and may be gone with it: then there is nothing more to tell.
            with contextlib.suppress(Exception):
                found.extend(self._ask_store(name, where))

        # Where that host stands still, the store never answers: the error is not to wait for it, too.
        asking = threading.Thread(target=ask, name="dgl_hybrid find_late_ranks", daemon=True)
        asking.start()
        asking.join(_STORE_TIMEOUT_S)
        return list(found)

    def _ask_store(self, name: str, where: str) -> list[int]:
        store = dist.distributed_c10d._get_default_store()
        store.set(_PROGRESS_KEY.format(name=name, rank=self.rank), where)
        time.sleep(1.0)
        keys = [_PROGRESS_KEY.format(name=name, rank=rank) for rank in range(self.world_size)]
        late = [rank for rank, key in enumerate(keys) if not store.check([key])]
        said = {rank: store.get(key).decode() for rank, key in enumerate(keys) if rank not in late}
        self.elsewhere = {rank: other for rank, other in said.items() if other != where}
        return late


def as_bytes(tensor: Tensor) -> Tensor:
    """A view of contiguous memory as (n,) uint8."""
    return tensor.view(-1).view(torch.uint8)


def as_stored(tensor: Tensor) -> Tensor:
    """Returns what can be moved as bytes: detached, contiguous, the tensor's own memory if its values lie there so."""
    stored = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # Strides of a dimension of one entry, or of no entries, are anything: PyTorch asks for 1 of what it shows as bytes.
    return stored.as_strided((stored.numel(),), (1,)).view(stored.shape)


def bytes_of_row(rows: Tensor) -> int:
    """Of (n, ...) rows, n = 0 included."""
    return rows.element_size() * math.prod(rows.shape[1:])


def sum_in_order(summands: Sequence[Tensor]) -> Tensor:
    """Returns the sum in the order of ranks, so that every rank gets the same bits; of half precision rounded once."""
    dtype = summands[0].dtype
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    total = summands[0].to(wide, copy=True)
    for summand in summands[1:]:
        total += summand
    return total.to(dtype)
