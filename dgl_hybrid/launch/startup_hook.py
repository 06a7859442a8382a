# SPDX-License-Identifier: Apache-2.0
"""Whether a Python loads the plugin, and what DGL needs to be launched, when a script of it imports DGL.

pip installs the file that does it (`dgl_hybrid_startup.pth`); a package found by `PYTHONPATH` alone has none at work.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_NAME = "DglHybridStartup"
_LOOK = f"import sys; sys.exit(not any(getattr(one, '__name__', '') == '{_NAME}' for one in sys.meta_path))"
_TIMEOUT_S = 20.0
"""Less than a controller waits for its agents."""


def is_at_work() -> bool:
    """Tells whether it is at work in this process."""
    return any(getattr(finder, "__name__", "") == _NAME for finder in sys.meta_path)


def is_at_work_in(python: str, folder: Path) -> bool:
    """Tells whether it is in processes of another interpreter that are started in a folder.

    Raises:
        OSError: The interpreter cannot be run.
    """
    try:
        done = subprocess.run(
            [python, "-c", _LOOK],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            timeout=_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0
