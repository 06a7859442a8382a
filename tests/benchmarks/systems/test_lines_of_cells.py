# SPDX-License-Identifier: Apache-2.0
"""What the line of a cell is made of: its starts, its links."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from benchmarks.systems import measure
from benchmarks.systems.grid import Cell
from benchmarks.systems.measure import Bench, Settings
from benchmarks.systems.team import SystemFailure
from tests.benchmarks.systems.measurements import (
    MACHINE,
    SHAPED,
    TWO,
)


def test_what_failed_is_told_without_paths_of_this_machine(tmp_path: Path) -> None:
    """Lines are part of the repository."""
    peers, temporary = tmp_path / "peers", Path(tempfile.gettempdir(), "x")
    bench = measure.Bench(
        settings=Settings(), cache=measure.ROOT / "cache", peers=peers, rates=cast(Any, None), about={}
    )
    team = SimpleNamespace()
    failure = SystemFailure(
        "no module in /a/b", f"{measure.ROOT}/x.py {bench.cache}/g.npz {peers}/SAR {temporary} /usr/lib"
    )
    entry = measure._Entry(system="hybrid", unit=("hybrid",), team=cast(Any, team), failure=failure)
    line = bench._result(Cell(graph="products"), cast(Any, None), [entry])
    assert line["status"] == "failed"
    assert line["error"] == "no module in /a/b"
    assert line["details"] == "CHECKOUT/x.py CACHE/g.npz PEERS/SAR TEMP/x /usr/lib"


def a_start(*seconds: float, sent: int | None = None, wire: int = 0, **changes: Any) -> measure._Entry:
    """Of hybrid on two ranks, an epoch for each of the seconds; on an emulated network if anything was on the wire."""
    parts = dict.fromkeys(("cpu_s", "compute_s", "exchange_s", "wait_s"))
    epochs = [[{"elapsed_s": one, "sent_bytes": sent, "wire_bytes": wire, **parts}] * 2 for one in seconds]
    team = SimpleNamespace(network=object() if wire else None)
    return measure._Entry(
        **{"system": "hybrid", "unit": ("hybrid",), "team": cast(Any, team), "epochs": epochs, "peak_bytes": [1, 2]}
        | changes
    )


@pytest.fixture
def bench_of_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(measure, "epoch_floor_s", lambda *_, **__: 0.5)
    return Bench(settings=Settings(), cache=tmp_path, peers=None, rates=cast(Any, None), about={"machine": MACHINE})


def test_a_system_counts_by_all_its_starts(bench_of_lines: Bench) -> None:
    def result(*starts: measure._Entry) -> dict[str, Any]:
        return bench_of_lines._result(TWO, cast(Any, None), starts)

    first, second = a_start(1.0, 2.0, 3.0), a_start(4.0, 5.0, peak_bytes=[3, 1], warmup=7, prepare_s=8.0)
    both = result(first, second)
    assert (both["status"], both["p50"], both["iters"]) == ("ok", 3.0, 5)
    assert [start["p50"] for start in both["starts"]] == [2.0, 4.5]
    assert (both["peak_rss_bytes"], both["warmup"], both["prepare_s"]) == ([3, 2], 7, 4.0)
    dead = a_start(1.0, failure=SystemFailure("rank 1 of 2 died"))
    for starts in ((first, dead), (dead, first), (first, second, dead)):
        assert result(*starts) == {"status": "failed", "error": "rank 1 of 2 died", "details": ""}


def test_rows_that_did_not_go_over_the_links_are_no_measurement(bench_of_lines: Bench) -> None:
    """Each of two ranks sent 1000 bytes of rows; frames around them make it more on the wire, never less."""
    for wire, status in ((1100, "ok"), (951, "ok"), (949, "failed"), (1, "failed")):
        line = bench_of_lines._result(SHAPED, cast(Any, None), [a_start(1.0, sent=1000, wire=wire)])
        assert line["status"] == status
    assert line["error"] == "the links were bypassed: 2000 bytes of rows were sent, 2 left the hosts"
    others = (a_start(1.0, wire=1), a_start(1.0, sent=1000, wire=1, system="distdgl_full"), a_start(1.0, sent=1000))
    for start in others:  # what was sent is not known, or not all of it goes over the links
        assert bench_of_lines._result(SHAPED, cast(Any, None), [start])["status"] == "ok"


@pytest.mark.parametrize(("measured", "is_refused"), [(0.5e9, False), (1.04e9, False), (1.06e9, True)])
def test_links_that_carry_more_than_they_are_to_are_refused(
    measured: float, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shaped: list[float] = []
    network = SimpleNamespace(shape=shaped.append, measure_bits_per_s=lambda expected_bits_per_s: measured)
    monkeypatch.setattr(measure, "EmulatedNetwork", lambda num_hosts: contextlib.nullcontext(network))
    expected = (
        pytest.raises(measure.NetworkError, match=r"links carry 1.06e\+09 bit/s, limited to 1e\+09")
        if is_refused
        else contextlib.nullcontext()
    )
    with expected, measure.network_of(SHAPED) as found:
        assert found == (network, measured)
    assert shaped == [1e9]
    with measure.network_of(TWO) as found:
        assert found == (None, None)
