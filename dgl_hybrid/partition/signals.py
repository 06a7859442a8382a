# SPDX-License-Identifier: Apache-2.0
"""Signals that end a process at once, as exceptions: what it has started is ended on the way out."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import NoReturn


@contextlib.contextmanager
def ending_signals_raise() -> Iterator[None]:
    """Has SIGTERM and SIGHUP raise `SystemExit` of 128 and their number, where they would end this process at once.

    Not those that are ignored (a job under `nohup` outlives its terminal) or have handlers; nor in another thread than
    the main one, which alone may set any.
    """

    def leave(number: int, frame: object) -> NoReturn:
        raise SystemExit(128 + number)

    is_main = threading.current_thread() is threading.main_thread()
    ours = [
        number for number in (signal.SIGTERM, signal.SIGHUP) if is_main and signal.getsignal(number) == signal.SIG_DFL
    ]
    for number in ours:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)
