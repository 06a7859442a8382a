# SPDX-License-Identifier: Apache-2.0
"""`dgl-hybrid run script.py …`: an unchanged DistDGL script, with the plugin switched on as it imports DGL."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from dgl_hybrid.cli.plugin import add_plugin_options, plugin_environment
from dgl_hybrid.cli.script_words import USAGE, check_script

TAKES_SCRIPT = True


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds this command's options."""
    parser.usage = USAGE
    parser.epilog = (
        "The script runs as `python SCRIPT ARGUMENT ...` would run it, with this interpreter's -u, -O, -W, -X and the "
        "like, in place of this process, as server, trainer or by itself. After --, -m MODULE works as well. Under "
        "torchrun: torchrun ... -m dgl_hybrid.cli run SCRIPT. With "
        "DGL's tools/launch.py, which puts torch's launcher behind the word python of its command, leave the command "
        "as it is and add --extra_envs DGL_HYBRID_ENABLE=1."
    )
    add_plugin_options(parser)
    group = parser.add_argument_group("general")
    group.add_argument("--debug", action="store_true", help="show tracebacks of our own faults")


def run(args: argparse.Namespace) -> int:
    """Becomes the script."""
    command = check_script(args.script)
    if not command[0].startswith("-") and not Path(command[0]).exists():
        raise ValueError(f"the script {command[0]} does not exist")
    environment = {**os.environ, **plugin_environment(args)}
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, *interpreter_options(sys.orig_argv), *command], environment)


_HANDED_ON = "OWXbdquv"
"""Options that change what the interpreter says and checks, not what it imports: those are of our own start."""


def interpreter_options(words: Sequence[str]) -> list[str]:
    """Returns the options of the interpreter in a command line, up to the script or `-m`, that a script is to have, too
    (`-u`, `-X faulthandler`).
    """
    options: list[str] = []
    left = iter(words[1:])
    for word in left:
        if word == "--check-hash-based-pycs":
            next(left, "")
        if word.startswith("--"):
            continue
        if not word.startswith("-") or word == "-":
            break
        for at, letter in enumerate(word[1:], start=1):
            if letter in "mc":  # the program
                return options
            if letter in "WX":
                options.append(f"-{letter}{word[at + 1 :] or next(left, '')}")
                break
            if letter in _HANDED_ON:
                options.append(f"-{letter}")
    return options
