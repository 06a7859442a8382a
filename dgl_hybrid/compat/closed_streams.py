# SPDX-License-Identifier: Apache-2.0
"""Standard streams of a process that was started without them (`>&-`, some daemons)."""

from __future__ import annotations

import os
import sys


def open_closed_streams() -> None:
    """Opens the null device for each of stdin, stdout and stderr that is closed: nothing else becomes descriptor 0, 1
    or 2 then, and whoever prints finds a stream.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest that is free, so this one
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  for as long as the process
