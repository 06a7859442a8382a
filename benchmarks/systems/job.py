# SPDX-License-Identifier: Apache-2.0
"""What one rank of one system is told on its command line, and the line it is spoken to over."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

SKIPS_LARGEST = "skips_largest"
"""The option of DistDGL, and the fact, that all seeds at once are left out, for which there was no memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One system on one cell."""

    system: str
    """A key of `adaptors.SYSTEMS`."""
    part_config: str
    graph_name: str
    data: dict[str, Any]
    num_nodes: int
    feat_dim: int
    num_classes: int
    num_train: int
    model: str
    num_layers: int
    hidden: int
    world_size: int
    threads: int
    heads: int = 4
    """Of hidden GAT layers; `hidden` is the width of all together."""
    dropout: float = 0.0
    lr: float = 0.01
    seed: int = 0
    """Of initial weights, which are the same for all systems, and of the vertices whose logits are compared."""
    gate_epochs: int = 3
    sample_size: int = 200
    peers: str = ""
    """Folder that holds the checkouts of peers."""
    socket: str = ""
    """Where the starting process listens."""
    interface: str = "lo"
    """Over which ranks talk; its byte counter is read."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further settings of the system."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        return cls(**json.loads(text))


@contextlib.contextmanager
def socket_address(path: str) -> Iterator[str]:
    """Gives an address of a socket's file that is short enough (107 bytes) in whatever temporary folder it is."""
    folder, name = os.path.split(path)
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/{name}"
    finally:
        os.close(descriptor)


class Link:
    """A rank's end of the line: orders come in, answers go out. When it closes, this process ends at once.

    Whatever the rank is doing then, a collective that no peer takes part in any more included: nothing is left behind.
    """

    def __init__(self, path: str, rank: int) -> None:
        self._socket = socket.socket(socket.AF_UNIX)  # in the file system: reaches into network namespaces
        with socket_address(path) as address:
            self._socket.connect(address)
        self._orders: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._is_done = False
        self.send({"rank": rank})
        threading.Thread(target=self._read, daemon=True, name="orders").start()

    def _read(self) -> None:
        with self._socket.makefile("r", encoding="utf-8") as stream:
            for line in stream:
                self._orders.put(json.loads(line))
        if not self._is_done:
            os._exit(3)

    def next_order(self) -> dict[str, Any]:
        """Waits, asleep, for the next order; after "stop" the line may close."""
        order = self._orders.get()
        self._is_done = order["do"] == "stop"
        return order

    def send(self, message: dict[str, Any]) -> None:
        self._socket.sendall(json.dumps(message).encode() + b"\n")
