# SPDX-License-Identifier: Apache-2.0
"""Lets ranks that share this host believe that they are on several."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from dgl_hybrid.exchange import host_links


@contextlib.contextmanager
def on_hosts(rank: int, hosts: Sequence[int] | None) -> Iterator[None]:
    """While it lasts, communicators are made as if rank r were on host `hosts[r]`; None: as it is."""
    if hosts is None:
        yield
        return
    before = host_links._describe_host

    def elsewhere(*, can_share: bool) -> list[str]:
        can, _, *others = before(can_share=can_share)
        return [can, f"host {hosts[rank]}", *others]

    host_links._describe_host = elsewhere
    try:
        yield
    finally:
        host_links._describe_host = before
