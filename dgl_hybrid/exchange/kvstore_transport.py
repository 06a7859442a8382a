# SPDX-License-Identifier: Apache-2.0
"""A transport over the servers of DGL's KVStore: slow and complete, for hosts that no collective backend spans.

A tensor goes from the sender to a server on the receiver's machine and from there to the receiver; see `mailbox`.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence

import torch
from dgl.distributed import role, rpc
from torch import Tensor

from dgl_hybrid.exchange.mailbox import (
    AbandonedResponse,
    AbandonRequest,
    CollectRequest,
    DepositRequest,
    ParcelResponse,
    register_services,
)
from dgl_hybrid.exchange.transport import (
    NO_TAG,
    ExchangeTag,
    Transport,
    as_bytes,
    as_stored,
    bytes_of_row,
    milliseconds,
    sum_in_order,
)

PARCEL_BYTES = 32 << 20
"""What one message carries at most: bounds the buffers that sender, server and receiver allocate at a time."""

_GATHERED_BYTES = 1 << 16
"""Sums up to this size take one round, each rank getting all summands; larger ones two, each rank adding a piece."""

_channels = itertools.count()


class KVStoreTransport(Transport):
    """All trainers of a DistDGL job, by DGL's trainer rank. Collective: every trainer makes its own at the same point.

    DGL's client is not made for threads: nothing else may talk to the servers while an operation runs.

    Args:
        timeout_s: A peer that stays away longer than this ends an operation with an error.
    """

    backend = "kvstore"

    def __init__(self, *, timeout_s: float) -> None:
        register_services()
        self.rank = role.get_trainer_rank()
        machines = _machine_of_trainers()
        self.world_size = len(machines)
        per_machine = rpc.get_num_server_per_machine()
        self._servers = [
            machine * per_machine + machines[:rank].count(machine) % per_machine
            for rank, machine in enumerate(machines)
        ]
        self._timeout_s = timeout_s
        self._group_id = rpc.get_group_id()
        self._client_id = rpc.get_rank()
        self._channel = next(_channels)
        self._num_calls = 0
        self._late: list[int] = []
        self._lock = threading.Lock()

    # ---------------------------------------------------------------- operations

    def start_all_to_all(
        self,
        received: Tensor,
        send: Tensor,
        recv_counts: list[int],
        send_counts: list[int],
        tag: ExchangeTag = NO_TAG,
    ) -> Callable[[], None]:
        row_bytes = bytes_of_row(send)
        outgoing = as_bytes(send).split([count * row_bytes for count in send_counts])
        incoming = as_bytes(received).split([count * row_bytes for count in recv_counts])
        self._swap(outgoing, incoming)
        return lambda: None

    def all_reduce(self, tensor: Tensor, what: str = "") -> None:
        summands = as_stored(tensor).view(-1)
        if summands.nbytes <= _GATHERED_BYTES:
            total = sum_in_order(self.all_gather(summands))
        else:
            sizes = [len(piece) for piece in summands.tensor_split(self.world_size)]
            mine = [torch.empty_like(summands[: sizes[self.rank]]) for _ in sizes]
            self._swap([as_bytes(piece) for piece in summands.split(sizes)], [as_bytes(piece) for piece in mine])
            total = torch.empty_like(summands)
            share = as_bytes(sum_in_order(mine))
            self._swap([share] * self.world_size, [as_bytes(piece) for piece in total.split(sizes)])
        tensor.copy_(total.view(tensor.shape))

    def all_gather(self, tensor: Tensor, what: str = "") -> list[Tensor]:
        source = as_stored(tensor)
        gathered = [torch.empty_like(source) for _ in range(self.world_size)]
        self._swap([as_bytes(source)] * self.world_size, [as_bytes(part) for part in gathered])
        return gathered

    def find_late_ranks(self, name: str, where: str) -> list[int]:
        """The ranks from which something was still to come when this one gave up."""
        return self._late

    # ---------------------------------------------------------------- messages

    def _swap(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> None:
        """Sends `outgoing[q]` to every rank q and fills `incoming[q]` from it; (n,) uint8 each."""
        if not self._lock.acquire(blocking=False):
            raise RuntimeError("two threads exchange at once over DGL's KVStore, whose client is not made for that")
        try:
            incoming[self.rank].copy_(outgoing[self.rank])
            self._num_calls += 1
            for step in range(1, self.world_size):  # not all to rank 0 first
                peer = (self.rank + step) % self.world_size
                for index, parcel in enumerate(_parcels(outgoing[peer])):
                    # DGL sends from this memory after the call has returned: it must not be the caller's.
                    request = DepositRequest(self._address(peer), self.rank, index, parcel.clone())
                    rpc.send_request(self._servers[peer], request)
            self._collect(incoming)
        finally:
            self._lock.release()

    def _collect(self, incoming: Sequence[Tensor]) -> None:
        places = [_parcels(part) if source != self.rank else [] for source, part in enumerate(incoming)]
        missing = [len(parcels) for parcels in places]
        if not sum(missing):
            return
        server, address = self._servers[self.rank], self._address(self.rank)
        rpc.send_request(server, CollectRequest(address, self._client_id, sum(missing)))
        deadline = time.monotonic() + self._timeout_s
        while sum(missing):
            response = rpc.recv_response(timeout=milliseconds(deadline - time.monotonic()))
            if response is None:
                self._late = [source for source, count in enumerate(missing) if count]
                self._abandon(server, address)
                raise RuntimeError(f"nothing came for {self._timeout_s:g} s")
            if not isinstance(response, ParcelResponse):
                raise RuntimeError(f"a {type(response).__name__} came amid an exchange over DGL's KVStore")
            places[response.source][response.index].copy_(response.payload)
            missing[response.source] -= 1
            deadline = time.monotonic() + self._timeout_s  # slow links are no absence

    def _abandon(self, server: int, address: tuple[int, ...]) -> None:
        """Sees to it that no late parcel meets another request of this client."""
        rpc.send_request(server, AbandonRequest(address))
        wait_ms = milliseconds(self._timeout_s)
        while not isinstance(rpc.recv_response(timeout=wait_ms), (AbandonedResponse, type(None))):
            pass

    def _address(self, rank: int) -> tuple[int, ...]:
        return self._group_id, self._channel, self._num_calls, rank


def _machine_of_trainers() -> list[int]:
    """Returns the machine of every trainer, by trainer rank, as server 0 knows them."""
    rpc.send_request(0, role.GetRoleRequest())
    trainers = rpc.recv_response().role["default"]
    rank_of_client = role.PER_ROLE_RANK["default"]
    by_rank = sorted((rank_of_client[client], machine) for client, machine in trainers)
    return [int(machine) for _, machine in by_rank]


def _parcels(payload: Tensor) -> list[Tensor]:
    return list(payload.split(PARCEL_BYTES)) if len(payload) else []
