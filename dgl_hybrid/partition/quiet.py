# SPDX-License-Identifier: Apache-2.0
"""Keeps DGL's progress prints off stdout, which is for results."""

from __future__ import annotations

import contextlib
import ctypes
import io
import logging
import os
import sys
import tempfile
from collections.abc import Iterator

_logger = logging.getLogger(__name__)


@contextlib.contextmanager
def captured_output(what: str) -> Iterator[None]:
    """Sends what is printed inside to the debug log, at the level of file descriptors.

    DGL prints from Python and from C++ (METIS reports its edge cut through the C++ logger on stderr), so replacing
    `sys.stdout` is not enough. Not thread-safe: other threads' prints land in the log too. Not collective.

    Args:
        what: The name the log gives to the text, e.g. "METIS".
    """
    python_text = io.StringIO()
    with tempfile.TemporaryFile() as native_text:
        saved: list[tuple[int, int]] = []
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:  # as where descriptors are closed
                stream.flush()
        for fd in (1, 2):
            # A closed descriptor (daemons) has nothing to keep clean.
            with contextlib.suppress(OSError):
                saved.append((fd, os.dup(fd)))
                os.dup2(native_text.fileno(), fd)
        try:
            with contextlib.redirect_stdout(python_text):
                yield
        finally:
            # C stdio buffers when stdout is a pipe; without the flush the text would come out after the restore.
            ctypes.CDLL(None).fflush(None)
            for fd, copy in saved:
                os.dup2(copy, fd)
                os.close(copy)
            native_text.seek(0)
            text = python_text.getvalue() + native_text.read().decode(errors="replace")
            if text.strip():
                _logger.debug("%s: %s", what, text.strip())
