# SPDX-License-Identifier: Apache-2.0
"""Run by `dgl_hybrid_startup.pth` when a process imports `dgl` and nobody has imported `dgl_hybrid`.

Executed from its path, outside the package: deciding whether to act must not import the package, whose import acts.
"""

from __future__ import annotations

import os
import re
from importlib.machinery import PathFinder
from pathlib import Path

TYPE_CHECKING = False  # not from typing: this runs in processes that never asked for us
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec


ENABLE_VARIABLE = "DGL_HYBRID_ENABLE"
"""Set where the plugin is to be on; named again in `dgl_hybrid.sampling.config`, which must not be imported here."""
SHM_VARIABLE = "DGL_HYBRID_SHM_PREFIX"
"""Set in jobs of our launcher: there, too, fixes must be applied, or machines of one host overwrite each other (0011)
and trainers look for servers where the script says (0019)."""


def find_dgl() -> ModuleSpec | None:
    """Imports `dgl_hybrid`, which mends DGL, if `import dgl` would fail without it or a variable asks for it.

    Returns:
        What `dgl_hybrid`'s finder says about `dgl`, to be handed on; None leaves the search to Python.
    """
    is_asked_for = os.environ.get(ENABLE_VARIABLE, "") not in ("", "0", "off") or os.environ.get(SHM_VARIABLE)
    if not is_asked_for and not dgl_would_fail():
        return None
    from dgl_hybrid.compat.hook import FINDER

    return FINDER.find_spec("dgl")


def dgl_would_fail() -> bool:
    """Tells whether importing DGL as it is would raise: its graphbolt, or a package it does not declare, is missing."""
    dgl = _folder("dgl")
    if dgl is None or not (dgl / "graphbolt").is_dir():
        return False  # no DGL, or one from before graphbolt
    if _folder("packaging") is None or _folder("pandas") is None:
        return True
    torch, torchdata = _folder("torch"), _folder("torchdata")
    if torch is None:
        return False  # another backend, or an error that we cannot mend
    if torchdata is None or not (torchdata / "datapipes").is_dir():
        return True
    version = re.search(r"^__version__ = '([^'+]+)", (torch / "version.py").read_text("utf-8"), flags=re.MULTILINE)
    return version is None or not any((dgl / "graphbolt").glob(f"*graphbolt_pytorch_{version[1]}.*"))


def _folder(package: str) -> Path | None:
    spec = PathFinder.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))
