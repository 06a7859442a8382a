# SPDX-License-Identifier: Apache-2.0
"""What a block keeps is known by what it was made of, and is made anew when that changes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dgl_hybrid.graph.static_results import StaticResults, sparse_or_dense
from dgl_hybrid.ops import SparseRows
from dgl_hybrid.ops.cpu.products import most_entries


def test_rows_go_by_their_entries_where_most_are_zero() -> None:
    x = torch.zeros(10, 400)
    most = int(most_entries(400, x.dtype) * x.numel())
    x.view(-1)[:most] = 1.0
    results = StaticResults(lambda tensor: tensor is x)
    assert isinstance(results.rows_of(x, 10), SparseRows)
    assert results.rows_of(x, 10) is results.rows_of(x, 10)
    assert results.num_bytes > 0
    few = results.rows_of(x, 4)
    assert isinstance(few, Tensor)
    assert torch.equal(few, x[:4])
    assert few.data_ptr() == x.data_ptr()
    x.view(-1)[most] = 1.0  # counted by PyTorch: made anew
    dense = results.rows_of(x, 10)
    assert isinstance(dense, Tensor), "one too many"
    for other in (torch.zeros(3, 4, dtype=torch.bfloat16), torch.zeros(3, 4, 2), torch.zeros(3, 4, device="meta")):
        assert sparse_or_dense(other) is other


def test_what_is_kept_is_recognised_by_identity_and_version() -> None:
    known, weight = torch.ones(3, 2), torch.ones(4)
    results = StaticResults(lambda x: x is known or x is weight)
    calls = []

    def make() -> Tensor:
        calls.append(len(calls))
        return torch.full((2,), float(len(calls)))

    assert results.are_static((known,))
    assert not results.are_static((known.clone(),))
    assert not results.are_static(())
    first = results.get("sum", (known,), make)
    assert results.get("sum", (known,), make) is first
    assert results.num_bytes == 8
    results.get("weighted sum", (known, weight), make)
    assert calls == [0, 1]
    known.data.mul_(2.0)  # which PyTorch does not count
    assert results.was_changed
    known.data.div_(2.0)
    assert not results.was_changed
    weight.mul_(2.0)
    assert results.was_changed
    assert results.get("sum", (known,), make) is first
    results.get("weighted sum", (known, weight), make)
    assert calls == [0, 1, 2]
    assert not results.was_changed
    first.data.div_(2.0)  # as a layer does that makes a mean of its sum
    assert results.was_changed
    first.data.mul_(2.0)
    assert not results.was_changed
    first.add_(1.0)
    assert results.get("sum", (known,), make) is not first
    assert not results.are_static((known.requires_grad_(),))
    results.clear()
    assert results.num_bytes == 0


@pytest.mark.parametrize("num_columns", [1, 16, 31, 602])
@pytest.mark.parametrize("change", ["all scaled", "a column scaled", "rows shuffled"])
def test_changes_of_many_elements_are_found_that_pytorch_does_not_count(num_columns: int, change: str) -> None:
    if num_columns == 1 and change == "a column scaled":
        change = "all scaled"
    known = torch.rand(4096, num_columns, generator=torch.Generator().manual_seed(0))
    results = StaticResults(lambda x: x is known)
    results.get("sum", (known,), lambda: torch.ones(2))
    assert not results.was_changed
    if change == "all scaled":
        known.data.mul_(1.001)
    elif change == "a column scaled":
        known.data[:, num_columns // 2].mul_(1.001)
    else:
        known.data.copy_(known[torch.randperm(4096)])
    assert results.was_changed


def test_rows_rest_that_nothing_reads_but_what_was_made_of_them() -> None:
    known, other = torch.ones(3, 2), torch.ones(3, 2)
    results = StaticResults(lambda x: True)
    results.get("sum", (known,), lambda: torch.ones(2))
    results.get("sum", (other,), lambda: torch.ones(2))
    assert {id(x) for x in results.resting_operands()} == {id(known), id(other)}
    assert results.rows_of(other, 2) is not None
    assert [id(x) for x in results.resting_operands()] == [id(known)], "of dense rows themselves products are made"
    del known
    assert not results.resting_operands()


def test_a_kept_result_that_became_a_leaf_is_made_anew() -> None:
    """Its gradients would add up from epoch to epoch."""
    known = torch.ones(3, 2)
    results = StaticResults(lambda x: x is known)
    for _ in range(3):
        kept = results.get("sum", (known,), lambda: 2.0 * known)
        assert not kept.requires_grad
        kept.requires_grad_().sum().backward()
        assert results.was_changed, "ranks drop it together, before the next epoch"
        assert torch.equal(kept.grad, torch.ones(3, 2))


def test_what_was_made_of_tensors_that_are_gone_is_dropped() -> None:
    fields = {name: torch.full((3, 2), float(number)) for number, name in enumerate("ab")}
    results = StaticResults(lambda x: any(x is known for known in fields.values()))

    def kept_of(name: str) -> Tensor:
        return results.get("sum", (fields[name],), lambda: 1.0 * fields[name])

    first = {name: kept_of(name) for name in fields}
    assert all(kept_of(name) is kept for name, kept in first.items())
    assert results.num_bytes == 2 * 24
    for number in range(3):  # rows that are read anew, say
        fields["a"] = torch.full((3, 2), 10.0 + number)
        assert float(kept_of("a")[0, 0]) == 10.0 + number
        assert kept_of("b") is first["b"]
        assert results.num_bytes == 2 * 24
