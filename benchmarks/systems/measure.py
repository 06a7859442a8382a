# SPDX-License-Identifier: Apache-2.0
"""Measures one cell: starts its systems, checks their results, and lets them train in turns.

Systems take turns, so that whatever slows the machine for a while slows all of them. A system that waits is asleep. As
many wait at once as memory allows; then these are timed and ended, and the next ones come.

Two processes that do the same are not equally fast, some for as long as they live; why is not known. Our strategies,
which differ by little, therefore take turns in the same processes: a turn opens the graph, builds the model and the
loader with the plan of its strategy, and trains. They are also started several times, and epochs of all starts count.
When all have had their turns, they go on by themselves until the ratios between them are known.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import statistics
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.emulated_network import EmulatedNetwork, NetworkError
from benchmarks.systems import gate
from benchmarks.systems.adaptors import CLUSTER_SYSTEMS, LOADER_SYSTEMS, SINGLE_SYSTEMS
from benchmarks.systems.floors import MachineRates, epoch_floor_s
from benchmarks.systems.graphs import ROOT, PreparedGraph
from benchmarks.systems.grid import OURS, PEERS, Cell
from benchmarks.systems.job import SKIPS_LARGEST, Job
from benchmarks.systems.results import EPOCH_TIME, FAILED, OK, UNAVAILABLE, USUAL, Line, now, spread
from benchmarks.systems.team import ALLOCATORS, SystemFailure, Team
from benchmarks.systems.turns import are_known, balanced_orders

WARMUP_LIMIT = 500
"""Epochs after which a system is timed whatever it says, and its line says so: trials of plans take 24 to 360."""
TURN_S, TURN_LIMIT = 0.5, 10
"""A turn takes so long, in whole epochs and not more than so many. One more goes before them that is not counted: its
rows have left the caches while others trained."""
SHAPING_TOLERANCE = 1.05
MEMORY_RESERVE_SHARE = 0.4
"""Of all memory, to be free when systems train: with less of it, some get fewer huge pages and 20 % longer epochs."""
WIRE_TOLERANCE = 0.95
IN_TURNS = "ours_in_turns"
"""The system whose processes are all of ours, one after another."""

Unit = tuple[str, ...]
"""Systems that are started together: one, or all of ours that are measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How cells are measured; part of what makes two measurements comparable."""

    rounds: int = USUAL["rounds"]
    """Turns of each start; each turn is at least one epoch."""
    starts: int = USUAL["starts"]
    """How often each system that runs our loader is started; the others, which are further away, once."""
    more_rounds: int = USUAL["more_rounds"]
    """Further turns of our strategies at most, in which nobody else has any."""
    precision: float = 0.015
    """The standard error, relative, of the ratios between our strategies in one start that ends those."""
    warmup: int = 2
    """Epochs before the first turn once a system is settled, those of the check not counted. The fastest says how many
    epochs a turn has, so that a disturbed one does not decide."""
    allocator: str = "keep"
    timeout_s: float = 1800.0
    """For each order: preparing, checking, a turn."""

    def __post_init__(self) -> None:
        """Checks every field."""
        if min(self.rounds, self.starts) < 1 or not min(self.timeout_s, self.precision) > 0:
            raise ValueError(f"rounds, starts, precision and timeout_s must be positive (got {self})")
        if min(self.warmup, self.more_rounds) < 0:
            raise ValueError(f"warmup and more_rounds must not be negative (got {self})")
        if self.allocator not in ALLOCATORS:
            raise ValueError(f"unknown allocator (got {self.allocator!r}); choose one of {', '.join(ALLOCATORS)}")

    def to_json(self) -> dict[str, Any]:
        """Returns what lines say: all but the time-out, which changes no figure."""
        return {
            "rounds": self.rounds,
            "starts": self.starts,
            "more_rounds": self.more_rounds,
            "precision": self.precision,
            "warmup": self.warmup,
            "allocator": self.allocator,
        }


@dataclass(kw_only=True)
class _Entry:
    """One start of a system of the cell that is being measured."""

    system: str
    team: Team
    unit: Unit
    """What runs in the team's processes, this system among them."""
    facts: dict[str, Any] = field(default_factory=dict)
    checked: dict[str, Any] = field(default_factory=dict)
    reference: dict[str, Any] = field(default_factory=dict)
    is_plan_checked: bool = False
    """Checked again with the plan that is timed, where trials may have chosen another since."""
    working_bytes: int = 0
    """What all its ranks take while they train, beyond what they take asleep."""
    prepare_s: float = 0.0
    warmup: int = 0
    is_settled: bool = True
    """When the timed epochs began."""
    turn: int = 1
    epochs: list[list[dict[str, Any]]] = field(default_factory=list)
    """By epoch, then by rank."""
    turns: list[float] = field(default_factory=list)
    """The median epoch of each turn that counts, and of further turns."""
    peak_bytes: list[int] = field(default_factory=list)
    together: list[str] = field(default_factory=list)
    """Systems that took turns with this one."""
    failure: SystemFailure | gate.GateError | None = None


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What is the same for all cells of a run."""

    settings: Settings
    cache: Path
    peers: Path | None
    rates: MachineRates
    about: dict[str, Any]
    """Fields of every line."""
    on_phase: Callable[[str], object] = print
    metric: str = EPOCH_TIME

    def why_unavailable(self, system: str) -> str | None:
        """Returns why the user does not have a system, None if they do."""
        for folder, systems in PEERS.items():
            if system in systems and (self.peers is None or not (self.peers / folder).is_dir()):
                return f"no checkout of {folder}: give --peers FOLDER with FOLDER/{folder} in it"
        return None

    def job(self, cell: Cell, graph: PreparedGraph, system: str, **changes: Any) -> Job:
        """Returns what the ranks of a system are told."""
        is_single = system in SINGLE_SYSTEMS
        return Job(
            system=system,
            part_config=graph.part_config,
            graph_name=Path(graph.part_config).stem,
            data=graph.data,
            num_nodes=graph.num_nodes,
            feat_dim=graph.feat_dim,
            num_classes=graph.num_classes,
            num_train=graph.num_train,
            model=cell.model,
            num_layers=cell.num_layers,
            hidden=cell.hidden,
            world_size=1 if is_single else cell.ranks,
            threads=cell.ranks if system in ("dgl", "dgl_blocks") else 1,
            peers=str(self.peers or ""),
            **changes,
        )

    # ---------------------------------------------------------------- a cell

    def measure(self, cell: Cell, graph: PreparedGraph, systems: Sequence[str]) -> list[Line]:
        """Returns one line for each system; what fails has its error in it.

        Raises:
            NetworkError: The links cannot be made.
        """
        run = uuid.uuid4().hex[:12]
        load = os.getloadavg()[0]
        missing = {system: self.why_unavailable(system) for system in systems}
        lines = [
            self._line(cell, graph, run, system) | {"status": UNAVAILABLE, "error": why}
            for system, why in missing.items()
            if why is not None
        ]
        with (
            tempfile.TemporaryDirectory(prefix="systems_") as folder,
            network_of(cell) as (network, link_bits_per_s),
        ):
            present = [system for system in systems if missing[system] is None]
            reference = self._reference_file(cell, graph)
            if present != ["dgl"] and not reference.is_file():
                self._make_reference(cell, graph, Path(folder), reference)
            starts: dict[str, list[_Entry]] = {system: [] for system in present}
            for number in range(self.settings.starts):
                failed = {name for name, found in starts.items() if any(entry.failure is not None for entry in found)}
                again = [system for system in present if system in LOADER_SYSTEMS and system not in failed]
                waiting = units_of(present if number == 0 else again)
                alone: dict[Unit, dict[str, Any]] = {}
                while waiting:
                    entries: list[_Entry] = []
                    try:
                        self._start(cell, graph, waiting, alone, network, Path(folder), reference, entries)
                        self._take_turns(entries)
                    finally:
                        for entry in entries:
                            entry.team.end()
                    begun = {entry.unit for entry in entries}
                    waiting = [unit for unit in waiting if unit not in begun]
                    again_with = {
                        entry.unit: options for entry in entries if (options := _next_try(entry, entries)) is not None
                    }
                    alone |= again_with
                    waiting += again_with
                    entries = [entry for entry in entries if entry.unit not in again_with]
                    lost = [entry.system for entry in entries if _is_lost_by_another(entry, entries)]
                    if lost:
                        waiting.insert(0, tuple(lost))
                    for entry in entries:
                        entry.together = [other.system for other in entries if other.failure is None]
                        if entry.system not in lost:
                            starts[entry.system].append(entry)
            lines += [
                self._line(cell, graph, run, system) | self._result(cell, graph, of_system)
                for system, of_system in starts.items()
            ]
        return [line | {"load_before": round(load, 1), "link_bits_per_s": link_bits_per_s} for line in lines]

    def _reference_file(self, cell: Cell, graph: PreparedGraph) -> Path:
        """Returns where the cache has, or will have, what plain DGL computes from the initial weights."""
        job = self.job(cell, graph, "dgl")
        names = ("model", "num_layers", "hidden", "heads", "dropout", "lr", "seed", "gate_epochs", "sample_size")
        facts = {name: getattr(job, name) for name in names}
        facts["form"] = gate.REFERENCE_FORM
        text = json.dumps([facts, graph.data, graph.num_edges, self.about["versions"]], sort_keys=True)
        return self.cache / "references" / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"

    def _make_reference(self, cell: Cell, graph: PreparedGraph, folder: Path, file: Path) -> None:
        """Has plain DGL compute it, in a cell in which it is not timed.

        Raises:
            SystemFailure: Plain DGL cannot run the cell: then there is nothing to hold others to.
        """
        self.on_phase("plain DGL, for the check of results")
        team = Team(job=self.job(cell, graph, "dgl"), folder=folder / "reference", allocator=self.settings.allocator)
        try:
            team.start()
            team.ask("prepare", timeout_s=self.settings.timeout_s)
            _keep(file, gate.merge(team.ask("check", timeout_s=self.settings.timeout_s)))
        finally:
            team.end()

    def _start(
        self,
        cell: Cell,
        graph: PreparedGraph,
        units: Sequence[Unit],
        alone: Mapping[Unit, dict[str, Any]],
        network: EmulatedNetwork | None,
        folder: Path,
        reference: Path,
        entries: list[_Entry],
    ) -> None:
        """Starts, prepares and checks systems, one after another, as long as the next one fits beside them.

        Each is added to `entries` before it is started, so that the caller can end all, whatever happens.

        Args:
            alone: Those of `units` that have died, and the options of their job now: nothing is beside them.
        """
        largest = asleep = 0
        reserve = MEMORY_RESERVE_SHARE * psutil.virtual_memory().total
        for number, unit in enumerate(units):
            system = unit[0] if len(unit) == 1 else IN_TURNS
            before = psutil.virtual_memory().available
            # DistDGL takes more while it tries the sizes of its batches, and what the system then ends is the largest.
            if entries and (unit in alone or entries[0].unit in alone):
                break
            if entries and before - asleep < (3.0 if system in CLUSTER_SYSTEMS else 1.3) * largest + reserve:
                break
            team = Team(
                job=self.job(cell, graph, system, options=alone.get(unit, {})),
                folder=folder / f"{system}-{uuid.uuid4().hex[:6]}",
                network=None if system in SINGLE_SYSTEMS else network,
                port=29600 + number,
                allocator=self.settings.allocator,
                is_cluster=system in CLUSTER_SYSTEMS,
            )
            of_unit = [_Entry(system=name, team=team, unit=unit) for name in unit]
            entries += of_unit
            for entry in of_unit:
                if all(other.failure is None for other in of_unit):
                    self._try(entry, "prepare", functools.partial(self._prepare, entry, reference))
            working = max(entry.working_bytes for entry in of_unit)
            asleep += working
            largest = max(largest, before - psutil.virtual_memory().available + working)

    def _prepare(self, entry: _Entry, reference: Path) -> None:
        team, timeout_s = entry.team, self.settings.timeout_s
        if entry.system == entry.unit[0]:
            team.start()
        start_s = time.monotonic()
        if entry.system == entry.unit[0]:
            entry.facts = _of_all_ranks(team.ask("prepare", timeout_s=timeout_s))
        if len(entry.unit) > 1:
            team.ask("become", timeout_s=timeout_s, name=entry.system)
        entry.prepare_s = time.monotonic() - start_s
        sample = gate.merge(team.ask("check", timeout_s=timeout_s))
        if entry.system == "dgl" and not reference.is_file():
            _keep(reference, sample)
        if not reference.is_file():
            raise SystemFailure("there is nothing to check it against: plain DGL has failed")
        entry.reference = gate.merge([json.loads(reference.read_text(encoding="utf-8"))])
        entry.checked = gate.compare(sample, entry.reference)
        seconds: list[float] = []
        while True:
            if entry.warmup < WARMUP_LIMIT and not all(team.ask("is_settled", timeout_s=timeout_s)):
                seconds.clear()  # so far they were those of other plans
            elif len(seconds) >= self.settings.warmup:
                break
            ranks = [epochs[-1] for epochs in team.ask("epochs", timeout_s=timeout_s, count=1)]
            seconds.append(max(rank["elapsed_s"] for rank in ranks))
            entry.warmup += 1
        entry.is_settled = all(team.ask("is_settled", timeout_s=timeout_s))
        entry.facts |= _of_all_ranks(team.ask("facts", timeout_s=timeout_s))
        if seconds:
            entry.turn = max(1, min(TURN_LIMIT, round(TURN_S / min(seconds))))
        free_bytes = psutil.virtual_memory().available
        team.ask("forget_peak", timeout_s=timeout_s)
        entry.working_bytes = max(0, psutil.virtual_memory().available - free_bytes)

    def _take_turns(self, entries: Sequence[_Entry]) -> None:
        rounds, most = self.settings.rounds, self.settings.rounds + self.settings.more_rounds
        for number in range(-1, rounds):
            for entry in order_of_turns(entries, number):
                if self._has_turn(entry, entries, f"turn {number + 1} of {rounds}") and number < 0:
                    # Those that started first have slept longest: the system has taken pages from them.
                    entry.epochs.clear()
                    entry.turns.clear()
        together = [entry for entry in entries if len(entry.unit) > 1]
        for number in range(rounds, most):
            turns = {entry.system: entry.turns for entry in together}
            if any(entry.failure is not None for entry in together) or are_known(turns, self.settings.precision):
                return
            for entry in order_of_turns(together, number):
                # Its other figures are of the turns that it had beside those of other systems.
                num_epochs = len(entry.epochs)
                self._has_turn(entry, together, f"further turn, {number + 1} of {most} at most")
                del entry.epochs[num_epochs:]

    def _has_turn(self, entry: _Entry, entries: Sequence[_Entry], phase: str) -> bool:
        """Gives a system its turn, unless one of its processes has failed; tells whether it has had it."""
        if any(other.failure is not None for other in entries if other.team is entry.team):
            return False
        self._try(entry, phase, functools.partial(self._turn, entry))
        return entry.failure is None

    def _turn(self, entry: _Entry) -> None:
        ask = functools.partial(entry.team.ask, timeout_s=self.settings.timeout_s)
        if len(entry.unit) > 1 and any(ask("become", name=entry.system)):
            # It begins anew: its first epoch fetches features and makes what is kept.
            if entry.is_plan_checked:
                ask("epochs", count=1)
            else:
                entry.checked = gate.compare(gate.merge(ask("check")), entry.reference)
                entry.is_plan_checked = True
            ask("forget_peak")
        ask("epochs", count=1)  # for all alike: faults in what is used from then on
        epochs = [list(ranks) for ranks in zip(*ask("epochs", count=entry.turn), strict=True)]
        entry.epochs += epochs
        entry.turns.append(statistics.median(max(rank["elapsed_s"] for rank in ranks) for ranks in epochs))
        entry.peak_bytes = [max(peaks) for peaks in zip(*filter(None, (entry.peak_bytes, ask("peak"))), strict=True)]

    def _try(self, entry: _Entry, phase: str, step: Callable[[], None]) -> None:
        self.on_phase(f"{entry.system}, {phase}")
        try:
            step()
        except (SystemFailure, gate.GateError) as failure:
            entry.failure = failure
            entry.team.end()

    # ---------------------------------------------------------------- lines

    def _line(self, cell: Cell, graph: PreparedGraph, run: str, system: str) -> Line:
        job = self.job(cell, graph, system)
        return {
            **self.about,
            "cell": cell.key,
            "run": run,
            "variant": system,
            "dataset": cell.dataset,
            "num_nodes": graph.num_nodes,
            "num_edges": graph.num_edges,
            "feat_dim": graph.feat_dim,
            "num_train": graph.num_train,
            "halo_rows": graph.halo_rows,
            "world_size": job.world_size,
            "metric": self.metric,
            "unit": "s" if self.metric == EPOCH_TIME else "bytes",
            "settings": self.settings.to_json(),
            "config": {
                **cell.to_json(),
                "heads": job.heads,
                "dropout": job.dropout,
                "threads": job.threads,
                "lr": job.lr,
            },
            "allocator_variables": ALLOCATORS[self.settings.allocator],
            "machine_rates": asdict(self.rates),
            "time": now(),
            "p20": None,
            "p50": None,
            "p80": None,
            "iters": 0,
            "predicted": None,
        }

    def _without_paths(self, text: str) -> str:
        """Names folders of this machine by what they are: lines are kept where others read them."""
        folders = {
            "CACHE": self.cache,
            "PEERS": self.peers,
            "CHECKOUT": ROOT,
            "TEMP": tempfile.gettempdir(),
            "~": Path.home(),
        }
        for name, folder in folders.items():
            text = text if folder is None else text.replace(str(folder), name)
        return text

    def _result(self, cell: Cell, graph: PreparedGraph, starts: Sequence[_Entry]) -> dict[str, Any]:
        for entry in starts:
            if entry.failure is not None:
                details = getattr(entry.failure, "details", "")
                return {
                    "status": FAILED,
                    "error": self._without_paths(str(entry.failure))[:500],
                    "details": self._without_paths(details)[-2000:],
                }
        first = starts[0]
        is_emulated = first.team.network is not None
        result = summarise_epochs([epoch for entry in starts for epoch in entry.epochs], is_emulated=is_emulated)
        if is_emulated and first.system in LOADER_SYSTEMS:
            sent, wire = result["sent_bytes"], result["wire_bytes"]
            if sent is not None and wire < WIRE_TOLERANCE * sent:
                return {
                    "status": FAILED,
                    "error": f"the links were bypassed: {sent:.0f} bytes of rows were sent, {wire:.0f} left the hosts",
                }
        predicted = [entry.facts["predicted"] for entry in starts if entry.facts.get("predicted") is not None]
        return {
            "status": OK,
            **result,
            "warmup": max(entry.warmup for entry in starts),
            "predicted": statistics.median(predicted) if predicted else None,
            "prepare_s": statistics.median(entry.prepare_s for entry in starts),
            "peak_rss_bytes": [max(peaks) for peaks in zip(*(entry.peak_bytes for entry in starts), strict=True)],
            "gate": first.checked,
            "facts": {name: value for name, value in first.facts.items() if name != "predicted"},
            "starts": [
                {
                    "p50": summarise_epochs(entry.epochs, is_emulated=is_emulated)["p50"],
                    "predicted": entry.facts.get("predicted"),
                    "plan": entry.facts.get("plan"),
                    "plan_digest": entry.facts.get("plan_digest"),
                    "turn": entry.turn,
                    "turns": entry.turns,
                    "is_settled": entry.is_settled,
                    "in_turns_with": entry.together,
                    "in_processes_of": list(entry.unit),
                }
                for entry in starts
            ],
            "floor_s": epoch_floor_s(cell, graph, self.rates, cores=self.about["machine"]["cores"]),
        }


@contextlib.contextmanager
def network_of(cell: Cell) -> Iterator[tuple[EmulatedNetwork | None, float | None]]:
    """Yields the hosts of a cell, each of which has a rank, and what a link was measured to carry; None on loopback.

    Raises:
        NetworkError: The links cannot be made, or carry more than they are to.
    """
    if cell.rate_bits_per_s is None:
        yield None, None
        return
    with EmulatedNetwork(num_hosts=cell.ranks) as network:
        network.shape(cell.rate_bits_per_s)
        measured = network.measure_bits_per_s(expected_bits_per_s=cell.rate_bits_per_s)
        if measured > SHAPING_TOLERANCE * cell.rate_bits_per_s:
            raise NetworkError(f"links carry {measured:.3g} bit/s, limited to {cell.rate_bits_per_s:.3g}")
        yield network, measured


def order_of_turns(entries: Sequence[_Entry], number: int) -> list[_Entry]:
    """Returns in which order systems have their turns in a round, -1 the first; who comes after whom matters.

    Those that share processes come first, so that one of them, each round another one, comes after a system of others,
    and none of them more often after one that leaves its mark on processes. Of the others another one begins in each
    round, and every other round goes backwards.
    """
    sharing = [entry for entry in entries if len(entry.unit) > 1]
    others = [entry for entry in entries if len(entry.unit) == 1]
    places = balanced_orders(len(sharing), number + 2)[-1] if sharing else ()
    step = -1 if number % 2 else 1
    return [
        *(sharing[place] for place in places),
        *(others[(number + step * place) % len(others)] for place in range(len(others))),
    ]


def units_of(systems: Sequence[str]) -> list[Unit]:
    """Returns what is started together, in the order of the systems that come first."""
    ours = tuple(system for system in systems if system in OURS)
    others = [(system,) for system in systems if system not in OURS]
    return [ours, *others] if ours else others


def _is_lost_by_another(entry: _Entry, entries: Sequence[_Entry]) -> bool:
    """Tells whether the processes of an entry ended while they were another system, which it may do without."""
    own = [other for other in entries if other.team is entry.team]
    return entry.failure is None and any(other.failure is not None for other in own)


def _next_try(entry: _Entry, entries: Sequence[_Entry]) -> dict[str, Any] | None:
    """Returns the options to try an entry with once more, alone; None: it has not died, or there is nothing to change.

    What ends processes is the system, for memory, mostly: another team may have taken it, and where there was none all
    seeds at once need too much.
    """
    if not isinstance(entry.failure, SystemFailure) or not entry.failure.has_died:
        return None
    if any(other.team is not entry.team for other in entries):
        return {}
    has_smaller = entry.system == "distdgl_full" and not entry.team.job.options.get(SKIPS_LARGEST, False)
    return {SKIPS_LARGEST: True} if has_smaller else None


def _of_all_ranks(facts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the first rank's facts, but for the digest of the plan: that is of what all ranks do."""
    digests = [of_rank.get("plan_digest") for of_rank in facts]
    if None in digests:
        return facts[0]
    return facts[0] | {"plan_digest": hashlib.sha256(json.dumps(digests).encode()).hexdigest()[:16]}


def _keep(file: Path, sample: dict[str, Any]) -> None:
    """Writes aside and renames: whoever finds the file finds all of it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    aside = file.with_suffix(f".{os.getpid()}")
    aside.write_text(json.dumps(sample), encoding="utf-8")
    aside.rename(file)


def _median_exchanges(epochs: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Returns the median blocked time of each layer's exchanges in each direction, and that of the work beside them."""
    kinds = list(dict.fromkeys((one["layer"], one["backward"]) for epoch in epochs for one in epoch))

    def median(kind: tuple[int, bool], name: str) -> float:
        return statistics.median(
            sum(one[name] for one in epoch if (one["layer"], one["backward"]) == kind) for epoch in epochs
        )

    return [
        {
            "layer": kind[0],
            "backward": kind[1],
            "blocked_s": median(kind, "blocked_s"),
            "beside_s": median(kind, "beside_s"),
        }
        for kind in kinds
    ]


def summarise_epochs(epochs: Sequence[Sequence[dict[str, Any]]], *, is_emulated: bool) -> dict[str, Any]:
    """Returns the figures of a measurement: times of the slowest rank, bytes of all ranks, the split of the mean rank.

    Args:
        epochs: By epoch, then by rank.
        is_emulated: Whether each rank has an interface of its own; else all count the same one.
    """

    def middle(name: str, join: Callable[[list[float]], float]) -> float | None:
        values = [[rank[name] for rank in ranks] for ranks in epochs]
        if any(value is None for ranks in values for value in ranks):
            return None
        return spread([join(ranks) for ranks in values])["p50"]

    def mean(values: list[float]) -> float:
        return sum(values) / len(values)

    exchanges = [ranks[0].get("exchanges") for ranks in epochs]  # means over ranks: all tell the same
    return {
        **spread([max(rank["elapsed_s"] for rank in ranks) for ranks in epochs]),
        "iters": len(epochs),
        "cpu_s": middle("cpu_s", mean),
        "compute_s": middle("compute_s", mean),
        "exchange_s": middle("exchange_s", mean),
        "wait_s": middle("wait_s", mean),
        "exchanges": None if None in exchanges else _median_exchanges(exchanges),
        "sent_bytes": middle("sent_bytes", sum),
        "wire_bytes": middle("wire_bytes", sum if is_emulated else lambda values: values[0]),
    }
