# SPDX-License-Identifier: Apache-2.0
"""Options that several commands share, and where their results go."""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dgl_hybrid
from dgl_hybrid.cli.options import flatten
from dgl_hybrid.compat.versions import dgl_version
from dgl_hybrid.launch.threads import check_threads
from dgl_hybrid.planner.durable import write_durably


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """How the processes of this run behave."""

    threads: int | None = None
    """Threads of each rank; cores / ranks if not given."""
    out: str | None = None
    """Folder for the complete resolved configuration and the results."""

    def __post_init__(self) -> None:
        """Checks every field."""
        check_threads(self.threads)


def add_common_options(parser: argparse.ArgumentParser) -> None:
    """Adds what demo, partition, plan and train understand."""
    group = parser.add_argument_group("general")
    group.add_argument("--config", metavar="FILE", help="read options from a .toml or .json file")
    group.add_argument("--print-config", action="store_true", help="print the resolved options and stop")
    group.add_argument("--json", action="store_true", help="end with one JSON object on the last line of stdout")
    group.add_argument("--verbose", action="store_true", help="log what is done to stderr")
    group.add_argument("--debug", action="store_true", help="show tracebacks")


def print_config(configs: Sequence[Any], *, as_line: bool) -> int:
    """Prints the options as `--config` reads them; on one line for `--json`."""
    print(json.dumps(flatten(configs), indent=None if as_line else 2))
    return 0


def make_results_folder(out: str | None) -> None:
    """Makes the folder that `write_results` fills, if one is given: before hours of training, not after them.

    Raises:
        ValueError: It cannot be made, or not be written into.
    """
    if out is None:
        return
    try:
        Path(out).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise ValueError(f"--out {out} must be a folder that can be written into: {error}") from error


def write_results(out: str | None, configs: Sequence[Any], result: dict[str, Any]) -> None:
    """Writes `config.json` and `result.json` into the folder, if one is given."""
    if out is None:
        return
    folder = Path(out)
    contents = {"config.json": flatten(configs), "result.json": {**result, "versions": versions()}}
    try:
        write_durably(folder, {name: json.dumps(content).encode() for name, content in contents.items()})
    except OSError as error:
        raise OSError(error.errno, f"results cannot be written to {folder}: {error.strerror}") from error


def versions() -> dict[str, str]:
    """Returns the versions a result depends on: those of what is imported, whatever else is installed beside it."""
    import numpy
    import torch

    return {
        "dgl_hybrid": dgl_hybrid.__version__,
        "python": platform.python_version(),
        "dgl": dgl_version() or "none",
        "torch": str(torch.__version__),
        "numpy": numpy.__version__,
    }
