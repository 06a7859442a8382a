# SPDX-License-Identifier: Apache-2.0
"""Long files go first."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tests.helpers.order import FOLDER, LONG_FILES_S, longest_files_first


@dataclass(frozen=True)
class Item:
    path: Path
    name: str


def test_long_files_exist() -> None:
    assert [name for name in LONG_FILES_S if not (FOLDER / name).is_file()] == []


def test_long_files_go_first_and_files_stay_together() -> None:
    long = FOLDER / "distdgl" / "test_conformance.py"
    few, as_few, many, elsewhere = (Path(FOLDER, name) for name in ("a.py", "b.py", "c.py", "../d.py"))
    order = [*[(few, n) for n in "xyz"], (elsewhere, "x"), *[(as_few, n) for n in "zyx"], *[(many, n) for n in "dcba"]]
    items = [Item(path, name) for path, name in [*order, (long, "only")]]
    mixed = [*items[::2], *items[1::2]]
    found = [(item.path, item.name) for item in longest_files_first(mixed)]
    assert found[0] == (long, "only")
    assert [path for path, _ in found[1:]] == [many] * 4 + [few] * 3 + [as_few] * 3 + [elsewhere]
    for path in (few, as_few, many):
        assert [name for at, name in found if at == path] == [item.name for item in mixed if item.path == path]
