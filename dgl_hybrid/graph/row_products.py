# SPDX-License-Identifier: Apache-2.0
"""Products of rows and weights in as few passes as they take.

A mean layer of `SAGEConv` multiplies its rows by one matrix and the means of its in-neighbours by another, and adds
the two. Written as two linear layers that is one result of the size of the rows more than needed, forward and backward,
each of which costs its pass over memory and stays there until the end of the layer. Here the second product is added to
the first where it lies.

Rows that never change and are mostly zeros come as `SparseRows`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dgl_hybrid.graph.gradient_owners import is_nobody_elses
from dgl_hybrid.graph.layer_block import LayerBlock
from dgl_hybrid.graph.static_results import Rows
from dgl_hybrid.graph.watched_modules import is_watched
from dgl_hybrid.ops import SparseRows
from dgl_hybrid.ops.row_blocks import is_turned
from dgl_hybrid.ops.unseen import unseen

_COLUMNS = 16
"""Float32 in a vector register."""


class _NarrowedRows(torch.autograd.Function):
    """(C, A) -> (C, W), (N, O): all rows times w_all, W >= O with zeros behind; the first N rows times w_own."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w_all: Tensor, w_own: Tensor, bias: Tensor | None, num_own: int, width: int
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, w_all, w_own)
        ctx.num_own = num_own
        padded = w_all if width == len(w_all) else F.pad(w_all, (0, 0, 0, width - len(w_all)))
        return products([x], [padded.t()]), products([x[:num_own]], [w_own.t()], bias=bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_all, grad_own = grads
        x, w_all, w_own = ctx.saved_tensors
        needs_x, needs_w_all, needs_w_own, needs_bias, *_ = ctx.needs_input_grad
        grad_x, grad_w_all, _ = gradients_of(x, w_all, grad_all[:, : len(w_all)], needs_x, needs_w_all)
        grad_x_own, grad_w_own, grad_bias = gradients_of(x[: ctx.num_own], w_own, grad_own, needs_x, needs_w_own)
        if grad_x is not None and grad_x_own is not None:
            # Into the rows it belongs to: on its own it would be padded to all rows, and all rows added.
            grad_x[: ctx.num_own].add_(grad_x_own)
        return grad_x, grad_w_all, grad_w_own, grad_bias if needs_bias else None, None, None


class _RowsAndFirst(torch.autograd.Function):
    """(C, A) -> the same, and its first N rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, num_first: int) -> tuple[Tensor, Tensor]:
        return x, x[:num_first]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        is_ours = is_nobody_elses(grads)
        grad_all, grad_first = grads
        return _add_to_first(grad_all, grad_first, in_place=is_ours), None


def gradients_of(
    x: Tensor, weight: Tensor, grad: Tensor, needs_x: bool, needs_weight: bool
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """Returns gradients of x (n, A), of the weight (O, A) and of a bias (O,), for `x @ weight.t() + bias`."""
    if torch.is_grad_enabled():  # they will be differentiated
        return products([grad], [weight]) if needs_x else None, grad.t() @ x if needs_weight else None, grad.sum(0)
    multiplied = weight.t()
    found = iter(
        torch.ops.dgl_hybrid.row_products_backward(
            [x], [multiplied], grad, None, None, [needs_x], [needs_weight], False
        )
    )
    grad_x = next(found) if needs_x else None
    grad_weight = next(found) if needs_weight else None
    if grad_weight is not None and not is_turned(multiplied):  # else it lies as the weight does, and so does that
        grad_weight = grad_weight.t()
    return grad_x, grad_weight, next(found)


def _add_to_first(rows: Tensor, first: Tensor, *, in_place: bool) -> Tensor:
    """Returns `rows` (C, A) with (n, A) added to the first n of them: where they lie, if they may be written to."""
    num_first = len(first)
    if torch.is_grad_enabled():  # it will be differentiated
        return torch.cat([rows[:num_first] + first, rows[num_first:]]) if num_first < len(rows) else rows + first
    if in_place and rows.is_contiguous():
        rows[:num_first].add_(first)
        return rows
    result = torch.empty_like(rows)
    torch.add(rows[:num_first], first, out=result[:num_first])
    result[num_first:] = rows[num_first:]
    return result


def sum_of_products(x: Rows, of_x: nn.Linear, y: Rows, of_y: nn.Linear, *, relu: bool = False) -> Tensor:
    """Returns `of_x(x) + of_y(y)`, or its ReLU, where `are_plain((of_x, of_y), x)` holds and `of_y` has no bias."""
    w_x, w_y = of_x.weight.t(), of_y.weight.t()
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        return products([x, y], [w_x, w_y], bias=of_x.bias, relu=relu)
    # The dense one last: what ends a layer is done in the same pass over its result.
    if isinstance(y, Tensor):
        return product(y, w_y, of_x.bias, addend=product(x, w_x, None), relu=relu)
    return product(x, w_x, of_x.bias, addend=product(y, w_y, None), relu=relu)


@unseen
def product(
    rows: Rows,
    weight: Tensor,
    bias: Tensor | None,
    *,
    factors: Tensor | None = None,
    addend: Tensor | None = None,
    relu: bool = False,
) -> Tensor:
    """Returns `factors * (rows @ weight) + bias + addend`, or its ReLU.

    Args:
        rows: (N, A) or, without `addend`, (N, ..., A).
        weight: (A, O), where `rows` are sparse of their dtype.
        bias: (O,).
        factors: (N, 1), where `rows` are a matrix of their dtype; without gradients.
        addend: (N, O).
        relu: Whether to take the ReLU.
    """
    if isinstance(rows, SparseRows):
        assert factors is None
        return rows.times(weight, addend=addend, bias=bias, relu=relu)
    if rows.dim() == 2 and rows.dtype == weight.dtype:
        return products([rows], [weight], factors=factors, addend=addend, bias=bias, relu=relu)
    assert factors is None
    result = torch.matmul(rows, weight)
    result = result if bias is None else result + bias
    return torch.relu(result) if relu else result


def is_relu(activation: Any) -> bool:
    """Whether this is a ReLU that nobody watches."""
    if type(activation) is nn.ReLU:
        return not is_watched(activation)
    return activation is F.relu or activation is torch.relu


def is_elu(activation: Any) -> bool:
    """Whether this is the ELU with alpha = 1, not in place, that nobody watches."""
    if type(activation) is nn.ELU:
        return not is_watched(activation) and activation.alpha == 1.0 and not activation.inplace
    return activation is F.elu


def linear(graph: Any, layer: Any, x: Tensor, num_rows: int) -> Tensor:
    """Returns `layer(x[:num_rows])`, from the entries that are there where x is the same in every epoch and sparse."""
    if isinstance(graph, LayerBlock) and are_plain((layer,), x) and x.shape[1] == layer.in_features:
        is_static = graph.static_results.are_static((x,))
        rows = graph.static_results.rows_of(x, num_rows) if is_static else _first(x, num_rows)
        return product(rows, layer.weight.t(), layer.bias)
    result: Tensor = layer(_first(x, num_rows))
    return result


def _first(x: Tensor, num_rows: int) -> Tensor:
    """Backward, a view of all rows would be as many zeros, written over."""
    return x[:num_rows] if num_rows < len(x) else x


@unseen
def narrowed_rows(x: Tensor, of_all: nn.Linear, of_own: nn.Linear, num_own: int) -> tuple[Tensor, Tensor]:
    """Returns `of_all(x)`, with columns of zeros behind where that is faster, and `of_own(x[:num_own])`.

    A product of 47 columns takes MKL half as long again as one of 48, and sums of its rows a little longer.

    Args:
        x: (C, A), where `are_plain((of_all, of_own), x)` holds and `of_all` has no bias.
    """
    width = vector_columns(len(of_all.weight), x.device)
    both: tuple[Tensor, Tensor] = _NarrowedRows.apply(x, of_all.weight, of_own.weight, of_own.bias, num_own, width)
    return both


@unseen
def rows_and_first(x: Tensor, num_first: int) -> tuple[Tensor, Tensor]:
    """Returns `x` and `x[:num_first]`: gradients of both meet in one tensor."""
    if not x.requires_grad:  # nor must it seem to: its rows travel, and so would a gradient that nobody asks for
        return x, x[:num_first]
    both: tuple[Tensor, Tensor] = _RowsAndFirst.apply(x, num_first)
    return both


@unseen
def products(
    rows: list[Tensor],
    weights: list[Tensor],
    *,
    factors: Tensor | None = None,
    addend: Tensor | None = None,
    bias: Tensor | None = None,
    relu: bool = False,
) -> Tensor:
    """Returns `factors * Σ rows_k @ weights_k + bias + addend`, (N, O), or its ReLU; all of one dtype."""
    result: Tensor = torch.ops.dgl_hybrid.row_products(rows, weights, factors, addend, bias, relu)
    return result


def vector_columns(num_columns: int, device: torch.device) -> int:
    """Returns how many columns a product is better given, the rest zeros: whole vectors where that is cheap, on CPU."""
    missing = -num_columns % _COLUMNS
    return num_columns + missing if device.type == "cpu" and _COLUMNS * missing <= num_columns else num_columns


@unseen
def are_plain(layers: tuple[Any, ...], x: Tensor) -> bool:
    """Whether these layers do nothing but multiply rows of x by their weights, seen by nobody."""
    if x.dim() != 2 or torch.is_autocast_enabled(x.device.type):
        return False
    return all(type(layer) is nn.Linear and layer.weight.dtype == x.dtype and not is_watched(layer) for layer in layers)
