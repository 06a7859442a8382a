# SPDX-License-Identifier: Apache-2.0
"""Compiled kernels on disk, so that only the first process of a machine waits for the compiler.

One file per kernel, or specialisation of kernels, named by a hash of everything that decides its content. Ranks of one
machine may compile the same at the same time: each writes a file of its own and renames it, so a reader sees a whole
file or none.

What lies there is run, so the folder must belong to the user and nobody else may write to it: the trust that Python has
in its `.pyc` files. Nobody else may put another folder in its place, either, as who may write to the folder around it
could, unless that has the sticky bit (`/tmp`).
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

_logger = logging.getLogger(__name__)

FOLDER_VARIABLE = "DGL_HYBRID_CODE_CACHE"
"""Names the folder of all compiled code; "0": none is kept."""

MAX_FILES = 4096
"""Of a cache: when a process that writes finds more, those that were not used for longest go, until half are left."""


def user_cache_folder() -> Path | None:
    """Returns `dgl_hybrid` in the user's cache folder (`XDG_CACHE_HOME`, `~/.cache`); None without a home."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(named):  # the XDG specification: a relative path is invalid and to be ignored
        return Path(named) / "dgl_hybrid"
    try:
        return Path.home() / ".cache" / "dgl_hybrid"
    except RuntimeError:
        return None


def default_folder(name: str) -> Path | None:
    """Returns the folder for one kind of code; None if none is kept.

    It lies in the folder that `DGL_HYBRID_CODE_CACHE` names, else in `user_cache_folder`. Without a home there is none.
    """
    chosen = os.environ.get(FOLDER_VARIABLE, "")
    if chosen:
        return None if chosen == "0" else Path(chosen).absolute() / name
    folder = user_cache_folder()
    return None if folder is None else folder / name


def code_key(*parts: str) -> str:
    """Returns the name of some code: a hash of source, options, compiler, machine, in the order given."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)  # lengths, so that no two lists run together alike
    return digest.hexdigest()


class CodeCache:
    """Code by key, in a folder that may be missing, unwritable, somebody else's or damaged: then it is compiled again.

    Args:
        folder: Where the files lie, in a folder that holds several kinds of code; None keeps nothing on disk.
        kind: What the code is, for example "cubin": the files' suffix, and part of what their heads say.
    """

    def __init__(self, folder: Path | None, kind: str) -> None:
        self.folder = folder
        self._kind = kind
        self._magic = f"dgl_hybrid {kind} 1\n".encode()
        self._was_reported = False
        self._has_written = False

    def load_or_compile(self, key: str, compile_code: Callable[[], bytes]) -> bytes:
        """Returns the code of `key`, from disk if a sound file is there, else from `compile_code`, then stored."""
        found = self._read(key)
        if found is not None:
            return found
        code = compile_code()
        self._write(key, code)
        return code

    def path_of(self, key: str) -> Path | None:
        """Returns the file that holds, or would hold, the code of `key`."""
        return None if self.folder is None else self.folder / f"{key}.{self._kind}"

    def _read(self, key: str) -> bytes | None:
        path = self.path_of(key)
        if path is None:
            return None
        try:
            _require_own_folder(path.parent)
            data = _read_own(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._report("read", error)
            return None
        head = len(self._magic) + hashlib.sha256().digest_size
        code = data[head:]
        if data[:head] != self._magic + _checksum(key, code):
            _logger.warning("The compiled kernel %s is damaged; it is compiled again.", path)
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # it is in use: others go before it
        return code

    def _write(self, key: str, code: bytes) -> None:
        path = self.path_of(key)
        if path is None:
            return
        aside = None
        try:
            # One by one: parents get what the umask leaves, which may let the user's group write.
            path.parent.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.parent.mkdir(mode=0o700, exist_ok=True)
            _require_own_folder(path.parent)
            if not self._has_written:
                self._has_written = True
                _remove_unused(path.parent)
            handle, aside = tempfile.mkstemp(prefix=f".{key[:16]}.", dir=path.parent)
            with os.fdopen(handle, "wb") as file:
                file.write(self._magic + _checksum(key, code) + code)
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
        if not self._was_reported:
            self._was_reported = True
            _logger.warning(
                "Compiled kernels cannot be kept: expected to %s %s (got %s). They are compiled in every process; "
                "name a writable folder of your own in %s, or 0 to keep none.",
                action,
                self.folder,
                error,
                FOLDER_VARIABLE,
            )


def _checksum(key: str, code: bytes) -> bytes:
    """Covers the key too: a file under another one's name does not pass."""
    return hashlib.sha256(key.encode() + code).digest()


def _read_own(path: Path) -> bytes:
    """Reads a file that nobody else could have written: it may have been put there while others could write around it.

    Raises:
        OSError: There is none, it is a link, or somebody else's.
    """
    # What is checked is what is read, whatever takes its name meanwhile.
    with open(os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0)), "rb") as file:
        _require_own(path, os.fstat(file.fileno()))
        return file.read()


def _require_own_folder(path: Path) -> None:
    """Raises PermissionError if anybody else could put files there, or another folder in its place.

    Raises:
        FileNotFoundError: There is none.
    """
    _require_own(path, path.stat())
    around = path.parent.stat()
    if not around.st_mode & stat.S_ISVTX:  # else, as in `/tmp`, nobody renames what is not theirs
        # With a umask of 002 each user's own group may write to what others of this package have made there, and finds
        # that a file of somebody else's is not read.
        _require_own(path.parent, around, or_root=True, others=stat.S_IWOTH)


def _require_own(
    path: Path, found: os.stat_result, *, or_root: bool = False, others: int = stat.S_IWGRP | stat.S_IWOTH
) -> None:
    """Raises PermissionError if others than the user, `or_root`, may write to `path`, of which `found` is known."""
    if not hasattr(os, "geteuid"):
        return
    owners = (os.geteuid(), 0) if or_root else (os.geteuid(),)
    if found.st_uid not in owners or found.st_mode & others:
        raise PermissionError(
            f"{path} of user {found.st_uid} with mode {stat.S_IMODE(found.st_mode):o}; expected one of user "
            f"{os.geteuid()} that nobody else may write to"
        )


def _remove_unused(folder: Path) -> None:
    """Removes what was not used for longest, if there are too many files; what a crash left aside is among them."""
    files = list(folder.iterdir())
    if len(files) <= MAX_FILES:
        return
    used = []
    for file in files:
        with contextlib.suppress(OSError):  # another process removes them, too
            used.append((file.stat().st_mtime, file))
    for _, file in sorted(used)[: len(used) - MAX_FILES // 2]:
        with contextlib.suppress(OSError):
            file.unlink()
