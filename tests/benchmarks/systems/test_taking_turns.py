# SPDX-License-Identifier: Apache-2.0
"""Systems that wait side by side and take turns; ours in the same processes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest

from benchmarks.systems import gate, measure
from benchmarks.systems.grid import systems_of
from benchmarks.systems.measure import Bench, Settings
from benchmarks.systems.team import SystemFailure
from benchmarks.systems.turns import error_of_turns
from tests.benchmarks.systems.measurements import (
    ONE_SAGE,
    TWO,
)


@pytest.mark.parametrize(("warmup", "num_epochs", "turn"), [(2, 5, 5), (0, 4, 1)])
def test_turns_are_as_long_as_epochs_of_the_plan_that_stays_allow(
    warmup: int, num_epochs: int, turn: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Settled once the fourth epoch has begun, the first of the plan that stays, which makes what is kept."""
    seconds = iter((0.01, 0.01, 0.01, 0.4, 0.1, 0.1))
    done: list[float] = []

    class FakeTeam:
        def start(self) -> None: ...

        def ask(self, order: str, **arguments: Any) -> list[Any]:
            if order == "epochs":
                done.append(next(seconds))
                return [[{"elapsed_s": done[-1]}], [{"elapsed_s": 0.001}]]
            return [{}, {}] if order != "is_settled" else [len(done) >= 4, True]

    monkeypatch.setattr(measure.gate, "merge", lambda samples: {})
    monkeypatch.setattr(measure.gate, "compare", lambda *samples: {})
    reference = tmp_path / "reference.json"
    reference.write_text("{}")
    bench = SimpleNamespace(settings=Settings(warmup=warmup))
    entry = measure._Entry(system="hybrid", unit=("hybrid",), team=FakeTeam())  # type: ignore[arg-type]
    measure.Bench._prepare(bench, entry, reference)  # type: ignore[arg-type]
    assert len(done) == entry.warmup == num_epochs
    assert entry.turn == turn


class FakeTeam:
    """Answers for two ranks; dies when its strategy `dying` comes."""

    made: ClassVar[list[FakeTeam]] = []
    working: ClassVar[int] = 12
    dying: ClassVar[dict[str, int]] = {}
    """Systems whose processes end when they first train -> how many of their teams."""
    seconds: ClassVar[dict[str, Iterator[float]]] = {}
    """Systems whose epochs are not all of one second -> what they take, order by order."""

    def __init__(self, *, job: Any, **options: Any) -> None:
        self.job, self.system, self.orders, self.current = job, job.system, [], ""
        self.has_ended = False
        FakeTeam.made.append(self)

    @staticmethod
    def memory() -> Any:
        """Of 100 bytes a team takes `working` while it trains, and 5 once it has given back what is free."""
        teams = [team for team in FakeTeam.made if not team.has_ended and "check" in team.orders]
        taken = sum(
            FakeTeam.working if team.orders[-1] in ("check", "epochs", "is_settled", "facts") else 5 for team in teams
        )
        return SimpleNamespace(total=100, available=100 - taken)

    def start(self) -> None:
        self.orders.append("start")

    def end(self) -> None:
        self.has_ended = True

    def ask(self, order: str, *, timeout_s: float, **arguments: Any) -> list[Any]:
        assert not self.has_ended
        self.orders.append(arguments.get("name", order))
        if order == "epochs" and FakeTeam.dying.get(self.system, 0) > 0:
            FakeTeam.dying[self.system] -= 1
            raise SystemFailure("rank 1 of 2 died", has_died=True)
        if order == "become":
            if arguments["name"] == "depcache":
                raise SystemFailure("rank 1 of 2 died")
            was, self.current = self.current, arguments["name"]
            return [was != self.current] * 2
        seconds = next(FakeTeam.seconds.get(self.current, iter(())), 1.0) if order == "epochs" else None
        answers: dict[str, list[Any]] = {
            "is_settled": [True, True],
            "epochs": [[{"elapsed_s": seconds}] * arguments.get("count", 1)] * 2,
            "peak": [1000 - len(self.orders), 7],
        }
        return answers.get(order, [{}, {}])


@pytest.fixture
def fake_bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    FakeTeam.made, FakeTeam.seconds = [], {}
    monkeypatch.setattr(measure, "Team", FakeTeam)
    monkeypatch.setattr(measure.psutil, "virtual_memory", FakeTeam.memory)
    monkeypatch.setattr(measure.gate, "merge", lambda samples: {})
    monkeypatch.setattr(measure.gate, "compare", lambda *samples: {})
    monkeypatch.setattr(Bench, "_reference_file", lambda *of: tmp_path / "reference.json")
    monkeypatch.setattr(Bench, "_line", lambda self, cell, graph, run, system: {"variant": system})
    monkeypatch.setattr(
        Bench, "_result", lambda self, cell, graph, starts: {"starts": starts, "failed": starts[0].failure is not None}
    )
    (tmp_path / "reference.json").write_text("{}")
    monkeypatch.setattr(Bench, "job", lambda self, cell, graph, system, **of: SimpleNamespace(system=system, **of))
    settings = Settings(rounds=2, starts=2, warmup=0)
    return Bench(
        settings=settings, cache=tmp_path, peers=None, rates=cast(Any, None), about={}, on_phase=lambda phase: None
    )


def test_every_strategy_comes_after_a_system_of_others_once() -> None:
    unit = ("hybrid", "depcache", "depcomm", "neutronstar")
    team = cast(Any, None)
    entries = [measure._Entry(system=name, team=team, unit=unit) for name in unit]
    entries += [measure._Entry(system=name, team=team, unit=(name,)) for name in ("dgl", "sar")]
    orders = [[entry.system for entry in measure.order_of_turns(entries, number)] for number in range(-1, 5)]
    assert all(sorted(order) == sorted([*unit, "dgl", "sar"]) for order in orders)
    assert all(set(order[:4]) == set(unit) for order in orders)
    assert {order[0] for order in orders[1:]} == set(unit)
    after = {(order[place], order[place + 1]) for order in orders for place in range(5)}
    assert {("dgl", "sar"), ("sar", "dgl")} <= after


def test_as_many_wait_as_there_is_room_for_while_they_train(fake_bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asleep three take 15 of 100 bytes, 40 of which are to stay free; at work each takes 20."""
    monkeypatch.setattr(FakeTeam, "working", 20)
    lines = fake_bench.measure(TWO, cast(Any, None), ("dgl", "dgl_blocks", "dgl_one_thread"))
    assert [line["failed"] for line in lines] == [False] * 3
    together = [line["starts"][0].together for line in lines]
    assert together == [["dgl", "dgl_blocks"], ["dgl", "dgl_blocks"], ["dgl_one_thread"]]


def test_ours_are_started_together() -> None:
    assert measure.units_of(["hybrid", "depcomm", "dgl", "sar"]) == [("hybrid", "depcomm"), ("dgl",), ("sar",)]
    assert measure.units_of(["dgl"]) == [("dgl",)]
    assert measure.units_of(["dgl", "hybrid"]) == [("hybrid",), ("dgl",)]


def test_strategies_take_turns_in_the_same_processes(fake_bench: Bench) -> None:
    lines = fake_bench.measure(TWO, cast(Any, None), ("hybrid", "depcomm", "dgl"))
    assert [line["failed"] for line in lines] == [False] * 3
    assert [team.system for team in FakeTeam.made] == ["ours_in_turns", "dgl", "ours_in_turns"]
    hybrid = lines[0]["starts"][0]
    assert hybrid.together == ["hybrid", "depcomm", "dgl"]
    assert len(hybrid.epochs) == 2  # the turn before the first is not counted
    asked = FakeTeam.made[0].orders
    assert asked[:3] == ["start", "prepare", "hybrid"]
    assert asked.count("prepare") == asked.count("start") == 1
    # Prepared one after another; each turn of another one begins with what is not timed.
    turns = asked[asked.index("depcomm") + 1 :]
    (first, *_) = (number for number, order in enumerate(turns) if order == "hybrid")
    # Its first stay is checked again: trials may have chosen another plan since.
    assert turns[first : first + 6] == ["hybrid", "check", "forget_peak", "epochs", "epochs", "peak"]
    stays = " ".join(turns[first + 1 :])
    assert "hybrid epochs forget_peak epochs epochs peak" in stays
    assert "hybrid epochs epochs peak" not in stays, "nobody follows itself"
    # All have one epoch in each turn that is not counted, beside those of the turn.
    assert FakeTeam.made[1].orders[-3:] == ["epochs", "epochs", "peak"]
    # The most that either rank held in any turn, which here is the first.
    number_of_peaks = [number for number, order in enumerate(asked, 1) if order == "peak"]
    assert hybrid.peak_bytes[1] == 7
    assert 1000 - hybrid.peak_bytes[0] in number_of_peaks[:2]


def shaken(least: float, most: float) -> Iterator[float]:
    """Seconds of one order after another; a turn has two or three of them, of which the last is timed."""
    return itertools.cycle((least, least, most, most))


def test_ours_go_on_by_themselves_until_they_are_told_apart(fake_bench: Bench) -> None:
    FakeTeam.seconds = {"depcomm": shaken(0.99, 1.02)}
    settings = replace(fake_bench.settings, starts=1, more_rounds=100, precision=0.005)
    lines = replace(fake_bench, settings=settings).measure(TWO, cast(Any, None), ("hybrid", "depcomm", "dgl"))
    hybrid, depcomm, dgl = (line["starts"][0] for line in lines)
    assert len(hybrid.turns) == len(depcomm.turns), "of each round, one turn of each"
    assert 2 < len(hybrid.turns) < 102
    assert error_of_turns(depcomm.turns, hybrid.turns) <= 0.005
    assert error_of_turns(depcomm.turns[:-1], hybrid.turns[:-1]) > 0.005, "and no longer"
    # The others have slept since; so what is held against them is of the turns that all had.
    assert len(dgl.turns) == len(dgl.epochs) == len(hybrid.epochs) == len(depcomm.epochs) == 2


def test_what_a_strategy_breaks_is_started_again_without_it(fake_bench: Bench) -> None:
    """Where everything cached does not fit, the others are measured nevertheless."""
    lines = fake_bench.measure(TWO, cast(Any, None), ("hybrid", "depcache", "depcomm", "neutronstar"))
    assert {line["variant"]: line["failed"] for line in lines} == {
        "hybrid": False,
        "depcache": True,
        "depcomm": False,
        "neutronstar": False,
    }
    assert all(len(start.epochs) == 2 for line in lines if not line["failed"] for start in line["starts"])
    # Who has failed is not tried again.
    assert [len(line["starts"]) for line in lines] == [2, 1, 2, 2]
    assert sum("depcache" in team.orders for team in FakeTeam.made) == 1
    assert all(team.has_ended for team in FakeTeam.made)
    again = lines[0]["starts"][0]
    assert again.unit == ("hybrid", "depcomm", "neutronstar")


@pytest.mark.parametrize("deaths", [1, 2, 3])
def test_what_died_beside_others_is_tried_alone(fake_bench: Bench, deaths: int) -> None:
    """Those may have taken the memory that it was ended for; then DistDGL is tried by smaller batches alone."""
    FakeTeam.dying = {"distdgl_full": deaths}
    try:
        lines = fake_bench.measure(ONE_SAGE, cast(Any, None), ("hybrid", "dgl", "distdgl_full"))
    finally:
        FakeTeam.dying = {}
    assert {line["variant"]: line["failed"] for line in lines} == {
        "hybrid": False,
        "dgl": False,
        "distdgl_full": deaths == 3,
    }
    tries = ["distdgl_full"] * min(1 + deaths, 3)
    teams = [team.system for team in FakeTeam.made]
    assert teams == ["hybrid", "dgl", *tries, "hybrid"]
    options = [team.job.options for team in FakeTeam.made if team.system == "distdgl_full"]
    assert options == [{}, {}, {"skips_largest": True}][: len(tries)]
    assert all(team.has_ended for team in FakeTeam.made)
    (last,) = lines[2]["starts"]
    assert last.together == ([] if deaths == 3 else ["distdgl_full"])


def test_other_systems_that_die_alone_have_no_smaller_batches(fake_bench: Bench) -> None:
    FakeTeam.dying = {"dgl_blocks": 3}
    try:
        lines = fake_bench.measure(TWO, cast(Any, None), ("dgl", "dgl_blocks"))
    finally:
        FakeTeam.dying = {}
    assert [line["failed"] for line in lines] == [False, True]
    assert [team.system for team in FakeTeam.made] == ["dgl", "dgl_blocks", "dgl_blocks"]


def test_results_of_a_plan_that_trials_have_chosen_are_checked(
    fake_bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks: list[int] = []

    def compare(*samples: Any) -> dict[str, Any]:
        checks.append(1)
        if len(checks) == 4:  # after one of each system
            raise gate.GateError("losses differ")
        return {}

    monkeypatch.setattr(measure.gate, "compare", compare)
    lines = fake_bench.measure(TWO, cast(Any, None), ("hybrid", "depcomm", "dgl"))
    assert [line["failed"] for line in lines].count(True) == 1


def test_plain_dgl_has_as_many_threads_as_there_are_ranks(tmp_path: Path) -> None:
    bench = measure.Bench(settings=Settings(), cache=tmp_path, peers=None, rates=cast(Any, None), about={})
    graph = SimpleNamespace(part_config="g.json", data={}, num_nodes=9, feat_dim=4, num_classes=2, num_train=3)
    threads = {system: bench.job(TWO, cast(Any, graph), system).threads for system in systems_of(TWO)}
    assert {name: count for name, count in threads.items() if count > 1} == {"dgl": 2, "dgl_blocks": 2}
    assert threads["dgl_one_thread"] == threads["hybrid"] == 1
