# SPDX-License-Identifier: Apache-2.0
"""`benchmarks.exchange.sums`: all ways give the same numbers, and figures come of it."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks.exchange import sums


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has classes of threads")
def test_every_way_is_timed(capsys: pytest.CaptureFixture[str]) -> None:
    sums.main(["--ranks", "2", "--rounds", "1", "--json"])
    printed = capsys.readouterr()
    cells = json.loads(printed.out)["cells"]
    assert [cell["what"] for cell in cells] == ["gather of 1 KB", "sum of 150 KB", "sum of 1000 KB"]
    assert all(set(sums.WAYS) < set(cell) and cell["ranks"] == 2 for cell in cells)
    assert "What a step takes beside its work" in printed.err
