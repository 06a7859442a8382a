# SPDX-License-Identifier: Apache-2.0
"""Attention dropout: the same fate for an element as under `replicated_dropout`, and what is refused."""

from __future__ import annotations

import pytest
import torch

from dgl_hybrid.ops import EdgeDropout
from dgl_hybrid.ops.random_words import call_keys
from dgl_hybrid.training.dropout import replicated_dropout

CALL = {"seed": 2**64 - 3, "step": 12, "call_index": 4}


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_factors_are_those_of_replicated_dropout(p: float, dtype: torch.dtype) -> None:
    keys = torch.tensor([0, 5, 2**40 + 1, 7, 2**62])
    ones = torch.ones(5, 6, dtype=dtype)
    dropout = EdgeDropout.from_call(p, **CALL, edge_keys=keys)
    factors = dropout.factors(5, 6, dtype, torch.device("cpu"))
    assert factors.dtype == dtype
    assert torch.equal(factors, replicated_dropout(ones, p, keys, **CALL))
    by_row = EdgeDropout.from_call(p, **CALL).factors(5, 6, dtype, torch.device("cpu"))
    assert torch.equal(by_row, replicated_dropout(ones, p, torch.arange(5), **CALL))


def test_packed_keys_hold_the_bits_of_the_keys() -> None:
    dropout = EdgeDropout(0.5, (2**63 + 1, 2**64 - 1))
    assert dropout.packed_keys.tolist() == [-(2**63) + 1, -1]
    assert EdgeDropout.from_call(0.5, **CALL).keys == call_keys(**CALL)


def test_no_edges_have_no_factors() -> None:
    factors = EdgeDropout.from_call(0.5, **CALL).factors(0, 3, torch.float32, torch.device("cpu"))
    assert factors.shape == (0, 3)


@pytest.mark.parametrize("p", [-0.1, 1.1, float("nan")])
def test_a_probability_is_between_0_and_1(p: float) -> None:
    with pytest.raises(ValueError, match=r"dropout probability must be 0 to 1 \(got"):
        EdgeDropout(p, (1, 2))


def test_keys_must_fit() -> None:
    with pytest.raises(ValueError, match=r"two unsigned 64-bit integers \(got \(-1, 2\)\)"):
        EdgeDropout(0.5, (-1, 2))
    with pytest.raises(ValueError, match="two unsigned 64-bit integers"):
        EdgeDropout(0.5, (1, 2**64))
    with pytest.raises(TypeError, match=r"edge_keys must be \(E,\) int64 \(got \(3,\) torch.int32\)"):
        EdgeDropout(0.5, (1, 2), torch.arange(3, dtype=torch.int32))
    with pytest.raises(TypeError, match=r"edge_keys must be \(E,\) int64 \(got \(3, 1\) torch.int64\)"):
        EdgeDropout(0.5, (1, 2), torch.arange(3)[:, None])
