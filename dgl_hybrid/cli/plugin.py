# SPDX-License-Identifier: Apache-2.0
"""Options that put the plugin under an unchanged DistDGL script."""

from __future__ import annotations

import argparse
import json
import os

from dgl_hybrid.errors import LaunchError
from dgl_hybrid.launch import startup_hook
from dgl_hybrid.sampling.config import ENABLE_VARIABLE, OFF_WORDS, STRATEGIES, HaloConfig, read_environment

OFF = "off"


def add_plugin_options(parser: argparse.ArgumentParser, *, can_be_off: bool = False) -> None:
    """Adds `--strategy` and `--budget`."""
    group = parser.add_argument_group("plugin")
    group.add_argument(
        "--strategy",
        choices=(*STRATEGIES, OFF) if can_be_off else STRATEGIES,
        help="how sampled training reads halo vertices: hybrid decides per vertex within the budget, depcache holds "
        "all that is reached, whatever the budget, depcomm reads them from their owners, as sampled DistDGL does"
        + (", off leaves the plugin out" if can_be_off else "")
        + " [what the script enables, or hybrid]",
    )
    group.add_argument(
        "--budget",
        metavar="BYTES",
        help="with hybrid, what each trainer may hold of other machines' data: auto (its part of a quarter of the "
        "free memory of host or container), unlimited, a share of the bytes of all node features of the graph (10%%) "
        "or bytes (256MB) [what the script enables, or auto]",
    )


def plugin_environment(args: argparse.Namespace) -> dict[str, str]:
    """Returns the variables under which processes switch the plugin on by themselves, or leave it off.

    They have the last word where a script calls `enable()` itself, so they say only what the user said: by these
    options, or in the variable itself, which holds where neither is given.

    Raises:
        ValueError: The budget cannot be read, or is of a plugin that is off.
        LaunchError: They would not: pip has not installed the file that does it.
    """
    said = {"strategy": args.strategy, "budget": args.budget}
    said = {name: value for name, value in said.items() if value is not None and value != OFF}
    HaloConfig(**said)
    if args.strategy == OFF:
        if args.budget is not None:
            raise ValueError(
                f"--budget cannot be given with --strategy {OFF}, which leaves the plugin out (got {args.budget!r}): "
                "leave out one of them"
            )
        return {ENABLE_VARIABLE: "0"}  # not left out: parts inherit what we have, and scripts may call enable()
    require_startup_hook()
    before = os.environ.get(ENABLE_VARIABLE, "")
    if before not in ("", *OFF_WORDS):
        HaloConfig.from_environment(before)  # here, not in each process that is started
    if not said:
        return {ENABLE_VARIABLE: before or "1"}
    if before not in ("", *OFF_WORDS):
        said = {**read_environment(before), **said}
    return {ENABLE_VARIABLE: json.dumps(said)}


def require_startup_hook() -> None:
    """Checks that Python processes of this environment load the plugin when they import DGL.

    Raises:
        LaunchError: They do not.
    """
    if not startup_hook.is_at_work():
        raise LaunchError(
            "the startup hook dgl_hybrid_startup.pth is not at work in this Python, so a script that imports dgl would "
            "run without the plugin. Install dgl_hybrid with pip (not by PYTHONPATH), and do not start Python with -S "
            "(nor with -I, if it was installed with --user)."
        )
