# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor

from dgl_hybrid.ops.cuda.tasks import TaskLists, cut_rows


def tasks_one_by_one(lengths: list[int], task_entries: int) -> tuple[list[int], list[int], list[int]]:
    """The definition, in plain Python: begin, row, slot."""
    begin, row, slot, position, slots = [0], [], [], 0, 0
    for number, length in enumerate(lengths):
        pieces = [min(task_entries, length - start) for start in range(0, length, task_entries)] or [0]
        for piece in pieces:
            position += piece
            begin.append(position)
            row.append(number)
            slot.append(-1 if len(pieces) == 1 else slots)
            slots += len(pieces) > 1
    return begin, row, slot


def indptr_of(lengths: list[int], dtype: torch.dtype) -> Tensor:
    return torch.tensor([0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()], dtype=dtype)


def test_the_example_of_the_note() -> None:
    tasks = cut_rows(torch.tensor([0, 2, 2, 9]), 4)
    assert tasks.begin is not None
    assert tasks.row is not None
    assert tasks.slot is not None
    assert tasks.begin.tolist() == [0, 2, 2, 6, 9]
    assert tasks.row.tolist() == [0, 1, 2, 2]
    assert tasks.slot.tolist() == [-1, -1, 0, 1]
    assert (tasks.split_rows.tolist(), tasks.split_offsets.tolist()) == ([2], [0, 2])
    assert (tasks.slot_task.tolist(), tasks.slot_split.tolist()) == ([2, 3], [0, 0])
    assert (tasks.num_tasks, tasks.num_slots) == (4, 2)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("task_entries", [1, 3, 16])
@pytest.mark.parametrize(
    "lengths",
    [[100], [0, 0, 17, 0], [16, 17, 0, 1, 33, 48, 15], [3, 1, 200, 2, 0, 0, 49]],
    ids=["one hub", "hub between empty rows", "around the multiples", "power law"],
)
def test_tasks_follow_the_definition(lengths: list[int], task_entries: int, dtype: torch.dtype) -> None:
    tasks = cut_rows(indptr_of(lengths, dtype), task_entries)
    begin, row, slot = tasks_one_by_one(lengths, task_entries)
    assert tasks.begin is not None
    assert tasks.row is not None
    assert tasks.slot is not None
    assert tasks.begin.tolist() == begin
    assert tasks.row.tolist() == row
    assert tasks.slot.tolist() == slot
    assert (tasks.num_tasks, tasks.num_slots) == (len(row), sum(number >= 0 for number in slot))
    assert tasks.split_rows.tolist() == sorted({r for r, s in zip(row, slot) if s >= 0})
    owned = [[s for r, s in zip(row, slot) if r == split] for split in tasks.split_rows.tolist()]
    offsets = tasks.split_offsets.tolist()
    assert owned == [list(range(offsets[r], offsets[r + 1])) for r in range(len(owned))]
    assert tasks.slot_task.tolist() == [task for task, number in enumerate(slot) if number >= 0]
    assert tasks.slot_split.tolist() == [number for number, slots in enumerate(owned) for _ in slots]
    assert tasks.begin.dtype == tasks.row.dtype == tasks.split_rows.dtype == tasks.slot_task.dtype == dtype
    assert tasks.slot.dtype == tasks.split_offsets.dtype == tasks.slot_split.dtype == torch.int32


@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0], [4, 0, 3, 4]])
def test_rows_that_need_no_cut_are_their_own_tasks(lengths: list[int]) -> None:
    indptr = indptr_of(lengths, torch.int32)
    tasks = cut_rows(indptr, 4)
    assert (tasks.begin, tasks.row, tasks.slot) == (None, None, None)
    assert (tasks.num_tasks, tasks.num_slots) == (len(lengths), 0)
    assert (tasks.split_rows.numel(), tasks.split_offsets.tolist()) == (0, [0])


@pytest.mark.parametrize("lengths", [[9, 2], [3, 2]], ids=["cut", "not cut"])
def test_lists_are_made_once_and_dropped_with_the_structure(lengths: list[int]) -> None:
    lists = TaskLists(4)
    indptr, equal = (indptr_of(lengths, torch.int32) for _ in range(2))
    tasks = lists.of(indptr)
    assert lists.of(indptr) is tasks
    assert lists.of(equal) is not tasks, "tensors are told apart by identity"
    watched = [weakref.ref(indptr), weakref.ref(tasks.split_offsets)]
    del tasks, indptr
    gc.collect()
    assert [reference() for reference in watched] == [None, None]


@pytest.mark.parametrize("is_inference", [False, True])
def test_offsets_that_were_written_to_are_cut_anew(is_inference: bool) -> None:
    """A caller of `segment_reduce` may keep one buffer of offsets; tasks of what lay there before sum other rows."""
    lists, lengths = TaskLists(4), [[9, 2], [2, 9], [1, 10], [3, 4]]
    with torch.inference_mode(is_inference):
        offsets = indptr_of(lengths[0], torch.int64)
        for of_segments in lengths:
            offsets.copy_(indptr_of(of_segments, torch.int64))
            tasks, expected = lists.of(offsets), cut_rows(offsets, 4)
            assert tasks.num_tasks == expected.num_tasks
            assert tasks.split_rows.tolist() == expected.split_rows.tolist()
            for ours, fresh in ((tasks.begin, expected.begin), (tasks.row, expected.row), (tasks.slot, expected.slot)):
                assert (ours is None) == (fresh is None)
                assert ours is None or fresh is None or ours.tolist() == fresh.tolist()


def test_offsets_of_segments_are_cut_at_each_call() -> None:
    """NumPy, or a collective, may have written to them: PyTorch has not counted that."""
    lists, offsets = TaskLists(4), indptr_of([9, 2], torch.int64)
    for lengths in ([9, 2], [2, 9], [3, 4]):
        offsets.numpy()[:] = indptr_of(lengths, torch.int64).numpy()
        tasks, expected = lists.of_segments(offsets), cut_rows(offsets.clone(), 4)
        assert (tasks.num_tasks, tasks.split_rows.tolist()) == (expected.num_tasks, expected.split_rows.tolist())
