# SPDX-License-Identifier: Apache-2.0
"""Which DGL is installed, found without importing it, and whether it is one we know."""

from __future__ import annotations

import re
from importlib.machinery import PathFinder
from pathlib import Path

SUPPORTED_DGL = ">=2.1,<2.2"
"""The DGL versions whose faults are known and mended, as a version specifier."""


def find_dgl() -> Path | None:
    """Returns the folder of the installed `dgl` package, or None; does not import it."""
    spec = PathFinder.find_spec("dgl")
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def dgl_version() -> str | None:
    """Returns the installed DGL's version such as `2.1.0`, or None when there is none; does not import it.

    Read from the file that DGL itself takes it from: the metadata beside it may be that of another copy on the path.
    """
    folder = find_dgl()
    if folder is None:
        return None
    try:
        text = (folder / "_ffi" / "libinfo.py").read_text(encoding="utf-8")
    except OSError:
        return None
    match = re.search(r"""^__version__ = ["']([^"']+)["']""", text, flags=re.MULTILINE)
    return match[1] if match else None


def is_in(version: str, specifier: str) -> bool:
    """Tells whether `version` is one of those that `specifier` (such as `>=2.1,<2.2`) names."""
    # Imported here because `import dgl_hybrid` happens in every process of a run, and this is needed only before DGL.
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion

    try:
        return SpecifierSet(specifier).contains(version, prereleases=True)
    except InvalidVersion:
        return False


def unsupported_message(version: str | None) -> str:
    """Returns the sentence for a DGL that is missing or not among the supported ones."""
    if version is None:
        return f"expected DGL {SUPPORTED_DGL} (got none). Install it: pip install 'dgl==2.1.*'"
    return (
        f"expected DGL {SUPPORTED_DGL} (got {version}): dgl_hybrid has no fixes for this version, and it is "
        "untested. Install a supported one: pip install 'dgl==2.1.*'"
    )
