# SPDX-License-Identifier: Apache-2.0
"""Services of DGL's RPC by which a server passes parcels from one trainer to another.

    rank i                       server of rank j's machine                 rank j
      │ ── Deposit(call 7, i → j) ──▶ kept until asked for
      │                               ◀──────────── Collect(call 7, j, n) ──── │
      │                               ── Parcel(call 7, from i) ──────────────▶ │
      │ ── Deposit(call 7, i → j) ──▶ ── Parcel(call 7, from i) ──────────────▶ │  has n: done

A trainer gets responses only between its `Collect` and its last parcel, so they never meet those of a pull: DGL's
client takes whatever response comes next. And since every parcel that leaves a call arrives before the call returns at
its receiver, there is nothing to fence. The requests are understood by servers that run `register_services`; one that
does not know them dies of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dgl.distributed import rpc
from torch import Tensor

DEPOSIT_SERVICE = 0x48590010
COLLECT_SERVICE = 0x48590011
ABANDON_SERVICE = 0x48590012

_ATTRIBUTE = "_dgl_hybrid_mailboxes"


@dataclass
class _Mailbox:
    """What one rank is sent by one call of one channel."""

    parcels: list[ParcelResponse] = field(default_factory=list)
    client_id: int | None = None
    """Who waits for it; None until it collects."""
    num_awaited: int = 0


def _mailboxes(server_state: Any) -> dict[tuple[int, ...], _Mailbox]:
    boxes: dict[tuple[int, ...], _Mailbox] = server_state.kv_store.__dict__.setdefault(_ATTRIBUTE, {})
    return boxes


def _deliver(boxes: dict[tuple[int, ...], _Mailbox], address: tuple[int, ...]) -> Any:
    box = boxes[address]
    if box.client_id is None:
        return None
    responses = [(box.client_id, parcel) for parcel in box.parcels]
    box.parcels = []
    box.num_awaited -= len(responses)
    if box.num_awaited <= 0:
        del boxes[address]
    return responses or None


class DepositRequest(rpc.Request):
    """Leaves a parcel for a rank; not answered.

    Args:
        address: `(group, channel, call, receiving rank)`.
        source: The sending rank.
        index: Of the parcel among those from this source.
        payload: (n,) uint8.
    """

    def __init__(self, address: tuple[int, ...], source: int, index: int, payload: Tensor) -> None:
        self.address, self.source, self.index, self.payload = address, source, index, payload

    def __getstate__(self) -> Any:
        return self.address, self.source, self.index, self.payload

    def __setstate__(self, state: Any) -> None:
        self.address, self.source, self.index, self.payload = state

    def process_request(self, server_state: Any) -> Any:
        boxes = _mailboxes(server_state)
        box = boxes.setdefault(self.address, _Mailbox())
        box.parcels.append(ParcelResponse(self.source, self.index, self.payload))
        return _deliver(boxes, self.address)


class CollectRequest(rpc.Request):
    """Asks for all parcels of one call; answered by one `ParcelResponse` for each, as they come in.

    Args:
        address: As in `DepositRequest`.
        client_id: Of the receiving rank.
        num_parcels: How many there will be, at least one.
    """

    def __init__(self, address: tuple[int, ...], client_id: int, num_parcels: int) -> None:
        self.address, self.client_id, self.num_parcels = address, client_id, num_parcels

    def __getstate__(self) -> Any:
        return self.address, self.client_id, self.num_parcels

    def __setstate__(self, state: Any) -> None:
        self.address, self.client_id, self.num_parcels = state

    def process_request(self, server_state: Any) -> Any:
        boxes = _mailboxes(server_state)
        box = boxes.setdefault(self.address, _Mailbox())
        box.client_id, box.num_awaited = self.client_id, self.num_parcels
        return _deliver(boxes, self.address)


class ParcelResponse(rpc.Response):
    """A parcel; see `DepositRequest`."""

    def __init__(self, source: int, index: int, payload: Tensor) -> None:
        self.source, self.index, self.payload = source, index, payload

    def __getstate__(self) -> Any:
        return self.source, self.index, self.payload

    def __setstate__(self, state: Any) -> None:
        self.source, self.index, self.payload = state


class AbandonRequest(rpc.Request):
    """Ends the wait of a `CollectRequest`; the answer is the last response that belongs to it."""

    def __init__(self, address: tuple[int, ...]) -> None:
        self.address = address

    def __getstate__(self) -> Any:
        return (self.address,)

    def __setstate__(self, state: Any) -> None:
        # DGL hands a state of one entry over without its tuple.
        self.address = state

    def process_request(self, server_state: Any) -> Any:
        _mailboxes(server_state).pop(self.address, None)
        return AbandonedResponse(self.address)


class AbandonedResponse(rpc.Response):
    """Nothing more comes for this address."""

    def __init__(self, address: tuple[int, ...]) -> None:
        self.address = address

    def __getstate__(self) -> Any:
        return (self.address,)

    def __setstate__(self, state: Any) -> None:
        self.address = state


def register_services() -> None:
    """Makes the requests known to DGL, in servers and clients alike; twice is as good as once."""
    rpc.register_service(DEPOSIT_SERVICE, DepositRequest, None)
    rpc.register_service(COLLECT_SERVICE, CollectRequest, ParcelResponse)
    rpc.register_service(ABANDON_SERVICE, AbandonRequest, AbandonedResponse)
