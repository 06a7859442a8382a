# SPDX-License-Identifier: Apache-2.0
"""Files that are there whole or not at all."""

from __future__ import annotations

import errno
import glob
import os
from collections.abc import Iterable, Mapping
from pathlib import Path


def remove_unfinished(directory: Path, names: Iterable[str]) -> None:
    """Removes what processes that were killed had written aside of files of these names, large as it may be.

    Nobody else may be writing them.
    """
    for name in names:
        for aside in directory.glob(f".{glob.escape(name)}.*.tmp"):
            aside.unlink(missing_ok=True)


def write_durably(directory: Path, files: Mapping[str, bytes]) -> None:
    """Writes files by name: aside first, synced, then renamed. A reader sees an old file or the new one, never half of
    one; where the bytes of one of them cannot be written, all are as they were.

    They are renamed in the given order; a crash in between leaves the first ones new and the others old.
    """
    asides = {name: directory / f".{name}.{os.getpid()}.tmp" for name in files}
    try:
        for name, data in files.items():
            with open(asides[name], "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        for name, aside in asides.items():
            os.replace(aside, directory / name)
    finally:
        for aside in asides.values():
            aside.unlink(missing_ok=True)
    folder = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # file systems that sync no folders: both are there
            raise
    finally:
        os.close(folder)
