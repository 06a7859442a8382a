# SPDX-License-Identifier: Apache-2.0
"""Brings operands of the shapes that models use to the canonical shapes of the backends, and results back.

Pure arithmetic on shapes: nothing here reads a value. Feature shapes are what follows the rows; two of them broadcast
as in NumPy, aligned at the last dimension.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

Shape = tuple[int, ...]


def broadcast_features(left: Shape, right: Shape) -> Shape | None:
    """The feature shape of an elementwise result; None if the two do not broadcast."""
    left, right = _aligned(left, right)
    if any(a != b and a != 1 and b != 1 for a, b in zip(left, right)):
        return None
    return tuple(b if a == 1 else a for a, b in zip(left, right))


def dot_features(left: Shape, right: Shape) -> Shape | None:
    """The feature shape of a dot over the last dimension, which stays as 1; None if the operands do not fit.

    Rows without features count as rows of one, and two such give scalars.
    """
    if not left and not right:
        return ()
    left, right = left or (1,), right or (1,)
    if left[-1] != right[-1]:
        return None
    leading = broadcast_features(left[:-1], right[:-1])
    return None if leading is None else (*leading, 1)


@dataclass(frozen=True, slots=True)
class WeightedPlan:
    """How sources (S, *f) times edge weights (E, *g) become x (S, H, D) times w (E, H), and the result (N, *out).

    Dimensions along which the weight varies become heads (H), those along which it is constant width (D). Sources are
    repeated along heads that they lack, which costs memory of the order of the vertices; edges never are.
    """

    features: Shape
    """Of the result, aligned."""
    order: tuple[int, ...]
    """The dimensions of `features`, heads first."""
    num_heads: int
    width: int

    @property
    def _is_ordered(self) -> bool:
        return self.order == tuple(range(len(self.features)))

    def sources(self, x: Tensor) -> Tensor:
        """(S, *f) to (S, H, D)."""
        shape = x.shape[1:]
        x = x.reshape(x.shape[0], *[1] * (len(self.features) - len(shape)), *shape)
        x = x.expand(-1, *self.features)
        if not self._is_ordered:
            x = x.permute(0, *(1 + dim for dim in self.order))
        return x.reshape(x.shape[0], self.num_heads, self.width)

    def weights(self, w: Tensor) -> Tensor:
        """(E, *g) to (E, H); dimensions of size 1 drop out and the heads keep their order."""
        return w.reshape(w.shape[0], self.num_heads)

    def result(self, out: Tensor) -> Tensor:
        """(N, H, D) to (N, *features)."""
        if self._is_ordered:
            return out.reshape(out.shape[0], *self.features)
        out = out.reshape(out.shape[0], *(self.features[dim] for dim in self.order))
        places = [self.order.index(dim) for dim in range(len(self.features))]
        return out.permute(0, *(1 + place for place in places)).contiguous()  # as DGL's, which scripts `view`


def plan_weighted(x_features: Shape, w_features: Shape) -> WeightedPlan | None:
    """Plans the product of sources and edge weights; None if their features do not broadcast.

    Worked: x (S, 4, 8), w (E, 4, 1): 4 heads of width 8. x (S, 8), w (E, 1): one head of width 8. x (S, 8), w (E, 8):
    8 heads of width 1. x (S, 1), w (E, 4): x repeated, 4 heads of width 1.
    """
    features = broadcast_features(x_features, w_features)
    if features is None:
        return None
    _, weights = _aligned(x_features, w_features)
    heads = tuple(dim for dim, (size, weight) in enumerate(zip(features, weights)) if weight == size != 1)
    widths = tuple(dim for dim, (size, weight) in enumerate(zip(features, weights)) if weight != size)
    if not heads or not widths or heads[-1] < widths[0]:
        order = tuple(range(len(features)))
    else:
        # Dimensions of size 1 may stand anywhere.
        units = tuple(dim for dim in range(len(features)) if dim not in heads and dim not in widths)
        order = (*heads, *units, *widths)
    return WeightedPlan(
        features,
        order,
        num_heads=math.prod([features[dim] for dim in heads]),
        width=math.prod([features[dim] for dim in widths]),
    )


def expanded(x: Tensor, features: Shape) -> Tensor:
    """(n, *f) broadcast to (n, *features); a view."""
    shape = x.shape[1:]
    return x.reshape(x.shape[0], *[1] * (len(features) - len(shape)), *shape).expand(-1, *features)


def _aligned(left: Shape, right: Shape) -> tuple[Shape, Shape]:
    rank = max(len(left), len(right))
    return (1,) * (rank - len(left)) + tuple(left), (1,) * (rank - len(right)) + tuple(right)
