# SPDX-License-Identifier: Apache-2.0
"""Reading and strictly applying the described fixes."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from dgl_hybrid.compat.fixes import load_fixes, patches_folder
from dgl_hybrid.compat.patchfile import FilePatch, apply_patches, read_fix, take_out_patches
from dgl_hybrid.compat.versions import SUPPORTED_DGL, dgl_version, find_dgl, is_in
from dgl_hybrid.errors import CompatError

HEADER = """Fix: Count from one.
DGL: >=2.1,<2.2
Reason: because
  of this
Upstream: none known
Test: tests/x.py::test_x

"""
DIFF = """--- a/dgl/counting/__init__.py
+++ b/dgl/counting/__init__.py
@@ -1,3 +1,3 @@
 first
-second
+SECOND
 third
@@ -6,2 +6,4 @@
 sixth
+sixth and a half
+
 seventh
"""
SOURCE = "first\nsecond\nthird\nfourth\nfifth\nsixth\nseventh\n"
MENDED = "first\nSECOND\nthird\nfourth\nfifth\nsixth\nsixth and a half\n\nseventh\n"


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "0042-counting.patch"
    path.write_text(text)
    return path


def test_reads_header_and_hunks(tmp_path: Path) -> None:
    fix = read_fix(write(tmp_path, HEADER + DIFF))
    assert (fix.name, fix.summary, fix.reason) == ("0042-counting", "Count from one.", "because of this")
    assert [patch.module for patch in fix.files] == ["dgl.counting"]
    assert fix.files[0].hunks[1].new == ("sixth", "sixth and a half", "", "seventh")
    assert fix.when == "import"
    assert read_fix(write(tmp_path, HEADER.replace("\n\n", "\nWhen: enabled\n\n") + DIFF)).when == "enabled"


def test_applies_in_memory_and_knows_its_own_result(tmp_path: Path) -> None:
    fix = read_fix(write(tmp_path, HEADER + DIFF))
    assert apply_patches(SOURCE, [(fix.name, fix.files[0])]) == MENDED
    assert apply_patches(MENDED, [(fix.name, fix.files[0])]) is MENDED


def test_two_fixes_for_one_file(tmp_path: Path) -> None:
    """Each is a diff against the released file: both apply, either can be left out, by hand or in memory."""
    one = read_fix(write(tmp_path, HEADER + DIFF)).files[0]
    diff = "--- a/dgl/counting/__init__.py\n+++ b/dgl/counting/__init__.py\n@@ -4,2 +4,3 @@\n fourth\n+4.5\n fifth\n"
    two = read_fix(write(tmp_path, HEADER + diff)).files[0]
    both = MENDED.replace("fourth\n", "fourth\n4.5\n")
    assert apply_patches(SOURCE, [("two", two)]) == SOURCE.replace("fourth\n", "fourth\n4.5\n")
    assert apply_patches(SOURCE, [("one", one), ("two", two)]) == both
    assert apply_patches(both, [("two", two), ("one", one)]) is both
    with pytest.raises(CompatError, match=r"one does not fit dgl/counting/__init__\.py:2"):
        apply_patches(MENDED, [("one", one), ("two", two)])
    clash = read_fix(write(tmp_path, HEADER + diff.replace("-4,2 +4,3", "-3,2 +3,3").replace("fifth", "x"))).files[0]
    with pytest.raises(CompatError, match=r"one and two both change dgl/counting/__init__\.py:3: make one fix"):
        apply_patches(SOURCE, [("one", one), ("two", clash)])


def test_takes_out_what_was_applied_by_hand(tmp_path: Path) -> None:
    """Also where hunks of a fix only add or only remove lines; not from a text that has other fixes, too."""
    one = read_fix(write(tmp_path, HEADER + DIFF)).files[0]
    names = "--- a/dgl/counting/__init__.py\n+++ b/dgl/counting/__init__.py\n"
    diff = names + "@@ -3,0 +4 @@\n+3.5\n@@ -4,2 +5,0 @@\n-fourth\n-fifth\n"
    two = read_fix(write(tmp_path, HEADER + diff)).files[0]
    both = [("one", one), ("two", two)]
    by_hand = apply_patches(SOURCE, both)
    assert by_hand == MENDED.replace("fourth\nfifth\n", "3.5\n")
    assert take_out_patches(by_hand, both) == SOURCE
    assert take_out_patches(MENDED, [("one", one)]) == SOURCE
    assert take_out_patches(apply_patches(SOURCE, [("two", two)]), [("two", two)]) == SOURCE
    with pytest.raises(CompatError, match=r"one does not fit dgl/counting/__init__\.py:6"):
        take_out_patches(by_hand, [("one", one)])
    with pytest.raises(CompatError, match=r"one does not fit dgl/counting/__init__\.py:2"):
        take_out_patches(SOURCE.replace("second", "2nd"), [("one", one)])


@pytest.mark.parametrize(
    ("source", "at"),
    [
        (SOURCE.replace("third", "3rd"), 3),
        ("zeroth\n" + SOURCE, 1),  # the same text one line further down is not the file the fix was written for
        (SOURCE.replace("seventh\n", ""), 7),
        (MENDED.replace("SECOND", "second"), 7),  # half mended
    ],
)
def test_refuses_another_file(tmp_path: Path, source: str, at: int) -> None:
    fix = read_fix(write(tmp_path, HEADER + DIFF))
    with pytest.raises(
        CompatError, match=rf"0042-counting does not fit dgl/counting/__init__\.py:{at}: expected .* \(got"
    ):
        apply_patches(source, [(fix.name, fix.files[0])])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (HEADER, "expected a unified diff"),
        (HEADER.replace("Upstream: none known\n", "") + DIFF, r"missing: Upstream\)"),
        (HEADER.replace("\n\n", "\nWhen: often\n\n") + DIFF, r"expected 'When: import or enabled' \(got 'often'\)"),
        (HEADER + DIFF.replace("+++ b/", "+++ "), r"expected '\+\+\+ b/<path>'"),
        (HEADER + DIFF.splitlines()[0] + "\n+++ b/dgl/x.py\n", "expected a hunk"),
        (HEADER + DIFF.replace("-1,3", "-one,3"), "expected '@@"),
        (HEADER + DIFF.replace(" seventh\n", ""), "is short"),
    ],
)
def test_malformed_fixes_are_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(CompatError, match=r"0042-counting\.patch.*" + message):
        read_fix(write(tmp_path, text))


def test_missing_folder_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("dgl_hybrid.compat.fixes.__file__", str(tmp_path / "dgl_hybrid" / "compat" / "fixes.py"))
    with pytest.raises(CompatError, match=r"expected the folder of DGL fixes at .* Reinstall"):
        patches_folder()


def test_shipped_fixes_are_numbered_and_in_range() -> None:
    fixes = load_fixes()
    assert [fix.name[:4] for fix in fixes] == [f"{i:04d}" for i in range(1, len(fixes) + 1)]
    files = {path.name for path in patches_folder().iterdir()} - {"README.md"}
    assert all(re.fullmatch(r"\d{4}-[a-z0-9-]+\.patch", name) for name in files), files
    version = dgl_version()
    assert version is not None
    assert is_in(version, SUPPORTED_DGL)
    assert all(is_in(version, fix.dgl) for fix in fixes)


@pytest.mark.parametrize("tool", ["patch", "git"])
def test_by_hand_gives_the_same_files(tmp_path: Path, tool: str) -> None:
    """`patch -p1` and `git apply` in site-packages write what the import hook applies in memory."""
    if shutil.which(tool) is None:
        pytest.skip(f"no program {tool} here")
    dgl = find_dgl()
    assert dgl is not None
    by_path: dict[str, list[tuple[str, FilePatch]]] = {}
    for fix in load_fixes():
        for patch in fix.files:
            by_path.setdefault(patch.path, []).append((fix.name, patch))
            target = tmp_path / patch.path
            if not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(dgl.parent / patch.path, target)
        command = ["patch", "-p1", "--fuzz=0", "-i"] if tool == "patch" else ["git", "apply"]
        subprocess.run([*command, str(patches_folder() / f"{fix.name}.patch")], cwd=tmp_path, check=True, timeout=60)
    for path, patches in by_path.items():
        by_hand = (tmp_path / path).read_text("utf-8")
        assert apply_patches((dgl.parent / path).read_text("utf-8"), patches) == by_hand
        assert apply_patches(by_hand, patches) is by_hand
