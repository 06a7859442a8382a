# SPDX-License-Identifier: Apache-2.0
"""Fresh Python processes: what `import dgl` does can be seen once per process only."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]


def run_python(
    code: str,
    *args: str,
    path: tuple[Path | str, ...] = (),
    flags: tuple[str, ...] = (),
    python: str = sys.executable,
    cwd: Path | str = "/",
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Runs `code` in a new process.

    Args:
        code: Python source; `args` are its `sys.argv[1:]`.
        path: Put in front of `sys.path`, before `flags` and `environment` have their say.
        environment: Variables to set; an empty string removes one.
    Returns:
        The finished process with its `stdout` and `stderr`.
    """
    variables = {k: v for k, v in (os.environ | environment).items() if v or k not in environment}
    variables["PYTHONPATH"] = os.pathsep.join(map(str, path))
    command = [python, *flags, "-c", code, *args]
    return subprocess.run(command, capture_output=True, text=True, env=variables, cwd=cwd, timeout=600, check=False)


def folder_without(tmp_path: Path, module: str) -> Path:
    """Returns a folder that, in front of `sys.path`, makes `import <module>` fail as if it were not installed."""
    folder = tmp_path / f"without_{module}"
    folder.mkdir()
    (folder / f"{module}.py").write_text(
        f"raise ModuleNotFoundError(\"No module named '{module}'\", name='{module}')\n"
    )
    return folder
