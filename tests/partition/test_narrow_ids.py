# SPDX-License-Identifier: Apache-2.0
"""Ids in four bytes: the same ids, and never a wrong one for want of bytes."""

from __future__ import annotations

import pytest
import torch

from dgl_hybrid.partition.narrow_ids import NarrowIds, narrow


@pytest.mark.parametrize(
    ("values", "num_bytes"),
    [
        ([], 4),
        ([0, 5, 2**31 - 1], 4),
        ([-(2**31), -1], 4),
        ([0, 2**31], 8),
        ([-(2**31) - 1, 0], 8),
        ([2**62, 3], 8),
    ],
)
def test_ids_are_the_same_in_few_bytes_and_in_many(values: list[int], num_bytes: int) -> None:
    given = torch.tensor(values, dtype=torch.int64)
    ids = NarrowIds(given)
    assert len(ids) == len(values)
    assert ids._held.element_size() == num_bytes
    for spelled_out in (ids.peek(), ids.wide()):
        assert spelled_out.dtype == torch.int64
        assert spelled_out.tolist() == values


def test_a_look_keeps_nothing_and_what_is_kept_can_be_saved_for_a_backward() -> None:
    ids = NarrowIds(torch.arange(4))
    ids.peek()
    assert ids._held.dtype == torch.int32
    with torch.inference_mode():
        kept = ids.wide()
    assert ids.wide() is kept
    assert not kept.is_inference()


@pytest.mark.parametrize(("bound", "dtype"), [(0, torch.int32), (2**31, torch.int32), (2**31 + 1, torch.int64)])
def test_positions_are_narrowed_where_all_below_the_bound_fit(bound: int, dtype: torch.dtype) -> None:
    positions = torch.tensor([bound - 1] if bound else [], dtype=torch.int64)
    assert narrow(positions, bound).dtype == dtype
    assert narrow(positions, bound).tolist() == positions.tolist()
