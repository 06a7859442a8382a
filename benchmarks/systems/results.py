# SPDX-License-Identifier: Apache-2.0
"""Measurements, one per line of a file that is only ever appended to."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import statistics
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

Line = dict[str, Any]
ROOT = Path(__file__).resolve().parents[2]
MEASURING_SOURCES = (
    "benchmarks/emulated_network.py",
    "benchmarks/systems/adaptors/*.py",
    *(
        f"benchmarks/systems/{name}.py"
        for name in ("accuracy", "gate", "graphs", "job", "measure", "team", "turns", "worker")
    ),
)
"""Of this benchmark: what reads, draws and tells figures does not change them."""
EPOCH_TIME, PEAK_MEMORY = "epoch_time", "peak_memory"
"""Metrics of lines. Those of the second are of the same kind, but of so few turns that only their memory counts."""
USUAL = {"rounds": 5, "starts": 3, "more_rounds": 15}
"""Turns of each start of a system, starts of each of ours, and their further turns at most, unless a run is given
others."""
OK, FAILED, UNAVAILABLE = "ok", "failed", "unavailable"
"""Status of a line: measured; ended with an error; the user does not have the system."""


def spread(values: Sequence[float]) -> dict[str, float]:
    """Returns the median and the 20th and 80th per cent of values."""
    if len(values) == 1:
        return {"p20": values[0], "p50": values[0], "p80": values[0]}
    fifths = statistics.quantiles(values, n=5, method="inclusive")
    return {"p20": fifths[0], "p50": statistics.median(values), "p80": fifths[-1]}


def read_lines(file: Path) -> list[Line]:
    """Returns all measurements; a last line that an interrupted run has left incomplete is passed over."""
    if not file.is_file():
        return []
    lines = []
    for text in file.read_text("utf-8").splitlines():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return lines


def append_lines(file: Path, lines: Iterable[Line]) -> None:
    """Appends measurements in one write, so that a cell is in the file whole or not at all."""
    text = "".join(json.dumps(line) + "\n" for line in lines)
    with file.open("ab") as stream:
        if stream.tell() and not file.read_bytes().endswith(b"\n"):
            text = "\n" + text  # after what an interrupted run has left
        stream.write(text.encode())
        stream.flush()
        os.fsync(stream.fileno())


def newest(lines: Iterable[Line], metric: str = EPOCH_TIME) -> dict[str, dict[str, Line]]:
    """Returns, for each cell, the lines of its last run by system: ratios are formed within one run only."""
    runs: dict[str, dict[str, dict[str, Line]]] = {}
    for line in lines:
        if line["metric"] == metric:
            runs.setdefault(line["cell"], {}).setdefault(line["run"], {})[line["variant"]] = line
    return {cell: list(by_run.values())[-1] for cell, by_run in runs.items()}


def without_partial_runs(lines: Sequence[Line]) -> list[Line]:
    """Returns lines without those of runs that say less of a cell than one before them: tables show that.

    A run stays if it has tried all systems that were tried by the one before it that stays (not `--system`, nor without
    `--peers`; what failed was tried), by the same allocator, in as many turns and starts (`--allocator`, `--rounds`,
    `--more-rounds`, `--starts`; a run with more starts than usual gives way to one with as many as usual).
    """
    runs_of: dict[tuple[str, str], dict[str, list[Line]]] = {}
    for line in lines:
        runs_of.setdefault((line["metric"], line["cell"]), {}).setdefault(line["run"], []).append(line)
    kept = set()
    for cell, runs in runs_of.items():
        before: set[str] = set()
        least = dict.fromkeys(USUAL, 0)
        allocator = None
        for run, of_run in runs.items():
            systems = {line["variant"] for line in of_run if line["status"] != UNAVAILABLE}
            settings = of_run[0]["settings"]
            is_as_long = all(settings.get(name, 0) >= count for name, count in least.items())
            if before <= systems and is_as_long and allocator in (None, settings["allocator"]):
                before, allocator = systems, settings["allocator"]
                least = {name: min(settings.get(name, 0), usual) for name, usual in USUAL.items()}
                kept.add((*cell, run))
    return [line for line in lines if (line["metric"], line["cell"], line["run"]) in kept]


def measured_run(
    lines: Iterable[Line],
    cell: str,
    systems: Iterable[str],
    code: str,
    settings: Mapping[str, Any],
    *,
    machine: Mapping[str, Any],
    metric: str = EPOCH_TIME,
    retry_failed: bool = False,
) -> str | None:
    """Returns the last run of this code with these settings, on such a machine, that has measured all systems of a
    cell; None if there is none.

    A system that failed has been measured, unless it is to be tried again; one that was not there is measured when it
    is there, which only its absence from `systems` says.
    """
    found: dict[str, set[str]] = {}
    for line in lines:
        is_same = (line["metric"], line["cell"], line["code"]) == (metric, cell, code)
        is_same = is_same and line["settings"] == dict(settings)
        if (
            is_same
            and is_of(machine, line)
            and (line["status"] == OK or (line["status"] == FAILED and not retry_failed))
        ):
            found.setdefault(line["run"], set()).add(line["variant"])
    return next((run for run in reversed(found) if set(systems) <= found[run]), None)


def is_of(machine: Mapping[str, Any], line: Line) -> bool:
    """Tells whether a line is of this kind of machine: the results file may have come from another."""
    return all(line["machine"].get(name) == machine.get(name) for name in ("processor", "cores"))


def peer_versions(peers: Path | None) -> dict[str, str]:
    """Returns the commits of the peers' checkouts."""
    found = {}
    for folder in sorted(peers.iterdir()) if peers is not None and peers.is_dir() else ():
        words = ["git", "-C", str(folder), "rev-parse", "--short", "HEAD"]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            found[folder.name] = done.stdout.strip()
    return found


def code_version() -> str:
    """Returns a digest of everything that decides what is measured: sources, fixes, and versions of packages."""
    digest = hashlib.sha256(json.dumps(package_versions(), sort_keys=True).encode())
    for pattern in ("dgl_hybrid/**/*.py", "dgl_hybrid/**/*.cu", "patches/*.patch", *MEASURING_SOURCES):
        for file in sorted(ROOT.glob(pattern)):
            digest.update(file.relative_to(ROOT).as_posix().encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def package_versions() -> dict[str, str]:
    names = ("dgl_hybrid", "dgl", "torch", "numpy")
    return {**{name: version(name) for name in names}, "python": platform.python_version()}


def processor_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Returns what the processor calls itself; machines of several kinds are told apart by it in one table."""
    if not cpuinfo.is_file():
        return platform.processor() or "unknown"
    fields = dict(re.findall(r"^(model name|model)[ \t]*: *(.+)$", cpuinfo.read_text("utf-8"), re.MULTILINE))
    return f"{fields.get('model name', 'unknown')}, model {fields.get('model', 'unknown')}"


def describe_run(peers: Path | None = None) -> dict[str, Any]:
    """Returns the fields of every line of a run.

    Args:
        peers: The folder with their checkouts.
    """

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()

    return {
        "bench": "systems",
        "backend": "gloo",
        "device": "cpu",
        "dtype": "float32",
        "seed": 0,
        "subnormals": "flushed",
        "memory": "trimmed",  # by all systems, before its peak is taken
        "git_sha": git("rev-parse", "--short", "HEAD"),
        "dirty": bool(git("status", "--porcelain", "--", "dgl_hybrid", "benchmarks", "patches", ":!*.jsonl")),
        "code": code_version(),
        "machine": {
            "cores": len(os.sched_getaffinity(0)),
            "arch": platform.machine(),
            "processor": processor_name(),
            "system": f"{platform.system()} {platform.release().split('-')[0]}",
            "libc": " ".join(platform.libc_ver()),
        },
        "versions": package_versions(),
        "peers": peer_versions(peers),
    }


def mark_changed(lines: Iterable[Line], about: Mapping[str, Any]) -> list[Line]:
    """Returns lines as they are, or with another `code` if sources were edited meanwhile: then they are of no version.

    Such a cell is shown, and measured again by the next run.
    """
    if code_version() == about["code"]:
        return list(lines)
    return [line | {"code": "sources changed while it was measured"} for line in lines]


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S")
