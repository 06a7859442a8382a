# SPDX-License-Identifier: Apache-2.0
"""Reads a described fix (`patches/NNNN-what.patch`) and applies it to source text in memory, strictly.

A fix is one ordinary unified diff below a header of `Key: value` lines. `patch -p1` and `git apply` skip the header, so
the file that is applied to the running process is the very file that is applied by hand in `site-packages`::

    Fix: what is mended, in one line
    DGL: >=2.1,<2.2
    Reason: why it is needed; further lines are indented
      like this one
    Upstream: URL of the upstream change, or `none known`
    Test: tests/compat/test_fixes.py::test_...
    When: enabled

    --- a/dgl/utils/__init__.py
    +++ b/dgl/utils/__init__.py
    @@ -9,6 +9,6 @@
    ...

`When` may be left out: such a fix is applied as DGL is imported. One that says `enabled` changes how a DGL that works
behaves, and is switched on and off while a program runs (`dgl_hybrid.compat.repairs`).

Every context and removed line has to stand exactly where the hunk says: a fix that lands on code it was not written for
is worse than none, so nothing is searched for and nothing is fuzzy.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal, get_args

from dgl_hybrid.errors import CompatError

HEADER_KEYS = ("Fix", "DGL", "Reason", "Upstream", "Test")
When = Literal["import", "enabled"]
_HUNK = re.compile(r"^@@ -(\d+)(?:,(\d+))? \+\d+(?:,(\d+))? @@")


@dataclass(frozen=True, kw_only=True, slots=True)
class Hunk:
    """One stretch of a diff: `old` stands in the file from line `old_start` on and becomes `new`."""

    old_start: int
    """Line number, from 1; the line after which `new` goes when `old` is empty."""
    old: tuple[str, ...]
    new: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class FilePatch:
    """All hunks for one file of DGL."""

    path: str
    """Relative to `site-packages`, such as `dgl/utils/__init__.py`."""
    hunks: tuple[Hunk, ...]

    @property
    def module(self) -> str:
        """The name under which Python imports the file."""
        parts = list(PurePosixPath(self.path).with_suffix("").parts)
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fix:
    """One file of `patches/`."""

    name: str
    """The file's name without its ending: `0001-what`."""
    summary: str
    dgl: str
    """The DGL versions it is for, as a version specifier."""
    reason: str
    upstream: str
    test: str
    when: When
    """`import`: applied as DGL is imported; `enabled`: switched on by `dgl_hybrid.compat.repairs`."""
    files: tuple[FilePatch, ...]


def read_fix(path: Path) -> Fix:
    """Reads one fix.

    Raises:
        CompatError: when the header lacks a key or the diff is malformed; names the file and the line.
    """
    lines = path.read_text(encoding="utf-8").splitlines()
    try:
        body = next(i for i, line in enumerate(lines) if line.startswith("--- "))
    except StopIteration:
        raise CompatError(f"{path.name}: expected a unified diff (got no line that begins with '--- ')") from None
    header = _parse_header(path.name, lines[:body])
    return Fix(
        name=path.stem,
        summary=header["Fix"],
        dgl=header["DGL"],
        reason=header["Reason"],
        upstream=header["Upstream"],
        test=header["Test"],
        when=_parse_when(path.name, header.get("When", "import")),
        files=_parse_diff(path.name, lines, body),
    )


def _parse_header(name: str, lines: list[str]) -> dict[str, str]:
    header: dict[str, str] = {}
    key = ""
    for line in lines:
        if line[:1].isspace() and key:
            header[key] += " " + line.strip()
        elif ": " in line:
            key, _, value = line.partition(": ")
            header[key] = value.strip()
    missing = [key for key in HEADER_KEYS if key not in header]
    if missing:
        raise CompatError(f"{name}: the header must have {', '.join(HEADER_KEYS)} (missing: {', '.join(missing)})")
    return header


def _parse_when(name: str, value: str) -> When:
    for when in get_args(When):
        if value == when:
            return when  # type: ignore[no-any-return]
    raise CompatError(f"{name}: expected 'When: {' or '.join(get_args(When))}' (got {value!r})")


def _parse_diff(name: str, lines: list[str], at: int) -> tuple[FilePatch, ...]:
    files: list[FilePatch] = []
    while at < len(lines):
        if not lines[at].startswith("--- "):
            at += 1  # `diff --git` and `index` lines between files
            continue
        if at + 1 >= len(lines) or not lines[at + 1].startswith("+++ b/"):
            raise CompatError(f"{name}:{at + 2}: expected '+++ b/<path>' after '{lines[at]}'")
        target = lines[at + 1][len("+++ b/") :].split("\t")[0]
        at += 2
        hunks: list[Hunk] = []
        while at < len(lines) and lines[at].startswith("@@"):
            hunk, at = _parse_hunk(name, lines, at)
            hunks.append(hunk)
        if not hunks:
            raise CompatError(f"{name}:{at + 1}: expected a hunk ('@@ -l,n +l,n @@') for {target}")
        files.append(FilePatch(path=target, hunks=tuple(hunks)))
    return tuple(files)


def _parse_hunk(name: str, lines: list[str], at: int) -> tuple[Hunk, int]:
    match = _HUNK.match(lines[at])
    if match is None:
        raise CompatError(f"{name}:{at + 1}: expected '@@ -l,n +l,n @@' (got {lines[at]!r})")
    first = at + 1
    num_old, num_new = int(match[2] or 1), int(match[3] or 1)
    old: list[str] = []
    new: list[str] = []
    at += 1
    while len(old) < num_old or len(new) < num_new:
        line = lines[at] if at < len(lines) else "end of file"
        mark, text = (line[:1] or " "), line[1:]
        if mark not in " -+":
            raise CompatError(f"{name}:{at + 1}: the hunk of line {first} is short (got {line!r})")
        if mark != "+":
            old.append(text)
        if mark != "-":
            new.append(text)
        at += 1
    hunk = Hunk(old_start=int(match[1]), old=tuple(old), new=tuple(new))
    return hunk, at


def apply_patches(source: str, patches: Sequence[tuple[str, FilePatch]]) -> str:
    """Applies the hunks of all fixes for one file, each exactly where it says.

    Every fix is a diff against the released file, so any of them can be left out; their hunks must not overlap.

    Args:
        source: The file's text; not modified.
        patches: Name of the fix (for messages) and its hunks.
    Returns:
        The mended text; `source` itself when all the fixes are in it already (applied by hand).
    Raises:
        CompatError: when the text is neither the released nor the mended one, or when two fixes overlap.
    """
    lines = source.splitlines()
    mismatch: str | None = None
    by_hand = True
    mended: list[str] = []
    done = shift = 0
    previous = ""
    for name, path, hunk in _in_order(patches):
        start = hunk.old_start - 1 if hunk.old else hunk.old_start
        if start < done and previous != name:
            raise CompatError(f"{previous} and {name} both change {path}:{start + 1}: make one fix of them")
        mismatch = mismatch or _mismatch(lines, start, hunk.old, f"{name} does not fit {path}")
        by_hand = by_hand and _mismatch(lines, start + shift, hunk.new, "") is None
        mended += lines[done:start]
        mended += hunk.new
        done = start + len(hunk.old)
        shift += len(hunk.new) - len(hunk.old)
        previous = name
    if mismatch is None:
        return "\n".join(mended + lines[done:]) + "\n"
    if by_hand:
        return source
    raise CompatError(
        f"{mismatch}. The file differs from the released DGL: reinstall it "
        "(pip install --force-reinstall --no-deps 'dgl==2.1.*'), or apply all fixes to your version by hand."
    )


def take_out_patches(source: str, patches: Sequence[tuple[str, FilePatch]]) -> str:
    """Takes out of one file the fixes that were applied by hand: all of those given, and no others.

    Args:
        source: The file's text; not modified.
        patches: As for `apply_patches`.
    Returns:
        The released text.
    Raises:
        CompatError: when the text is not the released one with these fixes.
    """
    backwards: list[tuple[str, FilePatch]] = []
    shift = 0
    for name, path, hunk in _in_order(patches):
        start = (hunk.old_start - 1 if hunk.old else hunk.old_start) + shift
        back = Hunk(old_start=start + 1 if hunk.new else start, old=hunk.new, new=hunk.old)
        backwards.append((name, FilePatch(path=path, hunks=(back,))))
        shift += len(hunk.new) - len(hunk.old)
    return apply_patches(source, backwards)


def _in_order(patches: Sequence[tuple[str, FilePatch]]) -> list[tuple[str, str, Hunk]]:
    """Returns the hunks of all fixes for one file by where they stand in it, each with its fix's name and its path."""
    named = ((name, patch.path, hunk) for name, patch in patches for hunk in patch.hunks)
    return sorted(named, key=lambda found: found[2].old_start)


def _mismatch(lines: list[str], start: int, expected: tuple[str, ...], what: str) -> str | None:
    for index, want in enumerate(expected, start):
        got = lines[index] if index < len(lines) else "end of file"
        if got != want:
            return f"{what}:{index + 1}: expected {want!r} (got {got!r})"
    return None
