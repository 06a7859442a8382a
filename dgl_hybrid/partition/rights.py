# SPDX-License-Identifier: Apache-2.0
"""Who may read what is written."""

from __future__ import annotations

import os


def umask() -> int:
    """What this process takes from the rights of what it makes. Reading it means setting it, for a moment."""
    umask = os.umask(0o077)
    os.umask(umask)
    return umask
