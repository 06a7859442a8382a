# SPDX-License-Identifier: Apache-2.0
"""Held rows equal the owners', bit for bit, whatever type they are kept in."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import Tensor

from dgl_hybrid.sampling import held_rows
from dgl_hybrid.sampling.counts import COUNTS
from dgl_hybrid.sampling.held_rows import HeldFields, HeldRows, likely_dtype
from dgl_hybrid.sampling.id_index import IdIndex
from dgl_hybrid.sampling.narrow import holds_exactly, narrowest_dtype


class Owner:
    """All rows of a field; remembers which ids it was asked for."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows
        self.asked: list[int] = []

    def __call__(self, ids: Tensor) -> Tensor:
        self.asked += ids.tolist()
        return self.rows[ids]


def same_bits(first: Tensor, second: Tensor) -> bool:
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[first.element_size()]
    return first.dtype == second.dtype and torch.equal(first.contiguous().view(integers), second.view(integers))


@pytest.mark.parametrize(
    ("rows", "dtype"),
    [
        (torch.tensor([[0.0, 255.0], [1.0, 7.0]]), torch.uint8),
        (torch.tensor([0.5, -2.0]), torch.float16),
        (torch.tensor([1.0, 3e38]), torch.float32),
        (torch.tensor([2.0**100, 1.0]), torch.bfloat16),
        (torch.tensor([0.1], dtype=torch.float32), torch.float32),
        (torch.tensor([0.1], dtype=torch.float32).double(), torch.float32),
        (torch.tensor([0.1], dtype=torch.float64), torch.float64),
        (torch.tensor([0.0, -0.0]), torch.float16),
        (torch.tensor([1.0, float("inf")]), torch.float16),
        (torch.tensor([3, 200]), torch.uint8),
        (torch.tensor([-3, 100]), torch.int8),
        (torch.tensor([-30000]), torch.int16),
        (torch.tensor([2**40]), torch.int64),
        (torch.tensor([1, 0], dtype=torch.uint8), torch.uint8),
        (torch.empty(0, 3), torch.uint8),
    ],
)
def test_the_smallest_type_that_holds_every_bit(rows: Tensor, dtype: torch.dtype) -> None:
    assert narrowest_dtype(rows) == dtype
    assert same_bits(rows.to(dtype).to(rows.dtype), rows)


def test_a_nan_with_a_payload_is_not_rounded_away() -> None:
    strange = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert not holds_exactly(strange, torch.float16)
    assert narrowest_dtype(strange) == torch.float32


@pytest.mark.parametrize("wide", [torch.float32, torch.float64])
def test_rows_with_nans_have_every_bit_however_many_are_read(wide: torch.dtype) -> None:
    """Vector instructions convert a NaN otherwise than those that take the rest of a row, one by one."""
    table = torch.arange(48.0, dtype=wide).view(48, 1)
    table[::3] = float("nan")
    owner = Owner(table)
    held = HeldRows(owner.rows[:16], 48)
    held.fetch(torch.arange(48), owner, float("inf"))
    for count in (1, 3, 7, 17, 48):
        assert same_bits(held.read(torch.arange(count), owner)[0], table[:count])


@pytest.mark.parametrize("bound", [40, 2**40], ids=["table", "search"])
def test_an_index_finds_ids_in_any_order(bound: int) -> None:
    ids = torch.tensor([0, 3, 7, 39])
    index = IdIndex(ids, bound)
    assert index.table_bytes == (160 if bound == 40 else 0)
    assert index.find(torch.tensor([0, 39, 5, 7, 7, 38])).tolist() == [0, 3, -1, 2, 2, -1]
    assert index.find(torch.empty(0, dtype=torch.int64)).tolist() == []
    assert IdIndex(ids[:0], bound).find(torch.tensor([1, 2])).tolist() == [-1, -1]


def test_held_and_other_rows_come_in_the_order_asked() -> None:
    owner = Owner(torch.randn(50, 3))
    held = HeldRows(owner.rows[:10], 50)
    held.fetch(torch.tensor([41, 12, 30]), owner, float("inf"))
    owner.asked.clear()
    ids = torch.tensor([30, 5, 12, 12, 49, 41])
    before = COUNTS.held_rows
    rows, not_held = held.read(ids, owner)
    assert same_bits(rows, owner.rows[ids])
    assert not_held.tolist() == owner.asked == [5, 49]
    assert COUNTS.held_rows - before == 4


def test_rows_can_be_added_later() -> None:
    owner = Owner(torch.randn(50, 2, 2))
    held = HeldRows(owner.rows[:10], 50)
    held.fetch(torch.tensor([20, 11]), owner, float("inf"))
    held.fetch(torch.tensor([15]), owner, float("inf"))
    owner.asked.clear()
    rows, not_held = held.read(torch.tensor([11, 15, 20]), owner)
    assert same_bits(rows, owner.rows[[11, 15, 20]])
    assert len(not_held) == 0
    assert owner.asked == []


def test_what_is_shared_is_ids_with_their_own_rows_at_any_time() -> None:
    """A queue of sampler processes looks from a thread of its own."""
    owner = Owner(torch.randn(50, 2))
    held = HeldRows(owner.rows[:10], 50)

    def look(ids: Tensor | None = None) -> Tensor:
        if (shared := held.shared()) is not None:
            assert same_bits(shared[1], owner.rows[shared[0]])
        return torch.empty(0) if ids is None else owner(ids)

    copied = torch.Tensor.share_memory_
    assert held.shared() is None
    for ids in ([20, 11], [15, 3, 40]):
        held._share = True
        with mock.patch.object(torch.Tensor, "share_memory_", lambda x: (look(), copied(x))[1]):
            held.fetch(torch.tensor(ids), look, float("inf"))
    shared = held.shared()
    assert shared is not None
    assert shared[0].tolist() == [3, 11, 15, 20, 40]
    look()


def test_small_values_are_kept_small_and_come_back_as_they_were() -> None:
    owner = Owner(torch.randint(0, 200, (60, 16)).float())
    held = HeldRows(owner.rows[:20], 60)
    held.fetch(torch.arange(20, 60), owner, float("inf"))
    assert held.num_bytes == 40 * (16 + 8) + 60 * 4, "rows, ids, and a table of all ids"
    rows, _ = held.read(torch.arange(20, 60), owner)
    assert same_bits(rows, owner.rows[20:])


def test_other_machines_may_have_other_values_than_this_one() -> None:
    """This machine's rows are small integers; a later one of another machine is not."""
    rows = torch.randint(0, 200, (60, 16)).float()
    rows[55] += 0.3
    owner = Owner(rows)
    held = HeldRows(rows[:20], 60)
    held.fetch(torch.arange(20, 50), owner, float("inf"))
    held.fetch(torch.arange(50, 60), owner, float("inf"))
    assert held.num_bytes == 40 * (4 * 16 + 8) + 60 * 4
    back, _ = held.read(torch.arange(20, 60), owner)
    assert same_bits(back, rows[20:])


@pytest.fixture(params=[3, None], ids=["messages of 3 rows", "one message"])
def messages(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of so few vertices fit into one message, of which nothing is left for a second."""
    if request.param is not None:
        monkeypatch.setattr(held_rows, "_BYTES_PER_MESSAGE", request.param * 16 * 4)


@pytest.mark.usefixtures("messages")
@pytest.mark.parametrize("is_odd", [False, True])
def test_no_more_is_held_than_there_is_room_for(is_odd: bool) -> None:
    rows = torch.randint(0, 200, (300, 16)).float()
    if is_odd:
        rows[100:] += 0.3
    owner = Owner(rows)
    held = HeldRows(rows[:20], 300)
    wanted = torch.randperm(280) + 20
    held.fetch(wanted, owner, 1000.0)
    assert 1000 - held.row_bytes < held.num_bytes <= 1000
    fits = held.num_bytes // held.row_bytes
    assert held.holds(wanted).tolist() == [True] * fits + [False] * (280 - fits), "the most wanted come first"
    back, _ = held.read(wanted, owner)
    assert same_bits(back, rows[wanted])


def allocated(held: HeldRows) -> int:
    """What the tensors of held rows take, whatever they are called."""
    parts = [*vars(held).values(), *vars(held._index).values()]
    return sum({t.data_ptr(): t.nbytes for t in parts if isinstance(t, Tensor) and len(t)}.values())


@pytest.mark.usefixtures("messages")
@pytest.mark.parametrize("room_bytes", [3000.0, 20_000.0, 140_000.0, 200_000.0, float("inf")])
def test_what_finds_the_rows_is_within_the_room_too(room_bytes: float) -> None:
    owner = Owner(torch.randn(2000, 16))
    held = HeldRows(owner.rows[:20], 2000)
    wanted = torch.randperm(1980) + 20
    for some in (wanted[:30], wanted[30:]):
        held.fetch(some, owner, room_bytes - held.num_bytes)
        assert held.num_bytes == allocated(held) <= room_bytes
    assert held.num_bytes >= min(room_bytes, 1980 * 72) - held.row_bytes
    back, _ = held.read(wanted, owner)
    assert same_bits(back, owner.rows[wanted])


@pytest.mark.usefixtures("messages")
def test_rows_that_become_wider_stay_within_the_room() -> None:
    rows = torch.randint(0, 200, (300, 16)).float()
    rows[200:] += 0.3
    owner = Owner(rows)
    held = HeldRows(rows[:20], 300)
    held.fetch(torch.arange(20, 90), owner, 2000.0)
    held.fetch(torch.arange(200, 290), owner, 2000.0 - held.num_bytes)
    assert held.num_bytes <= 2000
    ids = torch.arange(20, 300)
    back, _ = held.read(ids, owner)
    assert same_bits(back, rows[ids])


def test_likely_type_looks_at_rows_from_all_over() -> None:
    rows = torch.zeros(100_000, 1)
    assert likely_dtype(rows) == torch.uint8
    rows[50_000:] = 0.3
    assert likely_dtype(rows) == torch.float32
    assert likely_dtype(rows[:0]) == torch.float32


def test_what_all_fields_take_is_known_without_asking_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads want to know it, and asked all: 13 ms of each with 10,000 fields."""
    fields, owner = HeldFields(), Owner(torch.rand(50, 3))
    for k in range(5):
        held = HeldRows(owner.rows[:4], 50)
        fields.put(f"f{k}", held)
        held.fetch(torch.arange(10 + k), owner, float("inf"))
        fields.put(f"f{k}", held)
    fields.drop("f1")
    fields.drop("never held")
    assert sorted(fields.by_name) == ["f0", "f2", "f3", "f4"]
    num_bytes = sum(held.num_bytes for held in fields.by_name.values())
    monkeypatch.setattr(HeldRows, "num_bytes", property(lambda held: pytest.fail("asked each")))
    assert fields.num_bytes == num_bytes > 0
    fields.clear()
    assert (fields.num_bytes, fields.by_name) == (0, {})
