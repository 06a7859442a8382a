# SPDX-License-Identifier: Apache-2.0
"""What both kinds of fused attention share around their kernels: heads in blocks, long rows from their parts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dgl_hybrid.ops.backend import PositiveSums
from dgl_hybrid.ops.cpu.attention_kernels import AttentionSpec, emit_statistics
from dgl_hybrid.ops.cpu.ir import Kind
from dgl_hybrid.ops.cpu.lanes import Block
from dgl_hybrid.ops.cpu.launch import KINDS, RowPlan, Rows, address, run
from dgl_hybrid.ops.cpu.memory import new_tensor
from dgl_hybrid.ops.cpu.reductions import Operand, select_rows, sum_rows
from dgl_hybrid.ops.cpu.tasks import cut_evenly
from dgl_hybrid.ops.edge_dropout import EdgeDropout

TOTAL_OF_NONE_IN_ROW = float("nan")
"""What the sum of exp counts as where all logits of a row are -inf: its softmax is 0 / 0, as in the reference."""

TOTAL_OF_NONE_IN_PART = 1.0
"""The same in a part of a long row, whose result is then 0 and its lse -inf: it weighs nothing beside parts that have
a finite logit, and if none has one, the merger divides 0 by 0."""


@dataclass(frozen=True)
class Attended:
    """What the forward finds for rows or parts of rows.

    Attributes:
        out: (N, H, D).
        largest: (N, H): the largest logit.
        total: (N, H): the sum of exp of what logits are above it.
        positive: For the backward of gat.
    """

    out: Tensor
    largest: Tensor
    total: Tensor
    positive: PositiveSums | None

    @classmethod
    def room(cls, num_rows: int, x: Tensor, *, with_positive: bool = False) -> Attended:
        """Room for the result of rows that gather rows like those of `x`."""

        def like_heads() -> Tensor:
            return new_tensor((num_rows, x.shape[1]), x.dtype)

        def like_x() -> Tensor:
            return new_tensor((num_rows, *x.shape[1:]), x.dtype)

        positive = PositiveSums(like_x(), like_heads()) if with_positive else None
        return cls(like_x(), like_heads(), like_heads(), positive)

    def lse(self) -> Tensor:
        """Rounded once: the backward takes exp of it, so its absolute error is a relative one of the whole row."""
        return self.total.double().log_().add_(self.largest).to(self.largest.dtype)


def put_together(plan: RowPlan, rows: Attended, parts: Attended | None) -> tuple[Tensor, Tensor, PositiveSums | None]:
    """`(out, lse, positive)` of all rows; those of long rows from their parts."""
    out, lse, positive = rows.out, rows.lse(), rows.positive
    if parts is None:
        return out, lse, positive
    merger, row_of_part, where = plan.merger, plan.long_row_of_part, plan.long_rows
    # float64 between the parts: an error of lse is a relative error of everything in the row.
    lse_parts = parts.total.double().log_().add_(parts.largest).unsqueeze(-1)
    row_largest, _ = select_rows(merger, Operand(lse_parts, by_edge=True), least=False)
    weights = lse_parts.sub_(row_largest[row_of_part]).exp_()
    row_total = sum_rows(merger, Operand(weights, by_edge=True))
    weights = weights.div_(row_total[row_of_part]).squeeze(-1).to(out.dtype)
    out[where] = sum_rows(merger, Operand(parts.out, weights=weights, by_edge=True))
    lse[where] = row_total.log_().add_(row_largest).squeeze(-1).to(out.dtype)
    if positive is not None and parts.positive is not None:
        positive.rows[where] = sum_rows(merger, Operand(parts.positive.rows, weights=weights, by_edge=True))
        shares = parts.positive.weights.mul_(weights).unsqueeze(-1)
        positive.weights[where] = sum_rows(merger, Operand(shares, by_edge=True)).squeeze(-1)
    return out, lse, positive


def head_blocks(num_heads: int, width: int, max_elements: int, max_heads: int) -> Iterator[tuple[int, Block]]:
    """Cuts heads into blocks of whole heads, of at most so many heads and elements, or of one head: (first, block)."""
    step = max(1, min(max_heads, max_elements // max(1, width)))
    for head in range(0, num_heads, step):
        yield head, Block(min(step, num_heads - head), width)


def spec_of(rows: Rows, index: Kind, dtype: torch.dtype, block: Block, dropout: EdgeDropout | None) -> AttentionSpec:
    """What a kernel for these heads is compiled for."""
    has_keys = dropout is not None and dropout.edge_keys is not None
    return AttentionSpec(KINDS[dtype], index, block, rows.has_edge_ids, dropout is not None, has_keys)


def fill_statistics(
    statistics: Tensor,
    head: int,
    block: Block,
    er: Tensor | None,
    lse: Tensor,
    grad: Tensor,
    out: Tensor,
    positive: PositiveSums | None = None,
    d_er: Tensor | None = None,
    slope: float = 1.0,
) -> None:
    """Writes er (if given), lse and delta of the block's heads, which begin with `head`, and d_er from `positive`.

    Args:
        statistics: (N, 3, B), or (N, 2, B) without er: the block's heads alone, or from its first one on.
        d_er: (N, H).
    """
    num_rows, num_heads, width = grad.shape
    positive_rows, positive_weights = positive or (None, None)
    first = head if statistics.shape[-1] == num_heads else 0
    arguments: list[int | float] = [address(er, head), address(lse, head)]
    arguments += [address(grad, head * width), address(out, head * width), address(statistics, first)]
    arguments += [num_heads * width, num_heads, statistics.shape[-1]]
    arguments += [address(positive_rows, head * width), address(positive_weights, head), address(d_er, head), slope]
    spec = (KINDS[grad.dtype], block, er is not None, d_er is not None)
    run(emit_statistics, spec, cut_evenly(num_rows), arguments)
