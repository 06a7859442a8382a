# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dgl_hybrid.ops import compiled_code
from dgl_hybrid.ops.compiled_code import FOLDER_VARIABLE, CodeCache, code_key, default_folder

KEY = code_key("source", "-DTX=0", "NVRTC 12.8", "sm_90")
CUBIN = bytes(range(256)) * 5


def never() -> bytes:
    raise AssertionError("compiled although the file is there")


def cache_in(folder: Path | None) -> CodeCache:
    return CodeCache(folder, "cubin")


def test_key_depends_on_every_part() -> None:
    parts = [
        ("source", "-DTX=0", "NVRTC 12.8", "sm_90"),
        ("source ", "-DTX=0", "NVRTC 12.8", "sm_90"),
        ("source", "-DTX=1", "NVRTC 12.8", "sm_90"),
        ("source", "-DTX=0", "-DG=4", "NVRTC 12.8", "sm_90"),
        ("source", "-DTX=", "0", "NVRTC 12.8", "sm_90"),
        ("source-DTX=0", "NVRTC 12.8", "sm_90"),
        ("source", "-DTX=0", "NVRTC 12.9", "sm_90"),
        ("source", "-DTX=0", "NVRTC 12.8", "sm_100"),
    ]
    assert len({code_key(*part) for part in parts}) == len(parts)
    assert code_key(*parts[0]) == KEY


def test_second_reader_does_not_compile(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    assert cache_in(folder).load_or_compile(KEY, lambda: CUBIN) == CUBIN
    assert cache_in(folder).load_or_compile(KEY, never) == CUBIN
    assert [file.name for file in folder.iterdir()] == [f"{KEY}.cubin"], "nothing is left aside"
    assert folder.stat().st_mode & 0o077 == 0, "others cannot put code there"


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: data[:10],
        lambda data: b"",
        lambda data: data[:-1] + bytes([data[-1] ^ 1]),
        lambda data: bytes([data[0] ^ 1]) + data[1:],
        lambda data: data + b"\0",
    ],
    ids=["cut", "cut in the head", "empty", "bit flipped", "other magic", "longer"],
)
def test_damaged_file_is_compiled_again(tmp_path: Path, damage, caplog: pytest.LogCaptureFixture) -> None:
    cache = cache_in(tmp_path)
    cache.load_or_compile(KEY, lambda: CUBIN)
    file = tmp_path / f"{KEY}.cubin"
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    assert cache.load_or_compile(KEY, lambda: CUBIN) == CUBIN
    assert "is damaged" in caplog.text
    assert file.read_bytes() == whole, "the sound file is back"
    assert cache.load_or_compile(KEY, never) == CUBIN


def test_file_of_another_key_is_not_taken(tmp_path: Path) -> None:
    cache, other = cache_in(tmp_path), code_key("other", "NVRTC 12.8", "sm_90")
    cache.load_or_compile(KEY, lambda: CUBIN)
    (tmp_path / f"{KEY}.cubin").rename(tmp_path / f"{other}.cubin")
    assert cache.load_or_compile(other, lambda: b"other") == b"other"


def test_unusable_folder_is_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("not a folder")
    cache = cache_in(tmp_path / "file")
    for _ in range(3):
        assert cache.load_or_compile(KEY, lambda: CUBIN) == CUBIN
    records = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(records) == 1
    assert FOLDER_VARIABLE in records[0].getMessage()
    assert str(tmp_path / "file") in records[0].getMessage()


def test_full_disk_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert cache_in(tmp_path).load_or_compile(KEY, lambda: CUBIN) == CUBIN
    assert list(tmp_path.iterdir()) == []
    assert "No space left" in caplog.text


def test_no_folder_compiles_every_time(caplog: pytest.LogCaptureFixture) -> None:
    cache, compiled = cache_in(None), []
    for _ in range(2):
        cache.load_or_compile(KEY, lambda: compiled.append(1) or CUBIN)  # type: ignore[func-returns-value]
    assert len(compiled) == 2
    assert caplog.text == ""


@pytest.mark.skipif(os.name != "posix", reason="modes are POSIX's")
@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777])
def test_folder_that_others_may_write_to_is_not_used(
    mode: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache_in(tmp_path).load_or_compile(KEY, lambda: CUBIN)
    tmp_path.chmod(mode)
    try:
        for _ in range(2):
            assert cache_in(tmp_path).load_or_compile(KEY, lambda: b"mine") == b"mine"
        assert "that nobody else may write to" in caplog.text
    finally:
        tmp_path.chmod(0o700)
    assert cache_in(tmp_path).load_or_compile(KEY, never) == CUBIN, "nothing was written meanwhile"


def test_folder_of_somebody_else_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache_in(tmp_path).load_or_compile(KEY, lambda: CUBIN)
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1, raising=False)
    assert cache_in(tmp_path).load_or_compile(KEY, lambda: b"mine") == b"mine"
    assert f"{tmp_path} of user" in caplog.text


@pytest.mark.skipif(os.name != "posix", reason="modes are POSIX's")
def test_file_that_others_may_write_to_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache_in(tmp_path).load_or_compile(KEY, lambda: CUBIN)
    file = tmp_path / f"{KEY}.cubin"
    file.chmod(0o620)
    assert cache_in(tmp_path).load_or_compile(KEY, lambda: b"mine") == b"mine"
    assert f"{file} of user" in caplog.text
    assert cache_in(tmp_path).load_or_compile(KEY, never) == b"mine", "it was replaced by one of the user's own"


@pytest.mark.skipif(os.name != "posix", reason="modes are POSIX's")
@pytest.mark.parametrize("mode", [0o702, 0o777])
def test_folder_that_others_may_replace_is_not_used(
    mode: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The folder that the variable names holds that of the files: who may write there can put another in its place."""
    folder = tmp_path / "kernels"
    cache_in(folder).load_or_compile(KEY, lambda: CUBIN)
    tmp_path.chmod(mode)
    try:
        assert cache_in(folder).load_or_compile(KEY, lambda: b"mine") == b"mine"
        assert f"{tmp_path} of user" in caplog.text
        tmp_path.chmod(mode | 0o1000)
        assert cache_in(folder).load_or_compile(KEY, never) == CUBIN, "as in /tmp: others rename only what is theirs"
    finally:
        tmp_path.chmod(0o700)
    assert cache_in(folder).load_or_compile(KEY, never) == CUBIN, "nothing was written meanwhile"


@pytest.mark.skipif(os.name != "posix", reason="modes are POSIX's")
def test_folders_are_the_users_alone_whatever_the_umask(tmp_path: Path) -> None:
    """With a umask of 002, the default of some systems, the group may write to what is made without a mode."""
    before = os.umask(0o002)
    try:
        (tmp_path / "dgl_hybrid").mkdir()  # for other things
        cache_in(tmp_path / "dgl_hybrid" / "kernels").load_or_compile(KEY, lambda: CUBIN)
    finally:
        os.umask(before)
    assert cache_in(tmp_path / "dgl_hybrid" / "kernels").load_or_compile(KEY, never) == CUBIN


@pytest.mark.skipif(not hasattr(os, "O_NOFOLLOW"), reason="links are followed here")
def test_link_is_not_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    elsewhere, folder = tmp_path / "elsewhere", tmp_path / "kernels"
    for used in (elsewhere, folder):
        cache_in(used).load_or_compile(KEY, lambda: CUBIN)
    file = folder / f"{KEY}.cubin"
    file.unlink()
    file.symlink_to(elsewhere / f"{KEY}.cubin")
    assert cache_in(folder).load_or_compile(KEY, lambda: b"mine") == b"mine"
    assert "symbolic links" in caplog.text
    assert cache_in(folder).load_or_compile(KEY, never) == b"mine", "a file took the place of the link"
    assert cache_in(elsewhere).load_or_compile(KEY, never) == CUBIN


def test_what_is_read_is_what_was_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody may give the file's name to another one between the check and the read."""
    cache_in(tmp_path).load_or_compile(KEY, lambda: CUBIN)
    (tmp_path / "other").mkdir(0o700)
    cache_in(tmp_path / "other").load_or_compile(KEY, lambda: b"other")
    check = compiled_code._require_own

    def check_and_swap(path: Path, *args: Any, **kwargs: Any) -> None:
        check(path, *args, **kwargs)
        if path.suffix == ".cubin":
            os.replace(tmp_path / "other" / path.name, path)

    monkeypatch.setattr(compiled_code, "_require_own", check_and_swap)
    assert cache_in(tmp_path).load_or_compile(KEY, never) == CUBIN


def test_what_was_not_used_for_longest_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [code_key(str(number)) for number in range(9)]
    for number, key in enumerate(keys[:8]):
        cache_in(tmp_path).load_or_compile(key, lambda: CUBIN)
        os.utime(tmp_path / f"{key}.cubin", (number, number))
    cache_in(tmp_path).load_or_compile(keys[0], never)  # in use again
    monkeypatch.setattr(compiled_code, "MAX_FILES", 8)
    cache_in(tmp_path).load_or_compile(keys[8], lambda: CUBIN)
    assert len(list(tmp_path.iterdir())) == 9, "not too many yet"
    monkeypatch.setattr(compiled_code, "MAX_FILES", 7)
    (tmp_path / f"{keys[8]}.cubin").unlink()
    cache_in(tmp_path).load_or_compile(keys[8], lambda: CUBIN)
    left = [key for key in keys if (tmp_path / f"{key}.cubin").exists()]
    assert left == [keys[0], keys[6], keys[7], keys[8]]


def test_folder_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder("cubins") == tmp_path / "dgl_hybrid" / "cubins"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for value in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert default_folder("kernels") == tmp_path / "home" / ".cache" / "dgl_hybrid" / "kernels"


def test_folder_that_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    assert default_folder("cubins") == tmp_path / "cubins"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(FOLDER_VARIABLE, "here")
    assert default_folder("kernels") == tmp_path / "here" / "kernels"
    monkeypatch.setenv(FOLDER_VARIABLE, "0")
    assert default_folder("cubins") is None


def test_processes_that_write_at_once(tmp_path: Path) -> None:
    """Readers beside writers of the same key see a whole file or none: a torn one would be reported as damaged."""
    script = (  # one process imports what takes seconds, then there are three
        "import os, sys, logging\n"
        "from pathlib import Path\n"
        "from dgl_hybrid.ops.compiled_code import CodeCache\n"
        "cache = CodeCache(Path(sys.argv[1]), 'cubin')\n"
        "data = b'x' * 300_000\n"
        "first, children = os.getpid(), []\n"
        "while os.getpid() == first and len(children) < 2:\n"
        "    children.append(os.fork())\n"
        "for _ in range(50):\n"
        "    cache._write('k', data)\n"
        "    assert cache._read('k') == data\n"
        "if os.getpid() == first:\n"
        "    assert all(os.waitpid(child, 0)[1] == 0 for child in children)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert "damaged" not in done.stderr
