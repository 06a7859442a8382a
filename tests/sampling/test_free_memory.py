# SPDX-License-Identifier: Apache-2.0
"""What is left under the limits of control groups, of either version; files stand for the system's."""

from __future__ import annotations

import math
from pathlib import Path

from dgl_hybrid.sampling import free_memory
from dgl_hybrid.sampling.free_memory import free_memory_bytes, left_in_cgroups


def group(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(f"{content}\n")


def own(folder: Path, *lines: str) -> Path:
    path = folder / "own"
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def test_the_least_limit_of_all_groups_around_the_process(tmp_path: Path) -> None:
    group(tmp_path, memory__max=1000, memory__current=100, memory__stat="anon 60\ninactive_file 40")
    group(tmp_path / "job", memory__max="max", memory__current=90)
    group(tmp_path / "job" / "step", memory__max=500, memory__current=80, memory__stat="inactive_file 30")
    assert left_in_cgroups(tmp_path, own(tmp_path, "0::/job/step")) == 450
    assert left_in_cgroups(tmp_path, own(tmp_path, "0::/job")) == 940
    assert left_in_cgroups(tmp_path, own(tmp_path, "0::/")) == 940, "of a container, whose own group is the root"
    group(tmp_path / "job" / "step", memory__current=700)
    assert left_in_cgroups(tmp_path, own(tmp_path, "0::/job/step")) == 0


def test_the_first_version(tmp_path: Path) -> None:
    group(tmp_path / "memory", memory__limit_in_bytes=2**63 - 4096, memory__usage_in_bytes=50)
    at = tmp_path / "memory" / "docker"
    group(at, memory__limit_in_bytes=400, memory__usage_in_bytes=300, memory__stat="total_inactive_file 100")
    lines = ("5:cpu,cpuacct:/docker", "3:memory:/docker", "0::/")
    assert left_in_cgroups(tmp_path, own(tmp_path, *lines)) == 200


def test_no_limits(tmp_path: Path) -> None:
    assert left_in_cgroups(tmp_path, tmp_path / "none") == math.inf
    assert left_in_cgroups(tmp_path, own(tmp_path, "0::/job")) == math.inf


def test_a_limit_counts_beside_what_the_host_has(tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    group(tmp_path, memory__max=1000, memory__current=100)
    monkeypatch.setattr(free_memory, "_CGROUPS", tmp_path)
    monkeypatch.setattr(free_memory, "_OWN_CGROUPS", own(tmp_path, "0::/"))
    assert free_memory_bytes() == 900
    monkeypatch.setattr(free_memory, "_OWN_CGROUPS", tmp_path / "none")
    assert free_memory_bytes() > 900
