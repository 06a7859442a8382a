# SPDX-License-Identifier: Apache-2.0
"""The differentiable exchange: rows out along an `ExchangePlan`, gradients home along its adjoint.

Both directions are the same three steps: pack (gather into one buffer), one collective, unpack. They are each other's
adjoint, so derivatives of any order work.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.profiler import record_function

from dgl_hybrid.exchange.communicator import Communicator
from dgl_hybrid.exchange.plan import ExchangePlan


class _ExtendRows(torch.autograd.Function):
    """(C, F) -> (C + R, F): the rows held here, followed by the received ones."""

    @staticmethod
    def forward(ctx: Any, x_CF: Tensor, plan: ExchangePlan, communicator: Communicator) -> Tensor:
        ctx.plan, ctx.communicator = plan, communicator
        with record_function("dgl_hybrid::pack"):
            send_SF = x_CF.index_select(0, plan.send_index)
        received_RF = communicator.exchange(send_SF, plan.send_counts, plan.recv_counts, layer=plan.layer)
        with record_function("dgl_hybrid::unpack"):
            return torch.cat([x_CF, received_RF])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad_XF,) = grads
        return _ReturnRows.apply(grad_XF, ctx.plan, ctx.communicator), None, None


class _ReturnRows(torch.autograd.Function):
    """(C + R, F) -> (C, F): gradients of received rows go home and are added to the rows they came from."""

    @staticmethod
    def forward(ctx: Any, grad_XF: Tensor, plan: ExchangePlan, communicator: Communicator) -> Tensor:
        ctx.plan, ctx.communicator = plan, communicator
        grad_CF, grad_RF = grad_XF[: plan.num_rows], grad_XF[plan.num_rows :]
        returned_SF = communicator.exchange(
            grad_RF.contiguous(), plan.recv_counts, plan.send_counts, layer=plan.layer, backward=True
        )
        with record_function("dgl_hybrid::unpack"):
            # Added, not written: a row sent to several peers gets a gradient from each of them.
            return grad_CF.index_add(0, plan.send_index, returned_SF)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad_CF,) = grads
        return _ExtendRows.apply(grad_CF, ctx.plan, ctx.communicator), None, None


def extend_rows(fields: list[Tensor], plan: ExchangePlan, communicator: Communicator) -> list[Tensor]:
    """Appends the received rows to each field, all fields of one dtype in one message. Collective; differentiable.

    A rank runs the same collectives whether it has rows to exchange or not; only the kinds of the fields (dtype,
    whether a gradient flows) decide how many there are, and those are properties of the program, equal on all ranks.

    Args:
        fields: Each (C, ...) on the plan's device: the rows computed on this rank, highest level first.
        plan: This layer's plan.
        communicator: Whose ranks take part.

    Returns:
        Each (C + R, ...), same dtype: the rows given, then the received ones by owner rank, then by global id.

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
        flat = [fields[position].reshape(plan.num_rows, -1) for position in positions]
        joined = flat[0] if len(flat) == 1 else torch.cat(flat, dim=1)
        is_bool = joined.dtype == torch.bool
        rows = _ExtendRows.apply(joined.to(torch.uint8) if is_bool else joined, plan, communicator)
        parts = rows.split([part.shape[1] for part in flat], dim=1)
        for position, part in zip(positions, parts, strict=True):
            shape = (plan.num_rows + plan.num_received, *fields[position].shape[1:])
            # Contiguous, since DGL's kernels read plain row-major memory.
            extended[position] = (part.bool() if is_bool else part).reshape(shape).contiguous()
    return extended
