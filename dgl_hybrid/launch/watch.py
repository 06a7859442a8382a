# SPDX-License-Identifier: Apache-2.0
"""A process beside each agent that cleans up when the agent is done, or gone: an agent may be killed, too."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import NoReturn

from dgl_hybrid.launch.leftovers import remove_everything


class Watch:
    """The agent's end of the watch; the other one sits at the end of a pipe and waits until it is closed."""

    def __init__(self, shm_prefix: str) -> None:
        self._shm_prefix = shm_prefix
        self.pid, self._pipe = self._fork()

    def restart(self) -> None:
        """Puts another one in its place, after it was killed."""
        os.close(self._pipe)
        self.pid, self._pipe = self._fork()

    def clean(self, shared_memory: set[str]) -> None:
        """Has everything ended and removed; the process ends when it is done."""
        with contextlib.suppress(OSError):
            os.write(self._pipe, "\n".join(shared_memory).encode())
        os.close(self._pipe)

    def _fork(self) -> tuple[int, int]:
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            _watch(reading, self._shm_prefix)
        os.close(reading)
        return pid, writing


def _watch(pipe: int, shm_prefix: str) -> NoReturn:
    try:
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        # stdout stays open: the controller sees its end only when this process is done as well.
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        # By their list: closing all numbers there may be takes minutes where a container has no limit.
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            if descriptor > 2 and descriptor != pipe:
                with contextlib.suppress(OSError):  # that of the list itself
                    os.close(descriptor)
        heard = b""
        while data := os.read(pipe, 65536):
            heard += data
        remove_everything(shm_prefix, set(filter(None, heard.decode().split("\n"))))
    finally:
        os._exit(0)
