# SPDX-License-Identifier: Apache-2.0
"""Shapes: what broadcasts, and the way to canonical operands and back."""

from __future__ import annotations

import itertools

import pytest
import torch

from dgl_hybrid.ops.operands import broadcast_features, dot_features, plan_weighted

SHAPES = ((), (1,), (3,), (4,), (1, 3), (4, 1), (4, 3), (1, 1), (2, 4, 3), (2, 1, 3), (2, 4, 1), (0,), (4, 0))


@pytest.mark.parametrize(("left", "right"), tuple(itertools.product(SHAPES, SHAPES)))
def test_features_broadcast_as_tensors_do(left: tuple[int, ...], right: tuple[int, ...]) -> None:
    try:
        expected = tuple(torch.broadcast_shapes(left, right))
    except RuntimeError:
        assert broadcast_features(left, right) is None
        assert plan_weighted(left, right) is None
        return
    assert broadcast_features(left, right) == expected
    plan = plan_weighted(left, right)
    assert plan is not None
    # One source and one edge: the plan's product must be the broadcast product.
    x, w = torch.randn(2, *left), torch.randn(2, *right)
    canonical = plan.sources(x) * plan.weights(w).unsqueeze(-1)
    assert canonical.shape == (2, plan.num_heads, plan.width)
    rank = len(expected)
    broadcast = x.reshape(2, *[1] * (rank - len(left)), *left) * w.reshape(2, *[1] * (rank - len(right)), *right)
    assert torch.equal(plan.result(canonical), broadcast)


@pytest.mark.parametrize(
    ("x_features", "w_features", "heads", "width"),
    [
        ((8,), (1,), 1, 8),
        ((8,), (), 1, 8),
        ((8,), (8,), 8, 1),
        ((4, 8), (4, 1), 4, 8),
        ((4, 8), (1, 1), 1, 32),
        ((4, 8), (4, 8), 32, 1),
        ((4, 8), (8,), 8, 4),
        ((1,), (4,), 4, 1),
        ((2, 3, 4), (2, 1, 4), 8, 3),
        ((4, 8), (1,), 1, 32),
    ],
)
def test_heads_are_what_the_weights_vary_along(
    x_features: tuple[int, ...], w_features: tuple[int, ...], heads: int, width: int
) -> None:
    plan = plan_weighted(x_features, w_features)
    assert plan is not None
    assert (plan.num_heads, plan.width) == (heads, width)


def test_usual_operands_are_views() -> None:
    """No copy of sources or weights for the shapes of GraphConv (weighted), GAT and friends."""
    for x_features, w_features in (((8,), (1,)), ((8,), ()), ((4, 8), (4, 1)), ((8,), (8,)), ((1, 8), (1, 1))):
        plan = plan_weighted(x_features, w_features)
        assert plan is not None
        x, w = torch.randn(5, *x_features), torch.randn(5, *w_features)
        assert plan.sources(x).data_ptr() == x.data_ptr()
        assert plan.weights(w).data_ptr() == w.data_ptr()
        out = torch.randn(3, plan.num_heads, plan.width)
        assert plan.result(out).data_ptr() == out.data_ptr()


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        ((), (), ()),
        ((), (1,), (1,)),
        ((4,), (4,), (1,)),
        ((4,), (1,), None),
        ((2, 4), (4,), (2, 1)),
        ((2, 1, 4), (3, 4), (2, 3, 1)),
        ((2, 4), (3, 4), None),
        ((), (4,), None),
        ((0,), (0,), (1,)),
    ],
)
def test_dot_features(left: tuple[int, ...], right: tuple[int, ...], expected: tuple[int, ...] | None) -> None:
    assert dot_features(left, right) == expected


def test_results_lie_in_memory_as_those_of_dgl() -> None:
    """Weights that vary along the last dimension make it the heads; scripts go on with `view`."""
    plan = plan_weighted((3, 4), (4,))
    assert plan is not None
    out = plan.result(torch.arange(24.0).reshape(2, plan.num_heads, plan.width))
    assert out.shape == (2, 3, 4)
    assert out.is_contiguous()
    assert torch.equal(out.view(2, -1)[0, :4], out[0, 0])
