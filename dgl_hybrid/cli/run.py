# SPDX-License-Identifier: Apache-2.0
"""`dgl-hybrid run script.py …`: an unchanged DistDGL script, with the plugin switched on as it imports DGL."""

from __future__ import annotations

import argparse
import os
import re
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
        "The script runs as `python SCRIPT ARGUMENT ...` would run it, in place of this process, as server, trainer or "
        "by itself. After --, -m MODULE works as well. Under torchrun: torchrun ... -m dgl_hybrid.cli run SCRIPT. With "
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


def interpreter_options(words: Sequence[str]) -> list[str]:
    """Returns the options of the interpreter (`-u`, `-X faulthandler`) in a command line, up to the script or `-m`."""
    options: list[str] = []
    left = iter(words[1:])
    for word in left:
        if not word.startswith("-") or word in ("-", "--"):
            break
        if word in ("-X", "-W", "--check-hash-based-pycs"):
            options += [word, next(left, "")]
        elif word.startswith(("--", "-X", "-W")):
            options.append(word)
        else:  # letters; what follows m or c is the program
            letters = re.split("[mc]", word[1:], maxsplit=1)
            options += [f"-{letters[0]}"] if letters[0] else []
            if len(letters) > 1:
                break
    return options
