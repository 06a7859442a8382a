# SPDX-License-Identifier: Apache-2.0
"""Stands in for a DistDGL script: a server that listens and a trainer that ends, without DGL, or what `PLAN` says.

The first argument is a JSON object: name of a part -> list of steps `[verb, argument]`.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from multiprocessing.synchronize import Semaphore
from pathlib import Path


def listen() -> socket.socket:
    lines = Path(os.environ["DGL_IP_CONFIG"]).read_text().splitlines()
    servers = int(os.environ["DGL_NUM_SERVER"])
    machine, local = divmod(int(os.environ["DGL_SERVER_ID"]), servers)
    address, port = lines[machine].split()
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind((address, int(port) + local))
    sock.listen()
    return sock


def wait_for(name: str) -> None:
    while not Path(name).exists():
        time.sleep(0.02)


def idle(semaphore: Semaphore, seconds: float) -> None:
    print(f"child {os.getpid()}", flush=True)
    semaphore.release()
    time.sleep(seconds)


class Steps:
    """What a part can be told to do."""

    def __init__(self) -> None:
        self.held: list[object] = []

    def print(self, text: str) -> None:
        print(text, flush=True)

    def complain(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def listen(self, _: object) -> None:
        self.held.append(listen())

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def touch(self, name: str) -> None:
        Path(name).touch()

    def wait(self, name: str) -> None:
        wait_for(name)

    def outlive(self, part: str) -> None:
        """Waits until that part has ended and its agent knows."""
        file = Path(f"pid of {part}")
        while not (file.exists() and file.read_text()) or Path("/proc", file.read_text()).exists():
            time.sleep(0.02)

    def exit(self, code: int) -> None:
        sys.stdout.flush()
        os._exit(code)

    def kill(self, number: int) -> None:
        os.kill(os.getpid(), number)

    def refuse_to_end(self, _: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def complain_at_end(self, text: str) -> None:
        def complain(number: int, frame: object) -> None:
            print(text, file=sys.stderr, flush=True)
            os._exit(1)

        signal.signal(signal.SIGTERM, complain)

    def sampler(self, seconds: float) -> None:
        """As DGL does: a spawned process that outlives its parent, and semaphores in shared memory."""
        context = multiprocessing.get_context("spawn")
        semaphore = context.Semaphore(0)
        process = context.Process(target=idle, args=(semaphore, seconds), daemon=True)
        process.start()
        semaphore.acquire()
        self.held += [semaphore, process]

    def detach(self, seconds: float) -> None:
        """A process in a session of its own."""
        process = subprocess.Popen(
            [sys.executable, "-c", f"import time; time.sleep({seconds})"], start_new_session=True
        )
        print(f"child {process.pid}", flush=True)

    def litter(self, _: object) -> None:
        """Shared memory as DGL names it, and a temporary file."""
        Path("/dev/shm", os.environ["DGL_HYBRID_SHM_PREFIX"] + "litter").write_text("x")
        Path(os.environ["TMPDIR"], "litter").write_text("x")


def usual(name: str) -> list[list[object]]:
    if name.startswith("server"):
        return [["listen", None], ["wait", "stop"]]
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if rank:
        return [["touch", f"done {rank}"]]
    return [*(["wait", f"done {other}"] for other in range(1, world_size)), ["touch", "stop"]]


def main() -> None:
    if os.environ["DGL_ROLE"] == "server":
        name = f"server {os.environ['DGL_SERVER_ID']}"
    else:
        name = f"trainer {os.environ['RANK']}"
    print(f"pid {os.getpid()} {os.environ['DGL_HYBRID_SHM_PREFIX']}", flush=True)
    Path(f"pid of {name}").write_text(str(os.getpid()))
    steps = Steps()
    for verb, argument in json.loads(sys.argv[1]).get(name, usual(name)):
        getattr(steps, verb)(argument)


if __name__ == "__main__":
    main()
