# SPDX-License-Identifier: Apache-2.0
"""One rank of three that exchange until one is lost in some way; what the others are told goes to a file."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dgl_hybrid.errors import ExchangeError
from dgl_hybrid.exchange import host_links
from dgl_hybrid.exchange.connect import create_communicator
from dgl_hybrid.exchange.shared_memory_transport import SharedMemoryTransport
from dgl_hybrid.planner.probe import probe

WORLD_SIZE, LOST_AT = 3, 5


def exchange_until_somebody_is_lost(rank: int, folder: Path, way: str) -> str:
    communicator = create_communicator(transport="shared_memory", timeout_s=60.0)
    transport = communicator.transport
    assert isinstance(transport, SharedMemoryTransport)
    counts = [1000] * WORLD_SIZE
    if way == "amid the probe":
        if rank == 1:
            transport.all_to_all = lambda *_: end(folder)  # type: ignore[method-assign]
        probe(communicator.lend("the probe"))
    if way == "with the store":
        if rank == 0:
            end(folder)
        communicator.gather_ints([rank])
    for number in range(1, LOST_AT + 3):
        if rank == 1 and number == LOST_AT:
            lose(transport, folder, way)
        rows = communicator.send_buffer((3000, 16), torch.float32, torch.device("cpu")).fill_(rank)
        for peer, part in enumerate(communicator.borrow(rows, counts, counts, layer=2)):
            assert bool((part == peer).all())
    return "nobody was lost"


def lose(transport: SharedMemoryTransport, folder: Path, way: str) -> None:
    if way == "between exchanges":
        end(folder)
    if way == "with a child":
        # The child holds the other ends of all sockets and maps all memory.
        if os.fork() == 0:
            (folder / "child").write_text(str(os.getpid()))
            time.sleep(30)
            os._exit(0)
        while not (folder / "child").exists():
            time.sleep(0.01)
        end(folder)
    if way == "amid an exchange":
        send, told = transport._send, list[int]()

        def send_to_one(link: Any, message: bytes, deadline: float) -> None:
            if told:
                end(folder)
            told.append(link.rank)
            send(link, message, deadline)

        transport._send = send_to_one  # type: ignore[method-assign]
    if way == "while it grows its memory":
        transport.send_buffer(64 << 20)[: 1 << 20].fill_(1)
        end(folder)


def end(folder: Path) -> None:
    (folder / "end").write_text(str(time.monotonic()))
    os.kill(os.getpid(), signal.SIGKILL)


def store_of_rank_0(rank: int, folder: Path) -> dist.TCPStore:
    """Returns the store as torchrun makes it for a single host: it lives in rank 0."""
    port, aside = folder / "port", folder / "port.new"
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        aside.write_text(str(store.port))
        aside.rename(port)
        return store
    while not port.exists():
        time.sleep(0.01)
    return dist.TCPStore("127.0.0.1", int(port.read_text()), is_master=False)


def main(rank: int, folder: Path, way: str) -> None:
    torch.set_num_threads(1)
    options: dict[str, Any] = {"init_method": f"file://{folder}/rendezvous"}  # which outlives rank 0
    if way == "with the store":
        options = {"store": store_of_rank_0(rank, folder)}
    dist.init_process_group("gloo", rank=rank, world_size=WORLD_SIZE, timeout=timedelta(seconds=60), **options)
    address = host_links._address

    def noted_address(secret: bytes) -> bytes:
        (folder / f"address_{address(secret)[1:].decode().replace('/', '_')}").touch()
        return address(secret)

    host_links._address = noted_address
    try:
        said = exchange_until_somebody_is_lost(rank, folder, way)
    except ExchangeError as error:
        said = str(error)
    (folder / f"rank{rank}").write_text(json.dumps({"said": said, "at_s": time.monotonic()}))
    os._exit(0)  # the process group would wait for the lost one


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
