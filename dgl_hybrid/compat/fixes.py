# SPDX-License-Identifier: Apache-2.0
"""Where the described fixes lie, and reading all of them."""

from __future__ import annotations

from pathlib import Path

from dgl_hybrid.compat.patchfile import Fix, read_fix
from dgl_hybrid.errors import CompatError


def patches_folder() -> Path:
    """Returns the folder of the fixes: inside the package when installed from a wheel, beside it in a checkout.

    Raises:
        CompatError: when neither is there.
    """
    package = Path(__file__).resolve().parent.parent
    candidates = (package / "patches", package.parent / "patches")
    for folder in candidates:
        if folder.is_dir():
            return folder
    raise CompatError(
        f"expected the folder of DGL fixes at {candidates[0]} or {candidates[1]} (got neither). Reinstall dgl_hybrid."
    )


def load_fixes() -> tuple[Fix, ...]:
    """Returns all fixes in the order of their numbers, whatever DGL they are for.

    Raises:
        CompatError: when one of them is malformed.
    """
    return tuple(read_fix(path) for path in sorted(patches_folder().glob("[0-9][0-9][0-9][0-9]-*.patch")))
