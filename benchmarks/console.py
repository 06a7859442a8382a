# SPDX-License-Identifier: Apache-2.0
"""Where benchmarks print their tables."""

from __future__ import annotations

import sys

from rich.console import Console

PLAIN_WIDTH = 300
"""Columns where a stream is no terminal, whose width is not known then: rich takes 80, and folds words to fit them.
Tables take no more than they need."""


def make_console(*, to_stderr: bool, quiet: bool = False) -> Console:
    """A console on stdout, or on stderr, where stdout is for programs (`--json`)."""
    stream = sys.stderr if to_stderr else sys.stdout
    return Console(file=stream, width=None if stream.isatty() else PLAIN_WIDTH, quiet=quiet)
