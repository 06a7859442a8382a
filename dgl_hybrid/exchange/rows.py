# SPDX-License-Identifier: Apache-2.0
"""The differentiable exchange: rows out along an `ExchangePlan`, gradients home along its adjoint.

Both directions are the same three steps: pack (gather into one buffer), one collective, unpack. They are each other's
adjoint, so derivatives of any order work.

    message to one peer      x[send_index]      │ fields side by side, one row for each row sent
    result                   held │ received    one tensor for each field

Nothing here is allocated anew in every epoch: messages lie in buffers of the communicator, and so do results, for as
long as anybody refers to them (`BufferPool`). On CPU the page faults of fresh memory would cost more than the exchange.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.profiler import record_function

from dgl_hybrid.exchange.approximate import ApproximateRows
from dgl_hybrid.exchange.communicator import Communicator
from dgl_hybrid.exchange.plan import ExchangePlan
from dgl_hybrid.ops.backend import choose_backend


class _ExtendRows(torch.autograd.Function):
    """(C, F) -> (C + R, F), for each field: the rows held here, followed by the received ones."""

    @staticmethod
    def forward(ctx: Any, plan: ExchangePlan, communicator: Communicator, *fields_CF: Tensor) -> tuple[Tensor, ...]:
        ctx.plan, ctx.communicator = plan, communicator
        dtype, device = fields_CF[0].dtype, fields_CF[0].device
        widths = [field.shape[1] for field in fields_CF]
        with record_function("dgl_hybrid::pack"):
            send_SF = communicator.send_buffer((plan.num_sent, sum(widths)), dtype, device)
            for field, columns in zip(fields_CF, send_SF.split(widths, dim=1), strict=True):
                torch.index_select(field, 0, plan.send_index, out=columns)
        rows = plan.num_rows + plan.num_received
        extended = tuple(communicator.buffers.take((rows, width), dtype, device) for width in widths)
        tails = [field[plan.num_rows :] for field in extended]
        if len(tails) == 1:
            communicator.exchange(send_SF, plan.send_counts, plan.recv_counts, layer=plan.layer, out=tails[0])
            parts: list[Tensor] = []
        else:
            parts = communicator.borrow(send_SF, plan.send_counts, plan.recv_counts, layer=plan.layer)
        with record_function("dgl_hybrid::unpack"):
            for begin, part in zip(plan.recv_offsets, parts, strict=False):
                for tail, columns in zip(tails, part.split(widths, dim=1), strict=True):
                    tail[begin : begin + len(part)].copy_(columns)
            for field, held in zip(extended, fields_CF, strict=True):
                field[: plan.num_rows].copy_(held)
        return extended

    @staticmethod
    def backward(ctx: Any, *grads_XF: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *_ReturnRows.apply(ctx.plan, ctx.communicator, *grads_XF)


class _ReturnRows(torch.autograd.Function):
    """(C + R, F) -> (C, F), for each field: gradients of received rows go home and are added to the rows sent."""

    @staticmethod
    def forward(ctx: Any, plan: ExchangePlan, communicator: Communicator, *grads_XF: Tensor) -> tuple[Tensor, ...]:
        ctx.plan, ctx.communicator = plan, communicator
        dtype, device = grads_XF[0].dtype, grads_XF[0].device
        widths = [grad.shape[1] for grad in grads_XF]
        with record_function("dgl_hybrid::pack"):
            send_RF = communicator.send_buffer((plan.num_received, sum(widths)), dtype, device)
            for grad, columns in zip(grads_XF, send_RF.split(widths, dim=1), strict=True):
                columns.copy_(grad[plan.num_rows :])
        parts = communicator.borrow(send_RF, plan.recv_counts, plan.send_counts, layer=plan.layer, backward=True)
        with record_function("dgl_hybrid::unpack"):
            totals = tuple(communicator.buffers.take((plan.num_rows, width), dtype, device) for width in widths)
            for total, grad in zip(totals, grads_XF, strict=True):
                total.copy_(grad[: plan.num_rows])
            for rows, part in zip(plan.send_index.split(plan.send_counts), parts, strict=True):
                for total, columns in zip(totals, part.split(widths, dim=1), strict=True):
                    # Added, not written: a row sent to several peers gets a gradient from each of them.
                    choose_backend(total).add_rows(total, rows, columns, None)
        return totals

    @staticmethod
    def backward(ctx: Any, *grads_CF: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *_ExtendRows.apply(ctx.plan, ctx.communicator, *grads_CF)


def extend_rows(
    fields: list[Tensor],
    plan: ExchangePlan,
    communicator: Communicator,
    *,
    approximation: ApproximateRows | None = None,
) -> list[Tensor]:
    """Appends the received rows to each field, all fields of one dtype in one message. Collective; differentiable.

    A rank runs the same collectives whether it has rows to exchange or not; only the kinds of the fields (dtype,
    whether a gradient flows) decide how many there are, and those are properties of the program, equal on all ranks.

    Args:
        fields: Each (C, ...) on the plan's device: the rows computed on this rank, highest level first.
        plan: This layer's plan.
        communicator: Whose ranks take part.
        approximation: What becomes of rows read while gradients are recorded; None exchanges them exactly.

    Returns:
        Each (C + R, ...), same dtype, contiguous: the rows given, then the received ones by owner rank, then by global
        id. The tensors are the caller's, as any others: their memory is used again only when nothing refers to it.

    Raises:
        ValueError: If a field does not have C rows.
    """
    for field in fields:
        if field.dim() == 0 or len(field) != plan.num_rows:
            raise ValueError(
                f"a source field must have {plan.num_rows} rows, those computed on rank {plan.rank} of "
                f"{plan.world_size} for layer {plan.layer} (got shape {tuple(field.shape)})"
            )
    if plan.is_idle:
        return fields
    groups: dict[tuple[str, bool], list[int]] = {}
    for position, field in enumerate(fields):
        groups.setdefault((str(field.dtype), field.requires_grad), []).append(position)
    extended: list[Tensor] = list(fields)
    for key in sorted(groups):
        positions = groups[key]
        flat = [_flatten(fields[position]) for position in positions]
        if approximation is not None and approximation.applies_to(flat):
            results = approximation.extend(flat, plan, communicator)
        else:
            results = _ExtendRows.apply(plan, communicator, *flat)
        for position, rows in zip(positions, results, strict=True):
            shape = (plan.num_rows + plan.num_received, *fields[position].shape[1:])
            extended[position] = (rows.bool() if fields[position].dtype == torch.bool else rows).reshape(shape)
    return extended


def _flatten(field: Tensor) -> Tensor:
    """(C, ...) to (C, F); truth values as uint8, for which there are gathers everywhere."""
    flat = field.reshape(len(field), math.prod(field.shape[1:]))
    return flat.to(torch.uint8) if flat.dtype == torch.bool else flat
