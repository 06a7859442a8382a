# SPDX-License-Identifier: Apache-2.0
"""Commands that run a script: where our options end and the script begins, whose arguments are nobody else's.

argparse is not asked: it looks for its options behind the script as well, and takes away a `--` that is the script's.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import PurePath

USAGE = "%(prog)s [options] [--] SCRIPT [ARGUMENT ...]"


def split_words(parser: argparse.ArgumentParser, words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits what follows the command's name.

    Args:
        parser: Knows which of our options take a value.
        words: The command line.
    Returns:
        Our options, with `-` where DGL's launcher writes `_`, and the script with its arguments as they are.
    """
    takes_value = {flag: action.nargs != 0 for action in parser._actions for flag in action.option_strings}
    own: list[str] = []
    at = 0
    while at < len(words):
        word = words[at]
        if word == "--":
            return own, list(words[at + 1 :])
        if not word.startswith("-"):
            return own, list(words[at:])
        flag, equals, value = word.partition("=")
        if flag.startswith("--"):
            flag = flag.replace("_", "-")
        own.append(flag + equals + value)
        at += 1
        if not equals and takes_value.get(flag, False) and at < len(words):
            own.append(words[at])
            at += 1
    return own, []


def check_script(words: Sequence[str]) -> tuple[str, ...]:
    """Checks that a script is there, and no interpreter in front of it.

    Raises:
        ValueError: There is none, or the first word looks like `python3 train.py` or `python3`.
    """
    if not words:
        raise ValueError("name the script to run, after our own options")
    first = words[0].split(" ", 1)[0]
    if re.fullmatch(r"python[\d.]*", PurePath(first).name) and (first != words[0] or len(words) > 1):
        raise ValueError(
            f"name the script without an interpreter and its arguments as words of their own (got {words[0]!r})"
        )
    return tuple(words)
