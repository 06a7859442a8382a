# SPDX-License-Identifier: Apache-2.0
"""Signals that end a process: as exceptions, so that what it has started is ended on the way out, or later."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import NoReturn


class EndedBySignal(SystemExit):
    """A signal that ends processes came; `code` is 128 and its number."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.name = signal.Signals(number).name


@contextlib.contextmanager
def ending_signals_raise() -> Iterator[None]:
    """Has SIGTERM and SIGHUP raise `EndedBySignal`, where they would end this process at once.

    Not those that are ignored (a job under `nohup` outlives its terminal) or have handlers; nor in another thread than
    the main one, which alone may set any.
    """

    def leave(number: int, frame: object) -> NoReturn:
        raise EndedBySignal(number)

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


@contextlib.contextmanager
def ending_signals_wait() -> Iterator[None]:
    """Has Ctrl-C, SIGTERM and SIGHUP wait for the end of what is done here, and then do what they would have done.

    Those that are ignored stay so; and not in another thread than the main one.
    """
    came: list[int] = []
    is_main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if is_main else ()
    handlers = {number: signal.getsignal(number) for number in numbers}
    ours = {number: handler for number, handler in handlers.items() if handler is not None}  # None: not Python's
    for number in ours:
        signal.signal(number, lambda came_now, frame: came.append(came_now))
    try:
        yield
    finally:
        for number, handler in ours.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])
