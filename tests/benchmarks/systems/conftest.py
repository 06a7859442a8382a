# SPDX-License-Identifier: Apache-2.0
"""Measurements that tests of ratios, tables and resuming share."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.systems.grid import Cell
from tests.benchmarks.systems.measurements import (
    ONE_GAT,
    ONE_SAGE,
    SHAPED,
    TWO,
    make_line,
)


@pytest.fixture
def lines() -> list[dict[str, Any]]:
    def cell(of: Cell, **seconds: float | None) -> list[dict[str, Any]]:
        return [make_line(of, system, value) for system, value in seconds.items()]

    two = cell(
        TWO,
        hybrid=1.0,
        depcache=2.0,
        depcomm=1.5,
        neutronstar=1.2,
        distdgl_full=20.0,
        sar=6.0,
        sar_mfg=4.0,
        pipegcn=3.0,
    )
    two[0] |= {"predicted": 0.8, "peak_rss_bytes": [3 * 10**8]}
    shaped = cell(SHAPED, hybrid=2.0, depcache=1.9, depcomm=8.0, neutronstar=2.0, distdgl_full=8.0, sar=None)
    shaped[0]["predicted"] = 2.2
    one = cell(ONE_SAGE, hybrid=1.0, dgl=1.6, distdgl_full=3.0) + cell(ONE_GAT, hybrid=1.0, dgl=3.5)
    return [*two, *shaped, *one]
