# SPDX-License-Identifier: Apache-2.0
"""Rows that were left on disk are the rows that they were, at the same addresses, and not in memory."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

from dgl_hybrid.ops.cpu import resting_rows
from dgl_hybrid.ops.cpu.memory import _mappings_in
from dgl_hybrid.ops.cpu.resting_rows import LEAST_BYTES, leave_on_disk, new_rows, own_rows, take_back_if_read

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is mapped anew in place on Linux alone")

SHAPE = (LEAST_BYTES // 64, 16)


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(resting_rows, "_folder_on_disk", lambda: tmp_path)
    return tmp_path


def made_up() -> Tensor:
    rows = new_rows(SHAPE, torch.float32)
    return rows.copy_(torch.arange(rows.numel()).view(SHAPE))


def resident_bytes(folder: Path) -> int:
    """Of files without a name that lie in a folder."""
    return sum(mapping.resident_bytes for mapping in _mappings_in(folder))


def test_everything_that_refers_to_rows_finds_them_where_they_were(folder: Path) -> None:
    rows = made_up()
    view, array, expected, address = rows[5:10], rows.numpy(), rows.clone(), rows.data_ptr()
    before = psutil.Process().memory_info().rss
    assert leave_on_disk(rows) == LEAST_BYTES
    assert psutil.Process().memory_info().rss < before - LEAST_BYTES / 2
    assert not list(folder.iterdir()), "the file has no name"
    assert rows.data_ptr() == address
    assert torch.equal(view, expected[5:10])
    assert (array == expected.numpy()).all()
    assert torch.equal(rows, expected)
    assert resident_bytes(folder) == LEAST_BYTES, "what was read came back"
    assert leave_on_disk(rows) == 0, "it was left before"


def test_who_writes_gets_pages_of_his_own() -> None:
    rows = made_up()
    expected = rows.clone()
    version = rows._version
    leave_on_disk(rows)
    assert rows._version == version
    rows[7] = -1.0
    rows.numpy()[9] = -2.0
    expected[7], expected[9] = -1.0, -2.0
    assert torch.equal(rows, expected)


@pytest.mark.parametrize("is_left", [False, True])
def test_memory_ends_with_the_last_that_refers_to_it(is_left: bool, folder: Path) -> None:
    rows = made_up()
    address = rows.data_ptr()
    assert address in resting_rows._in_memory
    if is_left:
        leave_on_disk(rows)
        assert len(_mappings_in(folder)) == 1
    view = rows[:3]
    del rows
    gc.collect()
    assert view.sum() == sum(range(48))
    del view
    gc.collect()
    assert address not in resting_rows._in_memory
    assert address not in resting_rows._on_disk
    assert not _mappings_in(folder)


def test_rows_that_are_read_all_the_same_go_back_to_memory(folder: Path) -> None:
    rows = made_up()
    view, expected = rows[5:10], rows.clone()
    assert take_back_if_read(rows) == 0, "they are there"
    leave_on_disk(rows)
    rows[-1] = expected[-1] = -1.0
    assert rows[:100].sum() == expected[:100].sum()
    assert take_back_if_read(rows) == 0, "of a few nobody knows whether they will be read again"
    assert torch.equal(rows, expected)
    assert take_back_if_read(rows) == LEAST_BYTES
    assert not _mappings_in(folder)
    assert torch.equal(rows, expected)
    assert torch.equal(view, expected[5:10])
    assert leave_on_disk(rows) == take_back_if_read(rows) == 0, "for good"


def test_an_interrupt_as_rows_are_taken_back_loses_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """They were zeros, which no count of writes tells of."""
    rows = made_up()
    expected = rows.clone()
    leave_on_disk(rows)
    assert torch.equal(rows, expected)  # so they are to be taken back
    map_over = resting_rows._map_over

    def interrupted(*args: Any) -> None:
        map_over(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(resting_rows, "_map_over", interrupted)
        with pytest.raises(KeyboardInterrupt):
            take_back_if_read(rows)
    assert torch.equal(rows, expected)
    assert take_back_if_read(rows) == LEAST_BYTES
    assert torch.equal(rows, expected)


def test_a_copy_can_be_left_and_small_rows_are_ordinary() -> None:
    rows = torch.rand(SHAPE, dtype=torch.float32)
    copy = own_rows(rows)
    assert torch.equal(copy, rows)
    assert leave_on_disk(rows) == 0, "its memory is the allocator's"
    assert leave_on_disk(copy) == LEAST_BYTES
    small = rows[:-1].clone()
    assert own_rows(small) is small
    assert leave_on_disk(new_rows(tuple(small.shape), small.dtype)) == 0


def test_a_gradient_flows_through_rows_on_disk() -> None:
    rows, weight = made_up().remainder_(8.0), torch.ones(16, 2, requires_grad=True)
    loss = (rows @ weight).sum()
    leave_on_disk(rows)
    loss.backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad[:, 0], rows.sum(dim=0))


def test_without_room_on_disk_rows_stay(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    def is_full(descriptor: int, offset: int, num_bytes: int) -> None:
        raise OSError(28, os.strerror(28))

    rows = made_up()
    monkeypatch.setattr(os, "posix_fallocate", is_full)
    assert leave_on_disk(rows) == 0
    assert not _mappings_in(folder)
    monkeypatch.undo()
    monkeypatch.setattr(resting_rows, "_folder_on_disk", lambda: None)
    assert leave_on_disk(rows) == 0, "there is no disk"
    assert rows[1, 0] == 16


@pytest.mark.parametrize(("kind", "is_disk"), [("ext4", True), ("nfs", True), ("tmpfs", False), ("ramfs", False)])
def test_a_folder_in_memory_is_none(kind: str, is_disk: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.undo()
    mounts = [("/", "tmpfs" if is_disk else "ext4"), (str(tmp_path.resolve().parent), kind)]
    listed = [SimpleNamespace(mountpoint=place, fstype=of_kind) for place, of_kind in mounts]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: listed)
    monkeypatch.setattr(resting_rows.tempfile, "gettempdir", lambda: str(tmp_path))
    resting_rows._folder_on_disk.cache_clear()
    try:
        assert resting_rows._folder_on_disk() == (tmp_path.resolve() if is_disk else None)
    finally:
        resting_rows._folder_on_disk.cache_clear()


def test_without_any_folder_for_temporary_files_rows_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python says so by an error, on one rank alone maybe, and in the middle of training."""
    monkeypatch.undo()

    def raise_error() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp', '/var/tmp', '/usr/tmp', '/']")

    monkeypatch.setattr(resting_rows.tempfile, "gettempdir", raise_error)
    resting_rows._folder_on_disk.cache_clear()
    try:
        rows = made_up()
        assert leave_on_disk(rows) == 0
        assert rows[1, 0] == 16
    finally:
        resting_rows._folder_on_disk.cache_clear()
