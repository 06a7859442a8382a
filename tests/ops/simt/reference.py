# SPDX-License-Identifier: Apache-2.0
"""The ops in float64, from their definitions; differentiable, so that autograd gives the gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.ops.simt.graphs import Rows


def messages(rows: Rows, x: Tensor | None, w: Tensor | None) -> Tensor:
    """(E, H, D) per entry; x alone: its sources' rows; w alone: (E, H) as D = 1."""
    weights = None if w is None else w[rows.edge_of_entry].unsqueeze(-1)
    if x is None:
        assert weights is not None
        return weights
    return x[rows.indices] if weights is None else x[rows.indices] * weights


def row_sum(rows: Rows, values: Tensor) -> Tensor:
    """Entries' values to rows."""
    out = torch.zeros(rows.num_rows, *values.shape[1:], dtype=values.dtype)
    return out.index_add(0, rows.row_of_entry, values)


def select(rows: Rows, values: Tensor, reduce: str) -> tuple[Tensor, Tensor]:
    """Max or min over each row's entries and the winner's edge row; NaN wins, then the first of equals."""
    out = torch.zeros(rows.num_rows, *values.shape[1:], dtype=values.dtype)
    arg = torch.full_like(out, -1, dtype=torch.long)
    edges = rows.edge_of_entry
    for row in range(rows.num_rows):
        begin, end = rows.indptr[row], rows.indptr[row + 1]
        for entry in range(int(begin), int(end)):
            value = values[entry]
            better = value > out[row] if reduce == "max" else value < out[row]
            wins = (arg[row] < 0) | better | (value.isnan() & ~out[row].isnan())
            out[row] = torch.where(wins, value, out[row])
            arg[row] = torch.where(wins, edges[entry], arg[row])
    return out, arg


def by_edge_row(rows: Rows, values: Tensor) -> Tensor:
    """Entries' values to edge rows."""
    return torch.empty_like(values).index_copy(0, rows.edge_of_entry, values)


def softmax(rows: Rows, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Per entry (E, H) to weights per entry and the log-sum-exp per row (0 for empty rows)."""
    index = rows.row_of_entry[:, None].expand_as(logits)
    lowest = torch.full((rows.num_rows, logits.shape[1]), -torch.inf, dtype=logits.dtype)
    maximum = lowest.scatter_reduce(0, index, logits.detach(), "amax")
    powers = (logits - maximum[rows.row_of_entry]).exp()
    sums = row_sum(rows, powers)
    empty = rows.indptr.diff() == 0
    lse = torch.where(empty[:, None], 0.0, maximum + sums.log())
    return powers / sums[rows.row_of_entry], lse


def gat(
    rows: Rows, x: Tensor, el: Tensor, er: Tensor, slope: float, factor: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Outputs and log-sum-exp; factor: (E, H) by edge row, what dropout multiplies the weights by."""
    logits = torch.nn.functional.leaky_relu(el[rows.indices] + er[rows.row_of_entry], slope)
    return _attend(rows, logits, x, factor)


def gatv2(
    rows: Rows, x_src: Tensor, x_dst: Tensor, attention: Tensor, slope: float, factor: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    inner = torch.nn.functional.leaky_relu(x_src[rows.indices] + x_dst[rows.row_of_entry], slope)
    return _attend(rows, (attention * inner).sum(-1), x_src, factor)


def _attend(rows: Rows, logits: Tensor, x: Tensor, factor: Tensor | None) -> tuple[Tensor, Tensor]:
    weights, lse = softmax(rows, logits)
    if factor is not None:
        weights = weights * factor[rows.edge_of_entry]
    return row_sum(rows, weights.unsqueeze(-1) * x[rows.indices]), lse
