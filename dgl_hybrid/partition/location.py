# SPDX-License-Identifier: Apache-2.0
"""Which file a partition is named by."""

from __future__ import annotations

import json
import os
from pathlib import Path

from dgl_hybrid.errors import PartitionError


def find_part_config(location: str | Path) -> Path:
    """Returns the JSON file of a partition, given it or its folder.

    Raises:
        PartitionError: There is none, or more than one.
        TypeError: Of what is no path.
    """
    if not isinstance(location, str | os.PathLike):
        raise TypeError(f"a partition is given as a folder or a file (got {type(location).__name__})")
    path = Path(location)
    if not path.is_dir():
        if not path.exists():
            raise PartitionError(f"{path} does not exist. Give a partition folder or its <graph name>.json.")
        return path
    found = []
    for candidate in sorted(path.glob("*.json")):
        try:
            content = json.loads(candidate.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            found.append(candidate)  # a truncated one: reading it will say so
            continue
        if isinstance(content, dict) and "part_method" in content and "num_parts" in content:
            found.append(candidate)
    if len(found) != 1:
        names = ", ".join(file.name for file in found) or "none"
        raise PartitionError(f"{path} must hold one partition's <graph name>.json (got {names}). Name the file itself.")
    return found[0]
