# SPDX-License-Identifier: Apache-2.0
"""The DistDGL jobs of this benchmark: which there are, and how one is run between emulated hosts or on loopback."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.distdgl_reads.schedule import MODES, TIMED_MODES, Schedule, read_message
from benchmarks.emulated_network import EmulatedNetwork, NetworkError
from dgl_hybrid.launch.cluster import ClusterJob, PartLine, run_cluster
from dgl_hybrid.launch.workspace import DataConfig, PartitionConfig, PreparedGraph, prepare_partition
from dgl_hybrid.sampling.config import ENABLE_VARIABLE, HaloConfig

ROOT = Path(__file__).resolve().parents[2]
DATA_VARIABLE = "DGL_HYBRID_DATA"
GRAPHS = ("debian-deps", "moby-thesaurus")
GENERATED = "powerlaw:nodes=40000,degree=16,features=256"
FANOUTS = ((10, 25), (5, 10, 15))
RATES = (1_000_000_000, 200_000_000)
ABSENT = "absent"
"""The mode of a job in which the plugin is on nowhere, servers included."""
SERVER_PORT = 30050
SHAPING_TOLERANCE = 1.05


@dataclass(frozen=True, kw_only=True, slots=True)
class JobPlan:
    """One job: a graph in one number of parts."""

    data: str
    """A spec of `load_dataset`."""
    num_parts: int
    fanouts: tuple[tuple[int, ...], ...] = FANOUTS
    rates: tuple[int, ...] = RATES
    rounds: int = 2
    epochs: int = 2
    is_plugin_absent: bool = False
    is_full_precision: bool = False
    """Scale the features so that no narrower type holds them bit for bit, as the halo store would else make use of."""

    def schedule(self, prepared: PreparedGraph | None = None, *, answers: str = "") -> Schedule:
        """Returns what the job's trainers do."""
        return Schedule(
            graph_name=prepared.part_config.stem if prepared else "",
            num_classes=(prepared.num_classes or 0) if prepared else 0,
            fanouts=self.fanouts,
            rates_bits_per_s=self.rates,
            rounds=self.rounds,
            epochs=self.epochs,
            count_modes=MODES[:1] if self.is_plugin_absent else MODES,
            timed_modes=TIMED_MODES[:1] if self.is_plugin_absent else TIMED_MODES,
            answers=answers,
        )


def plan_jobs(
    data: Sequence[str], num_parts: Sequence[int], rates: tuple[int, ...], *, is_quick: bool, is_main_only: bool
) -> list[JobPlan]:
    """Returns all jobs.

    Args:
        data: Specs of graphs.
        num_parts: Numbers of parts.
        rates: Of the links, in bits per second; none: count only.
        is_quick: Two layers only.
        is_main_only: No job without the plugin, none with scaled features.
    """
    fanouts = FANOUTS[:1] if is_quick else FANOUTS
    jobs = [JobPlan(data=one, num_parts=parts, fanouts=fanouts, rates=rates) for one in data for parts in num_parts]
    if is_main_only:
        return jobs
    first = replace(jobs[0], fanouts=FANOUTS[:1], rates=rates[-1:], rounds=1, epochs=4, is_plugin_absent=True)
    wide = [
        replace(job, rates=(), is_full_precision=True)
        for job in jobs
        if job.data.endswith(".npz") and job.num_parts == num_parts[0]
    ]
    return [*jobs, first, *wide]


def find_data() -> tuple[tuple[str, ...], str | None]:
    """Returns the graphs to measure, and why the real ones are not among them, if so."""
    folder = Path(os.environ.get(DATA_VARIABLE) or ROOT.parent / "shared" / "data")
    files = [folder / f"{name}.npz" for name in GRAPHS]
    missing = [file.name for file in files if not file.is_file()]
    if not missing:
        return tuple(map(str, files)), None
    found = tuple(str(file) for file in files if file.is_file())
    instead = "measured without" if found else "a generated graph instead"
    return found or (GENERATED,), f"{', '.join(missing)} not found in {folder} (set {DATA_VARIABLE}): {instead}"


def prepare(plan: JobPlan, folder: Path) -> PreparedGraph:
    """Partitions the graph with METIS, or finds the partition that an earlier run has left in the cache."""
    data = plan.data
    if plan.is_full_precision:
        data = str(folder / f"{Path(data).stem}-float32.npz")
        with np.load(plan.data, allow_pickle=False) as stored:
            arrays = dict(stored)
        arrays["feat"] = arrays["feat"].astype(np.float32) * np.float32(1.1)
        np.savez(data, **arrays)
    return prepare_partition(DataConfig(data=data), PartitionConfig(ranks=plan.num_parts))


@dataclass(slots=True)
class Listener:
    """What rank 0 of the running job has reported; answers its requests to shape the links."""

    network: EmulatedNetwork | None
    on_epoch: Callable[[], object]
    on_text: Callable[[str], object]
    messages: list[dict[str, Any]] = field(default_factory=list)
    link_bits_per_s: float | None = None

    def on_line(self, line: PartLine) -> None:
        message = read_message(line.text)
        if message is None:
            self.on_text(f"[{line.part.name}] {line.text}")
            return
        match message["kind"]:
            case "epoch":
                self.on_epoch()
            case "shape":
                self._shape(message["rate_bits_per_s"])
                Path(message["answer"]).touch()
            case "times":
                self.messages.append(message | {"link_bits_per_s": self.link_bits_per_s})
            case _:
                self.messages.append(message)

    def _shape(self, rate: int) -> None:
        assert self.network is not None
        self.network.shape(rate)
        self.link_bits_per_s = self.network.measure_bits_per_s(expected_bits_per_s=rate)
        if self.link_bits_per_s > SHAPING_TOLERANCE * rate:
            raise NetworkError(f"links carry {self.link_bits_per_s:.3g} bit/s, but were limited to {rate:.3g}")


def run_job(
    plan: JobPlan,
    prepared: PreparedGraph,
    folder: Path,
    *,
    on_epoch: Callable[[], object],
    on_text: Callable[[str], object],
) -> list[dict[str, Any]]:
    """Runs one job and returns what its rank 0 reported.

    Raises:
        ClusterFailure: A part died, for instance because the check of results failed.
        NetworkError: The links could not be shaped.
    """
    # Not left out where it is absent: the caller's environment may have it.
    setting = "0" if plan.is_plugin_absent else HaloConfig(strategy="depcomm").to_environment()
    job = ClusterJob(
        part_config=prepared.part_config,
        command=("-m", "benchmarks.distdgl_reads.trainer", plan.schedule(prepared, answers=str(folder)).to_json()),
        workspace=ROOT,
        threads=1,
        environment={ENABLE_VARIABLE: setting},
    )
    with EmulatedNetwork(num_hosts=plan.num_parts) if plan.rates else contextlib.nullcontext() as network:
        if network is not None:
            ip_config = folder / "ip_config.txt"
            ip_config.write_text("".join(f"{host.address} {SERVER_PORT}\n" for host in network.hosts), "utf-8")
            job = replace(job, ip_config=ip_config, machine_prefixes=tuple(host.prefix for host in network.hosts))
        listener = Listener(network=network, on_epoch=on_epoch, on_text=on_text)
        run_cluster(job, on_line=listener.on_line)
    if plan.is_plugin_absent:
        return [message | {"mode": ABSENT} if "mode" in message else message for message in listener.messages]
    return listener.messages
