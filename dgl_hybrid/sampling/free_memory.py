# SPDX-License-Identifier: Apache-2.0
"""How much memory this process may still take: of the host, and of the container or job that it runs in."""

from __future__ import annotations

import math
import shutil
from pathlib import Path, PurePosixPath

import psutil

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")
_UNLIMITED = 1 << 60
"""Version 1 says "no limit" by a number near 2**63."""


def free_memory_bytes() -> float:
    """Returns what is available on the host, or left of the least limit that Docker, Kubernetes or a batch system set.

    The system's own count of free memory knows no such limits, and whoever goes beyond one is killed.
    """
    return min(float(psutil.virtual_memory().available), left_in_cgroups(_CGROUPS, _OWN_CGROUPS))


def free_shared_memory_bytes(folder: Path = Path("/dev/shm")) -> float:
    """Returns what may still be shared between processes: containers have little room there, however much memory. Who
    takes more of it is killed by a bus error. Infinity where there is no such folder.
    """
    try:
        return float(shutil.disk_usage(folder).free)
    except OSError:
        return math.inf


def left_in_cgroups(root: Path, own: Path) -> float:
    """Returns the least that is left under a limit of this process's control groups, whichever version; infinity
    without any.

    Args:
        root: Where they are mounted.
        own: `/proc/self/cgroup`.
    """
    try:
        lines = own.read_text(encoding="utf-8").splitlines()
    except OSError:
        return math.inf
    left = math.inf
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            folder, names = root, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            folder = root / "memory"
        else:
            continue
        inside = PurePosixPath(path.lstrip("/"))
        for parent in (inside, *inside.parents):  # a limit of a group holds for all inside of it
            left = min(left, _left_in(folder / parent, *names))
    return left


def _left_in(folder: Path, limit_name: str, used_name: str, cache_name: str) -> float:
    """Of one group; files that the system may drop from its cache do not count as used."""
    limit, used = _number_in(folder / limit_name), _number_in(folder / used_name)
    if limit is None or used is None or limit >= _UNLIMITED:
        return math.inf
    cache = 0
    try:
        for line in (folder / "memory.stat").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(" ")
            if name == cache_name:
                cache = int(value)
    except (OSError, ValueError):
        pass
    return float(max(limit - max(used - cache, 0), 0))


def _number_in(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # "max" stands for no limit
        return None
