# SPDX-License-Identifier: Apache-2.0
"""The parser of all commands. Apart from `cli.options`: commands that only start a script do not wait for PyTorch."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from typing import Any, NoReturn

_ALIKE = 0.8
"""From 0 to 1: less alike names are not proposed."""


class OneLineParser(argparse.ArgumentParser):
    """Wrong options end in one line on stderr and exit code 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


class CommandParser(OneLineParser):
    """Of one command: names it where it is given words that it does not know, and what may have been meant."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            options = [name for action in self._actions for name in action.option_strings]
            names = [word.split("=")[0] for word in unknown]
            alike = {found for name in names for found in difflib.get_close_matches(name, options, n=1, cutoff=_ALIKE)}
            meant = f" (did you mean {', '.join(sorted(alike))}?)" if alike else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{meant}")
        return found, unknown
