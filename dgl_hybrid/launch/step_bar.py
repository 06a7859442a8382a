# SPDX-License-Identifier: Apache-2.0
"""A bar for work of a few long steps, as partitioning a graph is."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from tqdm import tqdm

from dgl_hybrid.partition.write import OnStep


@contextlib.contextmanager
def step_bar(show: bool) -> Iterator[OnStep]:
    """A bar on stderr, where that is a terminal; yields what is told of the steps."""
    with tqdm(
        bar_format="{desc} |{bar}| {n_fmt}/{total_fmt} [{elapsed}]",
        total=1,
        file=sys.stderr,
        disable=not (show and sys.stderr.isatty()),
        leave=False,
    ) as bar:

        def begin(what: str, number: int, total: int) -> None:
            bar.total, bar.n = total, number
            bar.set_description_str(what)

        yield begin
