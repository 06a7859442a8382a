# SPDX-License-Identifier: Apache-2.0
"""`benchmarks.exchange.several_hosts` on two emulated hosts: both ways give the same bits, and figures come of it."""

from __future__ import annotations

import json

import pytest

from benchmarks.emulated_network import why_unavailable
from benchmarks.exchange import several_hosts


def test_two_hosts_of_two_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    why = why_unavailable()
    if why is not None:
        pytest.skip(f"network namespaces: {why}")
    several_hosts.main(["--mbit", "1000", "--widths", "4", "--rounds", "3", "--json"])
    printed = capsys.readouterr()
    result = json.loads(printed.out)
    assert (result["hosts"], result["ranks_per_host"], result["near"]) == (2, 2, 0.9)
    (record,) = result["by_mbit"]["1000"]
    assert record["width"] == 4
    assert all(record[name] > 0.0 for name in ("faster", "less_cpu", "collective_ms", "mixed_ms"))
    assert "90% of what is read is near" in printed.err
