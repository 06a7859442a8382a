# SPDX-License-Identifier: Apache-2.0
"""An agent on its own, spoken to as a controller does."""

from __future__ import annotations

import array
import fcntl
import os
import socket
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import dgl_hybrid
from dgl_hybrid.launch.messages import (
    Cleaned,
    End,
    Exited,
    Line,
    LineSplitter,
    Message,
    Prepare,
    Ready,
    StartPart,
    decode,
    encode,
)

NUM_LINES = 40_000


def wait_until_full(sock: socket.socket) -> None:
    """Waits until nothing more arrives though nothing is read: the other side has to wait, or has given up."""
    unread, waiting, turns = -1, array.array("i", [0]), 0
    while turns < 15:
        time.sleep(0.02)
        fcntl.ioctl(sock, termios.FIONREAD, waiting)
        turns = turns + 1 if waiting[0] == unread > 0 else 0
        unread = waiting[0]


def messages_of(sock: socket.socket) -> Iterator[Message]:
    splitter = LineSplitter()
    while data := sock.recv(65536):
        for line in splitter.feed(data):
            message = decode(line)
            assert message is not None
            yield message


def test_one_socket_for_both_directions_loses_nothing_when_its_reader_pauses(tmp_path: Path) -> None:
    """As a remote shell gives it to its command. Made non-blocking for reading, it was so for writing, too: the first
    moment in which it was full was taken for the loss of the controller, and ended the job.
    """
    (tmp_path / "graph.json").write_text("{}")
    ours, theirs = socket.socketpair()
    with ours:
        ours.settimeout(60.0)
        with theirs:
            agent = subprocess.Popen(
                [sys.executable, "-m", "dgl_hybrid.launch.agent"],
                cwd=Path(dgl_hybrid.__file__).parents[1],
                stdin=theirs,
                stdout=theirs,
                stderr=subprocess.PIPE,
            )
        try:
            order = Prepare(
                machine_id=0,
                address="127.0.0.1",
                server_ports={},
                shm_prefix=f"dgl_hybrid_socket_{os.getpid()}_0_",
                python=sys.executable,
                needs_plugin=True,
                num_samplers=0,
                command=["-c", f"for number in range({NUM_LINES}): print(number, 'of many')"],
                workspace=str(tmp_path),
                part_config=str(tmp_path / "graph.json"),
                ip_config_text=None,
                grace_s=5.0,
                silence_timeout_s=None,
            )
            ours.sendall(encode(order))
            said = messages_of(ours)
            assert isinstance(next(said), Ready)
            ours.sendall(encode(StartPart(name="trainer 0", environment={})))
            wait_until_full(ours)
            lines = []
            for message in said:
                if isinstance(message, Line):
                    lines.append(message.text)
                else:
                    break
            assert message == Exited(part="trainer 0", code=0)
            is_whole = lines == [f"{number} of many" for number in range(NUM_LINES)]
            assert is_whole, f"{len(lines)} of {NUM_LINES} lines came"
            ours.sendall(encode(End()))
            assert list(said) == [Cleaned()]
            assert agent.wait(30.0) == 0
        finally:
            agent.kill()
            _, complaints = agent.communicate()
        assert complaints == b""
