# SPDX-License-Identifier: Apache-2.0
"""The parser of all commands. Apart from `cli.options`: commands that only start a script do not wait for PyTorch."""

from __future__ import annotations

import argparse
from typing import NoReturn


class OneLineParser(argparse.ArgumentParser):
    """Wrong options end in one line on stderr and exit code 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")
