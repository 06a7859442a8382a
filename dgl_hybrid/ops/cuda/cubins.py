# SPDX-License-Identifier: Apache-2.0
"""Compiled kernels on disk, so that only the first process of a machine waits for the compiler.

One file per specialisation, named by a hash of everything that decides its content. Ranks of one machine may compile
the same kernel at the same time: each writes a file of its own and renames it, so a reader sees a whole file or none.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

_logger = logging.getLogger(__name__)

_MAGIC = b"dgl_hybrid cubin 1\n"


def default_folder() -> Path | None:
    """Returns `dgl_hybrid/cubins` in the user's cache folder (`XDG_CACHE_HOME`, `~/.cache`); None without a home."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(named):  # the XDG specification: a relative path is invalid and to be ignored
        return Path(named) / "dgl_hybrid" / "cubins"
    try:
        return Path.home() / ".cache" / "dgl_hybrid" / "cubins"
    except RuntimeError:
        return None


def cubin_key(source: str, options: Sequence[str], compiler: str, arch: str) -> str:
    """Returns the name of a cubin: a hash of source, options in their order, compiler and architecture."""
    digest = hashlib.sha256()
    for part in (source, *options, compiler, arch):
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)  # lengths, so that no two lists run together alike
    return digest.hexdigest()


class CubinCache:
    """Cubins by key, in a folder that may be missing, unwritable or damaged: then they are compiled again.

    Args:
        folder: Where the files lie; None keeps nothing on disk.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._reported = False

    def load_or_compile(self, key: str, compile_cubin: Callable[[], bytes]) -> bytes:
        """Returns the cubin of `key`, from disk if a sound file is there, else from `compile_cubin`, then stored."""
        found = self._read(key)
        if found is not None:
            return found
        cubin = compile_cubin()
        self._write(key, cubin)
        return cubin

    def path_of(self, key: str) -> Path | None:
        """Returns the file that holds, or would hold, the cubin of `key`."""
        return None if self.folder is None else self.folder / f"{key}.cubin"

    def _read(self, key: str) -> bytes | None:
        path = self.path_of(key)
        if path is None:
            return None
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            self._report("read", error)
            return None
        head = len(_MAGIC) + hashlib.sha256().digest_size
        cubin = data[head:]
        if data[:head] != _MAGIC + _checksum(key, cubin):
            _logger.warning("The compiled kernel %s is damaged; it is compiled again.", path)
            return None
        return cubin

    def _write(self, key: str, cubin: bytes) -> None:
        path = self.path_of(key)
        if path is None:
            return
        aside = None
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle, aside = tempfile.mkstemp(prefix=f".{key[:16]}.", dir=path.parent)
            with os.fdopen(handle, "wb") as file:
                file.write(_MAGIC + _checksum(key, cubin) + cubin)
                file.flush()
                os.fsync(file.fileno())  # else a crash of the machine may leave the new name with no content
            os.replace(aside, path)
        except OSError as error:
            if aside is not None:
                with contextlib.suppress(OSError):
                    os.unlink(aside)
            self._report("write", error)

    def _report(self, action: str, error: OSError) -> None:
        """Says once per process that the folder cannot be used: compiling anew is slower, not wrong."""
        if not self._reported:
            self._reported = True
            _logger.warning(
                "Compiled kernels cannot be kept: expected to %s %s (got %s). They are compiled in every process; "
                "name a writable folder in XDG_CACHE_HOME.",
                action,
                self.folder,
                error,
            )


def _checksum(key: str, cubin: bytes) -> bytes:
    """Covers the key too: a file under another one's name does not pass."""
    return hashlib.sha256(key.encode() + cubin).digest()
